"""Run Horovod's own tests with our compression as the default of its optimizers and tapes.

Use::

    python tools/horovod_tests.py path/to/horovod [--file torch] [--spec topk:ratio=1.0] [-k expression]

The argument is a checkout of Horovod, of the version that is installed; nothing in it is changed. Each file runs in
stock Horovod first. The tests that pass, and that use an optimizer or a tape without naming a compression, run again
with each spec. They must pass with specs that lose nothing, and neither hang nor crash with any.

All tests of a file run in one job. Where one fails, hangs or crashes, the job ends and the rest run in another.
"""

from __future__ import annotations

import argparse
import collections
import re
import subprocess
import sys
import time
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any, NamedTuple

from hvd_compress.tools.bench.jobs import CONTROLLERS

ROOT = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(ROOT / "tools"), str(ROOT / "tests")]

from launching import horovodrun  # noqa: E402

from horovod_worker import PACKAGE, STARTING, Job, records  # noqa: E402

ATTEMPTS = 3
"""Attempts at a test whose ranks cannot connect again, as happens after a shutdown on a busy machine."""

LOGS = ROOT / "build" / "horovod-tests"


class File(NamedTuple):
    """A file of Horovod's tests, the framework it is for, and which tests run if not all, as with ``pytest -k``."""

    path: str
    framework: str
    keyword: str = ""


FILES = {
    "torch": File("test/parallel/test_torch.py", "torch"),
    "keras": File("test/parallel/test_tensorflow2_keras.py", "tensorflow"),
    # The others are of collectives, many of them slow.
    "tensorflow": File(
        "test/parallel/test_tensorflow.py", "tensorflow", "aggregation or distributed or model_parallel"
    ),
}

LOSSLESS = [
    "topk:ratio=1.0,min_size=0,vectors=on",
    "randomk:ratio=1.0,min_size=0,vectors=on",
    "powersgd:rank=64,min_gain=0,min_size=0,vectors=on",
]
LOSSY = ["topk:ratio=0.1,min_size=0,vectors=on"]


class JobError(Exception):
    """A job that could not run its tests."""


class Verdict(NamedTuple):
    """Outcome of a test on all ranks.

    Attributes:
        outcome: ``passed``, ``skipped``, ``numbers`` (an assertion of the test fails), ``error``, ``hung`` or
            ``crashed``; ``unconnected`` where Horovod could not begin.
        text: What went wrong and where, in a line.
        injected: Whether it used a default compression.
    """

    outcome: str
    text: str = ""
    injected: bool = False


Verdicts = Mapping[str, Verdict]


def read(folder: Path, ranks: int) -> tuple[list[str], dict[str, Verdict]]:
    """Return the tests that a job was to run, in order, and how those went that it began."""
    notes = [list(records(folder, rank)) for rank in range(ranks)]
    collected = [record["tests"] for rank in notes for record in rank if record["event"] == "collected"]
    tests: list[str] = collected[0] if collected else []
    begun = {str(record["test"]) for rank in notes for record in rank if record["event"] == "start"}
    return tests, {test: judge(folder, test, notes) for test in tests if test in begun}


def judge(folder: Path, test: str, notes: list[list[dict[str, Any]]]) -> Verdict:
    """Return how a test went: the first error on any rank tells why."""
    of_ranks = [[record for record in rank if record["test"] == test] for rank in notes]
    errors = sorted((r["time"], r["kind"], r["text"]) for rank in of_ranks for r in rank if r["event"] == "error")
    ends = [next((record for record in rank if record["event"] == "end"), None) for rank in of_ranks]
    injected = any(end is not None and end["injected"] for end in ends)
    halting = [rank for rank, end in enumerate(ends) if end is None]
    if halting:
        verdict = halted(folder, halting, injected)
        if verdict.outcome == "unconnected" or not errors:
            return verdict
    if errors:
        return Verdict(errors[0][1], errors[0][2], injected)
    return Verdict("passed" if any(end and end["outcome"] == "passed" for end in ends) else "skipped", "", injected)


def halted(folder: Path, ranks: Iterable[int], injected: bool) -> Verdict:
    """Return how a job came to its end, from what some of its ranks have left behind."""
    stacks = [(folder / f"stack{rank}").read_text() for rank in ranks]
    ends = [last_words(stack) for stack in stacks if stack] or [("crashed", f"without a word, see {folder}")]
    # A rank may hang because another has crashed.
    return Verdict(*min(ends, key=lambda end: ("unconnected", "crashed", "hung").index(end[0])), injected)


def last_words(stack: str) -> tuple[str, str]:
    """Return how a process came to its end, and where, from what `faulthandler` wrote."""
    lines = stack.splitlines()
    heads = [number for number, line in enumerate(lines) if "(most recent call first)" in line]
    current = [number for number in heads if lines[number].startswith("Current thread")]
    # After a time limit the main thread comes last.
    frames = [line.strip() for line in lines[(current or heads[-1:] or [len(lines)])[0] + 1 :]]
    places = [frame for part in (f"/{PACKAGE}/", "/test/", "") for frame in frames if part in frame][:1]
    if frames and re.search(r"horovod/common/basics.py.* in init$", frames[0]):
        return "unconnected", places[0]
    if lines[0].startswith("Timeout"):
        return "hung", " ".join(places)
    return "crashed", " ".join([lines[0], *places])


class Runner:
    """Runs files of tests.

    Args:
        checkout: Folder of Horovod's sources.
        ranks: How many.
        controller: ``gloo`` or ``mpi``.
        limit: Seconds for a test.
        logs: Folder for what the ranks print; each job gets a folder in it.
    """

    def __init__(self, checkout: Path, ranks: int, controller: str, limit: float, logs: Path) -> None:
        self._checkout, self._ranks, self._controller, self._limit, self._logs = (
            checkout,
            ranks,
            controller,
            limit,
            logs,
        )
        self._jobs = 0

    def run(self, file: File, spec: str, keyword: str = "", tests: list[str] | None = None) -> dict[str, Verdict]:
        """Run tests of a file in as many jobs as it takes.

        Args:
            file: The file.
            spec: Of the default compression; empty for stock Horovod.
            keyword: Which tests, as with ``pytest -k``.
            tests: Their names; None for all that the keyword selects.

        Raises:
            JobError: If a job could not begin.
        """
        verdicts: dict[str, Verdict] = {}
        attempts = collections.Counter[str]()
        while tests is None or tests:
            self._jobs += 1
            folder = self._logs / f"job{self._jobs}"
            job = Job(str(self._checkout), file.path, file.framework, spec, keyword, tests, self._limit, str(folder))
            code, output = self._launch(job)
            tests, new = read(folder, self._ranks)
            if not new and (tests or code not in (0, 5)):
                raise JobError(f"{file.path} could not run:\n{output[-3000:]}\nThe logs are in {folder}.")
            attempts.update(list(new))
            verdicts |= {
                test: verdict
                for test, verdict in new.items()
                if verdict.outcome != "unconnected" or attempts[test] == ATTEMPTS
            }
            tests = [test for test in tests if test not in verdicts]
            if code and not tests and all(verdict.outcome in ("passed", "skipped") for verdict in new.values()):
                verdicts["the end of the job"] = halted(folder, range(self._ranks), bool(spec))
        return verdicts

    def _launch(self, job: Job) -> tuple[int, str]:
        """Run a job; each rank ends itself if it hangs, so that the limit here is a last resort."""
        limit = STARTING + self._limit * (1 + len(job.tests if job.tests is not None else range(200)))
        worker = ROOT / "tools" / "horovod_worker.py"
        environment = {
            "PYTHONDONTWRITEBYTECODE": "1",
            "PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1",
            "HOROVOD_FUSION_THRESHOLD": str(128 * 2**20),  # as without it: some of the tests need fusion
        }
        try:
            done = horovodrun(
                self._ranks, self._controller, worker, job.write(), timeout=limit, check=False, environment=environment
            )
        except subprocess.TimeoutExpired as error:
            raise JobError(f"{job.file} did not end in {limit:.0f} s; the logs are in {job.folder}") from error
        Path(job.folder, "launcher").write_text(done.stdout)
        return done.returncode, done.stdout


def comparable(stock: Verdicts) -> list[str]:
    """Return the tests that show what compression does: they pass in stock Horovod and use its default."""
    return [test for test, verdict in stock.items() if verdict.outcome == "passed" and verdict.injected]


def failures(verdicts: Verdicts, lossy: bool) -> dict[str, Verdict]:
    """Return the tests that fail because of compression; with a lossy spec the numbers may be others."""
    allowed = {"passed", "numbers"} if lossy else {"passed"}
    return {test: verdict for test, verdict in verdicts.items() if verdict.outcome not in allowed}


def count(verdicts: Verdicts, *outcomes: str) -> int:
    """Return how many tests went in one of some ways."""
    return sum(verdict.outcome in outcomes for verdict in verdicts.values())


def show(title: str, verdicts: Verdicts) -> None:
    """Print tests that did not pass, if there are any."""
    if verdicts:
        print(f"  {title}:")
    for test, verdict in verdicts.items():
        print(f"    {verdict.outcome:8} {test.partition('::')[2] or test}  {verdict.text}")


ROW = "{:11} {:50} {:>6} {:>7} {:>8} {:>8} {:>7} {:>7} {:>5}"


def row(name: str, spec: str, verdicts: Verdicts, seconds: float) -> None:
    """Print a line of the table."""
    counts = [count(verdicts, *which) for which in (["passed"], ["skipped"], ["numbers"], ["error"])]
    halted = count(verdicts, "hung", "crashed", "unconnected")
    print(ROW.format(name, spec or "(stock)", len(verdicts), *counts, halted, f"{seconds:.0f}"), flush=True)


def compare(runner: Runner, name: str, lossless: list[str], lossy: list[str], keyword: str) -> int:
    """Run a file in stock Horovod, then with each spec; print the table.

    Returns:
        How many tests fail because of compression.
    """
    file, begin = FILES[name], time.monotonic()
    stock = runner.run(file, "", keyword or file.keyword)
    row(name, "", stock, time.monotonic() - begin)
    bad = {test: verdict for test, verdict in stock.items() if verdict.outcome not in ("passed", "skipped")}
    show("fail in stock Horovod, and are not run again", bad)
    tests, total = comparable(stock), 0
    print(f"  {len(tests)} of those that pass use an optimizer or a tape without a compression", flush=True)
    for spec in [*lossless, *lossy] if tests else []:
        begin = time.monotonic()
        verdicts = runner.run(file, spec, tests=tests)
        row(name, spec, verdicts, time.monotonic() - begin)
        ours = failures(verdicts, spec in lossy)
        show("fail only with compression", ours)
        numbers = {test: verdict for test, verdict in verdicts.items() if verdict.outcome == "numbers"}
        show("have other numbers, as they may", numbers if spec in lossy else {})
        total += len(ours)
    return total


def arguments(words: list[str]) -> argparse.Namespace:
    """Read the command line."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("checkout", type=Path, help="a checkout of Horovod, of the version that is installed")
    parser.add_argument("--file", action="append", choices=list(FILES), help="only these tests (may be repeated)")
    parser.add_argument("--spec", action="append", metavar="SPEC", help="only this spec, which loses nothing")
    parser.add_argument(
        "--lossy", action="append", metavar="SPEC", help="only this spec, with which numbers may differ"
    )
    parser.add_argument("-k", default="", metavar="EXPRESSION", help="only these tests, as with pytest")
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--controller", choices=list(CONTROLLERS), default="gloo")
    parser.add_argument("--limit", type=float, default=120, help="seconds after which a test hangs")
    parser.add_argument("--logs", type=Path, default=LOGS, help="where to write what the ranks print")
    return parser.parse_args(words)


def main(*words: str) -> int:
    """Compare stock Horovod with each spec, file by file."""
    options = arguments(list(words))
    given = options.spec or options.lossy
    lossless, lossy = (options.spec or [], options.lossy or []) if given else (LOSSLESS, LOSSY)
    logs = options.logs / time.strftime("%Y%m%d-%H%M%S")
    runner = Runner(options.checkout.resolve(), options.ranks, options.controller, options.limit, logs.resolve())
    print(f"Logs: {logs}")
    print(ROW.format("file", "spec", "tests", "passed", "skipped", "numbers", "errors", "halted", "s"))
    total = 0
    for name in options.file or FILES:
        try:
            total += compare(runner, name, lossless, lossy, options.k)
        except JobError as error:
            print(f"horovod-tests: {error}", file=sys.stderr)
            return 2
    print("Nothing fails because of compression." if not total else f"{total} fail because of compression.")
    return bool(total)


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
