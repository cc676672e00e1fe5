"""Ranks that were not set up alike are told so, all in the same words."""

from __future__ import annotations

import contextlib
from collections.abc import Sequence

import pytest
from horovod.runner.http.http_server import KVStoreServer

from hvd_compress import node_process_sets, parse
from hvd_compress.checkpoint.agreement import check, describe, label
from hvd_compress.core.bucketing import Gradient
from hvd_compress.core.collectives import World
from hvd_compress.errors import DisagreementError
from hvd_compress.transport import groups as group
from hvd_compress.transport.nodes import launched, placed

MODEL = [Gradient("w", (3, 4), "float32"), Gradient("b", (4,), "float32")]
TOPK = parse("topk:ratio=0.01")
WORLD = World(0, 2)


def test_equal_ranks_agree() -> None:
    check(describe(TOPK, 2, MODEL, WORLD) * 5)


@pytest.mark.parametrize(
    ("other", "message"),
    [
        ((parse("topk:ratio=0.02"), 2, MODEL), "rank 0 has 'topk', rank 2 has 'topk:ratio=0.02'"),
        ((parse("none"), 2, MODEL), "the method: rank 0 has 'topk', rank 2 has 'none'"),
        ((TOPK, 3, MODEL), "the merge: rank 0 has 2, rank 2 has 3"),
        ((TOPK, 2, MODEL[:1]), "parameters: rank 0 has 'b' .* at position 1, rank 2 has only 1 of them"),
        ((TOPK, 2, MODEL[::-1]), "rank 0 has 'w' .* at position 0, rank 2 has 'b'"),
        ((TOPK, 2, [MODEL[0]._replace(shape=(3, 5)), MODEL[1]]), r"shape \(3, 4\).*shape \(3, 5\)"),
        ((TOPK, 2, [MODEL[0]._replace(dtype="float64"), MODEL[1]]), "float32.*float64"),
    ],
)
def test_the_first_difference_is_named(other: tuple[object, ...], message: str) -> None:
    mine = describe(TOPK, 2, MODEL, WORLD)
    with pytest.raises(DisagreementError, match=message):
        check(mine + mine + describe(*other, WORLD) + mine)  # type: ignore[call-arg,arg-type]


def test_labels_depend_on_the_names() -> None:
    assert label(MODEL) == label([g._replace(shape=(9,)) for g in MODEL])
    assert label(MODEL) != label(MODEL[::-1])


def test_names_may_hold_anything() -> None:
    check(describe(TOPK, 2, [Gradient('a\n"b"\u2028{', (1,), "float32")], WORLD) * 2)


def test_unequal_nodes_are_named(monkeypatch: pytest.MonkeyPatch) -> None:
    """Two ranks on one host and one on another: each rank knows of its own node only."""
    lines = b""
    for rank, (host, local_rank, local_size) in enumerate([("a", 0, 2), ("a", 1, 2), ("b", 0, 1)]):
        monkeypatch.setattr("socket.gethostname", lambda host=host: host)
        world = placed(range(3), rank, local_rank, local_size)
        assert world.local_size == 1
        lines += describe(parse("topk:hierarchical=on"), 2, MODEL, world)
    with pytest.raises(DisagreementError, match="a has rank 0, 1; b has rank 2; start as many on each"):
        check(lines)


def test_flat_methods_do_not_mind_unequal_nodes() -> None:
    check(b"".join(describe(TOPK, 2, MODEL, placed(range(3), rank, 0, 2 - rank // 2)) for rank in range(3)))


@pytest.mark.parametrize(
    ("ranks", "rank", "local", "expected"),
    [
        (range(4), 3, (1, 2), World(3, 4, 2)),
        (range(4), 1, (0, 2), World(1, 4, even=False)),  # numbered host after host: 0, 2 and 1, 3
        (range(3), 0, (0, 2), World(0, 3, even=False)),
        ([0, 2, 4], 2, (0, 2), World(1, 3, 1)),
        ([0, 1, 4, 5], 5, (1, 2), World(3, 4, 2)),
        ([0, 1, 2], 2, (0, 2), World(2, 3, even=False)),
    ],
)
def test_nodes_of_a_set_of_ranks(ranks: Sequence[int], rank: int, local: tuple[int, int], expected: World) -> None:
    assert placed(ranks, rank, *local) == expected
    assert launched(ranks, rank, {"LOCAL_RANK": str(local[0]), "LOCAL_WORLD_SIZE": str(local[1])}) == expected
    assert not launched(ranks, rank, {}).even


def told(monkeypatch: pytest.MonkeyPatch, *nodes: int) -> list[list[int]]:
    """Return the process sets of all ranks, on nodes with so many."""
    server = KVStoreServer(verbose=0)
    monkeypatch.setenv("HOROVOD_GLOO_RENDEZVOUS_ADDR", "127.0.0.1")
    monkeypatch.setenv("HOROVOD_GLOO_RENDEZVOUS_PORT", str(server.start_server()))
    ranks = [(local_rank, local_size) for local_size in nodes for local_rank in range(local_size)]

    def sets(rank: int, patience: float) -> list[list[int]]:
        monkeypatch.setattr(group, "_PATIENCE", patience)
        for name, number in zip(
            ("RANK", "SIZE", "LOCAL_RANK", "LOCAL_SIZE"), (rank, len(ranks), *ranks[rank]), strict=True
        ):
            monkeypatch.setenv(f"HOROVOD_{name}", str(number))
        found = node_process_sets()
        assert isinstance(found, list)
        return [one.ranks for one in found]

    try:
        for rank in range(len(ranks) - 1):
            with contextlib.suppress(DisagreementError):
                sets(rank, 0.0)
        *_, last = found = [sets(rank, 10.0) for rank in reversed(range(len(ranks)))]
    finally:
        server.shutdown_server()
    assert all(one == last for one in found)
    return last


def test_process_sets_are_those_within_nodes_and_across_them(monkeypatch: pytest.MonkeyPatch) -> None:
    assert told(monkeypatch, 3, 3) == [[0, 1, 2], [3, 4, 5], [0, 3], [1, 4], [2, 5]]
    assert told(monkeypatch, 1, 1) == told(monkeypatch, 2) == []


@pytest.mark.parametrize("nodes", [(2, 1), (2, 2, 1, 1), (8, 8, 4), (4, 2, 2), (2, 4, 3)])
def test_unequal_nodes_have_no_process_sets(nodes: tuple[int, ...], monkeypatch: pytest.MonkeyPatch) -> None:
    assert told(monkeypatch, *nodes) == []


def test_other_launchers_leave_process_sets_to_horovod(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("HOROVOD_SIZE", raising=False)
    assert node_process_sets() == "dynamic"
