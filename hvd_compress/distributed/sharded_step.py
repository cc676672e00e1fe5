"""A step of a sharded model."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from hvd_compress.distributed.sharded_groups import FSDPUnit
from hvd_compress.torch.backward import at_end_of_backward
from hvd_compress.torch.bucket_state import BucketState


class Step:
    """A step: the reductions of one or more backward passes, up to the first one that FSDP finalises.

    Attributes:
        loss_scale: Loss scale of its gradients.
        changed: Buckets whose state it changed.
        reduced: Positions of the parameters that it reduced, by index of their group.
        bad: For each group, whether a gradient was not finite on any rank; None while the step runs.
    """

    def __init__(self, loss_scale: float) -> None:
        self.loss_scale = loss_scale
        self.changed: set[BucketState] = set()
        self.reduced: dict[int, set[int]] = {}
        self.bad: Tensor | None = None
        self._peaks: list[tuple[int, float | Tensor]] = []
        self._awaited: set[tuple[int, int]] = set()
        self._finite: bool | None = None

    @property
    def finite(self) -> bool:
        """Whether the gradients of all ranks are finite; the first access, after the step, waits for the GPU."""
        if self._finite is None:
            assert self.bad is not None
            self._finite = not self.bad.any()
        return self._finite

    def ends_with(self, group: FSDPUnit, end: Callable[[], None]) -> None:
        """Call a function at the end of the running backward pass, if FSDP finalises it."""
        place = torch._C._current_graph_task_id(), id(group.backward)
        if group.in_backward and place not in self._awaited:
            self._awaited.add(place)
            at_end_of_backward(end)

    def give(self, number: int, *peaks: float | Tensor) -> None:
        """Note numbers that are inf or nan if gradients of a group, or their sum, are not finite on this rank."""
        self._peaks += [(number, peak) for peak in peaks]

    def flags(self, groups: int, device: torch.device) -> Tensor:
        """Return for each group whether its gradients are not finite on this rank."""
        peaks = [torch.as_tensor(peak, dtype=torch.float32, device=device) for _, peak in self._peaks]
        index = torch.tensor([number for number, _ in self._peaks], device=device)
        return torch.zeros(groups, device=device).index_add_(0, index, (~torch.stack(peaks).isfinite()).float())

    def undo(self) -> None:
        """Restore the states from before it."""
        for bucket in self.changed:
            bucket.undo()
        self.changed = set()
