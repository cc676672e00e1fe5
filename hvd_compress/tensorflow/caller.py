"""Identify the caller of ``compress`` from Horovod's stack frames, as Horovod does not pass it.

`horovod.tensorflow` hands over a bare gradient, inside a `tf.cond` branch of its own. The frame of ``allreduce_grads``
holds all gradients and variables, that of ``allreduce`` the process set. All knowledge of Horovod's inside is in this
file.
"""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Callable, Container, Iterator, Sequence
from types import FrameType
from typing import Any, NamedTuple

import horovod.tensorflow as hvd
import tensorflow as tf

from hvd_compress.checkpoint.agreement import OptimizerFacts
from hvd_compress.errors import SpecError, UnknownParameterError, UnsupportedError

_REDUCE = {"allreduce", "tf__allreduce", "grouped_allreduce", "tf__grouped_allreduce"}
_ALL = {"allreduce_grads", "tf__allreduce_grads"}  # AutoGraph runs a translation whose names begin with tf__
_SCALED = {"compute_gradients", "_compute_gradients", "get_gradients"}
"""Functions in which a LossScaleOptimizer scales the loss before, and unscales the gradients after, the reduction."""

_LIBRARIES = {"horovod", "hvd_compress", "keras", "tensorflow", "tf_keras"}
"""Where methods of optimizers and models are looked for."""

_MARK = "hvd_compress.call"


class Call(NamedTuple):
    """A call of ``compress``, in most cases while a training step is traced.

    Attributes:
        source: Tells one reduction from another; in training, the very list of gradients in Horovod's hands.
        gradients: Its entries; None or IndexedSlices for some.
        parameters: Whose they are: as many variables; of a direct call such as ``hvd.allreduce``, names. None where the
            caller gave none.
        direct: Whether it is a direct call.
        process_set: The ranks that Horovod reduces over.
        op: Horovod's reduction.
        factor: Factor of the sum over the ranks.
        graph: Where the gradients are reduced: the graph around the branch that is being traced; None for the current
            one.
        optimizer: Whose gradients they are; None in a tape.
        scaler: The LossScaleOptimizer that the gradients go back to, still scaled; None without.
        watched: The variables that an eager tape has recorded: Horovod runs the graph for these only. None if the tape
            had not recorded when Horovod got it: the graph is then run for any variables of the same shapes.
    """

    source: Any
    gradients: list[Any]
    parameters: list[Any] | None
    direct: bool
    process_set: Any
    op: int
    factor: float
    graph: Any
    optimizer: Any
    scaler: Any
    watched: Sequence[Any] | None = ()


def find() -> Call | None:
    """Find out what is being compressed; None where it is not for an allreduce of Horovod."""
    reduce_frame = _frame(sys._getframe(1), _REDUCE, {"process_set", "op", "prescale_factor", "postscale_factor"})
    if reduce_frame is None:
        return None
    reducing = reduce_frame.f_locals
    all_frame = _frame(reduce_frame, _ALL, {"grads", "vars", "use_generic_names"})
    if all_frame is None:
        return _direct(reducing)
    grads, variables = all_frame.f_locals["grads"], all_frame.f_locals["vars"]
    graph = None if tf.executing_eagerly() else tf.compat.v1.get_default_graph().outer_graph
    optimizer, tape = _owner(all_frame, _optimizers()), _owner(all_frame, (tf.GradientTape,))
    eager_tape = optimizer is None and getattr(graph, "name", "") in _ALL
    return _call(reducing, grads, None if variables is None else list(variables))._replace(
        direct=False,
        graph=graph,
        optimizer=optimizer,
        scaler=_owner(all_frame, _scalers(), _SCALED),
        watched=(getattr(tape, _MARK, None) or None) if eager_tape else (),
    )


def in_session() -> bool:
    """Return whether a graph is built for a session of TensorFlow 1, which cannot use variables from outside of it."""
    with tf.init_scope():
        return not tf.executing_eagerly()


def _direct(reducing: dict[str, Any]) -> Call:
    """A call of ``hvd.allreduce`` or ``hvd.grouped_allreduce`` by a user."""
    name = reducing["name"]
    tensors = list(reducing["tensors"]) if "tensors" in reducing else [reducing["tensor"]]
    names = [f"{name}.{i}" for i in range(len(tensors))] if "tensors" in reducing else [name]
    call = _call(reducing, tensors, None if name is None else names)
    # A list of a user's may come again, so the call is told from others by a mark on its frame.
    return call._replace(source=reducing.setdefault(_MARK, object()))


def _call(reducing: dict[str, Any], source: list[Any], parameters: list[Any] | None) -> Call:
    process_set, op = reducing["process_set"], reducing["op"]
    factor = reducing["prescale_factor"] * reducing["postscale_factor"]
    if op == hvd.Average and process_set.included():
        factor /= process_set.size()
    return Call(source, list(source), parameters, True, process_set, op, factor, None, None, None)


def reduced_for() -> list[Any]:
    """The optimizer, or the variables of the eager tape, for which Horovod looks up how gradients are reduced.

    It keeps that by name and compressor, and TensorFlow traces once for all variables of the same shapes, so that two
    models would share what is kept between steps.

    Returns:
        Nothing outside of such a look-up, and for a tape that has not recorded yet.
    """
    frame = _frame(sys._getframe(1), {"_make_allreduce_grads_fn"}, {"compression"})
    if frame is None or frame.f_back is None or frame.f_back.f_code.co_name != "__init__":
        return []
    making = frame.f_back.f_locals
    if isinstance(making.get("self"), _optimizers()):
        return [making["self"]]
    if isinstance(making.get("self"), tf.GradientTape) and making["tape"] is not None and tf.executing_eagerly():
        watched = list(making["tape"].watched_variables())
        setattr(making["self"], _MARK, watched)
        return watched
    return []


def optimizer_facts(optimizer: Any) -> OptimizerFacts:
    """Return what an optimizer says of itself; nothing if it is not known, as that of a tape."""

    def first_beta() -> float:
        with contextlib.suppress(NotImplementedError):  # it cannot tell
            return float(_config(optimizer).get("beta_1", 0.0))
        return 0.0

    def not_sgd() -> str:
        name = "SGD" if optimizer is None else type(getattr(optimizer, "inner_optimizer", optimizer)).__name__
        return "" if "SGD" in name else name

    return OptimizerFacts(lambda: float(_config(optimizer).get("momentum", 0.0)), first_beta, not_sgd)


def _config(optimizer: Any) -> dict[str, Any]:
    if optimizer is None:
        return {}
    with tf.init_scope():  # a legacy optimizer keeps it in a variable
        config: dict[str, Any] = optimizer.get_config()
    found: dict[str, Any] = config.get("inner_optimizer", {}).get("config", config)  # of a LossScaleOptimizer
    return found


def checked(call: Call | None) -> Call:
    """Refuse what compression with a state cannot do.

    Raises:
        UnknownParameterError: If there is nothing to know the gradients by.
        UnsupportedError: If they are not summed.
    """
    if call is None or (call.parameters is None and not call.direct):
        raise UnknownParameterError(
            "a tensor was compressed outside of hvd.DistributedOptimizer, hvd.DistributedGradientTape, hvd.allreduce"
            " and hvd.grouped_allreduce, so there is nothing to keep state for; elsewhere use Compression.none or .fp16"
        )
    if in_session():
        raise UnsupportedError(
            "this compression keeps a state, which a graph for a session of TensorFlow 1 cannot use: train"
            " in eager mode or in a tf.function, or use Compression.none or Compression.fp16"
        )
    if call.op == hvd.Adasum:
        raise UnsupportedError(
            "op=hvd.Adasum is not supported with this compression: Adasum weighs the gradients of pairs of ranks by"
            " their angle, which a compressed sum does not show; use op=hvd.Average, or Compression.fp16 with Adasum"
        )
    if call.op not in (hvd.Average, hvd.Sum):
        name = next((name for name in ("Min", "Max", "Product") if getattr(hvd, name) == call.op), str(call.op))
        raise UnsupportedError(
            f"op=hvd.{name} is not supported with this compression, which computes sums: use op=hvd.Average or"
            f" hvd.Sum, or Compression.none with hvd.{name}"
        )
    if call.parameters is None:
        raise UnknownParameterError(
            "a direct call of hvd.allreduce or hvd.grouped_allreduce has no name, so there is nothing to keep state by:"
            ' give it one, as in hvd.allreduce(tensor, name="x", compression=...), or use Compression.none or .fp16'
        )
    return call


def scale_reader(scaler: Any) -> Callable[[], Any]:
    """A function that builds a read of the loss scale into the current graph.

    Args:
        scaler: A LossScaleOptimizer, a variable, a tensor or such a function.

    Raises:
        SpecError: If it is none of them.
    """
    if isinstance(scaler, _scalers()) and hasattr(scaler, "loss_scale"):
        return lambda: scaler.loss_scale
    if tf.is_tensor(scaler):
        return lambda: tf.convert_to_tensor(scaler)
    if callable(scaler) and not isinstance(scaler, type):
        return scaler  # type: ignore[no-any-return]
    raise SpecError(
        f"scaler={scaler!r} is not allowed: scaler must be a tf.keras.mixed_precision.LossScaleOptimizer of Keras 2, a"
        " tf.Variable or tensor with the loss scale, or a function that gives one; on Keras 3:"
        " lambda: scaler.dynamic_scale.value"
    )


def _optimizers() -> tuple[type, ...]:
    """Return the classes of Keras optimizers: new and, where this Keras has them, legacy ones."""
    kinds = [tf.keras.optimizers.Optimizer]
    with contextlib.suppress(AttributeError, ImportError):
        kinds.append(tf.keras.optimizers.legacy.Optimizer)
    return tuple(kinds)


def _scalers() -> tuple[Any, ...]:
    with contextlib.suppress(AttributeError, ImportError):
        return (tf.keras.mixed_precision.LossScaleOptimizer,)
    return ()


def _owner(frame: FrameType | None, kinds: tuple[type, ...], names: Container[str] | None = None) -> Any:
    """The nearest object of these kinds in whose method (of these names) a frame was called."""
    found = (owner for name, owner in owners(frame) if isinstance(owner, kinds) and (names is None or name in names))
    return next(found, None)


def owners(frame: FrameType | None) -> Iterator[tuple[str, Any]]:
    """Yield the names of the methods around a frame, and whose they are, the nearest first.

    Users' functions are passed by: a look at the variables of a frame keeps them alive until its function returns.
    """
    while frame is not None:
        module = str(frame.f_globals.get("__name__"))
        if module.split(".")[0] in _LIBRARIES or module.startswith("__autograph_generated"):
            yield frame.f_code.co_name, frame.f_locals.get("self")
        frame = frame.f_back


def _frame(frame: FrameType | None, names: set[str], variables: set[str]) -> FrameType | None:
    """The nearest frame of a function of these names that has these variables: users have an allreduce_grads, too."""
    while frame is not None and not (frame.f_code.co_name in names and variables <= set(frame.f_locals)):
        frame = frame.f_back
    return frame
