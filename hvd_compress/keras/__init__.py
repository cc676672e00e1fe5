"""Gradient compression for `horovod.keras` and `horovod.tensorflow.keras`: the compressors are those of TensorFlow.

Use::

    from hvd_compress.keras import Compression

    model.compile(optimizer=hvd.DistributedOptimizer(opt, compression=Compression.topk(ratio=0.01)), loss=loss)
"""

from __future__ import annotations

from hvd_compress.tensorflow import Compression, TensorFlowCompressor

__all__ = ["Compression", "TensorFlowCompressor"]
