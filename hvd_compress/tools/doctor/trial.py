"""One step with compression on two ranks, whose result is known; started by `trials` under horovodrun."""

from __future__ import annotations

import importlib
import json
import sys
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np

from hvd_compress.tools.doctor.probe import keras_version

MARK = "hvd-compress tried: "
"""Begins the line that counts; horovodrun puts the rank before it."""

COLUMN = np.arange(1.0, 4097.0, dtype=np.float32)[:, None]
"""Rank r has r + 1 times this as its gradient. Half of it is sent: every rank's larger half."""


def torch() -> Any:
    """Make a step of hvd.DistributedOptimizer."""
    import horovod.torch as hvd
    import torch

    from hvd_compress.torch import Compression

    hvd.init()
    weight = torch.nn.Parameter(torch.zeros(COLUMN.shape))
    sgd = torch.optim.SGD([weight], lr=1.0)
    compression = Compression.topk(ratio=0.5)
    optimizer = hvd.DistributedOptimizer(sgd, named_parameters=[("weight", weight)], compression=compression)
    (weight * torch.from_numpy(COLUMN) * (hvd.rank() + 1)).sum().backward()
    optimizer.step()
    check("DistributedOptimizer", weight.detach().numpy(), hvd.size())
    return hvd


def ddp() -> Any:
    """Make a step of DistributedDataParallel."""
    import torch
    import torch.distributed as dist

    from hvd_compress.distributed import Compression

    dist.init_process_group("gloo")
    model = torch.nn.Linear(len(COLUMN), 1, bias=False)
    torch.nn.init.zeros_(model.weight)
    wrapped = torch.nn.parallel.DistributedDataParallel(model)
    Compression.topk(ratio=0.5, min_size=0, vectors=True).register(wrapped)
    wrapped(torch.from_numpy(COLUMN.T) * (dist.get_rank() + 1)).sum().backward()
    torch.optim.SGD(model.parameters(), lr=1.0).step()
    check("DistributedDataParallel", model.weight.detach().numpy().T, dist.get_world_size())
    return dist


def tensorflow() -> Any:
    """Make a step of hvd.DistributedGradientTape, and one of fit."""
    import horovod.tensorflow as hvd
    import tensorflow as tf

    from hvd_compress.tensorflow import Compression

    hvd.init()
    weight = tf.Variable(tf.zeros(COLUMN.shape))

    @tf.function  # type: ignore[untyped-decorator]
    def gradient() -> Any:
        with hvd.DistributedGradientTape(tf.GradientTape(), compression=Compression.topk(ratio=0.5)) as tape:
            loss = tf.reduce_sum(weight * COLUMN) * float(hvd.rank() + 1)
        return tape.gradient(loss, [weight])[0]

    check("DistributedGradientTape", -gradient().numpy(), hvd.size())
    check("fit", _fit(tf, Compression.topk(ratio=0.5), hvd.rank()), hvd.size())
    return hvd


def _fit(tf: Any, compression: Any, rank: int) -> Any:
    adapter = "horovod.keras" if keras_version(tf).startswith("2") else "hvd_compress.keras"
    wrapper = importlib.import_module(adapter).DistributedOptimizer
    optimizer = wrapper(tf.keras.optimizers.SGD(1.0), compression=compression)
    model = tf.keras.Sequential([tf.keras.layers.Dense(1, use_bias=False, kernel_initializer="zeros")])
    model.build((None, len(COLUMN)))
    model.compile(optimizer, loss=lambda _, output: output)
    model.fit(COLUMN.T * (rank + 1), np.zeros((1, 1)), verbose=0)
    return model.get_weights()[0]


def check(what: str, weight: Any, size: int) -> None:
    """Compare the weight after a step of learning rate 1, from 0, with the exact one."""
    larger = np.arange(len(COLUMN)) >= len(COLUMN) // 2
    expected = -COLUMN * larger[:, None] * (size + 1) / 2
    if not np.array_equal(weight, expected):
        wrong = int(np.sum(weight != expected))
        raise SystemExit(f"{what}: {wrong} of {expected.size} coordinates are not the mean of the ranks' gradients")


PROGRAMS: dict[str, Callable[[], Any]] = {"torch": torch, "tensorflow": tensorflow, "ddp": ddp}


def main(framework: str) -> None:
    """Make the step; rank 0 says how it went."""
    library = PROGRAMS[framework]()
    by_ddp = framework == "ddp"
    rank, size = (library.get_rank(), library.get_world_size()) if by_ddp else (library.rank(), library.size())
    if rank == 0:
        controller = "Gloo" if by_ddp else " ".join(_enabled(library))
        print(f"{MARK}{json.dumps({'ranks': size, 'controller': controller})}", flush=True)


def _enabled(hvd: Any) -> Iterator[str]:
    for title in ("Gloo", "MPI"):
        if getattr(hvd, f"{title.lower()}_enabled")():
            yield title


if __name__ == "__main__":
    main(*sys.argv[1:])
