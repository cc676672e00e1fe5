"""What other ranks send is checked before it is used: a damaged payload is refused, or at worst gives other numbers."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from catalogue import EXAMPLES, way
from hypothesis import given, settings
from hypothesis import strategies as st
from worlds import Arr, bucket_of, normal, ops_of

import hvd_compress.transport.lockstep
from hvd_compress import parse
from hvd_compress.core.bucket import Bucket
from hvd_compress.core.collectives import AllGather, AllReduce, AllToAll, Collective, Exchange, World, run
from hvd_compress.errors import ExchangeError
from hvd_compress.ops.totals import dense
from hvd_compress.transport.lockstep import lockstep

SPECS = [spec for spec in EXAMPLES if "uint8" in str(way(spec)) or spec.startswith("scalecom")]
"""All that send what cannot be summed as it is: bytes, or the indices of a leader."""

RAGGED = ["threshold:threshold=1", "dgc:ratio=0.1,sample=0.2", "sidco:ratio=0.1"]
INDEXED = [*RAGGED, "topk:ratio=0.1", "gtopk:ratio=0.1"]

SMALL = bucket_of((20, 30), (7,))
PAGES = bucket_of((150_000,))
"""Three pages, so that payloads count the indices of each."""

RANKS = 2


class Wire:
    """The collectives of the simulator, one of which is damaged: the same for all ranks that get it.

    Args:
        at: Which of those that carry bytes or indices.
        damage: Makes another reply of a reply.
    """

    def __init__(self, at: int, damage: Any) -> None:
        self._at, self._damage = at, damage
        self._original = hvd_compress.transport.lockstep.perform

    def perform(self, messages: list[Collective], size: int) -> list[Any]:
        replies = self._original(messages, size)
        first = messages[0]
        if isinstance(first, (AllGather, AllToAll)) or (isinstance(first, AllReduce) and first.array.dtype == np.int32):
            self._at -= 1
            if self._at == -1:
                replies = [self._damage(reply) for reply in replies]
        return replies


def exchange(spec: str, framework: str, bucket: Bucket, wire: Wire) -> list[Exchange]:
    """The first exchange of a method over a damaged wire."""
    method, ops = parse(spec).core, ops_of(framework)
    states = [method.init(ops, bucket, World(0, RANKS)) for _ in range(RANKS)]
    with pytest.MonkeyPatch.context() as patch, np.errstate(all="ignore"):
        patch.setattr(hvd_compress.transport.lockstep, "perform", wire.perform)
        return lockstep(ops, method, bucket, normal(bucket, RANKS), states)


LENGTHS: dict[str, Any] = {
    "a byte less": lambda reply: reply[..., :-1],
    "a byte more": lambda reply: np.concatenate([reply, reply[..., :1]], axis=-1),
    "nothing": lambda reply: reply[..., :0],
    "twice": lambda reply: np.concatenate([reply, reply], axis=-1),
}


@pytest.mark.parametrize("framework", ["numpy", "torch"])
@pytest.mark.parametrize("spec", [spec for spec in SPECS if "scalecom" not in spec])
def test_other_lengths_are_refused(spec: str, framework: str) -> None:
    """An allreduce, as of ScaleCom, cannot change lengths."""
    for other in LENGTHS.values():
        with pytest.raises(ExchangeError, match="a payload has the wrong length"):
            exchange(spec, framework, SMALL, Wire(0, other))


def flips(n: int) -> st.SearchStrategy[list[tuple[int, int]]]:
    """Places below ``n`` and bytes to be mixed in there; often at the ends, where counts are."""
    end = st.integers(1, min(n, 400)).map(lambda i: n - i)
    place = st.one_of(st.integers(0, n - 1), st.integers(0, min(n, 24) - 1), end)
    return st.lists(st.tuples(place, st.integers(1, 255)), min_size=1, max_size=8)


def check_flips(spec: str, framework: str, bucket: Bucket, data: st.DataObject) -> None:
    """Flip bits: the exchange is refused, or gives equal totals of the right shape."""
    before: list[Arr] = []

    def damage(reply: Arr) -> Arr:
        other = np.ascontiguousarray(reply).copy()
        bits = other.view(np.uint8).reshape(-1)
        if not before:
            before.append(np.array(data.draw(flips(bits.size)), np.int64))
        np.bitwise_xor.at(bits, before[0][:, 0], before[0][:, 1].astype(np.uint8))
        return other

    try:
        results = exchange(spec, framework, bucket, Wire(data.draw(st.integers(0, 1)), damage))
    except ExchangeError as error:
        assert "damaged" in str(error)
        return
    for result in results:
        total = np.asarray(result.total)
        assert (total.shape, total.dtype.name) == ((bucket.numel,), bucket.dtype)
        np.testing.assert_array_equal(total, np.asarray(results[0].total))


@pytest.mark.slow
@pytest.mark.parametrize("framework", ["numpy", "torch"])
@pytest.mark.parametrize("spec", SPECS)
@settings(max_examples=25)
@given(data=st.data())
def test_flipped_bits_are_refused_or_give_other_numbers(spec: str, framework: str, data: st.DataObject) -> None:
    check_flips(spec, framework, SMALL, data)


@pytest.mark.slow
@pytest.mark.parametrize("framework", ["numpy", "torch"])
@pytest.mark.parametrize("spec", ["topk:ratio=0.001", "threshold:threshold=3.5"])
@settings(max_examples=25)
@given(data=st.data())
def test_flipped_bits_where_pages_are_counted(spec: str, framework: str, data: st.DataObject) -> None:
    check_flips(spec, framework, PAGES, data)


def indices(*places: int) -> Arr:
    """A payload of two ranks for a bucket of one page: the values 1, 1 of rank 0 at 0 and 1, and those of rank 1."""
    one = np.ones(2, np.float32).tobytes()
    rows = [one + np.array(places, np.uint16).tobytes() for places in ((0, 1), places)]
    return np.stack([np.frombuffer(row, np.uint8) for row in rows])


def pages(*counts: int) -> Arr:
    """The same for three pages, with these counts of both ranks."""
    return np.concatenate([np.array([counts] * RANKS, np.int32).view(np.uint8), indices(0, 1)], axis=1)


def ragged(*counts: int) -> Arr:
    """The same where each rank says how many it sends."""
    heads = np.array(counts, np.int32).view(np.uint8).reshape(RANKS, 4)
    payload: Arr = np.concatenate([heads, indices(0, 1)], axis=1).ravel()
    return payload


THRESHOLD = "threshold:threshold=1"
TWO, THREE_PAGES = bucket_of((2,)), bucket_of((3 * 2**16 - 5,))

CASES: dict[str, tuple[str, Bucket, Arr, str]] = {
    "sound": ("topk:ratio=1", TWO, indices(0, 1), ""),
    "beyond the end": ("topk:ratio=1", TWO, indices(0, 2), r"rank 1 sent indices that .* within 0 .. 1 of bucket .*b0"),
    "twice the same": ("topk:ratio=1", TWO, indices(1, 1), "rank 1 sent indices that do not ascend"),
    "descending": ("topk:ratio=1", TWO, indices(1, 0), "rank 1 sent indices that do not ascend"),
    "sound pages": ("topk:ratio=1e-5", THREE_PAGES, pages(2, 0, 0), ""),
    "counts too high": ("topk:ratio=1e-5", THREE_PAGES, pages(2, 1, 0), "counts that do not make up"),
    "counts too low": ("topk:ratio=1e-5", THREE_PAGES, pages(1, 0, 0), "counts that do not make up"),
    "negative counts": ("topk:ratio=1e-5", THREE_PAGES, pages(3, -1, 0), "counts that do not make up"),
    "counts that wrap": ("topk:ratio=1e-5", THREE_PAGES, pages(2**31 - 1, 2**31 - 1, 4), "counts that do not make up"),
    "sound numbers": (THRESHOLD, TWO, ragged(2, 2), ""),
    "a negative number": (THRESHOLD, TWO, ragged(-1, 2), "says that it has a negative number of indices"),
    "a huge number": (THRESHOLD, TWO, ragged(2**31 - 1, 2), "a payload has the wrong length"),
    "a number too low": (THRESHOLD, TWO, ragged(2, 1), "a payload has the wrong length"),
    "not even a number": (THRESHOLD, TWO, ragged(2, 2)[:18], "a payload has the wrong length"),
}
"""Spec, bucket, what all ranks are said to have sent, and the message."""


def received(spec: str, framework: str, bucket: Bucket, reply: Any) -> Any:
    """What rank 0 makes of a reply."""
    method, ops = parse(spec).core, ops_of(framework)
    method = getattr(method, "inner", method)
    x = ops.constant(np.full(bucket.numel, 2, np.float32))
    return dense(ops, run(method.exchange(ops, bucket, x, (), World(0, RANKS)), lambda message: reply).total)


@pytest.mark.parametrize("framework", ["numpy", "torch"])
@pytest.mark.parametrize("case", CASES)
def test_what_cannot_be_is_refused(case: str, framework: str) -> None:
    spec, bucket, reply, message = CASES[case]
    arrived = ops_of(framework).constant(reply)
    if message:
        with pytest.raises(ExchangeError, match=message) as error:
            received(spec, framework, bucket, arrived)
        assert "compare the versions" in str(error.value)
    else:
        assert np.asarray(received(spec, framework, bucket, arrived)).sum() == 4
