"""Base class of methods that send all coordinates in a few bits, with scales per rank."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable, Generator
from dataclasses import dataclass
from typing import Any, ClassVar, NamedTuple

from hvd_compress.core.bucket import Bucket
from hvd_compress.core.collectives import AllGather, AllToAll, Collective, Exchange, Exchanging, World
from hvd_compress.core.method import Card, Method
from hvd_compress.core.state_tree import ServerShard
from hvd_compress.ops import Ops
from hvd_compress.ops.arrays import Array
from hvd_compress.ops.code import Code
from hvd_compress.ops.totals import QuantizedSum, quantized_sum


class QuantisedState(NamedTuple):
    """State of a quantising method.

    Attributes:
        step: Number of exchanges so far; part of the random seed.
        served: Residual of the shard that this rank serves; two-way only.
    """

    step: int
    served: ServerShard


@dataclass(frozen=True, kw_only=True)
class Quantised(Method):
    """Exchange codes that must be decoded before they are summed.

    One-way, all ranks receive all codes by allgather: ``n b`` bits per coordinate with n ranks and b bits::

        total = sum_i D(C(p_i))                          e_i = p_i - D(C(p_i))

    Two-way, each rank serves one shard of the bucket. It decodes and sums the codes of its shard (alltoall) and sends
    the sum back compressed (allgather): about ``2 b`` bits per coordinate for any number of ranks. Servers of biased
    codes use error feedback too (Zheng, Huang, Kwok, Communication-Efficient Distributed Blockwise Momentum SGD with
    Error-Feedback, 2019, Algorithm 2, with one server per shard)::

        q = sum_i D(C(p_i)) + f            total = D(C(q))            f = q - D(C(q))

    Args:
        twoway: Compress the returned sum too.
    """

    family = "quantised"
    boundary = True
    card = Card(
        collective="allgather, or alltoall + allgather",
        keeps="step count; two-way: the servers' residuals",
    )
    retains = True
    serves_feedback: ClassVar[bool] = False
    """Whether servers use error feedback, as biased codes need."""

    twoway: bool = False

    def init(self, ops: Ops, bucket: Bucket, world: World) -> QuantisedState:
        kept = ops.zeros((part_size(bucket, world.size),), bucket.dtype) if self._serves else ()
        return QuantisedState(0, kept)

    @property
    def _serves(self) -> bool:
        return self.twoway and self.serves_feedback

    @property
    @abstractmethod
    def code(self) -> Code:
        """Code of the coordinates."""

    def _seed(self, ops: Ops, *parts: Any) -> Any:
        return ops.seed(getattr(self, "seed", 0), *parts)

    def exchange(
        self, ops: Ops, bucket: Bucket, x: Array, state: QuantisedState, world: World, return_error: bool = False
    ) -> Exchanging:
        seed = self._seed(ops, bucket.seed, state.step, world.rank)
        if not self.twoway:
            data, error = ops.quantise(x, self.code, seed, return_error)
            del x  # frees the memory that the sum will take
            rows = yield AllGather(data)
            total = quantized_sum(ops, rows, self.code, bucket.numel, bucket.numel, bucket.dtype)
            return Exchange(total, QuantisedState(state.step + 1, ()), error)

        kept = state.served

        def serve(total: Array) -> Array:
            nonlocal kept
            again = self._seed(ops, bucket.seed, state.step, world.rank, 1)
            if not self._serves:
                return ops.quantise(total, self.code, again)[0]
            answer, kept = ops.quantise(ops.add(total, kept), self.code, again, return_error=True)
            return answer

        codes, error = ops.quantise_parts(x, world.size, self.code, seed, return_error)
        del x
        total = yield from two_step(ops, bucket, codes, world, self.code, serve)
        return Exchange(total, QuantisedState(state.step + 1, kept), error)

    def flush(
        self, ops: Ops, bucket: Bucket, x: Array, state: QuantisedState, world: World
    ) -> tuple[Array, QuantisedState]:
        if not self._serves:
            return x, state
        x = add_part(ops, bucket, x, state.served, world)
        return x, state._replace(served=ops.zeros((part_size(bucket, world.size),), bucket.dtype))

    def reduce_scatter(
        self, ops: Ops, bucket: Bucket, x: Array, state: QuantisedState, world: World, return_error: bool = False
    ) -> Exchanging:
        seed = self._seed(ops, bucket.seed, state.step, world.rank)
        codes, error = ops.quantise_parts(x, world.size, self.code, seed, return_error)
        total = yield from sum_part(ops, bucket, codes, world, self.code)
        return Exchange(total, state._replace(step=state.step + 1), error)


def part_size(bucket: Bucket, size: int) -> int:
    """Return the number of coordinates that each of ``size`` ranks serves; the last may serve fewer."""
    return -(-bucket.numel // size)


def add_part(ops: Ops, bucket: Bucket, x: Array, part: Array, world: World) -> Array:
    """Add the part that this rank serves to a vector, which may be overwritten; padding of the part is left out."""
    size = part_size(bucket, world.size)
    start, stop = (min(rank * size, bucket.numel) for rank in (world.rank, world.rank + 1))
    return ops.concat([x[:start], x[start:stop] + part[: stop - start], x[stop:]])


def sum_part(ops: Ops, bucket: Bucket, codes: Array, world: World, code: Code) -> Generator[Collective, Any, Array]:
    """Sum the part that this rank serves: an alltoall of codes.

    Args:
        ops: Primitives of the framework.
        bucket: The bucket to sum.
        codes: Encoded parts from `Ops.quantise_parts`, one per rank.
        world: The ranks that take part.
        code: Code of the parts.
    """
    received = yield AllToAll(codes)
    return ops.dequantise(received, code, part_size(bucket, world.size), bucket.dtype)


def two_step(
    ops: Ops, bucket: Bucket, codes: Array, world: World, code: Code, serve: Callable[[Array], Array]
) -> Generator[Collective, Any, QuantizedSum]:
    """Sum with each rank as the server of a shard: an alltoall of codes, then an allgather of the encoded sums.

    Args:
        ops: Primitives of the framework.
        bucket: The bucket to sum.
        codes: Encoded shards from `Ops.quantise_parts`, one per rank.
        world: The ranks that take part.
        code: Code of the shards and their sums.
        serve: Encodes the decoded sum of a shard.

    Returns:
        The concatenation of the encoded sums.
    """
    part = part_size(bucket, world.size)
    total = yield from sum_part(ops, bucket, codes, world, code)
    answers = yield AllGather(serve(total))
    return quantized_sum(ops, answers, code, part, bucket.numel, bucket.dtype, join=True)
