"""Counters of bytes and time during training."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Literal, NamedTuple

from hvd_compress.core.collectives import Collective


class Stats(NamedTuple):
    """Totals of this rank over all steps so far.

    Attributes:
        steps: Steps in which gradients were exchanged.
        gradient_bytes: Bytes of the gradients before compression.
        bytes_sent: Payload bytes that this rank passed to Horovod: values, indices, scales and all other metadata. The
            bytes on the network also depend on the collective: a ring allreduce moves 2 (n-1)/n times its payload.
        ratio: Compression ratio, ``gradient_bytes / bytes_sent``.
        encode_seconds: Time in ``compress``: copying into buckets, compressing, starting collectives. None in
            TensorFlow.
        wait_seconds: Time waiting for collectives that did not overlap with backward. None in TensorFlow, and for
            ``none`` and ``fp16``, whose payload is Horovod's own allreduce.
        decode_seconds: Time in ``decompress`` without waiting; None in TensorFlow.
        vnmse: Normalised squared error of the compressed sums, ``||total - exact||^2 / ||exact||^2`` over all steps and
            compressed tensors; None without ``measure=on``.
        bytes_inside: Payload bytes of collectives within a node, with ``hierarchical=on``; ``bytes_sent`` has those of
            all others.
        parameter_bytes: Bytes of this rank's shards that FSDP2 gathered, before compression; 0 without ``gather=``.
        parameter_bytes_sent: Payload bytes of these gathers.
        chosen: With ``auto``, the method in use; else "".
    """

    steps: int
    gradient_bytes: int
    bytes_sent: int
    ratio: float
    encode_seconds: float | None
    wait_seconds: float | None
    decode_seconds: float | None
    vnmse: float | None = None
    bytes_inside: int = 0
    parameter_bytes: int = 0
    parameter_bytes_sent: int = 0
    chosen: str = ""

    @property
    def bytes_per_step(self) -> float:
        """Payload bytes per step, 0 before the first step."""
        return self.bytes_sent / max(self.steps, 1)

    def __str__(self) -> str:
        """Return the figures of one step, on average, in one line."""
        steps = max(self.steps, 1)
        given = self.gradient_bytes / steps
        sent = [f"{self.bytes_per_step:,.0f} of {given:,.0f} bytes sent (ratio {self.ratio:.1f})"]
        sent += [f"{self.bytes_inside / steps:,.0f} bytes within nodes"] if self.bytes_inside else []
        if self.parameter_bytes:
            shards, codes = self.parameter_bytes / steps, self.parameter_bytes_sent / steps
            sent += [f"{codes:,.0f} of {shards:,.0f} bytes of parameters"]
        times = {"encode": self.encode_seconds, "wait": self.wait_seconds, "decode": self.decode_seconds}
        sent += [f"{name} {1000 * total / steps:.3g} ms" for name, total in times.items() if total is not None]
        sent += [] if self.vnmse is None else [f"vNMSE {self.vnmse:.3g}"]
        now = f", now with {self.chosen}" if self.chosen else ""
        return f"{self.steps:,} steps{now}; per step: {', '.join(sent)}"


Phase = Literal["encode", "wait", "decode"]


@dataclass
class Meter:
    """Mutable counters behind `Stats`; times in seconds."""

    steps: int = 0
    gradient_bytes: int = 0
    bytes_sent: int = 0
    bytes_inside: int = 0
    parameter_bytes: int = 0
    parameter_bytes_sent: int = 0
    encode: float = 0.0
    wait: float = 0.0
    decode: float = 0.0

    def count(self, message: Collective) -> None:
        """Count the payload of a collective."""
        if message.scope == "node":
            self.bytes_inside += message.array.nbytes
        else:
            self.bytes_sent += message.array.nbytes

    def begin(self) -> float:
        """Start a lap; pass the result to `lap`."""
        return time.perf_counter() - self.wait

    def lap(self, begin: float) -> float:
        """Return the seconds since `begin`, without waiting."""
        return time.perf_counter() - self.wait - begin

    @contextmanager
    def time(self, phase: Phase) -> Iterator[None]:
        """Add the time of a block to a phase; a nested block counts for its own phase only."""
        begin, inside = time.perf_counter(), self.encode + self.wait + self.decode
        try:
            yield
        finally:
            nested = self.encode + self.wait + self.decode - inside
            setattr(self, phase, getattr(self, phase) + time.perf_counter() - begin - nested)

    def read(self, waits: bool) -> Stats:
        """Return the totals; ``waits`` says whether waiting was measured."""
        return Stats(
            self.steps,
            self.gradient_bytes,
            self.bytes_sent,
            self.gradient_bytes / self.bytes_sent if self.bytes_sent else 1.0,
            self.encode,
            self.wait if waits else None,
            self.decode,
            bytes_inside=self.bytes_inside,
            parameter_bytes=self.parameter_bytes,
            parameter_bytes_sent=self.parameter_bytes_sent,
        )
