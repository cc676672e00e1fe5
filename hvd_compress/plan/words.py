"""What a prediction comes to, in words."""

from __future__ import annotations

from collections.abc import Sequence

from hvd_compress.plan.curves import Curve, crossing, falls_below
from hvd_compress.plan.model import BASELINE, Prediction, Setup
from hvd_compress.plan.quantities import write_rate, write_time

HOROVODS = ("none", BASELINE)
"""What Horovod has by itself. Where ranks share cores, or the network is fast, the first may be the better one."""

PAYS, SURE = 1.05, 1.2
"""Gains from which a method is worth its trouble, and from which it is one even if the model is wrong by its 20 %."""


def verdict(found: Sequence[Prediction]) -> str:
    """What to take."""
    base = min((one for one in found if one.spec in HOROVODS), key=lambda one: one.step)
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
    gains = {one.spec: one.step / best.step for one in found if one.spec in (BASELINE, base.spec)}
    times = " and ".join(f"{gain:.2g} times as fast as with {spec}" for spec, gain in gains.items())
    takes = f"a step takes {write_time(best.step)}, {times}"
    if gains[base.spec] < SURE:
        return f"{best.spec} may pay: {takes}, which is within the error of the model; measure before you decide."
    return f"Take {best.spec}: {takes}; {where}."


def _rivals(found: Sequence[Prediction]) -> list[Prediction]:
    return [one for one in found if one.spec not in HOROVODS]


def outlook(
    by_ranks: Sequence[Curve], by_bandwidth: Sequence[Curve], setup: Setup, found: Sequence[Prediction]
) -> list[str]:
    """Where that changes: with a faster network, with more ranks."""
    said = []
    for best in sorted(_rivals(found), key=lambda one: one.step)[:1]:
        curve = over_horovods(best.spec, by_bandwidth)
        limit = falls_below(curve, PAYS)
        if limit is not None:
            said.append(f"With {setup.ranks} ranks, {best.spec} pays up to about {write_rate(limit)}.")
        elif max(curve.gains) >= PAYS:
            said.append(f"With {setup.ranks} ranks, {best.spec} pays at least up to {write_rate(curve.xs[-1])}.")
    if crossed := crossing(by_ranks):
        said.append(
            f"At {write_rate(setup.rate)}, {crossed.after}, whose traffic does not grow with the ranks, is ahead of"
            f" {crossed.before} from {crossed.ranks:,} ranks on."
        )
    return said


def over_horovods(spec: str, curves: Sequence[Curve]) -> Curve:
    """A curve with the gains over the better of what Horovod has by itself."""
    (curve,) = (curve for curve in curves if curve.spec == spec)
    own = [[1.0] * len(curve.xs), *(curve.gains for curve in curves if curve.spec in HOROVODS)]
    best = [max(gains) for gains in zip(*own, strict=True)]
    return curve._replace(gains=[gain / of for gain, of in zip(curve.gains, best, strict=True)])
