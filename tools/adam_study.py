"""Train a byte-level transformer with AdamW and compression, and write down the held-out loss of each run.

Each rank runs it, and all runs that the file does not have yet are made, one after another::

    torchrun --nproc-per-node 2 tools/adam_study.py study.jsonl --specs none,ctk:preconditioned=on --lr 0.001,0.002

A spec may be followed by ``@`` and the first beta, such as ``topk@0.5``; with ``preconditioned=on`` it is the momentum
of SGD, as a running mean, as in Adam.
"""

from __future__ import annotations

import argparse
import itertools
import json
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn.parallel import DistributedDataParallel

from hvd_compress import parse
from hvd_compress.distributed import Compression
from hvd_compress.tools.compare.tasks.torch_transformer import transformer
from hvd_compress.tools.compare.training import Setting, Training
from hvd_compress.tools.terminal import split_specs


class Run(NamedTuple):
    """A run: its spec, the first beta, the learning rate, the seed, and what all runs have in common."""

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
        yield Run(spec, float(beta1 or (0.9 if spec == "none" else 0.0)), lr, seed, ranks, options)


def train(run: Run) -> dict[str, Any]:
    """Train, and return the facts of the run."""
    method, options = parse(run.spec), {**run.options, "beta1": str(run.beta1)}
    setting = Setting(run.seed, dist.get_rank(), run.ranks, run.lr, True, "", options, method.preconditioned)
    torch.manual_seed(run.seed)
    training = transformer(setting)
    model, optimizer = DistributedDataParallel(training.model), training.optimizer
    compression = Compression.parse(run.spec).register(model, optimizer=optimizer)
    if method.preconditioned:  # after it has been registered without momentum, as it must be
        optimizer.param_groups[0].update(momentum=run.beta1, dampening=run.beta1)
    steps, begin, curve = sum(1 for _ in training.batches(0)), time.perf_counter(), []
    for step, batch in enumerate(training.batches(0), start=1):
        for group in optimizer.param_groups:
            group["lr"] = run.lr * training.schedule(step / steps) if training.schedule else run.lr
        optimizer.zero_grad()
        training.loss(model, batch).backward()
        if training.clip is not None:
            torch.nn.utils.clip_grad_norm_(model.parameters(), training.clip)
        optimizer.step()
        if step % 100 == 0 or step == steps:
            curve.append((step, evaluated(training)))
    return {
        **run._asdict(),
        "parameters": sum(p.numel() for p in model.parameters()),
        "curve": curve,
        "ratio": compression.stats().ratio,
        "seconds": time.perf_counter() - begin,
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
    parser.add_argument("--seeds", type=lambda text: list(map(int, text.split(","))), default=[0])
    parser.add_argument(
        "--set", action="append", default=[], help="option of the task 'transformer', such as steps=1000"
    )
    args = parser.parse_args()
    dist.init_process_group("gloo")
    done = [json.loads(line) for line in args.output.read_text().splitlines()] if args.output.exists() else []
    for run in runs(args, dist.get_world_size()):
        if any(run == Run(*(one[key] for key in Run._fields)) for one in done):
            continue
        facts = train(run)
        if dist.get_rank() == 0:
            with args.output.open("a") as file:
                file.write(json.dumps(facts) + "\n")
            print(f"{run.spec}@{run.beta1} lr {run.lr} seed {run.seed}: {facts['curve'][-1][1]:.4f}", flush=True)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
