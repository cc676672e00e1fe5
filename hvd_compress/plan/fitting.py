"""Finding the constants of a machine from what was measured on it."""

from __future__ import annotations

import math
from collections.abc import Sequence

from hvd_compress.plan.constants import SHARES, Constants
from hvd_compress.plan.rates import Rates
from hvd_compress.plan.validation import Measured, compare

FREE = ("byte", "half", "serial", "hop", "cycle", "skew")
"""What is fitted. The others are known, or do not show where cores are shared."""

_FACTORS = (3.0, 1.7, 1.3, 1.1, 1.03)
_ROUNDS = 30
_LEAST = 1e-12


def fit(jobs: Sequence[Measured], rates: Rates, start: Constants) -> Constants:
    """Find the constants with which predictions are closest: a pattern search, one constant at a time.

    Args:
        jobs: To fit to.
        rates: Of the methods.
        start: Where to begin; what is not fitted stays.

    Returns:
        Constants for which no step of 3 % in any of them makes the mean of ``|log(predicted / measured)|`` less.
    """
    best, loss = start, _loss(jobs, rates, start)
    for factor in _FACTORS:
        for _ in range(_ROUNDS):
            before = loss
            for name in FREE:
                for value in (getattr(best, name) * factor, getattr(best, name) / factor):
                    tried = best._replace(**{name: max(_LEAST, min(value, 1.0) if name in SHARES else value)})
                    if (found := _loss(jobs, rates, tried)) < loss:
                        best, loss = tried, found
            if loss == before:
                break
    return best


def _loss(jobs: Sequence[Measured], rates: Rates, constants: Constants) -> float:
    cells = compare(jobs, rates, constants)
    return sum(abs(math.log(cell.predicted / cell.measured)) for cell in cells) / len(cells)
