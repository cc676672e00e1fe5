"""What the methods have in common that send every coordinate in a few bits, with a scale of each rank's own."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable, Generator
from dataclasses import dataclass
from typing import Any, ClassVar, NamedTuple

from hvd_compress.core.bucket import Bucket
from hvd_compress.core.collectives import AllGather, AllToAll, Array, Collective, Exchange, Exchanging, World
from hvd_compress.core.state_tree import Served
from hvd_compress.core.totals import Coded, coded
from hvd_compress.methods.base import Method
from hvd_compress.ops import Ops
from hvd_compress.ops.code import Code


class QuantisedState(NamedTuple):
    """State of a quantising method.

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

    family = "quantised"
    boundary = True
    collective = "allgather, or alltoall + allgather"
    keeps = "step count; two-way: the servers' residuals"
    retains = True
    serves_feedback: ClassVar[bool] = False
    """Whether a server keeps the error of its answer: codes that are biased need it."""

    twoway: bool = False

    def init(self, ops: Ops, bucket: Bucket, size: int) -> QuantisedState:
        kept = ops.zeros((part_size(bucket, size),), bucket.dtype) if self._serves else ()
        return QuantisedState(0, kept)

    @property
    def _serves(self) -> bool:
        return self.twoway and self.serves_feedback

    @property
    @abstractmethod
    def code(self) -> Code:
        """How coordinates are written."""

    def _seed(self, ops: Ops, *parts: Any) -> Any:
        return ops.seed(getattr(self, "seed", 0), *parts)

    def exchange(
        self, ops: Ops, bucket: Bucket, x: Array, state: QuantisedState, world: World, keep: bool = False
    ) -> Exchanging:
        seed = self._seed(ops, bucket.seed, state.step, world.rank)
        if not self.twoway:
            data, left = ops.quantise(x, self.code, seed, keep)
            del x  # as much memory as the sum will take
            rows = yield AllGather(data)
            total = coded(ops, rows, self.code, bucket.numel, bucket.numel, bucket.dtype)
            return Exchange(total, QuantisedState(state.step + 1, ()), left)

        kept = state.served

        def serve(total: Array) -> Array:
            nonlocal kept
            again = self._seed(ops, bucket.seed, state.step, world.rank, 1)
            if not self._serves:
                return ops.quantise(total, self.code, again)[0]
            answer, kept = ops.quantise(ops.add(total, kept), self.code, again, keep=True)
            return answer

        codes, left = ops.quantise_parts(x, world.size, self.code, seed, keep)
        del x
        total = yield from two_step(ops, bucket, codes, world, self.code, serve)
        return Exchange(total, QuantisedState(state.step + 1, kept), left)


def part_size(bucket: Bucket, size: int) -> int:
    """How many coordinates of a bucket each of ``size`` ranks serves; the last may have fewer."""
    return -(-bucket.numel // size)


def two_step(
    ops: Ops, bucket: Bucket, codes: Array, world: World, code: Code, serve: Callable[[Array], Array]
) -> Generator[Collective, Any, Coded]:
    """Sum with each rank as the server of a part: an alltoall of codes, then an allgather of the answers.

    Args:
        ops: The primitives of the framework at work.
        bucket: What is summed.
        codes: From `Ops.quantise_parts`, a part for each rank.
        world: The ranks that take part.
        code: In which parts and answers travel.
        serve: Makes the answer of the decoded sum of a part.

    Returns:
        The answers, to be decoded one after another.
    """
    part = part_size(bucket, world.size)
    received = yield AllToAll(codes)
    answers = yield AllGather(serve(ops.dequantise(received, code, part, bucket.dtype)))
    return coded(ops, answers, code, part, bucket.numel, bucket.dtype, join=True)
