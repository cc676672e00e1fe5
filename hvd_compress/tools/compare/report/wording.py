"""The verdict in plain sentences."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from hvd_compress.tools.bench.distributed.results import BASELINES
from hvd_compress.tools.compare.judging import Judgement, Verdict, baseline, judge
from hvd_compress.tools.compare.measures import span
from hvd_compress.tools.compare.results import Comparison, named
from hvd_compress.tools.units import listed, seconds, setting, times


def words(comparison: Comparison) -> list[str]:
    """Tell what pays here and by how much, what may, what does not, and what costs quality."""
    if not comparison.outcomes:
        return ["No training ended; see the failures."]
    found = judge(comparison)
    goal = f"{comparison.goal.metric} {setting(comparison.target)}"
    better = baseline(comparison)
    base = next(one for one in found if one.spec == better)
    rest = [one for one in found if one.spec not in (BASELINES if not base.reached else (better,))]
    told = _against(base, rest, goal) if base.reached else _without(comparison, found, rest, goal)
    late = _with(rest, Verdict.NOT_REACHED)
    if late and len(told) > 1:
        told.append(f"{_names(late)} did not reach the target.")
    for one in found:
        obvious = base.reached and one.verdict is Verdict.NOT_REACHED  # then there is no need to say how far off it is
        told += [f"{named(one.spec)} {what}." for what in (*one.warnings, "" if obvious else one.worse) if what]
    if any(one.seconds and one.seconds.low <= 0 for one in found):
        told.append(f"Models have {goal} before their first step; choose a harder target to compare methods.")
    if comparison.seeds == 1:
        told.append("With one seed, the effect of chance is unknown.")
    return told


def _names(ones: Iterable[Judgement]) -> str:
    return listed([named(one.spec) for one in ones])


def _with(found: Iterable[Judgement], verdict: Verdict) -> list[Judgement]:
    return [one for one in found if one.verdict is verdict]


def _against(base: Judgement, rest: Sequence[Judgement], goal: str) -> list[str]:
    """Tell what follows where the baseline reached the target."""
    pays, slow = _with(rest, Verdict.PAYS), _with(rest, Verdict.DOES_NOT_PAY)
    name = named(base.spec)
    told = [f"No method pays here: not one reaches {goal} sooner than {name} with every seed."]
    if pays:
        told = [f"{pays[0].spec} pays here: {goal} in {pays[0].took}, {_sooner(pays[0], base)}."]
    told.append(f"The baseline, the better of none and fp16, is {name}: it takes {base.took}.")
    if pays[1:]:
        others = listed([f"{one.spec} ({_times(one, base)})" for one in pays[1:]])
        told.append(f"{others} {'pays' if len(pays) == 2 else 'pay'}, too.")
    for one in _with(rest, Verdict.MAY_PAY):
        told.append(f"{named(one.spec)} may pay: {goal} in {one.took}, {_sooner(one, base)}.")
    if slow:
        others = listed([f"{named(one.spec)} ({_times(one, base)}{one.only})" for one in slow])
        told.append(f"Not worth it here, with the speedup: {others}.")
    return told


def _without(comparison: Comparison, found: Sequence[Judgement], rest: Sequence[Judgement], goal: str) -> list[str]:
    """Tell what follows where neither of Horovod's own methods did."""
    there = _with(rest, Verdict.REACHED)
    if not there:
        return [f"No method reached {goal}, so there is no verdict."]
    how = listed([_missed(comparison, one, goal) for one in found if one.spec in BASELINES])
    return [f"{how}, so there is no baseline.", *(f"{one.spec} did, in {one.took}." for one in there)]


def _missed(comparison: Comparison, one: Judgement, goal: str) -> str:
    """Tell how a method missed the target."""
    trained = max((run.seconds for run in comparison.of(one.spec)), default=0.0)
    how = {
        Verdict.DIVERGED: "diverged",
        Verdict.NOT_REACHED: f"did not reach {goal} in {seconds(trained)} s of training",
    }.get(one.verdict, "failed")
    return f"{named(one.spec)} {how}"


def _sooner(one: Judgement, base: Judgement) -> str:
    """Write as in ``a speedup of 4.8x over fp16 (4.5 to 5.1 over 3 seeds)``."""
    if one.ratio is None:
        return f"with other seeds than {named(base.spec)}"
    reaches = span(one.ratio, times)
    over = f" ({reaches} over {one.pairs} seeds)" if reaches else ""
    return f"a speedup of {times(one.ratio.median)}x over {named(base.spec)}{over}"


def _times(one: Judgement, base: Judgement) -> str:
    """Write in short, as in ``4.8x; 4.5 to 5.1``."""
    if one.ratio is None:
        return f"with other seeds than {named(base.spec)}"
    reaches = span(one.ratio, times)
    return f"{times(one.ratio.median)}x{f'; {reaches}' if reaches else ''}"
