"""Train a byte-level transformer with AdamW and compression, and write down the held-out loss of each run.

Each rank runs it, and all runs that the file does not have yet are made, one after another::

    torchrun --nproc-per-node 2 tools/adam_study.py study.jsonl --specs none,ctk:preconditioned=on --lr 0.001,0.002

A spec may be followed by ``@`` and the first beta, such as ``topk@0.5``; with ``preconditioned=on`` it is the momentum
of SGD, as a running mean, as in Adam. Besides the specs of the package, there are the optimizers of `adam_peers`.
"""

from __future__ import annotations

import argparse
import itertools
import json
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from adam_peers import PEERS, Settings
from hvd_compress import parse
from hvd_compress.distributed import Compression
from hvd_compress.lab import Setting, Training
from hvd_compress.tools.compare.tasks import find
from hvd_compress.tools.terminal import split_specs


class Run(NamedTuple):
    """A run: its spec, the first beta, the learning rate, the seed, and what all runs have in common."""

    task: str
    spec: str
    beta1: float
    lr: float
    seed: int
    ranks: int
    options: dict[str, str]


def runs(args: argparse.Namespace, ranks: int) -> Iterator[Run]:
    """Yield the runs that the command asks for."""
    options = dict(one.split("=") for one in args.set)
    for seed, named, lr in itertools.product(args.seeds, split_specs(args.specs), args.lr):
        spec, _, beta1 = named.partition("@")
        yield Run(
            args.task, spec, float(beta1 or (0.9 if spec == "none" or spec in PEERS else 0.0)), lr, seed, ranks, options
        )


class Trainer(NamedTuple):
    """How a model is trained: the model that is called, what applies its gradients with a learning rate, the ratio."""

    model: nn.Module
    step: Callable[[float], None]
    ratio: Callable[[], float]


def compressed(run: Run, training: Training) -> Trainer:
    """Return the trainer of a method of the package, over DistributedDataParallel."""
    model, optimizer = DistributedDataParallel(training.model), training.optimizer
    compression = Compression.parse(run.spec).register(model, optimizer=optimizer)

    def step(lr: float) -> None:
        for group in optimizer.param_groups:
            group["lr"] = lr
        optimizer.step()

    return Trainer(model, step, lambda: compression.stats().ratio)


def published(run: Run, training: Training, steps: int) -> Trainer:
    """Return the trainer of an optimizer of `adam_peers`."""
    [group] = training.optimizer.param_groups
    beta1, beta2 = group["betas"]
    peer = PEERS[run.spec](training.model, Settings(group["weight_decay"], beta1, beta2, steps))
    return Trainer(training.model, peer.step, lambda: peer.ratio)


def train(run: Run, device: str = "cpu", data: str = "") -> dict[str, Any]:
    """Train, and return the facts of the run."""
    preconditioned = run.spec not in PEERS and parse(run.spec).preconditioned
    options = {**run.options, "beta1": str(run.beta1)}
    setting = Setting(run.seed, dist.get_rank(), run.ranks, run.lr, True, data, options, preconditioned)
    torch.manual_seed(run.seed)
    training = find(run.task, "ddp")(setting)
    training.model.to(device)
    steps = sum(1 for _ in training.batches(0))
    trainer = published(run, training, steps) if run.spec in PEERS else compressed(run, training)
    begin, curve = time.perf_counter(), []
    for step, batch in enumerate(training.batches(0), start=1):
        training.model.zero_grad()
        training.loss(trainer.model, batch).backward()
        if training.clip is not None:
            torch.nn.utils.clip_grad_norm_(training.model.parameters(), training.clip)
        trainer.step(run.lr * training.schedule(step / steps) if training.schedule else run.lr)
        if step % training.every == 0 or step == steps:
            curve.append((step, evaluated(training)))
    return {
        **run._asdict(),
        "parameters": sum(p.numel() for p in training.model.parameters()),
        "curve": curve,
        "ratio": trainer.ratio(),
        "seconds": time.perf_counter() - begin,
        "device": torch.cuda.get_device_name() if device == "cuda" else device,
    }


def evaluated(training: Training) -> float:
    """Return the mean held-out loss of all ranks."""
    training.model.eval()
    with torch.no_grad():
        total: Tensor = torch.tensor(training.evaluate(training.model))
    training.model.train()
    dist.all_reduce(total)
    return float(total) / dist.get_world_size()


def main() -> None:
    """Make all runs that are missing."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("output", type=Path, help="file with a line of JSON for each run")
    parser.add_argument("--specs", required=True, help="methods, separated by commas")
    parser.add_argument("--lr", type=lambda text: list(map(float, text.split(","))), default=[0.002])
    parser.add_argument("--task", default="transformer", help="as of 'hvd-compress compare'; default: transformer")
    parser.add_argument("--data", default="", help="file with the text; default: that of the task")
    parser.add_argument("--device", default="cpu", help="'cuda' for a GPU, which all ranks share; default: cpu")
    parser.add_argument("--seeds", type=lambda text: list(map(int, text.split(","))), default=[0])
    parser.add_argument("--set", action="append", default=[], help="option of the task, such as steps=1000")
    args = parser.parse_args()
    dist.init_process_group("gloo")
    done = [json.loads(line) for line in args.output.read_text().splitlines()] if args.output.exists() else []
    for run in runs(args, dist.get_world_size()):
        if any(run == Run(*(one[key] for key in Run._fields)) for one in done):
            continue
        facts = train(run, args.device, args.data)
        if dist.get_rank() == 0:
            with args.output.open("a") as file:
                file.write(json.dumps(facts) + "\n")
            print(f"{run.spec}@{run.beta1} lr {run.lr} seed {run.seed}: {facts['curve'][-1][1]:.4f}", flush=True)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
