"""SparseLoCo: templar's ``compress.py`` and ``neurons.py``, written out in numpy, against the preset and the method."""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np
import pytest
from worlds import FRAMEWORKS, Arr, bucket_of, normal, ops_of

from hvd_compress import LocalWorld, parse
from hvd_compress.core.collectives import World
from hvd_compress.errors import SpecError
from hvd_compress.local.settings import PRESETS
from hvd_compress.methods.sparseloco import SparseLoCo
from hvd_compress.methods.wrappers.error_feedback import ErrorFeedback
from hvd_compress.transport.lockstep import lockstep

PRESET = PRESETS["sparseloco"].compression


class Message(NamedTuple):
    """What a rank sends of a tensor: places within chunks and decoded values, a row for each chunk."""

    places: Arr
    values: Arr


def blocks(x: Arr, target: int) -> Arr:
    """``ChunkingTransformer.encode``: a row for each chunk, whose sides are divisors of those of the matrix."""
    h, w = (max(d for d in range(1, n + 1) if n % d == 0 and d <= target) for n in (x if x.ndim > 1 else x[None]).shape)
    matrix = x if x.ndim > 1 else x[None]
    return np.stack(
        [
            matrix[i : i + h, j : j + w].ravel()
            for i in range(0, matrix.shape[0], h)
            for j in range(0, matrix.shape[1], w)
        ]
    )


def unblocks(rows: Arr, like: Arr, target: int) -> Arr:
    """``ChunkingTransformer.decode``: each number goes back to where it came from."""
    found = np.zeros(like.size)
    found[blocks(np.arange(like.size).reshape(like.shape), target).ravel()] = rows.ravel()
    return found.reshape(like.shape)


def two_bits(values: Arr) -> Arr:
    """``_quantize_values`` and ``_dequantize_values``."""
    shift = values.mean()
    centred = values - shift
    scale = 6 * np.sqrt((centred**2).sum() / (values.size - 1)) / 4
    codes = np.clip(np.round(centred / (scale or 1.0) + 2), 0, 3)
    lookup = [centred[codes == code].mean() if (codes == code).any() else 0.0 for code in range(4)]
    decoded: Arr = np.array(lookup)[codes.astype(int)] + shift
    return decoded


def compress(x: Arr, topk: int, target: int) -> Message:
    """``compress``, with ties to the lower place."""
    rows = blocks(x, target)
    k = max(min(topk, rows.shape[1]), 2)
    places = np.argsort(-np.abs(rows), axis=1, kind="stable")[:, : k - k % 2]
    return Message(places, two_bits(np.take_along_axis(rows, places, 1)))


def decompress(messages: list[Message], like: Arr, target: int) -> Arr:
    """``decompress``: ``scatter_reduce(..., "mean", include_self=False)``."""
    sums, counts = np.zeros_like(blocks(like, target)), np.zeros_like(blocks(like, target))
    for places, values in messages:
        for row in range(len(places)):
            sums[row, places[row]] += values[row]
            counts[row, places[row]] += 1
    return unblocks(sums / np.maximum(counts, 1), like, target)


def batch_decompress(messages: list[Message], like: Arr, target: int) -> Arr:
    """``batch_decompress``: norms are clipped to their median, the lower one of two."""
    norms = [np.linalg.norm(one.values) for one in messages]
    median = sorted(norms)[(len(norms) - 1) // 2]
    clipped = [one.values * min(median / (norm + 1e-8), 1) for one, norm in zip(messages, norms, strict=True)]
    return decompress([one._replace(values=v) for one, v in zip(messages, clipped, strict=True)], like, target)


class Templar:
    """``prepare_gradient_dict`` of some ranks and ``outer_step``, for one tensor."""

    def __init__(self, ranks: int, topk: int = 64, target: int = 64) -> None:
        self.kept: list[Any] = [0.0] * ranks
        self._how = topk, target

    def step(self, gradients: list[Arr]) -> Arr:
        messages = []
        for rank, gradient in enumerate(gradients):
            p = 0.95 * self.kept[rank] + gradient
            messages.append(compress(p, *self._how))
            self.kept[rank] = p - decompress(messages[-1:], p, self._how[1])
        return batch_decompress(messages, gradients[0], self._how[1])


SHAPES = [(128, 192), (100, 48), (64, 13), (7, 66), (1, 72), (96,), (64,), (6,)]
"""Of whole chunks, of chunks with smaller sides, of one column or row, and vectors."""


@pytest.mark.parametrize("size", [1, 2, 3, 4])
def test_the_preset_averages_as_templar_does(size: int) -> None:
    """Round after round, with gradients that have much in common and with others."""
    world, theirs, rng = (
        LocalWorld(PRESET, size),
        {str(shape): Templar(size) for shape in SHAPES},
        np.random.default_rng(0),
    )
    for step in range(5):
        common = {str(shape): rng.standard_t(3, shape) for shape in SHAPES}
        share = 0.9 if step % 2 else 0.0
        gradients = {
            name: [share * one + (1 + rank) * rng.standard_t(3, one.shape) for rank in range(size)]
            for name, one in common.items()
        }
        means = world.step(gradients)
        for name, found in means.items():
            expected = theirs[name].step(gradients[name])
            for mean in found:
                np.testing.assert_allclose(mean, expected, rtol=1e-6, atol=1e-9, err_msg=name)


@pytest.mark.parametrize("framework", FRAMEWORKS)
def test_several_tensors_in_a_bucket_are_apart(framework: str) -> None:
    """Each has its own chunks, bins and norm, also with tensors without elements; and the residual is theirs."""
    shapes, ranks = [(12, 20), (0, 3), (40,), (9, 2, 5), ()], 3
    bucket, ops = bucket_of(*shapes, dtype="float64"), ops_of(framework)
    method = ErrorFeedback(SparseLoCo(k=4, side=8), decay=0.95)
    states = [method.init(ops, bucket, World(0, ranks)) for _ in range(ranks)]
    matrices = [(12, 20), (40,), (9, 10)]
    theirs = [Templar(ranks, 4, 8) for _ in matrices]
    bounds = np.cumsum([0, *(int(np.prod(shape)) for shape in matrices)])
    for step in range(4):
        xs = normal(bucket, ranks, seed=step)
        results = lockstep(ops, method, bucket, [x.copy() for x in xs], states)
        states = [result.state for result in results]
        for one, shape, start, stop in zip(theirs, matrices, bounds, bounds[1:], strict=False):
            expected = ranks * one.step([x[start:stop].reshape(shape) for x in xs])
            for rank in range(ranks):
                total = np.asarray(results[rank].total)[start:stop]
                np.testing.assert_allclose(total, expected.ravel(), rtol=1e-6, atol=1e-9)
                kept = np.asarray(states[rank].residual)[start:stop]
                np.testing.assert_allclose(kept, 0.95 * one.kept[rank].ravel(), rtol=1e-6, atol=1e-9)


def means(*ranks: Any, **params: Any) -> Arr:
    """Return the mean of one matrix of each rank, after one exchange."""
    spec = ",".join(["sparseloco:min_size=0,vectors=on", *(f"{key}={value}" for key, value in params.items())])
    mean: Arr = LocalWorld(spec, len(ranks)).step([np.asarray(one, np.float64) for one in ranks])[0]
    return mean


def test_a_coordinate_is_averaged_over_its_senders_alone() -> None:
    first, second, third = np.zeros((3, 4, 4))
    first[0, :2] = 3, 3
    second[0, 1:3] = 3, 3
    third[0, 1], third[3, 3] = 3, 3
    np.testing.assert_allclose(means(first, second, third, k=2), np.maximum(first, np.maximum(second, third)))


@pytest.mark.parametrize("value", [0.0, -0.0, 2.5, -1e-30])
def test_without_a_deviation_all_values_are_their_mean(value: float) -> None:
    np.testing.assert_array_equal(means(*[np.full((8, 8), value)] * 3), value)


def test_a_rank_is_clipped_to_the_median() -> None:
    mean = means(*[[[size, 0.0], [0.0, 0.0]] for size in (1, 2, 100)], k=1)
    np.testing.assert_allclose(mean, np.array([[(1 + 2 + 2) / 3, 0], [0, 0]]))


def test_a_rank_without_gradient_counts_as_a_sender_of_zeros() -> None:
    """Of three, one changes the mean; of two, the median is its norm, so that all send zeros."""
    x = np.zeros((4, 4))
    x[0, :2] = 6, 6
    np.testing.assert_allclose(means(x, x, np.zeros((4, 4)), k=2), 2 / 3 * x)
    assert not means(x, np.zeros((4, 4)), k=2).any()


def test_64_of_64_times_64_take_146_times_fewer_bytes() -> None:
    world = LocalWorld(parse("sparseloco"), 2)
    world.step([x.reshape(1024, 1024).astype(np.float32) for x in normal(bucket_of((1024, 1024)), 2)])
    assert world.bytes_sent == 256 * 64 * 14 // 8 + 16
    assert int(4 * 2**20 / world.bytes_sent) == 146


@pytest.mark.parametrize(
    ("params", "message"),
    [
        ({"k": 0}, "k=0 is not allowed: k must be in 1 .. 4096"),
        ({"side": 65}, "side=65 is not allowed: side must be in 1 .. 64"),
    ],
)
def test_bad_parameters(params: dict[str, Any], message: str) -> None:
    with pytest.raises(SpecError, match=message):
        SparseLoCo(**params)
