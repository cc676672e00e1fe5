"""Logistic regression in numpy on handwritten digits, its gradients compressed over MPI: without Horovod or PyTorch.

Run::

    mpirun -n 2 python -m mpi4py examples/pytorch/mpi_numpy.py --compression topk:ratio=0.1,min_size=0
"""

import argparse

import numpy as np
from mpi4py import MPI
from sklearn.datasets import load_digits
from sklearn.model_selection import train_test_split

from hvd_compress.mpi import Aggregator

parser = argparse.ArgumentParser()
parser.add_argument("--compression", default="topk:ratio=0.1,min_size=0", metavar="SPEC", help="default: %(default)s")
parser.add_argument("--lr", default=0.5, type=float, help="learning rate; default: %(default)s")
parser.add_argument("--epochs", default=20, type=int, help="default: %(default)s")
args = parser.parse_args()

comm = MPI.COMM_WORLD
images, labels = load_digits(return_X_y=True)
x, test_x, y, test_y = train_test_split(images / 16, labels, train_size=1408, random_state=0)
x, y = x[comm.rank :: comm.size], y[comm.rank :: comm.size]
rng = np.random.default_rng(comm.rank)

weights, bias = np.zeros((64, 10)), np.zeros(10)
aggregator = Aggregator(args.compression, comm=comm)
for _ in range(args.epochs):
    for batch in rng.permutation(1408 // comm.size // 32 * 32).reshape(-1, 32):
        scores = x[batch] @ weights + bias
        errors = np.exp(scores - scores.max(axis=1, keepdims=True))
        errors /= errors.sum(axis=1, keepdims=True)  # the probabilities
        errors[np.arange(32), y[batch]] -= 1
        means = aggregator.step({"weights": x[batch].T @ errors / 32, "bias": errors.mean(axis=0)})
        weights -= args.lr * means["weights"]
        bias -= args.lr * means["bias"]

if comm.rank == 0:
    accuracy = ((test_x @ weights + bias).argmax(axis=1) == test_y).mean()
    print(f"accuracy={accuracy:.4f}")
    print(aggregator.stats())
