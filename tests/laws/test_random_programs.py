"""The law on programs drawn at random, on all adapters, and faults that must break it; `make soak` runs more."""

from __future__ import annotations

import subprocess
import sys

import pytest
from laws.plants import PLANTS
from laws.run import HERE, check, launch


@pytest.mark.parametrize(("adapter", "draws"), [("local", 40), ("threads", 25)])
def test_all_that_is_given_is_delivered(adapter: str, draws: int) -> None:
    assert not check(adapter, draws)


@pytest.mark.jobs
@pytest.mark.parametrize("adapter", ["ddp", "fsdp", "horovod", "keras"])
def test_all_that_is_given_is_delivered_by_a_job(adapter: str) -> None:
    assert not launch(adapter, 4)


@pytest.mark.jobs
@pytest.mark.parametrize("plant", PLANTS)
def test_a_planted_fault_is_found(plant: str) -> None:
    draws = ["--draws", "100", "--seed", "4"]  # which are soon enough
    command = [sys.executable, str(HERE / "run.py"), PLANTS[plant].adapter, *draws, "--plant", plant]
    job = subprocess.run(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, timeout=300)
    assert job.returncode == 1 and "finds it" in job.stdout, job.stdout
