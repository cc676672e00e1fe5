"""Ranks that were not set up alike are told so, all in the same words."""

from __future__ import annotations

import pytest

from hvd_compress import parse
from hvd_compress.bucketing import Gradient
from hvd_compress.checkpoint.agreement import check, describe, label
from hvd_compress.errors import DisagreementError

MODEL = [Gradient("w", (3, 4), "float32"), Gradient("b", (4,), "float32")]
TOPK = parse("topk:ratio=0.01")


def test_equal_ranks_agree() -> None:
    check(describe(TOPK, 2, MODEL) * 5)


@pytest.mark.parametrize(
    ("other", "message"),
    [
        ((parse("topk:ratio=0.02"), 2, MODEL), "rank 0 has 'topk', rank 2 has 'topk:ratio=0.02'"),
        ((parse("none"), 2, MODEL), "the method: rank 0 has 'topk', rank 2 has 'none'"),
        ((TOPK, 3, MODEL), "the merge: rank 0 has 2, rank 2 has 3"),
        ((TOPK, 2, MODEL[:1]), "parameters: rank 0 has 'b' .* at position 1, rank 2 has only 1 of them"),
        ((TOPK, 2, MODEL[::-1]), "rank 0 has 'w' .* at position 0, rank 2 has 'b'"),
        ((TOPK, 2, [MODEL[0]._replace(shape=(3, 5)), MODEL[1]]), r"shape \(3, 4\).*shape \(3, 5\)"),
        ((TOPK, 2, [MODEL[0]._replace(dtype="float64"), MODEL[1]]), "float32.*float64"),
    ],
)
def test_the_first_difference_is_named(other: tuple[object, ...], message: str) -> None:
    mine = describe(TOPK, 2, MODEL)
    with pytest.raises(DisagreementError, match=message):
        check(mine + mine + describe(*other) + mine)  # type: ignore[arg-type]


def test_labels_depend_on_the_names() -> None:
    assert label(MODEL) == label([g._replace(shape=(9,)) for g in MODEL])
    assert label(MODEL) != label(MODEL[::-1])


def test_names_may_hold_anything() -> None:
    check(describe(TOPK, 2, [Gradient('a\n"b"\u2028{', (1,), "float32")]) * 2)
