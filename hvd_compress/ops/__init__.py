"""Array primitives that methods are written in.

`Ops` is their interface, and `hvd_compress.ops.numpy` the reference implementation. The PyTorch and the TensorFlow
implementations must agree with it, and integer and random primitives bit for bit. Methods also use the operators
``+ - * / // % @`` and comparisons, which mean the same in all three frameworks.

Dtypes are given by name (``"float32"``). *Indices* are int64.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, Protocol

import numpy.typing as npt

from hvd_compress.ops.arrays import Array, Shape

if TYPE_CHECKING:
    from hvd_compress.ops.code import Code
    from hvd_compress.ops.moments import Sides
    from hvd_compress.ops.sketch import Sketch


class Ops(Protocol):
    """Interface of the primitives of one framework and device."""

    name: str

    def dtype(self, x: Array) -> str:
        """Return the name of the dtype of ``x``."""

    def cast(self, x: Array, dtype: str) -> Array:
        """Convert the dtype; float to integer truncates, to a narrower float rounds to nearest even."""

    def constant(self, values: npt.NDArray[Any]) -> Array:
        """Copy a numpy array to the framework and device."""

    def zeros(self, shape: Shape, dtype: str) -> Array:
        """Return an array of zeros."""

    def arange(self, n: int) -> Array:
        """Return the indices ``0 .. n-1``."""

    def reshape(self, x: Array, shape: Shape) -> Array:
        """Change the shape, in row-major order; one entry may be -1."""

    def concat(self, parts: Sequence[Array]) -> Array:
        """Concatenate one-dimensional arrays."""

    def stack(self, parts: Sequence[Array]) -> Array:
        """Stack arrays of shape (a, b) to shape (a, number of arrays, b)."""

    def split(self, x: Array, sizes: Sequence[int]) -> list[Array]:
        """Split a one-dimensional array into parts of the given lengths."""

    def pad(self, x: Array, n: int) -> Array:
        """Pad a one-dimensional array with zeros to ``n`` elements; return it unchanged if it has ``n``."""

    def abs(self, x: Array) -> Array:
        """Return magnitudes."""

    def sqrt(self, x: Array) -> Array:
        """Return square roots."""

    def log(self, x: Array) -> Array:
        """Return natural logarithms."""

    def lgamma(self, x: Array) -> Array:
        """Return the logarithm of the gamma function of positive numbers."""

    def floor(self, x: Array) -> Array:
        """Round down to integers, in the same dtype."""

    def clip(self, x: Array, low: float, high: float) -> Array:
        """Clip to ``low .. high``."""

    def where(self, condition: Array, a: Array, b: Array) -> Array:
        """Return ``a`` where the condition holds, else ``b``; broadcasts."""

    def sum(self, x: Array) -> Array:
        """Sum along the last axis."""

    def absmax(self, x: Array) -> Array:
        """Return the largest magnitude along the last axis."""

    def extremes(self, x: Array) -> Array:
        """Return minimum and maximum of a one-dimensional array: shape (2,)."""

    def sum_squares(self, x: Array) -> Array:
        """Sum the squares of all elements: a float64 scalar."""

    def is_finite(self, x: Array) -> Array:
        """Return whether each element is neither inf nor nan."""

    def transpose(self, x: Array) -> Array:
        """Swap the two axes."""

    def orthogonalise(self, x: Array) -> Array:
        """Return orthonormal columns that span those of ``x``, shape (n, r) with r <= n; ``x`` may have any rank."""

    def top_indices(self, x: Array, k: int) -> Array:
        """Return the ascending indices of the ``k`` largest magnitudes of the last axis; ties go to the lower index."""

    def kth_magnitude(self, x: Array, k: int) -> Array:
        """Return the k-th largest magnitude, a scalar; k counts from 1."""

    def nonzero(self, condition: Array) -> Array:
        """Return the ascending indices at which a one-dimensional condition holds."""

    def histogram(self, x: Array, n: int) -> Array:
        """Count the occurrences of each of ``0 .. n-1`` in an array of indices: int32."""

    def repeat(self, x: Array, counts: Array) -> Array:
        """Repeat each element ``counts`` times."""

    def take(self, x: Array, indices: Array) -> Array:
        """Gather the elements at indices, or the rows of a matrix."""

    def put(self, x: Array, indices: Array, values: Array) -> Array:
        """Return ``x`` with elements or rows at unique indices replaced; may overwrite ``x``."""

    def only(self, x: Array, start: int, values: Array) -> Array:
        """Return an array as ``x`` that has ``values`` from ``start`` on and zeros elsewhere; may overwrite ``x``."""

    def add_at(self, x: Array, indices: Array, values: Array) -> Array:
        """Return ``x`` with values added at unique indices; may overwrite ``x``."""

    def bitcast(self, x: Array, dtype: str) -> Array:
        """Reinterpret the bits as another dtype of equal width."""

    def to_bfloat16(self, x: Array) -> Array:
        """Round float32 to the nearest bfloat16, returned as the uint16 with its bits."""

    def from_bfloat16(self, x: Array) -> Array:
        """Undo `to_bfloat16`: float32."""

    def to_bytes(self, *parts: Array) -> Array:
        """Concatenate the bytes of one-dimensional arrays, little-endian: uint8."""

    def from_bytes(self, data: Array, *parts: tuple[str, Any]) -> list[Array]:
        """Undo `to_bytes`, given the dtype and the length of each part; lengths are ints.

        Raises:
            ExchangeError: As in `check`, if the number of bytes is wrong.
        """

    def check(self, x: Array, ok: Any, message: str) -> Array:
        """Return ``x`` if a condition holds for all elements; used for everything that other ranks send.

        Use the returned array: operations on ``x`` itself are not guarded.

        Raises:
            ExchangeError: If the condition does not hold. On an accelerator it is an assertion of the device, with the
                same message.
        """

    def seed(self, *parts: int) -> int:
        """Mix ints into one 32-bit seed."""
        return mix_seed(*parts)

    def uniform(self, seed: Any, n: int) -> Array:
        """Return ``n`` float32 numbers in [0, 1); number i is a hash of (seed, i), on any device or rank."""

    def below(self, seed: Any, bounds: Array) -> Array:
        """Return a uniform integer in ``0 .. bounds[i]-1`` for each i, by the same hash; bounds < 2**31."""

    # Compositions of the above (see `hvd_compress.ops.reference`) that deserve kernels of their own.

    def add(self, x: Array, y: Array) -> Array:
        """Return ``x + y``; may overwrite ``x``."""

    def subtract(self, x: Array, y: Array) -> Array:
        """Return ``x - y``; may overwrite ``x``."""

    def scale(self, x: Array, factor: float) -> Array:
        """Return ``x * factor``; may overwrite ``x``."""

    def blend(self, x: Array, y: Array, share: float) -> Array:
        """Return ``x * share + y * (1 - share)``; may overwrite ``y``."""

    def majority(self, count: Array, seed: Any, size: float) -> Array:
        """Return ``size`` for counts above zero, ``-size`` for those below, and either at random for zero."""

    def project(self, x: Array, right: Array) -> Array:
        """Return ``x @ right`` for a thin ``right``."""

    def project_back(self, x: Array, left: Array) -> Array:
        """Return ``x.T @ left`` for a thin ``left``."""

    def quantise(self, x: Array, code: Code, seed: Any = 0, return_error: bool = False) -> tuple[Array, Array | None]:
        """Encode an array.

        Args:
            x: Shape ``(n,)``; may be overwritten if ``return_error`` is set.
            code: The code.
            seed: Seed of the dither, or of the sign of zeros.
            return_error: Return the error too.

        Returns:
            ``code.size(n, dtype)`` bytes (uint8), and, with ``return_error``, ``x`` minus its decoded value.
        """

    def quantise_parts(
        self, x: Array, parts: int, code: Code, seed: Any = 0, return_error: bool = False
    ) -> tuple[Array, Array | None]:
        """Encode parts of equal length, each with its own seed; see `quantise`.

        The last part is padded with zeros. The bytes have shape ``(parts, size)``, the error that of ``x``.
        """

    def dequantise(self, rows: Array, code: Code, n: int, dtype: str, join: bool = False) -> Array:
        """Decode several arrays, and sum them.

        Args:
            rows: uint8, one row per array.
            code: The code.
            n: Coordinates per array.
            dtype: Dtype of the arrays.
            join: Concatenate them instead: shape ``(rows * n,)``.

        Raises:
            ExchangeError: As in `check`, if the rows have the wrong length.
        """

    def pack(self, codes: Array, bits: int) -> Array:
        """Pack codes in the layout of `hvd_compress.ops.packing`.

        Args:
            codes: uint8, shape ``(n,)``, each below ``2**bits``.
            bits: 1 to 8.

        Returns:
            uint8, shape ``(packed_size(n, bits),)``.
        """

    def unpack(self, data: Array, bits: int, n: int) -> Array:
        """Undo `pack`: return the ``n`` codes, uint8.

        Raises:
            ExchangeError: As in `check`, if the number of bytes is wrong.
        """

    def saturating_sum(self, rows: Array, bits: int, zero: int, size: int) -> Array:
        """Sum the codes of all rows, clip the sums to the range of a code, and pack them again.

        Args:
            rows: Packed codes, one row per array.
            bits: 1, 2, 4 or 8, so that each byte holds whole codes.
            zero: Code of the integer 0: code c encodes ``c - zero``.
            size: Bytes per row.

        Returns:
            uint8, shape ``(size,)``.

        Raises:
            ExchangeError: As in `check`, if the rows have the wrong length.
        """

    def to_steps(self, x: Array, ends: Array, top: int) -> Array:
        """Round to the nearest of ``top + 1`` even steps between two numbers: uint8, shape of ``x``. Halves round up.

        Args:
            x: Shape ``(n,)``.
            ends: Its `extremes`.
            top: Number of the last step, 1 to 255.
        """

    def from_steps(self, codes: Array, ends: Array, top: int) -> Array:
        """Undo `to_steps` up to rounding: dtype of ``ends``."""

    def to_lanes(self, rows: Array, limits: Array, top: int, width: int, seed: Any) -> Array:
        """Round stochastically to integers in ``-top .. top``, and pack them for sums.

        Args:
            rows: Shape (rows, columns).
            limits: Magnitude that ``top`` encodes, per row or for all: shape (rows,) or (1,).
            top: Largest integer.
            width: Bits of a lane; see `hvd_compress.ops.lanes`.
            seed: Seed of the dither.

        Returns:
            int32, shape ``(ceil(rows * columns / lanes),)``.
        """

    def from_lanes(self, packed: Array, limits: Array, top: int, width: int, rows: int, columns: int) -> Array:
        """Undo `to_lanes`, also for a sum: shape (rows, columns), dtype of ``limits``."""

    def rotate(self, x: Array, seed: Any, block: int) -> Array:
        """Multiply by random signs, then multiply each block by the normalised Hadamard matrix.

        Args:
            x: Shape ``(n,)``; padded with zeros to whole blocks.
            seed: Seed of the signs: +1 where `uniform` is below 1/2, else -1.
            block: Coordinates per block, a power of two.

        Returns:
            Shape (blocks, block).
        """

    def unrotate(self, rows: Array, seed: Any) -> Array:
        """Undo `rotate`: one-dimensional, including the padding. May overwrite ``rows``."""

    def norms(self, rows: Array) -> Array:
        """Return L2 norms along the last axis of a matrix, without overflow of the squares."""

    def above(self, x: Array, threshold: Any) -> Array:
        """Return the ascending indices of magnitudes that are at least a threshold."""

    def scatter_sum(self, n: int, dtype: str, pieces: Sequence[tuple[Array, Array]]) -> Array:
        """Return a vector of ``n`` zeros with the values of each piece added at its indices, piece by piece.

        Indices are unique within a piece.
        """

    def ascending(self, indices: Array, n: int) -> Any:
        """Return whether indices ascend strictly within ``0 .. n-1``, as a condition for `check`."""

    def accelerate(
        self, x: Array, velocity: Array, residual: Array, momentum: float, nesterov: bool
    ) -> tuple[Array, Array]:
        """Return velocity and accumulation: ``u = m velocity + x`` and ``residual + u``.

        With Nesterov momentum: ``u = m (velocity + x)`` and ``residual + u + x``. May overwrite ``x``.
        """

    def precondition(self, x: Array, second: Array, sides: Sequence[Sides], beta2: float) -> tuple[Array, Array]:
        """Update second moments, and divide gradients by their roots.

        Args:
            x: The gradients, one after another: shape ``(n,)``; may be overwritten.
            second: Their second moments; see `hvd_compress.ops.moments`.
            sides: Rows and columns of each.
            beta2: Share of the former moments in the new ones.

        Returns:
            The quotients and the new moments.
        """

    def products(self, lefts: Sequence[Array], rights: Sequence[Array]) -> Array:
        """Return the concatenation of the flat matrices ``left @ right.T``."""

    def subtract_products(self, x: Array, lefts: Sequence[Array], rights: Sequence[Array]) -> Array:
        """Return ``x - products(lefts, rights)``; may overwrite ``x``."""

    def tail(self, x: Array, unit: Any, threshold: Any, logs: bool = False) -> Array:
        """Return moments of the magnitudes ``a = |x| / unit`` that are at least a threshold: float64, shape (4,).

        They are the count, and the sums of ``a - threshold``, of its square, and, with ``logs``, of ``ln a``.
        """

    def rehearse_sketch(self, sketch: Sketch, union: Array, keys: Array) -> Array:
        """Find a hash key with which a sketch can be read.

        Args:
            sketch: Layout of the sketch.
            union: uint8, nonzero at the coordinates in the sketch.
            keys: Candidate keys: int64.

        Returns:
            The first suitable key, -1 if there is none: int64, shape (1,).
        """

    def write_sketch(self, sketch: Sketch, union: Array, key: Array, peak: Array, x: Array) -> Array:
        """Return the sketch of an array: integers that can be summed over ranks.

        Args:
            sketch: Layout of the sketch.
            union: See `rehearse_sketch`.
            key: Key from `rehearse_sketch`; not -1.
            peak: Largest magnitude on any rank: shape (1,).
            x: Shape ``(n,)``.

        Returns:
            int64, shape ``(sketch.cells,)``.
        """

    def read_sketch(self, sketch: Sketch, union: Array, key: Array, peak: Array, sums: Array) -> Array:
        """Undo `write_sketch`, also for a sum: shape ``(n,)`` and the sketch's dtype."""

    def on_host(self, function: Callable[..., Any], dtype: str, shape: Shape, *arrays: Array) -> Array:
        """Apply a function of numpy arrays on the host; its result has this dtype and shape."""


DAMAGED = "data were damaged in transit, or the ranks run different versions of this package: compare the versions"
"""End of the messages about invalid payloads."""


def wrong_length(*sizes: int) -> str:
    """Return the message about a payload with the wrong length, given its actual and expected bytes, if known."""
    seen = " ({} bytes, not {})".format(*sizes) if sizes else ""
    return f"a payload has the wrong length{seen}; {DAMAGED}"


MIX = (0x7FEB352D, 0x846CA68B)
"""Multipliers of the 32-bit mixer lowbias32 (C. Wellons, Prospecting for Hash Functions, 2018; shifts 16, 15, 16)."""

KEY = 0x9E3779B9
"""Constant that derives the second key of the hash from a seed (the golden ratio as a 32-bit fraction)."""

MASK = 0xFFFFFFFF


def mix32(x: int) -> int:
    """Scramble a 32-bit int: each input bit flips each output bit with a probability of about 1/2."""
    x ^= x >> 16
    x = x * MIX[0] & MASK
    x ^= x >> 15
    x = x * MIX[1] & MASK
    return x ^ x >> 16


def mix_seed(*parts: int) -> int:
    """Mix ints into one 32-bit seed, which depends on their order."""
    seed = 0
    for part in parts:
        seed = mix32((seed + KEY + int(part)) & MASK)
    return seed


def second_key(seed: int) -> int:
    """Return the key that the hash adds half-way, so that no two seeds give shifted copies of one sequence."""
    return mix32((seed + KEY) & MASK)
