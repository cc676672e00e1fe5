"""Who calls ``compress``? Horovod does not say, so it is read off the calling frames.

`horovod.tensorflow` hands over a bare gradient, inside a `tf.cond` branch of its own. The frame of ``allreduce_grads``
holds all gradients and variables, that of ``allreduce`` the process set. All knowledge of Horovod's inside is in this
file.
"""

from __future__ import annotations

import sys
from types import FrameType
from typing import Any, NamedTuple

import horovod.tensorflow as hvd
import tensorflow as tf

from hvd_compress.errors import UnknownParameterError, UnsupportedError

_REDUCE = {"allreduce", "tf__allreduce", "grouped_allreduce", "tf__grouped_allreduce"}
_ALL = {"allreduce_grads", "tf__allreduce_grads"}  # AutoGraph runs a translation whose names begin with tf__


class Call(NamedTuple):
    """A call of ``compress`` while a training step is traced.

    Attributes:
        source: The very list of gradients in Horovod's hands; tells one call of ``allreduce_grads`` from another.
        gradients: Its entries, one for each variable; None or IndexedSlices for some.
        variables: As many; None where the caller named none.
        process_set: The ranks that Horovod reduces over.
        op: Horovod's reduction.
        graph: Where the gradients are reduced: the graph around the branch that is being traced; None in eager mode.
        optimizer: Whose gradients they are; None in a tape.
    """

    source: Any
    gradients: list[Any]
    variables: list[Any] | None
    process_set: Any
    op: int
    graph: Any
    optimizer: Any


def find() -> Call | None:
    """Find out what is being compressed; None outside of Horovod's optimizers and tapes."""
    reduce_frame = _frame(sys._getframe(1), _REDUCE, {"process_set", "op"})
    all_frame = _frame(reduce_frame, _ALL, {"grads", "vars", "use_generic_names"})
    if reduce_frame is None or all_frame is None:
        return None
    reducing, gradients = reduce_frame.f_locals, all_frame.f_locals
    variables = gradients["vars"]
    return Call(
        gradients["grads"],
        list(gradients["grads"]),
        None if variables is None else list(variables),
        reducing["process_set"],
        reducing["op"],
        None if tf.executing_eagerly() else tf.compat.v1.get_default_graph().outer_graph,
        _optimizer(all_frame),
    )


def momentum(optimizer: Any) -> float:
    """The momentum of an optimizer (of Adam and its kin, the first beta); 0 for none."""
    if optimizer is None:
        return 0.0
    with tf.init_scope():  # a legacy optimizer keeps it in a variable
        config = optimizer.get_config()
    return float(config.get("momentum", config.get("beta_1", 0.0)))


def checked(call: Call | None) -> Call:
    """Refuse what compression with a state cannot do.

    Raises:
        UnknownParameterError: If the caller is not one of Horovod's optimizers or tapes.
        UnsupportedError: If it reduces with Adasum.
    """
    if call is None or call.variables is None:
        raise UnknownParameterError(
            "a tensor was compressed outside of hvd.DistributedOptimizer and hvd.DistributedGradientTape, so there is"
            " no variable to keep state for; in direct calls such as hvd.allreduce use Compression.none or .fp16"
        )
    if call.op == hvd.Adasum:
        raise UnsupportedError(
            "op=hvd.Adasum does not go with this compression: Adasum weighs the gradients of pairs of ranks by their"
            " angle, which a compressed sum cannot tell; use op=hvd.Average, or Compression.fp16 with Adasum"
        )
    return call


def _optimizer(frame: FrameType | None) -> Any:
    """The Keras optimizer, new or legacy, in whose method a frame was called."""
    kinds = (tf.keras.optimizers.Optimizer, tf.keras.optimizers.legacy.Optimizer)
    while frame is not None and not isinstance(frame.f_locals.get("self"), kinds):
        frame = frame.f_back
    return None if frame is None else frame.f_locals["self"]


def _frame(frame: FrameType | None, names: set[str], variables: set[str]) -> FrameType | None:
    """The nearest frame of a function of these names that has these variables: users have an allreduce_grads, too."""
    while frame is not None and not (frame.f_code.co_name in names and variables <= frame.f_locals.keys()):
        frame = frame.f_back
    return frame
