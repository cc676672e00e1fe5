"""The buckets of one optimizer: which gradients are in which, and what is kept of each."""

from __future__ import annotations

import weakref
from collections.abc import Iterable, Mapping, Sequence
from enum import IntEnum
from typing import NamedTuple

import torch
from torch import Tensor

from hvd_compress.bucketing import Gradient, Merge, gradient, merged_sizes, pin, plan, start
from hvd_compress.checkpoint import agreement
from hvd_compress.checkpoint.resharding import Kept, divisible, inherit
from hvd_compress.checkpoint.state_dict import SavedSession
from hvd_compress.core.collectives import State
from hvd_compress.core.state_tree import flatten
from hvd_compress.errors import SpecError, StateError, UnknownParameterError
from hvd_compress.ops.numpy import NumpyOps
from hvd_compress.spec import to_spec
from hvd_compress.torch.bucket_state import BucketState
from hvd_compress.torch.step import Layout, Place
from hvd_compress.wrappers.router import Router


class Member(NamedTuple):
    """A tensor that is reduced in each step.

    Attributes:
        key: Tells it from the others.
        name: Of the parameter.
        tensor: The parameter, or one like it.
    """

    key: int
    name: str
    tensor: Tensor


class Came(IntEnum):
    """How the gradient of a parameter came in the first step, on the rank where it came soonest."""

    NEVER = 0
    """It is reduced in another way, as it is sparse."""
    LATE = 1
    """Only after the backward pass, as the parameter was not used."""
    IN_BACKWARD = 2


def facts_of(members: Iterable[tuple[str, Tensor]]) -> list[Gradient]:
    """Return what the ranks must have in common of parameters, given with their names."""
    return [Gradient(name, tuple(tensor.shape), str(tensor.dtype).removeprefix("torch.")) for name, tensor in members]


class Buckets:
    """The buckets of a set of parameters.

    There are none before it is known which parameters have gradients: until `begin`.

    Args:
        method: What compresses.
        merge: How gradients are put into buckets.
        members: What is reduced, in the order in which the model uses it.
        size: Number of ranks.

    Attributes:
        size: Number of ranks.
        fixed: The partition that the user wants; None where the best is looked for.
        partition: The partition of now.
        layout: The buckets, and where each gradient goes.

    Raises:
        GradientError: If a parameter's dtype cannot be compressed.
    """

    def __init__(self, method: Router, merge: Merge, members: Sequence[Member], size: int) -> None:
        self.size = size
        self.fixed: Merge | None = None if merge == "search" else merge
        self.partition: Merge = merge
        self.layout = Layout([], {}, 0)
        self._method = method
        self._parameters = {key: weakref.ref(tensor) for key, _, tensor in members}
        self._gradients = [
            gradient(name, tuple(p.shape), str(p.dtype).removeprefix("torch."), str(p.device)) for _, name, p in members
        ]
        self._lent: set[int] = set()
        self._came: dict[int, Came] = {}

    @property
    def keys(self) -> list[int]:
        """The keys of the members."""
        return list(self._parameters)

    @property
    def begun(self) -> bool:
        """Whether there are buckets, and so a state."""
        return bool(self._came)

    @property
    def came(self) -> list[int]:
        """How gradients came, in the order of members."""
        return [int(self._came[key]) for key in self._parameters]

    def begin(self, came: Mapping[int, Came] | None = None) -> None:
        """Make the first buckets.

        Args:
            came: How the gradients of the members came in the first step; all in backward if it is not known.
        """
        self._came = dict.fromkeys(self._parameters, Came.IN_BACKWARD) if came is None else dict(came)
        first = pin(start(self.sizes())) if self.fixed is None else self.fixed
        if agreement.elastic():  # a newcomer knows of no other partition than the first
            self.fixed = first
        self.lay_out(first)

    def sizes(self) -> list[int]:
        """Return the bytes of the gradients that ``merge`` counts for."""
        return merged_sizes([one for _, one in self._present(self._came)], self._method)

    def divisible(self) -> bool:
        """Whether buckets of another partition could take over all states."""
        return all(map(divisible, self.kept()))

    def _present(self, came: Mapping[int, Came]) -> list[tuple[int, Gradient]]:
        """Return the gradients that are exchanged, with the keys of their parameters."""
        return [
            (key, one._replace(late=came[key] == Came.LATE))
            for key, one in zip(self._parameters, self._gradients, strict=True)
            if came[key] != Came.NEVER
        ]

    def lay_out(self, partition: Merge) -> None:
        """Make new states for the buckets of a partition."""
        self.partition = partition
        buckets: list[BucketState] = []
        places: dict[int, Place] = {}
        present = self._present(self._came)
        for planned in plan([one for _, one in present], self._method, partition):
            mine = [present[i] for i in planned.members]
            bucket = BucketState(planned, torch.device(mine[0][1].device), self.size)
            buckets.append(bucket)
            places |= {key: Place(one.name, bucket, position) for position, (key, one) in enumerate(mine)}
        self.layout = Layout(buckets, places, sum(self._came[key] == Came.IN_BACKWARD for key, _ in present))

    def change(self, partition: Merge) -> None:
        """Go on with another partition."""
        if partition != self.partition:
            kept = self.kept()
            self.lay_out(partition)
            self.take_over(kept)

    def take_over(self, kept: Sequence[Kept]) -> None:
        """Take over what other buckets have kept of the same gradients."""
        for bucket, mine in zip(self.layout.buckets, self.kept(), strict=True):
            bucket.write(inherit(mine, kept))

    def check_place(self, key: int, grad: Tensor, cure: str) -> None:
        """Refuse a gradient that has no place.

        Raises:
            UnknownParameterError: If it has none.
        """
        if key not in self._parameters or self._came.get(key) == Came.NEVER:
            what = "was not among those that the optimizer had" if key not in self._parameters else "was sparse"
            raise UnknownParameterError(f"a parameter of shape {tuple(grad.shape)} {what} in its first step: {cure}")
        self._lent.discard(key)

    def name(self, key: int) -> str:
        """Return the name of a member."""
        return self._gradients[self.keys.index(key)].name

    def states(self) -> list[State]:
        """Return the states of all buckets."""
        return [bucket.state for bucket in self.layout.buckets]

    def living(self) -> set[int]:
        """Return the keys of the parameters that still exist and that have not been lent to others."""
        return {key for key, parameter in self._parameters.items() if parameter() is not None} - self._lent

    def succeed(self, formers: Sequence[Buckets]) -> bool:
        """Begin with what former buckets have kept of the same parameters; of others they keep it.

        Returns:
            Whether these go on with the partition of the former ones, and with the search for a better one.
        """
        known = {key: came for former in formers for key, came in former._came.items()}
        self.begin({key: known.get(key, Came.IN_BACKWARD) for key in self._parameters})
        first, *others = formers
        goes_on = self.fixed is None and not others and first._parameters.keys() == self._parameters.keys()
        if goes_on:
            self.lay_out(first.partition)
        self.take_over([one for former in formers for one in former.kept()])
        for former in formers:
            former._lend(self.living())
        return goes_on

    def _lend(self, keys: set[int]) -> None:
        """Forget what others have taken over."""
        for key in keys & self._parameters.keys():
            self._lent.add(key)
            if key in self.layout.places:
                place = self.layout.places[key]
                place.owner.forget([place.position])

    def kept(self) -> list[Kept]:
        """Return the states of all buckets, with the keys of their parameters; None for those that are no more."""
        living = self.living()
        keys: dict[BucketState, list[int | None]] = {one: [] for one in self.layout.buckets}
        for key, place in self.layout.places.items():
            keys[place.owner].append(key if key in living else None)
        return [Kept(keys[one], one.bucket, one.method, flatten(one.state)) for one in self.layout.buckets]

    def restore(self, saved: SavedSession) -> None:
        """Take over states that have been checked, in their partition."""
        if saved.came is not None:
            self.begin(self._came_before(saved))
        if saved.merge is not None and saved.merge != self.partition:
            self.lay_out(saved.merge)
        for one in self.layout.buckets:
            one.write(saved.buckets[one.bucket.key])

    def _came_before(self, saved: SavedSession) -> dict[int, Came]:
        """Return how gradients came in the first step of a job that has saved.

        Raises:
            StateError: If that had others.
        """
        came = [Came.IN_BACKWARD] * len(self._parameters) if saved.came is None else list(map(Came, saved.came))
        if len(came) != len(self._parameters):
            raise StateError(
                f"the saved state is of {len(came)} parameters, but the optimizer has {len(self._parameters)}: restore"
                " with the model that was saved"
            )
        return dict(zip(self._parameters, came, strict=True))

    def by_key(self, saved: SavedSession | None = None) -> dict[str, Kept]:
        """Return the states of all buckets, by their keys; new ones for those of a saved state.

        Raises:
            StateError: If its partition is none of these gradients, or cannot be left for the one that is wanted.
        """
        if saved is None or saved.merge is None:
            kept = [one._replace(leaves=b.read()) for one, b in zip(self.kept(), self.layout.buckets, strict=True)]
            return {one.bucket.key: one for one in kept}
        present = [one for _, one in self._present(self._came_before(saved))]
        try:
            planned = plan(present, self._method, saved.merge)
        except SpecError as error:
            raise StateError(f"the saved buckets do not fit, the model has changed: {error}") from error
        states = [one.method.init(NumpyOps(), one.bucket, self.size) for one in planned]
        kept = [Kept(p.members, p.bucket, p.method, flatten(s)) for p, s in zip(planned, states, strict=True)]
        if self.fixed not in (None, saved.merge) and not all(map(divisible, kept)):
            raise StateError(
                f"this state was saved with merge={saved.merge!r}, but merge is {self.fixed!r} now, and other buckets"
                f" cannot take over all that {to_spec(self._method)} keeps: take merge={saved.merge!r}"
            )
        return {one.bucket.key: one for one in kept}
