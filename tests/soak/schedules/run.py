"""Random schedules of faults: kills, stalls, gradients that are not finite, damaged saves, restarts and more.

Use::

    python tests/soak/schedules/run.py torch --seeds 200
    python tests/soak/schedules/run.py keras --seed 17
    python tests/soak/schedules/run.py torch --seeds 50 --plant residual

Each seed gives one schedule, always the same. After each step all ranks must hold the same bits, or all must have the
same typed error; nothing may hang; a step that does not count leaves no trace; and what is sent and kept is what came
in. What broke that is printed with its seed, and the exit status is 1. With a planted bug it is to be found.
"""

from __future__ import annotations

import argparse
import random
import shutil
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from multiprocessing.context import ForkServerContext
from pathlib import Path
from typing import NamedTuple

HERE = Path(__file__).resolve().parent
sys.path.insert(0, str(HERE.parents[1]))

from soak.schedules.diary import Mass  # noqa: E402
from soak.schedules.jobs import LIMITS, forge, launch  # noqa: E402
from soak.schedules.judge import Finding, judge, save_cut_off  # noqa: E402
from soak.schedules.plants import PLANTS  # noqa: E402
from soak.schedules.rank import Order  # noqa: E402
from soak.schedules.schedule import DAMAGE, Event, Framework, Schedule, Segment, draw  # noqa: E402


class Outcome(NamedTuple):
    """What a schedule has shown.

    Attributes:
        schedule: The schedule.
        findings: What must not be, and in which of its jobs.
        refusals: How often all ranks have refused to go on, for a reason.
        stuck: How many ranks were stuck within Horovod after another was killed.
        seconds: How long it took.
    """

    schedule: Schedule
    findings: list[tuple[int, Finding]]
    refusals: int
    stuck: int
    seconds: float


class Runner:
    """Runs a schedule, job after job.

    Args:
        context: What starts processes.
        schedule: The schedule.
        plant: Name of a bug to plant; empty for none.
        folder: For all that it writes.
    """

    def __init__(self, context: ForkServerContext, schedule: Schedule, plant: str, folder: Path) -> None:
        self.context, self.schedule, self.plant, self.folder = context, schedule, plant, folder
        self.saves = folder / "saves"
        self.saves.mkdir(parents=True)
        self.kept: list[Mass] = []
        self.cut_off = False
        self.good = [folder / "nothing"]
        self.good[0].mkdir()
        self.refusals = self.stuck = 0

    def run(self) -> Outcome:
        """Run all jobs; stop at the first that breaks a rule."""
        begin = time.monotonic()
        findings: list[tuple[int, Finding]] = []
        for number, segment in enumerate(self.schedule.segments):
            found, refused = self.job(f"job{number}", segment)
            if refused and not found and not segment.must_be_refused:
                found, _ = self.job(
                    f"job{number}again", segment._replace(before=(), spec=self.schedule.segments[0].spec)
                )
            if found:
                findings += [(number, finding) for finding in found]
                break
        return Outcome(self.schedule, findings, self.refusals, self.stuck, time.monotonic() - begin)

    def job(self, name: str, segment: Segment) -> tuple[list[Finding], bool]:
        """Run one job; tell what is wrong, and whether it was refused."""
        for event in segment.before:
            self.damage(event)
        folder = self.folder / name
        folder.mkdir()
        load = (self.saves / "states").exists() and (self.saves / "weights.npz").exists()
        if not load:  # what was saved was refused, and there was nothing older to go back to
            segment = segment._replace(before=tuple(e for e in segment.before if e.kind != "loaded by one rank"))
        limit = LIMITS[self.schedule.framework]
        order = Order(segment, 0, folder, self.saves, load, {}, self.schedule.framework, self.plant, limit)
        processes = launch(self.context, order)
        verdict = judge(segment, processes, self.kept, self.cut_off)
        self.kept += verdict.kept
        self.stuck += verdict.stuck
        if verdict.refused:
            self.refusals += 1
            self.put_back()
        else:
            self.cut_off = save_cut_off(processes)
            if not self.cut_off:
                self.keep(name)
        return verdict.findings, verdict.refused

    def keep(self, name: str) -> None:
        """Keep a copy of what was saved."""
        shutil.copytree(self.saves, self.folder / f"{name}-saves")
        self.good.append(self.folder / f"{name}-saves")

    def put_back(self) -> None:
        """Put the newest copy back."""
        shutil.rmtree(self.saves)
        shutil.copytree(self.good[-1], self.saves)
        self.cut_off = False

    def damage(self, event: Event) -> None:
        """Damage what was saved, as an event says."""
        if event.kind not in DAMAGE:
            return
        chosen = random.Random(event.number)
        states = self.saves / "states"
        files = sorted(path for path in states.rglob("*") if path.is_file())
        older = [p for good in self.good for p in sorted((good / "states").rglob("*")) if p.is_file()]
        if event.kind == "stale file" and older:
            source = chosen.choice(older)
            place = states / source.relative_to(next(g for g in self.good if source.is_relative_to(g)) / "states")
            place.parent.mkdir(parents=True, exist_ok=True)
            shutil.copy(source, place)
        elif event.kind == "missing file" and files:
            chosen.choice(files).unlink()
        elif event.kind == "partial file" and files:
            path = chosen.choice(files)
            path.write_bytes(path.read_bytes()[: chosen.randrange(path.stat().st_size)])


def told(outcome: Outcome) -> str:
    """A line for a schedule, and more if it broke a rule."""
    schedule = outcome.schedule
    events = Counter(event.kind for segment in schedule.segments for event in segment.events())
    names = ", ".join(f"{kind} {n}" if n > 1 else kind for kind, n in events.items())
    line = f"seed {schedule.seed:4}  {len(schedule.segments)} jobs  {outcome.seconds:5.1f} s  {names or 'nothing'}"
    if not outcome.findings:
        return line
    found = "\n".join(f"  job {number}: {finding.kind}: {finding.text}" for number, finding in outcome.findings[:2])
    again = f"python tests/soak/schedules/run.py {schedule.framework} --seed {schedule.seed}"
    return f"{line}\nBROKEN RULES in {schedule}\n{found}\nagain: {again}"


def table(outcomes: Sequence[Outcome]) -> str:
    """Events that were drawn, and what was found."""
    events = Counter(e.kind for outcome in outcomes for s in outcome.schedule.segments for e in s.events())
    ranks = sum(
        one.ranks != other.ranks
        for outcome in outcomes
        for one, other in zip(outcome.schedule.segments, outcome.schedule.segments[1:], strict=False)
    )
    events["restart"] = sum(len(outcome.schedule.segments) - 1 for outcome in outcomes)
    events["restart with other ranks"] = ranks
    kinds = Counter(kind for outcome in outcomes for kind in {finding.kind for _, finding in outcome.findings})
    seeds = [outcome.schedule.seed for outcome in outcomes if outcome.findings]
    rows = [f"| {kind} | {count} |" for kind, count in sorted(events.items())]
    rows += [f"| typed errors, the same on all ranks | {sum(outcome.refusals for outcome in outcomes)} |"]
    rows.append(
        f"| ranks stuck within Horovod after another was killed | {sum(outcome.stuck for outcome in outcomes)} |"
    )
    names = {
        "divergence": "silent divergences",
        "hang": "hangs",
        "untyped": "untyped exceptions",
        "refusal": "errors without a reason",
        "silence": "missing errors",
        "trace": "traces of steps that do not count",
        "mass": "gradients lost or applied twice",
    }
    rows += [f"| **{name}** | {kinds[kind]} |" for kind, name in names.items()]
    steps = sum(len(segment.steps) for outcome in outcomes for segment in outcome.schedule.segments)
    faults = sum(events.values()) - events["save"]
    head = f"{len(outcomes)} schedules, {steps} steps, {faults} faults; seeds with broken rules: {seeds or 'none'}"
    return "\n".join([head, "", "| | |", "| --- | --- |", *rows])


def schedules(framework: Framework, seeds: Iterable[int], plant: str, at_once: int) -> list[Outcome]:
    """Run the schedules of some seeds."""
    context = forge(framework)

    def one(seed: int) -> Outcome:
        with tempfile.TemporaryDirectory(prefix="schedule") as folder:
            outcome = Runner(context, draw(framework, seed), plant, Path(folder, "work")).run()
        print(told(outcome), flush=True)
        return outcome

    with ThreadPoolExecutor(at_once) as pool:
        return list(pool.map(one, seeds))


def main() -> int:
    """Run what the command line asks for."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("framework", choices=list(LIMITS))
    parser.add_argument("--seeds", default="20", help="how many, from 0, or as 10:20")
    parser.add_argument("--seed", type=int, help="one alone")
    parser.add_argument("--plant", default="", choices=["", *PLANTS])
    parser.add_argument("--at-once", type=int, default=2, help="how many schedules at the same time")
    options = parser.parse_args()
    first, _, end = options.seeds.rpartition(":")
    seeds = range(int(first or 0), int(end)) if options.seed is None else [options.seed]
    begin = time.monotonic()
    outcomes = schedules(options.framework, seeds, options.plant, options.at_once)
    print(f"\n{table(outcomes)}\n\n{time.monotonic() - begin:.0f} s")
    return int(any(outcome.findings for outcome in outcomes))


if __name__ == "__main__":
    sys.exit(main())
