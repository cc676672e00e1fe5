"""Train a CNN on Fashion-MNIST by ``fit``, with compressed gradients, callbacks and mixed precision.

The data are the four files of https://github.com/zalandoresearch/fashion-mnist; on Debian: apt-get install
dataset-fashion-mnist. Run::

    horovodrun --gloo -np 2 python examples/keras/fashion_mnist.py --compression topk:ratio=0.01
"""

import argparse
import gzip
from pathlib import Path

import horovod.tensorflow.keras as hvd
import numpy as np
import numpy.typing as npt
from tensorflow import keras

from hvd_compress.keras import Compression

parser = argparse.ArgumentParser()
parser.add_argument("--compression", default="topk:ratio=0.01", metavar="SPEC", help="default: %(default)s")
parser.add_argument("--data", default="/usr/share/datasets/fashion-mnist", type=Path, help="default: %(default)s")
parser.add_argument("--epochs", default=5, type=int, help="default: %(default)s")
parser.add_argument("--images", default=60_000, type=int, help="of all ranks; default: %(default)s")
parser.add_argument("--batch", default=32, type=int, help="images of each rank; default: %(default)s")
parser.add_argument("--mixed", action="store_true", help="compute in 16 bits, with a loss scale")
parser.add_argument("--checkpoint", help="a file for the model, written by rank 0 after each epoch")
args = parser.parse_args()

hvd.init()
keras.utils.set_random_seed(hvd.rank())
if args.mixed:
    keras.mixed_precision.set_global_policy("mixed_float16")


def read(name: str, offset: int) -> npt.NDArray[np.uint8]:
    """The bytes of a file after its head."""
    return np.frombuffer(gzip.decompress((args.data / name).read_bytes()), np.uint8, offset=offset)


x, test_x = (
    read(f"{part}-images-idx3-ubyte.gz", 16).reshape(-1, 28, 28, 1) / np.float32(255) for part in ("train", "t10k")
)
y, test_y = (read(f"{part}-labels-idx1-ubyte.gz", 8) for part in ("train", "t10k"))
mine = slice(hvd.rank(), min(args.images, len(x)) // hvd.size() * hvd.size(), hvd.size())
mine_test = slice(hvd.rank(), len(test_x) // hvd.size() * hvd.size(), hvd.size())

model = keras.Sequential(
    [
        keras.layers.Conv2D(32, 3, activation="relu"),
        keras.layers.MaxPooling2D(2),
        keras.layers.Conv2D(64, 3, activation="relu"),
        keras.layers.MaxPooling2D(2),
        keras.layers.Flatten(),
        keras.layers.Dense(256, activation="relu"),
        keras.layers.Dense(10, dtype="float32"),
    ]
)
compression = Compression.parse(args.compression)
optimizer = keras.optimizers.SGD(learning_rate=0.02, momentum=0.9)
optimizer = hvd.DistributedOptimizer(optimizer, compression=compression)
model.compile(optimizer, keras.losses.SparseCategoricalCrossentropy(from_logits=True), metrics=["accuracy"])

callbacks = [
    hvd.callbacks.BroadcastGlobalVariablesCallback(0),
    hvd.callbacks.MetricAverageCallback(),
    keras.callbacks.ReduceLROnPlateau(patience=2),
]
if args.checkpoint and hvd.rank() == 0:
    callbacks.append(keras.callbacks.ModelCheckpoint(args.checkpoint))
history = model.fit(
    x[mine],
    y[mine],
    batch_size=args.batch,
    epochs=args.epochs,
    validation_data=(test_x[mine_test], test_y[mine_test]),
    callbacks=callbacks,
    verbose=2 if hvd.rank() == 0 else 0,
)
if hvd.rank() == 0:
    print(f"accuracy={history.history['val_accuracy'][-1]:.4f}")
    print(compression.stats())
