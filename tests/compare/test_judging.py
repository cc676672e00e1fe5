"""Verdicts, computed by hand."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

import pytest
from compare.cases import ACCURACY, PERPLEXITY, compared, made, timed

from hvd_compress.tools.compare.job import Goal, Outcome
from hvd_compress.tools.compare.judging import Judgement, Verdict, baseline, judge
from hvd_compress.tools.compare.measures import Spread, TimeToTarget, median_split, reach, split

NAN, INF = math.nan, math.inf
BASELINE = "fp16"


def judged(spec: str, trainings: Mapping[str, Sequence[Outcome | None]]) -> Judgement:
    (found,) = [one for one in judge(compared(trainings)) if one.spec == spec]
    return found


RISING = [(0, 0.0, 0.1), (10, 1.0, 0.5), (20, 3.0, 0.9)]
FALLING = [(0, 0.0, INF), (10, 2.0, 300.0), (20, 6.0, 50.0)]


@pytest.mark.parametrize(
    ("curve", "goal", "target", "expected"),
    [
        (RISING, ACCURACY, 0.7, TimeToTarget(2.0, 15.0)),
        (RISING, ACCURACY, 0.5, TimeToTarget(1.0, 10.0)),
        (RISING, ACCURACY, 0.91, None),
        (RISING, ACCURACY, 0.1, TimeToTarget(0.0, 0.0)),
        (FALLING, PERPLEXITY, 100.0, TimeToTarget(2.0 + 4.0 * 0.8, 18.0)),
        (FALLING, PERPLEXITY, 400.0, TimeToTarget(2.0, 10.0)),  # what was before is not finite
        (FALLING, PERPLEXITY, 49.0, None),
        ([(0, 0.0, 0.1), (10, 1.0, NAN), (20, 3.0, 0.9)], ACCURACY, 0.5, TimeToTarget(3.0, 20.0)),
        ([(0, 0.0, 0.1), (10, 1.0, NAN)], ACCURACY, 0.5, None),
        ([(0, 0.0, 0.1), (10, 1.0, INF)], ACCURACY, 0.5, None),
        (
            [(0, 0.0, 0.1), (10, 1.0, 0.6), (20, 2.0, 0.3)],
            ACCURACY,
            0.6,
            TimeToTarget(1.0, 10.0),
        ),  # the first time counts
        ([], ACCURACY, 0.5, None),
    ],
)
def test_reach(curve: list[tuple[int, float, float]], goal: Goal, target: float, expected: TimeToTarget | None) -> None:
    found = reach(made(curve, goal=goal), target)
    assert (found is None) == (expected is None)
    if found and expected:
        assert found == pytest.approx(expected)


def test_the_ratio_is_of_pairs_and_not_of_medians() -> None:
    base, own = [timed(10), timed(20), timed(30)], [timed(20), timed(10), timed(10)]
    found = judged("topk", {BASELINE: base, "topk": own})
    assert found.ratio == pytest.approx(Spread(2.0, 0.5, 3.0))
    assert found.seconds == Spread(10, 10, 20)
    assert found.steps == Spread(20, 20, 20)
    assert (found.reached, found.pairs, found.verdict) == (3, 3, Verdict.MAY_PAY)


@pytest.mark.parametrize(
    ("base", "own", "verdict", "ratio"),
    [
        ([8, 10], [2, 5], Verdict.PAYS, Spread(3, 2, 4)),
        ([8, 10], [8, 5], Verdict.MAY_PAY, Spread(1.5, 1, 2)),
        ([8, 10], [16, 10], Verdict.DOES_NOT_PAY, Spread(0.75, 0.5, 1)),
        ([8, 8, 8], [2, 2, None], Verdict.MAY_PAY, Spread(4, 4, 4)),
        ([8, 8, 8], [2, None, None], Verdict.DOES_NOT_PAY, Spread(4, 4, 4)),
        ([8, 8], [None, None], Verdict.NOT_REACHED, None),
        ([8, None, 8], [2, 2, 2], Verdict.PAYS, Spread(4, 4, 4)),
        ([8, None, 8], [2, None, 2], Verdict.MAY_PAY, Spread(4, 4, 4)),
        ([None, None], [4, None], Verdict.REACHED, None),
        ([None, 8], [4, None], Verdict.MAY_PAY, None),
        ([None, 8, 8], [4, None, None], Verdict.DOES_NOT_PAY, None),
    ],
)
def test_verdicts(base: list[float | None], own: list[float | None], verdict: Verdict, ratio: Spread | None) -> None:
    found = judged("topk", {BASELINE: [timed(s) for s in base], "topk": [timed(s) for s in own]})
    assert found.verdict is verdict
    assert (found.ratio is None) == (ratio is None)
    if found.ratio and ratio:
        assert found.ratio == pytest.approx(ratio)
    assert found.reached == sum(s is not None for s in own)


def test_the_baseline_is_one_with_itself() -> None:
    found = judged(BASELINE, {BASELINE: [timed(8), timed(9)]})
    assert (found.verdict, found.ratio, found.worse) == (Verdict.BASELINE, Spread(1, 1, 1), "")
    assert judged(BASELINE, {BASELINE: [timed(None)]}).verdict is Verdict.NOT_REACHED


@pytest.mark.parametrize(
    ("none", "fp16", "better"),
    [
        ([4, 5, 6], [8, 9, 10], "none"),
        ([8, 9, 10], [4, 5, 6], "fp16"),
        ([8, 8], [8, 8], "fp16"),
        ([9, 1, 9], [2, 8, 8], "fp16"),  # in the median
        ([1, 1, None], [8, 8, 8], "fp16"),  # more seeds
        ([None], [9], "fp16"),
        ([9], [None], "none"),
    ],
)
def test_the_baseline_is_the_better_of_horovods_own(
    none: list[float | None], fp16: list[float | None], better: str
) -> None:
    trainings = {"none": [timed(s) for s in none], "fp16": [timed(s) for s in fp16], "topk": [timed(2)] * len(fp16)}
    assert baseline(compared(trainings)) == better
    verdicts = {one.spec: one.verdict for one in judge(compared(trainings))}
    assert [spec for spec in ("none", "fp16") if verdicts[spec] is Verdict.BASELINE] == [better]


def test_a_method_that_only_beats_the_worse_one_does_not_pay() -> None:
    """Gloo sums float16 in software: there fp16 may be slower than none."""
    trainings = {"none": [timed(4), timed(4)], "fp16": [timed(10), timed(8)], "topk": [timed(5, 0.94), timed(5, 0.94)]}
    found = judged("topk", trainings)
    assert (found.verdict, found.ratio) == (Verdict.DOES_NOT_PAY, Spread(0.8, 0.8, 0.8))
    assert found.worse
    assert judged("fp16", trainings).verdict is Verdict.DOES_NOT_PAY


def test_where_neither_gets_there_the_better_end_counts() -> None:
    trainings = {"none": [timed(None, 0.7)], "fp16": [timed(None, 0.6)], "topk": [timed(4)]}
    assert baseline(compared(trainings)) == "none"
    assert baseline(compared({"none": [None], "fp16": [timed(None, 0.6)]})) == "fp16"
    assert baseline(compared({"none": [timed(None, 0.7)], "fp16": [timed(None, diverged=True)]})) == "none"
    assert judged("topk", trainings).verdict is Verdict.REACHED


def test_a_training_that_failed_is_one_that_did_not_get_there() -> None:
    found = judged("topk", {BASELINE: [timed(8)] * 3, "topk": [timed(2), timed(2), None]})
    assert (found.verdict, found.runs, found.pairs) == (Verdict.MAY_PAY, 2, 2)
    assert found.warnings == ("failed with 1 of 3 seeds",)
    found = judged("topk", {BASELINE: [timed(8)] * 3, "topk": [None] * 3})
    assert (found.verdict, found.runs, found.warnings) == (Verdict.FAILED, 0, ("failed",))


def test_seeds_without_a_baseline_are_not_compared() -> None:
    found = judged("topk", {BASELINE: [timed(8), None], "topk": [timed(4), timed(99)]})
    assert (found.verdict, found.pairs, found.ratio) == (Verdict.PAYS, 1, Spread(2, 2, 2))
    found = judged("topk", {BASELINE: [None, None], "topk": [timed(4), timed(4)]})
    assert (found.verdict, found.ratio) == (Verdict.REACHED, None)


def test_divergence() -> None:
    lost = timed(None, diverged=True)
    assert judged("topk", {BASELINE: [timed(8)] * 2, "topk": [lost, lost]}).verdict is Verdict.DIVERGED
    short = made([(0, 0.0, 0.1), (10, 2.0, 0.9), (20, 3.0, 0.3)], diverged=True)
    found = judged("topk", {BASELINE: [timed(8)] * 2, "topk": [timed(2), short]})
    assert found.verdict is Verdict.MAY_PAY  # it was there, and is lost since
    assert found.warnings == ("diverged with 1 of 2 seeds",)
    assert found.final == Spread(0.95, 0.95, 0.95)
    assert found.cut == 0  # it was not the budget that ended it


def test_ranks_that_differ_are_told() -> None:
    found = judged("topk", {BASELINE: [timed(8)], "topk": [timed(4, ranks_equal=False)]})
    assert found.warnings == ("left the ranks with different weights",)


@pytest.mark.parametrize(
    ("base", "own", "told"),
    [
        ([0.95, 0.96, 0.97], [0.94, 0.95, 0.96], "0.9500 (0.9400 to 0.9600), fp16 0.9600"),
        ([0.95, 0.96, 0.97], [0.97, 0.93, 0.92], "0.9300 (0.9200 to 0.9700), fp16"),
        ([0.95, 0.96, 0.97], [0.96, 0.95, 0.96], ""),
        ([0.95, 0.96, 0.97], [0.96, 0.97, 0.98], ""),
        ([0.95, 0.96, 0.97], [0.94999, 0.95999, 0.96999], ""),
        ([0.95], [0.94], "0.9400, fp16 0.9500"),
    ],
)
def test_what_costs_accuracy(base: list[float], own: list[float], told: str) -> None:
    found = judged("topk", {BASELINE: [timed(8, end) for end in base], "topk": [timed(4, end) for end in own]})
    assert told in found.worse and bool(found.worse) == bool(told)


@pytest.mark.parametrize(
    ("own", "worse"),
    [([90.0, 91.0, 92.0], True), ([79.0, 90.0, 91.0], True), ([81.0, 60.0, 61.0], False), ([79.0, 81.0, 83.0], False)],
)
def test_what_costs_perplexity(own: list[float], worse: bool) -> None:
    ends = {BASELINE: [80.0, 81.0, 82.0], "topk": own}
    trainings = {spec: [made([(40, 9.0, end)], goal=PERPLEXITY) for end in ones] for spec, ones in ends.items()}
    assert bool(judged("topk", trainings).worse) == worse


def test_runs_of_unequal_length_are_compared_with_their_steps() -> None:
    short = made([(0, 0.0, 0.1), (20, 8.0, 0.9)])
    found = judged("topk", {BASELINE: [timed(8)], "topk": [short]})
    assert found.cut == 1
    assert "0.9000 after 20 steps, fp16 0.9500 after 40 steps" in found.worse
    found = judged("topk", {BASELINE: [short], "topk": [timed(8, 0.85)]})
    assert "0.8500 after 40 steps, fp16 0.9000 after 20 steps" in found.worse


def test_steps_are_taken_apart() -> None:
    found = split(made(RISING, step_seconds=0.1, encode=0.01, wait=0.03, decode=0.02))
    assert found[:4] == pytest.approx((0.04, 0.01, 0.03, 0.02))
    assert (found.derived, found.unmeasured) == (False, ())


def test_waiting_that_was_not_measured_is_what_is_left() -> None:
    found = split(made(RISING, step_seconds=0.1, alone=0.04))
    assert found[:4] == pytest.approx((0.04, 0, 0.06, 0))
    assert (found.derived, found.unmeasured) == (True, ("encode", "wait", "decode"))
    found = split(made(RISING, step_seconds=0.1, alone=0.04, encode=0.01, decode=0.02))
    assert found[:4] == pytest.approx((0.04, 0.01, 0.03, 0.02))
    assert found.unmeasured == ("wait",)
    assert split(made(RISING, step_seconds=0.03, alone=0.04))[:4] == pytest.approx((0.03, 0, 0, 0))
    assert split(made(RISING, step_seconds=0.1, encode=0.06, wait=0.06, decode=0.0)).compute == 0


def test_parts_of_a_step_are_medians_over_seeds() -> None:
    ones = [
        made(RISING, step_seconds=s, encode=e, wait=0.0, decode=0.0) for s, e in ((1.0, 0.1), (2.0, 0.4), (9.0, 0.2))
    ]
    assert median_split(ones)[:4] == pytest.approx((1.6, 0.2, 0, 0))


def test_figures_over_seeds() -> None:
    ones = [timed(4, payload=100 * n, device=None if n == 1 else 10.0 * n, memory=n, lr=0.5) for n in (1, 2, 6)]
    found = judged("topk", {BASELINE: [timed(8)] * 3, "topk": ones})
    assert (found.payload, found.device, found.memory, found.lr) == (200, 40, 6, 0.5)
    comparison = compared({BASELINE: [timed(8)]}, vnmse={BASELINE: 0.25})
    assert judge(comparison)[0].vnmse == 0.25


def test_the_best_comes_first() -> None:
    found = judge(
        compared(
            {
                "failed": [None, None],
                "lost": [timed(None, diverged=True)] * 2,
                "never": [timed(None, 0.5)] * 2,
                "almost": [timed(None, 0.7)] * 2,
                "once": [timed(1), timed(None)],
                "slow": [timed(20)] * 2,
                BASELINE: [timed(8)] * 2,
                "fast": [timed(2)] * 2,
                "faster": [timed(1)] * 2,
            }
        )
    )
    assert [one.spec for one in found] == [
        "faster", "fast", BASELINE, "slow", "once", "almost", "never", "lost", "failed"
    ]  # fmt: skip
