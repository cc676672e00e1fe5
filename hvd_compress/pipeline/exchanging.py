"""A method's exchange with one sender and one receiver.

All ranks of an exchange end with the same total, so that is made of the replies and of what the ranks share. A receiver
is a rank that has nothing of its own: it goes through the same exchange with zeros, and takes what the sender has sent
for the replies. So every method can be received, and none has to be taken apart for it.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import numpy as np

from hvd_compress.core.bucket import Bucket
from hvd_compress.core.collectives import AllGather, AllReduce, Collective, Exchange, State, World, run
from hvd_compress.core.method import Method, compensate
from hvd_compress.errors import ExchangeError
from hvd_compress.ops import Ops, wrong_length
from hvd_compress.ops.arrays import Array
from hvd_compress.ops.totals import dense

_ALONE = World(0, 1)


class Sent(NamedTuple):
    """Result of an exchange at the sender.

    Attributes:
        payload: uint8, the messages of all rounds, one after another.
        exchange: Result of the exchange; ``total`` is the tensor that the receiver will decode.
    """

    payload: Array
    exchange: Exchange


def send(ops: Ops, method: Method, bucket: Bucket, x: Array, state: State) -> Sent:
    """Compress ``x``, of shape ``(bucket.numel,)``, which may be overwritten."""
    parts: list[Array] = []

    def answer(message: Collective) -> Array:
        parts.append(ops.to_bytes(ops.reshape(message.array, (-1,))))
        return _reply(ops, message, message.array)

    exchange = _run(ops, method, bucket, compensate(ops, method, x, state), state, answer)
    return Sent(parts[0] if len(parts) == 1 else ops.concat(parts), exchange)


def receive(ops: Ops, method: Method, bucket: Bucket, payload: Array, state: State) -> Exchange:
    """Return the result of the sender's exchange: ``total`` and the shared parts of ``state``.

    Args:
        ops: Primitives of the framework.
        method: The sender's method.
        bucket: The sender's bucket.
        payload: uint8, one-dimensional; see `Sent`.
        state: The sender's state, apart from leaves that are private to a rank.

    Raises:
        ExchangeError: If the payload has the wrong length.
    """
    begin, size = 0, int(payload.shape[0])

    def answer(message: Collective) -> Array:
        nonlocal begin
        if isinstance(message, AllGather) and message.ragged:
            begin, rest = size, payload[begin:]  # of a ragged message the end is that of the payload
            return rest
        shape, dtype = tuple(int(n) for n in message.array.shape), ops.dtype(message.array)
        length = int(np.prod(shape, dtype=np.int64))
        end = begin + length * np.dtype(dtype).itemsize
        if end > size:
            raise ExchangeError(wrong_length(size, end))
        (array,) = ops.from_bytes(payload[begin:end], (dtype, length))
        begin = end
        return _reply(ops, message, ops.reshape(array, shape))

    exchange = _run(ops, method, bucket, ops.zeros((bucket.numel,), bucket.dtype), state, answer)
    if begin != size:
        raise ExchangeError(wrong_length(size, begin))
    return exchange


def _reply(ops: Ops, message: Collective, array: Array) -> Array:
    """Return the reply to a collective of one rank."""
    if isinstance(message, AllGather) and not message.ragged:
        return ops.reshape(array, (1, -1))
    return array


def _run(
    ops: Ops, method: Method, bucket: Bucket, x: Array, state: State, answer: Callable[[Collective], Array]
) -> Exchange:
    def checked(message: Collective) -> Array:
        assert isinstance(message, AllReduce | AllGather), f"{method!r} is no operator of a boundary"
        return answer(message)

    exchange = run(method.exchange(ops, bucket, x, state, _ALONE), checked)
    return exchange._replace(total=dense(ops, exchange.total))
