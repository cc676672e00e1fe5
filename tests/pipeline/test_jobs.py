"""Pipelines over ranks: mpi4py and Horovod."""

from __future__ import annotations

import re
import sys
from pathlib import Path

import pytest
from launching import horovodrun, run
from test_mpi import AS_ROOT, mpirun

FOLDER = Path(__file__).resolve().parent


def job(link: str, ranks: int, name: str, *arguments: str, controller: str = "gloo") -> str:
    """Run a job; all ranks must say that all is well."""
    program = FOLDER / f"{name}_job.py"
    if link == "mpi":
        printed = mpirun(ranks, program, link, *arguments)
    else:
        printed = horovodrun(ranks, controller, program, link, *arguments, timeout=120).stdout
    assert printed.count("all is well on rank") == ranks, printed
    return printed


@pytest.mark.parametrize("ranks", [2, 3, 4])
def test_a_split_model_is_the_whole_model_over_mpi(ranks: int) -> None:
    job("mpi", ranks, "equality", "4", "1")


@pytest.mark.parametrize(("ranks", "controller"), [(2, "gloo"), (3, "gloo"), (4, "gloo"), (3, "mpi")])
def test_a_split_model_is_the_whole_model_over_horovod(ranks: int, controller: str) -> None:
    job("horovod", ranks, "equality", "4", "1", controller=controller)


def test_microbatches_of_different_sizes_and_fewer_than_stages() -> None:
    job("mpi", 3, "equality", "5", "1")
    job("mpi", 4, "equality", "2", "1")


def test_replicas_of_two_stages() -> None:
    job("horovod", 4, "equality", "4", "2")


@pytest.mark.parametrize(("link", "ranks"), [("mpi", 3), ("horovod", 3)])
def test_compressed_it_is_as_in_one_process(link: str, ranks: int) -> None:
    job(link, ranks, "compressed")


def errors(link: str, case: str, ranks: int = 3) -> tuple[str, dict[int, str], dict[int, str]]:
    """What a job of a case prints, and the first and the second error of each stage."""
    program = FOLDER / "faults_job.py"
    if link == "mpi":
        launcher = ["mpirun", "--bind-to", "none", "--map-by", ":OVERSUBSCRIBE", "-n", str(ranks)]
        result = run([*launcher, sys.executable, program, link, case], timeout=60, environment=AS_ROOT)
    else:
        result = horovodrun(ranks, "gloo", program, link, case, timeout=100, check=False)
    first = {int(s): e for s, e in re.findall(r"(\d): (\w+: .*)", result.stdout)}
    again = {int(s): e for s, e in re.findall(r"(\d) again: (.*)", result.stdout)}
    return result.stdout, first, again


CASES = {
    "shape": (0, "BoundaryError: memory='ef' needs messages of one shape: it began with float32 (3, 16)"),
    "ids": (0, "BoundaryError: unknown sample id 12: with samples=12 the ids are 0 .. 11"),
    "few": (0, "BoundaryError: 3 inputs cannot be cut into 4 microbatches: leave out the last minibatch"),
    "nothing": (0, "BoundaryError: stage 0 (rank 0) needs inputs: give them on this rank"),
    "raises": (1, "ValueError: a bug in the model"),
}
"""Where it begins, and with what."""


@pytest.mark.parametrize("link", ["mpi", "horovod"])
@pytest.mark.parametrize("case", CASES)
def test_all_stages_learn_what_is_wrong(link: str, case: str) -> None:
    stage, message = CASES[case]
    printed, first, again = errors(link, case)
    assert first[stage].startswith(message), printed
    for other in {0, 1, 2} - {stage}:
        nearer = other + 1 if other < stage else other - 1
        assert first[other].startswith(f"BoundaryError: stage {nearer} (rank {nearer}) stopped: "), printed
        assert message.partition(": ")[2] in first[other], printed
    assert all("has stopped" in error and "make the pipeline anew" in error for error in again.values())
    assert len(again) == 3, printed


def test_stages_that_are_not_alike() -> None:
    printed, first, _ = errors("mpi", "unlike", 2)
    words = "was made with another boundary than this stage: give all ranks the same"
    assert len(first) == 2 and any(words in error for error in first.values()), printed


@pytest.mark.parametrize("link", ["mpi", "horovod"])
def test_a_stage_that_hangs(link: str) -> None:
    printed, first, _ = errors(link, "hangs", 2)
    assert "no message came from stage 1 (rank 1) within 4 s: its process has ended or hangs" in first[0], printed


@pytest.mark.parametrize("link", ["mpi", "horovod"])
def test_a_stage_that_is_killed_ends_the_job(link: str) -> None:
    """The launcher sees to that, or the error of the stages beside it."""
    printed, first, _ = errors(link, "killed")
    assert 1 not in first
    assert any(words in printed for words in ("signal 9", "Exit code: 137", "lost the connection")), printed
