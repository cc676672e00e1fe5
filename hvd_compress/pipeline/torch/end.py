"""A stage's end of a boundary between ranks."""

from __future__ import annotations

from typing import Protocol

import torch
from torch import Tensor

from hvd_compress.engine.stats import Meter
from hvd_compress.errors import BoundaryError
from hvd_compress.ops.torch_devices import exactly, torch_ops
from hvd_compress.pipeline import wire
from hvd_compress.pipeline.settings import Settings
from hvd_compress.pipeline.streams import Call, Ids, streams
from hvd_compress.pipeline.torch.boundary import mask_of
from hvd_compress.pipeline.torch.tensors import call_of, flat, from_host, shaped, to_host
from hvd_compress.pipeline.traffic import BoundaryStats, Traffic, count
from hvd_compress.pipeline.wire import Bytes, Message


class Link(Protocol):
    """Carries messages between two ranks, in order."""

    peer: str

    def send(self, data: Bytes) -> None:
        """Start to send a message; it continues in the background."""

    def expect(self, count: int) -> None:
        """Announce how many messages will be received next, so that they can arrive in the background."""

    def receive(self, timeout: float) -> Bytes:
        """Return the next message.

        Raises:
            BoundaryError: If none comes within ``timeout`` seconds, or the link is broken.
        """

    def flush(self, timeout: float) -> None:
        """Wait until all messages have been sent, but at most ``timeout`` seconds."""


class End:
    """One stage's end of a boundary: sends in one direction and receives in the other.

    Args:
        settings: Settings of the boundary.
        name: Name of the boundary.
        link: Link to the other end.
        ahead: Whether the other end is the next stage, which receives activations.
        device: Device of this stage.
        timeout: Seconds to wait for a message.
    """

    def __init__(
        self, settings: Settings, name: str, link: Link, ahead: bool, device: torch.device, timeout: float
    ) -> None:
        self._shares_mask, self._fingerprint = settings.shares_mask, settings.fingerprint
        self._link, self._ahead = link, ahead
        self._ops, self._device, self._timeout = torch_ops(device), device, timeout
        forward, backward = streams(settings, name)
        self._out, self._in = (forward, backward) if ahead else (backward, forward)
        self._sent, self._received = Meter(), Meter()
        self._masks: dict[int, Tensor] = {}
        self._shapes: dict[int, tuple[int, ...]] = {}

    def expect(self, count: int) -> None:
        """See `Link`; called before each step."""
        self._masks.clear()
        self._shapes.clear()
        self._link.expect(count)

    def send(self, x: Tensor, microbatch: int, training: bool, ids: Ids = None) -> None:
        """Compress a tensor and start to send it."""
        with exactly(self._device), self._sent.time("encode"):
            call = call_of(x, training, ids)
            encoded = self._out.encode(self._ops, flat(x, call), call, self._masks.pop(microbatch, None))
            message = Message(encoded.kind, call, microbatch, to_host(encoded.payload))
            data = wire.pack(message, self._fingerprint)
            self._remember(encoded.decoded, microbatch, call, forward=self._ahead)
        count(self._sent, call, data.size)
        self._link.send(data)

    def receive(self, microbatch: int, training: bool) -> tuple[Tensor, Ids]:
        """Return the next tensor, and the ids of its samples if it has any.

        Raises:
            BoundaryError: If no message comes, or an unexpected one.
        """
        with self._received.time("wait"):
            data = self._link.receive(self._timeout)
        with exactly(self._device), self._received.time("decode"):
            kind, call, _, payload = wire.unpack(data, microbatch, self._fingerprint, training, self._link.peer)
            shape = self._shapes.pop(microbatch, call.shape)
            if call.shape != shape:
                raise BoundaryError(
                    f"{self._link.peer} sent gradients of shape {call.shape} for activations of shape {shape}"
                )
            mask = self._masks.pop(microbatch, None)
            decoded = self._in.decode(self._ops, kind, from_host(payload, self._device), call, mask)
            self._remember(decoded, microbatch, call, forward=not self._ahead)
            x = shaped(decoded, call)
        count(self._received, call, data.size)
        return x, call.ids

    def _remember(self, decoded: Tensor, microbatch: int, call: Call, forward: bool) -> None:
        """Keep the shape and the mask of activations for their gradients."""
        if call.training and forward:
            self._shapes[microbatch] = call.shape
            if self._shares_mask:
                self._masks[microbatch] = mask_of(decoded)

    def stop(self, reason: str) -> None:
        """Tell the other end that this stage cannot go on."""
        self._link.send(wire.stop(reason))
        self._link.flush(timeout=5)

    def stats(self) -> BoundaryStats:
        """Return the traffic of this end in training."""
        sent, received = Traffic.of(self._sent), Traffic.of(self._received)
        return BoundaryStats(sent, received) if self._ahead else BoundaryStats(received, sent)


def silence(peer: str, timeout: float) -> str:
    """Return the text of the error for a message that does not come."""
    return (
        f"no message came from {peer} within {timeout:g} s: its process has ended or hangs, or its step takes longer:"
        " then make the pipeline with a longer timeout="
    )
