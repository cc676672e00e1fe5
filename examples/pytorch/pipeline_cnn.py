"""Train a CNN whose stages are on different ranks on Fashion-MNIST, with what goes between them compressed.

The data are the four files of https://github.com/zalandoresearch/fashion-mnist; on Debian: apt-get install
dataset-fashion-mnist. Run; twice as many ranks as stages train two replicas of the model::

    mpirun --bind-to none -n 4 python -m mpi4py examples/pytorch/pipeline_cnn.py \
        --forward topk:ratio=0.1 --backward qsgd:bits=8
    horovodrun --gloo -np 4 python examples/pytorch/pipeline_cnn.py --link horovod --stages 2 --compression topk
"""

import argparse
import json
import sys
import time
from statistics import median
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from stages import cut, cut_thin
from torch import Tensor, nn

from hvd_compress.pipeline.torch import CompressedBoundary, Pipeline
from hvd_compress.tools.compare.tasks.data import fashion

parser = argparse.ArgumentParser()
parser.add_argument("--forward", default="none", metavar="SPEC", help="operator of activations; default: %(default)s")
parser.add_argument("--backward", default="none", metavar="SPEC", help="operator of gradients; default: %(default)s")
parser.add_argument("--memory", default="none", help="none, ef, ef21, or aqsgd:samples=N; default: %(default)s")
parser.add_argument("--uncompressed-inference", action="store_true", help="compress activations in training alone")
parser.add_argument("--compression", default="none", metavar="SPEC", help="between replicas; default: %(default)s")
parser.add_argument("--link", default="mpi", choices=["mpi", "horovod"], help="default: %(default)s")
parser.add_argument("--model", default="resnet", choices=["resnet", "thin"], help="see stages.py; default: resnet")
parser.add_argument("--stages", default=4, type=int, choices=[1, 2, 4], help="of the model; default: %(default)s")
parser.add_argument("--microbatches", default=4, type=int, help="of a step; default: %(default)s")
parser.add_argument("--batch", default=128, type=int, help="images of a replica in a step; default: %(default)s")
parser.add_argument("--width", default=16, type=int, help="channels of the first stage; default: %(default)s")
parser.add_argument("--lr", default=0.05, type=float, help="learning rate at first; default: %(default)s")
parser.add_argument("--epochs", default=5, type=int, help="default: %(default)s")
parser.add_argument("--train", type=int, metavar="N", help="how many images to train on; default: all")
parser.add_argument("--test", type=int, metavar="N", help="how many images to test on; default: all")
parser.add_argument("--data", default="", metavar="FOLDER", help="default: where Debian's package puts it")
parser.add_argument("--seed", default=0, type=int, help="default: %(default)s")
parser.add_argument("--report", metavar="FILE", help="also append what is printed to this file, as lines of JSON")
args = parser.parse_args()

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
stages = (cut if args.model == "resnet" else cut_thin)(args.width, args.stages)
boundary = CompressedBoundary(args.forward, args.backward, args.memory, not args.uncompressed_inference)
loss = nn.functional.cross_entropy
pipeline = Pipeline(stages, loss, boundary=boundary, microbatches=args.microbatches, link=args.link)
optimizer = torch.optim.SGD(pipeline.module.parameters(), lr=args.lr, momentum=0.9, weight_decay=5e-4)
if pipeline.replicas is not None:
    from hvd_compress.torch import Compression

    compression = Compression.parse(args.compression)
    optimizer = hvd.DistributedOptimizer(
        optimizer,
        named_parameters=[(f"stage{pipeline.stage}.{name}", p) for name, p in pipeline.module.named_parameters()],
        compression=compression,
        process_set=pipeline.replicas,
        backward_passes_per_step=args.microbatches,
    )

data = fashion(args.data)
replicas, numbers, tests = ranks // args.stages, np.arange(len(data.train))[: args.train], len(data.test[: args.test])
steps, mine = len(numbers) // replicas // args.batch, numbers[pipeline.replica :: replicas]
if steps == 0:
    sys.exit(f"{len(numbers)} images are too few for {replicas} minibatches of {args.batch}: take a smaller --batch")
schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, args.epochs * steps)


def tell(**facts: Any) -> None:
    """Print facts on the last stage of the first replica, which has the losses."""
    if pipeline.is_last and pipeline.replica == 0:
        print(*(f"{name}={value}" for name, value in facts.items()), flush=True)
        if args.report:
            with open(args.report, "a") as report:
                report.write(json.dumps(facts) + "\n")


def given(images: npt.NDArray[np.uint8]) -> Tensor | None:
    """Return the input of the first stage for some images."""
    return torch.from_numpy(data.scaled(images)).unsqueeze(1) if pipeline.is_first else None


def traffic() -> npt.NDArray[np.int64]:
    """Return bytes before compression and bytes sent at the boundary to the next stage, a row per direction."""
    ahead = pipeline.stats().get(f"{pipeline.stage}-{pipeline.stage + 1}", ())
    return np.array([(way.plain_bytes, way.bytes_sent) for way in ahead] or np.zeros((2, 2), np.int64))


def accuracy() -> float:
    """Share of the test images that the last stage finds the classes of."""
    right = 0
    for part in np.array_split(np.arange(tests), max(1, tests // args.batch)):  # a part too small cannot be cut
        scores = pipeline.evaluate(given(data.test[part]))
        right += 0 if scores is None else int((scores.argmax(1).numpy() == data.test_labels[part]).sum())
    return right / tests


rng = np.random.default_rng(args.seed)  # the same everywhere: one stage takes images, and another their labels
seconds: list[float] = []
for epoch in range(args.epochs):
    losses = []
    for batch in rng.permutation(mine)[: steps * args.batch].reshape(steps, args.batch):
        begin = time.perf_counter()
        optimizer.zero_grad()
        ids = batch if args.memory.startswith("aqsgd") else None
        losses.append(pipeline.step(given(data.train[batch]), torch.from_numpy(data.train_labels[batch]), ids) or 0.0)
        optimizer.step()
        schedule.step()
        seconds.append(time.perf_counter() - begin)
    reached = accuracy()
    tell(epoch=epoch + 1, loss=round(sum(losses) / steps, 4), accuracy=round(reached, 4))

# What ranks gather comes in their order: first the first replica, whose last stage has no boundary ahead.
ways = np.array(gather(traffic()))[: args.stages - 1] / len(seconds)
for place, directions in enumerate(ways):
    for direction, (plain, sent) in zip(("forward", "backward"), directions, strict=True):
        tell(boundary=f"{place}-{place + 1}", direction=direction, bytes=round(sent), ratio=round(plain / sent, 2))
if pipeline.replicas is not None:
    tell(gradient_ratio=round(compression.stats().ratio, 2))
sent, typical = ways[..., 1].sum(), median(seconds[5:] or seconds)
tell(accuracy=round(reached, 4), steps=len(seconds), bytes_per_step=round(sent), step_seconds=round(typical, 4))
