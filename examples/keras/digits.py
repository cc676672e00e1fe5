"""Train a small CNN on handwritten digits, with compressed gradients.

Run::

    horovodrun --gloo -np 2 python examples/keras/digits.py --compression topk:ratio=0.01
"""

import argparse
import json
import sys
import time
from statistics import median
from typing import Any

import horovod.tensorflow.keras as hvd
import numpy as np
import tensorflow as tf
from sklearn.datasets import load_digits
from sklearn.model_selection import train_test_split
from tensorflow import keras

from hvd_compress.keras import Compression

parser = argparse.ArgumentParser()
parser.add_argument("--compression", default="topk:ratio=0.01", metavar="SPEC", help="default: %(default)s")
parser.add_argument("--lr", default=0.1, type=float, help="learning rate; default: %(default)s")
parser.add_argument("--momentum", default=0.8, type=float, help="of SGD; default: %(default)s")
parser.add_argument("--hidden", default=128, type=int, help="width of the hidden layer; default: %(default)s")
parser.add_argument("--epochs", default=10, type=int, help="default: %(default)s")
parser.add_argument("--report", metavar="FILE", help="also append what is printed to this file, as lines of JSON")
args = parser.parse_args()


def tell(**facts: Any) -> None:
    """Print facts on rank 0."""
    if hvd.rank() == 0:
        print(*(f"{name}={value}" for name, value in facts.items()), flush=True)
        if args.report:
            with open(args.report, "a") as report:
                report.write(json.dumps(facts) + "\n")


hvd.init()
tf.config.threading.set_intra_op_parallelism_threads(1)
tf.config.threading.set_inter_op_parallelism_threads(1)
keras.utils.set_random_seed(hvd.rank())

images, labels = load_digits(return_X_y=True)
images = images.astype("float32").reshape(-1, 8, 8, 1) / 16
x, test_x, y, test_y = train_test_split(images, labels, train_size=1408, random_state=0)
share = slice(hvd.rank(), len(x) // hvd.size() * hvd.size(), hvd.size())  # as many images for each rank
x, y = x[share], y[share]

model = keras.Sequential(
    [
        keras.layers.Conv2D(32, 3, padding="same", activation="relu"),
        keras.layers.Conv2D(64, 3, padding="same", activation="relu"),
        keras.layers.MaxPooling2D(2),
        keras.layers.Flatten(),
        keras.layers.Dense(args.hidden, activation="relu"),
        keras.layers.Dense(10),
    ]
)

# All that compression needs: this object, and to hand it to Horovod's optimizer.
compression = Compression.parse(args.compression)
optimizer = keras.optimizers.SGD(learning_rate=args.lr, momentum=args.momentum)
optimizer = hvd.DistributedOptimizer(optimizer, compression=compression)
model.compile(optimizer, keras.losses.SparseCategoricalCrossentropy(from_logits=True), metrics=["accuracy"])

begins: list[float] = []
ends: list[float] = []
watch = keras.callbacks.LambdaCallback(
    on_batch_begin=lambda batch, logs: begins.append(time.perf_counter()),
    on_batch_end=lambda batch, logs: ends.append(time.perf_counter()),
    on_epoch_end=lambda epoch, logs: tell(epoch=epoch + 1, accuracy=round(logs["val_accuracy"], 4)),
)
callbacks = [hvd.callbacks.BroadcastGlobalVariablesCallback(0), watch]
history = model.fit(
    x, y, batch_size=32, epochs=args.epochs, validation_data=(test_x, test_y), callbacks=callbacks, verbose=0
)

weights = np.concatenate([w.flatten() for w in model.get_weights()]).view("int32")
equal = bool(np.all(hvd.allgather(weights[None]) == weights))
stats = compression.stats()
tell(
    accuracy=round(history.history["val_accuracy"][-1], 4),
    steps=stats.steps,
    bytes_per_step=round(stats.bytes_per_step),
    ratio=round(stats.ratio, 2),
    step_seconds=round(median(end - begin for begin, end in zip(begins[5:], ends[5:], strict=True)), 4),
    ranks_equal=equal,
)
sys.exit(0 if equal else "the ranks ended with different weights")
