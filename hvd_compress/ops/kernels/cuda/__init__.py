"""Kernels for CUDA tensors, in Triton: one pass over memory, and no word to the host unless it is said.

All take float32 tensors of fewer than 2**31 elements and give what `hvd_compress.ops` says of the primitives of the
same names. Elementwise results have the bits of the numpy oracle; scales that are sums agree to about 1e-7. With
``TRITON_INTERPRET=1`` set before Triton is imported they run on CPU tensors, slowly.

A kernel is compiled when it is first needed with some widths and flags, which takes a second or so, and is kept on disk
by Triton. How many elements there are, seeds and steps do not matter for that.
"""

from __future__ import annotations

from hvd_compress.errors import required

with required("a kernel for CUDA", "Triton", "cuda"):
    import triton

from hvd_compress.ops.kernels.cuda.dequantising import dequantise
from hvd_compress.ops.kernels.cuda.elementwise import accelerate, add_at, put_finite
from hvd_compress.ops.kernels.cuda.lanes import from_lanes, to_lanes
from hvd_compress.ops.kernels.cuda.preconditioning import precondition
from hvd_compress.ops.kernels.cuda.quantising import quantise
from hvd_compress.ops.kernels.cuda.rotation import rotate, unrotate
from hvd_compress.ops.kernels.cuda.scales import norms
from hvd_compress.ops.kernels.cuda.selection import above, kth_magnitude, top_indices

__all__ = [
    "above",
    "accelerate",
    "add_at",
    "dequantise",
    "from_lanes",
    "kth_magnitude",
    "norms",
    "precondition",
    "put_finite",
    "quantise",
    "rotate",
    "to_lanes",
    "top_indices",
    "unrotate",
]

del triton
