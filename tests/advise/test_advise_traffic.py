"""The bytes of a plan are those that methods send."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
from advise.setups import GATHERED, REDUCED
from catalogue import one_in

from hvd_compress import LocalWorld, parse
from hvd_compress.core.bucket import Bucket
from hvd_compress.core.collectives import World
from hvd_compress.errors import UnsupportedError
from hvd_compress.methods import REGISTRY
from hvd_compress.tools.advise.model import matrix_side
from hvd_compress.tools.bench import traffic as counted
from hvd_compress.tools.bench.traffic import RMS, SEED, Message, grows, sent

SIDE = 64


def bits(spec: str, ranks: int, side: int = SIDE) -> float:
    return 8 * sum(message.wire(ranks) for message in sent(spec, ranks, side))


@pytest.mark.parametrize(("name", "ranks"), one_in(4, itertools.product(REGISTRY, [2, 3, 8])))
def test_messages_are_those_of_a_whole_exchange(name: str, ranks: int) -> None:
    """`sent` ends before what is gathered is decoded; that must make no difference."""
    rng, n = np.random.default_rng(SEED), SIDE * SIDE
    x = (RMS * rng.standard_normal(n) * (rng.random(n) < REGISTRY[name].card.nonzero)).astype(np.float32)
    whole = counted.messages(parse(name).core, Bucket("b0", ((SIDE, SIDE),), "float32"), x, World(0, ranks))
    assert [(m.kind, round(m.bytes * n)) for m in sent(name, ranks, SIDE)] == [
        (type(m).__name__, m.array.nbytes) for m in whole
    ]


@pytest.mark.parametrize("name", REGISTRY)
def test_bits_are_those_of_the_catalogue(name: str) -> None:
    for ranks, expected in counted.cost(name).bits.items():
        assert bits(name, ranks, counted.SIDE) == pytest.approx(expected)


@pytest.mark.parametrize("name", ["none", "fp16", "topk", "topkc", "qsgd", "efsignsgd", "powersgd", "int8", "signsgd"])
@pytest.mark.parametrize("ranks", [2, 4])
def test_the_simulator_sends_as_much(name: str, ranks: int) -> None:
    world, rng = LocalWorld(name, size=ranks), np.random.default_rng(0)
    world.step([rng.standard_normal((SIDE, SIDE)).astype(np.float32) for _ in range(ranks)])
    assert world.bytes_sent == round(sum(message.bytes for message in sent(name, ranks, SIDE)) * SIDE**2)
    assert world.rounds == len(sent(name, ranks, SIDE))


def test_fp16_sends_half_of_none() -> None:
    assert bits("fp16", 7) == bits("none", 7) / 2 == 16 * 2 * 6 / 7


@pytest.mark.parametrize("spec", GATHERED)
def test_what_is_gathered_grows_with_the_ranks(spec: str) -> None:
    assert [bits(spec, n) for n in (4, 16, 1024)] == [pytest.approx((n - 1) * bits(spec, 2)) for n in (4, 16, 1024)]
    assert grows(sent(spec, 2, SIDE))


@pytest.mark.parametrize("spec", [*REDUCED, "none", "fp16", "signsgd", "bf16"])
def test_what_is_reduced_is_bounded(spec: str) -> None:
    few, many = (bits(spec, ranks, side=512) for ranks in (2, 1024))
    assert few < many < 2.1 * few  # rows are padded to a multiple of the ranks
    assert not grows(sent(spec, 2, SIDE))


def test_some_methods_end_somewhere() -> None:
    assert bits("int8", 64) > 0
    with pytest.raises(UnsupportedError, match="cannot sum over 1024 ranks"):
        sent("int8", 1024, SIDE)


def test_a_single_rank_or_host_sends_nothing() -> None:
    for kind in ("AllReduce", "AllGather", "AllToAll", "Broadcast"):
        assert Message(kind, 4.0, 0.0).wire(1) == Message(kind, 4.0, 0.0).wire(8, 8) == 0


def test_ranks_of_a_host_share_its_link() -> None:
    """Two hosts of four: a ring leaves a host in one place; all to all, each of four sends half of what it has."""
    assert Message("AllReduce", 4.0, 0.0).wire(8, 4) == Message("AllReduce", 4.0, 0.0).wire(8)
    assert Message("AllToAll", 4.0, 0.0).wire(8, 4) == 4 * 4.0 * 4 / 8


def test_small_models_are_one_small_matrix() -> None:
    assert [matrix_side(n, 1024) for n in (1, 100, 120, 2**20, 10**9)] == [1, 10, 10, 1024, 1024]


@pytest.mark.parametrize("spec", ["topk:ratio=0.01", "qsgd", "powersgd:rank=4", "efsignsgd"])
@pytest.mark.parametrize("hosts", [2, 4])
def test_nodes_with_several_ranks(spec: str, hosts: int) -> None:
    """The bytes are those of the simulator; what is gathered crosses the link of a node once per other node."""
    name = f"{spec}{',' if ':' in spec else ':'}hierarchical=on"
    messages = sent(name, 4 * hosts, SIDE, 4)
    assert {message.scope for message in messages} == {"node", "across"}
    world, rng = LocalWorld(name, size=4 * hosts, local_size=4), np.random.default_rng(0)
    world.step([rng.standard_normal((SIDE, SIDE)).astype(np.float32) for _ in range(4 * hosts)])
    across = sum(message.bytes for message in messages if message.scope == "across")
    assert world.bytes_sent == pytest.approx(sum(message.bytes for message in messages) * SIDE**2, abs=64)
    if grows(messages[1:2]):
        assert sum(m.wire(4 * hosts, 4) for m in messages) == pytest.approx(4 * across * (hosts - 1))
        assert sum(m.wire(4 * hosts, 4) for m in messages) < sum(
            m.wire(4 * hosts, 4) for m in sent(spec, 4 * hosts, SIDE)
        )
    assert sent(name, 4, SIDE, 4) == (Message("AllReduce", 4.0, 0.0),)
