"""Streams: both ends go through the same messages, with each memory; the memories are as their papers have them."""

from __future__ import annotations

import itertools
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from catalogue import one_in
from worlds import ops_of

from hvd_compress.errors import BoundaryError, ExchangeError, SpecError
from hvd_compress.ops.numpy import NumpyOps
from hvd_compress.pipeline.operators import operator
from hvd_compress.pipeline.samples import AQSGD
from hvd_compress.pipeline.settings import Memory, Settings
from hvd_compress.pipeline.streams import Call, Kind, Stream

Arr = np.ndarray[Any, Any]

NUMPY = NumpyOps()
SHAPE = (4, 3, 5)


def stream(spec: str = "topk:ratio=0.2", memory: Memory = "none", inference: bool = True) -> Stream:
    settings = Settings.of(spec, memory=memory, inference=inference)
    return Stream("s", settings.forward, settings.forward_memory, inference)


def batch(seed: int, shape: tuple[int, ...] = SHAPE) -> Arr:
    return np.random.default_rng(seed).standard_normal(shape).astype(np.float32)


def compressed(spec: str, x: Arr) -> Arr:
    """What a message without a memory would be at the other end."""
    found: Arr = stream(spec).encode(NUMPY, x.ravel().copy(), Call(x.shape, "float32")).decoded
    return found.reshape(x.shape)


def go(sender: Stream, receiver: Stream, x: Arr, **facts: Any) -> Arr:
    """Send a minibatch, and see to it that both ends have the same."""
    call = Call(x.shape, "float32", **facts)
    kind, payload, decoded = sender.encode(NUMPY, x.ravel().copy(), call)
    found: Arr = receiver.decode(NUMPY, kind, payload, call)
    np.testing.assert_array_equal(found, decoded)
    return found.reshape(x.shape)


SPECS = ["topk:ratio=0.2", "qsgd:bits=4", "minmax:bits=3", "threshold:threshold=1.5"]
MEMORIES = ["none", "ef", "ef21", "aqsgd:samples=40", "aqsgd:samples=40,values=fp16"]


@pytest.mark.parametrize(
    ("framework", "spec", "memory"),
    one_in(3, itertools.product(["numpy", "torch"], SPECS, MEMORIES)),
)
def test_both_ends_have_the_same(framework: str, spec: str, memory: str) -> None:
    ops, sender, receiver = ops_of(framework), stream(spec, memory), stream(spec, memory)
    order = np.random.default_rng(0)
    for step in range(6):
        call = Call(SHAPE, "float32", training=step != 3, ids=order.permutation(8)[:4])
        kind, payload, decoded = sender.encode(ops, ops.constant(batch(step).ravel()), call)
        found = receiver.decode(ops, kind, payload, call)
        np.testing.assert_array_equal(np.asarray(found), np.asarray(decoded))


def test_error_feedback() -> None:
    """Karimireddy et al., 2019: what was sent and what is left add up to what should have been sent."""
    sender, receiver, residual = stream(memory="ef"), stream(memory="ef"), np.zeros(SHAPE, np.float32)
    for step in range(5):
        expected = compressed("topk:ratio=0.2", batch(step) + residual)
        found = go(sender, receiver, batch(step))
        np.testing.assert_array_equal(found, expected)
        residual = batch(step) + residual - expected


def test_ef21() -> None:
    """Richtarik et al., 2021: the other end has what it knew, and the compressed change."""
    sender, receiver, known = stream(memory="ef21"), stream(memory="ef21"), np.zeros(SHAPE, np.float32)
    for step in range(5):
        known = known + compressed("topk:ratio=0.2", batch(step) - known)
        np.testing.assert_allclose(go(sender, receiver, batch(step)), known, atol=1e-6)


@pytest.mark.parametrize("values", ["fp32", "fp16"])
def test_aqsgd(values: str, tmp_path: Path) -> None:
    """Wang et al., 2022: in full at the first visit, then the compressed change of each sample; also on disk."""
    ends = [stream(memory=AQSGD(12, values, folder)) for folder in ("", str(tmp_path))]
    known: dict[int, Arr] = {}
    dtype = np.float32 if values == "fp32" else np.float16
    order = np.random.default_rng(3)
    for step in range(12):
        ids, x = order.permutation(12)[:4], batch(step)
        old = [i for i, sample in enumerate(ids) if sample in known]
        expected = x.copy()
        if old:
            before = np.stack([known[ids[i]] for i in old]).astype(np.float32)
            expected[old] = before + compressed("topk:ratio=0.2", x[old] - before)
        np.testing.assert_array_equal(go(ends[0], ends[1], x, ids=ids), expected)
        known |= {int(sample): expected[i].astype(dtype) for i, sample in enumerate(ids)}
    assert len(known) == 12 and not list(tmp_path.iterdir())


def test_aqsgd_sends_less_from_the_second_visit_on() -> None:
    sender, ids = stream(memory="aqsgd:samples=4"), np.arange(4)
    sizes = [
        sender.encode(NUMPY, batch(step).ravel(), Call(SHAPE, "float32", ids=ids)).payload.size for step in range(3)
    ]
    assert sizes == [4 * 60, 4 * 3 * 6, 4 * 3 * 6]


@pytest.mark.parametrize("memory", MEMORIES)
def test_what_is_not_finite_arrives_and_does_no_harm(memory: str) -> None:
    spoilt = batch(1)
    spoilt[2, 1, 1] = np.nan
    pair, clean = (stream(memory=memory), stream(memory=memory)), (stream(memory=memory), stream(memory=memory))
    ids = np.arange(4)
    go(*pair, batch(0), ids=ids), go(*clean, batch(0), ids=ids)
    np.testing.assert_array_equal(go(*pair, spoilt, ids=ids), spoilt)
    np.testing.assert_array_equal(go(*pair, batch(2), ids=ids), go(*clean, batch(2), ids=ids))


@pytest.mark.parametrize("memory", MEMORIES)
def test_inference_is_with_compression_or_without_and_never_touches_memories(memory: str) -> None:
    ids = np.arange(4)
    pair = stream(memory=memory, inference=True), stream(memory=memory, inference=True)
    clean = stream(memory=memory), stream(memory=memory)
    go(*pair, batch(0), ids=ids), go(*clean, batch(0), ids=ids)
    np.testing.assert_array_equal(go(*pair, batch(1), training=False), compressed("topk:ratio=0.2", batch(1)))
    np.testing.assert_array_equal(go(*pair, batch(2), ids=ids), go(*clean, batch(2), ids=ids))
    off = stream(memory=memory, inference=False)
    np.testing.assert_array_equal(go(off, off, batch(1), training=False), batch(1))


@pytest.mark.parametrize("memory", ["ef", "ef21"])
@pytest.mark.parametrize("shape", [(3, 3, 5), (4, 5, 3)])
def test_a_residual_has_one_shape(memory: str, shape: tuple[int, ...]) -> None:
    pair = stream(memory=memory), stream(memory=memory)
    first = go(*pair, batch(0))
    with pytest.raises(BoundaryError, match=rf"memory='{memory}' needs messages of one shape: it began with float32"):
        go(*pair, batch(1, shape))
    again = stream(memory=memory), stream(memory=memory)
    np.testing.assert_array_equal(go(*again, batch(0)), first)
    np.testing.assert_array_equal(go(*pair, batch(2)), go(*again, batch(2)))  # nothing is lost


@pytest.mark.parametrize("memory", ["none", "aqsgd:samples=40"])
def test_other_memories_take_any_number_of_samples(memory: str) -> None:
    pair = stream(memory=memory), stream(memory=memory)
    for step, samples in enumerate([4, 3, 1, 4]):
        go(*pair, batch(step, (samples, 3, 5)), ids=np.arange(samples))


@pytest.mark.parametrize(
    ("ids", "words"),
    [
        (None, "has to know the samples: give their ids"),
        ([0, 1, 2, 40], r"unknown sample id 40: with samples=40 the ids are 0 \.\. 39"),
        ([0, -1, 2, 3], "unknown sample id -1"),
        ([0, 1, 1, 2], "more than once"),
        ([0, 1, 2], "one for each of the 4 samples"),
        ([0.0, 1.0, 2.0, 3.0], "ids are whole numbers"),
    ],
)
def test_ids_that_cannot_be(ids: Any, words: str) -> None:
    sender = stream(memory="aqsgd:samples=40")
    with pytest.raises(BoundaryError, match=words):
        sender.encode(NUMPY, batch(0).ravel(), Call(SHAPE, "float32", ids=None if ids is None else np.array(ids)))


def test_samples_have_one_shape() -> None:
    sender = stream(memory="aqsgd:samples=40")
    sender.encode(NUMPY, batch(0).ravel(), Call(SHAPE, "float32", ids=np.arange(4)))
    with pytest.raises(BoundaryError, match=r"remembers 15 numbers of each sample, and now there are 16 \(shape \(16,"):
        sender.encode(NUMPY, batch(0, (4, 16)).ravel(), Call((4, 16), "float32", ids=np.arange(4)))


def test_memory_is_bounded() -> None:
    sender = stream(memory=AQSGD(10**9, limit=1.5))
    with pytest.raises(BoundaryError, match=r"takes 55.88 GiB at each end, more than limit=1.5: take values=fp16"):
        sender.encode(NUMPY, batch(0).ravel(), Call(SHAPE, "float32", ids=np.arange(4)))


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ({"memory": "eff"}, "memory='eff' is not allowed .did you mean 'ef'"),
        ({"memory": "ef:decay=1"}, "memory='ef:decay=1' is not allowed"),
        ({"memory": "aqsgd"}, "aqsgd: samples=0 is not allowed: samples must be at least 1"),
        ({"memory": "aqsgd:samples=9,values=int8"}, "aqsgd: values='int8' is not allowed"),
        ({"memory": "aqsgd:samples=9,folder=nowhere"}, "there is no such folder"),
        ({"memory": ("none", "aqsgd:samples=9")}, "aqsgd is a memory of activations"),
        ({"memory": ("none", "ef", "ef")}, "that of activations and of gradients"),
        ({"backward": "qsgd:norm=l2", "memory": "ef"}, "memory='ef' is not supported with qsgd:norm=l2"),
        ({"backward": "shared"}, "takes the mask of activations, and forward='none' has none"),
        ({"forward": "topk", "backward": "shared", "memory": "ef"}, "memory='ef' is not supported with shared"),
        ({"forward": "shared"}, "'shared' is for gradients"),
    ],
)
def test_settings_that_cannot_be(arguments: dict[str, Any], words: str) -> None:
    with pytest.raises(SpecError, match=words):
        Settings.of(**arguments)


def test_a_pair_of_memories() -> None:
    settings = Settings.of("topk:ratio=0.1", "topk:ratio=0.5", memory=("none", "ef"))
    assert (settings.forward_memory, settings.backward_memory) == ("none", "ef")
    assert Settings.of("none", "topk", memory="ef").forward_memory == "none"
    assert Settings.of("topk", "topk", memory="aqsgd:samples=3").backward_memory == "none"
    assert settings.forward == operator("topk:ratio=0.1")


def test_the_fingerprint_tells_settings_apart(tmp_path: Path) -> None:
    one = Settings.of("topk:ratio=0.1", memory=AQSGD(3))
    assert one.fingerprint == Settings.of("topk:ratio=0.1", memory=AQSGD(3, folder=str(tmp_path))).fingerprint
    others = [Settings.of("topk:ratio=0.2", memory=AQSGD(3)), one._replace(inference=False), Settings.of()]
    assert len({s.fingerprint for s in (one, *others)}) == 4


def test_raw_messages_are_checked_too() -> None:
    call = Call(SHAPE, "float32", training=False)
    off = stream(inference=False)
    kind, payload, _ = off.encode(NUMPY, batch(0).ravel(), call)
    assert kind is Kind.RAW
    with pytest.raises(ExchangeError, match="has the wrong length"):
        off.decode(NUMPY, kind, payload[:-4], call)
