"""Every method on real Horovod gives what the simulator gives; where that takes long, one of each kind."""

from __future__ import annotations

from typing import Any

import horovod.torch as hvd
import numpy as np
import pytest
import torch
from catalogue import BETWEEN_NODES, COMPOSED, EACH_KIND, WARMING_UP, agree
from parallel.pytorch.training import NODES, SIZE, assert_ranks_equal, everyone
from torch import Tensor
from worlds import Arr

from hvd_compress import LocalWorld
from hvd_compress.torch import Compression

SHAPES = {"first": (48, 40), "second": (8, 6, 5, 5), "bias": (10,)}


def gradients(step: int) -> dict[str, list[Arr]]:
    """One gradient per rank for each parameter."""
    rng = np.random.default_rng(step)
    ranks = range(hvd.size())
    return {name: [rng.standard_normal(shape).astype(np.float32) for _ in ranks] for name, shape in SHAPES.items()}


def mine(grads: dict[str, list[Arr]]) -> dict[str, Arr]:
    """Those of this rank."""
    return {name: arrays[hvd.rank()] for name, arrays in grads.items()}


class Twin:
    """An optimizer whose gradients are what we want them to be.

    Args:
        spec: Of its compression.
    """

    def __init__(self, spec: str) -> None:
        self.compression = Compression.parse(COMPOSED.get(spec, spec))
        self.parameters = {name: torch.nn.Parameter(torch.zeros(shape)) for name, shape in SHAPES.items()}
        self.optimizer = hvd.DistributedOptimizer(
            torch.optim.SGD(self.parameters.values(), lr=0.1),
            named_parameters=self.parameters.items(),
            compression=self.compression,
        )

    def step(self, grads: dict[str, Arr]) -> dict[str, Tensor]:
        """The means of the gradients of all ranks."""
        self.optimizer.zero_grad()
        losses = [(p * torch.tensor(grads[name])).sum() for name, p in self.parameters.items()]
        torch.stack(losses).sum().backward()  # type: ignore[no-untyped-call]
        self.optimizer.synchronize()
        return {name: p.grad.clone() for name, p in self.parameters.items() if p.grad is not None}

    def state(self) -> dict[str, Any]:
        """All leaves of the compressor's state, as copies."""
        sessions = self.compression.state_dict()["sessions"].values()
        buckets = [bucket for session in sessions for bucket in session["buckets"].items()]
        return {f"{key}.{path}": torch.as_tensor(leaf) for key, leaves in buckets for path, leaf in leaves.items()}


def spoilt(step: int) -> dict[str, list[Arr]]:
    """Gradients of which one rank has one bad coordinate, each time another one."""
    grads = gradients(100 + step)
    name, bad = [("first", np.inf), ("bias", np.nan), ("second", -np.inf)][step % 3]
    grads[name][1].flat[7] = bad
    return grads


CHOSEN = BETWEEN_NODES[-3:] if NODES > 1 else EACH_KIND if SIZE > 2 else [*EACH_KIND, *COMPOSED, *WARMING_UP[:2]]


@pytest.mark.parametrize("spec", CHOSEN)
def test_horovod_gives_what_the_simulator_gives(spec: str) -> None:
    """Also after steps with gradients that are not finite: all ranks see that, and nothing else comes of it.

    The twin with bad steps before each good one gives the same bits as the one without.
    """
    world, calm, disturbed = (
        LocalWorld(COMPOSED.get(spec, spec), SIZE, local_size=SIZE // NODES),
        Twin(spec),
        Twin(spec),
    )
    for step in range(3):
        before, bad = disturbed.state(), spoilt(step)
        seen = {name: bool(g.isfinite().all()) for name, g in disturbed.step(mine(bad)).items()}
        assert everyone(seen) == [{name: np.isfinite(bad[name]).all() for name in SHAPES}] * hvd.size()
        after = disturbed.state()
        assert step == 0 or before.keys() == after.keys()
        for path, leaf in before.items():
            assert torch.equal(leaf, after[path]), path

        grads = gradients(step)
        expected, means, again = world.step(grads), calm.step(mine(grads)), disturbed.step(mine(grads))
        for name, mean in means.items():
            if "delay" not in spec:
                assert_ranks_equal(mean)
            assert agree(spec, mean.numpy(), expected[name][hvd.rank()]), name
            assert torch.equal(again[name], mean), name


@pytest.mark.parametrize("spec", ["topk:ratio=1", "topk:ratio=0.1,start=9", "qsgd:bits=8"])
def test_what_is_finite_is_right_beside_what_is_not(spec: str) -> None:
    twin = Twin(f"{spec},min_size=0")
    twin.step(mine(gradients(0)))
    grads = gradients(1)
    grads["first"][1].flat[7] = np.inf
    means = twin.step(mine(grads))
    assert means["first"].isnan().all()
    np.testing.assert_allclose(means["second"], np.mean(grads["second"], axis=0), atol=1e-6 if "topk" in spec else 0.03)
