"""The progress of a comparison: bars on a terminal, or else a line for every training that has ended."""

from __future__ import annotations

from types import TracebackType

from rich.console import Console
from rich.markup import escape
from rich.progress import BarColumn, Progress, TaskID, TextColumn, TimeElapsedColumn

from hvd_compress.tools.compare.job import Goal, Job, Outcome, Point


class Bars:
    """A bar for each method, with so many trainings of each."""

    def __init__(self, methods: list[str], trainings: int, console: Console) -> None:
        columns = (
            TextColumn("{task.fields[method]}"),
            BarColumn(24),
            TimeElapsedColumn(),
            TextColumn("{task.description}"),
        )
        self._console = console
        self._trainings = trainings
        self._progress = Progress(*columns, console=console, disable=not console.is_terminal)
        self._tasks: dict[str, TaskID] = {
            spec: self._progress.add_task("", total=trainings, start=False, method=escape(spec)) for spec in methods
        }
        self._ended = dict.fromkeys(methods, 0)

    def __enter__(self) -> Bars:
        self._progress.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._progress.stop()

    def begins(self, job: Job, note: str) -> None:
        self._progress.start_task(self._tasks[job.spec])
        self._say(job, f"{note} ...")

    def moves(self, job: Job, goal: Goal | None, point: Point | None) -> None:
        """Show the goal and the last point, as soon as they are known."""
        if goal and point and not job.measured:
            share = point.step / max(goal.steps, 1)
            self._progress.update(self._tasks[job.spec], completed=self._ended[job.spec] + share)
            self._say(job, f"step {point.step} of {goal.steps}, {goal.metric} {point.metric:.4g}")

    def ends(self, job: Job, outcome: Outcome | None, failure: str, fresh: bool) -> None:
        """Show the end; ``fresh`` tells whether the training was done now, and not found in the folder."""
        if not job.measured:
            self._ended[job.spec] += 1
            self._progress.update(self._tasks[job.spec], completed=self._ended[job.spec])
        text = failure.partition("\n")[0] if failure else summary(outcome) if outcome else "measured"
        self._say(job, text)
        if self._ended[job.spec] >= self._trainings:
            self._progress.stop_task(self._tasks[job.spec])
        if self._progress.disable and fresh:
            note = " (measuring the error)" if job.measured else f" seed {job.seed}{_rate(job)}"
            self._console.print(escape(f"{job.spec}{note}: {text}"), highlight=False, soft_wrap=True)

    def _say(self, job: Job, text: str) -> None:
        number = min(self._ended[job.spec] + 1, self._trainings)
        self._progress.update(self._tasks[job.spec], description=escape(f"{number} of {self._trainings}: {text}"))


def summary(outcome: Outcome) -> str:
    end = outcome.curve[-1]
    if outcome.diverged:
        return f"diverged after {outcome.steps} steps"
    goal = outcome.goal
    return f"{goal.metric} {end.metric:.4g} after {outcome.steps} steps in {outcome.seconds:.1f} s"


def _rate(job: Job) -> str:
    return "" if job.lr is None else f", learning rate {job.lr:g}"
