"""What methods are said to cost is what their definitions say, and what the simulator counts."""

from __future__ import annotations

import numpy as np
import pytest
from catalogue import one_in

from hvd_compress import LocalWorld, parse
from hvd_compress.methods import REGISTRY
from hvd_compress.tools.bench.traffic import RMS, SIDE, cost
from hvd_compress.transport.mirror import share


@pytest.mark.parametrize(
    ("name", "bits"),
    [
        ("none", [32, 56, 63]),
        ("fp16", [16, 28, 31.5]),
        ("bf16", [16, 28, 31.5]),
        ("topk", [0.48, 7 * 0.48, 63 * 0.48]),
        ("natural", [8, 56, 504]),
        ("signsgd", [1, 1.75, 63 / 32]),
        ("int8", [8, 14, 63 / 4]),
    ],
)
def test_bits(name: str, bits: list[float]) -> None:
    np.testing.assert_allclose(list(cost(name).bits.values()), bits, rtol=0.02)


@pytest.mark.parametrize("name", one_in(3, [name for name in REGISTRY if name != "homomorphic"]))
def test_the_simulator_counts_the_same(name: str) -> None:
    """Of the payloads, with 2 ranks: for none of these collectives a rank sends more than that."""
    rng = np.random.default_rng(0)
    world = LocalWorld(name, size=2)
    world.step([(RMS * rng.standard_normal((SIDE, SIDE))).astype(np.float32) for _ in range(2)])
    found = cost(name)
    assert world.rounds == found.rounds
    payload = 8 * world.bytes_sent / SIDE**2
    assert found.bits[2] <= payload * 1.02
    if not world.rounds > 1:
        assert found.bits[2] == pytest.approx(payload, rel=0.2 if name in ("threshold", "sidco", "dgc") else 1e-3)


@pytest.mark.parametrize(
    ("name", "state", "allreduce"),
    [("none", 0, True), ("topk", 4, False), ("dgc", 8, False), ("efsignsgd", 4, False), ("signum", 4, True)],
)
def test_state_and_scaling(name: str, state: float, allreduce: bool) -> None:
    assert cost(name).state_bytes == state
    assert cost(name).allreduce == allreduce


def test_what_is_called_allreduce_compatible_does_not_grow_with_the_ranks() -> None:
    """Beyond the 2 (n - 1) / n of a ring, and wider lanes for the sums of more ranks."""
    for name in REGISTRY:
        bits = cost(name).bits
        assert (bits[64] < 5 * bits[2]) == cost(name).allreduce, name


def test_loco_keeps_a_fourth_of_a_residual() -> None:
    assert 1 < cost("loco").state_bytes < 2 < cost("topk").state_bytes


def test_shares() -> None:
    assert [share("AllReduce", 2), share("AllGather", 4), share("AllToAll", 4)] == [1, 3, 0.75]


def test_costs_are_those_of_the_defaults() -> None:
    assert parse("topk").core == parse("topk:ratio=0.01").core
