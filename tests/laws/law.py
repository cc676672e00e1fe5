"""The law: what the ranks' gradients sum to is what was delivered and what residuals hold.

It needs no residual: after a step in which nothing is held back, all that was given has been delivered.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import TypeAlias

import numpy as np
from catalogue import EXAMPLES
from laws.program import Arr, Program, Use

Delivered: TypeAlias = "Sequence[Mapping[tuple[int, int], Arr]]"
"""For each step, the sums over all ranks that a rank got, by the numbers of model and parameter."""


def violation(program: Program, *ranks: Delivered) -> str:
    """Return how what some ranks got in each step breaks the law; empty if it does not."""
    given = [
        {
            (use.model, p): sum_of_gradients(program, number, use, p)
            for use in step.uses
            for p in range(len(program.models[use.model].shapes))
        }
        for number, step in enumerate(program.ended)
    ]
    return next(filter(None, (_violation(program, given, delivered) for delivered in ranks)), "")


def _violation(program: Program, given: Delivered, delivered: Delivered) -> str:
    accounts = {
        (number, p): Account(np.zeros(shape))
        for number, model in enumerate(program.models)
        for p, shape in enumerate(model.shapes)
    }
    size = 0.0
    for number, step in enumerate(program.ended):
        for use in step.uses:
            for own, fate in program.optimizers_of(use):
                finite = all(np.isfinite(delivered[number][use.model, p]).all() for p in own)
                if finite == (fate == "not finite"):
                    return f"step {number}: the gradients of model {use.model} are {'' if finite else 'not '}finite"
                for p in own if fate == "applied" else ():
                    key = use.model, p
                    size += float(np.abs(given[number][key]).max(initial=0))
                    accounts[key].book(given[number][key] - delivered[number][key], p in use.frozen)
        for account in accounts.values() if number >= len(program.steps) else ():
            account.least = min(account.least, account.outstanding)
    (model, p), worst = max(accounts.items(), key=lambda item: item[1].least)
    if worst.least <= tolerance(program) * (1 + size):
        return ""
    return f"{worst.least:.3g} of parameter {p} of model {model} was not delivered; sum of the largest: {size:.3g}"


def tolerance(program: Program) -> float:
    """Return the share of all gradients that rounding may take away: no rank keeps the error of a sum of few bits."""
    rounded = any(e.total == "rounded" and program.spec.startswith(spec) for spec, e in EXAMPLES.items())
    return 2e-2 if rounded or "inside=fp16" in program.spec or " | " in program.spec else 1e-5


def sum_of_gradients(program: Program, number: int, use: Use, parameter: int) -> Arr:
    """Return the sum of a parameter's gradients over all ranks in a step."""
    total = np.zeros(program.models[use.model].shapes[parameter])
    times = 2 if program.models[use.model].tied and not parameter else 1
    for rank in range(program.ranks) if parameter not in use.frozen else ():
        for part in range(program.ended[number].passes):
            if parameter in program.used(number, use, part, rank):
                total += times * program.gradient(number, use, part, rank, parameter)
    return total


class Account:
    """What of a parameter's gradients is outstanding.

    Args:
        nothing: Zeros.

    Attributes:
        least: How little was outstanding after one of the last steps.
    """

    def __init__(self, nothing: Arr) -> None:
        self._nothing = nothing
        self._legal = [nothing]
        self.least = math.inf

    def book(self, missing: Arr, frozen: bool) -> None:
        """Add what a step did not deliver; what is held back of a frozen parameter may be forgotten."""
        self._legal = [one + missing for one in self._legal] + [self._nothing] * frozen

    @property
    def outstanding(self) -> float:
        """How much was not delivered."""
        return min(float(np.abs(one).max(initial=0)) for one in self._legal)
