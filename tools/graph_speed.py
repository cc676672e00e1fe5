"""Measure primitives in a TensorFlow graph: as kernels that it calls, compiled by XLA, and as plain operations.

Run::

    python tools/graph_speed.py
"""

from __future__ import annotations

import argparse
import json
import os
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")

import numpy as np
import tensorflow as tf

from hvd_compress.ops.code import Code
from hvd_compress.ops.tensorflow import TensorFlowCpuOps, TensorFlowOps
from hvd_compress.tools.bench.local.timing import plain_copy, timed
from hvd_compress.tools.bench.machine import Machine
from hvd_compress.tools.tables import markdown
from hvd_compress.tools.units import number

_CODE, _SHARE = Code("max", 4, 512), 100


class Line(NamedTuple):
    """A result, in plain copies of the array."""

    name: str
    kernel: float  # A compiled loop behind ``tf.numpy_function``, as the package uses it on CPUs
    xla: float  # The composition of TensorFlow's operations, with ``jit_compile=True``
    plain: float  # The same without


NAMES = ("4 bits: quantise, pack, keep what is left", "4 bits: unpack and add up 2", "exact top 1%")


def measure(n: int, turns: int) -> list[Line]:
    """Time the primitives on ``n`` float32."""
    tf.config.threading.set_intra_op_parallelism_threads(1)
    tf.config.threading.set_inter_op_parallelism_threads(1)
    copy = plain_copy(n)
    plain, compiled = TensorFlowOps(), TensorFlowCpuOps()
    found: dict[str, list[float]] = {name: [] for name in NAMES}
    for place, name in enumerate(NAMES):
        for ops, jit in ((compiled, False), (plain, True), (plain, False)):
            function, given = _primitives(ops, n)[place]
            run = partial(tf.function(function, jit_compile=jit), *given)
            found[name].append(timed(run, copy, turns).ratio)
    return [Line(name, *ratios) for name, ratios in found.items()]


def _primitives(ops: Any, n: int) -> list[tuple[Callable[..., Any], list[Any]]]:
    """Return the primitives in the order of their names, with their arguments."""
    x = tf.constant(np.random.default_rng(0).standard_normal(n, np.float32))
    data, _ = ops.quantise(x, _CODE, 1)
    return [
        (lambda x: ops.quantise(x, _CODE, 1, keep=True), [x]),
        (lambda rows: ops.dequantise(rows, _CODE, n, "float32"), [tf.stack([data, data])]),
        (lambda x: ops.top_indices(x, max(1, n // _SHARE)), [x]),
    ]


def main() -> None:
    """Print a table; write the figures, if asked to."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--size", type=int, default=25_000_000, help="coordinates of the array; default: %(default)s")
    parser.add_argument("--turns", type=int, default=5, help="measured turns of each; default: %(default)s")
    parser.add_argument("--json", type=Path, help="file for the figures")
    args = parser.parse_args()
    lines, machine = measure(args.size, args.turns), Machine.here()
    if args.json:
        args.json.write_text(json.dumps({"machine": machine._asdict(), "results": [line._asdict() for line in lines]}))
    rows = [("primitive", "kernel", "xla", "plain")]
    rows += [(line.name, number(line.kernel, 2), number(line.xla, 2), number(line.plain, 2)) for line in lines]
    print(f"{args.size:,} float32, one thread, in plain copies; {machine}\n\n{markdown(rows, 'lrrr')}")


if __name__ == "__main__":
    main()
