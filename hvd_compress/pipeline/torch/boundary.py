"""A boundary inside one process: an autograd function that compresses both ways."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from hvd_compress.core.method import Method
from hvd_compress.engine.stats import Meter
from hvd_compress.ops.torch_devices import exactly, torch_ops
from hvd_compress.pipeline import wire
from hvd_compress.pipeline.settings import Memory, Settings
from hvd_compress.pipeline.streams import Ids, streams
from hvd_compress.pipeline.torch.tensors import call_of, flat, shaped
from hvd_compress.pipeline.traffic import BoundaryStats, Traffic, count


class CompressedBoundary(nn.Module):
    """Compresses the messages between two stages of a model: activations forward, gradients back.

    As a layer of a model it does so inside one process: the output is what the next stage would receive, and back goes
    what this stage would. Compression itself counts as the identity for gradients (straight-through)::

        y = D(C_f(x))                  dL/dx = D(C_b(dL/dy))

    Rudakov, Beznosikov, Kholodov, Gasnikov, Activations and Gradients Compression for Model-Parallel Training, 2024.

    With ``torch.utils.checkpoint``, checkpoint the layers before and behind it separately. Recomputed layers may
    contain a boundary only if it gives the same result each time, such as ``topk`` without a memory; others are errors.
    ``torch.autocast`` does not change the compression.

    Args:
        forward: Operator of activations, such as ``"topk:ratio=0.1"``; see ``hvd_compress.pipeline.OPERATORS``.
        backward: Operator of gradients; or ``"shared"``, which sends gradients where the activation that arrived is
            not zero.
        memory: ``"none"``; ``"ef"``: add the residual to the next message; ``"ef21"``: send the difference from the
            state of the message before at the other end; ``"aqsgd:samples=n"``: send the change of a sample's
            activation (see ``hvd_compress.pipeline.AQSGD``). Or a pair: for activations, and for gradients.
            Uncompressed messages have no memory.
        inference: Whether activations are also compressed outside training, always without a memory.
        name: Name, part of the seeds of random operators: give boundaries of one model different names.

    Raises:
        SpecError: If an operator or a memory is not known, not allowed, or not supported with the others.
    """

    def __init__(
        self,
        forward: str | Method = "none",
        backward: str | Method = "none",
        memory: Memory | tuple[Memory, Memory] = "none",
        inference: bool = True,
        name: str = "boundary0",
    ) -> None:
        super().__init__()
        self.settings = Settings.of(forward, backward, memory, inference)
        self._streams = streams(self.settings, name)
        self._meters = Meter(), Meter()

    def forward(self, x: Tensor, ids: Ids = None) -> Tensor:
        """Return the activations that the next stage receives.

        Args:
            x: Floating-point; the first axis is that of samples.
            ids: Integer ids of the samples, for a memory of ``aqsgd`` in training.

        Raises:
            BoundaryError: If ``x`` or ``ids`` are not allowed, or do not fit the last ones; in the backward pass, if
                recomputation gives another activation.
        """
        y: Tensor = _Pass.apply(x, self, ids)  # type: ignore[no-untyped-call]
        return y

    def stats(self) -> BoundaryStats:
        """Return the traffic between the two stages in training so far."""
        return BoundaryStats(*(Traffic.of(meter) for meter in self._meters))

    def extra_repr(self) -> str:
        """Return the settings for ``repr``."""
        return ", ".join(f"{name}={value!r}" for name, value in self.settings.specs().items())

    def carry(self, x: Tensor, direction: int, training: bool, ids: Ids, mask: Tensor | None) -> Tensor:
        """Return the message as it arrives at the other end.

        Args:
            x: Activations or gradients.
            direction: 0 forward, 1 back.
            training: Whether memories are used.
            ids: Ids of the samples.
            mask: Mask of the activations, if gradients share it.
        """
        meter, stream = self._meters[direction], self._streams[direction]
        ops, call = torch_ops(x.device), call_of(x, training, ids)
        again = direction == 0 and torch._C._current_graph_task_id() != -1  # within a backward pass
        if again:
            stream.check_again(ops, call)
        with exactly(x.device), meter.time("encode"):
            sent = stream.encode(ops, flat(x, call), call, mask)
        if not again:
            count(meter, call, wire.size(sent.payload.numel(), ids))
        return shaped(sent.decoded, call)


class _Pass(torch.autograd.Function):
    """Autograd function that carries activations forward and gradients back."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, boundary: CompressedBoundary, ids: Ids) -> Tensor:
        ctx.boundary, ctx.training = boundary, boundary.training
        y = boundary.carry(x, 0, boundary.training, ids, None)
        ctx.mask = mask_of(y) if boundary.settings.shares_mask else None
        return y

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None, None]:
        return ctx.boundary.carry(grads[0], 1, ctx.training, None, ctx.mask), None, None


def mask_of(y: Tensor) -> Tensor:
    """Return where a received activation is not zero: the same at both ends."""
    return torch.nonzero(y.reshape(-1)).flatten()
