"""On Keras 2, the optimizer of this package is Horovod's."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import tensorflow as tf
from parallel.keras.training import LOSS, batches, fit, make_model, weights

from hvd_compress.keras import Compression, DistributedOptimizer


def test_it_trains_as_horovods_does() -> None:
    options: dict[str, Any] = {"backward_passes_per_step": 2, "average_aggregated_gradients": True}
    model = make_model()
    sgd = tf.keras.optimizers.SGD(0.1, momentum=0.9)
    model.compile(DistributedOptimizer(sgd, compression=Compression.topk(ratio=0.05), **options), LOSS)
    model.fit(*batches(4), batch_size=16, verbose=0, shuffle=False)
    np.testing.assert_array_equal(weights(model), weights(fit(Compression.topk(ratio=0.05), 4, **options)))


def test_horovods_refusals_are_kept() -> None:
    with pytest.raises(ValueError, match="op currently only supports Average and Sum"):
        DistributedOptimizer(tf.keras.optimizers.SGD(0.1), op=-1)
