"""Jobs on nodes with several ranks that cannot go on, and jobs that go on with other numbers."""

from __future__ import annotations

from pathlib import Path

import pytest
from launching import horovodrun

pytestmark = pytest.mark.jobs

JOB = Path(__file__).resolve().parent / "resume" / "nodes_job.py"
FRAMEWORKS = pytest.mark.parametrize("framework", ["torch", pytest.param("keras", marks=pytest.mark.long)])
SPECS = ["topk:ratio=0.05,hierarchical=on", "qsgd:bits=4,feedback=on,hierarchical=on"]


def errors(framework: str, part: str, nodes: list[int]) -> list[str]:
    """Return the errors of the ranks."""
    job = horovodrun(sum(nodes), "gloo", JOB, framework, part, "", nodes=nodes, check=False)
    assert job.returncode, job.stdout
    return [line.partition("error: ")[2] for line in job.stdout.splitlines() if "error: " in line]


@FRAMEWORKS
def test_without_process_sets_the_error_says_what_to_add(framework: str) -> None:
    said = errors(framework, "without sets", [2, 2])
    assert len(said) == 4 and len(set(said)) == 1
    assert "hvd.init(process_sets=hvd_compress.node_process_sets())" in said[0]


@FRAMEWORKS
def test_unequal_nodes_are_named_on_all_ranks(framework: str) -> None:
    said = errors(framework, "train", [2, 1])
    assert len(said) == 3 and len(set(said)) == 1
    assert "same number of ranks on each node" in said[0] and "localhost has rank 0, 1; 127.0.0.1 has rank 2" in said[0]


@FRAMEWORKS
@pytest.mark.parametrize(("part", "nodes"), [("without sets", [2, 2]), ("train", [2, 1])])
def test_auto_does_without_nodes_where_they_cannot_be_used(framework: str, part: str, nodes: list[int]) -> None:
    job = horovodrun(sum(nodes), "gloo", JOB, framework, part, "", "auto", nodes=nodes)
    assert job.stdout.count("went on") == sum(nodes)


@pytest.mark.long
def test_a_rank_that_is_killed_ends_the_job() -> None:
    job = horovodrun(4, "gloo", JOB, "torch", "killed", "", nodes=[2, 2], check=False)
    assert job.returncode and "Killed" in job.stdout and "went on" not in job.stdout


@pytest.mark.long
@FRAMEWORKS
def test_no_node_ends_the_job_while_another_is_in_its_last_step(framework: str) -> None:
    job = horovodrun(4, "gloo", JOB, framework, "late", "", nodes=[2, 2])
    assert job.stdout.count("went on") == 4


@pytest.mark.long
@pytest.mark.parametrize("nodes", [[2, 2, 2], [2, 1], [1, 1]])
def test_residuals_go_on_with_other_nodes(nodes: list[int], tmp_path: Path) -> None:
    first = horovodrun(4, "gloo", JOB, "torch", "save", tmp_path, *SPECS, nodes=[2, 2])
    assert first.stdout.count("save done") == 4
    even = len(set(nodes)) == 1
    second = horovodrun(sum(nodes), "gloo", JOB, "torch", "load", tmp_path, *SPECS, nodes=nodes, check=even)
    assert second.stdout.count("load done" if even else "same number of ranks") >= sum(nodes)
