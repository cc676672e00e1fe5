"""Natural compression: stochastic rounding to powers of two."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from hvd_compress.collectives import Array
from hvd_compress.methods.base import check_range
from hvd_compress.methods.quantised import Quantised
from hvd_compress.ops import Ops

_RANGE = 127
"""Exponents that fit a code; 0 stands for zero."""


@dataclass(frozen=True, kw_only=True)
class Natural(Quantised):
    """Keep the sign and the exponent (section 2 of the paper), in 8 bits.

    With ``2^a <= |x| < 2^(a+1)`` and u uniform in [0, 1)::

        C(x) = sgn(x) 2^(a+1)  if u < |x| / 2^a - 1,  else  sgn(x) 2^a          E[C(x)] = x,  E[C(x)^2] <= 9/8 x^2

    The paper's code takes 9 bits, as exponents of float32 do. Here 7 bits tell how far the exponent is below the
    largest of all, which one more byte tells: what is smaller than 2^-125 of the largest becomes zero.

    Args:
        seed: Start of the random sequence.
        twoway: Compress what comes back, too.
    """

    name = "natural"
    paper = "Horvath et al., Natural Compression for Distributed Deep Learning, 2019"
    keeps = "step count"
    unbiasedness = "yes"

    seed: int = 0

    def __post_init__(self) -> None:
        check_range("seed", self.seed, "in 0 .. 2**32-1", 0 <= self.seed < 2**32)

    def encode(self, ops: Ops, x: Array, seed: Any) -> Array:
        n = int(x.shape[0])
        bits = ops.bitcast(ops.cast(ops.abs(x), "float32"), "int32")  # exponent and mantissa, as there is no sign
        exponents, mantissas = bits // 2**23, ops.cast(bits % 2**23, "float32")
        up = ops.cast(ops.uniform(seed, n) * 2**23 < mantissas, "int32")
        rounded = ops.clip(ops.where(exponents > 0, exponents + up, 0), 0, 254)
        top = ops.reshape(ops.cast(ops.absmax(ops.cast(rounded, "float32")), "int32"), (1,))
        codes = ops.clip(rounded - top + _RANGE, 0, _RANGE) + ops.cast(x < 0, "int32") * 128
        return ops.to_bytes(ops.cast(top, "uint8"), ops.cast(codes, "uint8"))

    def decode(self, ops: Ops, data: Array, n: int, dtype: str) -> Array:
        top, codes = (ops.cast(part, "int32") for part in ops.from_bytes(data, ("uint8", 1), ("uint8", n)))
        below = codes % 128
        exponents = ops.clip(below + top - _RANGE, 0, 254)
        magnitude = ops.bitcast(exponents * 2**23, "float32")
        signed = ops.where(codes >= 128, -magnitude, magnitude)
        return ops.cast(ops.where(below > 0, signed, ops.zeros((), "float32")), dtype)
