"""One small allreduce per step, by which ranks agree that gradients are finite and that they make the same step."""

from __future__ import annotations

import secrets
from typing import Any, NamedTuple, TypeAlias

import tensorflow as tf

from hvd_compress.core.collectives import AllReduce
from hvd_compress.errors import DisagreementError
from hvd_compress.tensorflow.transport import GraphTransport

Tensor: TypeAlias = Any

BYTES = 48
"""Values that a rank sends."""

_DIFFERENT = (
    "the ranks disagree on the restored state: they have done {} to {} steps, of the jobs {} to {} (0 for a new one);"
    " give all ranks the checkpoint of the same step of the same job"
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


def feel(bad: Tensor, steps: Tensor, job: Tensor, drawn: int, name: str, transport: GraphTransport) -> Pulse:
    """Build the allreduce.

    Args:
        bad: Number of gradients of this rank that are not finite.
        steps: Number of steps of this rank.
        job: Number of the job that it goes on with; 0 for a new one.
        drawn: From `draw`: what a new one may be numbered.
        name: The same on all ranks.
        transport: The ranks.

    Raises:
        DisagreementError: If the ranks have done other numbers of steps, or go on with other jobs. In a graph it is
            TensorFlow's InvalidArgumentError, with that in the message.
    """
    mine = tf.stack([tf.cast(bad, tf.int64), steps, -steps, job, -job, tf.constant(drawn, tf.int64)])
    bad, last, first, job, other, drawn = tf.unstack(transport.start(AllReduce(mine, "max"), name).result())
    same = tf.logical_and(tf.equal(last, -first), tf.equal(job, -other))
    if tf.executing_eagerly() and not same:
        raise DisagreementError(_DIFFERENT.format(*(int(number) for number in (-first, last, -other, job))))
    message = tf.strings.format(f"DisagreementError: {_DIFFERENT}", (-first, last, -other, job))
    with tf.control_dependencies([tf.debugging.Assert(same, [message])]):
        return Pulse(tf.equal(bad, 0), tf.where(tf.equal(job, 0), drawn, job))
