"""The verdict of a prediction, in words."""

from __future__ import annotations

from collections.abc import Sequence

from hvd_compress.tools.advise.constants import Constants
from hvd_compress.tools.advise.curves import Curve, crossing, gain
from hvd_compress.tools.advise.model import Prediction, Setup, baseline
from hvd_compress.tools.advise.rates import Rates
from hvd_compress.tools.advise.validated import RANGE, RANKS, RATES
from hvd_compress.tools.bench.distributed.results import BASELINES
from hvd_compress.tools.units import write_rate, write_time

PAYS, SURE, FAR = 1.05, 1.2, 1.5
"""Least gain of a method that pays, of one that pays even if the model is wrong by its 20%, and of one that pays even
outside of the validated range, where it may be wrong by more."""


def caution(beyond: Sequence[str]) -> str:
    """Return a sentence on a job outside the validated range."""
    return (
        f"Modelled, not measured: the model was compared with measurements for {RANGE}, and this job has"
        f" {', '.join(beyond)}."
    )


def verdict(found: Sequence[Prediction], sure: float = SURE) -> str:
    """Return the method to take, and why.

    Args:
        found: The predictions.
        sure: Gain from which the model is trusted: `SURE` or `FAR`.
    """
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
    if base.step / best.step < sure:
        return f"{best.spec} may pay: {takes}, which is within the error of the model; measure before you decide."
    return f"{best.spec} has the fastest step: {takes}; {where}."


def accuracy(optimizer: str) -> str:
    """Return what the answer knows of accuracy.

    Args:
        optimizer: The optimizer with which all candidates keep the loss; "" if the user named the candidates.
    """
    if optimizer:
        return f"The candidates kept the loss with {optimizer} in our trainings: docs/methods.md, With AdamW."
    return "This does not consider accuracy: hvd-compress compare measures the time to an accuracy."


def choice(found: Sequence[Prediction]) -> str:
    """Return the spec of the fastest step, or of the better of none and fp16 if none is faster by enough to pay."""
    base, best = baseline(found), min(found, key=lambda one: one.step)
    return best.spec if base.step / best.step >= PAYS else base.spec


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
