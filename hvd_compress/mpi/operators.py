"""Reduction operators that MPI does not have: saturating sums of packed codes, and float16.

MPI calls them on parts of a buffer, in an order of its own. What they raise would be lost, so they hold nothing that
could.
"""

from __future__ import annotations

from functools import cache
from typing import Any, Literal

import numpy as np
from mpi4py import MPI

from hvd_compress.ops.kernels import cpu

# An operator is made once for the whole process: mpi4py has room for 32 of them.


@cache
def saturating_sum(bits: int, zero: int) -> MPI.Op:
    """The operator of `hvd_compress.core.collectives.SaturatingSum`, on bytes.

    For codes a and b it gives::

        clip((a - zero) + (b - zero), -zero, 2^bits - 1 - zero) + zero

    It clips at every hop. Where a sum leaves the range on its way and would come back, the result depends on the order
    in which MPI adds, and may differ from that of `hvd_compress.transport.lowering`, which clips once. The width
    divides 8, so any run of bytes holds whole codes.
    """

    def combine(source: Any, target: Any, datatype: MPI.Datatype) -> None:
        a, b = np.frombuffer(source, np.uint8), np.frombuffer(target, np.uint8)
        b[...] = cpu.saturating_sum(np.stack([a, b]), bits, zero, a.size)

    return MPI.Op.Create(combine, commute=True)


@cache
def half(op: Literal["sum", "max"]) -> MPI.Op:
    """An operator on float16, for buffers of elements of two bytes."""
    function = np.maximum if op == "max" else np.add

    def combine(source: Any, target: Any, datatype: MPI.Datatype) -> None:
        b = np.frombuffer(target, np.float16)
        with np.errstate(all="ignore"):  # a sum beyond 65504 is inf, without a word, as in the native types
            function(np.frombuffer(source, np.float16), b, out=b)

    return MPI.Op.Create(combine, commute=True)
