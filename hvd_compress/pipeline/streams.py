"""One direction of a boundary: compress messages and decode them, with a memory or without."""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Sequence
from enum import IntEnum
from typing import Any, NamedTuple, TypeAlias

import numpy as np

from hvd_compress.core.bucket import Bucket
from hvd_compress.core.collectives import State, World
from hvd_compress.core.method import Method
from hvd_compress.core.state_tree import flatten
from hvd_compress.errors import BoundaryError
from hvd_compress.ops import Ops
from hvd_compress.ops.arrays import Array, Shape
from hvd_compress.pipeline.exchanging import receive, send
from hvd_compress.pipeline.operators import Mask, SharedMask
from hvd_compress.pipeline.samples import AQSGD, SampleStore
from hvd_compress.pipeline.settings import FEEDBACK, Memory, Settings

Ids: TypeAlias = Any


DTYPES = {"float32": 4, "float64": 8, "float16": 2, "bfloat16": 2}
"""Dtypes of a boundary, with their bytes per number."""


class Kind(IntEnum):
    """Kind of a message."""

    CODED = 0
    RAW = 1


class Encoded(NamedTuple):
    """Message of a sender.

    Attributes:
        kind: How it is to be read.
        payload: uint8, one-dimensional.
        decoded: What the other end will have: one-dimensional, dtype of the input.
    """

    kind: Kind
    payload: Array
    decoded: Array


class Call(NamedTuple):
    """Facts about a message that both ends know.

    Attributes:
        shape: Shape of the tensor; the first axis is that of samples.
        dtype: Dtype of the tensor, such as ``"bfloat16"``.
        training: Whether it is part of a training step; memories are not used otherwise.
        ids: Ids of the samples, if they are known.
    """

    shape: Shape
    dtype: str
    training: bool = True
    ids: Ids = None

    @property
    def precision(self) -> str:
        """Dtype of the computation, and of uncompressed messages."""
        return "float64" if self.dtype == "float64" else "float32"

    @property
    def numel(self) -> int:
        """Number of elements."""
        return math.prod(self.shape)

    @property
    def plain_bytes(self) -> int:
        """Bytes before compression."""
        return self.numel * DTYPES[self.dtype]

    def bucket(self, key: str, rows: int | None = None) -> Bucket:
        """Return a bucket with one shape per sample, or with ``rows`` of them."""
        return Bucket(key, (self.shape[1:],) * (self.shape[0] if rows is None else rows), self.precision)


def check_carried(dtype: str, shape: Sequence[int | None]) -> None:
    """Check that a boundary can carry a tensor; None is a length that is not known yet.

    Raises:
        BoundaryError: If its dtype is not in `DTYPES`, or it has no axis or no element.
    """
    if dtype not in DTYPES or not shape or 0 in shape:
        raise BoundaryError(
            f"a boundary carries dense tensors of {', '.join(DTYPES)} whose first axis is that of samples, not one of"
            f" {dtype} and shape {tuple(shape)}"
        )


class Stream:
    """One direction of a boundary. Each end has its own, and both see the same messages in the same order.

    A message that is not finite is sent uncompressed, and changes no memory.

    Args:
        name: Unique among the streams of a pipeline, the same at both ends.
        method: The operator.
        memory: As in `Settings`.
        inference: Whether to compress outside of training, too.
    """

    def __init__(self, name: str, method: Method, memory: Memory, inference: bool) -> None:
        self._inference = inference
        self._told = f"{name} ({method!r}, memory={memory!r})"
        self._plain = _Plain(name, method)
        self._training: _Codec = self._plain
        if isinstance(memory, AQSGD):
            self._training = _Differences(name, method, memory)
        elif memory != "none":
            self._training = _Feedback(name, FEEDBACK[memory](method), memory)

    def encode(self, ops: Ops, x: Array, call: Call, mask: Array | None = None) -> Encoded:
        """Compress ``x``, one-dimensional, which may be overwritten.

        Args:
            ops: Primitives of the framework.
            x: The tensor, flat.
            call: Facts that the other end knows, too.
            mask: Ascending indices, if the operator shares those of the other direction.
        """
        if not (call.training or self._inference) or not bool(ops.is_finite(x).all()):
            return Encoded(Kind.RAW, ops.to_bytes(x), x)
        payload, decoded = self._codec(call).encode(ops, x, call, mask)
        return Encoded(Kind.CODED, payload, decoded)

    def decode(self, ops: Ops, kind: Kind, payload: Array, call: Call, mask: Array | None = None) -> Array:
        """Return the tensor that the other end has sent, one-dimensional.

        Raises:
            ExchangeError: If the payload has the wrong length or contents.
        """
        if kind is Kind.RAW:
            return ops.from_bytes(payload, (call.precision, call.numel))[0]
        return self._codec(call).decode(ops, payload, call, mask)

    def check_again(self, ops: Ops, call: Call) -> None:
        """Check that a message may be compressed again, as recomputed activations are in the backward pass.

        Raises:
            BoundaryError: If the result depends on earlier messages, so that it would differ.
        """
        if (call.training or self._inference) and not self._codec(call).repeats(ops, call):
            raise BoundaryError(
                f"{self._told} compresses by what it remembers of earlier messages, or by new random numbers each time;"
                " so activations that are computed again in the backward pass (torch.utils.checkpoint,"
                " tf.recompute_grad) would be others than those of the forward pass: leave the boundary out of what is"
                " computed again, and treat the layers before and behind it on their own; or take an operator such as"
                " topk or minmax with memory='none'"
            )

    def _codec(self, call: Call) -> _Codec:
        return self._training if call.training else self._plain


def streams(settings: Settings, name: str) -> tuple[Stream, Stream]:
    """Return the streams of activations and of gradients of a boundary."""
    forward = Stream(f"{name}.forward", settings.forward, settings.forward_memory, settings.inference)
    return forward, Stream(f"{name}.backward", settings.backward, settings.backward_memory, settings.inference)


class _Codec(ABC):
    """Encoder and decoder of the messages of a stream."""

    @abstractmethod
    def encode(self, ops: Ops, x: Array, call: Call, mask: Array | None) -> tuple[Array, Array]:
        """Return the payload, and the tensor that the other end will decode."""

    @abstractmethod
    def decode(self, ops: Ops, payload: Array, call: Call, mask: Array | None) -> Array:
        """Return the tensor that the other end has sent."""

    def repeats(self, ops: Ops, call: Call) -> bool:
        """Return whether the same activation always gives the same message, so that it can be recomputed."""
        del ops, call
        return False


class _Plain(_Codec):
    """Codec without a memory. The method's state, if it has one, is kept for each shape of messages."""

    def __init__(self, name: str, method: Method) -> None:
        self._name = name
        self._method = method
        self._states: dict[Bucket, State] = {}

    def _state(self, ops: Ops, bucket: Bucket, mask: Array | None) -> State:
        if isinstance(self._method, SharedMask):
            assert mask is not None
            return Mask(mask)
        if bucket not in self._states:
            self._states[bucket] = self._method.init(ops, bucket, World(0, 1))
        return self._states[bucket]

    def encode(
        self, ops: Ops, x: Array, call: Call, mask: Array | None = None, rows: int | None = None
    ) -> tuple[Array, Array]:
        bucket = call.bucket(self._name, rows)
        payload, exchange = send(ops, self._method, bucket, x, self._state(ops, bucket, mask))
        self._keep(bucket, exchange.state)
        return payload, exchange.total

    def decode(self, ops: Ops, payload: Array, call: Call, mask: Array | None = None, rows: int | None = None) -> Array:
        bucket = call.bucket(self._name, rows)
        exchange = receive(ops, self._method, bucket, payload, self._state(ops, bucket, mask))
        self._keep(bucket, exchange.state)
        return exchange.total

    def repeats(self, ops: Ops, call: Call) -> bool:
        return not flatten(self._method.init(ops, call.bucket(self._name), World(0, 1)))

    def _keep(self, bucket: Bucket, state: State) -> None:
        if bucket in self._states:
            self._states[bucket] = state


class _Feedback(_Plain):
    """Codec with a residual, or an estimate that both ends share, of the shape of the first message."""

    def __init__(self, name: str, method: Method, memory: str) -> None:
        super().__init__(name, method)
        self._memory = memory

    def repeats(self, ops: Ops, call: Call) -> bool:
        return False

    def _state(self, ops: Ops, bucket: Bucket, mask: Array | None) -> State:
        if self._states and bucket not in self._states:
            (first,) = self._states
            raise BoundaryError(
                f"memory={self._memory!r} needs messages of one shape: it began with {_told(first)}, and now there is"
                f" {_told(bucket)}; leave out the last minibatch (drop_last=True), or take memory='none'"
            )
        return super()._state(ops, bucket, mask)


def _told(bucket: Bucket) -> str:
    return f"{bucket.dtype} {(len(bucket.shapes), *bucket.shapes[0])}"


class _Differences(_Codec):
    """Codec with an estimate per sample. See `AQSGD`."""

    def __init__(self, name: str, method: Method, options: AQSGD) -> None:
        self._plain = _Plain(name, method)
        self._store = SampleStore(options)

    def encode(self, ops: Ops, x: Array, call: Call, mask: Array | None) -> tuple[Array, Array]:
        ids = self._store.check(call.ids, call.shape)
        rows, seen = ops.reshape(x, (len(ids), -1)), self._store.known(ids)
        fresh, later = (ops.constant(np.flatnonzero(which)) for which in (~seen, seen))
        parts = [ops.to_bytes(ops.reshape(ops.take(rows, fresh), (-1,)))]
        if seen.any():
            before = ops.constant(self._store.read(ids[seen], call.precision))
            change = ops.reshape(ops.take(rows, later) - before, (-1,))
            payload, total = self._plain.encode(ops, change, call, rows=int(seen.sum()))
            parts.append(payload)
            rows = ops.put(rows, later, before + ops.reshape(total, before.shape))
        self._store.write(ids, host(rows), call.shape[1:])
        return ops.concat(parts), ops.reshape(rows, (-1,))

    def decode(self, ops: Ops, payload: Array, call: Call, mask: Array | None) -> Array:
        ids = self._store.check(call.ids, call.shape)
        seen, size = self._store.known(ids), math.prod(call.shape[1:])
        first = int((~seen).sum()) * size
        split = first * np.dtype(call.precision).itemsize
        fresh, later = (ops.constant(np.flatnonzero(which)) for which in (~seen, seen))
        rows = ops.zeros((len(ids), size), call.precision)
        (raw,) = ops.from_bytes(payload[:split], (call.precision, first))
        rows = ops.put(rows, fresh, ops.reshape(raw, (-1, size)))
        if seen.any():
            before = ops.constant(self._store.read(ids[seen], call.precision))
            total = self._plain.decode(ops, payload[split:], call, rows=int(seen.sum()))
            rows = ops.put(rows, later, before + ops.reshape(total, before.shape))
        self._store.write(ids, host(rows), call.shape[1:])
        return ops.reshape(rows, (-1,))


def host(x: Array) -> np.ndarray[Any, Any]:
    """Return an array of any framework as a numpy array."""
    return np.asarray(x.cpu() if hasattr(x, "cpu") else x)
