"""Format of messages between stages: a header of 64 bytes, the ids of samples if any, and the payload."""

from __future__ import annotations

import struct
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from hvd_compress.errors import BoundaryError
from hvd_compress.pipeline.streams import DTYPES, Call, Kind

Bytes = npt.NDArray[np.uint8]

HEADER = 64
"""Bytes."""

_STOP = 255
_MAGIC = b"hvcB"
_AXES = 8
_DTYPES = tuple(DTYPES)
_FORMAT = struct.Struct(f"<4s4BIIQ I{_AXES}I")
"""Magic, kind, dtype, training, axes, microbatch, fingerprint, bytes of the payload, ids, shape."""

assert _FORMAT.size == HEADER - 4  # the rest is zero


class Message(NamedTuple):
    """Message of a stage to the next one, or back.

    Attributes:
        kind: Encoding of the payload.
        call: Shape, dtype, training, ids.
        microbatch: Its number in the step.
        payload: uint8, one-dimensional.
    """

    kind: Kind
    call: Call
    microbatch: int
    payload: Bytes


def size(payload: int, ids: Any) -> int:
    """Return the length of a message in bytes."""
    return HEADER + (0 if ids is None else 8 * len(ids)) + payload


def pack(message: Message, fingerprint: int) -> Bytes:
    """Return a message as bytes.

    Raises:
        BoundaryError: If its tensor has too many axes.
    """
    kind, call, microbatch, payload = message
    if len(call.shape) > _AXES:
        raise BoundaryError(f"a boundary carries tensors of at most {_AXES} axes, not of shape {call.shape}")
    ids = np.empty(0, np.int64) if call.ids is None else np.asarray(call.ids, "<i8")
    axes = [*call.shape, *[0] * (_AXES - len(call.shape))]
    header = _FORMAT.pack(
        *(_MAGIC, kind, _DTYPES.index(call.dtype), call.training, len(call.shape)),
        *(microbatch, fingerprint, payload.size, len(ids), *axes),
    )
    return np.concatenate([np.frombuffer(header.ljust(HEADER, b"\0"), np.uint8), ids.view(np.uint8), payload])


def stop(reason: str) -> Bytes:
    """Return the message of a stage that cannot go on."""
    text = reason.encode()
    header = _FORMAT.pack(_MAGIC, _STOP, 0, 0, 0, 0, 0, len(text), *[0] * (1 + _AXES))
    return np.frombuffer(header.ljust(HEADER, b"\0") + text, np.uint8).copy()


def unpack(data: Bytes, microbatch: int, fingerprint: int, training: bool, sender: str) -> Message:
    """Undo `pack`, after checking that this is the expected message.

    Raises:
        BoundaryError: If it is another message, or if the other stage cannot go on.
    """
    if data.size < HEADER or data[:4].tobytes() != _MAGIC:
        raise BoundaryError(f"{sender} sent {data.size} bytes that are no message of a boundary: run all ranks alike")
    _, kind, dtype, trains, axes, number, mark, length, ids, *shape = _FORMAT.unpack(data[: HEADER - 4].tobytes())
    if kind == _STOP:
        raise BoundaryError(f"{sender} stopped: {data[HEADER:].tobytes().decode(errors='replace')}")
    if mark != fingerprint:
        raise BoundaryError(f"{sender} was made with another boundary than this stage: give all ranks the same")
    if (number, bool(trains)) != (microbatch, training):
        doing = {True: "trains", False: "evaluates"}
        raise BoundaryError(
            f"{sender} {doing[bool(trains)]} with microbatch {number}, this stage {doing[training]} with microbatch"
            f" {microbatch}: all ranks must call step and evaluate alike, with as many microbatches"
        )
    if kind not in set(Kind) or dtype >= len(_DTYPES) or axes > _AXES or data.size != HEADER + 8 * ids + length:
        raise BoundaryError(f"{sender} sent a message whose {data.size} bytes do not fit its header")
    known = data[HEADER : HEADER + 8 * ids].copy().view("<i8") if ids else None
    call = Call(tuple(shape[:axes]), _DTYPES[dtype], training, known)
    return Message(Kind(kind), call, number, data[HEADER + 8 * ids :])
