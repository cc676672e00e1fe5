"""Train a small GPT whose stages are on different ranks on any text, with what goes between them compressed.

Run; twice as many ranks as stages train two replicas of the model::

    mpirun --bind-to none -n 4 python -m mpi4py examples/pytorch/pipeline_gpt.py text.txt --forward minmax:bits=4
    horovodrun --gloo -np 4 python examples/pytorch/pipeline_gpt.py text.txt --link horovod --backward qsgd:bits=8
"""

import argparse
import math
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from stages import cut_gpt
from torch import Tensor, nn

from hvd_compress.pipeline.torch import CompressedBoundary, Pipeline

parser = argparse.ArgumentParser()
parser.add_argument("text", type=Path, help="a file, taken as bytes; its last tenth is what the model is tested on")
parser.add_argument("--forward", default="none", metavar="SPEC", help="operator of activations; default: %(default)s")
parser.add_argument("--backward", default="none", metavar="SPEC", help="operator of gradients; default: %(default)s")
parser.add_argument("--memory", default="none", help="none, ef, ef21, or aqsgd:samples=N; default: %(default)s")
parser.add_argument("--uncompressed-inference", action="store_true", help="compress activations in training alone")
parser.add_argument("--compression", default="none", metavar="SPEC", help="between replicas; default: %(default)s")
parser.add_argument("--link", default="mpi", choices=["mpi", "horovod"], help="default: %(default)s")
parser.add_argument("--stages", default=4, type=int, help="of the model; default: %(default)s")
parser.add_argument("--microbatches", default=4, type=int, help="of a step; default: %(default)s")
parser.add_argument("--batch", default=16, type=int, help="pieces of text in a step; default: %(default)s")
parser.add_argument("--length", default=64, type=int, help="bytes of a piece; default: %(default)s")
parser.add_argument("--layers", default=4, type=int, help="as many for each stage; default: %(default)s")
parser.add_argument("--width", default=128, type=int, help="of what goes between layers; default: %(default)s")
parser.add_argument("--heads", default=4, type=int, help="of attention; default: %(default)s")
parser.add_argument("--lr", default=1e-3, type=float, help="learning rate; default: %(default)s")
parser.add_argument("--steps", default=500, type=int, help="default: %(default)s")
parser.add_argument("--seed", default=0, type=int, help="default: %(default)s")
args = parser.parse_args()
if args.layers % args.stages:
    parser.error(f"{args.layers} layers cannot be dealt out to {args.stages} stages")


def loss(scores: Tensor, following: Tensor) -> Tensor:
    """Mean over all places in all pieces."""
    return nn.functional.cross_entropy(scores.flatten(0, 1), following.flatten())


torch.set_num_threads(1)
if args.link == "mpi":
    from mpi4py import MPI

    ranks, gather = MPI.COMM_WORLD.size, MPI.COMM_WORLD.allgather
if args.link == "horovod" or ranks > args.stages:  # Horovod is what averages the gradients of replicas
    import horovod.torch as hvd

    hvd.init(process_sets="dynamic")
    ranks, gather = hvd.size(), hvd.allgather_object

# All ranks make the whole model from one seed and keep their stage: so replicas begin alike.
torch.manual_seed(args.seed)
stages = cut_gpt(args.width, args.heads, args.layers, args.length, args.stages)
boundary = CompressedBoundary(args.forward, args.backward, args.memory, not args.uncompressed_inference)
pipeline = Pipeline(stages, loss, boundary=boundary, microbatches=args.microbatches, link=args.link)
optimizer = torch.optim.AdamW(pipeline.module.parameters(), lr=args.lr)
if pipeline.replicas is not None:
    from hvd_compress.torch import Compression

    optimizer = hvd.DistributedOptimizer(
        optimizer,
        named_parameters=[(f"stage{pipeline.stage}.{name}", p) for name, p in pipeline.module.named_parameters()],
        compression=Compression.parse(args.compression),
        process_set=pipeline.replicas,
        backward_passes_per_step=args.microbatches,
    )


def pieces(text: npt.NDArray[np.uint8]) -> Tensor:
    """Split a text into consecutive pieces; each has one more byte than the model reads: the last target."""
    return torch.tensor(np.lib.stride_tricks.sliding_window_view(text, args.length + 1)[:: args.length].astype(int))


def minibatches(count: int) -> Iterator[npt.NDArray[np.int64]]:
    """Numbers of pieces: each replica goes again and again through those of its own, in one order on all stages."""
    rng, replicas = np.random.default_rng(args.seed), ranks // args.stages
    mine = np.arange(pipeline.replica, count // replicas * replicas, replicas)
    if len(mine) < args.batch:
        sys.exit(f"{args.text} has {count} pieces, too few for {replicas} minibatches of {args.batch}")
    while True:
        yield from rng.permutation(mine)[: len(mine) // args.batch * args.batch].reshape(-1, args.batch)


def perplexity(test: Tensor) -> float:
    """Return the loss per byte; only the last stage knows it."""
    total = 0.0
    for part in test.tensor_split(max(1, len(test) // args.batch)):  # a part too small cannot be cut
        scores = pipeline.evaluate(part[:, :-1] if pipeline.is_first else None)
        total += 0.0 if scores is None else loss(scores, part[:, 1:]).item() * len(part)
    return math.exp(total / len(test))


def tell(**facts: Any) -> None:
    """Print facts on the last stage of the first replica, which has the losses."""
    if pipeline.is_last and pipeline.replica == 0:
        print(*(f"{name}={value}" for name, value in facts.items()), flush=True)


text = np.fromfile(args.text, np.uint8)
split = len(text) - len(text) // 10
train, seconds = pieces(text[:split]), []
tell(samples=len(train))
for step, batch in zip(range(1, args.steps + 1), minibatches(len(train)), strict=False):
    begin = time.perf_counter()
    optimizer.zero_grad()
    reached = pipeline.step(
        train[batch, :-1] if pipeline.is_first else None,
        train[batch, 1:] if pipeline.is_last else None,
        batch if args.memory.startswith("aqsgd") and pipeline.is_first else None,
    )
    optimizer.step()
    seconds.append(time.perf_counter() - begin)
    if step % 50 == 0:
        tell(step=step, loss=round(reached or 0.0, 4))

everyone, total = gather(pipeline.stats()), 0  # in the order of ranks: the stages of the first replica come first
for place in range(args.stages - 1):
    name = f"{place}-{place + 1}"
    for direction, way in everyone[place][name]._asdict().items():
        total += way.bytes_sent
        tell(boundary=name, direction=direction, bytes=round(way.bytes_sent / args.steps), ratio=round(way.ratio, 2))
typical, reached = median(seconds[5:] or seconds), perplexity(pieces(text[split:]))
tell(
    perplexity=round(reached, 2),
    steps=args.steps,
    bytes_per_step=round(total / args.steps),
    step_seconds=round(typical, 4),
)
