"""Pipelines over ranks: mpi4py and Horovod."""

from __future__ import annotations

import re
import sys
from pathlib import Path

import pytest
from launching import AS_ROOT, horovodrun, run
from test_mpi import mpirun

pytestmark = pytest.mark.jobs

FOLDER = Path(__file__).resolve().parent


def job(link: str, ranks: int, name: str, *arguments: str, controller: str = "gloo") -> str:
    """Run a job; all ranks must say that all is well."""
    program = FOLDER / f"{name}_job.py"
    if link == "mpi":
        printed = mpirun(ranks, program, link, *arguments)
    else:
        printed = horovodrun(ranks, controller, program, link, *arguments, timeout=300).stdout
    assert printed.count("all is well on rank") == ranks, printed
    return printed


@pytest.mark.parametrize("ranks", [2, *(pytest.param(ranks, marks=pytest.mark.long) for ranks in (3, 4))])
def test_a_split_model_is_the_whole_model_over_mpi(ranks: int) -> None:
    """Also with microbatches of different sizes, and with fewer of them than there are stages."""
    job("mpi", ranks, "equality", "1", "4", "5", "2")


@pytest.mark.parametrize(
    ("ranks", "controller"),
    [(2, "gloo"), *(pytest.param(3, controller, marks=pytest.mark.long) for controller in ("mpi", "gloo"))],
)
def test_a_split_model_is_the_whole_model_over_horovod(ranks: int, controller: str) -> None:
    job("horovod", ranks, "equality", "1", "4", controller=controller)


@pytest.mark.long
def test_a_rank_ends_early() -> None:
    """In a job of Horovod; the links end with MPI, and say so."""
    result = horovodrun(2, "mpi", FOLDER / "ending_job.py")
    assert result.stdout.count("all is well on rank") == 2
    assert "then: MPI failed: it has been finalized" in result.stdout


@pytest.mark.long
def test_replicas_of_two_stages() -> None:
    job("horovod", 4, "equality", "2", "4")


@pytest.mark.parametrize("link", ["mpi", pytest.param("horovod", marks=pytest.mark.long)])
def test_compressed_it_is_as_in_one_process(link: str) -> None:
    job(link, 3, "compressed")


Errors = dict[tuple[str, int], str]
"""By case and stage."""


def errors(link: str, *cases: str) -> tuple[str, Errors, Errors]:
    """What a job prints, and the first and the second errors."""
    program = FOLDER / "faults_job.py"
    if link == "mpi":
        launcher = ["mpirun", "--bind-to", "none", "--map-by", ":OVERSUBSCRIBE", "-n", "3"]
        result = run([*launcher, sys.executable, program, link, *cases], timeout=300, environment=AS_ROOT)
    else:
        result = horovodrun(3, "gloo", program, link, *cases, timeout=300, check=False)
    first = {(case, int(stage)): error for case, stage, error in re.findall(r"(\w+) (\d): (\w+: .*)", result.stdout)}
    again = {(case, int(stage)): error for case, stage, error in re.findall(r"(\w+) (\d) again: (.*)", result.stdout)}
    return result.stdout, first, again


CASES = {
    "shape": (0, "BoundaryError: memory='ef' needs messages of one shape: it began with float32 (3, 16)"),
    "ids": (0, "BoundaryError: unknown sample id 12: with samples=12 the ids are 0 .. 11"),
    "few": (0, "BoundaryError: 3 inputs cannot be cut into 4 microbatches: leave out the last minibatch"),
    "nothing": (0, "BoundaryError: stage 0 (rank 0) needs inputs: give them on this rank"),
    "raises": (1, "ValueError: a bug in the model"),
    "unlike": (1, "BoundaryError: stage 0 (rank 0) was made with another boundary than this stage: give all ranks the"),
}
"""Where it begins, and with what."""


@pytest.mark.parametrize("link", [pytest.param("mpi", marks=pytest.mark.long), "horovod"])
def test_all_stages_learn_what_is_wrong(link: str) -> None:
    """And a new pipeline can be made after each; after the last, in which a stage hangs, the job ends."""
    printed, first, again = errors(link, *CASES, "hangs")
    assert "no message came from stage 1 (rank 1) within 4 s: its process has ended" in first["hangs", 0], printed
    first, again = ({key: said for key, said in one.items() if key[0] != "hangs"} for one in (first, again))
    assert len(first) == len(again) == 3 * len(CASES), printed
    for case, (stage, message) in CASES.items():
        assert first[case, stage].startswith(message), printed
        for other in {0, 1, 2} - {stage}:
            nearer = other + 1 if other < stage else other - 1
            assert first[case, other].startswith(f"BoundaryError: stage {nearer} (rank {nearer}) stopped: "), printed
            assert message.partition(": ")[2] in first[case, other], printed
    assert all("has stopped" in error and "make the pipeline anew" in error for error in again.values())


@pytest.mark.long
@pytest.mark.parametrize("link", ["mpi", "horovod"])
def test_a_stage_that_is_killed_ends_the_job(link: str) -> None:
    """The launcher sees to that, or the error of the stages beside it."""
    printed, first, _ = errors(link, "killed")
    assert ("killed", 1) not in first
    assert "signal 9" in printed or "Process 1 exit with status code 137" in printed, printed
