"""One bucket of a plan, with what its method keeps between steps."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import accumulate
from typing import Any

import torch
from torch import Tensor

from hvd_compress.bucketing import Planned
from hvd_compress.core.collectives import State
from hvd_compress.core.state_tree import Per, flatten, kinds, unflatten
from hvd_compress.ops.torch_devices import torch_ops


class BucketState:
    """A bucket, its method, and the method's state.

    A step fills a buffer with gradient plus residual, and what is left of it becomes the next residual once the step
    counts. The old residual stays as it is until then, so a step is rolled back by not taking over its state. After
    that its memory is the next step's buffer.

    Args:
        planned: The bucket and its method.
        device: Where its gradients are.
        size: Number of ranks.

    Attributes:
        spans: The place of each gradient in the bucket.
    """

    def __init__(self, planned: Planned, device: torch.device, size: int) -> None:
        self.bucket, self.method = planned.bucket, planned.method
        self.ops = torch_ops(device)
        self.state: State = self.method.init(self.ops, self.bucket, size)
        ends = accumulate(self.bucket.sizes)
        self.spans = [slice(end - size, end) for end, size in zip(ends, self.bucket.sizes, strict=True)]
        self._spare: Tensor | None = None
        self._before: State | None = None

    @property
    def residual(self) -> Tensor | None:
        """The vector to add to the gradients of a step."""
        residual: Tensor | None = self.method.residual(self.state)
        return residual

    def buffer(self) -> Tensor:
        """Return memory for the gradients of a step; the step before cannot be undone after that."""
        self._before = None
        spare, self._spare = self._spare, None
        return self.ops.empty(self.bucket.numel, self.bucket.dtype) if spare is None else spare

    def commit(self, state: State) -> None:
        """Take over the state of a step that counts."""
        self._before, self.state = self.state, state

    def recycle(self, *vectors: Tensor) -> None:
        """Keep one of these for the next `buffer` that the state does not refer to."""
        used = {leaf.untyped_storage().data_ptr() for leaf in self._tensors(self.state)}
        self._spare = next((v for v in vectors if v.untyped_storage().data_ptr() not in used), None)

    def undo(self) -> None:
        """Go back to the state from before the last step that counted; only until the next one begins."""
        if self._before is not None:
            self.state, self._before = self._before, None
            self._spare = None  # it may be the residual again

    def forget(self, positions: Sequence[int]) -> None:
        """Clear what is kept of some gradients, as far as it is kept coordinate by coordinate; between steps."""
        self._before = None
        self.state = self.without(self.state, positions)

    def without(self, state: State, positions: Sequence[int]) -> State:
        """Return a state that has kept nothing of some gradients, as far as it is kept coordinate by coordinate."""
        if not positions:
            return state
        leaves = flatten(state)
        for path in [path for path, kind in kinds(state).items() if kind.per is Per.COORDINATE]:
            leaves[path] = leaves[path].clone()
            for position in positions:
                leaves[path][self.spans[position]] = 0
        return unflatten(state, leaves)

    @staticmethod
    def _tensors(state: State) -> list[Tensor]:
        return [leaf for leaf in flatten(state).values() if isinstance(leaf, Tensor)]

    def read(self) -> dict[str, Any]:
        """Return the state as named leaves: copies in numpy, and ints. During a step, those from before it."""
        return {
            path: leaf.to("cpu", copy=True).numpy() if isinstance(leaf, Tensor) else leaf
            for path, leaf in flatten(self.state).items()
        }

    def write(self, leaves: Mapping[str, Any]) -> None:
        """Take over a state of the same structure, in the form of `read` or with tensors in the place of arrays."""
        new = {
            path: torch.as_tensor(leaves[path]).to(leaf.device, leaf.dtype, copy=True)
            if isinstance(leaf, Tensor)
            else int(leaves[path])
            for path, leaf in flatten(self.state).items()
        }
        self.state, self._before = unflatten(self.state, new), None
