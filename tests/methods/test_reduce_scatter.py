"""Reduce-scatter: each rank receives its part of the sum."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
from catalogue import EXAMPLES, bare, one_in
from worlds import Arr, bucket_of, leaves, normal, ops_of

from hvd_compress.core.collectives import Exchange
from hvd_compress.core.method import Method, ReduceScattered
from hvd_compress.core.state_tree import residual_of
from hvd_compress.errors import UnsupportedError
from hvd_compress.methods.wrappers.error_feedback import ErrorFeedback
from hvd_compress.methods.wrappers.hierarchy import Hierarchical
from hvd_compress.ops import Ops
from hvd_compress.transport.lockstep import lockstep, worlds

FITTING = [spec for spec in EXAMPLES if bare(spec).supports_reduce_scatter]
RETAINING = [spec for spec in FITTING if bare(spec).supports_feedback]
SIZES = [1, 2, 3, 5]
NODES = [(4, 2), (6, 3), (6, 2), (8, 4), (4, 4), (4, 1)]


def run(
    method: Method, xs: list[Arr], steps: int = 1, ops: Ops | None = None, local_size: int = 1
) -> tuple[Arr, list[Exchange]]:
    """Run some steps with the same gradients: the parts of all ranks in order, summed over the steps, and the ends."""
    ops = ops_of("numpy") if ops is None else ops
    bucket = bucket_of((xs[0].size,), dtype=xs[0].dtype.name)
    scattered = ReduceScattered(method)
    states = [scattered.init(ops, bucket, world) for world in worlds(len(xs), local_size)]
    total = np.zeros_like(xs[0])
    ends: list[Exchange] = []
    for _ in range(steps):
        inputs = []
        for x, state in zip(xs, states, strict=True):
            residual = scattered.residual(state)
            inputs.append(x.copy() if residual is None else x + np.asarray(residual))
        ends = lockstep(ops, _Compensated(scattered), bucket, inputs, states, local_size=local_size)
        states = [end.state for end in ends]
        total += np.concatenate([np.asarray(end.total) for end in ends])
    return total, ends


class _Compensated(ReduceScattered):
    """Takes gradients that already include the residual."""

    def __init__(self, scattered: ReduceScattered) -> None:
        super().__init__(scattered.inner)

    def residual(self, state: object) -> None:
        return None


@pytest.mark.parametrize(("spec", "size"), one_in(4, itertools.product(FITTING, SIZES)))
def test_each_rank_has_its_part_of_the_sum(spec: str, size: int) -> None:
    xs = normal(bucket_of((size * 120,)), size)
    total, ends = run(bare(spec), xs)
    assert {np.asarray(end.total).shape for end in ends} == {(120,)}
    exact = np.sum(xs, axis=0)
    bound = {"none": 1e-6, "fp16": 1e-3, "bf16": 1e-2}.get(spec, 1.5)
    assert np.linalg.norm(total - exact) < bound * np.linalg.norm(np.abs(xs).sum(axis=0))
    assert np.corrcoef(total, exact)[0, 1] > (0.3 if size > 1 else 0.5)


@pytest.mark.parametrize(("spec", "size"), one_in(4, itertools.product(RETAINING, SIZES)))
def test_what_was_sent_and_what_is_kept_is_what_there_was(spec: str, size: int) -> None:
    xs = normal(bucket_of((size * 77,), dtype="float64"), size)
    total, ends = run(ErrorFeedback(bare(spec)), xs, steps=5)
    kept = np.sum([np.asarray(residual_of(end.state)) for end in ends], axis=0)
    np.testing.assert_allclose(total + kept, 5 * np.sum(xs, axis=0), atol=1e-9)
    assert np.abs(kept).max() > 0 or spec == "none"


@pytest.mark.parametrize(("size", "local_size"), NODES)
@pytest.mark.parametrize(("inside", "bound"), [("none", 1e-6), ("fp16", 1e-3), ("int8", 1e-2)])
def test_two_levels_give_each_rank_its_part(size: int, local_size: int, inside: str, bound: float) -> None:
    xs = normal(bucket_of((size * 120,)), size)
    total, _ = run(Hierarchical(bare("none"), inside), xs, local_size=local_size)
    exact = np.sum(xs, axis=0)
    assert np.linalg.norm(total - exact) <= bound * np.linalg.norm(exact)


@pytest.mark.parametrize(("spec", "nodes"), one_in(4, itertools.product(RETAINING, NODES)))
@pytest.mark.parametrize("inside", ["none", "int8"])
def test_what_two_levels_sent_and_what_is_kept_is_what_there_was(
    spec: str, nodes: tuple[int, int], inside: str
) -> None:
    size, local_size = nodes
    xs = normal(bucket_of((size * 77,), dtype="float64"), size)
    ops = ops_of("torch" if size == 4 else "numpy")  # PyTorch's reuse memory
    total, ends = run(ErrorFeedback(Hierarchical(bare(spec), inside)), xs, 5, ops, local_size)
    kept = np.sum([np.asarray(residual_of(end.state)) for end in ends], axis=0)
    np.testing.assert_allclose(total + kept, 5 * np.sum(xs, axis=0), atol=1e-9)
    assert np.abs(kept).max() > 0 or spec == "none" or local_size == size


@pytest.mark.parametrize("spec", FITTING)
def test_pytorch_agrees_with_numpy(spec: str) -> None:
    xs = normal(bucket_of((3 * 500,)), 3)
    method = ErrorFeedback(bare(spec)) if spec in RETAINING else bare(spec)
    ours, ends = run(method, xs, steps=3, ops=ops_of("torch"))
    oracle, expected = run(method, xs, steps=3)
    np.testing.assert_allclose(ours, oracle, rtol=1e-4, atol=1e-5)
    for end, other in zip(ends, expected, strict=True):
        for path, leaf in leaves(end.state).items():
            np.testing.assert_allclose(leaf, leaves(other.state)[path], rtol=1e-4, atol=1e-5, err_msg=path)


def test_others_say_which_methods_fit() -> None:
    with pytest.raises(
        UnsupportedError, match=r"topk:ratio=0\.1 cannot reduce-scatter.*one of none, fp16, bf16, .*qsgd"
    ):
        ReduceScattered(bare("topk:ratio=0.1"))
