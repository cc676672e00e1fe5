"""Train on handwritten digits in a loop of one's own, with compressed gradients.

Run::

    horovodrun --gloo -np 2 python examples/keras/custom_loop.py --compression powersgd:rank=2
"""

import argparse

import horovod.tensorflow as hvd
import tensorflow as tf
from sklearn.datasets import load_digits
from sklearn.model_selection import train_test_split
from tensorflow import keras

from hvd_compress.tensorflow import Compression

parser = argparse.ArgumentParser()
parser.add_argument("--compression", default="powersgd:rank=2", metavar="SPEC", help="default: %(default)s")
parser.add_argument("--epochs", default=10, type=int, help="default: %(default)s")
args = parser.parse_args()

hvd.init()
keras.utils.set_random_seed(hvd.rank())

images, labels = load_digits(return_X_y=True)
images = images.astype("float32").reshape(-1, 8, 8, 1) / 16
x, test_x, y, test_y = train_test_split(images, labels, train_size=1408, random_state=0)
mine = tf.data.Dataset.from_tensor_slices((x, y)).shard(hvd.size(), hvd.rank())
batches = mine.shuffle(len(x)).batch(32, drop_remainder=True)

model = keras.Sequential(
    [
        keras.layers.Conv2D(32, 3, activation="relu", input_shape=(8, 8, 1)),
        keras.layers.Flatten(),
        keras.layers.Dense(128, activation="relu"),
        keras.layers.Dense(10),
    ]
)
optimizer = keras.optimizers.SGD(learning_rate=0.1, momentum=0.8)
optimizer.build(model.trainable_variables)
loss_of = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
compression = Compression.parse(args.compression)
hvd.broadcast_variables(model.variables, root_rank=0)


@tf.function
def step(images: tf.Tensor, labels: tf.Tensor) -> None:
    """One minibatch."""
    with tf.GradientTape() as tape:
        loss = loss_of(labels, model(images, training=True))
    tape = hvd.DistributedGradientTape(tape, compression=compression)
    gradients = tape.gradient(loss, model.trainable_variables)
    optimizer.apply_gradients(zip(gradients, model.trainable_variables, strict=True))


for epoch in range(args.epochs):
    for images, labels in batches:
        step(images, labels)
    right = tf.argmax(model(test_x), axis=1) == test_y
    if hvd.rank() == 0:
        print(f"epoch={epoch + 1} accuracy={tf.reduce_mean(tf.cast(right, tf.float32)):.4f}", flush=True)
if hvd.rank() == 0:
    print(compression.stats())
