"""Base class of all methods: hyper-parameters, a state, and an exchange written as a generator."""

from __future__ import annotations

import re
from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import Any, ClassVar, NamedTuple, TypeVar

from hvd_compress.core.bucket import Bucket
from hvd_compress.core.collectives import AllReduce, Exchange, Exchanging, SentIndices, State, UnsentMask, World
from hvd_compress.errors import SpecError, UnsupportedError, short
from hvd_compress.ops import Ops
from hvd_compress.ops.arrays import Array, Shape


class Counted(NamedTuple):
    """State of a method that counts its exchanges only.

    Attributes:
        step: Number of exchanges so far; part of its random seeds, or selects the leading rank.
    """

    step: int


class Example(NamedTuple):
    """Spec of a method for 1000 coordinates, with its expected properties. The tests run it.

    Attributes:
        spec: Spec string with the method's own hyper-parameters only.
        payload: Bytes that each of two ranks passes to collectives in the first step for a float32 matrix of 40 x 25;
            None if that depends on its values.
        total: Relation of the total to the sum of what the ranks sent: ``"exact"``, equal; ``"rounded"``, rounded to 16
            bits; ``"served"``, compressed by servers that keep the error; ``"lossy"``, compressed without;
            ``"senders"``, the mean over the ranks that sent a coordinate, times the number of ranks.
        unbiased: Whether the expectation of the total is the sum.
        gain: Upper bound on the magnitude of the mean, as a multiple of the largest magnitude of the gradients.
    """

    spec: str
    payload: int | None = None
    total: str = "exact"
    unbiased: bool = False
    gain: float = 1.0


class Card(NamedTuple):
    """Facts about a method from which lists, documents and tests are made.

    Attributes:
        paper: Authors, title and year of the source.
        collective: Collectives of one step.
        keeps: State between steps.
        unbiased: Whether the expectation of the total is the sum: ``"yes"``, ``"exact"``, ``"no"``, or the parameters
            that make it so; without error feedback.
        claim: Claim of the paper's abstract.
        examples: Specs that the tests run, one per mode of operation.
        lossless: Specs whose total is the exact sum.
        compared: Specs in the table of errors; if empty, the name alone.
        rotates: Whether it mixes coordinates before rounding, so that the error of one reaches others.
        learns: Whether it adapts to the gradients of previous steps.
        nonzero: Share of nonzero coordinates in the gradients that it is made for.
    """

    paper: str = ""
    collective: str = ""
    keeps: str = "nothing"
    unbiased: str = "no"
    claim: str = ""
    examples: tuple[Example, ...] = ()
    lossless: tuple[str, ...] = ()
    compared: tuple[str, ...] = ()
    rotates: bool = False
    learns: bool = False
    nonzero: float = 1.0


class Method(ABC):
    """Method to sum gradients over ranks. Subclasses are frozen dataclasses whose fields are the hyper-parameters.

    Attributes:
        name: Name in spec strings; empty for wrappers, which spec strings select by options.
        family: Family by which lists of methods are sorted: one of `FAMILIES`, or another one.
        card: Facts for lists, documents and tests, which no exchange reads.
        feedback: Whether error feedback is on by default.
        memory: Defaults of error feedback and momentum options that differ from the common ones.
        retains: Whether error feedback is possible: `exchange` can return what it did not send, and never sends more
            than the input.
        lags: Whether error feedback sends most of a gradient in later steps, which acts as a momentum.
        linear: Whether the exchange is one sum-allreduce of a linear, stateless function of the gradient. Horovod may
            then scale that sum itself, so the payload is the gradient's own allreduce.
        boundary: Whether it can also compress messages between pipeline stages.
        matrixwise: Whether it approximates matrices, so that a part of a bucket should consist of such.
        scaleless: Whether the mean is 1 or -1 everywhere, so that only its direction can be compared.
    """

    name: ClassVar[str] = ""
    family: ClassVar[str] = "other"
    card: ClassVar[Card] = Card()
    feedback: ClassVar[bool] = False
    memory: ClassVar[Mapping[str, Any]] = {}
    retains: ClassVar[bool] = False
    lags: ClassVar[bool] = False
    linear: ClassVar[bool] = False
    boundary: ClassVar[bool] = False
    matrixwise: ClassVar[bool] = False
    scaleless: ClassVar[bool] = False

    def __str__(self) -> str:
        """Return the method as in spec strings, without the options of wrappers."""
        own = [(one.name, getattr(self, one.name), one.default) for one in fields(self)]  # type: ignore[arg-type]
        changed = [f"{key}={written(value)}" for key, value, default in own if value != default]
        return ":".join(filter(None, [self.name, ",".join(changed)]))

    @property
    def supports_feedback(self) -> bool:
        """Whether error feedback is supported with these hyper-parameters."""
        return self.retains

    @property
    def sums(self) -> bool:
        """Whether the total is the sum over the ranks of what they sent, as `EF21` requires."""
        return True

    @property
    def needs_plain_sgd(self) -> bool:
        """Whether the optimizer must be without momentum: the method has its own, or does not support any."""
        return False

    @property
    def adds_momentum(self) -> bool:
        """Whether it has error feedback that `lags`, so that Adam's own momentum costs loss."""
        return False

    @property
    def preconditioned(self) -> bool:
        """Whether the method returns parameter updates instead of gradients; SGD applies them."""
        return False

    @property
    def merges(self) -> bool:
        """Whether ``merge`` may split the gradients of this method into several buckets."""
        return not self.linear

    @property
    def hierarchical(self) -> bool:
        """Whether it communicates within nodes and between nodes in different ways."""
        return False

    def compresses(self, shape: Shape) -> bool:
        """Return whether compression makes a gradient of this shape smaller."""
        del shape
        return True

    @property
    def too_small(self) -> str:
        """Why a gradient is one that it does not compress, as advice on options."""
        return "compression would not make them smaller"

    @property
    def bound(self) -> float | None:
        """Theoretical bound on the expected normalised error of any one gradient; None if there is none."""
        return None

    def init(self, ops: Ops, bucket: Bucket, world: World) -> State:
        """Return the initial state of a rank; equal on all of them, unless it keeps what only this rank needs."""
        del ops, bucket, world
        return ()

    @abstractmethod
    def exchange(
        self, ops: Ops, bucket: Bucket, x: Array, state: State, world: World, return_error: bool = False
    ) -> Exchanging:
        """Sum ``x`` over the ranks.

        Args:
            ops: Primitives of the framework that ``x`` belongs to.
            bucket: Shapes and dtype of the gradients in ``x``.
            x: The gradient plus the `residual`, if any: shape ``(bucket.numel,)``, dtype ``bucket.dtype``, finite. May
                be overwritten.
            state: State from `init` or from the previous step; never overwritten.
            world: The ranks that take part.
            return_error: Also return the error, possibly in the memory of ``x``. Requires `retains`.

        Yields:
            Collectives; it is resumed with their results.

        Returns:
            The sum, the next state, and the part of ``x`` that this rank did not send.
        """

    @property
    def supports_reduce_scatter(self) -> bool:
        """Whether `reduce_scatter` is supported with these hyper-parameters."""
        return type(self).reduce_scatter is not Method.reduce_scatter

    def reduce_scatter(
        self, ops: Ops, bucket: Bucket, x: Array, state: State, world: World, return_error: bool = False
    ) -> Exchanging:
        """Sum ``x`` over the ranks, and return this rank's part of the sum only.

        Otherwise like `exchange`. The number of ranks divides ``bucket.numel``, and the total of rank r is part r.

        Raises:
            UnsupportedError: If the method does not support it.
        """
        raise UnsupportedError(f"{self} has no reduce-scatter: its payload cannot be split by ranks")

    def residual(self, state: State) -> Array | None:
        """Return the vector to add to the gradient before `exchange`; None if there is none."""
        del state
        return None

    def dense(self, ops: Ops, bucket: Bucket, x: Array, state: State, world: World) -> Exchanging:
        """Sum ``x`` and everything kept back without compression; otherwise like `exchange`."""
        x, state = self.flush(ops, bucket, x, state, world)
        total = yield AllReduce(x, donate=True)
        return Exchange(total, state)

    def flush(self, ops: Ops, bucket: Bucket, x: Array, state: State, world: World) -> tuple[Array, State]:
        """Add what a bare method itself keeps back, such as the errors of servers; may overwrite ``x``.

        Returns:
            The sum, and the state without what was kept back.
        """
        del ops, bucket, world
        return x, state


def compensate(ops: Ops, method: Method, gradient: Array, state: State) -> Array:
    """Return the input of an exchange: a gradient, which may be overwritten, plus the residual."""
    residual = method.residual(state)
    return gradient if residual is None else ops.add(gradient, residual)


@dataclass(frozen=True)
class Wrapper(Method):
    """Method that wraps another one, whose state it holds as ``inner``.

    Its input is the gradient without the inner residual, which it adds itself, unless it returns it from `residual`.

    Args:
        inner: The wrapped method.
    """

    inner: Method

    def __str__(self) -> str:
        return str(self.inner)

    @property
    def sums(self) -> bool:
        return self.inner.sums

    @property
    def needs_plain_sgd(self) -> bool:
        return self.inner.needs_plain_sgd

    @property
    def adds_momentum(self) -> bool:
        return self.inner.adds_momentum

    @property
    def preconditioned(self) -> bool:
        return self.inner.preconditioned

    @property
    def hierarchical(self) -> bool:
        return self.inner.hierarchical

    def compresses(self, shape: Shape) -> bool:
        return self.inner.compresses(shape)

    @property
    def too_small(self) -> str:
        return self.inner.too_small

    def dense(self, ops: Ops, bucket: Bucket, x: Array, state: State, world: World) -> Exchanging:
        x = compensate(ops, self.inner, x, state.inner)
        exchange = yield from self.inner.dense(ops, bucket, x, state.inner, world)
        return Exchange(exchange.total, state._replace(inner=exchange.state))


@dataclass(frozen=True)
class ReduceScattered(Wrapper):
    """Exchange by `Method.reduce_scatter`: the total is this rank's part of the sum.

    Raises:
        UnsupportedError: If the wrapped method does not support it.
    """

    def __post_init__(self) -> None:
        if not self.inner.supports_reduce_scatter:
            fitting = ", ".join(
                name for name, cls in REGISTRY.items() if cls.reduce_scatter is not Method.reduce_scatter
            )
            raise UnsupportedError(
                f"{self.inner} cannot reduce-scatter, as its payload or that of an option such as start= cannot be"
                f" split by ranks: take one of {fitting}, without such options; all methods work between the replicas"
                " of a mesh for replicas and shards (HSDP)"
            )

    def init(self, ops: Ops, bucket: Bucket, world: World) -> State:
        return self.inner.init(ops, bucket, world)

    def residual(self, state: State) -> Array | None:
        return self.inner.residual(state)

    def exchange(
        self, ops: Ops, bucket: Bucket, x: Array, state: State, world: World, return_error: bool = False
    ) -> Exchanging:
        return self.inner.reduce_scatter(ops, bucket, x, state, world, return_error)


FAMILIES = ("dense", "sparse", "quantised", "low-rank", "lossless")

REGISTRY: dict[str, type[Method]] = {}
"""All methods by name, sorted by family, dense ones first. Only `register` changes it."""

_M = TypeVar("_M", bound=Method)


def register(cls: type[_M]) -> type[_M]:
    """Register a method by its name for spec strings, ``Compression``, the command line, documentation and tests.

    Use it as a decorator above ``@dataclass(frozen=True)``.

    Raises:
        SpecError: If the class is not a dataclass, or its name is invalid or taken.
    """
    if not re.fullmatch("[a-z][a-z0-9_]*", cls.name) or not vars(cls).get("__dataclass_params__"):
        raise SpecError(
            f"{cls.__qualname__} cannot be registered as {cls.name!r}: a method must be a dataclass (put @register"
            " above @dataclass(frozen=True)) and its name must have lower-case letters, digits and underscores only"
        )
    other = REGISTRY.get(cls.name, cls)
    if (other.__module__, other.__qualname__) != (cls.__module__, cls.__qualname__):
        raise SpecError(f"the name {cls.name!r} is taken by {other.__module__}.{other.__qualname__}: choose another")
    REGISTRY[cls.name] = cls
    rank = {family: number for number, family in enumerate(FAMILIES)}
    for name, known in sorted(REGISTRY.items(), key=lambda item: (rank.get(item[1].family, 99), not item[1].linear)):
        del REGISTRY[name]
        REGISTRY[name] = known
    return cls


def check_range(name: str, value: float | str, allowed: str, ok: bool) -> None:
    """Validate a hyper-parameter.

    Raises:
        SpecError: If ``ok`` is false; the message names the parameter, its value and the allowed values.
    """
    if not ok:
        raise SpecError(f"{name}={short(value)} is not allowed: {name} must be {allowed}")


LARGEST_BLOCK = 2**24
"""Largest number of coordinates that share a scale; larger blocks would be padded to much memory."""

MOST_STEPS = 2**31 - 1
"""Largest number of steps of an option."""


def check_whole(name: str, value: int, least: int, most: int) -> None:
    """Validate a whole number; see `check_range`."""
    check_range(name, value, f"in {least} .. {most}", least <= value <= most)


def written(value: object) -> str:
    """Return the value of a hyper-parameter as in spec strings."""
    return ("on" if value else "off") if isinstance(value, bool) else str(value)


def rows_of(ops: Ops, x: Array, width: int) -> Array:
    """Reshape a vector to ``(rows, width)``, with the last row padded with zeros."""
    rows = -(-int(x.shape[0]) // width)
    return ops.reshape(ops.pad(x, rows * width), (rows, width))


def clear(ops: Ops, x: Array, sent: SentIndices | UnsentMask) -> Array:
    """Set a vector, which may be overwritten, to zero at the coordinates that were sent."""
    if isinstance(sent, UnsentMask):
        return x * ops.cast(sent.mask, ops.dtype(x))
    if sent.width == 1:
        return ops.put(x, sent.rows, 0.0)
    return ops.reshape(ops.put(rows_of(ops, x, sent.width), sent.rows, 0.0), (-1,))[: int(x.shape[0])]
