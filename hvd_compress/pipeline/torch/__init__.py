"""Compressed boundaries between the stages of a PyTorch model.

Use, in one process, to study what compression does to training::

    from hvd_compress.pipeline.torch import CompressedBoundary

    model = nn.Sequential(first, CompressedBoundary(forward="topk:ratio=0.1", backward="qsgd:bits=8"), second)

and with a stage on each rank::

    from hvd_compress.pipeline.torch import Pipeline

    boundary = CompressedBoundary(forward="topk:ratio=0.1", backward="qsgd:bits=8")
    pipeline = Pipeline([first, second], nn.functional.cross_entropy, boundary=boundary, microbatches=4)
"""

from __future__ import annotations

from hvd_compress.errors import required

with required("hvd_compress.pipeline.torch", "PyTorch", "torch"):
    import torch

from hvd_compress.pipeline.torch.boundary import CompressedBoundary
from hvd_compress.pipeline.torch.pipeline import Pipeline

__all__ = ["CompressedBoundary", "Pipeline"]

del torch
