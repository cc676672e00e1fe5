"""The gain over the better of none and fp16 against world size and bandwidth."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import NamedTuple

import numpy as np

from hvd_compress.errors import UnsupportedError
from hvd_compress.local.settings import method_of
from hvd_compress.tools.advise.constants import Constants
from hvd_compress.tools.advise.model import Setup, matrix_side, predict
from hvd_compress.tools.advise.rates import Rates
from hvd_compress.tools.bench.distributed.results import BASELINES
from hvd_compress.tools.bench.traffic import grows, sent

RANKS = tuple(2**power for power in range(1, 11))
"""2 ... 1,024."""

BANDWIDTHS = tuple(float(rate) for rate in np.geomspace(100e6, 400e9, 37))
"""100 Mbit/s ... 400 Gbit/s, in bits a second."""


class Curve(NamedTuple):
    """A method's gains."""

    spec: str
    xs: Sequence[float]  # Numbers of ranks, or bandwidths in bits per second
    # Times faster than the better of none and fp16, at each; nan where the method cannot be used
    gains: Sequence[float]
    grows: bool  # Whether its traffic grows with the ranks, as it goes by allgather


def over_ranks(
    specs: Sequence[str],
    setup: Setup,
    rates: Rates,
    constants: Constants,
    progress: Callable[[str], None] = lambda what: None,
) -> list[Curve]:
    """Predict with more and fewer ranks, each of which computes as long as ever."""
    hosts = (setup.ranks_per_node * number for number in (1, *RANKS))  # whole hosts, or a part of one
    some = (number for number in RANKS if number < setup.ranks_per_node)
    ranks = sorted({setup.ranks, *some, *(number for number in hosts if number <= RANKS[-1])} - {1})
    curves = []
    for spec in specs:
        progress(f"{spec}, {ranks[0]} to {ranks[-1]} ranks")
        curves.append(_curve(spec, ranks, [setup._replace(ranks=n) for n in ranks], rates, constants))
    return curves


def over_bandwidths(specs: Sequence[str], setup: Setup, rates: Rates, constants: Constants) -> list[Curve]:
    """Predict on faster and slower links."""
    known = {setup.rate} if BANDWIDTHS[0] < setup.rate < BANDWIDTHS[-1] else set()
    bandwidths = sorted({*BANDWIDTHS, *known})
    setups = [setup._replace(rate=rate) for rate in bandwidths]
    return [_curve(spec, bandwidths, setups, rates, constants) for spec in specs]


def _curve(spec: str, xs: Sequence[float], setups: Sequence[Setup], rates: Rates, constants: Constants) -> Curve:
    gains = [gain(spec, setup, rates, constants) for setup in setups]
    return Curve(spec, xs, gains, grows(sent(method_of(spec), 2, matrix_side(setups[0].params, setups[0].side))))


def gain(spec: str, setup: Setup, rates: Rates, constants: Constants) -> float:
    """Return how many times faster than the baseline a step is there; nan where the method cannot be used."""
    base = min(predict(own, setup, rates, constants).step for own in BASELINES)
    try:
        return base / predict(spec, setup, rates, constants).step
    except UnsupportedError:
        return math.nan


class Crossing(NamedTuple):
    """Point from which one method is faster than another one."""

    ranks: int  # The first world size at which it is ahead
    before: str  # The spec that goes by allgather
    after: str  # The spec whose traffic does not grow


def crossing(curves: Sequence[Curve]) -> Crossing | None:
    """Find where the best allreduce-compatible method overtakes, for good, the best that goes by allgather."""
    growing, bounded = ([c for c in curves if c.grows == grows and c.spec not in BASELINES] for grows in (True, False))
    if not growing or not bounded:
        return None
    found = None
    for i in reversed(range(len(curves[0].xs))):
        ahead, behind = (max(group, key=lambda c: _known(c.gains[i])) for group in (bounded, growing))
        if _known(ahead.gains[i]) < _known(behind.gains[i]):
            return found and found._replace(before=behind.spec)
        found = Crossing(round(curves[0].xs[i]), behind.spec, ahead.spec)
    return None


def _known(gain: float) -> float:
    return -1.0 if math.isnan(gain) else gain
