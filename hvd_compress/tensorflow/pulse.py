"""One small allreduce per step, by which ranks agree that gradients are finite and that they make the same step."""

from __future__ import annotations

import secrets
from typing import Any, NamedTuple, TypeAlias

import horovod.tensorflow as hvd
import tensorflow as tf

from hvd_compress.core.collectives import AllReduce
from hvd_compress.errors import DisagreementError
from hvd_compress.tensorflow.transport import GraphTransport

Tensor: TypeAlias = Any

BYTES = 56
"""Values that a rank sends."""

_DIFFERENT = (
    "the ranks disagree on the restored state: they have done {} to {} steps, of the jobs {} to {} (0 for a new one);"
    " give all ranks the checkpoint of the same step of the same job, and make a new compression object if Horovod was"
    " started again with other ranks"
)


RESTARTED = (
    "Horovod was shut down and started again with other ranks, but what is kept between steps belongs to the former"
    " ones: call compression.save(folder) before hvd.shutdown(); after hvd.init(), make a new compression object, a new"
    " optimizer or tape and a new tf.function with it, and load the folder (without it, residuals begin at zero)"
)


class Pulse(NamedTuple):
    """Result over all ranks.

    Attributes:
        finite: Whether all gradients are. Nothing that depends on it happens if the ranks disagree.
        job: Number of what they do together.
    """

    finite: Tensor
    job: Tensor


def draw() -> int:
    """A number for a new job; not of the user's random generators."""
    return 1 + secrets.randbits(40)


def feel(
    bad: Tensor, steps: Tensor, job: Tensor, drawn: int, name: str, transport: GraphTransport, number: int
) -> Pulse:
    """Build the allreduce.

    Args:
        bad: Number of gradients of this rank that are not finite.
        steps: Number of steps of this rank.
        job: Number of the job that it goes on with; 0 for a new one.
        drawn: From `draw`: what a new one may be numbered.
        name: The same on all ranks.
        transport: The ranks.
        number: This rank among all, when the state was made.

    Raises:
        DisagreementError: If the ranks have done other numbers of steps, go on with other jobs, or have other numbers
            among the ranks since Horovod was started again. In a graph it is
            TensorFlow's InvalidArgumentError, with that in the message.
    """
    moved = tf.cast(tf.not_equal(hvd.rank_op(), number), tf.int64)
    mine = tf.stack([tf.cast(bad, tf.int64), steps, -steps, job, -job, tf.constant(drawn, tf.int64), moved])
    bad, last, first, job, other, drawn, moved = tf.unstack(transport.start(AllReduce(mine, "max"), name).result())
    same = tf.logical_and(tf.equal(last, -first), tf.equal(job, -other))
    stayed = tf.equal(moved, 0)
    if tf.executing_eagerly() and not stayed:
        raise DisagreementError(RESTARTED)
    if tf.executing_eagerly() and not same:
        raise DisagreementError(_DIFFERENT.format(*(int(number) for number in (-first, last, -other, job))))
    message = tf.strings.format(f"DisagreementError: {_DIFFERENT}", (-first, last, -other, job))
    with tf.control_dependencies([tf.debugging.Assert(stayed, [f"DisagreementError: {RESTARTED}"])]):
        checked = tf.debugging.Assert(same, [message])
    with tf.control_dependencies([checked]):
        return Pulse(tf.equal(bad, 0), tf.where(tf.equal(job, 0), drawn, job))
