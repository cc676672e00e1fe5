"""Operators of boundaries: what is received is what was sent, as foretold in bytes and as defined by the paper."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp
from worlds import FRAMEWORKS, ops_of

from hvd_compress.core.bucket import Bucket
from hvd_compress.core.collectives import World
from hvd_compress.errors import ExchangeError, SpecError
from hvd_compress.methods.bf16 import BFloat16
from hvd_compress.methods.topk import TopK
from hvd_compress.methods.wrappers.error_feedback import ErrorFeedback
from hvd_compress.ops import Ops
from hvd_compress.ops.numpy import NumpyOps
from hvd_compress.ops.packing import packed_size
from hvd_compress.pipeline.exchanging import receive, send
from hvd_compress.pipeline.operators import OPERATORS, Mask, MinMax, SampleTopK, SharedMask, operator

NUMPY = NumpyOps()
SAMPLE = (4, 6, 5)
BUCKET = Bucket("stage", (SAMPLE,) * 3, "float32")


def activations(seed: int = 0, bucket: Bucket = BUCKET) -> np.ndarray[Any, Any]:
    return np.random.default_rng(seed).standard_normal(bucket.numel).astype(bucket.dtype)


@pytest.fixture(params=FRAMEWORKS, scope="module")
def ops(request: pytest.FixtureRequest) -> Ops:
    return ops_of(request.param)


@pytest.mark.parametrize("dtype", ["float32", "float64"])
@pytest.mark.parametrize("name", OPERATORS)
def test_what_is_received_is_what_was_sent(ops: Ops, name: str, dtype: str) -> None:
    """With states that go on from message to message at each end."""
    method, bucket = operator(name), BUCKET._replace(dtype=dtype)
    sender, receiver = method.init(ops, bucket, World(0, 1)), method.init(ops, bucket, World(0, 1))
    for step in range(3):
        sent = send(ops, method, bucket, ops.constant(activations(step, bucket)), sender)
        received = receive(ops, method, bucket, sent.payload, receiver)
        sender, receiver = sent.exchange.state, received.state
        np.testing.assert_array_equal(np.asarray(sent.exchange.total), np.asarray(received.total))
        assert np.asarray(received.total).dtype == dtype


COORDINATES = math.prod(SAMPLE)
KEPT = 3 * round(0.1 * COORDINATES)


@pytest.mark.parametrize(
    ("spec", "size"),
    [
        ("none", 4 * 3 * COORDINATES),
        ("fp16", 2 * 3 * COORDINATES),
        ("bf16", 2 * 3 * COORDINATES),
        ("topk:ratio=0.1", KEPT * (4 + 2)),  # value and place in a page
        ("topk:ratio=0.1,values=fp16", KEPT * (2 + 2)),
        ("randomk:ratio=0.1", round(0.1 * 3 * COORDINATES) * 4),
        ("minmax:bits=4", 2 * 4 + packed_size(3 * COORDINATES, 4)),  # two ends of the range, and codes
        ("minmax:bits=3", 2 * 4 + packed_size(3 * COORDINATES, 3)),
        ("qsgd:bits=8,block=360", 4 + packed_size(3 * COORDINATES, 8)),
    ],
)
def test_as_many_bytes_as_foretold(spec: str, size: int) -> None:
    method = operator(spec)
    sent = send(NUMPY, method, BUCKET, activations(), method.init(NUMPY, BUCKET, World(0, 1)))
    assert sent.payload.size == size


def test_topk_is_by_sample() -> None:
    """The largest of each sample, where one sample is a thousand times larger than the others."""
    x = activations().reshape(3, -1) * np.array([[1], [1000], [1]], np.float32)
    total = send(NUMPY, operator("topk:ratio=0.1"), BUCKET, x.ravel().copy(), ()).exchange.total.reshape(3, -1)
    for row, found in zip(x, total, strict=True):
        largest = np.argsort(-np.abs(row))[: round(0.1 * COORDINATES)]
        np.testing.assert_array_equal(np.flatnonzero(found), np.sort(largest))
        np.testing.assert_array_equal(found[largest], row[largest])


FINITE = st.floats(-(2.0**127), 2.0**127, width=32)


@given(hnp.arrays(np.float32, st.integers(1, 40), elements=FINITE), st.integers(2, 8))
def test_minmax_is_as_defined(x: np.ndarray[Any, Any], bits: int) -> None:
    bucket = Bucket("b", (x.shape,), "float32")
    found = send(NUMPY, MinMax(bits), bucket, x.copy(), ()).exchange.total
    least, most = x.min().astype(np.float64), x.max().astype(np.float64)
    step = (most - least) / (2**bits - 1)
    if step > 1e-30:  # smaller ones leave the range of float32's normal numbers
        steps = (found.astype(np.float64) - least) / step
        np.testing.assert_allclose(steps, np.round(steps), atol=1e-3)  # on levels
        assert np.abs(found - x.astype(np.float64)).max() <= step * 0.501  # and to the nearest
    assert found.min() >= least - step * 1e-3 and found.max() <= most + step * 1e-3


def test_minmax_of_equal_numbers_is_exact() -> None:
    x = np.full(BUCKET.numel, 0.3, np.float32)
    np.testing.assert_allclose(send(NUMPY, MinMax(2), BUCKET, x.copy(), ()).exchange.total, x, rtol=1e-7)


@pytest.mark.parametrize("spec", ["minmax:bits=2", "topk:ratio=0.1", "qsgd:bits=2", "powersgd:rank=1"])
def test_what_is_not_sent_is_left(spec: str) -> None:
    method = ErrorFeedback(operator(spec))
    x = activations()
    sent = send(NUMPY, method, BUCKET, x.copy(), method.init(NUMPY, BUCKET, World(0, 1)))
    np.testing.assert_allclose(sent.exchange.state.residual, x - sent.exchange.total, atol=1e-6)


@pytest.mark.parametrize(("values", "width"), [("fp32", 4), ("fp16", 2)])
def test_a_shared_mask_sends_values_alone(values: str, width: int) -> None:
    x, mask = activations(), Mask(np.array([1, 5, 200]))
    sent = send(NUMPY, SharedMask(values), BUCKET, x.copy(), mask)
    assert sent.payload.size == 3 * width
    expected = np.zeros_like(x)
    expected[mask.indices] = x[mask.indices].astype("f2" if width == 2 else "f4")
    np.testing.assert_array_equal(sent.exchange.total, expected)
    np.testing.assert_array_equal(receive(NUMPY, SharedMask(values), BUCKET, sent.payload, mask).total, expected)


@pytest.mark.parametrize("name", ["none", "topk", "minmax", "qsgd", "powersgd", "topkc"])
@pytest.mark.parametrize("damage", [slice(None, -1), slice(None, 0)])
def test_a_payload_of_the_wrong_length_is_refused(name: str, damage: slice) -> None:
    method = operator(name)
    state = method.init(NUMPY, BUCKET, World(0, 1))
    payload = send(NUMPY, method, BUCKET, activations(), state).payload
    with pytest.raises(ExchangeError, match="has the wrong length"):
        receive(NUMPY, method, BUCKET, payload[damage], state)
    with pytest.raises(ExchangeError, match="has the wrong length"):
        receive(NUMPY, method, BUCKET, np.append(payload, payload[:1]), state)


@pytest.mark.parametrize(
    ("spec", "words"),
    [
        ("topkk", "unknown operator 'topkk' .did you mean 'topk'.*there are: none, fp16"),
        ("topk:ratio=2", r"topk: ratio=2\.0 is not allowed: ratio must be in \(0, 1\]"),
        ("topk:size=3", "unknown parameter 'size' of topk"),
        ("minmax:bits=9", "minmax: bits=9 is not allowed: bits must be 2 to 8"),
        ("gtopk", "'gtopk' is a way for many ranks to agree on a sum, and a boundary has one sender"),
        ("topk:feedback=on", "feedback has no effect in .* of a boundary: write memory='ef'"),
        ("topk:warmup=3", "warmup has no effect in .* of a boundary"),
        ("qsgd:twoway=on", "twoway has no effect .* nothing comes back"),
        ("shared", "'shared' is for gradients: write backward='shared'"),
        (7, "a spec is a string"),
    ],
)
def test_refusals(spec: Any, words: str) -> None:
    with pytest.raises(SpecError, match=words):
        operator(spec)


def test_operators_by_themselves() -> None:
    assert operator(SampleTopK(ratio=0.5)) == operator("topk:ratio=0.5")
    assert operator("shared:values=fp16", backward=True) == SharedMask("fp16")
    for method in (TopK(), BFloat16(), ErrorFeedback(SampleTopK()), SharedMask()):
        with pytest.raises(SpecError, match="is no operator of a boundary"):
            operator(method)
