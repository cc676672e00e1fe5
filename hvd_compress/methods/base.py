"""Base of all methods: hyper-parameters, a state, and one exchange written as a generator."""

from __future__ import annotations

import re
from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar, NamedTuple, TypeVar

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


class Example(NamedTuple):
    """A spec of a method, small enough for 1000 coordinates, with what holds for it. The tests run it.

    Attributes:
        spec: With hyper-parameters of the method alone.
        payload: Bytes that each of two ranks hands to collectives in the first step for a float32 matrix of 40 x 25;
            None where that depends on its numbers.
        total: What it is of what the ranks have sent: ``"exact"``, the sum; ``"rounded"``, the sum in 16 bits;
            ``"served"``, the sum compressed by servers that keep the error; ``"lossy"``, less than the sum.
        unbiased: The expectation of the total is the sum.
        gain: How many times the largest magnitude of the gradients the mean may have.
    """

    spec: str
    payload: int | None = None
    total: str = "exact"
    unbiased: bool = False
    gain: float = 1.0


class Method(ABC):
    """A way to sum gradients over ranks. Subclasses are frozen dataclasses whose fields are the hyper-parameters.

    Attributes:
        name: The name in spec strings; empty for wrappers, which spec strings reach by their options.
        family: One of `FAMILIES`, by which lists of methods are sorted, or another one.
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
        boundary: Whether it may compress what pipeline stages send each other, too.
        rotates: Whether coordinates are mixed before they are rounded, so that an error of one reaches others.
        scaleless: The mean is 1 or -1 everywhere, so only its direction can be judged.
        learns: Whether it learns from the gradients of the steps before.
        nonzero: Share of the coordinates that are not zero in the gradients that it is for.
        examples: Specs that the tests run, one for each way to work.
        lossless: Specs with which the total is the exact sum.
        compared: Specs in the table of errors; without any, the name alone.
        claim: What the abstract of the paper states, for the documents.
    """

    name: ClassVar[str] = ""
    family: ClassVar[str] = "other"
    paper: ClassVar[str] = ""
    collective: ClassVar[str] = ""
    keeps: ClassVar[str] = "nothing"
    feedback: ClassVar[bool] = False
    memory: ClassVar[Mapping[str, Any]] = {}
    unbiasedness: ClassVar[str] = "no"
    retains: ClassVar[bool] = False
    linear: ClassVar[bool] = False
    boundary: ClassVar[bool] = False
    rotates: ClassVar[bool] = False
    scaleless: ClassVar[bool] = False
    learns: ClassVar[bool] = False
    nonzero: ClassVar[float] = 1.0
    examples: ClassVar[tuple[Example, ...]] = ()
    lossless: ClassVar[tuple[str, ...]] = ()
    compared: ClassVar[tuple[str, ...]] = ()
    claim: ClassVar[str] = ""

    @property
    def supports_feedback(self) -> bool:
        """True if error feedback is supported with these hyper-parameters."""
        return self.retains

    @property
    def needs_plain_sgd(self) -> bool:
        """Whether the optimizer must have no momentum, as the method has it or could not cope with it."""
        return False

    def compresses(self, shape: Shape) -> bool:
        """Tell whether a gradient of this shape gets smaller at all."""
        del shape
        return True

    @property
    def bound(self) -> float | None:
        """A textbook bound on the expected normalised error of one rank's gradient, whatever it is; None without."""
        return None

    def init(self, ops: Ops, bucket: Bucket, size: int) -> State:
        """Make the state before the first step of ``size`` ranks; equal on all of them."""
        del ops, bucket, size
        return ()

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


def compensate(ops: Ops, method: Method, gradient: Array, state: State) -> Array:
    """Return the input of an exchange: a gradient, which may be overwritten, plus the residual."""
    residual = method.residual(state)
    return gradient if residual is None else ops.add(gradient, residual)


@dataclass(frozen=True)
class Wrapper(Method):
    """A method around another one, whose state has the state of that one as ``inner``.

    It gets the gradient alone, and adds the residual of the method inside itself, unless it hands on `residual`.

    Args:
        inner: The method inside.
    """

    inner: Method

    @property
    def needs_plain_sgd(self) -> bool:
        return self.inner.needs_plain_sgd

    def compresses(self, shape: Shape) -> bool:
        return self.inner.compresses(shape)

    def dense(self, ops: Ops, bucket: Bucket, x: Array, state: State, world: World) -> Exchanging:
        x = compensate(ops, self.inner, x, state.inner)
        exchange = yield from self.inner.dense(ops, bucket, x, state.inner, world)
        return Exchange(exchange.total, state._replace(inner=exchange.state))


FAMILIES = ("dense", "sparse", "quantised", "low-rank", "lossless")

REGISTRY: dict[str, type[Method]] = {}
"""All methods by name, family by family, uncompressed ones first. `register` is the only one to write to it."""

_M = TypeVar("_M", bound=Method)


def register(cls: type[_M]) -> type[_M]:
    """Make a method known by its name: to spec strings, ``Compression``, the command line, documents and tests.

    A decorator, to stand above ``@dataclass(frozen=True)``.

    Raises:
        SpecError: If the class cannot be a method, or its name is that of another one.
    """
    if not re.fullmatch("[a-z][a-z0-9_]*", cls.name) or not vars(cls).get("__dataclass_params__"):
        raise SpecError(
            f"{cls.__qualname__} cannot be registered as {cls.name!r}: a method is a dataclass (@register stands above"
            " @dataclass(frozen=True)) with a name of small letters and digits"
        )
    other = REGISTRY.get(cls.name, cls)
    if (other.__module__, other.__qualname__) != (cls.__module__, cls.__qualname__):
        raise SpecError(f"the name {cls.name!r} is that of {other.__module__}.{other.__qualname__}: take another one")
    REGISTRY[cls.name] = cls
    rank = {family: number for number, family in enumerate(FAMILIES)}
    for name, known in sorted(REGISTRY.items(), key=lambda item: (rank.get(item[1].family, 99), not item[1].linear)):
        del REGISTRY[name]
        REGISTRY[name] = known
    return cls


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
