"""Gradient compression for Keras 2 and Keras 3: the compressors are those of TensorFlow.

Use::

    from hvd_compress.keras import Compression, DistributedOptimizer

    model.compile(optimizer=DistributedOptimizer(opt, compression=Compression.topk(ratio=0.01)), loss=loss)

On Keras 2, Horovod's own ``hvd.DistributedOptimizer`` does as well. On Keras 3 it runs, but never reduces a gradient;
Horovod's callbacks fail there, and its functions and its tape want TensorFlow's variables in the place of Keras's::

    hvd.broadcast_variables([v.value for v in model.variables], root_rank=0)  # before the first step
"""

from __future__ import annotations

from hvd_compress.errors import BUILD_HOROVOD, required

with required(
    "hvd_compress.keras",
    "TensorFlow with Keras and a Horovod built for it",
    "tensorflow",
    f"; for Horovod, {BUILD_HOROVOD}",
):
    import horovod.tensorflow
    import horovod.tensorflow.keras

from hvd_compress.keras.local_steps import LocalSteps
from hvd_compress.keras.optimizer import DistributedOptimizer
from hvd_compress.local.settings import Outer
from hvd_compress.tensorflow import Compression, TensorFlowCompressor

__all__ = ["Compression", "DistributedOptimizer", "LocalSteps", "Outer", "TensorFlowCompressor"]

del horovod
