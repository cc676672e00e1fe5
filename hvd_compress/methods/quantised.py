"""What the methods have in common that send every coordinate in a few bits, with a scale of each rank's own."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable, Generator
from dataclasses import dataclass
from typing import Any, ClassVar, NamedTuple

import numpy as np

from hvd_compress.bucket import Bucket
from hvd_compress.collectives import AllGather, AllToAll, Array, Collective, Exchange, Exchanging, World
from hvd_compress.methods.base import Method
from hvd_compress.ops import Ops
from hvd_compress.roles import Served


class QuantisedState(NamedTuple):
    """What a quantising method keeps.

    Attributes:
        step: How many exchanges there were; part of the seed.
        served: Two-way only: what this rank, as the server of its part of the bucket, has not sent back yet.
    """

    step: int | Array
    served: Served


@dataclass(frozen=True, kw_only=True)
class Quantised(Method):
    """Codes that cannot be summed before they are decoded.

    One-way, everyone gets the codes of all by allgather, ``n b`` bits for each coordinate with n ranks and b bits::

        total = sum_i D(C(p_i))                          e_i = p_i - D(C(p_i))

    Two-way, each rank is the server of one part of the bucket. It decodes and sums what it gets (alltoall) and sends
    the sum back compressed as well (allgather): about ``2 b`` bits, however many ranks there are. A biased code has its
    error fed back on the server, too (Zheng, Huang, Kwok, Communication-Efficient Distributed Blockwise Momentum SGD
    with Error-Feedback, 2019, Algorithm 2, with one server for each part)::

        q = sum_i D(C(p_i)) + f            total = D(C(q))            f = q - D(C(q))

    Args:
        twoway: Compress what comes back, too.
    """

    collective = "allgather, or alltoall + allgather"
    keeps = "step count; two-way: the servers' residuals"
    serves_feedback: ClassVar[bool] = False
    """Whether a server keeps the error of its answer: codes that are biased need it."""

    twoway: bool = False

    def init(self, ops: Ops, bucket: Bucket, size: int) -> QuantisedState:
        kept = ops.zeros((part_size(bucket, size),), bucket.dtype) if self._serves else ()
        return QuantisedState(0, kept)

    @property
    def _serves(self) -> bool:
        return self.twoway and self.serves_feedback

    @abstractmethod
    def encode(self, ops: Ops, x: Array, seed: Any) -> Array:
        """Compress an array of shape ``(n,)`` to uint8, whose length depends on n alone."""

    @abstractmethod
    def decode(self, ops: Ops, data: Array, n: int, dtype: str) -> Array:
        """Undo `encode` as far as possible: shape ``(n,)`` and this dtype."""

    def _seed(self, ops: Ops, *parts: Any) -> Any:
        return ops.seed(getattr(self, "seed", 0), *parts)

    def exchange(self, ops: Ops, bucket: Bucket, x: Array, state: QuantisedState, world: World) -> Exchanging:
        seed = self._seed(ops, bucket.seed, state.step, world.rank)
        if not self.twoway:
            everyone = yield AllGather(self.encode(ops, x, seed))
            decoded = [self.decode(ops, everyone[rank], bucket.numel, bucket.dtype) for rank in range(world.size)]
            return Exchange(sum(decoded[1:], decoded[0]), decoded[world.rank], QuantisedState(state.step + 1, ()))

        part = part_size(bucket, world.size)
        kept = state.served

        def serve(received: list[Array]) -> Array:
            nonlocal kept
            total = sum(received[1:], received[0])
            if self._serves:
                total = total + kept
            answer = self.encode(ops, total, self._seed(ops, bucket.seed, state.step, world.rank, 1))
            if self._serves:
                kept = total - self.decode(ops, answer, part, bucket.dtype)
            return answer

        # Each part has a seed of its own, or all would be rounded by the same random numbers.
        total, sent = yield from two_step(
            ops,
            bucket,
            x,
            world,
            encode=lambda row, number: self.encode(ops, row, self._seed(ops, seed, number)),
            decode=lambda data: self.decode(ops, data, part, bucket.dtype),
            serve=serve,
        )
        return Exchange(total, sent, QuantisedState(state.step + 1, kept))

    def retain(self, ops: Ops, corrected: Array, sent: Array) -> Array:
        return corrected - sent


def part_size(bucket: Bucket, size: int) -> int:
    """How many coordinates of a bucket each of ``size`` ranks serves; the last may have fewer."""
    return -(-bucket.numel // size)


def two_step(
    ops: Ops,
    bucket: Bucket,
    x: Array,
    world: World,
    encode: Callable[[Array, int], Array],
    decode: Callable[[Array], Array],
    serve: Callable[[list[Array]], Array],
) -> Generator[Collective, Any, tuple[Array, Array]]:
    """Sum with each rank as the server of a part: an alltoall of codes, then an allgather of the answers.

    Args:
        ops: The primitives of the framework at work.
        bucket: What ``x`` is made of.
        x: The gradient.
        world: The ranks that take part.
        encode: Compresses the part with this number.
        decode: Undoes it, and reads the answers.
        serve: Makes the answer of the decoded parts of all ranks.

    Returns:
        The decoded answers as one array, and what this rank has sent, decoded.
    """
    part = part_size(bucket, world.size)
    rows = ops.reshape(ops.pad(x, part * world.size), (world.size, part))
    codes = [encode(rows[number], number) for number in range(world.size)]
    received = yield AllToAll(ops.reshape(ops.concat(codes), (world.size, -1)))
    answers = yield AllGather(serve([decode(received[rank]) for rank in range(world.size)]))
    total = ops.concat([decode(answers[rank]) for rank in range(world.size)])
    sent = ops.concat([decode(code) for code in codes])
    return total[: bucket.numel], sent[: bucket.numel]


class Blocks(NamedTuple):
    """An array of n coordinates cut into ``number`` blocks of ``size``, as few as there can be.

    Attributes:
        n: Coordinates.
        number: Blocks.
        size: Coordinates in a block; the last one is filled up with zeros.
    """

    n: int
    number: int
    size: int

    @classmethod
    def of(cls, n: int, largest: int) -> Blocks:
        """Blocks of about equal size, none larger than ``largest``."""
        number = -(-n // largest)
        return cls(n, number, -(-n // number))

    def cut(self, ops: Ops, x: Array) -> Array:
        """Shape ``(n,)`` to ``(number, size)``."""
        return ops.reshape(ops.pad(x, self.number * self.size), (self.number, self.size))

    def join(self, ops: Ops, rows: Array) -> Array:
        """Undo `cut`."""
        return ops.reshape(rows, (-1,))[: self.n]

    def members(self, ops: Ops, dtype: str) -> Array:
        """How many coordinates each block really has, shape ``(number,)``."""
        starts = np.arange(self.number) * self.size
        return ops.constant(np.clip(self.n - starts, 1, self.size).astype(dtype))

    def column(self, ops: Ops, values: Array) -> Array:
        """One value for each block, shaped to go with the rows."""
        return ops.reshape(values, (self.number, 1))
