"""Show what compression does: train a small CNN with several methods, in PyTorch and in Keras, and compare.

Each run is one of the examples under ``horovodrun`` with two ranks on this machine.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import NamedTuple

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TimeElapsedColumn
from rich.table import Table

FRAMEWORKS = {"PyTorch": "pytorch", "Keras": "keras"}
METHODS = ("none", "fp16", "topk:ratio=0.01", "powersgd:rank=4")
RANKS = 2
EPOCHS = 10

TIME_LIMIT = 180.0
"""Seconds for one run; a run that takes longer hangs."""
LEAST_ACCURACY = 0.9
LARGEST_LOSS = 0.05
"""How far below the accuracy without compression a method may end."""

EXAMPLES = Path(__file__).parent
BIN = Path(sys.executable).parent
ENVIRONMENT = {
    "PATH": f"{BIN}{os.pathsep}{os.environ['PATH']}",
    "OMP_NUM_THREADS": "1",  # a rank has one core
    "CUDA_VISIBLE_DEVICES": "-1",  # the ranks would fight for the memory of one GPU
    "TF_CPP_MIN_LOG_LEVEL": "3",
}

COLUMNS = ("Framework", "Method", "Test\naccuracy", "Bytes per rank\nand step", "Ratio", "Step time")
CAPTION = "Both ranks are on this machine: the step time shows what compression costs, not what it saves on a network."


class DemoError(Exception):
    """The demo did not show what it should.

    Args:
        message: Why not, in one line.
        output: Lines that help to understand it.
    """

    def __init__(self, message: str, output: str = "") -> None:
        super().__init__(message)
        self.output = output


class Run(NamedTuple):
    """A training that is to be done.

    Attributes:
        framework: A key of `FRAMEWORKS`.
        method: A spec string.
        options: More options of the example.
    """

    framework: str
    method: str
    options: tuple[str, ...] = ()

    def __str__(self) -> str:
        return f"{self.framework} {self.method}"


class Result(NamedTuple):
    """What an example reports at its end.

    Attributes:
        accuracy: Share of the test images that are recognised.
        steps: Training steps.
        bytes_per_step: Payload that a rank sends in each.
        ratio: How many times smaller that is than the gradients in float32.
        step_seconds: Median time of a step.
        ranks_equal: Whether all ranks ended with the same weights, bit for bit.
    """

    accuracy: float
    steps: int
    bytes_per_step: int
    ratio: float
    step_seconds: float
    ranks_equal: bool


Results = dict[Run, Result]


def train(run: Run, folder: Path, progress: Callable[[int], None]) -> Result:
    """Do a run.

    Args:
        run: What to train.
        folder: For the log and the report.
        progress: Called with the number of epochs done, again and again.

    Raises:
        DemoError: If the run fails, hangs or leaves the ranks with different weights.
    """
    name = f"{FRAMEWORKS[run.framework]}-{re.sub('[^a-z0-9]+', '-', run.method)}"
    log, report = folder / f"{name}.log", folder / f"{name}.jsonl"
    report.touch()
    deadline = time.monotonic() + TIME_LIMIT
    with launched(run, log, report) as process:
        while process.poll() is None and time.monotonic() < deadline:
            progress(min(EPOCHS, len(report.read_text().splitlines())))
            time.sleep(0.1)
        status = process.poll()
    result = reported(report)
    if result is not None and not result.ranks_equal:
        raise DemoError(f"{run}: the ranks ended with different weights")
    if result is None or status != 0:
        what = f"ended with status {status}" if status is not None else f"was not done after {TIME_LIMIT:.0f} s"
        raise DemoError(f"{run} {what}", tail(log))
    progress(EPOCHS)
    return result


@contextmanager
def launched(run: Run, log: Path, report: Path) -> Iterator[subprocess.Popen[bytes]]:
    """Start a run and end it, whatever happens."""
    script = EXAMPLES / FRAMEWORKS[run.framework] / "digits.py"
    horovodrun = [str(BIN / "horovodrun"), "--gloo", "-np", str(RANKS)]
    options = ["--compression", run.method, "--epochs", str(EPOCHS), "--report", str(report), *run.options]
    with log.open("wb") as output:
        process = subprocess.Popen(
            [*horovodrun, sys.executable, str(script), *options],
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=subprocess.STDOUT,
            env=os.environ | ENVIRONMENT,
            start_new_session=True,  # Ctrl-C reaches the demo alone, which then ends horovodrun, which ends the ranks
        )
    try:
        yield process
    finally:
        if process.poll() is None:
            os.killpg(process.pid, signal.SIGTERM)
            process.wait()


def reported(report: Path) -> Result | None:
    """What stands at the end of a report: one line for each epoch, then the result; None if it is not complete."""
    lines = report.read_text().splitlines()
    return Result(**json.loads(lines[-1])) if len(lines) > EPOCHS else None


def tail(log: Path) -> str:
    """The last lines that the ranks wrote; those of horovodrun itself only if there are no others."""
    lines = log.read_text(errors="replace").splitlines()
    lines = [line for line in lines if re.match(r"\[\d+\]<std", line)] or lines
    return "".join(f"{line}\n" for line in lines[-20:])


def train_all(console: Console, folder: Path, runs: Sequence[Run]) -> Results:
    """Do runs, one after the other."""
    columns = ("{task.description}", BarColumn(), MofNCompleteColumn(), "epochs", TimeElapsedColumn())
    with Progress(*columns, console=console, disable=not console.is_interactive) as bars:
        return {run: train_visibly(run, folder, bars) for run in runs}


def train_visibly(run: Run, folder: Path, bars: Progress) -> Result:
    """Do a run under a progress bar; without a terminal, print a line at its end."""
    begin = time.monotonic()
    task = bars.add_task(f"{run.framework:7} {run.method}", total=EPOCHS)
    result = train(run, folder, lambda done: bars.update(task, completed=done))
    if bars.disable:
        print(f"{run}: accuracy {result.accuracy:.3f} in {time.monotonic() - begin:.0f} s", flush=True)
    return result


def rows(results: Results) -> Iterator[tuple[str, ...]]:
    """The table as text, row by row."""
    for run, result in results.items():
        yield (
            run.framework,
            run.method,
            f"{result.accuracy:.3f}",
            f"{result.bytes_per_step:,}",
            f"{result.ratio:.1f}",
            f"{result.step_seconds * 1000:.1f} ms",
        )


def table(results: Results) -> Table:
    """The table for the terminal."""
    drawn = Table(title=f"Handwritten digits, {RANKS} ranks, {EPOCHS} epochs", caption=CAPTION)
    for number, column in enumerate(COLUMNS):
        drawn.add_column(column, justify="left" if number < 2 else "right", no_wrap=number < 2)
    for row in rows(results):
        drawn.add_row(*row, end_section=row[1] == METHODS[-1])
    return drawn


def markdown(results: Results) -> str:
    """The table for a README."""
    lines = [COLUMNS, ("---", "---", *["---:"] * (len(COLUMNS) - 2)), *rows(results)]
    return "".join(f"| {' | '.join(line)} |".replace("\n", " ") + "\n" for line in lines)


def check(results: Results) -> None:
    """Compare the accuracies.

    Raises:
        DemoError: If one has collapsed.
    """
    for run, result in results.items():
        least = max(LEAST_ACCURACY, results[Run(run.framework, "none")].accuracy - LARGEST_LOSS)
        if result.accuracy < least:
            raise DemoError(
                f"{run}: the accuracy has collapsed to {result.accuracy:.3f}; expected at least {least:.3f}"
            )


def main() -> None:
    """Run the demo."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--markdown", type=Path, metavar="FILE", help="write the table to this file, too")
    args = parser.parse_args()
    if not (BIN / "horovodrun").exists():
        sys.exit(f"demo: there is no horovodrun beside {sys.executable}; run make setup, then make demo")
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    console = Console(force_terminal=sys.stdout.isatty())
    folder = Path(tempfile.mkdtemp(prefix="hvd-compress-demo-"))
    try:
        results = train_all(console, folder, [Run(framework, spec) for framework in FRAMEWORKS for spec in METHODS])
        console.print(table(results))
        if args.markdown:
            args.markdown.write_text(markdown(results))
        check(results)
    except DemoError as error:
        sys.exit(f"{error.output}demo: {error}; the logs are in {folder}")
    except KeyboardInterrupt:
        shutil.rmtree(folder)
        sys.exit(130)
    shutil.rmtree(folder)


if __name__ == "__main__":
    main()
