"""Statistics of a boundary: bytes and seconds."""

from __future__ import annotations

from typing import NamedTuple

from hvd_compress.engine.stats import Meter
from hvd_compress.pipeline.streams import Call


class Traffic(NamedTuple):
    """Totals of one direction of a boundary so far, as this process has seen them; times include those of evaluation.

    Attributes:
        messages: Number of messages in training.
        plain_bytes: Bytes of the tensors before compression.
        bytes_sent: Headers, ids of samples and payloads.
        ratio: ``plain_bytes / bytes_sent``.
        encode_seconds: Time to compress, where this process sends.
        wait_seconds: Time in which it waited for messages, where it receives.
        decode_seconds: Time to read them.
    """

    messages: int
    plain_bytes: int
    bytes_sent: int
    ratio: float
    encode_seconds: float
    wait_seconds: float
    decode_seconds: float

    @classmethod
    def of(cls, meter: Meter) -> Traffic:
        """Return the totals of a meter that counts each message as a step."""
        found = meter.read(waits=True)
        assert found.encode_seconds is not None and found.wait_seconds is not None and found.decode_seconds is not None
        return cls(
            *(found.steps, found.gradient_bytes, found.bytes_sent, found.ratio),
            *(found.encode_seconds, found.wait_seconds, found.decode_seconds),
        )


def count(meter: Meter, call: Call, sent: int) -> None:
    """Count a message of ``sent`` bytes, if it is part of training."""
    if call.training:
        meter.steps += 1
        meter.gradient_bytes += call.plain_bytes
        meter.bytes_sent += sent


class BoundaryStats(NamedTuple):
    """Traffic of a boundary.

    Attributes:
        forward: Activations.
        backward: Gradients.
    """

    forward: Traffic
    backward: Traffic
