"""Small files in the formats of the tasks' data."""

from __future__ import annotations

import gzip
import struct
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

TRAIN, TEST = 300, 53


def idx(numbers: npt.NDArray[Any]) -> bytes:
    """Bytes in the format IDX."""
    return struct.pack(f">HBB{numbers.ndim}I", 0, 8, numbers.ndim, *numbers.shape) + numbers.astype(np.uint8).tobytes()


def write_images(folder: Path, packed: bool = True, train: int = TRAIN, test: int = TEST) -> Path:
    """Images that are easy to tell apart: of class c, one row in three is bright, and its place depends on c."""
    rng = np.random.default_rng(0)
    for part, count in (("train", train), ("t10k", test)):
        labels = rng.integers(10, size=count)
        images = rng.integers(60, size=(count, 28, 28))
        images[np.arange(count), 2 * labels] += 150
        for name, numbers in ((f"{part}-images-idx3-ubyte", images), (f"{part}-labels-idx1-ubyte", labels)):
            content = idx(numbers)
            path = folder / (f"{name}.gz" if packed else name)
            path.write_bytes(gzip.compress(content) if packed else content)
    return folder


def write_text(path: Path, lines: int = 3000, words: int = 40) -> Path:
    """Lines of eight: five words, each of which tells something of the next, two marks, and the end of the line."""
    rng, word, written = np.random.default_rng(0), 0, []
    for _ in range(lines):
        line = []
        for _ in range(5):
            word = (3 * word + 1) % words if rng.random() < 0.6 else int(rng.integers(words))
            line.append(f"w{word}")
        written.append(f"{' '.join(line[:3])}, {' '.join(line[3:])}.\n")
    path.write_text("".join(written))
    return path
