"""Every method on real Horovod gives what the simulator gives; where that takes long, one of each kind."""

from __future__ import annotations

import horovod.torch as hvd
import numpy as np
import pytest
import torch
from catalogue import COMPOSED, EACH_KIND, SPECS, agree
from parallel.pytorch.training import SLOW_HERE, assert_ranks_equal
from worlds import Arr

from hvd_compress import LocalWorld
from hvd_compress.methods import REGISTRY
from hvd_compress.torch import Compression

SHAPES = {"first": (48, 40), "second": (8, 6, 5, 5), "bias": (10,)}


def gradients(step: int) -> dict[str, list[Arr]]:
    """One gradient per rank for each parameter."""
    rng = np.random.default_rng(step)
    ranks = range(hvd.size())
    return {name: [rng.standard_normal(shape).astype(np.float32) for _ in ranks] for name, shape in SHAPES.items()}


def test_all_methods_are_under_test() -> None:
    assert {spec.partition(":")[0] for spec in SPECS} == set(REGISTRY)


@pytest.mark.parametrize("spec", EACH_KIND if SLOW_HERE else [*SPECS, *COMPOSED])
def test_horovod_gives_what_the_simulator_gives(spec: str) -> None:
    world = LocalWorld(COMPOSED.get(spec, spec), hvd.size())
    compression = Compression.parse(COMPOSED.get(spec, spec))
    parameters = {name: torch.nn.Parameter(torch.zeros(shape)) for name, shape in SHAPES.items()}
    optimizer = hvd.DistributedOptimizer(
        torch.optim.SGD(parameters.values(), lr=0.1), named_parameters=parameters.items(), compression=compression
    )
    for step in range(3):
        grads = gradients(step)
        expected = world.step(grads)
        optimizer.zero_grad()
        # The gradient of this loss is what we want it to be.
        losses = [(p * torch.tensor(grads[name][hvd.rank()])).sum() for name, p in parameters.items()]
        torch.stack(losses).sum().backward()  # type: ignore[no-untyped-call]
        optimizer.synchronize()
        for name, p in parameters.items():
            assert p.grad is not None
            if "delay" not in spec:
                assert_ranks_equal(p.grad)
            assert agree(spec, p.grad.numpy(), expected[name][hvd.rank()]), name
        with optimizer.skip_synchronize():
            optimizer.step()
