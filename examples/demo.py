"""Show what compression gains: train a small CNN with several methods, in PyTorch and in Keras, and compare.

Each run is one of the examples with two ranks: on two emulated hosts with a slow link or, where hosts cannot be
emulated, both on this machine.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import NamedTuple

from rich.bar import Bar
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TimeElapsedColumn
from rich.table import Table

from hvd_compress.errors import ClusterError
from hvd_compress.tools import tables
from hvd_compress.tools.bench.distributed.results import BASELINES
from hvd_compress.tools.bench.jobs import LaunchSpec, execute
from hvd_compress.tools.cluster import Cluster, become_root
from hvd_compress.tools.terminal import remove_jobs_on_sigterm
from hvd_compress.tools.units import UNLIMITED, number, times

EXAMPLES = Path(__file__).parent
FRAMEWORKS = {"PyTorch": "pytorch", "Keras": "keras"}
METHODS = (*BASELINES, "topk:ratio=0.01", "powersgd:rank=4")

RANKS = 2
HERE = LaunchSpec(0, UNLIMITED, RANKS, "gloo")
EMULATED = LaunchSpec(RANKS, "100mbit", RANKS, "gloo")
WIDE = ("--hidden", "512")
"""Options of a model of 0.5 million parameters, 3.6 times as many as by default, for the slow link."""
WIDE_EPOCHS = 6

TIME_LIMIT = 180.0
"""Seconds for one run; a run that takes longer hangs."""
LEAST_ACCURACY = 0.9
LARGEST_LOSS = 0.05
"""Largest accepted loss of accuracy."""

COLUMNS = (
    "Framework",
    "Method",
    "Test\naccuracy",
    "Bytes per\nrank\nand step",
    "Ratio",
    "Step time",
    "Speedup\nover none\nand fp16",
)
BAR = 40
"""Characters of the longest bar."""


class DemoError(Exception):
    """The demo did not show what it should."""


class Run(NamedTuple):
    """A training that is to be done.

    Attributes:
        framework: A key of `FRAMEWORKS`.
        method: A spec string.
        options: More options of the example.
        epochs: How many.
    """

    framework: str
    method: str
    options: tuple[str, ...] = ()
    epochs: int = 10

    def __str__(self) -> str:
        return f"{self.framework} {self.method}"


class Result(NamedTuple):
    """Result that an example prints at its end.

    Attributes:
        accuracy: Share of the test images that are recognised.
        steps: Training steps.
        bytes_per_step: Payload that a rank sends in each.
        ratio: How many times smaller that is than the gradients in float32.
        step_seconds: Median time of a step.
        ranks_equal: Whether all ranks ended with the same weights, bit for bit; the example fails if not.
    """

    accuracy: float
    steps: int
    bytes_per_step: int
    ratio: float
    step_seconds: float
    ranks_equal: bool


Results = dict[Run, Result]


def train(run: Run, where: LaunchSpec, progress: Callable[[int], None]) -> Result:
    """Do a run.

    Args:
        run: What to train.
        where: On which hosts.
        progress: Called with the number of epochs done, again and again.

    Raises:
        DemoError: If the run fails or hangs.
    """
    script = EXAMPLES / FRAMEWORKS[run.framework] / "digits.py"
    with TemporaryDirectory(prefix="hvd-compress-demo-") as folder:
        report = Path(folder, "report.jsonl")
        report.touch()
        options = ["--compression", run.method, "--epochs", str(run.epochs), "--report", str(report), *run.options]

        def look() -> None:
            progress(min(run.epochs, len(report.read_text().splitlines())))

        try:
            execute([str(script), *options], where, look, TIME_LIMIT)
        except ClusterError as error:
            raise DemoError(f"{run}: {error}") from None
        look()
        return Result(**json.loads(report.read_text().splitlines()[-1]))


def train_all(console: Console, runs: Sequence[Run], where: LaunchSpec = HERE) -> Results:
    """Do runs, one after the other."""
    columns = ("{task.description}", BarColumn(), MofNCompleteColumn(), "epochs", TimeElapsedColumn())
    with Progress(*columns, console=console, disable=not console.is_interactive) as bars:
        return {run: train_visibly(run, where, bars) for run in runs}


def train_visibly(run: Run, where: LaunchSpec, bars: Progress) -> Result:
    """Do a run under a progress bar; without a terminal, print a line at its end."""
    begin = time.monotonic()
    task = bars.add_task(f"{run.framework:7} {run.method}", total=run.epochs)
    result = train(run, where, lambda done: bars.update(task, completed=done))
    if bars.disable:
        print(f"{run}: accuracy {result.accuracy:.3f} in {time.monotonic() - begin:.0f} s", flush=True)
    return result


def place() -> tuple[LaunchSpec, str]:
    """Return where to train, and why that is not on emulated hosts; empty if it is."""
    try:
        with Cluster(EMULATED.hosts, EMULATED.rate):
            return EMULATED, ""
    except ClusterError as error:
        return HERE, str(error)


def runs_on(where: LaunchSpec) -> list[Run]:
    """Return all runs: with emulated hosts, of a model that is large for their link."""
    more = (WIDE, WIDE_EPOCHS) if where.hosts else ()
    return [Run(framework, spec, *more) for framework in FRAMEWORKS for spec in METHODS]


def rows(results: Results) -> Iterator[tuple[str, ...]]:
    """The table as text, row by row."""
    seconds = {(run.framework, run.method): result.step_seconds for run, result in results.items()}
    for run, result in results.items():
        baseline = min(seconds[run.framework, spec] for spec in BASELINES)
        yield (
            run.framework,
            run.method,
            f"{result.accuracy:.3f}",
            f"{result.bytes_per_step:,}",
            f"{result.ratio:.1f}",
            f"{number(result.step_seconds * 1000)} ms",
            f"{times(baseline / result.step_seconds)}x",
        )


def markdown(results: Results) -> str:
    """The table for a README."""
    heads = [column.replace("\n", " ") for column in COLUMNS]
    return tables.markdown([heads, *rows(results)], f"ll{'r' * (len(COLUMNS) - 2)}") + "\n"


def show(console: Console, results: Results, where: LaunchSpec) -> None:
    """Print the table, and the times of a step as bars."""
    (epochs,) = {run.epochs for run in results}
    drawn = tables.plain(f"Handwritten digits, {RANKS} ranks, {epochs} epochs", title_justify="left")
    for index, column in enumerate(COLUMNS):
        drawn.add_column(column, justify="left" if index < 2 else "right", no_wrap=True)
    for row in rows(results):
        drawn.add_row(*row, end_section=row[1] == METHODS[-1])
    console.print(drawn, "", chart(results), "", caption(where), sep="\n", highlight=False)


def chart(results: Results) -> Table:
    """The bars."""
    drawn = Table.grid(padding=(0, 1, 0, 0))
    longest = max(result.step_seconds for result in results.values())
    for run, result in results.items():
        colour = "bright_black" if run.method in BASELINES else "green"
        bar = Bar(longest, 0, result.step_seconds, width=BAR, color=colour)
        drawn.add_row(run.framework, run.method, bar, f"{number(result.step_seconds * 1000)} ms")
    return drawn


def caption(where: LaunchSpec) -> str:
    """Say what the times of a step mean."""
    if where.hosts:
        link = f"The ranks are on {where.hosts} emulated hosts of this machine, with a link of 100 Mbit/s between them."
    else:
        link = "Both ranks are on this machine: the step time shows what compression costs, not what it saves."
    return f"{link}\nThe speedup is that of a step, over the faster of none and fp16."


def check(results: Results) -> None:
    """Compare the accuracies.

    Raises:
        DemoError: If one has collapsed.
    """
    for run, result in results.items():
        least = max(LEAST_ACCURACY, results[run._replace(method="none")].accuracy - LARGEST_LOSS)
        if result.accuracy < least:
            raise DemoError(
                f"{run}: the accuracy has collapsed to {result.accuracy:.3f}; expected at least {least:.3f}"
            )


def main() -> None:
    """Run the demo."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--markdown", type=Path, metavar="FILE", help="write the table to this file, too")
    args = parser.parse_args()
    remove_jobs_on_sigterm()
    console = Console(force_terminal=sys.stdout.isatty())
    try:
        become_root()
        where, obstacle = place()
        if obstacle:
            print(f"To see what compression gains on a slow link: {obstacle}", flush=True)
        results = train_all(console, runs_on(where), where)
        show(console, results, where)
        if args.markdown:
            args.markdown.write_text(markdown(results))
        check(results)
    except DemoError as error:
        sys.exit(f"demo: {error}")
    except KeyboardInterrupt:
        sys.exit(130)


if __name__ == "__main__":
    main()
