"""Compressed boundaries between the stages of a Keras model.

Use, in one process, to study what compression does to training; Horovod is not needed::

    from hvd_compress.pipeline.tensorflow import CompressedBoundary

    boundary = CompressedBoundary(forward="topk:ratio=0.1", backward="qsgd:bits=8", name="boundary0")
    model = tf.keras.Sequential([first, boundary, second])
"""

from __future__ import annotations

from hvd_compress.errors import required

with required("hvd_compress.pipeline.tensorflow", "TensorFlow", "tensorflow"):
    import tensorflow

from hvd_compress.pipeline.tensorflow.boundary import CompressedBoundary

__all__ = ["CompressedBoundary"]

del tensorflow
