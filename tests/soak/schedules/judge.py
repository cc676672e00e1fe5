"""Whether a job with faults has done what it must, judged by what its ranks wrote down."""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Sequence
from itertools import pairwise, zip_longest
from typing import NamedTuple

from soak.schedules.diary import End, Entry, Loaded, Mass, Saved, Saving, Stepped, is_shared
from soak.schedules.schedule import KEEPS, Segment

TOLERANCE = 1e-5
"""Of the masses that are added up, for sums in single precision."""


KILLED = -9

STUCK = re.compile(r'most recent call first\):\n  File "[^"]*horovod/torch/mpi_ops.py", line \d+ in _\w+_async\n')
"""Where a thread stands that hands Horovod a tensor."""


class Process(NamedTuple):
    """What has become of a rank.

    Attributes:
        code: Exit code of its process; None if it had to be ended, as it hung.
        entries: What it wrote down.
        output: What it printed: where it stood, if it hung.
    """

    code: int | None
    entries: Sequence[Entry]
    output: str

    @property
    def stuck(self) -> bool:
        """Whether it hangs within Horovod's own C functions, which take tensors.

        When a rank is lost, Horovod's thread drops the tensors of its queue, locks the queue for that, and may want
        Python's global lock; a thread that hands it another tensor has the second lock and wants the first.
        """
        return self.code is None and STUCK.search(self.output) is not None

    @property
    def end(self) -> End | None:
        """How it says that it ended."""
        return next((entry for entry in self.entries if isinstance(entry, End)), None)

    def steps(self) -> list[Stepped]:
        """The steps that it made."""
        return [entry for entry in self.entries if isinstance(entry, Stepped)]


class Finding(NamedTuple):
    """Something that must not be.

    Attributes:
        kind: ``"divergence"``, ``"hang"``, ``"untyped"``, ``"refusal"`` (an error without a reason), ``"silence"`` (no
            error in spite of one), ``"trace"`` (a step that does not count has left one) or ``"mass"`` (what was sent
            and what was kept are not what came in).
        text: What was seen.
    """

    kind: str
    text: str


class Verdict(NamedTuple):
    """What a job has shown.

    Attributes:
        findings: What must not be.
        refused: Whether all ranks have refused to go on, with the same error.
        kept: What the ranks had not sent at each save that may be restored from now on.
        stuck: How many ranks were stuck within Horovod after another was killed.
    """

    findings: list[Finding]
    refused: bool
    kept: list[Mass]
    stuck: int


def judge(segment: Segment, processes: Sequence[Process], kept: Sequence[Mass], excused: bool = False) -> Verdict:
    """Judge a job.

    Args:
        segment: What was planned.
        processes: What became of the ranks.
        kept: What was not sent at each save that it may have started from.
        excused: Whether it may be refused for what happened to the job before.
    """
    stuck = [process for process in processes if process.stuck] if segment.has("kill", "kill while saving") else []
    findings = [
        Finding("hang", f"rank {rank}: {process.output[-3000:]}")
        for rank, process in enumerate(processes)
        if process.code is None and process not in stuck
    ]
    refused = False
    if not findings:
        findings, refused = _ends(segment, processes, excused)
    findings += _equal(processes)
    findings += _traces(processes)
    if not any(finding.kind in ("divergence", "trace") for finding in findings):
        findings += _masses(segment, processes, kept)
    return Verdict(findings, refused, [*_saves(processes)], len(stuck))


def _ends(segment: Segment, processes: Sequence[Process], excused: bool) -> tuple[list[Finding], bool]:
    """How the ranks ended."""
    living = [(rank, process) for rank, process in enumerate(processes) if process.code not in (KILLED, None)]
    silent = [rank for rank, process in living if process.end is None]
    if silent:
        return [
            Finding("untyped", f"rank {r} ended without a word: {processes[r].output[-3000:]}") for r in silent
        ], False
    ends = {rank: process.end for rank, process in living if process.end is not None}
    if len(living) < len(processes):
        wrong = {rank: end for rank, end in ends.items() if not (end.lost or end.typed)}
        return [Finding("untyped", f"rank {rank}, after a kill: {_said(end)}") for rank, end in wrong.items()], False
    alone = segment.refuses_alone
    if alone is not None and ends[alone].error == "StateError":
        wrong = {rank: end for rank, end in ends.items() if not (end.lost or end.typed)}
        return [Finding("untyped", f"rank {rank}, which went on: {_said(end)}") for rank, end in wrong.items()], True
    untyped = [Finding("untyped", f"rank {r}: {_said(end)}") for r, end in ends.items() if end.error and not end.typed]
    if len({(end.error, end.message) for end in ends.values()}) > 1:
        told = "; ".join(f"rank {rank}: {end.error or 'went on'} {end.message}" for rank, end in ends.items())
        return [*untyped, Finding("divergence", f"not all ranks have the same error: {told}")], False
    if untyped:
        return untyped, False
    first = ends[0]
    if first.error and not (segment.may_be_refused or excused):
        return [Finding("refusal", _said(first))], True
    if not first.error and segment.must_be_refused:
        return [Finding("silence", "the ranks were set up differently, and all went on")], False
    return [], bool(first.error)


def _said(end: End) -> str:
    return f"{end.error or 'no error'}: {end.message}\n{end.trace[-2500:]}"


def _equal(processes: Sequence[Process]) -> list[Finding]:
    """Bits of weights, gradients and shared leaves."""
    for steps in zip_longest(*(process.steps() for process in processes)):
        rows = [(rank, step) for rank, step in enumerate(steps) if step is not None]
        (base, one), others = rows[0], rows[1:]
        for rank, other in others:
            for what in ("step", "weights", "reduced"):
                if getattr(one, what) != getattr(other, what):
                    return [Finding("divergence", f"step {one.step}: {what} of ranks {base} and {rank} differ")]
            names = {name for name, _ in one.state.leaves.items() ^ other.state.leaves.items() if is_shared(name)}
            if names:
                return [Finding("divergence", f"step {one.step}: {sorted(names)} of ranks {base} and {rank} differ")]
    return []


def _traces(processes: Sequence[Process]) -> list[Finding]:
    """Steps that do not count leave the states as they were."""
    for rank, process in enumerate(processes):
        steps = process.steps()
        for before, after in pairwise(steps):
            changed = {name for name, _ in before.state.leaves.items() - after.state.leaves.items()}
            if after.empty and changed:
                return [
                    Finding("trace", f"step {after.step} does not count, and changed {sorted(changed)} of rank {rank}")
                ]
    return []


def _masses(segment: Segment, processes: Sequence[Process], kept: Sequence[Mass]) -> list[Finding]:
    """What came in is what was applied and what is kept, over all ranks."""
    if not KEEPS[segment.spec]:
        return []
    loaded = any(isinstance(entry, Loaded) for process in processes for entry in process.entries)
    before = list(kept) if loaded else [Mass(0.0, 0.0)]
    for steps in zip(*(process.steps() for process in processes), strict=False):
        came = Mass.join(step.gradient for step in steps)
        after = Mass.join(step.state.kept for step in steps)
        applied = steps[0].applied
        excess = [
            mass.total + came.total - applied.total - after.total
            for mass in before
            if _close(mass, came, applied, after)
        ]
        if not excess:
            return [Finding("mass", f"step {steps[0].step}: before {before}, in {came}, out {applied}, after {after}")]
        before = [after]
    return []


def _close(before: Mass, came: Mass, applied: Mass, after: Mass) -> bool:
    """Whether nothing was lost, up to rounding."""
    size = before.size + came.size + applied.size + after.size
    return math.isclose(before.total + came.total, applied.total + after.total, rel_tol=0, abs_tol=TOLERANCE * size)


def _saves(processes: Sequence[Process]) -> Iterable[Mass]:
    """What was kept at each save that all ranks have begun."""
    begun = [{e.step: e.kept for e in process.entries if isinstance(e, Saving)} for process in processes]
    for step in sorted(set.intersection(*(set(one) for one in begun))):
        yield Mass.join(one[step] for one in begun)


def save_cut_off(processes: Sequence[Process]) -> bool:
    """Whether a save was begun that not all ranks have finished."""
    begun = {entry.step for process in processes for entry in process.entries if isinstance(entry, Saving)}
    ended = [{entry.step for entry in process.entries if isinstance(entry, Saved)} for process in processes]
    return not all(begun <= one for one in ended)
