"""What a compressor is to one optimizer: its buckets, their state, and the course of a step."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

import torch
from torch import Tensor

from hvd_compress import agreement
from hvd_compress.collectives import State
from hvd_compress.errors import ExchangeError, StateError, UnknownParameterError
from hvd_compress.group import Group
from hvd_compress.merging import Merge, gradient, plan
from hvd_compress.methods.base import Method
from hvd_compress.state import flatten, unflatten
from hvd_compress.stats import Meter
from hvd_compress.torch.driver import gather_bytes
from hvd_compress.torch.slot import Slot


class Ticket(NamedTuple):
    """What ``compress`` leaves with Horovod for ``decompress``.

    Attributes:
        session: Where the gradient went.
        slot: Its bucket; None for a gradient without elements.
        position: Its place in the bucket.
        like: The gradient itself, for its shape and dtype.
    """

    session: Session
    slot: Slot | None
    position: int
    like: Tensor


class Place(NamedTuple):
    """Where the gradient of a parameter goes.

    Attributes:
        name: Of the parameter.
        slot: The bucket.
        position: The place in the bucket.
    """

    name: str
    slot: Slot
    position: int


class Session:
    """The exchange of the gradients of one optimizer.

    A step begins with the first `add` and ends with the last `take`. Horovod adds all gradients before it takes any.

    Args:
        method: What compresses.
        merge: How gradients are put into buckets.
        parameters: Names and parameters, in the order in which the model uses them.
        group: The ranks that take part.
        meter: Counts bytes and time.

    Raises:
        DisagreementError: If the ranks are not set up alike.
        GradientError: If a parameter's dtype cannot be compressed.
        UnsupportedError: If the job is elastic.
    """

    def __init__(
        self, method: Method, merge: Merge, parameters: list[tuple[str, Tensor]], group: Group, meter: Meter
    ) -> None:
        agreement.refuse_elastic()
        self.gradients = [
            gradient(name, tuple(p.shape), str(p.dtype).removeprefix("torch."), str(p.device)) for name, p in parameters
        ]
        agreement.check(
            gather_bytes(agreement.describe(method, merge, self.gradients), "hvd_compress.agreement", group)
        )
        self.label = agreement.label(self.gradients)
        self.group = group
        self._meter = meter
        self._slots: list[Slot] = []
        self._places: dict[Tensor, Place] = {}
        for planned in plan(self.gradients, method, merge):
            members = [parameters[i] for i in planned.members]
            slot = Slot(planned, members[0][1].device, f"hvd_compress.{self.label}", group, meter)
            self._slots.append(slot)
            self._places |= {p: Place(name, slot, position) for position, (name, p) in enumerate(members)}
        self._waiting = 0
        self._scales: list[Tensor] = []

    def add(self, parameter: Tensor, grad: Tensor) -> tuple[Tensor, Ticket]:
        """Take in a gradient.

        Returns:
            The carrier for Horovod to allreduce, and the ticket to take the result with. The carrier holds 1, so what
            comes back tells how Horovod would have scaled the sum; it is nan where the gradient is not finite.
        """
        slot, position, carrier = None, 0, torch.ones(1, dtype=torch.float64, device=grad.device)
        if grad.numel():
            slot, position = self._free_place(parameter)
            with self._meter.time("encode"):
                carrier = (slot.put(position, grad) * 0 + 1).to(torch.float64).reshape(1)
                for other in self._slots:  # a later gradient is the chance to start an earlier bucket's second round
                    if other is not slot:
                        other.poll()
        self._meter.gradient_bytes += grad.numel() * grad.element_size()
        self._meter.bytes_sent += carrier.element_size()
        self._waiting += 1
        return carrier, Ticket(self, slot, position, grad)

    def _free_place(self, parameter: Tensor) -> tuple[Slot, int]:
        """Where a gradient goes that has not come yet in this step."""
        if parameter not in self._places:
            raise UnknownParameterError(
                f"a parameter of shape {tuple(parameter.shape)} was not among those that the optimizer had in its first"
                " step; make a new hvd.DistributedOptimizer with a new compressor when parameters are added"
            )
        name, slot, position = self._places[parameter]
        if slot.holds(position):
            raise ExchangeError(f"the gradient of {name!r} came twice in one step: call optimizer.step() in between")
        return slot, position

    def take(self, carrier: Tensor, ticket: Ticket) -> Tensor:
        """Give out a result; the first call of a step completes all exchanges, the last one ends the step."""
        with self._meter.time("decode"):
            if not self._scales:
                self._complete()
            scale = carrier.reshape(()) / self.group.world.size
            self._scales.append(scale)
            result = ticket.like
            if ticket.slot is not None:
                result = ticket.slot.total(ticket.position).mul_(scale).to(ticket.like.dtype)
            if len(self._scales) == self._waiting:
                self._end()
        return result

    def _complete(self) -> None:
        """Finish all exchanges, round by round, so that the second rounds of the buckets overlap too."""
        for slot in self._slots:
            slot.start()
        while busy := [slot for slot in self._slots if slot.busy]:
            for slot in busy:
                slot.wait()

    def _end(self) -> None:
        """Take over the new states, unless some rank had a gradient that is not finite."""
        finite = bool(torch.stack(self._scales).isfinite().all())
        for slot in self._slots:
            slot.close(commit=finite)
        self._scales, self._waiting = [], 0
        self._meter.steps += 1

    def states(self) -> list[State]:
        """The states of all buckets."""
        return [slot.state for slot in self._slots]

    def state_dict(self) -> dict[str, Any]:
        """The states of all buckets, as copies."""
        return {
            **self.group.world._asdict(),
            "buckets": {
                slot.bucket.key: {
                    path: leaf.clone() if isinstance(leaf, Tensor) else leaf
                    for path, leaf in flatten(slot.state).items()
                }
                for slot in self._slots
            },
        }

    def load_state_dict(self, saved: Mapping[str, Any]) -> None:
        """Take over saved states, all or none.

        Raises:
            StateError: If they were saved on another rank or world size, or do not fit the buckets.
        """
        here = self.group.world
        if any(saved.get(key) != value for key, value in here._asdict().items()):
            raise StateError(
                f"this state was saved on rank {saved.get('rank')} of {saved.get('size')} and cannot be restored on"
                f" rank {here.rank} of {here.size}: residuals belong to their rank; restore with as many"
                " ranks as were saved, each from its own file"
            )
        buckets = saved.get("buckets", {})
        if set(buckets) != {slot.bucket.key for slot in self._slots}:
            raise StateError(f"the saved buckets {sorted(buckets)} do not fit: the model or merge= has changed")
        states = [_restored(slot, buckets[slot.bucket.key]) for slot in self._slots]
        for slot, state in zip(self._slots, states, strict=True):
            slot.state = state


def _restored(slot: Slot, saved: Mapping[str, Any]) -> Any:
    """Build a slot's state from saved leaves that have been checked against it."""
    leaves = {}
    for path, leaf in flatten(slot.state).items():
        new: Any = saved.get(path)
        if type(new) is not type(leaf) or getattr(new, "shape", None) != getattr(leaf, "shape", None):
            raise StateError(
                f"{path!r} of bucket {slot.bucket.key!r} does not fit: expected {_kind(leaf)}, got {_kind(new)}"
            )
        leaves[path] = new.to(leaf.device, leaf.dtype, copy=True) if isinstance(leaf, Tensor) else new
    return unflatten(slot.state, leaves)


def _kind(leaf: Any) -> str:
    return f"a tensor of shape {tuple(leaf.shape)}" if isinstance(leaf, Tensor) else f"{type(leaf).__name__} {leaf!r}"
