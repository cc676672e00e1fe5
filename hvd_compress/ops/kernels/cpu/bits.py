"""Bit operations that numba lacks."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeAlias

import numpy as np
from llvmlite import ir
from numba import types
from numba.extending import intrinsic

Found: TypeAlias = tuple[Any, Any]
"""Result of an intrinsic: its signature, and the function that emits its instructions."""

MAGNITUDE = np.uint32(0x7FFFFFFF)
"""The bits of a float32 without its sign; those of magnitudes are in the order of the magnitudes."""

_CHUNK = 64


def instruction(function: Callable[..., Found]) -> Any:
    """Let loops use what a function gives the instructions for."""
    return intrinsic(function)


@instruction
def bits_of(typing: Any, x: Any) -> Found:
    """The bits of a float32: uint32."""
    return types.uint32(types.float32), _reread


@instruction
def float_of(typing: Any, x: Any) -> Found:
    """The float32 with these bits."""
    return types.float32(types.uint32), _reread


@instruction
def bits_of_double(typing: Any, x: Any) -> Found:
    """The bits of a float64: uint64."""
    return types.uint64(types.float64), _reread


@instruction
def double_of(typing: Any, x: Any) -> Found:
    """The float64 with these bits."""
    return types.float64(types.uint64), _reread


def _reread(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
    return builder.bitcast(arguments[0], context.get_value_type(signature.return_type))


@instruction
def floor(typing: Any, x: Any) -> Found:
    """The next whole float32 below."""

    def write(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        function = builder.module.declare_intrinsic("llvm.floor", [ir.FloatType()])
        return builder.call(function, arguments)

    return types.float32(types.float32), write


@instruction
def fused(typing: Any, x: Any, y: Any, z: Any) -> Found:
    """``x * y + z`` of float32, rounded once."""

    def write(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        return builder.fma(*arguments)

    return types.float32(types.float32, types.float32, types.float32), write


@instruction
def lowest_bit(typing: Any, x: Any) -> Found:
    """The place of the lowest bit of a uint64 that is set: int64."""

    def write(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        return builder.cttz(arguments[0], ir.Constant(ir.IntType(1), 1))

    return types.int64(types.uint64), write


@instruction
def large_among(typing: Any, x: Any, start: Any, threshold: Any) -> Found:
    """Return a uint64 whose bits say which of the 64 magnitudes from ``x[start]`` on reach a threshold."""

    def write(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        array = context.make_array(signature.args[0])(context, builder, arguments[0])
        words = ir.VectorType(ir.IntType(32), _CHUNK)
        place = builder.bitcast(builder.gep(array.data, [arguments[1]]), words.as_pointer())
        loaded = builder.load(place)
        loaded.align = 4
        zero = ir.Constant(ir.IntType(32), 0)
        single = builder.insert_element(ir.Constant(words, ir.Undefined), arguments[2], zero)
        limit = builder.shuffle_vector(single, ir.Constant(words, ir.Undefined), ir.Constant(words, [0] * _CHUNK))
        magnitudes = builder.and_(loaded, ir.Constant(words, [int(MAGNITUDE)] * _CHUNK))
        return builder.bitcast(builder.icmp_unsigned(">=", magnitudes, limit), ir.IntType(64))

    return types.uint64(x, types.int64, types.uint32), write


@instruction
def pointer_to(typing: Any, address: Any) -> Found:
    """The pointer with this number."""

    def write(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        return builder.inttoptr(arguments[0], ir.IntType(8).as_pointer())

    return types.voidptr(address), write
