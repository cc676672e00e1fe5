"""The verdict of a prediction, in words."""

from __future__ import annotations

from collections.abc import Sequence

from hvd_compress.tools.bench.distributed.results import BASELINES
from hvd_compress.tools.plan.constants import Constants
from hvd_compress.tools.plan.curves import Curve, crossing, gain
from hvd_compress.tools.plan.model import Prediction, Setup, baseline
from hvd_compress.tools.plan.rates import Rates
from hvd_compress.tools.plan.validated import RANGE, RANKS, RATES
from hvd_compress.tools.units import write_rate, write_time

PAYS, SURE = 1.05, 1.2
"""Least gain of a method that pays, and of one that pays even if the model is wrong by its 20 %."""


ACCURACY = "This does not consider accuracy: hvd-compress compare measures the time to an accuracy."


def no_verdict(beyond: Sequence[str]) -> str:
    """Return why there is no verdict on a job outside the validated range."""
    return (
        f"No verdict: outside the validated range ({RANGE}), with {', '.join(beyond)}. Measure on your machines:"
        " hvd-compress compare --on server1:4,server2:4 --ranks 8."
    )


def verdict(found: Sequence[Prediction]) -> str:
    """Return the method to take, and why."""
    base = baseline(found)
    where = (
        f"with {base.spec}, a step of {write_time(base.step)} spends {write_time(base.exchange - base.hidden)} on the"
        " exchange"
    )
    rivals = _rivals(found)
    if not rivals:
        return f"There is no method to compare: {where}; name some with --methods."
    best = min(rivals, key=lambda one: one.step)
    if base.step / best.step < PAYS:
        spent = write_time(best.encode + best.decode + best.exchange - best.hidden)
        return (
            f"Nothing pays here; take {base.spec}: {where}, and the best method, {best.spec}, takes {spent} to"
            " compress, exchange and decompress."
        )
    takes = f"a step takes {write_time(best.step)}, {base.step / best.step:.2g} times as fast as with {base.spec}"
    if base.step / best.step < SURE:
        return f"{best.spec} may pay: {takes}, which is within the error of the model; measure before you decide."
    return f"{best.spec} has the fastest step: {takes}; {where}. {ACCURACY}"


def _rivals(found: Sequence[Prediction]) -> list[Prediction]:
    return [one for one in found if one.spec not in BASELINES]


def outlook(
    by_ranks: Sequence[Curve], setup: Setup, found: Sequence[Prediction], rates: Rates, constants: Constants
) -> list[str]:
    """Return where the verdict changes within the validated range: with another network, with more ranks."""
    said = []
    for best in sorted(_rivals(found), key=lambda one: one.step)[:1]:
        gains = {rate: gain(best.spec, setup._replace(rate=rate), rates, constants) for rate in RATES}
        sure = [write_rate(rate) for rate, value in gains.items() if value >= SURE]
        known = ", ".join(write_rate(rate) for rate in RATES)
        said.append(
            f"With {setup.ranks} ranks and {known}, where the model is validated, {best.spec} pays at"
            f" {', '.join(sure) or 'none of these rates'}."
        )
    if crossed := crossing([_validated(curve) for curve in by_ranks]):
        said.append(
            f"At {write_rate(setup.rate)}, {crossed.after}, whose traffic does not grow with the ranks, is faster than"
            f" {crossed.before} with {crossed.ranks:,} ranks and more."
        )
    return said


def _validated(curve: Curve) -> Curve:
    """Cut a curve over ranks to the validated range."""
    points = [point for point in zip(curve.xs, curve.gains, strict=True) if RANKS[0] <= point[0] <= RANKS[1]]
    return curve._replace(xs=[x for x, _ in points], gains=[y for _, y in points])
