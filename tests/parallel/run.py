"""Run the tests of this folder under horovodrun: each framework, each controller, 2 and 3 ranks.

Use::

    python tests/parallel/run.py [framework] [controller] [ranks] [all]

All tests run over Gloo with 2 ranks, and those of PyTorch under MPI with 3 as well; TensorFlow takes long to trace. The
other jobs have the tests of the methods and of faults; with ``all`` they run all tests, too.
"""

from __future__ import annotations

import itertools
import subprocess
import sys
import tempfile
import time
from pathlib import Path

HERE = Path(__file__).resolve().parent
sys.path.insert(0, str(HERE.parent))

from launching import CONTROLLERS, horovodrun  # noqa: E402

FRAMEWORKS = ["pytorch", "keras"]
RANKS = [2, 3]
WHOLE = {("pytorch", "gloo", 2), ("pytorch", "mpi", 3), ("keras", "gloo", 2)}
PART = ["test_catalogue.py", "test_faults.py"]


def run(framework: str, controller: str, ranks: int, whole: bool) -> bool:
    """Run the tests of a framework in one job; print what rank 0 prints, and on failure what all ranks do."""
    print(f"== {framework}, {controller}, {ranks} ranks{'' if whole else ', in part'}", flush=True)
    tests = [HERE / framework] if whole else [HERE / framework / name for name in PART]
    begin = time.monotonic()
    with tempfile.TemporaryDirectory() as folder:
        try:
            job = horovodrun(ranks, controller, HERE / "worker.py", folder, *tests, timeout=900, check=False)
            output, ok = job.stdout, job.returncode == 0
        except subprocess.TimeoutExpired as error:
            output, ok = f"{(error.stdout or b'').decode()}\nThe job hung and was ended.", False
        logs = [path.read_text() for path in sorted(Path(folder).glob("rank*"))]
    ok = ok and len(logs) == ranks
    print("\n".join(logs[:1] if ok else [output, *logs]))
    print(f"== {'passed' if ok else 'FAILED'} in {time.monotonic() - begin:.0f} s", flush=True)
    return ok


def main(*chosen: str) -> int:
    """Run all jobs that fit the arguments."""
    jobs = itertools.product(FRAMEWORKS, CONTROLLERS, RANKS)
    words = set(chosen) - {"all"}
    picked = [job for job in jobs if words <= set(map(str, job))]
    failed = [job for job in picked if not run(*job, whole="all" in chosen or job in WHOLE)]
    for job in failed:
        print("FAILED:", *job)
    return bool(failed) or not picked


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
