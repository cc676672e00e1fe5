"""Gradient compression for `horovod.tensorflow` and `horovod.keras`.

Use::

    from hvd_compress.tensorflow import Compression

    opt = hvd.DistributedOptimizer(opt, compression=Compression.topk(ratio=0.01))
    tape = hvd.DistributedGradientTape(tape, compression=Compression.topk(ratio=0.01))
"""

from __future__ import annotations

from hvd_compress.errors import BUILD_HOROVOD, MissingPackageError

try:
    import horovod.tensorflow
except ImportError as error:
    raise MissingPackageError(
        f"hvd_compress.tensorflow needs TensorFlow and a Horovod built for it ({error}): install"
        f" TensorFlow, in the clone of this package, with: pip install '.[tensorflow]'; for Horovod, {BUILD_HOROVOD}"
    ) from error

from hvd_compress.tensorflow.compression import Compression, TensorFlowCompressor

__all__ = ["Compression", "TensorFlowCompressor"]

del horovod
