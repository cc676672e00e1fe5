"""Hot primitives in terms of others: the reference for kernels, and the fallback without one."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from hvd_compress.ops import Ops, packing
from hvd_compress.ops import lanes as lanes_
from hvd_compress.ops.arrays import Array
from hvd_compress.ops.code import Code
from hvd_compress.ops.coding import TINY, decode, encode
from hvd_compress.ops.moments import EPSILON, LARGEST, Sides, size_of
from hvd_compress.ops.rotation import hadamard, signs

if TYPE_CHECKING:
    from hvd_compress.ops.sketch import Sketch


class ReferenceOps(Ops):
    """Compositions of other primitives. See `hvd_compress.ops.Ops`."""

    def add(self, x: Array, y: Array) -> Array:
        return x + y

    def subtract(self, x: Array, y: Array) -> Array:
        return x - y

    def scale(self, x: Array, factor: float) -> Array:
        return x * factor

    def blend(self, x: Array, y: Array, share: float) -> Array:
        return x * share + y * (1 - share)

    def majority(self, count: Array, seed: Any, size: float) -> Array:
        tails = self.uniform(seed, int(count.shape[0])) < 0.5
        votes = count + self.cast(self.where(tails, -0.5, 0.5), self.dtype(count))
        return self.cast(self.where(votes > 0, float(size), -float(size)), self.dtype(count))

    def to_steps(self, x: Array, ends: Array, top: int) -> Array:
        halves = ends / 2  # avoids overflow of the difference
        span = self.where(ends[1] > ends[0], halves[1] - halves[0], self.zeros((), self.dtype(ends)) + 1)
        steps = (x / 2 - halves[0]) * (top / span) + 0.5
        return self.cast(self.clip(self.floor(steps), 0, top), "uint8")

    def from_steps(self, codes: Array, ends: Array, top: int) -> Array:
        share = self.cast(codes, self.dtype(ends)) / top
        return share * ends[1] + (1 - share) * ends[0]

    def project(self, x: Array, right: Array) -> Array:
        return x @ right

    def project_back(self, x: Array, left: Array) -> Array:
        return self.transpose(x) @ left

    def quantise(self, x: Array, code: Code, seed: Any = 0, return_error: bool = False) -> tuple[Array, Array | None]:
        data = encode(self, x, code, seed)
        return data, x - decode(self, data, code, int(x.shape[0]), self.dtype(x)) if return_error else None

    def quantise_parts(
        self, x: Array, parts: int, code: Code, seed: Any = 0, return_error: bool = False
    ) -> tuple[Array, Array | None]:
        n = int(x.shape[0])
        size = -(-n // parts)
        rows = self.reshape(self.pad(x, parts * size), (parts, size))
        coded = [self.quantise(rows[i], code, self.seed(seed, i), return_error) for i in range(parts)]
        data = self.reshape(self.concat([data for data, _ in coded]), (parts, -1))
        return data, self.concat([error for _, error in coded])[:n] if return_error else None

    def dequantise(self, rows: Array, code: Code, n: int, dtype: str, join: bool = False) -> Array:
        parts = [decode(self, rows[number], code, n, dtype) for number in range(int(rows.shape[0]))]
        return self.concat(parts) if join else sum(parts[1:], parts[0])

    def pack(self, codes: Array, bits: int) -> Array:
        return packing.pack(self, codes, bits)

    def unpack(self, data: Array, bits: int, n: int) -> Array:
        return packing.unpack(self, data, bits, n)

    def saturating_sum(self, rows: Array, bits: int, zero: int, size: int) -> Array:
        n = 8 * size // bits
        total = sum(self.cast(self.unpack(rows[i], bits, n), "int32") - zero for i in range(int(rows.shape[0])))
        clipped = self.clip(total, -zero, 2**bits - 1 - zero) + zero
        return self.pack(self.cast(clipped, "uint8"), bits)

    def to_lanes(self, rows: Array, limits: Array, top: int, width: int, seed: Any) -> Array:
        shape = tuple(int(length) for length in rows.shape)
        inverse = self.reshape(top / self.where(limits > TINY, limits, 1.0), (-1, 1))
        noise = self.reshape(self.uniform(seed, shape[0] * shape[1]), shape)
        y = self.clip(self.floor(rows * inverse + self.cast(noise, self.dtype(rows))), -top, top)
        return lanes_.pack_lanes(self, self.cast(y, "int32"), width)

    def from_lanes(self, packed: Array, limits: Array, top: int, width: int, rows: int, columns: int) -> Array:
        y = self.reshape(lanes_.unpack_lanes(self, packed, width, rows * columns), (rows, columns))
        return self.cast(y, self.dtype(limits)) * self.reshape(limits / top, (-1, 1))

    def rotate(self, x: Array, seed: Any, block: int) -> Array:
        n = int(x.shape[0])
        rows = self.reshape(self.pad(x, -(-n // block) * block), (-1, block))
        return hadamard(self, rows * signs(self, seed, rows))

    def unrotate(self, rows: Array, seed: Any) -> Array:
        return self.reshape(hadamard(self, rows) * signs(self, seed, rows), (-1,))

    def norms(self, rows: Array) -> Array:
        peaks = self.absmax(rows)
        inside = rows / self.reshape(self.where(peaks > 0, peaks, 1.0), (-1, 1))  # avoids overflow of the squares
        return peaks * self.sqrt(self.sum(inside * inside))

    def above(self, x: Array, threshold: Any) -> Array:
        return self.nonzero(self.abs(x) >= threshold)

    def scatter_sum(self, n: int, dtype: str, pieces: Sequence[tuple[Array, Array]]) -> Array:
        total = self.zeros((n,), dtype)
        for indices, values in pieces:
            total = self.add_at(total, indices, self.cast(values, dtype))
        return total

    def ascending(self, indices: Array, n: int) -> Any:
        one = self.arange(1)
        return self.concat([one - 1, indices]) < self.concat([indices, one + n])

    def accelerate(
        self, x: Array, velocity: Array, residual: Array, momentum: float, nesterov: bool
    ) -> tuple[Array, Array]:
        velocity = (velocity + x if nesterov else velocity) * momentum
        velocity = velocity if nesterov else velocity + x
        return velocity, residual + velocity + (x if nesterov else 0)

    def precondition(self, x: Array, second: Array, sides: Sequence[Sides], beta2: float) -> tuple[Array, Array]:
        pieces = self.split(x, [rows * columns for rows, columns in sides])
        formers = self.split(second, [size_of(one) for one in sides])
        found = [self._precondition(*one, beta2) for one in zip(pieces, formers, sides, strict=True)]
        return self.concat([update for update, _ in found]), self.concat([moments for _, moments in found])

    def _precondition(self, x: Array, former: Array, sides: Sides, beta2: float) -> tuple[Array, Array]:
        rows, columns = sides
        x = self.reshape(self.clip(x, -LARGEST, LARGEST), (rows, columns))
        squares = x * x
        means = [self.reshape(squares, (-1,))]
        if columns > 1:
            means = [self.sum(squares) / columns, self.sum(self.transpose(squares)) / rows]
        one = self.zeros((1,), self.dtype(x)) + 1
        second = former * beta2 + self.concat([*means, one]) * (1 - beta2)
        first, *others, weight = self.split(second, [int(mean.shape[0]) for mean in means] + [1])
        roots = self.reshape(self.sqrt(first / weight), (-1, 1))
        for other in others:
            mean = self.sum(first) / rows
            roots = roots * self.reshape(self.sqrt(other / self.where(mean > 0, mean, 1.0)), (1, -1))
        return self.reshape(x / (roots + EPSILON), (-1,)), second

    def products(self, lefts: Sequence[Array], rights: Sequence[Array]) -> Array:
        return self.concat([self.reshape(p @ self.transpose(q), (-1,)) for p, q in zip(lefts, rights, strict=True)])

    def subtract_products(self, x: Array, lefts: Sequence[Array], rights: Sequence[Array]) -> Array:
        return x - self.products(lefts, rights)

    def tail(self, x: Array, unit: Any, threshold: Any, logs: bool = False) -> Array:
        a = self.abs(self.cast(x, "float64")) / unit
        above = a >= threshold
        y = self.where(above, a - threshold, 0.0)
        sums = (self.cast(above, "float64"), y, y * y, self.log(self.where(above, a, 1.0)) if logs else y * 0)
        return self.concat([self.reshape(self.sum(part), (1,)) for part in sums])

    def rehearse_sketch(self, sketch: Sketch, union: Array, keys: Array) -> Array:
        return self.on_host(sketch.rehearse, "int64", (1,), union, keys)

    def write_sketch(self, sketch: Sketch, union: Array, key: Array, peak: Array, x: Array) -> Array:
        return self.on_host(sketch.write, "int64", (sketch.cells,), union, key, peak, x)

    def read_sketch(self, sketch: Sketch, union: Array, key: Array, peak: Array, sums: Array) -> Array:
        return self.on_host(sketch.read, sketch.dtype, (int(union.shape[0]),), union, key, peak, sums)
