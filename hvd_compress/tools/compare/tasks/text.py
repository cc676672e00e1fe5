"""Texts as numbers, one for each word or byte, and how they are dealt out to ranks."""

from __future__ import annotations

import re
import sysconfig
from array import array
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from hvd_compress.errors import SpecError
from hvd_compress.lab import Setting

Arr = npt.NDArray[Any]

UNKNOWN, END = 0, 1
"""The numbers of ``<unk>``, for all words that are not in the vocabulary, and of ``<eos>``, for the end of a line."""

_WORD = re.compile(r"\w+(?:['\u2019]\w+)*|[^\w\s]")
_BLOCK, _PERIOD = 500, 20
"""The last of each 20 blocks of 500 words is for testing."""
LEAST = _BLOCK * _PERIOD
"""Words of a text, so that there is something to test on."""
BYTES = 256
"""How many different bytes there are."""

_EXAMPLE = (
    "a text is a file in UTF-8, for example the King James Bible: apt-get install bible-kjv, then bible -f"
    " 'ge1:1-re22:21' | cut -d' ' -f2- > kjv.txt, and --data kjv.txt"
)


class Text(NamedTuple):
    """A text in two parts."""

    words: list[str]  # The vocabulary: the word of each number
    train: Arr
    test: Arr  # The twentieth block of 500 words, the fortieth and so on, so that both parts are alike


def read(path: str, vocabulary: int, most: int = 0) -> Text:
    """Read a text.

    Words and punctuation marks are told apart; the case of letters counts; lines without words are left out.

    Args:
        path: The file.
        vocabulary: How many words are known, ``<unk>`` and ``<eos>`` among them: those that the part to train on has
            most often.
        most: Only so many words from the beginning are used; 0 for all.

    Raises:
        SpecError: If no file is named, it is not there, it is no UTF-8, or it is too short.
    """
    if not path:
        raise SpecError(f"the task 'lm' needs a text: --data FILE; {_EXAMPLE}")
    if not Path(path).is_file():
        raise SpecError(f"data={path!r} is not allowed: there is no such file; {_EXAMPLE}")
    try:
        content = Path(path).read_text("utf-8-sig")
    except UnicodeDecodeError as error:
        raise SpecError(f"{path} is not UTF-8 (byte {error.start}: {error.reason}); {_EXAMPLE}") from error
    found, numbers = _numbered(content, most)
    if len(numbers) < LEAST:
        raise SpecError(f"{path} has {len(numbers)} words, and the task needs {LEAST} at least; {_EXAMPLE}")
    testing = _testing(numbers)
    counts = np.bincount(numbers[~testing], minlength=len(found))
    counts[END] = len(numbers)  # these two are always there
    counts[UNKNOWN] = len(numbers) + 1
    kept = np.argsort(-counts, kind="stable")[:vocabulary]
    kept = kept[counts[kept] > 0]
    renumbered = np.full(len(found), UNKNOWN)
    renumbered[kept] = np.arange(len(kept))
    numbers = renumbered[numbers]
    return Text([found[one] for one in kept], numbers[~testing], numbers[testing])


def read_bytes(path: str) -> Text:
    """Read a text as bytes, which need no vocabulary.

    Args:
        path: The file; empty for the modules of Python's standard library, in the order of their names.

    Raises:
        SpecError: If there is no such file, or it is too short.
    """
    if path and not Path(path).is_file():
        raise SpecError(f"data={path!r} is not allowed: there is no such file; without it, Python's sources are read")
    files = [Path(path)] if path else sorted(Path(sysconfig.get_path("stdlib")).glob("*.py"))
    numbers = np.frombuffer(b"".join(file.read_bytes() for file in files), np.uint8)
    if len(numbers) < LEAST:
        where = path or sysconfig.get_path("stdlib")
        raise SpecError(f"{where} has {len(numbers)} bytes of text, and the task needs {LEAST} at least: --data FILE")
    testing = _testing(numbers)
    return Text([chr(one) for one in range(BYTES)], numbers[~testing], numbers[testing])


def _testing(numbers: Arr) -> Arr:
    """Return which words are for testing."""
    found: Arr = np.arange(len(numbers)) // _BLOCK % _PERIOD == _PERIOD - 1
    return found


def _numbered(content: str, most: int) -> tuple[list[str], Arr]:
    """Number words in the order in which they come."""
    known, numbers = {"<unk>": UNKNOWN, "<eos>": END}, array("q")
    for line in content.split("\n"):
        words = _WORD.findall(line)
        if words:
            numbers.extend(known.setdefault(word, len(known)) for word in words)
            numbers.append(END)
        if 0 < most <= len(numbers):
            del numbers[most:]
            break
    return list(known), np.array(numbers)


def streams(numbers: Arr, batch: int, setting: Setting, least: int, most: int | None = None) -> Arr:
    """Return this rank's sequences, of shape ``(batch, length)``, of a text cut into those of all ranks.

    Args:
        numbers: The text.
        batch: How many sequences each rank has.
        setting: Tells the rank.
        least: How many words a sequence must have.
        most: How many words all ranks have together, the first ones of each sequence; None for all.

    Raises:
        SpecError: If the sequences are too short.
    """
    count = batch * setting.size
    length = len(numbers) // count
    if length < least:
        raise SpecError(
            f"a text of {len(numbers)} words is too short for {count} sequences of {least} words; take a longer text, a"
            " smaller batch, or fewer ranks"
        )
    if most is not None:
        length = max(least, min(length, most // count))
    first = batch * setting.rank
    cut: Arr = numbers[: count * (len(numbers) // count)].reshape(count, -1)[first : first + batch, :length]
    return cut


def turned(numbers: Arr, setting: Setting, epoch: int) -> Arr:
    """Rotate a text to another beginning for each epoch and seed."""
    return np.roll(numbers, -int(np.random.default_rng((setting.seed, epoch)).integers(len(numbers))))
