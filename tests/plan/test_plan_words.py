"""What is said follows from what is predicted."""

from __future__ import annotations

import math

import pytest
from plan.setups import GATHERED, JOB, QSGD, QUICK, REDUCED, SLOW, SPECS, TOPK, TOPKC, rates

from hvd_compress.plan.constants import BACKENDS, Constants
from hvd_compress.plan.curves import BANDWIDTHS, RANKS, Curve, crossing, falls_below, over_bandwidths, over_ranks
from hvd_compress.plan.model import Prediction, Setup, predict
from hvd_compress.plan.rates import Rates
from hvd_compress.plan.words import PAYS, outlook, over_horovods, verdict

FAST = JOB._replace(ranks=4, rate=1e11)
"""A network on which fp16 waits for little."""

CONSTANTS = BACKENDS["nccl"]

GATHERING_IS_QUICKER = QUICK._replace(methods={**QUICK.methods, **{s: rates(2e-8).methods[s] for s in REDUCED}})
"""As it is with few ranks."""


def step(spec: str, seconds: float) -> Prediction:
    """A step of which all but 100 ms is the exchange."""
    zeros = dict.fromkeys(("encode", "decode", "link", "host", "rounds", "hidden", "wire"), 0.0)
    return Prediction(spec, compute=0.1, exchange=seconds - 0.1, **zeros)


def predicted(setup: Setup, known: Rates) -> list[Prediction]:
    return [predict(spec, setup, known, CONSTANTS) for spec in SPECS]


def test_nothing_pays_on_a_fast_network_with_slow_compression() -> None:
    assert verdict(predicted(FAST, SLOW)).startswith("Nothing pays here; take none")
    assert verdict(predicted(FAST._replace(rate=1e9), SLOW)).startswith("Nothing pays here; take fp16")


def test_compression_pays_on_a_slow_network() -> None:
    slow = predicted(JOB._replace(rate=1e8, ranks=2), QUICK)
    best = min(slow, key=lambda one: one.step)
    assert best.spec in (*GATHERED, *REDUCED)
    assert verdict(slow).startswith(f"Take {best.spec}: a step takes ")
    base = next(one for one in slow if one.spec == "fp16")
    assert f"{base.step / best.step:.2g} times as fast as with fp16; with fp16, a step of" in verdict(slow)


def test_methods_are_judged_by_the_better_of_horovods_own() -> None:
    """Where float16 is summed in software, that is none: then a gain over fp16 is not enough."""
    assert verdict([step("none", 0.5), step("fp16", 1), step(TOPK, 0.49)]).startswith(
        "Nothing pays here; take none: with none, a step of 500 ms spends 400 ms on the exchange"
    )
    assert verdict([step("none", 0.5), step("fp16", 1), step(TOPK, 0.25)]) == (
        f"Take {TOPK}: a step takes 250 ms, 2 times as fast as with none and 4 times as fast as with fp16; with none, a"
        " step of 500 ms spends 400 ms on the exchange."
    )
    curves = [
        Curve(spec, (1, 2), gains, False) for spec, gains in (("fp16", (1, 1)), ("none", (0.5, 2)), ("a", (3, 3)))
    ]
    assert over_horovods("a", curves).gains == [3, 1.5]


def test_topk_is_taken_where_it_is_best() -> None:
    found = [
        one for one in predicted(JOB._replace(rate=1e8, ranks=2), QUICK) if one.spec in ("none", "fp16", TOPK, QSGD)
    ]
    assert verdict(found).startswith(f"Take {TOPK}")


@pytest.mark.parametrize(
    ("seconds", "begins"),
    [(0.96, "Nothing"), (0.94, f"{TOPK} may pay"), (0.84, f"{TOPK} may pay"), (0.83, f"Take {TOPK}"), (2, "Nothing")],
)
def test_small_gains_are_no_gains(seconds: float, begins: str) -> None:
    assert verdict([step("fp16", 1.0), step(TOPK, seconds)]).startswith(begins)


def test_without_methods() -> None:
    assert "name some with --methods" in verdict(predicted(JOB, QUICK)[:2])


def test_gains_fall_with_the_bandwidth() -> None:
    curves = over_bandwidths(SPECS, JOB._replace(rate=3e9), QUICK, CONSTANTS)
    assert [curve.spec for curve in curves] == list(SPECS)
    for curve in curves:
        assert 3e9 in curve.xs and set(BANDWIDTHS) <= set(curve.xs)
        if curve.spec == "fp16":
            assert set(curve.gains) == {1.0}
        if curve.spec in REDUCED:
            assert curve.gains[0] > 2 * curve.gains[-1]


def test_curves_over_ranks_end_where_a_method_does() -> None:
    known = QUICK._replace(methods={"int8": QUICK.methods[TOPK]})
    (curve,) = over_ranks(["int8"], JOB._replace(ranks=3), known, Constants())
    assert list(curve.xs) == sorted({*RANKS, 3})
    assert [math.isnan(gain) for gain in curve.gains] == [ranks >= 128 for ranks in curve.xs]


def test_a_single_rank_is_not_on_the_curve() -> None:
    (curve,) = over_ranks(["none"], JOB._replace(ranks=1), QUICK, Constants())
    assert curve.xs[0] == 2


def test_what_is_reduced_overtakes_what_is_gathered() -> None:
    curves = over_ranks(SPECS, JOB._replace(rate=1e8, latency=0.0), GATHERING_IS_QUICKER, CONSTANTS)
    found = crossing(curves)
    assert found and found.before in GATHERED and found.after in REDUCED
    gains = {curve.spec: dict(zip(curve.xs, curve.gains, strict=True)) for curve in curves}
    for ranks in RANKS:
        ahead = max(gains[spec][ranks] for spec in REDUCED) >= max(gains[spec][ranks] for spec in GATHERED)
        assert ahead == (ranks >= found.ranks)


def test_no_crossing_without_both_kinds() -> None:
    curves = over_ranks([TOPK, "fp16"], JOB, QUICK, CONSTANTS)
    assert crossing(curves) is None
    ahead = [Curve("a", (2, 4), (3, 3), False), Curve("b", (2, 4), (2, 1), True)]
    assert crossing(ahead) is None, "it was never behind"
    assert crossing([ahead[0]._replace(gains=(1, 3)), ahead[1]]) == (4, "b", "a")
    later = Curve("c", (2, 4), (1.5, 2), True)
    assert crossing([ahead[0]._replace(gains=(1, 3)), ahead[1], later]) == (4, "b", "a"), "b was ahead, not c"
    assert crossing([ahead[0]._replace(gains=(3, 0.5)), ahead[1]]) is None, "it does not last"


@pytest.mark.parametrize(
    ("gains", "place"),
    [
        ((4, 2, 0.5), 10 * 10**0.5),
        ((4, 2, 1.5), None),
        ((0.9, 0.5, 0.1), None),
        ((4, 1, 0.5), 10),
        ((4, 2, math.nan), 10),
    ],
)
def test_where_a_gain_ends(gains: tuple[float, ...], place: float | None) -> None:
    found = falls_below(Curve("a", (1, 10, 100), gains, False), 1.0)
    assert found == (None if place is None else pytest.approx(place))


def test_the_outlook() -> None:
    setup = JOB._replace(rate=1e8)
    known = GATHERING_IS_QUICKER
    found = predicted(setup, known)
    by_ranks = over_ranks(SPECS, setup, known, CONSTANTS)
    by_bandwidth = over_bandwidths(SPECS, setup, known, CONSTANTS)
    said = outlook(by_ranks, by_bandwidth, setup, found)
    best = min((one for one in found if one.spec in known.methods), key=lambda one: one.step).spec
    assert said[0].startswith(f"With 8 ranks, {best} pays up to about ") and said[0].endswith("bit/s.")
    curve = next(curve for curve in by_bandwidth if curve.spec == best)
    assert curve.gains[0] > PAYS > curve.gains[-1]
    assert f"is ahead of {TOPK} from" in said[1] and TOPKC.partition(":")[0] in said[1]
