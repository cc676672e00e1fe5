"""Placeholders: one-element tensors that Horovod reduces instead of the gradients.

A reduced placeholder shows the factor by which Horovod scales sums, whether all ranks had a finite gradient, whether
all ranks take part, whether a rank wants to verify that the ranks agree, and whether all want to undo the last step.
For a rank that has called ``hvd.join()``, Horovod sends zeros; there, other collectives than sums raise an exception,
and then hang with MPI.
"""

from __future__ import annotations

import math
from collections.abc import Hashable
from typing import NamedTuple

import torch
from torch import Tensor

from hvd_compress.core.collectives import AllReduce, Collective
from hvd_compress.errors import ExchangeError, UnsupportedError
from hvd_compress.torch.horovod import caller

_EXACT = 2.0**48
"""Sums of placeholders are below it, and so exact in float64 even after Horovod has scaled them."""


class PlaceholderTerms(NamedTuple):
    """Terms of a placeholder, whose sums over the ranks are distinguishable.

    Attributes:
        asks: The rank wants to verify that all agree.
        bad: The gradient is not finite.
        undoes: The rank wants to undo the last step; 0 with too many ranks, which then never do.
    """

    asks: float
    bad: float
    undoes: float

    @classmethod
    def of(cls, size: int) -> PlaceholderTerms:
        """Return the terms for a world size, up to 65,535."""
        base = 2.0**12 if size < 2**12 else 2.0**16
        return cls(base, base**2, base**3 if base**4 <= _EXACT else 0.0)


class PlaceholderContents(NamedTuple):
    """Contents of a reduced placeholder.

    Attributes:
        present: Number of ranks that take part.
        asks: Number of ranks that want to verify that all agree.
        bad: Number of ranks whose gradient is not finite.
        undoes: Number of ranks that want to undo the last step.
    """

    present: int
    asks: int
    bad: int
    undoes: int


class PlaceholderPool:
    """Memory of placeholders, reused in each step.

    Args:
        most: Maximum number of gradients per step.
    """

    def __init__(self, most: int) -> None:
        self._most = most
        self.renew()

    def renew(self) -> None:
        """Allocate new memory, after a step that left placeholders with Horovod."""
        self.values = torch.ones(self._most, dtype=torch.float64, device="cpu")
        self.tensors = list(self.values.view(-1, 1).unbind())


class Placeholders:
    """Placeholders of one step.

    Args:
        pool: Their memory.
        full: Horovod's result for a 1 on each rank.
        size: World size.
        asking: Whether this rank wants to verify in this step that all agree.
        undoing: Whether this rank wants to undo the last step.

    Attributes:
        nbytes: Bytes of a placeholder.
        lacking: Whether a rank is missing.
    """

    nbytes = 8

    def __init__(self, pool: PlaceholderPool, full: float, size: int, asking: bool, undoing: bool) -> None:
        self._pool = pool
        self._full = full
        self._size = size
        self._terms = PlaceholderTerms.of(size)
        self._good = 1.0 + self._terms.asks * asking + self._terms.undoes * undoing
        self._undoes: bool | None = None
        self.lacking = False
        self._complete = False
        self._first: int | None = None
        self._given: list[Tensor] = []
        self._calls: list[Hashable] = []
        self._returned: Hashable = None
        self._handles: list[int] | None = None

    def admits(self, message: Collective) -> bool:
        """Return whether a collective may be started: a sum always, others only if all ranks are known to take part."""
        return isinstance(message, AllReduce) or self.are_complete()

    def give(self, peak: float | Tensor, call: Hashable = None, used: bool = True) -> Tensor:
        """Return the placeholder for a gradient.

        Args:
            peak: Largest magnitude of the gradient, or another number that is finite if the gradient is.
            call: Equal for placeholders that Horovod returns together.
            used: True: Horovod gives unused parameters a gradient of zeros.
        """
        if isinstance(peak, Tensor):
            placeholder = (~peak.isfinite()).to(torch.float64).mul(self._terms.bad).add(self._good).reshape(1)
        else:
            if not self._given:
                self._pool.values.fill_(self._good)
            placeholder = self._pool.tensors[len(self._given)]
            if not math.isfinite(peak):
                placeholder.fill_(self._good + self._terms.bad)
        self._given.append(placeholder)
        self._calls.append(call)
        return placeholder

    def are_back(self) -> bool:
        """Return whether all placeholders have been reduced, once all have been passed to Horovod."""
        if self._handles is None:
            out = [c for c, call in zip(self._given, self._calls, strict=True) if call != self._returned]
            handles = caller.handles_of(out)
            if len(handles) < len(out):
                raise ExchangeError(
                    f"Horovod does not know {len(out) - len(handles)} of the {len(out)} gradients that it was given:"
                    " call optimizer.step() or synchronize() once in each step, and do not reduce them in other ways"
                )
            self._handles = sorted(set(handles.values()))
        while self._handles and caller.is_done(self._handles[-1]):
            self._handles.pop()
        return not self._handles

    @property
    def under_way(self) -> int:
        """Number of placeholder handles in flight, as of the last call of `are_back`."""
        return len(self._handles or ())

    def first_factor(self) -> float:
        """Return the factor of sums over the ranks, if the first placeholder has returned; else nan."""
        first = self._given[0] if self._given else None
        if first is None or first.is_cuda or not self.are_complete():
            return math.nan
        return self.factor(first)

    def factor(self, placeholder: Tensor) -> float:
        """Return the factor of a gradient's sum, given its reduced placeholder; nan if one is not finite."""
        return self._factor(float(placeholder))

    def factors(self) -> list[float]:
        """Return the factors of the sums of all gradients, once all placeholders have been reduced."""
        placeholders = self._pool.values[: len(self._given)]
        if any(placeholder.is_cuda for placeholder in self._given):
            placeholders = torch.cat([placeholder.to("cpu", torch.float64) for placeholder in self._given])
        values = placeholders.tolist()
        known = {value: self._factor(value) for value in set(values)}
        return [known[value] for value in values]

    def _factor(self, value: float) -> float:
        heard = self._heard(value)
        sent = heard.present + heard.asks * self._terms.asks + heard.undoes * self._terms.undoes
        return math.nan if heard.bad else value / sent

    def _heard(self, value: float) -> PlaceholderContents:
        """Decode a reduced placeholder."""
        summed = round(value * self._size / self._full) if self._full else self._size
        base = int(self._terms.asks)
        rest, present = divmod(summed, base)
        rest, asks = divmod(rest, base)
        undoes, bad = divmod(rest, base)
        return PlaceholderContents(present, asks, bad, undoes)

    def are_complete(self) -> bool:
        """Return whether the first placeholder has returned, and all ranks sent it."""
        if not self._complete and self._given:
            first = self._given[0]
            if first.is_cuda:  # to look at it would make the GPU wait for the backward pass
                self._complete = True
            else:
                self._complete = self._first_is_back() and self._heard(float(first)).present == self._size
        return self._complete

    def undoes(self) -> bool | None:
        """Return whether all ranks undo the last step; None if the first placeholder has not returned yet."""
        if self._undoes is None and self._first_is_back():
            self._undoes = self._heard(float(self._given[0])).undoes == self._size
        return self._undoes

    def _first_is_back(self) -> bool:
        """Return whether the first placeholder has been reduced."""
        if self._first is None and self._given:
            self._first = caller.handles_of(self._given[:1]).get(id(self._given[0]))
        return caller.is_done(self._first)

    def check(self, placeholder: Tensor, number: int) -> bool:
        """Check the first placeholder that Horovod returns.

        Args:
            placeholder: The reduced placeholder.
            number: Its index.

        Returns:
            Whether a rank wants to verify that all agree.

        Raises:
            UnsupportedError: If a rank is missing.
            ExchangeError: If Horovod has lost the other placeholders.
        """
        heard = self._heard(float(placeholder))
        self.lacking = heard.present < self._size
        if self.lacking:
            raise UnsupportedError(
                "a rank has called hvd.join() while others go on: this compression needs all ranks in each step; give"
                " all ranks the same number of batches, or use Compression.none or Compression.fp16"
            )
        self._complete, self._undoes = True, heard.undoes == self._size
        self._returned, self._handles = self._calls[number], None
        return heard.asks > 0

    def unused(self) -> list[int]:
        """Return no gradients: Horovod gives unused parameters a gradient of zeros."""
        return []

    def assume(self) -> None:
        """Assume that no rank is missing."""
        self._complete = True

    def settle(self, patience: float | None = None) -> None:
        """Wait for abandoned placeholders; see `caller.settle`."""
        caller.settle(self._given, patience)

    def abandon(self) -> None:
        """Leave the placeholders to Horovod, which may still write to them."""
        self._pool.renew()
