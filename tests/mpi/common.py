"""What the jobs of this folder share: gradients of all ranks, and comparisons."""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any, TypeAlias

import numpy as np
import numpy.typing as npt
from mpi4py import MPI

from hvd_compress.errors import CompressionError

Arr: TypeAlias = npt.NDArray[Any]

COMM = MPI.COMM_WORLD
RANK, SIZE = COMM.Get_rank(), COMM.Get_size()


def gradients(step: int) -> dict[str, list[Arr]]:
    """One gradient per rank and name. Sums of "b" are exact in any order: it always travels uncompressed."""
    rng = np.random.default_rng(step)
    shapes: dict[str, tuple[tuple[int, ...], str]] = {
        "w": ((40, 51), "float32"),
        "h": ((33, 64), "float16"),
        "d": ((1500, 2), "float64"),
        "e": ((0, 3), "float32"),
    }
    grads = {
        name: [rng.standard_normal(shape).astype(dtype) for _ in range(SIZE)] for name, (shape, dtype) in shapes.items()
    }
    return {**grads, "b": [rng.integers(-8, 8, 7).astype(np.float32) for _ in range(SIZE)]}


def mine(grads: dict[str, list[Arr]]) -> dict[str, Arr]:
    """The gradients of this rank."""
    return {name: arrays[RANK] for name, arrays in grads.items()}


def assert_same(got: dict[str, Arr], wanted: dict[str, Arr], note: str = "") -> None:
    """Equal names, bits, shapes and dtypes."""
    assert list(got) == list(wanted), note
    for name, array in wanted.items():
        assert (got[name].dtype, got[name].shape) == (array.dtype, array.shape), (note, name)
        np.testing.assert_array_equal(got[name], array, err_msg=f"{note}: {name}")


def assert_ranks_agree(arrays: dict[str, Arr], note: str = "") -> None:
    """All ranks hold the same bits."""
    everyone = COMM.allgather({name: array.tobytes() for name, array in arrays.items()})
    assert all(other == everyone[0] for other in everyone), f"{note}: the ranks differ"


def refusal(call: Callable[[], object]) -> tuple[str, str]:
    """The kind and the words of the error that a call ends with; empty where there is none."""
    try:
        call()
    except CompressionError as error:
        return type(error).__name__, str(error)
    return "", ""


def done() -> None:
    """The last line of a job."""
    sys.stdout.write(f"all is well on rank {RANK}\n")
