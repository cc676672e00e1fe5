"""Run the tests of this folder under horovodrun: each framework over each controller, with 2 and with 3 ranks.

Use::

    python tests/parallel/run.py [framework] [controller] [ranks, as 2 or 2+2 of two nodes] [soak | all]

Here is what needs a real Horovod, torch.distributed or TensorFlow. All else that ranks do together is tested on ranks
as threads, in `tests/engine`.

Each framework has two jobs. All tests run over Gloo with 2 ranks. Under MPI with 3 ranks run those for which the
controller or the number of ranks makes a difference: every way to communicate, faults, joins, and process sets of
which a rank is a member or not. So each framework meets each controller and each number of ranks. The other two pairs
of these, which ``soak`` runs with the methods and faults, show nothing new: the adapters never ask for the controller.
``soak`` also runs the tests marked long. With ``all`` every such job runs every test. Tests of several nodes have jobs
of their own: this machine takes their places.
"""

from __future__ import annotations

import itertools
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path

from hvd_compress.tools.bench.jobs import CONTROLLERS

HERE = Path(__file__).resolve().parent
sys.path.insert(0, str(HERE.parent))

from launching import horovodrun  # noqa: E402

FRAMEWORKS = ["pytorch", "keras"]
RANKS = ["2", "3"]
JOBS: dict[tuple[str, str, str], list[str]] = {
    ("pytorch", "gloo", "2"): ["."],
    ("pytorch", "mpi", "3"): [
        "test_catalogue.py",
        "test_checkpoint.py::test_a_job_goes_on_from_its_checkpoint[auto]",
        "test_ddp.py",
        "test_direct.py",
        "test_driver.py",
        "test_faults.py",
        "test_fsdp.py::test_a_few_bits_train_as_plain_fsdp_does",
        "test_fsdp.py::test_the_bits_are_those_of_the_method",
        "test_equivalence.py::test_process_sets_train_apart",
        "test_without_a_rank.py",
    ],
    ("keras", "gloo", "2"): ["."],
    ("keras", "mpi", "3"): [
        "test_catalogue.py",
        "test_faults.py",
        "test_direct.py::test_process_sets",
        "test_equivalence.py::test_process_sets_train_apart",
    ],
    ("pytorch", "gloo", "2+2"): [
        "test_catalogue.py",
        "test_nodes.py",
        "test_local_steps.py::test_shards_of_fsdp_are_averaged_between_replicas",
        "test_local_steps.py::test_data_parallel_within_a_node",
    ],
    ("keras", "gloo", "2+2"): ["test_nodes.py"],
}
"""Framework, controller and number of ranks of the jobs of ``make test``, and which of the framework's tests they run.

A new file runs in the first job of its framework: name here what needs MPI or 3 ranks.
"""

APART = {"pytorch": "test_without_a_rank.py"}
"""Tests in a job of their own. Tests of errors leave in Horovod's queues what no other rank answers; when a rank joins
then, Horovod crashes."""

ALL = {job: ["."] for job in itertools.product(FRAMEWORKS, CONTROLLERS, RANKS)}
SOAK = {job: ["test_catalogue.py", "test_faults.py"] for job in ALL if job not in JOBS}
SOAK |= {(framework, "mpi", "2+2+2"): ["test_nodes.py"] for framework in FRAMEWORKS}
SOAK |= {(framework, "gloo", "2"): [".", "--long"] for framework in FRAMEWORKS}
SOAK[("keras", "mpi", "3")] = ["test_catalogue.py", "--long"]
SOAK[("keras", "gloo", "2+2")] = ["test_nodes.py", "test_catalogue.py", "--long"]


def run(framework: str, controller: str, ranks: str, names: Sequence[str] = (".",)) -> bool:
    """Run the tests of a framework in one job; print what rank 0 prints, and on failure what all ranks do."""
    print(f"== {framework}, {controller}, {ranks} ranks{'' if list(names) == ['.'] else ', in part'}", flush=True)
    counts = [int(count) for count in ranks.split("+")]
    folder = HERE / framework
    tests = [name.replace("=", f"={folder}/") if name.startswith("--") else folder / name for name in names]
    if len(counts) == 1:
        tests.append(f"--ignore={folder}/test_nodes.py")
    begin = time.monotonic()
    with tempfile.TemporaryDirectory() as logged:
        try:
            job = horovodrun(
                sum(counts),
                controller,
                HERE / "worker.py",
                logged,
                *tests,
                timeout=900,
                check=False,
                nodes=counts if len(counts) > 1 else [],
                environment={"HOROVOD_DYNAMIC_PROCESS_SETS": "1"} if len(counts) > 1 else None,
            )
            output, ok = job.stdout, job.returncode == 0
        except subprocess.TimeoutExpired as error:
            output, ok = f"{(error.stdout or b'').decode()}\nThe job hung and was ended.", False
        logs = [path.read_text() for path in sorted(Path(logged).glob("rank*"))]
    ok = ok and len(logs) == sum(counts)
    print("\n".join(logs[:1] if ok else [output, *logs]))
    print(f"== {'passed' if ok else 'FAILED'} in {time.monotonic() - begin:.0f} s", flush=True)
    return ok


def parts(framework: str, names: list[str]) -> list[list[str]]:
    """Split the tests of a framework into those that share a job."""
    apart = APART.get(framework, "")
    if "." in names:
        return [[*names, f"--ignore={apart}"], [apart]] if apart else [names]
    return [[name for name in names if name != apart], *([[apart]] if apart in names else [])]


def main(*chosen: str) -> int:
    """Run all jobs that fit the arguments."""
    jobs = ALL if "all" in chosen else SOAK if "soak" in chosen else JOBS
    words = set(chosen) - {"all", "soak"}
    picked = [job for job in jobs if words <= set(job)]
    failed = [job for job in picked if not all(run(*job, names) for names in parts(job[0], jobs[job]))]
    for job in failed:
        print("FAILED:", *job)
    return bool(failed) or not picked


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
