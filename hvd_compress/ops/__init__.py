"""Array primitives: the words in which methods are written.

`Ops` lists them. `hvd_compress.ops.numpy` is the oracle; the PyTorch and the TensorFlow version must agree with it,
the integer and random ones bit for bit. Besides these, methods use the operators ``+ - * / // % @`` and comparisons,
which mean the same in all three frameworks.

Dtypes are given by name (``"float32"``). Where a function takes or gives *indices* they are int64.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, Protocol

import numpy.typing as npt

from hvd_compress.core.bucket import Shape
from hvd_compress.core.collectives import Array

if TYPE_CHECKING:
    from hvd_compress.ops.code import Code
    from hvd_compress.ops.sketch import Sketch


class Ops(Protocol):
    """The primitives of one framework (and, where it has them, of one device)."""

    name: str

    def dtype(self, x: Array) -> str:
        """Name of the dtype of ``x``."""

    def cast(self, x: Array, dtype: str) -> Array:
        """Convert; float to integer truncates, to a narrower float rounds to nearest even."""

    def constant(self, values: npt.NDArray[Any]) -> Array:
        """The framework's array with these values, on its device."""

    def zeros(self, shape: Shape, dtype: str) -> Array:
        """An array of zeros."""

    def arange(self, n: int) -> Array:
        """The indices ``0 .. n-1``."""

    def reshape(self, x: Array, shape: Shape) -> Array:
        """The same elements in row-major order; one entry may be -1."""

    def concat(self, parts: Sequence[Array]) -> Array:
        """Join one-dimensional arrays."""

    def stack(self, parts: Sequence[Array]) -> Array:
        """Arrays of shape (a, b) as one of shape (a, number of arrays, b)."""

    def split(self, x: Array, sizes: Sequence[int]) -> list[Array]:
        """Cut a one-dimensional array into parts of these lengths."""

    def pad(self, x: Array, n: int) -> Array:
        """Lengthen a one-dimensional array to ``n`` elements with zeros; itself if it has as many."""

    def abs(self, x: Array) -> Array:
        """Magnitudes."""

    def sqrt(self, x: Array) -> Array:
        """Square roots."""

    def log(self, x: Array) -> Array:
        """Natural logarithms."""

    def lgamma(self, x: Array) -> Array:
        """Logarithm of the gamma function, of positive numbers."""

    def floor(self, x: Array) -> Array:
        """The next integer below, dtype kept."""

    def clip(self, x: Array, low: float, high: float) -> Array:
        """Limit to ``low .. high``."""

    def where(self, condition: Array, a: Array, b: Array) -> Array:
        """``a`` where the condition holds, else ``b``; broadcasts."""

    def sum(self, x: Array) -> Array:
        """Sum along the last axis."""

    def absmax(self, x: Array) -> Array:
        """Largest magnitude along the last axis."""

    def extremes(self, x: Array) -> Array:
        """The least and the largest element of a one-dimensional array: shape (2,)."""

    def sum_squares(self, x: Array) -> Array:
        """Sum of the squares of all elements: a float64 scalar."""

    def is_finite(self, x: Array) -> Array:
        """Whether each element is neither inf nor nan."""

    def transpose(self, x: Array) -> Array:
        """Swap the two axes."""

    def orthogonalise(self, x: Array) -> Array:
        """Orthonormal columns with the column space of ``x``, shape (n, r) with r <= n; defined for any rank of x."""

    def top_indices(self, x: Array, k: int) -> Array:
        """Ascending indices of the ``k`` largest magnitudes; of equal ones the lower index wins."""

    def kth_magnitude(self, x: Array, k: int) -> Array:
        """The k-th largest magnitude, a scalar; k counts from 1."""

    def nonzero(self, condition: Array) -> Array:
        """Ascending indices at which a one-dimensional condition holds; how many is known only when it is run."""

    def size(self, x: Array) -> Array:
        """Length of a one-dimensional array: an int64 scalar."""

    def length(self, x: Array) -> Any:
        """The one element of an integer array, as a length for `from_bytes` and slices."""

    def histogram(self, x: Array, n: int) -> Array:
        """How often each of ``0 .. n-1`` stands in an array of indices: int32."""

    def repeat(self, x: Array, counts: Array) -> Array:
        """Each element as often as its count says."""

    def take(self, x: Array, indices: Array) -> Array:
        """The elements (of an array with two axes: the rows) at these places."""

    def put(self, x: Array, indices: Array, values: Array) -> Array:
        """``x`` with these elements or rows replaced; may overwrite ``x``. Indices must differ."""

    def add_at(self, x: Array, indices: Array, values: Array) -> Array:
        """``x`` with these values added; may overwrite ``x``. Indices must differ."""

    def bitcast(self, x: Array, dtype: str) -> Array:
        """The same bits read as another dtype of equal width."""

    def to_bfloat16(self, x: Array) -> Array:
        """The nearest bfloat16 of float32 numbers, as the uint16 with its bits."""

    def from_bfloat16(self, x: Array) -> Array:
        """Undo `to_bfloat16`: float32."""

    def to_bytes(self, *parts: Array) -> Array:
        """The bytes of one-dimensional arrays, one after another, little-endian: uint8."""

    def from_bytes(self, data: Array, *parts: tuple[str, Any]) -> list[Array]:
        """Undo `to_bytes`, given the dtype and the length of each part; lengths may be scalars of the graph.

        Raises:
            ExchangeError: As in `check`, if the parts take more or fewer bytes than there are.
        """

    def check(self, x: Array, ok: Any, message: str) -> Array:
        """``x``, if a condition holds for all elements: what comes from other ranks is checked before it is used.

        What is done with ``x`` itself, before or beside this, is not guarded, so go on with what is returned.

        Raises:
            ExchangeError: If it does not hold. In a graph that is an error of the step, and on an accelerator an
                assertion of the device, with the same message.
        """

    def seed(self, *parts: Any) -> Any:
        """Mix ints and integer scalars into one 32-bit seed."""

    def uniform(self, seed: Any, n: int) -> Array:
        """``n`` float32 numbers in [0, 1): element i is a hash of (seed, i), the same on every device and rank."""

    def below(self, seed: Any, bounds: Array) -> Array:
        """A uniform integer in ``0 .. bounds[i]-1`` for each i, by the same hash; bounds < 2**31."""

    def stage(self, step: Any, boundaries: Sequence[int]) -> Any:
        """How many of the boundaries ``step`` has reached."""

    def choose(self, condition: Any, yes: Callable[[], Array], no: Callable[[], Array]) -> Array:
        """What one of two functions gives, by a scalar condition; both give the same dtype and number of axes."""

    # What follows is made of the above (see `hvd_compress.ops.reference`), but hot enough for kernels of its own.

    def add(self, x: Array, y: Array) -> Array:
        """``x + y``; may overwrite ``x``."""

    def subtract(self, x: Array, y: Array) -> Array:
        """``x - y``; may overwrite ``x``."""

    def scale(self, x: Array, factor: float) -> Array:
        """``x * factor``; may overwrite ``x``."""

    def blend(self, x: Array, y: Array, share: float) -> Array:
        """``x * share + y * (1 - share)``; may overwrite ``y``."""

    def majority(self, count: Array, seed: Any, size: float) -> Array:
        """``size`` where a count is above zero, ``-size`` where it is below; a coin of the seed decides on zero."""

    def project(self, x: Array, right: Array) -> Array:
        """``x @ right`` for a thin ``right``."""

    def project_back(self, x: Array, left: Array) -> Array:
        """``x.T @ left`` for a thin ``left``."""

    def quantise(self, x: Array, code: Code, seed: Any = 0, keep: bool = False) -> tuple[Array, Array | None]:
        """Compress an array in one go.

        Args:
            x: Shape ``(n,)``; may be overwritten if ``keep`` is set.
            code: How.
            seed: Of the dither.
            keep: Return what is left, too.

        Returns:
            ``code.size(n, dtype)`` bytes (uint8), and, with ``keep``, ``x`` minus what they stand for.
        """

    def quantise_parts(
        self, x: Array, parts: int, code: Code, seed: Any = 0, keep: bool = False
    ) -> tuple[Array, Array | None]:
        """`quantise` of parts of equal length, each by itself and with a seed of its own.

        The last part is filled up with zeros. The bytes have shape ``(parts, size)``, what is left that of ``x``.
        """

    def dequantise(self, rows: Array, code: Code, n: int, dtype: str, join: bool = False) -> Array:
        """Undo `quantise` for several arrays, and add them up.

        Args:
            rows: uint8, one row for each array.
            code: How they were compressed.
            n: Coordinates of each.
            dtype: What of.
            join: Put them one after another instead: shape ``(rows * n,)``.

        Raises:
            ExchangeError: As in `check`, if the rows are longer or shorter than they should be.
        """

    def pack(self, codes: Array, bits: int) -> Array:
        """Pack codes as `hvd_compress.ops.packing` says.

        Args:
            codes: uint8, shape ``(n,)``, each below ``2**bits``.
            bits: 1 to 8.

        Returns:
            uint8, shape ``(packed_size(n, bits),)``.
        """

    def unpack(self, data: Array, bits: int, n: int) -> Array:
        """Undo `pack`: the ``n`` codes, uint8.

        Raises:
            ExchangeError: As in `check`, if there are more or fewer bytes than they take.
        """

    def saturating_sum(self, rows: Array, bits: int, zero: int, size: int) -> Array:
        """Add up the codes of all rows, clip the sums to what a code can stand for, and pack them again.

        Args:
            rows: Packed codes, one row for each array.
            bits: 1, 2, 4 or 8, so that any part of the bytes holds whole codes.
            zero: The code c stands for the integer ``c - zero``.
            size: How many bytes a row has.

        Returns:
            uint8, shape ``(size,)``.

        Raises:
            ExchangeError: As in `check`, if the rows are longer or shorter than they should be.
        """

    def to_steps(self, x: Array, ends: Array, top: int) -> Array:
        """The nearest of the even steps ``0 .. top`` between two numbers: uint8, shape of ``x``. Halves go up.

        Args:
            x: Shape ``(n,)``.
            ends: Its `extremes`.
            top: 1 to 255.
        """

    def from_steps(self, codes: Array, ends: Array, top: int) -> Array:
        """Undo `to_steps` as far as possible: dtype of ``ends``."""

    def to_lanes(self, rows: Array, limits: Array, top: int, width: int, seed: Any) -> Array:
        """Round to integers in ``-top .. top``, at random up or down, and pack them for sums.

        Args:
            rows: Shape (rows, columns).
            limits: What ``top`` stands for, for each row or for all: shape (rows,) or (1,).
            top: The largest integer.
            width: Bits of a lane; see `hvd_compress.ops.lanes`.
            seed: Of the dither.

        Returns:
            int32, shape ``(ceil(rows * columns / lanes),)``.
        """

    def from_lanes(self, packed: Array, limits: Array, top: int, width: int, rows: int, columns: int) -> Array:
        """Undo `to_lanes`, also of a sum: shape (rows, columns), dtype of ``limits``."""

    def rotate(self, x: Array, seed: Any, block: int) -> Array:
        """Multiply by random signs, then each block by the normalised Hadamard matrix.

        Args:
            x: Shape ``(n,)``; filled up with zeros to whole blocks.
            seed: Of the signs: +1 where `uniform` is below 1/2, else -1.
            block: A power of two.

        Returns:
            Shape (blocks, block).
        """

    def unrotate(self, rows: Array, seed: Any) -> Array:
        """Undo `rotate`: one-dimensional, with what had filled up the last block. May overwrite ``rows``."""

    def norms(self, rows: Array) -> Array:
        """L2 norms along the last axis of a matrix, whose squares may leave the range."""

    def above(self, x: Array, threshold: Any) -> Array:
        """Ascending indices of the magnitudes that are not below a threshold."""

    def scatter_sum(self, n: int, dtype: str, pieces: Sequence[tuple[Array, Array]]) -> Array:
        """A vector of ``n`` zeros, with the values of each piece added at its indices, piece by piece.

        Within a piece the indices differ.
        """

    def ascending(self, indices: Array, n: int) -> Any:
        """Whether indices grow strictly and are within ``0 .. n-1``, in a form that `check` understands."""

    def accelerate(
        self, x: Array, velocity: Array, residual: Array, momentum: float, nesterov: bool
    ) -> tuple[Array, Array]:
        """Momentum, and what has piled up of it: ``u = m velocity + x`` and ``residual + u``.

        With Nesterov's: ``u = m (velocity + x)`` and ``residual + u + x``. May overwrite ``x``.
        """

    def products(self, lefts: Sequence[Array], rights: Sequence[Array]) -> Array:
        """The matrices ``left @ right.T`` row by row, one after another in one array."""

    def subtract_products(self, x: Array, lefts: Sequence[Array], rights: Sequence[Array]) -> Array:
        """``x - products(lefts, rights)``; may overwrite ``x``."""

    def tail(self, x: Array, unit: Any, threshold: Any, logs: bool = False) -> Array:
        """Moments of the magnitudes ``a = |x| / unit`` that are not below a threshold: float64, shape (4,).

        Their number, and their sums of ``a - threshold``, of its square, and, with ``logs``, of ``ln a``.
        """

    def rehearse_sketch(self, sketch: Sketch, union: Array, keys: Array) -> Array:
        """Find a hash by which a sketch can be read.

        Args:
            sketch: Its measures.
            union: Not zero at the coordinates that it is of: uint8.
            keys: Of the hashes that there are to choose from: int64.

        Returns:
            The first key that will do, -1 if none does: int64, shape (1,).
        """

    def write_sketch(self, sketch: Sketch, union: Array, key: Array, peak: Array, x: Array) -> Array:
        """The sketch of an array: integers that can be added to those of other ranks.

        Args:
            sketch: Its measures.
            union: See `rehearse_sketch`.
            key: What that gives; not -1.
            peak: The largest magnitude on any rank: shape (1,).
            x: Shape ``(n,)``.

        Returns:
            int64, shape ``(sketch.cells,)``.
        """

    def read_sketch(self, sketch: Sketch, union: Array, key: Array, peak: Array, sums: Array) -> Array:
        """Undo `write_sketch`, also of a sum: shape ``(n,)`` and the sketch's dtype."""

    def on_host(self, function: Callable[..., Any], dtype: str, shape: Shape, *arrays: Array) -> Array:
        """What a function of numpy arrays gives: an array of this dtype and shape."""


DAMAGED = "data were damaged on their way, or the ranks do not run the same version of this package: compare these"
"""How messages about payloads that cannot be end."""


def wrong_length(*sizes: int) -> str:
    """What to say of a payload that is longer or shorter than what it holds; the bytes that it has and should have."""
    seen = " ({} bytes, not {})".format(*sizes) if sizes else ""
    return f"a payload is not as long as what it holds{seen}; {DAMAGED}"


MIX = (0x7FEB352D, 0x846CA68B)
"""Multipliers of the 32-bit mixer lowbias32 (C. Wellons, Prospecting for Hash Functions, 2018; shifts 16, 15, 16)."""

KEY = 0x9E3779B9
"""Turns a seed into the second key of the hash (the golden ratio as a 32-bit fraction)."""

MASK = 0xFFFFFFFF


def mix32(x: int) -> int:
    """Scramble a 32-bit int: every bit of the input changes every bit of the output with about even odds."""
    x ^= x >> 16
    x = x * MIX[0] & MASK
    x ^= x >> 15
    x = x * MIX[1] & MASK
    return x ^ x >> 16


def mix_seed(*parts: int) -> int:
    """Mix ints into one 32-bit seed; their order matters."""
    seed = 0
    for part in parts:
        seed = mix32((seed + KEY + int(part)) & MASK)
    return seed


def second_key(seed: int) -> int:
    """The key that the hash of a seed adds half-way, so that no two seeds give shifted copies of one sequence."""
    return mix32((seed + KEY) & MASK)
