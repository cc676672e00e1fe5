"""Buckets of one optimizer: assignment of gradients, and state."""

from __future__ import annotations

import weakref
from collections.abc import Iterable, Mapping, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from hvd_compress.checkpoint import agreement
from hvd_compress.checkpoint.resharding import BucketSnapshot, divisible, inherit
from hvd_compress.checkpoint.state_dict import (
    Parameter,
    SavedSession,
    parameters_of,
    refuse_other_parameters,
    same_parameters,
)
from hvd_compress.core.bucketing import Gradient, Merge, advise, gradient, merged_sizes, pin, plan, start
from hvd_compress.core.collectives import State, World
from hvd_compress.core.router import Router
from hvd_compress.core.state_tree import Role, flatten, kinds
from hvd_compress.engine.survey import Part
from hvd_compress.errors import SpecError, StateError, UnknownParameterError, UnsupportedError
from hvd_compress.methods.wrappers.alternatives import Choice
from hvd_compress.ops.numpy import NumpyOps
from hvd_compress.torch.bucket_state import BucketState, Layout, Place
from hvd_compress.torch.entry import GradientArrival

_STAYS = (Role.SHARED, Role.MEASURED, Role.OWN, Role.PRIVATE)
"""Roles of what a rank keeps when there are other ranks."""


class Member(NamedTuple):
    """Tensor that is reduced in each step.

    Attributes:
        key: Unique identifier.
        name: Name of the parameter.
        tensor: The parameter, or a tensor with its shape and dtype.
    """

    key: int
    name: str
    tensor: Tensor


def facts_of(members: Iterable[tuple[str, Tensor]]) -> list[Gradient]:
    """Describe named parameters, for the comparison between ranks."""
    return [Gradient(name, tuple(tensor.shape), str(tensor.dtype).removeprefix("torch.")) for name, tensor in members]


class Buckets:
    """Buckets of a set of parameters.

    They are created by `begin`, once it is known which parameters have gradients.

    Args:
        method: The method, as a router.
        merge: Assignment of gradients to buckets.
        members: The parameters, in the order in which the model uses them.
        world: The ranks.

    Attributes:
        world: The ranks.
        fixed: The user's partition; None with autotuning.
        partition: The current partition.
        layout: The buckets, and the place of each gradient.
        gradients: The parameters.

    Raises:
        GradientError: If a parameter's dtype cannot be compressed.
    """

    def __init__(self, method: Router, merge: Merge, members: Sequence[Member], world: World) -> None:
        self.world = world
        self.fixed: Merge | None = None if merge == "search" else merge
        self.partition: Merge = merge
        self.layout = Layout([], {}, 0)
        self._method = method
        self._parameters = {key: weakref.ref(tensor) for key, _, tensor in members}
        self.gradients = [
            gradient(name, tuple(p.shape), str(p.dtype).removeprefix("torch."), str(p.device)) for _, name, p in members
        ]
        self._lent: set[int] = set()
        self._came: dict[int, GradientArrival] = {}

    @property
    def keys(self) -> list[int]:
        """Keys of the members."""
        return list(self._parameters)

    @property
    def parameters(self) -> list[Tensor]:
        """The members that still exist."""
        return [p for one in self._parameters.values() if (p := one()) is not None]

    def parameter(self, key: int) -> Tensor | None:
        """Return a member, if it still exists."""
        return self._parameters[key]()

    @property
    def begun(self) -> bool:
        """Whether the buckets, and so their states, exist."""
        return bool(self._came)

    @property
    def came(self) -> list[int]:
        """When gradients arrived in the first step, in the order of members."""
        return [int(self._came[key]) for key in self._parameters]

    def begin(self, came: Mapping[int, GradientArrival] | None = None) -> None:
        """Create the first buckets.

        Args:
            came: When the gradients arrived in the first step; None if all arrived in backward.
        """
        advise(self.gradients, self._method, self.world)
        self._came = dict.fromkeys(self._parameters, GradientArrival.IN_BACKWARD) if came is None else dict(came)
        first = pin(start(self.sizes())) if self.fixed is None else self.fixed
        if agreement.elastic():  # new ranks know the first partition only
            self.fixed = first
        self.lay_out(first)

    def sizes(self) -> list[int]:
        """Return the sizes in bytes of the gradients that ``merge`` applies to."""
        return merged_sizes([one for _, one in self._present(self._came)], self._method)

    def divisible(self) -> bool:
        """Return whether buckets of another partition can take over all states."""
        return all(map(divisible, self.kept()))

    def _present(self, came: Mapping[int, GradientArrival]) -> list[tuple[int, Gradient]]:
        """Return the exchanged gradients with their keys."""
        return [
            (key, one._replace(late=came[key] == GradientArrival.LATE))
            for key, one in zip(self._parameters, self.gradients, strict=True)
            if came[key] != GradientArrival.NEVER
        ]

    def lay_out(self, partition: Merge) -> None:
        """Create the buckets of a partition with initial states."""
        self.partition = partition
        buckets: list[BucketState] = []
        places: dict[int, Place] = {}
        present = self._present(self._came)
        for planned in plan([one for _, one in present], self._method, partition):
            mine = [present[i] for i in planned.members]
            bucket = BucketState(planned, torch.device(mine[0][1].device), self.world)
            buckets.append(bucket)
            places |= {key: Place(one.name, bucket, position) for position, (key, one) in enumerate(mine)}
        self.layout = Layout(buckets, places, sum(self._came[key] == GradientArrival.IN_BACKWARD for key, _ in present))

    def change(self, partition: Merge) -> None:
        """Change the partition and carry the states over."""
        if partition != self.partition:
            kept, before = self.kept(), self.kept(before=True)
            self.lay_out(partition)
            self._take_over(kept, before)

    def choose(self, number: int) -> None:
        """Choose a candidate of `Auto` for the exchanges to come."""
        for bucket in self.layout.buckets:
            bucket.choose(number)

    def parts(self, grads: Mapping[int, Tensor], scale: float) -> list[Part]:
        """Return what a survey of candidates needs; missing gradients count as zero.

        Args:
            grads: Gradients by key.
            scale: Their loss scale.
        """
        gradients: dict[BucketState, list[Tensor]] = {}
        for key, place in self.layout.places.items():
            size, dtype = place.owner.bucket.sizes[place.position], place.owner.bucket.dtype
            grad = place.owner.ops.zeros((size,), dtype) if key not in grads else grads[key].reshape(-1) / scale
            gradients.setdefault(place.owner, []).append(place.owner.ops.cast(grad, dtype))
        return [
            Part(owner.ops, owner.bucket, owner.method, found)
            for owner, found in gradients.items()
            if isinstance(owner.method, Choice)
        ]

    def _take_over(self, kept: Sequence[BucketSnapshot], before: Sequence[BucketSnapshot]) -> None:
        """Take over the states of other buckets of the same gradients, and those to which they can be undone."""
        for bucket, mine in zip(self.layout.buckets, self.kept(), strict=True):
            bucket.write(inherit(mine, before))
            bucket.commit(bucket.state)
            bucket.write(inherit(mine, kept))

    def check_movable(self, world: World) -> None:
        """Refuse other ranks if a state is divided among the present ones, or sums what they hold.

        Raises:
            UnsupportedError: If it is so, and these are other ranks.
        """
        if (world.rank, world.size) == (self.world.rank, self.world.size):
            return
        for bucket in self.layout.buckets:
            if any(kind.role not in _STAYS for kind in kinds(bucket.state).values()):
                raise UnsupportedError(
                    f"this was rank {self.world.rank} of {self.world.size} and is rank {world.rank} of {world.size}"
                    f" now, but {self._method} divides its state among the ranks: save it before they change,"
                    " by compression.save(folder), and load it into a new compression afterwards"
                )

    def check_place(self, key: int, grad: Tensor, cure: str) -> None:
        """Reject a gradient that was not among those of the first step.

        Raises:
            UnknownParameterError: If it was not.
        """
        if key not in self._parameters or self._came.get(key) == GradientArrival.NEVER:
            what = "was added to the optimizer after" if key not in self._parameters else "had a sparse gradient in"
            raise UnknownParameterError(f"a parameter of shape {tuple(grad.shape)} {what} the first step: {cure}")
        self._lent.discard(key)

    def name(self, key: int) -> str:
        """Return the name of a member."""
        return self.gradients[self.keys.index(key)].name

    def states(self) -> list[State]:
        """Return the states of all buckets."""
        return [bucket.state for bucket in self.layout.buckets]

    def living(self) -> set[int]:
        """Return the keys of the parameters that still exist and that no other buckets have taken over."""
        return {key for key, parameter in self._parameters.items() if parameter() is not None} - self._lent

    def succeed(self, formers: Sequence[Buckets], thrown: Sequence[bool]) -> bool:
        """Begin with the states of former buckets of the same parameters; formers keep those of other parameters.

        Args:
            formers: The former buckets.
            thrown: For each, whether its last step may be undone.

        Returns:
            Whether these continue the partition and the autotuning of the former ones.
        """
        known = {key: came for former in formers for key, came in former._came.items()}
        self.begin({key: known.get(key, GradientArrival.IN_BACKWARD) for key in self._parameters})
        first, *others = formers
        for former in formers:
            former.check_movable(self.world)
        goes_on = self.fixed is None and not others and first._parameters.keys() == self._parameters.keys()
        if goes_on:
            self.lay_out(first.partition)
        before = [one for former, undone in zip(formers, thrown, strict=True) for one in former.kept(before=undone)]
        self._take_over([one for former in formers for one in former.kept()], before)
        for former in formers:
            former.lend(self.living())
        return goes_on

    def lend(self, keys: set[int]) -> None:
        """Forget the states of parameters that others have taken over."""
        for key in keys & self._parameters.keys():
            self._lent.add(key)
            if key in self.layout.places:
                place = self.layout.places[key]
                place.owner.forget([place.position])

    def kept(self, before: bool = False) -> list[BucketSnapshot]:
        """Return the states of all buckets, with the keys of their parameters; None for deleted parameters.

        Args:
            before: Return those from before the last step, as far as it can be undone.
        """
        living = self.living()
        keys: dict[BucketState, list[int | None]] = {one: [] for one in self.layout.buckets}
        for key, place in self.layout.places.items():
            keys[place.owner].append(key if key in living else None)
        return [
            BucketSnapshot(keys[one], one.bucket, one.method, flatten(one.before if before else one.state))
            for one in self.layout.buckets
        ]

    def restore(self, saved: SavedSession) -> None:
        """Restore checked states, in their partition; if they are of other parameters, those that both have."""
        if not same_parameters(saved, self.gradients):
            self._adopt(saved)
            return
        if saved.came is not None:
            self.begin(self._came_before(saved))
        if saved.merge is not None and saved.merge != self.partition:
            self.lay_out(saved.merge)
        for one in self.layout.buckets:
            one.write(saved.buckets[one.bucket.key])

    def _adopt(self, saved: SavedSession) -> None:
        """Begin with the states of the parameters that a saved session has as well."""
        kept = [one._replace(leaves=saved.buckets[one.bucket.key]) for one in self.by_key(saved).values()]
        came = dict(zip(parameters_of(saved.gradients), map(GradientArrival, saved.came or []), strict=False))
        self.begin({key: came.get(one, GradientArrival.IN_BACKWARD) for one, key in self._keys_of().items()})
        for bucket, mine in zip(self.layout.buckets, self.by_key().values(), strict=True):
            bucket.write(inherit(mine, kept))

    def _keys_of(self) -> dict[Parameter, int]:
        return dict(zip(parameters_of(self.gradients), self._parameters, strict=True))

    def _came_before(self, saved: SavedSession) -> dict[int, GradientArrival]:
        """Return when gradients arrived in the first step of a saved job.

        Raises:
            StateError: If it had another number of parameters.
        """
        came = (
            [GradientArrival.IN_BACKWARD] * len(self._parameters)
            if saved.came is None
            else list(map(GradientArrival, saved.came))
        )
        if len(came) != len(self._parameters):
            raise StateError(
                f"the saved state has {len(came)} parameters, but the optimizer has {len(self._parameters)}: resume"
                " with the model that was saved"
            )
        return dict(zip(self._parameters, came, strict=True))

    def _present_before(self, saved: SavedSession) -> list[tuple[int | None, Gradient]]:
        """Return the exchanged gradients of a saved session of other parameters, with their keys if they are here."""
        keys = self._keys_of()
        return [
            (keys.get(parameter), one._replace(late=came == GradientArrival.LATE))
            for parameter, one, came in zip(
                parameters_of(saved.gradients), saved.gradients, saved.came or [], strict=True
            )
            if came != GradientArrival.NEVER
        ]

    def by_key(self, saved: SavedSession | None = None) -> dict[str, BucketSnapshot]:
        """Return the states of all buckets by key, or initial states for the buckets of a saved state.

        Raises:
            StateError: If the saved partition does not match the gradients, or its states cannot move to ``merge``.
        """
        if saved is None or saved.merge is None:
            kept = [one._replace(leaves=b.read()) for one, b in zip(self.kept(), self.layout.buckets, strict=True)]
            return {one.bucket.key: one for one in kept}
        same = same_parameters(saved, self.gradients)
        present = self._present(self._came_before(saved)) if same else self._present_before(saved)
        try:
            planned = plan([one for _, one in present], self._method, saved.merge)
        except SpecError as error:
            raise StateError(
                f"the saved buckets do not match the model ({error}): resume with the model that was saved"
            ) from error
        states = [one.method.init(NumpyOps(), one.bucket, self.world) for one in planned]
        kept = [
            BucketSnapshot([present[i][0] for i in p.members], p.bucket, p.method, flatten(s))
            for p, s in zip(planned, states, strict=True)
        ]
        if not (same or all(map(divisible, kept))):
            refuse_other_parameters(saved.gradients, self.gradients)
        if same and self.fixed not in (None, saved.merge) and not all(map(divisible, kept)):
            raise StateError(
                f"this state was saved with merge={saved.merge!r}, but merge is {self.fixed!r} now, and the state of"
                f" {self._method} cannot move to other buckets: take merge={saved.merge!r}"
            )
        return {one.bucket.key: one for one in kept}
