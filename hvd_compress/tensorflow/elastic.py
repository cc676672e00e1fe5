"""Steps of an elastic job: the number of ranks may change from one to the next, so no graph can hold an exchange."""

from __future__ import annotations

from typing import Any, TypeAlias

import tensorflow as tf

from hvd_compress.errors import CompressionError
from hvd_compress.tensorflow.session import Ready, Session, precision

Tensor: TypeAlias = Any


def step_by_step(session: Session, gradients: list[Tensor], scale: Tensor | None, factor: float) -> Ready:
    """Do the exchange of each step op by op, outside of graphs, among the ranks that there are then.

    Args:
        session: The session whose state is exchanged.
        gradients: One tensor for each of its gradients.
        scale: See `Session.build`.
        factor: Factor by which Horovod multiplies sums; assumed to be that of a mean.
    """
    del factor  # it was read off while the graph was traced, by another number of ranks
    full = [i for i, gradient in enumerate(gradients) if 0 not in gradient.shape]

    def step(*tensors: Tensor) -> list[Tensor]:
        given, scales = list(tensors[: len(gradients)]), tensors[len(gradients) :]
        session.meet()
        size = session.world.size
        if size == 1:  # Horovod takes the gradients as they are, so nothing must be kept of them
            return [*(tf.cast(given[i], dtypes[i]) for i in full), tf.ones([1], tf.float64)]
        ready = session.build(given, scales[0] if scales else None, 1 / size)
        means = [total / size for total in ready.totals if total is not None]
        return [*means, ready.carrier]

    dtypes = [precision(gradient) for gradient in gradients]
    outputs = [*(dtypes[i] for i in full), tf.float64]
    results = tf.py_function(_told(step), [*gradients, *([] if scale is None else [scale])], outputs)
    totals: list[Tensor | None] = [None] * len(gradients)
    for i, total in zip(full, results, strict=False):
        totals[i] = tf.ensure_shape(total, gradients[i].shape)
    return Ready(totals, tf.ensure_shape(results[-1], [1]), 1)


def _told(step: Any) -> Any:
    """Say errors so that `hvd.elastic.run` understands them.

    It goes on after a lost rank if the message names one of three operations, and swallows all else that is unknown.
    """

    def told(*tensors: Tensor) -> list[Tensor]:
        try:
            results: list[Tensor] = step(*tensors)
            return results
        except CompressionError as error:
            raise ValueError(f"{type(error).__name__}: {error}") from error
        except tf.errors.OpError as error:
            raise RuntimeError(f"HorovodAllreduce, or another of its operations: {error.message}") from error

    return told
