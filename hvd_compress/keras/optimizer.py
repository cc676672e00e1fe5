"""One `DistributedOptimizer` for Keras 2, where it is Horovod's, and for Keras 3, where Horovod's never reduces."""

from __future__ import annotations

from typing import Any

import horovod.tensorflow as hvd
import horovod.tensorflow.keras as hvd_keras

from hvd_compress.errors import UnsupportedError
from hvd_compress.keras import keras3
from hvd_compress.keras.keras3 import keras
from hvd_compress.tensorflow import Compression

_ONLY_DEFAULT: dict[str, tuple[Any, str]] = {
    "name": (None, "give the name to the Keras optimizer"),
    "backward_passes_per_step": (1, "give gradient_accumulation_steps, which averages, to the Keras optimizer"),
    "num_groups": (0, "use groups"),
}
_UNUSED = ("average_aggregated_gradients", "scale_local_gradients")  # without the options above


def DistributedOptimizer(
    optimizer: Any,
    *,
    compression: Any = Compression.none,
    op: int = hvd.Average,
    gradient_predivide_factor: float = 1.0,
    process_set: Any = hvd.global_process_set,
    groups: Any = None,
    sparse_as_dense: bool = False,
    **options: Any,
) -> Any:
    """Make an optimizer reduce the gradients over the ranks before it applies them.

    On Keras 2 this is ``horovod.tensorflow.keras.DistributedOptimizer``. On Keras 3 the optimizer itself is changed and
    returned, with its state. There

    - it reduces in ``apply`` and ``apply_gradients``, so it needs no `DistributedGradientTape`;
    - with ``gradient_accumulation_steps`` it reduces each batch;
    - a `LossScaleOptimizer` has to be inside; residuals are kept in unscaled units;
    - a model is saved with the plain optimizer: wrap ``model.optimizer`` anew after loading, and compile.

    Args:
        optimizer: A Keras optimizer.
        compression: A compressor of `Compression`, or one of Horovod's.
        op: ``hvd.Average`` or ``hvd.Sum``.
        gradient_predivide_factor: Part of the division of an average that is made before the sum.
        process_set: The ranks to reduce over.
        groups: Number of groups of gradients to reduce together, or lists of variables.
        sparse_as_dense: Convert IndexedSlices to dense tensors first.
        **options: As in Horovod; on Keras 3, ``device_dense`` and ``device_sparse``.

    Returns:
        The optimizer to compile a model with.

    Raises:
        UnsupportedError: If an option is not supported on Keras 3.
    """
    options |= {
        "compression": compression,
        "op": op,
        "gradient_predivide_factor": gradient_predivide_factor,
        "process_set": process_set,
        "groups": groups,
        "sparse_as_dense": sparse_as_dense,
    }
    # Not by the version of tf.keras: environment variables may make that Keras 2 beside an installed Keras 3.
    if not (keras.__version__ >= "3" and isinstance(optimizer, keras.optimizers.Optimizer)):
        return hvd_keras.DistributedOptimizer(optimizer, **options)
    return keras3.wrap(optimizer, _checked(options))


def _checked(options: dict[str, Any]) -> dict[str, Any]:
    """The options that are there on Keras 3."""
    if keras.backend.backend() != "tensorflow":
        raise UnsupportedError(
            f"Keras runs on {keras.backend.backend()!r}, and Horovod knows it on TensorFlow only: set the environment"
            " variable KERAS_BACKEND=tensorflow before Keras is imported"
        )
    if options["op"] not in (hvd.Average, hvd.Sum):
        raise UnsupportedError(f"op={options['op']} is not supported with Keras: use hvd.Average or hvd.Sum")
    for option, (default, cure) in _ONLY_DEFAULT.items():
        if options.get(option, default) != default:
            raise UnsupportedError(f"{option}={options[option]!r} is not supported on Keras 3: {cure}")
    return {name: value for name, value in options.items() if name not in (*_ONLY_DEFAULT, *_UNUSED)}
