"""Finding the constants of a machine from what was measured on it."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from itertools import combinations, product

from advise_validation.campaign import Measured, compare
from hvd_compress.tools.advise.constants import SHARES, Constants
from hvd_compress.tools.advise.rates import Rates

FREE = ("byte", "half", "cycle", "coding")
"""The constants to fit. The others are known better from elsewhere, or do not show where cores are shared."""

_FACTORS = (3.0, 1.7, 1.3, 1.1, 1.03)
_ROUNDS = 40
_SMALL = 0.05
"""Errors below this hardly differ from none: measurements are not better."""


def fit(jobs: Sequence[Measured], rates: Rates, start: Constants) -> Constants:
    """Find the constants with which predictions are closest: a pattern search, one or two constants at a time.

    In the end, no step of 3 % in one or two of them makes the errors smaller.
    """
    best, loss = start, _loss(jobs, rates, start)
    for factor in _FACTORS:
        for _ in range(_ROUNDS):
            before = loss
            for move in _moves(factor):
                tried = _moved(best, move)
                if (found := _loss(jobs, rates, tried)) < loss:
                    best, loss = tried, found
            if loss == before:
                break
    return best


def _moves(factor: float) -> Iterator[dict[str, float]]:
    """Yield by what to multiply which constants."""
    for name, by in product(FREE, (factor, 1 / factor)):
        yield {name: by}
    for (one, other), by, and_by in product(combinations(FREE, 2), (factor, 1 / factor), (factor, 1 / factor)):
        yield {one: by, other: and_by}


def _moved(constants: Constants, move: dict[str, float]) -> Constants:
    values = {name: getattr(constants, name) * by for name, by in move.items()}
    return constants._replace(**{name: min(value, 1.0) if name in SHARES else value for name, value in values.items()})


def _loss(jobs: Sequence[Measured], rates: Rates, constants: Constants) -> float:
    """Return the mean size of ``log(predicted / measured)``, in which outliers count little, as in a median."""
    errors = [math.log(cell.predicted / cell.measured) for cell in compare(jobs, rates, constants)]
    return sum(math.hypot(error, _SMALL) for error in errors) / len(errors)
