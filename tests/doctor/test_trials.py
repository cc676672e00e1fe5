"""Trying it out: how jobs are started, read and ended, and one that is real."""

from __future__ import annotations

import shutil
import sys
from pathlib import Path

import pytest
from doctor.machines import HEALTHY, NO_TORCH, TORCH, machine

from hvd_compress.tools.doctor.trial import COLUMN, MARK, check
from hvd_compress.tools.doctor.trials import Trial, attempt, command, findings, jobs, read

GLOO = """[1]<stderr>:Traceback (most recent call last):
[0]<stderr>:Traceback (most recent call last):
[0]<stderr>:ValueError: the cause
[1]<stderr>:Terminated
RuntimeError: Horovod detected that one or more processes exited with non-zero status, thus causing the job to be
terminated. The first process to do so was:
Process name: 0
Exit code: 1
"""
MPI = """[1,0]<stderr>: Terminated
[1,1]<stderr>: Traceback (most recent call last):
[1,1]<stderr>: ValueError: the cause
[1,0]<stderr>: a last word
prterun detected that one or more processes exited with non-zero status,
   Process name: [prterun-vm-16204@1,1]
   Exit code:    1
"""


@pytest.mark.parametrize("output", [GLOO, MPI])
def test_a_failure_is_told_by_the_rank_that_failed(output: str) -> None:
    trial = read("torch", "gloo", 1, output)
    assert not trial.works
    assert trial.message == "Traceback (most recent call last):\nValueError: the cause"


def test_other_failures_are_told_by_what_there_is() -> None:
    assert read("torch", "mpi", 1, "one\n\ntwo\n").message == "one\ntwo"
    assert read("torch", "mpi", 3, "").message == "the job ended with status 3"
    assert not read("torch", "mpi", 0, "all is well").works
    assert not read("torch", "mpi", 1, f'[1,0]<stdout>:{MARK}{{"ranks": 2, "controller": "MPI"}}').works


def test_success_is_read() -> None:
    trial = read("torch", "mpi", 0, f'noise\n[1,0]<stdout>:{MARK}{{"ranks": 2, "controller": "MPI"}}\nnoise\n')
    assert trial == Trial("torch", "mpi", True, "a step on 2 ranks is exact (MPI)")


def test_what_can_be_tried() -> None:
    def tried(**facts: object) -> list[str]:
        return [f"{framework.name} {name}" for framework, name in jobs(machine(**facts))]  # type: ignore[arg-type]

    assert tried() == ["torch gloo", "torch mpi", "tensorflow gloo", "tensorflow mpi"]
    assert tried(mpirun=None) == ["torch gloo", "tensorflow gloo"]
    assert tried(torch=TORCH._replace(built=("mpi",)), mpirun=None) == ["tensorflow gloo"]
    assert tried(torch=NO_TORCH, horovodrun=None) == []


def test_open_mpi_5_gets_its_options() -> None:
    option = "--binding-args=--bind-to none --map-by slot"
    assert option not in command(HEALTHY, "torch", "mpi")
    newer = machine(mpirun="Open MPI 5.0.11")
    assert option in command(newer, "torch", "mpi") and option not in command(newer, "torch", "gloo")


def test_findings_name_the_job() -> None:
    fine, broken = findings(HEALTHY, [Trial("torch", "mpi", True, "exact"), Trial("tensorflow", "gloo", False, "oh")])
    assert (fine.status, fine.subject, fine.cure) == ("ok", "Run: PyTorch, MPI", None)
    assert (broken.status, broken.subject, broken.found) == ("fault", "Run: TensorFlow, Gloo", "oh")
    assert broken.cure and "--gloo" in broken.cure.command and "tensorflow" in broken.cure.command


@pytest.mark.jobs
@pytest.mark.long
def test_a_real_job() -> None:
    program = shutil.which("horovodrun", path=str(Path(sys.executable).parent))
    trial = attempt(machine(horovodrun=program, mpirun="Open MPI 5.0.11"), "torch", "mpi", timeout=600)
    assert trial == Trial("torch", "mpi", True, "a step on 2 ranks is exact (MPI)")


def test_wrong_results_are_noticed() -> None:
    with pytest.raises(SystemExit, match="fit: 4096 of 4096 coordinates are not the mean"):
        check("fit", -COLUMN, size=2)
