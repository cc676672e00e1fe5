"""Graphs of gossip, and gossip beside its algorithms as published."""

from __future__ import annotations

import itertools
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from hvd_compress.engine.spec import parse
from hvd_compress.errors import SpecError
from hvd_compress.local.gossip import GossipSettings, check_compression
from hvd_compress.local.graph import GRAPHS, edges_of

RANK = Path(__file__).with_name("gossip_rank.py")


def matrix(graph: Any, size: int) -> Any:
    """The matrix by which one exchange multiplies the models of all ranks."""
    found = np.eye(size)
    for low, high, weight in edges_of(graph, size):
        found[[low, high], [high, low]] += weight
        found[[low, high], [low, high]] -= weight
    return found


@st.composite
def connected(draw: st.DrawFn) -> tuple[list[tuple[int, int]], int]:
    size = draw(st.integers(2, 12))
    tree = [(draw(st.integers(0, rank - 1)), rank) for rank in range(1, size)]
    others = [pair for pair in itertools.combinations(range(size), 2) if pair not in tree]
    more = draw(st.lists(st.sampled_from(others), unique=True)) if others else []
    return draw(st.permutations([*tree, *more])), size


@given(connected())
def test_models_keep_their_mean_and_approach_it(graph: tuple[list[tuple[int, int]], int]) -> None:
    """The matrix is symmetric, its rows sum to 1 and are not negative, and all eigenvalues but one are below 1."""
    check_matrix(matrix(*graph))
    edges = edges_of(*graph)
    assert sorted(edge[:2] for edge in edges) == sorted((min(pair), max(pair)) for pair in graph[0])


@pytest.mark.parametrize("size", range(2, 34))
@pytest.mark.parametrize("graph", GRAPHS)
def test_named_graphs(graph: str, size: int) -> None:
    prime = all(size % factor for factor in range(2, size))
    if graph == "torus" and prime:
        with pytest.raises(SpecError, match=f"{size} ranks, which are no grid"):
            edges_of(graph, size)
        return
    found = matrix(graph, size)
    check_matrix(found)
    expected = {"ring": 1 / 3, "torus": 1 / 5}.get(graph, found[0, 0])
    np.testing.assert_allclose(np.diag(found), expected, err_msg="all ranks keep the same share")


def check_matrix(found: Any) -> None:
    np.testing.assert_allclose(found, found.T)
    np.testing.assert_allclose(found.sum(0), 1)
    assert found.min() > -1e-12
    values = np.sort(np.abs(np.linalg.eigvalsh(found)))
    assert values[-1] == pytest.approx(1) and values[-2] < 1 - 1e-3


def test_known_weights() -> None:
    assert {edge.weight for edge in edges_of("ring", 2)} == {2 / 3}, "in a ring of two, they are neighbours twice"
    assert {edge[:2]: edge.weight for edge in edges_of("torus", 4)} == dict.fromkeys(
        [(0, 1), (2, 3), (0, 2), (1, 3)], 2 / 5
    )
    assert {edge.weight for edge in edges_of("exponential", 4)} == {1 / 4}, "all are neighbours: the mean at once"
    assert edges_of("ring", 1) == []


@pytest.mark.parametrize("size", [2, 4, 8, 16])
def test_edges_come_in_rounds(size: int) -> None:
    """In a ring of an even number of ranks all are busy in the first half: none waits for a chain of others."""
    edges = edges_of("ring", size)
    assert sorted(rank for edge in edges[: size // 2] for rank in edge[:2]) == [*range(size)]


@pytest.mark.parametrize(
    ("graph", "message"),
    [
        ("star", "'ring', 'torus', 'exponential'"),
        ([(0, 1), (1, 4)], r"edge \(1, 4\), but the ranks are 0 to 3"),
        ([(0, 1), (-1, 2)], "ranks are 0 to 3"),
        ([0, 1], "graph has 0, but an edge is a pair of ranks"),
        ([(0, 1, 2)], "an edge is a pair of ranks"),
        ([(0, 1), (2, 2)], "does not gossip with itself"),
        ([(0, 1), (1, 2), (2, 3), (1, 0)], r"\(1, 0\) twice"),
        ([(0, 1), (2, 3)], r"does not connect rank 0 with \[2, 3\]"),
        ([], r"does not connect rank 0 with \[1, 2, 3\]"),
    ],
)
def test_graphs_that_are_not_allowed(graph: Any, message: str) -> None:
    with pytest.raises(SpecError, match=message):
        edges_of(graph, 4)


def test_settings_in_one_word() -> None:
    assert GossipSettings.of("powergossip@ring", {}) == GossipSettings()
    assert GossipSettings.of("powergossip:rank=4@torus", {}) == GossipSettings(graph="torus", rank=4)
    assert GossipSettings.of("none@exponential", {}) == GossipSettings(graph="exponential", compression="none")
    assert GossipSettings.of([(0, 1)], {"iterations": 2}) == GossipSettings(graph=((0, 1),), iterations=2)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"rank": 0}, "rank=0 is not allowed"),
        ({"iterations": 0}, "iterations=0 is not allowed"),
        ({"step_size": 0.0}, "step_size=0.0 is not allowed"),
        ({"rank": 2, "compression": "none"}, "rank=2 has no effect"),
        ({"ranks": 2}, "no option 'ranks'; it has: graph, rank"),
    ],
)
def test_settings_that_are_not_allowed(options: Any, message: str) -> None:
    with pytest.raises(SpecError, match=message):
        GossipSettings.of("ring", options)
    with pytest.raises(SpecError, match="None"):
        GossipSettings.of(None, {})  # type: ignore[arg-type]
    with pytest.raises(SpecError, match="powergossip:rank=two"):
        GossipSettings.of("powergossip:rank=two@ring", {})


@pytest.mark.parametrize(
    "spec", ["none", "powersgd:feedback=off", "topk:feedback=ef21", "fp16:feedback=ef21", "qsgd:feedback=ef21,every=9"]
)
def test_compressions_of_differences(spec: str) -> None:
    check_compression(parse(spec))


@pytest.mark.parametrize("spec", ["fp16", "topk", "qsgd", "powersgd", "topk:feedback=off", "auto"])
def test_compressions_of_models_are_refused(spec: str) -> None:
    with pytest.raises(SpecError, match="feedback=ef21"):
        check_compression(parse(spec))


@pytest.mark.jobs
def test_it_is_the_published_algorithm() -> None:
    """On 8 ranks, and on two groups of 4."""
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc_per_node", "8", str(RANK)]
    found = subprocess.run(command, capture_output=True, text=True, env=os.environ | {"OMP_NUM_THREADS": "1"})
    assert found.returncode == 0, found.stderr[-5000:]
