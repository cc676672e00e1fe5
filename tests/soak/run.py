"""Long jobs with faults, on this machine: what `make soak` runs.

Use::

    python tests/soak/run.py [name ...]

Each job prints its figures; at the end they stand in one table. The exit status tells whether all held.
"""

from __future__ import annotations

import json
import re
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

HERE = Path(__file__).resolve().parent
sys.path.insert(0, str(HERE.parent))

from launching import horovodrun  # noqa: E402
from soak.elastic import HERE as HOST  # noqa: E402
from soak.elastic import VICTIM, Scene  # noqa: E402
from soak.report import Report  # noqa: E402

STEPS = 5000
RANKS = 3


class Outcome(NamedTuple):
    """What a job has shown.

    Attributes:
        ok: Whether it held.
        steps: Training steps.
        faults: What was injected.
        memory: Resident memory of the rank that has grown most, after the first round and at the end.
        note: What else is to be said.
    """

    ok: bool
    steps: str
    faults: str
    memory: str
    note: str


def long(framework: str) -> Outcome:
    """Thousands of steps with changing methods and shapes."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder, "report")
        horovodrun(RANKS, "mpi", HERE / f"long_{framework}.py", str(STEPS), path, timeout=800)
        report = Report.read(path)
    memory = f"{report.memory[0]:.0f} -> {report.memory[-1]:.0f} MB"
    return Outcome(report.ok, f"{report.steps:,}", f"{report.faults} not finite", memory, f"ranks equal, {report.left}")


def killed(framework: str, controller: str) -> Outcome:
    """A rank is killed in the middle of an exchange: the others end with an error."""
    with tempfile.TemporaryDirectory() as folder:
        begin = time.monotonic()
        environment = {"HOROVOD_GLOO_TIMEOUT_SECONDS": "10"}
        job = horovodrun(
            RANKS, controller, HERE / f"killed_{framework}.py", folder, check=False, environment=environment
        )
        words = [path.read_text() for path in sorted(Path(folder).iterdir())]
    ended = [word for word in words if word.startswith("a step without the killed rank")]
    said = f"{len(words)} of 2 others could still say: {words[0][:60]!r}" if words else "all were ended at once"
    note = f"over after {time.monotonic() - begin:.0f} s; {said}"
    return Outcome(job.returncode != 0 and not ended, "5", "1 SIGKILL", "", " ".join(note.split()))


def slow() -> Outcome:
    """A rank stalls: the others wait, and the result is what it was."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder, "report")
        horovodrun(RANKS, "gloo", HERE / "slow.py", path)
        report = json.loads(path.read_text())
    note = "same bits as without the stall"
    return Outcome(report["equal"], "6", f"1 stall of {report['stall']} s", "", note)


def elastic(framework: str) -> Outcome:
    """A worker is killed, another one joins."""
    with tempfile.TemporaryDirectory() as folder:
        place = Path(folder)
        (place / "hosts").write_text(f"{HOST}:2\n{VICTIM}:1\n")
        script = place / "discover.sh"
        script.write_text(f"#!/bin/sh\ncat {place}/hosts\n")
        script.chmod(0o755)
        options = ["--min-np", "2", "--max-np", str(RANKS), "--host-discovery-script", str(script)]
        horovodrun(
            RANKS,
            "gloo",
            HERE / f"elastic_{framework}.py",
            folder,
            "topk:ratio=0.05",
            options=options,
            environment={"HOROVOD_GLOO_TIMEOUT_SECONDS": "10"},
        )
        diaries = [json.loads(path.read_text()) for path in place.glob("worker*.json")]
    return judged(diaries)


def judged(diaries: list[list[dict[str, object]]]) -> Outcome:
    """Read what the workers of an elastic job have written."""
    regroups = [entry for diary in diaries for entry in diary if entry["event"] == "regroup"]
    survivors = [entry for entry in regroups if entry["residual"]]
    newcomers = [entry for entry in regroups if not entry["residual"]]
    ends = [diary[-1] for diary in diaries if diary[-1]["event"] == "end"]
    ok = len(ends) == RANKS and all(entry["equal"] for entry in ends)
    ok = ok and len(survivors) == 2 and all(entry["kept"] for entry in survivors) and len(newcomers) == 1
    note = f"{len(survivors)} survivors kept their residuals, {len(newcomers)} newcomer began with none; ranks equal"
    return Outcome(ok, str(Scene.steps), "1 SIGKILL, 1 join", "", note)


def schedules(framework: str, count: int) -> Outcome:
    """Random schedules of faults; prints what they were, and which of them broke a rule."""
    command = [sys.executable, str(HERE / "schedules" / "run.py"), framework, "--seeds", str(count)]
    job = subprocess.run(command, stdout=subprocess.PIPE, text=True, timeout=3600)
    print(job.stdout, flush=True)
    note = next((line for line in job.stdout.splitlines() if line.startswith(f"{count} schedules")), "ended early")
    found = re.search(r"(\d+) steps, (\d+) faults", note)
    steps, faults = found.groups() if found else ("", "")
    return Outcome(job.returncode == 0, steps, f"{faults} of all kinds", "", note)


def law(adapter: str, draws: int) -> Outcome:
    """Random programs: what ranks give is delivered."""
    command = [sys.executable, str(HERE.parent / "laws" / "run.py"), adapter, "--draws", str(draws)]
    job = subprocess.run(command, stdout=subprocess.PIPE, text=True, timeout=3600)
    return Outcome(job.returncode == 0, "", "of all kinds", "", job.stdout.splitlines()[-1])


JOBS: dict[str, Callable[[], Outcome]] = {
    "elastic, PyTorch": lambda: elastic("pytorch"),
    "elastic, TensorFlow": lambda: elastic("keras"),
    "killed, PyTorch, Gloo": lambda: killed("pytorch", "gloo"),
    "killed, PyTorch, MPI": lambda: killed("pytorch", "mpi"),
    "killed, TensorFlow, Gloo": lambda: killed("keras", "gloo"),
    "killed, TensorFlow, MPI": lambda: killed("keras", "mpi"),
    "slow rank": slow,
    "schedules, PyTorch": lambda: schedules("torch", 200),
    "schedules, TensorFlow": lambda: schedules("keras", 100),
    "law, LocalWorld": lambda: law("local", 2000),
    "law, threads": lambda: law("threads", 2000),
    "law, DDP": lambda: law("ddp", 200),
    "law, FSDP2": lambda: law("fsdp", 200),
    "law, TensorFlow": lambda: law("keras", 200),
    "law, PyTorch": lambda: law("horovod", 200),
    "long, PyTorch": lambda: long("pytorch"),
    "long, TensorFlow": lambda: long("keras"),
}


def main(*chosen: str) -> int:
    """Run the jobs whose names begin with one of the arguments; all without any."""
    rows: list[tuple[str, Outcome, float]] = []
    for name, job in JOBS.items():
        if chosen and not name.startswith(chosen):
            continue
        begin = time.monotonic()
        try:
            outcome = job()
        except (AssertionError, OSError, subprocess.TimeoutExpired) as error:
            outcome = Outcome(False, "", "", "", str(error)[-2000:])
        rows.append((name, outcome, time.monotonic() - begin))
        print(f"{name}: {'held' if outcome.ok else 'FAILED'}; {outcome.note}", flush=True)
    print(f"\n{RANKS} ranks in each job; in schedules, 2 or 3\n")
    print("| Job | | Steps | Faults | Resident memory | Took |\n| --- | --- | --- | --- | --- | --- |")
    for name, outcome, seconds in rows:
        verdict = "held" if outcome.ok else "FAILED"
        print(f"| {name} | {verdict} | {outcome.steps} | {outcome.faults} | {outcome.memory} | {seconds:.0f} s |")
    return int(not rows or not all(outcome.ok for _, outcome, _ in rows))


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
