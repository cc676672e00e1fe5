"""Operators that compress between pipeline stages: methods of gradients, and some others.

A boundary has one sender, so a method works here as in a world of one rank, and there is no second copy of its maths.
The others are from Rudakov et al., Activations and Gradients Compression for Model-Parallel Training, 2024.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

from hvd_compress.core.bucket import Bucket
from hvd_compress.core.collectives import AllGather, AllReduce, Exchange, Exchanging, State, World
from hvd_compress.core.method import Method, check_range
from hvd_compress.engine.spec import MEMORY, OPTIONS, make, nearest, read
from hvd_compress.errors import SpecError
from hvd_compress.methods import REGISTRY
from hvd_compress.methods.sparse import HALF_MAX
from hvd_compress.methods.topk import TopK
from hvd_compress.ops import Ops
from hvd_compress.ops.arrays import Array
from hvd_compress.ops.code import count
from hvd_compress.ops.packing import packed_size


@dataclass(frozen=True, kw_only=True)
class SampleTopK(TopK):
    """Exact top-k by magnitude within each sample, so that none is crowded out by others of its batch.

    Args:
        ratio: Share of the coordinates of a sample that is sent, in (0, 1].
        values: ``"fp32"``, or ``"fp16"`` to send values in 16 bits.
    """

    def select(self, ops: Ops, bucket: Bucket, x: Array, state: State) -> tuple[Array, State]:
        chosen, begin = [], 0
        for sample, size in zip(ops.split(x, bucket.sizes), bucket.sizes, strict=True):
            chosen.append(ops.top_indices(sample, count(self.ratio, size)) + begin)
            begin += size
        return ops.concat(chosen), state


@dataclass(frozen=True)
class MinMax(Method):
    """Uniform quantisation between the least and the largest element, to the nearest level.

    With ``L = 2^bits - 1``::

        q = round(L (x - min x) / (max x - min x))          Q(x) = min x + q (max x - min x) / L

    It is deterministic, so biased. Rounding is half up.

    Args:
        bits: Width of a code, 2 to 8.
    """

    name = "minmax"
    retains = True

    bits: int = 8

    def __post_init__(self) -> None:
        check_range("bits", self.bits, "2 to 8", 2 <= self.bits <= 8)

    def exchange(
        self, ops: Ops, bucket: Bucket, x: Array, state: State, world: World, return_error: bool = False
    ) -> Exchanging:
        ends = ops.extremes(x)
        codes = ops.to_steps(x, ends, self._levels)
        everyone = yield AllGather(ops.to_bytes(ends, ops.pack(codes, self.bits)))
        total = self._decode(ops, bucket, everyone[0])
        for rank in range(1, world.size):
            total = ops.add(total, self._decode(ops, bucket, everyone[rank]))
        error = ops.subtract(x, ops.from_steps(codes, ends, self._levels)) if return_error else None
        return Exchange(total, state, error)

    @property
    def _levels(self) -> int:
        return int(2**self.bits - 1)

    def _decode(self, ops: Ops, bucket: Bucket, data: Array) -> Array:
        size = packed_size(bucket.numel, self.bits)
        ends, packed = ops.from_bytes(data, (bucket.dtype, 2), ("uint8", size))
        return ops.from_steps(ops.unpack(packed, self.bits, bucket.numel), ends, self._levels)


class Mask(NamedTuple):
    """The state of `SharedMask`.

    Attributes:
        indices: Ascending; known to both ends.
    """

    indices: Array


@dataclass(frozen=True)
class SharedMask(Method):
    """Send the gradient where the activation was not zero when it arrived: values alone, without indices.

    Args:
        values: ``"fp32"``, or ``"fp16"`` to send values in 16 bits.
    """

    name = "shared"

    values: str = "fp32"

    def __post_init__(self) -> None:
        check_range("values", self.values, "'fp32' or 'fp16'", self.values in ("fp32", "fp16"))

    def exchange(
        self, ops: Ops, bucket: Bucket, x: Array, state: Mask, world: World, return_error: bool = False
    ) -> Exchanging:
        values = ops.take(x, state.indices)
        if self.values == "fp16":
            values = ops.cast(ops.clip(values, -HALF_MAX, HALF_MAX), "float16")
        summed = ops.cast((yield AllReduce(values)), bucket.dtype)
        return Exchange(ops.put(ops.zeros((bucket.numel,), bucket.dtype), state.indices, summed), state)


OPERATORS: Mapping[str, type[Method]] = {
    **{name: cls for name, cls in REGISTRY.items() if cls.boundary},
    TopK.name: SampleTopK,
    MinMax.name: MinMax,
}
"""Operators by name; gradients may also take ``shared``."""


def operator(spec: str | Method, backward: bool = False) -> Method:
    """Make an operator of a boundary from its spec, such as ``"topk:ratio=0.1"`` or ``"minmax:bits=4"``.

    It has the hyper-parameters of the method alone: what is kept between steps is up to the boundary's ``memory``.

    Args:
        spec: A spec, or the operator itself.
        backward: For gradients, which may go by the mask of the activations: ``"shared"``.

    Raises:
        SpecError: If the name, a parameter or a value is not known or not allowed.
    """
    if isinstance(spec, Method):
        return _checked(spec, backward)
    name, params = read(spec)
    known: dict[str, type[Method]] = {**OPERATORS, **({SharedMask.name: SharedMask} if backward else {})}
    if name not in known:
        raise SpecError(f"{_unknown(name, known)}; there are: {', '.join(known)}")
    for key in params:
        if key in {"feedback", *MEMORY, *OPTIONS} - {"dense"}:
            raise SpecError(f"{key} has no effect in {spec!r} of a boundary: write memory='ef' or memory='ef21' there")
    method = make(known[name], name, params)
    if getattr(method, "twoway", False):
        if "twoway" in params:
            raise SpecError(f"twoway has no effect in {spec!r} of a boundary: nothing comes back")
        method = replace(method, twoway=False)  # type: ignore[type-var]  # methods are dataclasses
    return method


def _checked(method: Method, backward: bool) -> Method:
    """Return an operator that the caller has made itself.

    Raises:
        SpecError: If a boundary does not support it.
    """
    known = {*OPERATORS.values(), *((SharedMask,) if backward else ())}
    if type(method) not in known or getattr(method, "twoway", False):
        raise SpecError(
            f"{method!r} is no operator of a boundary: write a spec such as 'topk:ratio=0.1', or one of the classes of"
            " OPERATORS, with twoway=False where they have that"
        )
    return method


def _unknown(name: str, known: Mapping[str, Any]) -> str:
    if name == SharedMask.name:
        return "'shared' is for gradients: write backward='shared'"
    if name in REGISTRY:
        return f"{name!r} is a way for many ranks to agree on a sum, and a boundary has one sender"
    return f"unknown operator {name!r}{nearest(name, known)}"


def is_sparse(method: Method) -> bool:
    """Return whether an operator leaves most coordinates zero, so that gradients can share its mask."""
    return method.family == "sparse"
