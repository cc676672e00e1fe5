"""Memory of AQ-SGD: the last activation of each sample, at both ends of a boundary."""

from __future__ import annotations

import math
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from hvd_compress.core.method import check_range
from hvd_compress.errors import BoundaryError, SpecError
from hvd_compress.ops.arrays import Shape

Arr = npt.NDArray[Any]

_DTYPES = {"fp32": "float32", "fp16": "float16"}
_GIB = 2**30


@dataclass(frozen=True)
class AQSGD:
    """Compress how the activation of a sample has changed since it was seen last.

    Wang et al., Fine-tuning Language Models over Slow Networks using Activation Quantization with Guarantees, 2022,
    Algorithm 1. With m the last that both ends know of a sample::

        first visit: send a, m = a                  later: send C(a - m), m = m + C(a - m)          in either case use m

    Args:
        samples: Number of training samples: their ids are ``0 .. samples-1``.
        values: ``"fp32"``, or ``"fp16"`` to remember in 16 bits.
        folder: Remember in a file in this folder, instead of in memory. It has no name, and goes with the job.
        limit: Most memory (or disk) for each end, in GiB.
    """

    samples: int = 0
    values: str = "fp32"
    folder: str = ""
    limit: float = 4.0

    def __post_init__(self) -> None:
        check_range("samples", self.samples, "at least 1: how many samples there are to train on", self.samples >= 1)
        check_range("values", self.values, "'fp32' or 'fp16'", self.values in _DTYPES)
        check_range("limit", self.limit, "above 0 (GiB)", self.limit > 0)
        if self.folder and not Path(self.folder).is_dir():
            raise SpecError(f"folder={self.folder!r} is not allowed: there is no such folder; make it first")


class SampleStore:
    """Keep the last known activation of each sample.

    Args:
        options: Number of samples, dtype, and where to keep them.
    """

    def __init__(self, options: AQSGD) -> None:
        self._options = options
        self._known = np.zeros(options.samples, np.bool_)
        self._rows: Arr | None = None

    def check(self, ids: Any, shape: Shape) -> npt.NDArray[np.int64]:
        """Return the ids of a minibatch as int64, after checking them.

        Args:
            ids: The ids that the caller gave.
            shape: Shape of the minibatch.

        Raises:
            BoundaryError: If ids are missing, unknown or not unique, or if samples have changed their shape.
        """
        rows, size = shape[0], math.prod(shape[1:])
        if self._rows is not None and size != self._rows.shape[1]:
            raise BoundaryError(
                f"memory='aqsgd' remembers {self._rows.shape[1]} numbers of each sample, and now there are {size}"
                f" (shape {shape[1:]}): all samples must have one shape"
            )
        if ids is None:
            raise BoundaryError("memory='aqsgd' has to know the samples: give their ids (ids=...) in training")
        found = np.asarray(ids)
        if found.shape != (rows,) or found.dtype.kind not in "iu":
            raise BoundaryError(
                f"ids are whole numbers, one for each of the {rows} samples, not of dtype {found.dtype} and shape"
                f" {found.shape}"
            )
        outside = found[(found < 0) | (found >= self._options.samples)]
        if outside.size:
            raise BoundaryError(
                f"unknown sample id {outside[0]}: with samples={self._options.samples} the ids are 0 .."
                f" {self._options.samples - 1}; tell how many samples there are, or train on these alone"
            )
        if len(np.unique(found)) != rows:
            raise BoundaryError(f"a minibatch has a sample more than once, so its change is not defined: ids {found}")
        return found.astype(np.int64)

    def known(self, ids: npt.NDArray[np.int64]) -> npt.NDArray[np.bool_]:
        """Return which samples were seen before."""
        return self._known[ids]

    def read(self, ids: npt.NDArray[np.int64], dtype: str) -> Arr:
        """Return the estimates of samples: shape ``(len(ids), n)``."""
        assert self._rows is not None
        return self._rows[ids].astype(dtype)

    def write(self, ids: npt.NDArray[np.int64], rows: Arr, shape: Shape) -> None:
        """Keep the activations of some samples.

        Args:
            ids: Ids of the samples.
            rows: Their activations, shape ``(len(ids), n)``.
            shape: Shape of a sample, for error messages.

        Raises:
            BoundaryError: If all samples together take more memory than the limit.
        """
        if self._rows is None:
            self._rows = self._room(rows.shape[1], shape)
        limit = np.finfo(self._rows.dtype).max
        self._rows[ids] = np.clip(rows, -limit, limit)
        self._known[ids] = True

    def _room(self, size: int, shape: Shape) -> Arr:
        dtype = np.dtype(_DTYPES[self._options.values])
        whole = (self._options.samples, size)
        need = math.prod(whole) * dtype.itemsize / _GIB
        if need > self._options.limit:
            raise BoundaryError(
                f"to remember {whole[0]} samples of shape {shape} takes {need:.2f} GiB at each end, more than"
                f" limit={self._options.limit}: take values=fp16, a folder on disk and a higher limit, or fewer samples"
            )
        if self._options.folder:
            with tempfile.TemporaryFile(dir=self._options.folder) as file:
                return np.memmap(file, dtype, "w+", shape=whole)
        return np.zeros(whole, dtype)  # pages are taken as they are written
