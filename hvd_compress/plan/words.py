"""What a prediction comes to, in words."""

from __future__ import annotations

import math
from collections.abc import Sequence

from hvd_compress.plan.curves import Curve, crossing, falls_below
from hvd_compress.plan.model import BASELINE, Prediction, Setup
from hvd_compress.plan.quantities import write_rate, write_time

HOROVODS = ("none", BASELINE)
"""What Horovod has by itself."""

PAYS, SURE = 1.05, 1.2
"""Gains from which a method is worth its trouble, and from which it is one even if the model is wrong by its 20 %."""


def verdict(found: Sequence[Prediction]) -> str:
    """What to take."""
    base = next(one for one in found if one.spec == BASELINE)
    rivals = [one for one in found if one.spec not in HOROVODS]
    waits = base.exchange - base.hidden
    where = f"with fp16, a step of {write_time(base.step)} waits {write_time(waits)} for the network"
    if not rivals:
        return f"There is no method to compare: {where}; name some with --methods."
    best = min(rivals, key=lambda one: one.step)
    gain = base.step / best.step
    if gain < PAYS:
        spent = write_time(best.encode + best.decode + best.exchange - best.hidden)
        return (
            f"Nothing pays here; take fp16: {where}, and the best method, {best.spec}, takes {spent} to compress, send"
            " and decompress."
        )
    takes = f"a step takes {write_time(best.step)}, {gain:.2g} times as fast as with fp16"
    if gain < SURE:
        return f"{best.spec} may pay: {takes}, which is within the error of the model; measure before you decide."
    return f"Take {best.spec}: {takes}; {where}."


def outlook(
    by_ranks: Sequence[Curve], by_bandwidth: Sequence[Curve], setup: Setup, found: Sequence[Prediction]
) -> list[str]:
    """Where that changes: with a faster network, with more ranks."""
    said = []
    best = min(found, key=lambda one: (one.spec in HOROVODS, one.step)).spec
    (curve,) = (curve for curve in by_bandwidth if curve.spec == best)
    limit = falls_below(curve, PAYS)
    if limit is not None:
        said.append(f"With {setup.ranks} ranks, {best} pays up to about {write_rate(limit)}.")
    elif max(curve.gains, default=math.nan) >= PAYS:
        said.append(f"With {setup.ranks} ranks, {best} pays at least up to {write_rate(curve.xs[-1])}.")
    if crossed := crossing(by_ranks):
        said.append(
            f"At {write_rate(setup.rate)}, {crossed.after}, whose traffic does not grow with the ranks, is ahead of"
            f" {crossed.before} from {crossed.ranks:,} ranks on."
        )
    return said
