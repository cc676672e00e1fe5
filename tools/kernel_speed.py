"""Measure the CPU kernels, in plain copies of the same array, and beside torch.topk.

Run::

    python tools/kernel_speed.py
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable, Iterator
from functools import partial
from itertools import chain
from pathlib import Path
from typing import NamedTuple

import numpy as np

from hvd_compress.ops.code import Code
from hvd_compress.ops.kernels import cpu
from hvd_compress.tools.bench.local.timing import Floats, plain_copy, timed
from hvd_compress.tools.bench.machine import Machine
from hvd_compress.tools.tables import markdown
from hvd_compress.tools.units import number

_RANKS, _SHARE = 4, 100
"""`scatter-add`: the count of ranks, and one coordinate in so many from each."""


class Operation(NamedTuple):
    """A function to time."""

    name: str
    run: Callable[[], object]
    passes: float  # Least reads and writes, in units of the array
    peer: str = ""  # The name of an alternative, timed as well


class Line(NamedTuple):
    """A result."""

    name: str
    ms: float  # The time
    ratio: float  # The time in plain copies
    gb_per_s: float  # Bytes that have to be read and written, by the time
    faster: float | None = None  # Speedup over its peer


def measure(n: int, turns: int) -> list[Line]:
    """Time all operations on arrays of ``n`` float32."""
    copy = plain_copy(n)
    lines: dict[str, Line] = {}
    for operation in chain([Operation("plain copy", copy, 2)], _operations(n), _peers(n)):
        taken = timed(operation.run, copy, turns)
        speed = 4e-9 * n * operation.passes / taken.seconds
        peer = lines.get(operation.peer)
        if peer:
            lines[peer.name] = peer._replace(faster=1000 * taken.seconds / peer.ms)
        lines[operation.name] = Line(operation.name, 1000 * taken.seconds, taken.ratio, speed)
    return list(lines.values())


def _normal(n: int, seed: int) -> Floats:
    return np.random.default_rng(seed).standard_normal(n, dtype=np.float32)


def _operations(n: int) -> Iterator[Operation]:
    x, residual, out = _normal(n, 0), _normal(n, 1), np.zeros(n, np.float32)
    yield from _codes(n, x, residual, out)

    k, left = max(1, n // _SHARE), residual.copy()

    def top() -> None:
        absorb()
        indices = cpu.top_indices(left, k)
        np.take(left, indices)
        left[indices] = 0.0

    def absorb() -> None:
        cpu.absorb_at(left.ctypes.data, residual.ctypes.data, x.ctypes.data, n, 1.0)

    yield Operation("add the gradient to the residual", absorb, 3)

    yield Operation("exact top 1% with feedback", top, 5)
    yield Operation(_TOP, partial(cpu.top_indices, x, k), 1)
    yield Operation("above a threshold, 1%", partial(cpu.above, x, 2.576), 1)
    rng = np.random.default_rng(2)
    pieces = [(np.sort(rng.choice(n, k, replace=False)), _normal(k, seed)) for seed in range(_RANKS)]

    def scatter() -> None:
        out.fill(0)
        for indices, values in pieces:
            cpu.add_at(out, indices, values)

    yield Operation("scatter-add of 1% of 4 ranks", scatter, 1)
    yield Operation("norms of chunks of 1024", partial(cpu.norms, x[: n // 1024 * 1024].reshape(-1, 1024)), 1)
    for block, name in ((1024, "1024"), (1 << n.bit_length() - 1, "all")):
        some = x[: n // block * block].copy()
        yield Operation(f"Hadamard rotation, blocks of {name}", partial(cpu.rotate, some, 1, block, some), 2)
    yield Operation("copy that looks for inf and nan", partial(cpu.put_finite, out, x), 2)
    start, address, size = (np.array([value]) for value in (0, out.ctypes.data, n))
    yield Operation("write a sum, scaled", partial(cpu.deliver, x, start, address, size, 0.5), 2)


def _codes(n: int, x: Floats, left: Floats, out: Floats) -> Iterator[Operation]:
    """Yield the codes of a few bits."""
    for bits in (2, 3, 4, 8):
        code = Code("max", bits, 512)
        name = f"{bits} bits: quantise, pack, keep what is left"
        yield Operation(name, partial(cpu.quantise, x, code, 1, left), 2 + bits / 32)
        data = cpu.quantise(x, code, 1)
        for ranks in (1, 2):
            rows, name = np.stack([data] * ranks), f"{bits} bits: unpack and add up {ranks}"
            yield Operation(name, partial(cpu.dequantise, rows, code, n, out=out), 1 + ranks * bits / 32)
    code = Code("mean", 1, 8192)
    yield Operation("signs: means, pack, keep what is left", partial(cpu.quantise, x, code, 1, left), 2)
    rows = np.stack([cpu.quantise(x, code, 1)] * 2)
    yield Operation("signs: unpack and add up 2", partial(cpu.dequantise, rows, code, n, out=out), 1)


_TOP = "exact top 1%"


def _peers(n: int) -> Iterator[Operation]:
    """Yield alternatives that are installed."""
    try:
        import torch
    except ImportError:
        return
    x, k = torch.from_numpy(_normal(n, 0)), max(1, n // _SHARE)
    yield Operation("torch.topk of the magnitudes, 1%", lambda: torch.topk(x.abs(), k, sorted=False), 2, _TOP)


def main() -> None:
    """Print a table; write the figures, if asked to."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--size", type=int, default=25_000_000, help="coordinates of the array; default: %(default)s")
    parser.add_argument("--turns", type=int, default=7, help="measured turns of each; default: %(default)s")
    parser.add_argument("--json", type=Path, help="file for the figures")
    args = parser.parse_args()
    lines, machine = measure(args.size, args.turns), Machine.here()
    if args.json:
        args.json.write_text(json.dumps({"machine": machine._asdict(), "results": [line._asdict() for line in lines]}))
    rows = [("kernel", "ms", "copies", "GB/s", "faster than torch.topk")]
    for line in lines:
        faster = "" if line.faster is None else f"{number(line.faster)}x"
        rows.append((line.name, number(line.ms, 2), number(line.ratio, 2), number(line.gb_per_s), faster))
    print(f"{args.size:,} float32, one thread; {machine}\n\n{markdown(rows, 'lrrrr')}")


if __name__ == "__main__":
    main()
