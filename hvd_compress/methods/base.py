"""What a method is: hyper-parameters, a state, and one exchange written as a generator."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, NamedTuple

from hvd_compress.core.bucket import Bucket, Shape
from hvd_compress.core.collectives import AllReduce, Array, Chosen, Exchange, Exchanging, State, World
from hvd_compress.errors import SpecError
from hvd_compress.ops import Ops


class Counted(NamedTuple):
    """The state of a method that keeps nothing but a count.

    Attributes:
        step: How many exchanges there were; part of its seeds, or whose turn it is.
    """

    step: int | Array


class Method(ABC):
    """A way to sum gradients over ranks. Subclasses are frozen dataclasses whose fields are the hyper-parameters.

    Attributes:
        name: The name in spec strings; empty for wrappers, which spec strings reach by their options.
        paper: Authors, title and year of the source.
        collective: The collectives of one step, for the catalogue.
        keeps: What the state holds between steps, for the catalogue.
        feedback: Whether error feedback is on where the spec does not say.
        memory: Options of the memory, and what they are where the spec does not say.
        unbiasedness: Whether the expectation of the total is the sum, for the catalogue: ``"yes"``, ``"exact"``,
            ``"no"``, or with which parameters; error feedback aside.
        retains: Whether `exchange` can keep what it does not send, and no more is sent than there was.
        linear: The exchange is one sum-allreduce of a linear, stateless image of the gradient. Horovod may then scale
            that sum itself, so the payload can travel as the gradient's own allreduce.
    """

    name: ClassVar[str] = ""
    paper: ClassVar[str] = ""
    collective: ClassVar[str] = ""
    keeps: ClassVar[str] = "nothing"
    feedback: ClassVar[bool] = False
    memory: ClassVar[Mapping[str, Any]] = {}
    unbiasedness: ClassVar[str] = "no"
    retains: ClassVar[bool] = False
    linear: ClassVar[bool] = False

    @property
    def supports_feedback(self) -> bool:
        """Whether error feedback is possible, with these hyper-parameters."""
        return self.retains

    @property
    def needs_plain_sgd(self) -> bool:
        """Whether the optimizer must have no momentum, as the method has it or could not cope with it."""
        return False

    @property
    def core(self) -> Method:
        """The method without the wrappers that choose tensors; itself for all others."""
        return self

    def compresses(self, shape: Shape) -> bool:
        """Tell whether a gradient of this shape gets smaller at all."""
        del shape
        return True

    def route(self, name: str, shape: Shape) -> Method:
        """Give the method that carries the gradient of this name and shape."""
        del name, shape
        return self

    def init(self, ops: Ops, bucket: Bucket, size: int) -> State:
        """Make the state before the first step of ``size`` ranks; equal on all of them."""
        del ops, bucket, size
        return ()

    def pieces(self, bucket: Bucket) -> Mapping[str, Sequence[int]]:
        """Say how leaves of the state are made of pieces, one for each gradient, so that buckets can be cut anew.

        Returns:
            The lengths of the pieces by the names of the leaves (see `hvd_compress.state.flatten`). Vectors over the
            bucket, whose pieces are as long as the gradients, need not be named.
        """
        del bucket
        return {}

    @abstractmethod
    def exchange(
        self, ops: Ops, bucket: Bucket, x: Array, state: State, world: World, keep: bool = False
    ) -> Exchanging:
        """Sum ``x`` over the ranks.

        Args:
            ops: The primitives of the framework that ``x`` belongs to.
            bucket: What ``x`` is made of.
            x: The gradient plus the `residual`, if there is one: shape ``(bucket.numel,)``, dtype ``bucket.dtype``,
                finite. May be overwritten.
            state: From `init` or from the previous step; never overwritten.
            world: The ranks that take part.
            keep: Return ``left``, too, in the place of ``x`` where that saves memory. Only methods with `retains` can.

        Yields:
            The collectives that it needs; it is resumed with their results.

        Returns:
            The sum, the next state, and what of ``x`` this rank did not send.
        """

    def residual(self, state: State) -> Array | None:
        """Return the vector to add to a gradient before its exchange; None if there is none."""
        del state
        return None

    def dense(self, ops: Ops, bucket: Bucket, x: Array, state: State, world: World) -> Exchanging:
        """Sum ``x``, and all that is kept, without compression; as `exchange` in all else."""
        total = yield AllReduce(x)
        return Exchange(total, state)


@dataclass(frozen=True)
class Wrapper(Method):
    """A method around another one, whose state has the state of that one as ``inner``.

    Args:
        inner: The method inside.
    """

    inner: Method

    @property
    def needs_plain_sgd(self) -> bool:
        return self.inner.needs_plain_sgd

    def compresses(self, shape: Shape) -> bool:
        return self.inner.compresses(shape)

    def pieces(self, bucket: Bucket) -> Mapping[str, Sequence[int]]:
        return {f"inner.{path}": lengths for path, lengths in self.inner.pieces(bucket).items()}

    def dense(self, ops: Ops, bucket: Bucket, x: Array, state: State, world: World) -> Exchanging:
        exchange = yield from self.inner.dense(ops, bucket, x, state.inner, world)
        return Exchange(exchange.total, state._replace(inner=exchange.state))


def compensated(ops: Ops, method: Method, gradient: Array, state: State) -> Array:
    """Return the input of an exchange: a gradient, which may be overwritten, plus the residual."""
    residual = method.residual(state)
    return gradient if residual is None else ops.add(gradient, residual)


def check_range(name: str, value: float | str, allowed: str, ok: bool) -> None:
    """Refuse a hyper-parameter that is out of its range.

    Raises:
        SpecError: If ``ok`` is false; the message names the parameter, the value and what is allowed.
    """
    if not ok:
        raise SpecError(f"{name}={value!r} is not allowed: {name} must be {allowed}")


def rows_of(ops: Ops, x: Array, width: int) -> Array:
    """Cut a vector into rows of equal length, the last one filled up with zeros: shape ``(rows, width)``."""
    rows = -(-int(x.shape[0]) // width)
    return ops.reshape(ops.pad(x, rows * width), (rows, width))


def clear(ops: Ops, x: Array, chosen: Chosen) -> Array:
    """Zero a vector, which may be overwritten, at the chosen coordinates."""
    if chosen.width == 1:
        return ops.put(x, chosen.rows, 0.0)
    return ops.reshape(ops.put(rows_of(ops, x, chosen.width), chosen.rows, 0.0), (-1,))[: int(x.shape[0])]


def count(ratio: float, numel: int) -> int:
    """How many of ``numel`` coordinates a ratio keeps: at least one, rounded to the nearest."""
    return min(numel, max(1, round(ratio * numel)))
