"""SignSGD and Signum: majority vote on the sign of each coordinate."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

from hvd_compress.core.bucket import Bucket
from hvd_compress.core.collectives import AllGather, Exchange, Exchanging, World
from hvd_compress.core.method import Card, Example, Method, check_range, register
from hvd_compress.core.state_tree import PrivateVector
from hvd_compress.methods.quantised import two_step
from hvd_compress.ops import Ops
from hvd_compress.ops.arrays import Array
from hvd_compress.ops.code import Code
from hvd_compress.ops.totals import dense

VOTES = Code("one", 1)


class SignState(NamedTuple):
    """State of the voting methods.

    Attributes:
        step: Number of exchanges so far; part of the random seed that breaks ties and draws the sign of zeros.
        momentum: Running mean of this rank's gradients, for Signum; shape ``(bucket.numel,)``.
    """

    step: int
    momentum: PrivateVector


@register
@dataclass(frozen=True, kw_only=True)
class SignSGD(Method):
    """Majority vote on signs.

    The distributed version of Algorithm 1 of the paper::

        mean over the ranks = sgn(sum_i sgn(g_i))

    All updates have the same magnitude, so the learning rate must be small (the authors take 1e-4). There is no
    residual: outvoted signs are lost, which makes the method robust against faulty ranks.

    Two-way, the rank that serves a shard counts its votes and sends the majority back: 1 bit each way, as in the paper.
    One-way, each rank counts all votes, which costs one bit per rank. Ties are broken at random, equally on all ranks,
    and so is the sign of 0 drawn by each rank in each step (in the authors' code it is 1): a fixed rule would bias the
    weights, and move those for ever whose gradient is zero on all ranks.

    Args:
        twoway: If off, all ranks receive all votes by allgather.
        seed: Random seed of the tie-breaks, and of the signs of zeros.
    """

    name = "signsgd"
    family = "quantised"
    card = Card(
        paper="Bernstein et al., signSGD: Compressed Optimisation for Non-Convex Problems, 2018",
        collective="alltoall + allgather, or allgather",
        keeps="step count",
        examples=(
            Example("signsgd", 3 * 63, total="lossy"),
            Example("signsgd:twoway=off", 125, total="lossy"),
        ),
    )
    scaleless = True

    twoway: bool = True
    seed: int = 0

    def __post_init__(self) -> None:
        check_range("seed", self.seed, "in 0 .. 2**32-1", 0 <= self.seed < 2**32)

    def init(self, ops: Ops, bucket: Bucket, world: World) -> SignState:
        return SignState(0, ())

    def exchange(
        self, ops: Ops, bucket: Bucket, x: Array, state: SignState, world: World, return_error: bool = False
    ) -> Exchanging:
        seed = ops.seed(self.seed, bucket.seed, state.step, world.rank)
        if self.twoway:
            votes, _ = ops.quantise_parts(x, world.size, VOTES, seed)
            vote = yield from two_step(
                ops, bucket, votes, world, VOTES, lambda count: ops.quantise(ops.majority(count, seed, 1), VOTES)[0]
            )
            total = ops.scale(dense(ops, vote), world.size)
        else:
            votes = yield AllGather(ops.quantise(x, VOTES, seed)[0])
            count = ops.dequantise(votes, VOTES, bucket.numel, bucket.dtype)
            total = ops.majority(count, ops.seed(self.seed, bucket.seed, state.step), world.size)
        return Exchange(total, SignState(state.step + 1, state.momentum))


@register
@dataclass(frozen=True, kw_only=True)
class Signum(SignSGD):
    """SignSGD with momentum: vote with the sign of a running mean.

    Algorithm 1 of the paper::

        m_i = b m_i + (1 - b) g_i                mean over the ranks = sgn(sum_i sgn(m_i))

    The optimizer must be without momentum. See `SignSGD` for the vote.

    Args:
        beta: Decay b of the running mean, in [0, 1).
        twoway: If off, all ranks receive all votes by allgather.
        seed: Random seed of the tie-breaks, and of the signs of zeros.
    """

    name = "signum"
    card = SignSGD.card._replace(
        paper="Bernstein et al., signSGD with Majority Vote is Communication Efficient and Fault Tolerant, 2019",
        keeps="momentum",
        claim="32 times less traffic; ResNet-50 on ImageNet 25 % faster on 15 machines",
        examples=(Example("signum", 3 * 63, total="lossy"),),
    )

    beta: float = 0.9

    def __post_init__(self) -> None:
        super().__post_init__()
        check_range("beta", self.beta, "in [0, 1)", 0 <= self.beta < 1)

    @property
    def needs_plain_sgd(self) -> bool:
        return self.beta > 0

    def init(self, ops: Ops, bucket: Bucket, world: World) -> SignState:
        return SignState(0, ops.zeros((bucket.numel,), bucket.dtype))

    def exchange(
        self, ops: Ops, bucket: Bucket, x: Array, state: SignState, world: World, return_error: bool = False
    ) -> Exchanging:
        momentum = ops.blend(state.momentum, x, self.beta)
        return (
            yield from super().exchange(ops, bucket, momentum, state._replace(momentum=momentum), world, return_error)
        )
