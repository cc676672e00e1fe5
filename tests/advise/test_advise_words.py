"""What is said follows from what is predicted, and nothing is said where nothing was validated."""

from __future__ import annotations

import math

import pytest
from advise.setups import GATHERED, JOB, QUICK, REDUCED, SLOW, SPECS, TOPK, rates

from hvd_compress.tools.advise.constants import BACKENDS, Constants
from hvd_compress.tools.advise.curves import BANDWIDTHS, RANKS, Curve, crossing, gain, over_bandwidths, over_ranks
from hvd_compress.tools.advise.model import Prediction, Setup, predict
from hvd_compress.tools.advise.rates import Rates
from hvd_compress.tools.advise.words import SURE, outlook, verdict

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


def test_methods_are_judged_by_the_better_of_horovods_own() -> None:
    """Where float16 is summed in software, that is none: then a gain over fp16 is not enough."""
    assert verdict([step("none", 0.5), step("fp16", 1), step(TOPK, 0.49)]).startswith("Nothing pays here; take none")
    assert verdict([step("none", 0.5), step("fp16", 1), step(TOPK, 0.25)]).startswith(f"{TOPK} has the fastest step")
    for setup, better in ((JOB._replace(rate=1e8), "fp16"), (JOB._replace(rate=1e11), "none")):
        assert gain(better, setup, QUICK, Constants()) == 1
        both = [predict(spec, setup, QUICK, Constants()).step for spec in ("none", "fp16")]
        assert gain(TOPK, setup, QUICK, Constants()) == min(both) / predict(TOPK, setup, QUICK, Constants()).step


@pytest.mark.parametrize(
    ("seconds", "begins"),
    [
        (0.96, "Nothing"),
        (0.94, f"{TOPK} may pay"),
        (0.84, f"{TOPK} may pay"),
        (0.83, f"{TOPK} has the fastest step"),
        (2, "Nothing"),
    ],
)
def test_small_gains_are_no_gains(seconds: float, begins: str) -> None:
    assert verdict([step("fp16", 1.0), step(TOPK, seconds)]).startswith(begins)


def test_gains_fall_with_the_bandwidth() -> None:
    curves = over_bandwidths(SPECS, JOB._replace(rate=3e9), QUICK, CONSTANTS)
    assert [curve.spec for curve in curves] == list(SPECS)
    for curve in curves:
        assert 3e9 in curve.xs and set(BANDWIDTHS) <= set(curve.xs)
        if curve.spec in ("none", "fp16"):
            assert max(curve.gains) == 1.0
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


def test_curves_over_ranks_have_whole_hosts() -> None:
    (curve,) = over_ranks(["none"], JOB._replace(ranks=24, ranks_per_node=6), QUICK, Constants())
    assert list(curve.xs) == [2, 4, 6, 12, 24, 48, 96, 192, 384, 768], "or a part of one"


def told(setup: Setup, known: Rates) -> list[str]:
    by_ranks = over_ranks(SPECS, setup, known, CONSTANTS)
    return outlook(by_ranks, setup, predicted(setup, known), known, CONSTANTS)


@pytest.mark.parametrize("known", [rates(1e-8, 1e-10, 1e-10), rates(6e-8, 1e-10, 1e-10), SLOW])
def test_the_outlook_names_validated_rates_alone(known: Rates) -> None:
    setup = JOB._replace(rate=1e8, latency=0.0)
    rivals = [one for one in predicted(setup, known) if one.spec in known.methods]
    best = min(rivals, key=lambda one: one.step).spec
    links = {"100 Mbit/s": 1e8, "300 Mbit/s": 3e8, "1 Gbit/s": 1e9}
    sure = [name for name, rate in links.items() if gain(best, setup._replace(rate=rate), known, CONSTANTS) >= SURE]
    assert told(setup, known)[0] == (
        f"With 8 ranks and {', '.join(links)}, where the model is validated, {best} pays at"
        f" {', '.join(sure) or 'none of these rates'}."
    )


def test_an_overtaking_beyond_the_validated_ranks_is_not_told() -> None:
    setup = JOB._replace(rate=1e8, latency=0.0)
    ahead = crossing(over_ranks(SPECS, setup, GATHERING_IS_QUICKER, CONSTANTS))
    assert ahead
    said = " ".join(told(setup, GATHERING_IS_QUICKER))
    assert ("is faster than" in said) == (ahead.ranks <= 8)
