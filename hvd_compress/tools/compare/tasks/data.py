"""Images to classify, and how they are dealt out to ranks."""

from __future__ import annotations

import gzip
import math
import zlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from hvd_compress.errors import MissingPackageError, SpecError
from hvd_compress.lab import Setting

Arr = npt.NDArray[Any]

DIGITS = 1408
"""Images to train on: 44 minibatches of 32, as many for each of 1, 2 or 4 ranks."""

FASHION = Path("/usr/share/datasets/fashion-mnist")
"""Folder of Debian's package ``dataset-fashion-mnist``."""

SIDE = 28
_CLASSES = 10
_MAGIC = b"\x00\x00\x08"
"""The first bytes of a file of unsigned bytes; the number of dimensions follows."""


class Images(NamedTuple):
    """Grey images of ten classes."""

    train: Arr  # Unsigned bytes of shape ``(count, height, width)``
    train_labels: Arr
    test: Arr
    test_labels: Arr
    mean: float  # What is subtracted from the pixels before the model sees them,
    deviation: float  # and what they are divided by then

    def scaled(self, pixels: Arr) -> Arr:
        return (pixels.astype(np.float32) - np.float32(self.mean)) / np.float32(self.deviation)

    def test_share(self, setting: Setting, most: int | None = None) -> tuple[Arr, Arr]:
        """Return a rank's share of the test images and labels, or of the first ``most``.

        Raises:
            SpecError: If there are more ranks than images.
        """
        count = min(len(self.test), most or len(self.test))
        if count < setting.size:
            raise SpecError(f"{count} test images cannot be dealt out to {setting.size} ranks: take fewer ranks")
        share = slice(setting.rank, count // setting.size * setting.size, setting.size)
        return self.test[share], self.test_labels[share]


def check_count(count: int, batch: int, setting: Setting) -> None:
    """Check that an epoch has at least one step.

    Raises:
        SpecError: If there are too few images.
    """
    if count < batch * setting.size:
        raise SpecError(
            f"{count} images to train on are too few for {setting.size} ranks with {batch} in each step; take fewer"
            " ranks, or a smaller batch"
        )


def deal(count: int, batch: int, setting: Setting, epoch: int) -> Iterator[Arr]:
    """Yield the samples of this rank's minibatches of an epoch.

    All samples are put in an order of the seed and the epoch, and the ranks take turns; what does not suffice for a
    minibatch on each rank is left out. So a step of all ranks together has the same samples with any number of ranks.
    """
    order = np.random.default_rng((setting.seed, epoch)).permutation(count)
    step = batch * setting.size
    for start in range(0, count - step + 1, step):
        begin = start + batch * setting.rank
        yield order[begin : begin + batch]


def digits() -> Images:
    """Return scikit-learn's handwritten digits, 8x8, divided as in ``examples/pytorch/digits.py``.

    Raises:
        MissingPackageError: If scikit-learn is not installed.
    """
    try:
        from sklearn.datasets import load_digits
        from sklearn.model_selection import train_test_split
    except ImportError as error:
        raise MissingPackageError(
            f"the task 'digits' needs scikit-learn ({error}); install it with: pip install scikit-learn"
        ) from error
    pixels, labels = load_digits(return_X_y=True)
    pixels = pixels.reshape(-1, 8, 8).astype(np.uint8)
    train, test, train_labels, test_labels = train_test_split(pixels, labels, train_size=DIGITS, random_state=0)
    return Images(train, train_labels, test, test_labels, mean=0, deviation=16)


def fashion(folder: str = "") -> Images:
    """Return Fashion-MNIST, 28x28, from the four files of its authors, packed by gzip or not.

    Args:
        folder: Where they are; empty for `FASHION`.

    Raises:
        MissingPackageError: If no folder is given, and Debian's package is not installed.
        SpecError: If a file is missing, or is not what it should be.
    """
    if not folder and not FASHION.is_dir():
        raise MissingPackageError(
            f"the task 'fashion' needs Fashion-MNIST, which is not in {FASHION}; install it with: apt-get install"
            " dataset-fashion-mnist, or name a folder with its four files: --data FOLDER"
        )
    where = Path(folder) if folder else FASHION
    train, train_labels = _labelled(where, "train")
    test, test_labels = _labelled(where, "t10k")
    return Images(train, train_labels, test, test_labels, mean=72.94, deviation=90.02)


def _labelled(folder: Path, part: str) -> tuple[Arr, Arr]:
    images = _read(folder, f"{part}-images-idx3-ubyte", dimensions=3)
    labels = _read(folder, f"{part}-labels-idx1-ubyte", dimensions=1)
    if images.shape[1:] != (SIDE, SIDE) or len(images) != len(labels) or len(images) == 0:
        shape = "x".join(map(str, images.shape))
        raise SpecError(
            f"{part}-images-idx3-ubyte and {part}-labels-idx1-ubyte in {folder} do not fit: they have {shape} pixels"
            f" and {len(labels)} labels, and should have as many images of {SIDE}x{SIDE} pixels as labels; {_CURE}"
        )
    if labels.max() >= _CLASSES:
        raise SpecError(
            f"{part}-labels-idx1-ubyte in {folder} has the label {labels.max()}; labels must be less than {_CLASSES};"
            f" {_CURE}"
        )
    return images, labels.astype(np.int64)


_CURE = "take the files of Fashion-MNIST as they are in Debian's package: apt-get install dataset-fashion-mnist"


def _read(folder: Path, name: str, dimensions: int) -> Arr:
    """Read a file in the format IDX: a magic number, the lengths of the dimensions in 32 bits each, and the numbers."""
    path = next((path for path in (folder / name, folder / f"{name}.gz") if path.is_file()), None)
    if path is None:
        raise SpecError(f"there is neither {name} nor {name}.gz in {folder}; {_CURE}, or --data FOLDER where they are")
    try:
        content = path.read_bytes() if path.suffix != ".gz" else gzip.decompress(path.read_bytes())
    except (EOFError, gzip.BadGzipFile, zlib.error) as error:
        raise SpecError(f"{path} is damaged ({error}); {_CURE}") from error
    header = 4 + 4 * dimensions
    if content[:4] != _MAGIC + bytes([dimensions]) or len(content) < header:
        raise SpecError(
            f"{path} begins with {content[:4].hex() or 'nothing'}, not with {_MAGIC.hex()}{dimensions:02x} and its"
            f" lengths, so it is no file of {dimensions}-dimensional bytes; {_CURE}"
        )
    shape = [int(length) for length in np.frombuffer(content, ">u4", dimensions, offset=4)]
    if len(content) != header + math.prod(shape):
        raise SpecError(
            f"{path} has {len(content) - header} bytes of data and says that it has {math.prod(shape)}; {_CURE}"
        )
    return np.frombuffer(content, np.uint8, offset=header).reshape(shape)
