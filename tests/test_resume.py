"""A job that is saved and restored in new processes goes on bit for bit."""

from __future__ import annotations

from pathlib import Path

import pytest
from launching import horovodrun

pytestmark = pytest.mark.jobs

JOBS = Path(__file__).resolve().parent / "resume"
SPECS = ["topk:ratio=0.01", "randomk:ratio=0.05", "int8", "powersgd:rank=2", "topk:ratio=0.01,start=5,warmup=20"]
FEW = SPECS[-2:]


@pytest.mark.parametrize(
    ("framework", "controller", "ranks", "specs"),
    [
        ("pytorch", "gloo", 2, FEW),
        pytest.param("pytorch", "mpi", 3, SPECS, marks=pytest.mark.long),
        pytest.param("keras", "gloo", 2, FEW, marks=pytest.mark.long),
    ],
)
def test_saved_at_20_and_gone_on_to_40(
    framework: str, controller: str, ranks: int, specs: list[str], tmp_path: Path
) -> None:
    for part in ("first", "second"):
        job = horovodrun(ranks, controller, JOBS / f"{framework}_job.py", part, tmp_path, *specs)
        assert job.stdout.count(f"{part} done on rank") == ranks


@pytest.mark.long
@pytest.mark.parametrize("spec", ["topk:ratio=0.01", "auto"])
def test_a_job_of_one_rank_carries_on_what_two_have_saved(spec: str, tmp_path: Path) -> None:
    """Horovod does not call its compression there, so nothing is dealt out; two ranks go on with it again, or three."""
    for ranks, part in ((2, "first"), (1, "alone"), (2, "second"), (3, "three")):
        job = horovodrun(ranks, "gloo", JOBS / "alone_job.py", part, tmp_path, spec)
        assert job.stdout.count(f"{part} done") == ranks
