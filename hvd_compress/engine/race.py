"""Choose a method by the times of real training steps.

The race is independent of any framework: it takes step times and returns the candidate of the next step. All ranks run
the same race, so they must agree on what they pass to `Race.decide`.
"""

from __future__ import annotations

import math
from collections.abc import Generator, Sequence
from enum import Enum
from statistics import median
from typing import NamedTuple, NoReturn, TypeAlias

from hvd_compress.core.method import Method
from hvd_compress.engine.candidates import between_nodes
from hvd_compress.engine.survey import Facts
from hvd_compress.engine.timing import Timing
from hvd_compress.methods.wrappers.alternatives import bare
from hvd_compress.methods.wrappers.router import Auto, Candidate
from hvd_compress.transport.mirror import share

PROBES = (2**12, 2**19)
"""Bytes of the two allreduces that tell latency and bandwidth; each is made twice, and the faster one counts."""

WARM_UP = 3
"""Untimed first steps: they include memory allocation and kernel selection."""

LOOK = 2
"""Timed steps of each candidate, after one untimed step, which sends what the one before has kept back."""

MORE = 3
"""Timed steps of each round among those that remain."""

GIVE_UP = 1.25
"""A candidate is given up that takes this multiple of the fastest one's time."""

HOPELESS = 3
"""A candidate is not tried whose exchange alone is expected to take this multiple of the fastest one's step."""

WATCH = 20
"""Steps of a window of the watch, once a candidate is chosen."""

DRIFT = 0.2
"""Relative change of the step time, in two windows in a row, after which candidates are compared again."""

PATIENCE = 64
"""Maximum number of windows between comparisons that change nothing."""

RECHECKS = (5, 20, 80)
"""Windows after a comparison, and after each other, before candidates that were close are timed again: what else ran on
the machine may have disturbed them."""

CLOSE = 1.5
"""Candidates whose steps took up to this multiple of the chosen one's are timed again."""

MORE_AGAIN = 8
"""Timed steps of each round when candidates are timed again, if as many are allowed."""

MAX_ERROR = 0.1
"""Default limit of the relative squared error of methods without error feedback."""

NO_NODES = "needs nodes of several ranks"

_NO_FACTS = Facts(math.nan, math.nan, math.nan, math.nan)


class Stage(Enum):
    """Input that a race needs next, other than step times."""

    SURVEY = "facts of all candidates"
    PROBE = "seconds of `PROBES`"


class Trial(NamedTuple):
    """Steps of one candidate.

    Attributes:
        candidate: Its number.
        untimed: Steps before those.
        timed: Timed steps.
    """

    candidate: int
    untimed: int
    timed: int


Request: TypeAlias = Stage | Trial


class Runner(NamedTuple):
    """Candidate of a comparison.

    Attributes:
        spec: Its spec string.
        facts: From the survey.
        exchange: Seconds that its exchange is expected to take, with compression.
        link: Seconds of it that the link takes.
        times: Times of its steps so far.
        verdict: What became of it.
    """

    spec: str
    facts: Facts
    exchange: float
    link: float
    times: list[float]
    verdict: str

    @property
    def seconds(self) -> float:
        """Median step time; inf if it was not tried."""
        return median(self.times) if self.times else math.inf


class Comparison(NamedTuple):
    """Comparison of all candidates.

    Attributes:
        begin: Number of the step before its first one.
        steps: Steps that it took; 0 before its end.
        seconds: Seconds that they took.
        latency: Seconds of a small exchange.
        rate: Bytes per second of the link of a rank; inf if it is too fast to be seen.
        runners: The candidates.
        chosen: Number of the chosen one.
    """

    begin: int
    steps: int
    seconds: float
    latency: float
    rate: float
    runners: Sequence[Runner]
    chosen: int

    @property
    def cost(self) -> float:
        """Seconds beyond those of as many steps of the chosen candidate."""
        return max(self.seconds - self.steps * self.runners[self.chosen].seconds, 0.0)


class Race:
    """State of a race.

    Args:
        router: The candidates.
        adam: Whether the optimizer is Adam or a variant, or unknown.
        size: Number of ranks.
        saved: What `saved` returned, to go on with that choice.

    Attributes:
        choice: Number of the candidate of the next step.
        asks: What `decide` is to be given next.
        adam: Whether the optimizer is Adam or a variant, or unknown.
        steps: Number of steps so far.
        comparisons: All comparisons so far.
        facts: Facts of this rank, from the survey; None if there are none.
        nodes: Whether ranks communicate within nodes and between them, which hierarchical candidates need.
    """

    def __init__(self, router: Auto, adam: bool, size: int, saved: Sequence[Sequence[float]] = ()) -> None:
        self.candidates = router.candidates
        self.choice = 0
        self.steps = 0
        self.comparisons: list[Comparison] = []
        self.facts: Sequence[Facts] | None = None
        self._elapsed = 0.0
        self._told = 0
        self.adam, self.nodes = adam, False
        self._router, self._size = router, size
        self._times: list[float] = []
        self._settled = 0
        self._reference: Timing | None = None
        if saved:
            self._settled, self._reference = int(saved[0][0]), Timing(*saved[1])
        self._begin()

    def _begin(self) -> None:
        self._run = self._race(self._settled, self._reference)
        self._ask(next(self._run))

    def place(self, nodes: bool) -> None:
        """Take note of whether hierarchical candidates can be used; compare anew if the present one cannot.

        All ranks call it with the same value.
        """
        self.nodes = nodes
        if not nodes and self.candidates[self.choice].router.hierarchical:
            self.choice, self._reference = 0, None
            self._begin()

    def _ask(self, request: Request) -> None:
        self.asks = request
        self._times.clear()
        if isinstance(request, Trial):
            self.choice, self._skip = request.candidate, request.untimed

    @property
    def surveyed(self) -> list[int]:
        """Numbers of the candidates whose facts a survey is to find: those that the optimizer and nodes allow."""
        return [number for number, one in enumerate(self.candidates) if not self._obstacle(one)]

    def _obstacle(self, candidate: Candidate) -> str:
        """Return why a candidate is not allowed; "" if it is."""
        if not (candidate.with_adam if self.adam else candidate.with_sgd):
            return f"costs loss with {'Adam' if self.adam else 'SGD'}"
        return "" if self.nodes or not candidate.router.hierarchical else NO_NODES

    def record(self, seconds: float) -> Sequence[float] | None:
        """Record a step.

        Returns:
            What the ranks have to agree on, by taking that of rank 0, and to pass to `decide`; None for nothing.
        """
        self.steps += 1
        self._elapsed += seconds
        if self.asks is Stage.SURVEY:
            unknown = [_NO_FACTS] * len(self.surveyed)
            return [value for one in self.facts or unknown for value in one]
        if not isinstance(self.asks, Trial):
            return None
        if self._skip:
            self._skip -= 1
            return None
        self._times.append(seconds)
        return list(self._times) if len(self._times) == self.asks.timed else None

    def decide(self, told: Sequence[float]) -> None:
        """Go on, given the same values on all ranks: those of `record`, or the times of `PROBES`."""
        if self.asks is Stage.SURVEY:
            self.facts = None
        self._ask(self._run.send(told))

    @property
    def compares(self) -> bool:
        """Whether a comparison is running, or about to begin."""
        return not isinstance(self.asks, Trial) or self.asks.timed < WATCH

    @property
    def saved(self) -> list[list[float]]:
        """The choice, beside a zero, and its step time, to be saved; empty while there is none."""
        return [] if self._reference is None else [[float(self._settled), 0.0], list(self._reference)]

    def linear(self) -> Method | None:
        """Return the chosen method, without error feedback, if it is linear and no facts are asked for."""
        method = bare(self.candidates[self.choice].router.core)
        return method if method.linear and isinstance(self.asks, Trial) else None

    def _race(self, chosen: int, reference: Timing | None) -> Generator[Request, Sequence[float], NoReturn]:
        patience = 1
        if reference is None:
            chosen = -1
        else:
            yield from self._watch(chosen, reference, patience, math.inf)
        while True:
            before = chosen
            chosen = yield from self._compare(before)
            patience = 1 if chosen != before else min(2 * patience, PATIENCE)
            chosen = yield from self._stay(chosen, patience)

    def _stay(self, chosen: int, patience: int) -> Generator[Request, Sequence[float], int]:
        """Watch, and time close candidates again, until the step time has changed; return the number of the chosen one.

        Args:
            chosen: Number of the candidate.
            patience: Number of windows in which no change counts.
        """
        for windows in (*RECHECKS, math.inf):
            if (yield from self._watch(chosen, None, patience, windows)):
                break
            chosen = yield from self._recheck(chosen)
        return chosen

    def _recheck(self, chosen: int) -> Generator[Request, Sequence[float], int]:
        """Time again the candidates that were close, and return the number of the best one."""
        begin, elapsed, last = self.steps, self._elapsed, self.comparisons[-1]
        limit = CLOSE * last.runners[chosen].seconds
        runners = [
            one._replace(times=[], verdict="" if one.seconds <= limit else one.verdict or "slower")
            for one in last.runners
        ]
        close = sum(not one.verdict for one in runners)
        steps = min(MORE_AGAIN, self._router.probe // close - 1)
        if close < 2 or steps < LOOK:
            return chosen
        comparison = last._replace(begin=begin, steps=0, runners=runners)
        self.comparisons.append(comparison)
        yield from self._turns(runners, begin, steps)
        best = self._decided(comparison, runners, chosen, elapsed)
        if best == chosen:
            self._told = len(self.comparisons)  # it is no news
        return best

    def _watch(
        self, chosen: int, reference: Timing | None, patience: int, windows: float
    ) -> Generator[Request, Sequence[float], bool]:
        """Return True when the step time has changed for good, or False after a number of windows.

        Args:
            chosen: Number of the candidate.
            reference: Step time to compare with; None for that of the first window.
            patience: Number of windows in which no change counts.
            windows: Number of windows after which to return.
        """
        if reference is None:
            reference = Timing.of((yield Trial(chosen, 0, WATCH)))
        self._settled, self._reference = chosen, reference
        drifted = 0
        while drifted < 2 and (windows > 1 or drifted):
            now = Timing.of((yield Trial(chosen, 0, WATCH)))
            patience, windows = patience - 1, windows - 1
            change = abs(now.seconds - reference.seconds)
            drifts = change > DRIFT * reference.seconds and change > 2 * (now.spread + reference.spread)
            drifted = drifted + 1 if drifts and patience < 1 else 0
        return drifted == 2

    def _compare(self, before: int) -> Generator[Request, Sequence[float], int]:
        """Compare all candidates, and return the number of the best one.

        Args:
            before: Number of the candidate so far; -1 for none.
        """
        begin, elapsed = self.steps, self._elapsed
        told: Sequence[float] = [math.nan]
        while any(map(math.isnan, told[:: len(Facts._fields)])):
            told = yield Stage.SURVEY
        width = len(Facts._fields)
        found = iter(Facts(*told[i : i + width]) for i in range(0, len(told), width))
        facts = [_NO_FACTS if self._obstacle(one) else next(found) for one in self.candidates]
        small, large = yield Stage.PROBE
        sent = share("AllReduce", self._size) * (PROBES[1] - PROBES[0])
        per_byte = max(large - small, 0.0) / sent if sent else 0.0  # a single rank sends nothing
        runners = [self._runner(number, one, small, per_byte) for number, one in enumerate(facts)]
        self._exclude(runners)
        rate = 1 / per_byte if per_byte else math.inf
        comparison = Comparison(begin, 0, 0.0, small, rate, runners, before)
        self.comparisons.append(comparison)
        yield from self._look(runners, before, begin)
        yield from self._turns(runners, begin, MORE)
        return self._decided(comparison, runners, before, elapsed)

    def _decided(self, comparison: Comparison, runners: list[Runner], before: int, elapsed: float) -> int:
        """Record the end of a comparison, and return the number of the best candidate.

        Args:
            comparison: The comparison.
            runners: Its candidates.
            before: Number of the candidate so far; -1 for none.
            elapsed: Seconds of all steps before it.
        """
        chosen = self._best(runners, before)
        for number, one in enumerate(runners):
            if not one.verdict:
                runners[number] = one._replace(verdict="chosen" if number == chosen else "no faster")
        steps, spent = self.steps - comparison.begin, self._elapsed - elapsed
        self.comparisons[-1] = comparison._replace(steps=steps, seconds=spent, runners=runners, chosen=chosen)
        return chosen

    def _runner(self, number: int, facts: Facts, latency: float, per_byte: float) -> Runner:
        link = facts.rounds * latency + facts.bytes * per_byte
        return Runner(self.candidates[number].spec, facts, facts.coding + link, link, [], "")

    def _exclude(self, runners: list[Runner]) -> None:
        """Give a verdict on candidates that are not to be tried."""
        for number, candidate in enumerate(self.candidates):
            verdict = self._obstacle(candidate) or self._objection(number, runners)
            runners[number] = runners[number]._replace(verdict=verdict)

    def _objection(self, number: int, runners: Sequence[Runner]) -> str:
        """Return why a candidate is not to be tried with these gradients; "" if it is."""
        candidate, error = self.candidates[number], runners[number].facts.error
        feeds_back = bare(candidate.router.core) is not candidate.router.core
        limit = self._router.max_error or (math.inf if feeds_back and number > 1 else MAX_ERROR)
        if number and math.isnan(error):
            return "it cannot compress these gradients"
        if number and error > limit:
            return f"its error is above {limit:g}"
        return "fp16 is safe here" if candidate.spec == "bf16" and not runners[1].verdict else ""

    def _look(self, runners: list[Runner], before: int, begin: int) -> Generator[Request, Sequence[float], None]:
        """Time a few steps of each candidate, the one that is expected to be the best first."""
        order = sorted((i for i, one in enumerate(runners) if not one.verdict), key=lambda i: runners[i].exchange)
        first = min((i for i in order if i < 2), key=lambda i: runners[i].exchange)
        first = before if before in order else first
        order.remove(first)
        dense = [i for i in order if i < 2]
        for number in (first, *order):
            one, best = runners[number], min(runner.seconds for runner in runners)
            left = self._router.probe - (self.steps - begin) - (1 + LOOK) * len([i for i in dense if i != number])
            verdict = ""
            if one.link > HOPELESS * best:
                verdict = f"its exchange would take {one.link:.3g} s"
            elif _is_worse_of_two(one, runners):
                verdict = "expected to be slower than the same method with or without hierarchical=on"
            elif left < 1 + LOOK and number not in dense:
                verdict = "not tried: no steps were left"
            else:
                untimed = WARM_UP if number == first and before < 0 else int(number != self.choice)
                one.times.extend((yield Trial(number, untimed, LOOK)))
                verdict = _given_up(one, best)
            dense = [i for i in dense if i != number]
            runners[number] = one._replace(verdict=verdict)
        best = min(runner.seconds for runner in runners)
        for number, one in enumerate(runners):
            if one.times and not one.verdict:
                runners[number] = one._replace(verdict=_given_up(one, best))

    def _turns(self, runners: list[Runner], begin: int, steps: int) -> Generator[Request, Sequence[float], None]:
        """Let those that remain take turns, of so many timed steps, until one is faster by more than the noise."""
        while len(left := [i for i, one in enumerate(runners) if not one.verdict]) > 1:
            if self._router.probe - (self.steps - begin) < len(left) * (1 + steps):
                return
            for number in left:
                runners[number].times.extend((yield Trial(number, int(number != self.choice), steps)))
            best = min(left, key=lambda i: runners[i].seconds)
            for number in left:
                if Timing.of(runners[best].times).beats(Timing.of(runners[number].times)):
                    runners[number] = runners[number]._replace(verdict="slower")

    @staticmethod
    def _best(runners: Sequence[Runner], before: int) -> int:
        """Return the present one of those that remain unless it is beaten, else the mildest of those that are not."""
        left = [i for i, one in enumerate(runners) if not one.verdict]
        best = Timing.of(min((runners[i] for i in left), key=lambda one: one.seconds).times)
        equal = [i for i in left if not best.beats(Timing.of(runners[i].times))]
        return before if before in equal else min(equal, key=lambda i: (runners[i].facts.error, i))

    def news(self) -> str:
        """Summarise the last comparison in one line, once; "" if there is no new one."""
        if self._told == len(self.comparisons) or not self.comparisons[-1].steps:
            return ""
        self._told, last = len(self.comparisons), self.comparisons[-1]
        spec = pinned(self.candidates[last.chosen].spec)
        tried = [f"{one.spec} {1000 * one.seconds:.4g} ms" for one in last.runners if one.times]
        why = "" if last.chosen > 1 else ", as nothing is faster than no compression and 16 bits"
        return (
            f"auto chose {spec!r} after {last.steps} steps from step {last.begin + 1} on{why};"
            f" median step times: {', '.join(tried)}; to pin it: Compression.parse({spec!r})"
        )


def _is_worse_of_two(runner: Runner, others: Sequence[Runner]) -> bool:
    """Return whether the same method with or without hierarchy has been tried, and is expected to be much faster."""
    rivals = [
        one
        for one in others
        if one.times and (one.spec == between_nodes(runner.spec) or runner.spec == between_nodes(one.spec))
    ]
    return any(runner.exchange - one.exchange > (GIVE_UP - 1) * one.seconds for one in rivals)


def _given_up(runner: Runner, best: float) -> str:
    """Return a verdict on a candidate that has been looked at; its fastest step counts, as others may have stalled."""
    return f"given up after {len(runner.times)} steps" if min(runner.times) > GIVE_UP * best else ""


def pinned(spec: str) -> str:
    """Return the spec to pin a candidate by."""
    return spec.removesuffix(":feedback=on") if spec.startswith("fp16") else spec
