"""SIDCo: a threshold from the statistics of the gradient."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from hvd_compress.core.bucket import Bucket
from hvd_compress.core.collectives import World
from hvd_compress.core.method import Example, check_range, register
from hvd_compress.core.state_tree import Private
from hvd_compress.methods.sparse import Sparse
from hvd_compress.ops import Ops
from hvd_compress.ops.arrays import Array
from hvd_compress.ops.code import count

FIRST = 0.25
"""Share of the coordinates above the threshold of the first of several stages."""

PERIOD = 5
"""Steps between two adaptations of the number of stages."""

TOLERANCE = 0.1
"""Relative tolerance of the number of sent coordinates."""

CORRECTIONS = 3
"""Maximum number of corrections of the fitted threshold before the fallback to exact top-k."""

TINY = 2.0**-1022
"""Smallest threshold, relative to the largest magnitude; smaller values count as zero."""


class SIDCoState(NamedTuple):
    """State of SIDCo.

    Attributes:
        stages: Number S of fits per threshold: a float64 scalar.
        achieved: Sum of achieved / target over the steps since S was last adapted: a float64 scalar.
        step: Number of exchanges so far.
    """

    stages: Private
    achieved: Private
    step: int


@register
@dataclass(frozen=True, kw_only=True)
class SIDCo(Sparse):
    """Send ``S_i = {j : |p_i[j]| >= t_i}`` with t_i from a fitted distribution. See `Sparse` for the exchange.

    From the paper: let d be the ratio, t = 0 at first, and y = |x| - t for all |x| > t. Each stage raises t such that a
    share q of these remains, by the moments of y::

        exponential:  t' = t - mean ln q
        pareto:       t' = t + a (1 - q^k) / k,     k = (mean^2/var - 1) / 2,     a = mean (mean^2/var + 1) / 2
        gamma:        t' = -b (ln q + ln Gamma(alpha)),     b = mean / alpha,     s = ln mean - E ln y,
                      alpha = (3 - s + sqrt((s - 3)^2 + 24 s)) / (12 s)           (first stage; then pareto)

    A single stage has q = d; with several, q is 0.25 first, then ``q = (d / 0.25)^(1/(S-1))``. Every 5 steps S falls by
    one if the mean of achieved / target is above 1.2, and grows by one if it is below 0.8, within
    ``1 <= S <= ceil(log_0.5 d)``.

    Ours: a fit alone can be off by a factor of 10 and more if the distribution differs and the ratio is small. So fit
    and count ignore zeros, and the target is k = d n coordinates. If the number c above the threshold is not within 10%
    of k, the threshold is corrected along a power law fitted to the tail, with Hill's estimate of its exponent::

        t' = t (c / k)^H,       H = mean of ln(|x| / t) over |x| >= t

    It approaches k from one side if the logarithm of the tail is concave in ln t, as for all distributions above. If
    three corrections do not suffice (too few coordinates, or ties), the exact top-k is sent. So the number of sent
    coordinates is always within 10% of k, or that of all nonzero ones. S adapts to what the fit alone achieves.

    Args:
        ratio: Target share d of the coordinates that are sent, in (0, 1].
        fit: Distribution: ``"exponential"``, ``"gamma"`` or ``"pareto"``.
        stages: Number S of stages; 0 to adapt it.
        values: ``"fp32"``, or ``"fp16"`` to send values in 16 bits.
    """

    name = "sidco"
    card = Sparse.card._replace(
        paper=(
            "Abdelmoniem et al., An Efficient Statistical-based Gradient Compression Technique for Distributed Training"
            " Systems, 2021"
        ),
        keeps="step count, stages",
        examples=(Example("sidco:ratio=0.1"),),
        compared=("sidco:ratio=0.0625,values=fp16", "sidco:ratio=0.0156,values=fp16"),
        learns=True,
    )
    boundary = True

    ratio: float = 0.01
    fit: str = "exponential"
    stages: int = 0

    def __post_init__(self) -> None:
        super().__post_init__()
        check_range("ratio", self.ratio, "in (0, 1]", 0 < self.ratio <= 1)
        known = ("exponential", "gamma", "pareto")
        check_range("fit", self.fit, "'exponential', 'gamma' or 'pareto'", self.fit in known)
        check_range("stages", self.stages, "in 1 .. 100, or 0 to adapt it", 0 <= self.stages <= 100)

    @property
    def most_stages(self) -> int:
        """Largest S."""
        return self.stages or max(1, math.ceil(-math.log2(self.ratio)))

    def init(self, ops: Ops, bucket: Bucket, world: World) -> SIDCoState:
        return SIDCoState(_scalar(ops, self.stages or 1), _scalar(ops, 0), 0)

    def select(self, ops: Ops, bucket: Bucket, x: Array, state: SIDCoState) -> tuple[Array, SIDCoState]:
        k = count(self.ratio, bucket.numel)
        peak = ops.cast(ops.absmax(x), "float64")
        unit = ops.where(peak > 0, peak, 1.0)

        everything = ops.tail(x, unit, TINY, logs=self.fit == "gamma")  # zeros do not count
        nonzero = everything[0]
        goal = ops.clip(nonzero, 0.0, float(k))
        log_d = ops.log(ops.clip(goal, 1.0, math.inf) / ops.clip(nonzero, 1.0, math.inf))
        t = self.threshold(ops, x, unit, everything, log_d, state.stages)
        t = ops.clip(ops.where(t > 0, t, 1.0), TINY, 1.0)  # nan is not above 0
        t = ops.where(nonzero > k, t, TINY)

        tail = ops.tail(x, unit, t, logs=True)
        # If all is zero, the target of none is met.
        achieved = ops.where(goal > 0, state.achieved + tail[0] / ops.clip(goal, 1.0, math.inf), state.achieved + 1)
        return _send(ops, x, unit, t, tail, goal, k), self._adapted(ops, state, achieved)

    def threshold(self, ops: Ops, x: Array, unit: Array, everything: Array, log_d: Array, stages: Array) -> Array:
        """Fit the threshold of the paper, without our corrections.

        Args:
            ops: Primitives of the framework.
            x: The coordinates.
            unit: Their largest magnitude, the unit of the threshold: a float64 scalar.
            everything: Moments of all nonzero coordinates.
            log_d: ln d, a float64 scalar.
            stages: S, a float64 scalar of at most `most_stages`.
        """
        log_first = math.log(FIRST)
        stages = ops.where(log_d < log_first, stages, stages * 0 + 1)
        log_later = (log_d - log_first) / ops.clip(stages - 1, 1.0, math.inf)
        t = self._raised(ops, everything, log_d * 0, ops.where(stages <= 1, log_d, log_first), self.fit)
        later = "exponential" if self.fit == "exponential" else "pareto"
        for number in range(1, self.most_stages):
            if stages > number:
                t = self._raised(ops, ops.tail(x, unit, ops.clip(t, TINY, math.inf)), t, log_later, later)
        return t

    def _raised(self, ops: Ops, tail: Array, t: Array, log_q: Array, fit: str) -> Array:
        """Raise the threshold so that a share q of the values above it remains, by their moments."""
        n = ops.clip(tail[0], 1.0, math.inf)
        mean = ops.clip(tail[1] / n, TINY, 1.0)
        if fit == "exponential":
            return t - mean * log_q
        if fit == "pareto":
            r = mean * mean / ops.clip(tail[2] / n - mean * mean, 1e-300, 1.0)
            k = (r - 1) / 2
            k = ops.where(ops.abs(k) > 1e-6, k, 1e-6)  # the limit k -> 0 is the exponential distribution
            return t + mean * (r + 1) / 2 * (1 - math.e ** (k * log_q)) / k
        s = ops.clip(ops.log(mean) - tail[3] / n, 1e-9, math.inf)
        alpha = (3 - s + ops.sqrt((s - 3) * (s - 3) + 24 * s)) / (12 * s)
        return -mean / alpha * (log_q + ops.lgamma(alpha))

    def _adapted(self, ops: Ops, state: SIDCoState, achieved: Array) -> SIDCoState:
        """Return the next state, given the sum of achieved / target so far."""
        step = state.step + 1
        if self.stages:
            return state._replace(step=step)
        fewer = ops.clip(state.stages - 1, 1.0, float(self.most_stages))
        more = ops.clip(state.stages + 1, 1.0, float(self.most_stages))
        moved = ops.where(achieved > 1.2 * PERIOD, fewer, ops.where(achieved < 0.8 * PERIOD, more, state.stages))
        if step % PERIOD == 0:
            return SIDCoState(moved, ops.zeros((), "float64"), step)
        return SIDCoState(state.stages, achieved, step)


def _scalar(ops: Ops, value: float) -> Array:
    return ops.constant(np.array(value, np.float64))


def _send(
    ops: Ops, x: Array, unit: Array, t: Array, tail: Array, goal: Array, k: int, left: int = CORRECTIONS
) -> Array:
    """Return the indices above a threshold, after up to ``left`` corrections."""
    passed = tail[0]
    if ops.abs(passed - goal) <= TOLERANCE * goal:
        found = ops.above(x, ops.cast(t * unit, ops.dtype(x)))
        return ops.take(found, ops.nonzero(ops.take(x, found) != 0))  # a tiny threshold may have become zero
    if not left:
        return ops.top_indices(x, k)
    hill = tail[3] / passed - ops.log(t)
    better = ops.clip(t * (passed / goal) ** hill, TINY, 1.0)
    return _send(ops, x, unit, better, ops.tail(x, unit, better, logs=True), goal, k, left - 1)
