"""The global model of local steps: one source for all frameworks.

Arrays are of numpy or PyTorch: only operators that both have are used.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from copy import deepcopy
from itertools import accumulate
from typing import Any

from hvd_compress.errors import SpecError, StateError
from hvd_compress.local.settings import LocalSettings


class Rounds:
    """The global model, which all ranks know, and the fragments in which it is exchanged.

    A rank trains alone. When the exchange of a fragment begins, it hands over the `differences` of the fragment: what
    it has subtracted from the global model. Their mean over the ranks is the gradient of the outer optimizer.

    Args:
        settings: The settings.
        arrays: The parameters, equal on all ranks.

    Attributes:
        step: Number of steps so far.
        anchors: The global model.
        means: Means of a fragment that have come before their time; None if there are none.
    """

    def __init__(self, settings: LocalSettings, arrays: Sequence[Any]) -> None:
        self.settings = settings
        self.step = 0
        self.anchors = [deepcopy(array) for array in arrays]
        self.means: Sequence[Any] | None = None
        self._momenta = [0 * array for array in self.anchors] if settings.outer.momentum else []
        self._fragments = divided([math.prod(array.shape) for array in arrays], settings.fragments)

    def members(self, fragment: int) -> range:
        """Return the numbers of a fragment's parameters."""
        return self._fragments[fragment]

    def differences(self, fragment: int, arrays: Sequence[Any]) -> list[Any]:
        """Return new arrays: what this rank has subtracted from the global model.

        Args:
            fragment: The fragment.
            arrays: All parameters of this rank.
        """
        return [self.anchors[i] - arrays[i] for i in self.members(fragment)]

    def apply(self, fragment: int, means: Sequence[Any] | None, arrays: Sequence[Any], mix: float) -> list[Any]:
        """Make a step of the global model.

        Args:
            fragment: The fragment.
            means: Means over the ranks of its `differences`; None if they are not finite, which leaves the global
                model as it is.
            arrays: All parameters of this rank.
            mix: Share of these in the result.

        Returns:
            The fragment's parameters from now on.
        """
        found = []
        for i, mean in zip(self.members(fragment), means or [None] * len(self.members(fragment)), strict=True):
            anchor = self.anchors[i]
            if mean is not None:
                self.settings.outer.step(anchor, mean, self._momenta[i] if self._momenta else None)
            found.append(anchor if mean is None or not mix else anchor + mix * (arrays[i] - anchor))
        return found

    def named(self) -> dict[str, Any]:
        """Return all arrays to be saved, by name."""
        return self._named(self.means or ())

    def like(self, step: int) -> dict[str, Any]:
        """Return arrays of the shapes, dtypes and devices of those that are saved after a step, by name."""
        flying = self.settings.flies(step)
        return self._named([] if flying is None else [self.anchors[i] for i in self.members(flying)])

    def _named(self, means: Sequence[Any]) -> dict[str, Any]:
        kinds = ("anchor", self.anchors), ("momentum", self._momenta), ("mean", means)
        return {f"{kind}.{i}": array for kind, arrays in kinds for i, array in enumerate(arrays)}

    def check(self, step: int, arrays: Mapping[str, Any]) -> None:
        """Refuse a saved state of other parameters or settings.

        Args:
            step: Its number of steps.
            arrays: Its arrays, by name.

        Raises:
            StateError: If it is one.
        """
        own = {name: tuple(array.shape) for name, array in self.like(step).items()}
        shapes = {name: tuple(array.shape) for name, array in arrays.items()}
        if own == shapes:
            return
        odd = next(name for name in (*own, *shapes) if own.get(name) != shapes.get(name))
        raise StateError(
            f"the loaded state of local steps, after step {step}, has shape {shapes.get(odd)} for {odd!r}, but here it"
            f" is {own.get(odd)}: resume with the parameters and the outer=, every=, fragments= and delay= that were"
            " saved"
        )

    def restore(self, step: int, arrays: Mapping[str, Any]) -> None:
        """Take over the arrays of a saved state that has been checked."""
        self.step = step

        def taken(kind: str) -> list[Any]:
            count = sum(name.startswith(f"{kind}.") for name in arrays)
            return [arrays[f"{kind}.{i}"] for i in range(count)]

        self.anchors, self._momenta, self.means = taken("anchor"), taken("momentum"), taken("mean") or None


def divided(sizes: Sequence[int], fragments: int) -> list[range]:
    """Divide parameters, in order, into fragments of about equal size.

    Args:
        sizes: Numbers of elements of the parameters.
        fragments: Number of fragments.

    Raises:
        SpecError: If there are fewer parameters.
    """
    if len(sizes) < fragments:
        raise SpecError(f"fragments={fragments} is not allowed: the optimizer has {len(sizes)} parameters only")
    ends = list(accumulate(sizes))
    cuts = [0]
    for number in range(1, fragments):
        target = ends[-1] * number / fragments
        least, most = cuts[-1] + 1, len(sizes) - (fragments - number)
        cuts.append(min(range(least, most + 1), key=lambda i: abs(ends[i - 1] - target)))
    return [range(begin, end) for begin, end in zip(cuts, [*cuts[1:], len(sizes)], strict=True)]
