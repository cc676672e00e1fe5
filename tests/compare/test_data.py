"""The data of the tasks: read as they are, dealt out to all ranks alike, and refused where they are not right."""

from __future__ import annotations

import gzip
import itertools
from collections import Counter
from pathlib import Path

import numpy as np
import pytest
from compare.files import TEST, TRAIN, idx, write_images, write_text

from hvd_compress.errors import SpecError
from hvd_compress.lab import Setting
from hvd_compress.tools.compare.tasks import data, text

SIZES = [1, 2, 3, 4]


def settings(size: int, seed: int = 0) -> list[Setting]:
    return [Setting(seed=seed, rank=rank, size=size) for rank in range(size)]


@pytest.mark.parametrize("size", SIZES)
def test_samples_are_dealt_out_whole_and_equally(size: int) -> None:
    batches = [list(data.deal(50, 4, setting, epoch=3)) for setting in settings(size)]
    steps = 50 // (4 * size)
    assert {len(one) for one in batches} == {steps}
    seen = np.concatenate([batch for one in batches for batch in one])
    assert len(set(seen)) == len(seen) == steps * 4 * size
    assert set(seen) <= set(range(50))


def test_a_step_of_all_ranks_has_the_same_samples_whatever_their_number() -> None:
    (alone,) = [list(data.deal(48, 8, setting, 0)) for setting in settings(1)]
    for size in (2, 4):
        ranks = [list(data.deal(48, 8 // size, setting, 0)) for setting in settings(size)]
        for step, batch in enumerate(alone):
            np.testing.assert_array_equal(np.concatenate([rank[step] for rank in ranks]), batch)


def test_the_order_is_of_the_seed_and_the_epoch_and_of_nothing_else() -> None:
    def order(seed: int, epoch: int) -> list[int]:
        return [int(i) for batch in data.deal(64, 8, Setting(seed=seed), epoch) for i in batch]

    np.random.seed(1)
    first = order(0, 0)
    np.random.seed(2)
    assert order(0, 0) == first
    assert np.random.random() == np.random.RandomState(2).random()
    assert len({tuple(order(seed, epoch)) for seed in range(3) for epoch in range(3)}) == 9


@pytest.mark.slow
def test_digits() -> None:
    digits = data.digits()
    assert digits.train.shape == (1408, 8, 8) and digits.test.shape == (389, 8, 8)
    assert digits.train.dtype == np.uint8
    assert set(digits.train_labels) == set(digits.test_labels) == set(range(10))
    scaled = digits.scaled(digits.train)
    assert scaled.dtype == np.float32 and (scaled.min(), scaled.max()) == (0, 1)


@pytest.mark.parametrize("packed", [True, False])
def test_fashion_is_read(tmp_path: Path, packed: bool) -> None:
    images = data.fashion(str(write_images(tmp_path, packed)))
    assert images.train.shape == (TRAIN, 28, 28) and images.test.shape == (TEST, 28, 28)
    rows = images.train.sum(axis=2).argmax(axis=1)
    np.testing.assert_array_equal(rows, 2 * images.train_labels)


def test_shares_of_the_test_images_are_equal_and_apart(tmp_path: Path) -> None:
    images = data.fashion(str(write_images(tmp_path)))
    for size, most in itertools.product(SIZES, [None, 20, 1000]):
        shares = [images.test_share(setting, most) for setting in settings(size)]
        count = min(TEST, most or TEST) // size * size
        assert {len(pixels) for pixels, _ in shares} == {len(labels) for _, labels in shares} == {count // size}
        found = Counter(pixels.tobytes() for share, _ in shares for pixels in share)
        assert found == Counter(pixels.tobytes() for pixels in images.test[:count])


IMAGES, LABELS = "train-images-idx3-ubyte", "t10k-labels-idx1-ubyte"
SMALL = idx(np.zeros((TEST, 28, 28)))


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        (f"{IMAGES}.gz", None, "neither train-images-idx3-ubyte nor train-images-idx3-ubyte.gz"),
        (f"{IMAGES}.gz", gzip.compress(SMALL)[:-9], "is damaged"),
        (f"{IMAGES}.gz", b"no gzip at all", "is damaged"),
        (f"{IMAGES}.gz", gzip.compress(SMALL)[:20] + b"\xff" * 30, "is damaged"),
        (IMAGES, SMALL[:-1], f"has {TEST * 784 - 1} bytes of data and says that it has {TEST * 784}"),
        (IMAGES, SMALL + b"\0", f"has {TEST * 784 + 1} bytes of data"),
        (IMAGES, idx(np.zeros(TEST)), "begins with 00000801, not with 00000803"),
        (IMAGES, b"", "begins with nothing"),
        (IMAGES, SMALL[:10], "begins with 00000803, not with 00000803 and its lengths"),
        (IMAGES, idx(np.zeros((TRAIN, 27, 28))), f"{TRAIN}x27x28 pixels"),
        (LABELS, idx(np.zeros(TEST - 1)), f"{TEST}x28x28 pixels and {TEST - 1} labels"),
        (LABELS, idx(np.full(TEST, 10)), "has the label 10; labels must be less than 10"),
    ],
    ids=lambda given: given if isinstance(given, str) else "",
)
def test_files_that_are_not_right(tmp_path: Path, name: str, content: bytes | None, message: str) -> None:
    write_images(tmp_path)
    if content is None:
        (tmp_path / name).unlink()
    else:
        (tmp_path / name).write_bytes(content)
    with pytest.raises(SpecError, match=message):
        data.fashion(str(tmp_path))


def read(tmp_path: Path, content: str, vocabulary: int = 50, most: int = 0) -> text.Text:
    path = tmp_path / "text"
    path.write_text(content)
    return text.read(str(path), vocabulary, most)


def told(found: text.Text, numbers: text.Arr) -> list[str]:
    return [found.words[number] for number in numbers]


def test_words_punctuation_and_line_ends(tmp_path: Path) -> None:
    line = "\ufeffDon't say: d\u2019accord, \u00e9t\u00e9!\n\n  \nThe end\n"
    found = read(tmp_path, line + "x\n" * 5000)
    assert told(found, found.train[:14]) == [
        *("Don't", "say", ":", "d\u2019accord", ",", "\u00e9t\u00e9", "!", "<eos>"),
        *("The", "end", "<eos>", "x", "<eos>", "x"),
    ]


def test_the_vocabulary_is_the_most_frequent_words_of_the_part_to_train_on(tmp_path: Path) -> None:
    rng = np.random.default_rng(0)
    found = read(tmp_path, " ".join(f"w{n}" for n in rng.geometric(0.05, 30_000)), vocabulary=12)
    whole = read(tmp_path, (tmp_path / "text").read_text(), vocabulary=1000)
    counts = Counter(told(whole, whole.train))
    assert found.words == ["<unk>", "<eos>", *(word for word, _ in counts.most_common(10))]
    known = set(found.words)
    for one, other in ((found.train, whole.train), (found.test, whole.test)):
        assert told(found, one) == [word if word in known else "<unk>" for word in told(whole, other)]


def test_every_twentieth_block_is_for_testing(tmp_path: Path) -> None:
    numbers = [f"n{i // 500}" for i in range(40_500)]
    found = read(tmp_path, " ".join(numbers), vocabulary=1000)
    assert set(told(found, found.train)) == {f"n{i}" for i in range(81) if i % 20 != 19} | {"<eos>"}
    assert found.words[found.test[0]] == "<unk>"  # it is nowhere in the part to train on
    assert (len(found.train), len(found.test)) == (38_501, 2000)


def test_the_first_words_only(tmp_path: Path) -> None:
    path = str(write_text(tmp_path / "text"))
    some, whole = text.read(path, 1000, 12_345), text.read(path, 1000)
    assert len(some.train) + len(some.test) == 12_345
    assert told(some, some.train[:9500]) == told(whole, whole.train[:9500])


@pytest.mark.parametrize("size", SIZES)
def test_sequences_cover_the_text_and_are_apart(size: int) -> None:
    numbers = np.arange(1003)
    found = [text.streams(numbers, 5, setting, 2) for setting in settings(size)]
    np.testing.assert_array_equal(np.concatenate(found).ravel(), np.arange(1003 // (5 * size) * 5 * size))
    some = np.concatenate([text.streams(numbers, 5, setting, 2, most=100) for setting in settings(size)])
    np.testing.assert_array_equal(some, np.concatenate(found)[:, : 100 // (5 * size)])


def test_epochs_begin_at_other_places_of_the_text() -> None:
    numbers = np.arange(1000)
    begins = {int(text.turned(numbers, Setting(seed=seed), epoch)[0]) for seed in range(3) for epoch in range(3)}
    assert len(begins) == 9
    turned = text.turned(numbers, Setting(), 1)
    np.testing.assert_array_equal(turned, text.turned(numbers, Setting(rank=1, size=2), 1))
    assert set(np.diff(turned)) == {1, -999}


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (None, "there is no such file"),
        (b"", "has 0 words, and the task needs 10000"),
        (b"word " * 9998, "has 9999 words, and the task needs 10000"),
        (b"caf\xe9 " * 20_000, "not UTF-8 .byte 3"),
    ],
)
def test_texts_that_are_not_right(tmp_path: Path, content: bytes | None, message: str) -> None:
    path = tmp_path / "text"
    if content is not None:
        path.write_bytes(content)
    with pytest.raises(SpecError, match=message):
        text.read(str(path), 100)


def test_a_text_too_short_for_its_ranks() -> None:
    with pytest.raises(SpecError, match="1000 words is too short for 40 sequences of 36 words"):
        text.streams(np.arange(1000), 10, Setting(size=4), 36)
