"""Bucket of a plan, with the state of its method."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from hvd_compress.checkpoint.resharding import places_of, slices
from hvd_compress.core.bucketing import Planned
from hvd_compress.core.collectives import State, World
from hvd_compress.core.state_tree import Kind, Per, flatten, kinds, unflatten
from hvd_compress.methods.wrappers.alternatives import choice_of, uncompressed
from hvd_compress.methods.wrappers.hierarchy import cut
from hvd_compress.ops.torch_devices import torch_ops


class BucketState:
    """Bucket, its method, and the method's state.

    A step fills a buffer with gradient plus residual. If the step counts, the compression error in that buffer becomes
    the next residual. The old residual is unchanged until then, so a step is rolled back by not committing its state;
    afterwards its memory is the buffer of the next step.

    Args:
        planned: The bucket and its method.
        device: Device of its gradients.
        world: The ranks.

    Attributes:
        spans: Slice of each gradient in the bucket.
    """

    def __init__(self, planned: Planned, device: torch.device, world: World) -> None:
        self.bucket, self.method = planned.bucket, planned.method
        self._choice = choice_of(planned.method)
        self._world = world
        self.ops = torch_ops(device)
        self.state: State = self.method.init(self.ops, self.bucket, world)
        self.spans = slices(self.bucket.sizes)
        self._spare: Tensor | None = None
        self._before: State | None = None

    @property
    def residual(self) -> Tensor | None:
        """Vector to add to the gradients of a step; None if there is none."""
        residual: Tensor | None = self.method.residual(self.state)
        return residual

    @property
    def keeps(self) -> bool:
        """Whether the state keeps something of the gradients."""
        return bool(self._tensors(self.state))

    def choose(self, number: int) -> None:
        """Choose a candidate for the next exchange, if there are some."""
        if self._choice is not None:
            self.state = self._choice.choose(self.state, number)

    @property
    def clean(self) -> bool:
        """Whether no residual is left, so that a linear candidate may sum gradients without this state."""
        return self._choice is None or self._choice.is_clean(self.state)

    @property
    def plain(self) -> bool:
        """Whether the next exchange sums gradients as they are: nothing is compressed, and no residual left."""
        if self._choice is not None:
            return self._choice.is_plain(self.state)
        return self.method == uncompressed(self.method)

    def buffer(self, more: bool = False) -> Tensor:
        """Return memory for the gradients of a step; the previous step cannot be undone after that.

        Args:
            more: Whether they are further gradients of the same step.
        """
        if more:
            return self.ops.empty(self.bucket.numel, self.bucket.dtype)
        self._before = None
        spare, self._spare = self._spare, None
        return self.ops.empty(self.bucket.numel, self.bucket.dtype) if spare is None else spare

    def rest(self) -> None:
        """Free the memory of the last step, which cannot be undone after that."""
        self._before = self._spare = None

    def commit(self, state: State, more: bool = False) -> None:
        """Commit the state of a step that counts, or of ``more`` gradients of the same step."""
        if not more:
            self._before = self.state
        self.state = state

    def recycle(self, *vectors: Tensor) -> None:
        """Keep one vector that the state does not use for the next `buffer`."""
        used = {leaf.untyped_storage().data_ptr() for leaf in self._tensors(self.state)}
        self._spare = next((v for v in vectors if v.untyped_storage().data_ptr() not in used), None)

    def undo(self) -> None:
        """Restore the state from before the last step that counted, until the next step begins."""
        if self._before is not None:
            self.state, self._before = self._before, None
            self._spare = None  # it may be the restored residual

    @property
    def before(self) -> State:
        """State to which `undo` returns."""
        return self.state if self._before is None else self._before

    def forget(self, positions: Sequence[int]) -> None:
        """Clear the per-coordinate state of some gradients, between steps."""
        self._before = None
        self.state = self.without(self.state, positions)

    def without(self, state: State, positions: Sequence[int], residual: bool = False) -> State:
        """Return the state with all that is kept of coordinates of some gradients set to zero, or only its residual."""
        if not positions:
            return state
        leaves = flatten(state)
        for path, kind in kinds(state).items():
            if kind.residual if residual else {kind.per, kind.within} & {Per.COORDINATE, Per.PART}:
                leaves[path] = leaves[path].clone()
                for place in self._places(path, kind, positions):
                    leaves[path][place] = 0
        return unflatten(state, leaves)

    def rejoined(self, state: State, idle: Sequence[int], unused: Sequence[int]) -> State:
        """Return the state after a step in which some gradients took no part.

        Args:
            state: The state after an exchange in which the residual of these gradients was zero.
            idle: Gradients that this rank had not: their residual is added to what the exchange has left.
            unused: Those of them that no rank had: all of their state stays as it was before the step.
        """
        if not idle:
            return state
        if len(unused) == len(self.spans):
            return self.state
        leaves, before = flatten(state), flatten(self.state)
        for path, kind in kinds(state).items():
            kept = self._places(path, kind, unused)
            added = self._places(path, kind, [one for one in idle if one not in unused]) if kind.residual else []
            if kept or added:
                leaves[path] = leaves[path].clone()
            for place in kept:
                leaves[path][place] = before[path][place]
            for place in added:
                leaves[path][place] += before[path][place]
        return unflatten(state, leaves)

    def _places(self, path: str, kind: Kind, positions: Sequence[int]) -> list[slice]:
        """Return the slices of some gradients in a leaf; none if it is of the bucket as a whole."""
        if kind.per is Per.GRADIENT:
            places = places_of(path, self.method, self.bucket)
            return [places[position] for position in positions]
        spans = [self.spans[position] for position in positions]
        if kind.per is Per.COORDINATE:
            return spans
        per, leaf, world = kind.within or kind.per, flatten(self.state)[path], self._world
        if per not in (Per.COORDINATE, Per.PART) or not leaf.is_floating_point():  # no slices of a code are known
            return []
        begin = world.local_rank * cut(self.bucket.shapes, world.local_size).length if kind.within else 0
        size = len(leaf)
        if per is Per.PART:
            begin += (world.node if kind.within else world.rank) * size
        clipped = [(max(span.start - begin, 0), min(span.stop - begin, size)) for span in spans]
        return [slice(start, stop) for start, stop in clipped if start < stop]

    @staticmethod
    def _tensors(state: State) -> list[Tensor]:
        return [leaf for leaf in flatten(state).values() if isinstance(leaf, Tensor)]

    def read(self) -> dict[str, Any]:
        """Return copies of the leaves by name, as numpy arrays and ints; during a step, those from before it."""
        return {
            path: leaf.to("cpu", copy=True).numpy() if isinstance(leaf, Tensor) else leaf
            for path, leaf in flatten(self.state).items()
        }

    def write(self, leaves: Mapping[str, Any]) -> None:
        """Set the state from leaves of the same structure, as from `read` or with tensors instead of arrays."""
        new = {
            path: torch.as_tensor(leaves[path]).to(leaf.device, leaf.dtype, copy=True)
            if isinstance(leaf, Tensor)
            else int(leaves[path])
            for path, leaf in flatten(self.state).items()
        }
        self.state = unflatten(self.state, new)


class Place(NamedTuple):
    """Place of a gradient.

    Attributes:
        name: Name of the parameter.
        owner: The bucket.
        position: Index within the bucket.
    """

    name: str
    owner: BucketState
    position: int


class Layout(NamedTuple):
    """Buckets of a step.

    Attributes:
        buckets: All buckets, with their states.
        places: Places of the gradients, by the keys of their parameters.
        expected: Number of gradients of a backward pass.
    """

    buckets: Sequence[BucketState]
    places: Mapping[int, Place]
    expected: int
