"""Loops for CPUs, compiled by numba: serial, as a rank owns about one core, and each in one pass over memory.

Each is compiled when it is first called on a machine, and then kept on disk; ``python -m hvd_compress.ops.kernels.cpu``
compiles all of them. Arrays are float32 and C-contiguous, and may be read-only where nothing is said about writing to
them. Elementwise results have the bits of the plain version; sums are made in float64, so that scales and norms agree
with it up to rounding.
"""

from hvd_compress.ops.kernels.cpu import sketch
from hvd_compress.ops.kernels.cpu.coding import dequantise, quantise
from hvd_compress.ops.kernels.cpu.elementwise import blend, majority
from hvd_compress.ops.kernels.cpu.gradient_copy import absorb_at, accelerate, deliver, put_finite, put_finite_at
from hvd_compress.ops.kernels.cpu.hadamard import rotate, unrotate
from hvd_compress.ops.kernels.cpu.householder import orthogonalise
from hvd_compress.ops.kernels.cpu.lanes import from_lanes, to_lanes
from hvd_compress.ops.kernels.cpu.minmax import from_steps, to_steps
from hvd_compress.ops.kernels.cpu.moments import tail
from hvd_compress.ops.kernels.cpu.packing import pack, saturating_sum, unpack
from hvd_compress.ops.kernels.cpu.precondition import precondition
from hvd_compress.ops.kernels.cpu.reductions import absmax, norms
from hvd_compress.ops.kernels.cpu.scatter import add_at, ascending
from hvd_compress.ops.kernels.cpu.selection import above, kth_magnitude, top_indices
from hvd_compress.ops.kernels.cpu.sketching import read_sketch, rehearse_sketch, write_sketch

__all__ = [
    "above",
    "absmax",
    "absorb_at",
    "accelerate",
    "add_at",
    "ascending",
    "blend",
    "deliver",
    "dequantise",
    "from_lanes",
    "from_steps",
    "kth_magnitude",
    "majority",
    "norms",
    "orthogonalise",
    "pack",
    "precondition",
    "put_finite",
    "put_finite_at",
    "quantise",
    "read_sketch",
    "rehearse_sketch",
    "rotate",
    "saturating_sum",
    "sketch",
    "tail",
    "to_lanes",
    "to_steps",
    "top_indices",
    "unpack",
    "unrotate",
    "write_sketch",
]
