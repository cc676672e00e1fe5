"""Preconditioning: what is compressed is the update of Adam without momentum, from each rank's own second moments."""

from __future__ import annotations

import itertools
from typing import Any

import numpy as np
import pytest
import torch
from catalogue import EXAMPLES, one_in
from hypothesis import given, settings
from hypothesis import strategies as st
from worlds import COMPILED, FRAMEWORKS, Arr, bucket_of, normal, ops_of

from hvd_compress import LocalWorld, parse
from hvd_compress.core.collectives import World
from hvd_compress.errors import SpecError
from hvd_compress.methods.wrappers.precondition import Precondition
from hvd_compress.methods.wrappers.router import by_name, phases
from hvd_compress.methods.wrappers.schedule import schedule
from hvd_compress.ops.arrays import Shape
from hvd_compress.ops.moments import Sides, sides_of, size_of
from hvd_compress.ops.totals import dense
from hvd_compress.transport.lockstep import lockstep

SHAPES: list[Shape] = [(30, 20), (7,), (), (0,), (4, 3, 2, 2), (1, 9), (9, 1), (50, 3)]
BUCKET = bucket_of(*SHAPES)
LOSSLESS = "topk:ratio=1,min_size=0,vectors=on,preconditioned=on"


class Oracle:
    """The equations, in float64, for one rank."""

    def __init__(self, beta2: float) -> None:
        self.beta2, self.steps = beta2, 0
        self.rows: dict[int, Any] = {}
        self.columns: dict[int, Any] = {}

    def update(self, gradients: list[Arr]) -> list[Arr]:
        self.steps += 1
        bias = 1 - self.beta2**self.steps
        return [self._update(number, g.astype(np.float64), bias) for number, g in enumerate(gradients)]

    def _update(self, number: int, g: Arr, bias: float) -> Arr:
        matrix = g.reshape(len(g), -1) if g.ndim > 1 else g.reshape(-1, 1)
        if 1 in matrix.shape or not g.size:
            matrix = g.reshape(-1, 1)
        squares = matrix**2
        if matrix.shape[1] == 1:
            self.rows[number] = self._mean(self.rows.get(number, 0.0), squares)
            v = self.rows[number] / bias
        else:
            r = self.rows[number] = self._mean(self.rows.get(number, 0.0), squares.mean(axis=1))
            c = self.columns[number] = self._mean(self.columns.get(number, 0.0), squares.mean(axis=0))
            v = np.outer(r / bias, c / bias) / (r / bias).mean()
        return np.asarray(matrix / (np.sqrt(v) + 1e-8)).reshape(g.shape)

    def _mean(self, before: Any, now: Any) -> Any:
        return self.beta2 * before + (1 - self.beta2) * now


def pieces(x: Arr) -> list[Arr]:
    """The gradients of the bucket."""
    ends = np.cumsum(BUCKET.sizes)[:-1]
    return [part.reshape(shape) for part, shape in zip(np.split(x, ends), SHAPES, strict=True)]


@pytest.mark.parametrize("beta2", [0.9, 0.999])
@pytest.mark.parametrize("framework", [*FRAMEWORKS, *COMPILED])
def test_it_follows_its_equations(framework: str, beta2: float) -> None:
    ops, sides, oracle = ops_of(framework), [sides_of(shape) for shape in SHAPES], Oracle(beta2)
    second: Any = ops.zeros((sum(map(size_of, sides)),), "float32")
    for step in range(4):
        (x,) = normal(BUCKET, 1, seed=step)
        x *= np.float32(10.0) ** (step % 3 - 1)
        update, second = ops.precondition(ops.constant(x), second, sides, beta2)
        expected = np.concatenate([part.reshape(-1) for part in oracle.update(pieces(x))])
        np.testing.assert_allclose(np.asarray(update), expected, rtol=2e-5, atol=1e-6)


@settings(max_examples=50)
@given(st.integers(1, 40), st.integers(1, 40), st.integers(0, 2**32 - 1), st.integers(-30, 37))
def test_kernels_give_what_the_plain_version_gives(rows: int, columns: int, seed: int, exponent: int) -> None:
    """Also where squares leave the range of float32, and where all is zero."""
    sides = [sides_of((rows, columns)), Sides(3, 1)]
    rng, numel = np.random.default_rng(seed), rows * columns + 3
    states: list[Any] = [np.zeros(sum(map(size_of, sides)), np.float32), torch.zeros(sum(map(size_of, sides)))]
    for step in range(3):
        x = (rng.standard_normal(numel) * 10.0**exponent * (step != 1)).astype(np.float32)
        plain, states[0] = ops_of("numpy").precondition(x.copy(), states[0], sides, 0.9)
        update, states[1] = ops_of("torch").precondition(torch.tensor(x), states[1], sides, 0.9)
        np.testing.assert_allclose(update.numpy(), plain, rtol=1e-4, atol=1e-6)
        np.testing.assert_allclose(states[1].numpy(), states[0], rtol=1e-4)
        assert np.isfinite(plain).all()


def adamw(gradients: list[list[Arr]], beta2: float) -> Arr:
    """Parameters after AdamW without momentum, for one rank."""
    p = torch.ones(gradients[0][0].shape, requires_grad=True)
    optimizer = torch.optim.AdamW([p], lr=0.01, betas=(0.0, beta2), weight_decay=0.1)
    for (g,) in gradients:
        p.grad = torch.tensor(g)
        optimizer.step()
    return p.detach().numpy()


def sgd(spec: str, gradients: list[list[Arr]], ranks: int) -> Arr:
    """Parameters after plain SGD with what a compression delivers."""
    world, p = LocalWorld(parse(spec), ranks), torch.ones(gradients[0][0].shape, requires_grad=True)
    optimizer = torch.optim.SGD([p], lr=0.01, weight_decay=0.1)
    for arrays in gradients:
        p.grad = torch.tensor(world.step({"p": arrays})["p"][0])
        optimizer.step()
    return p.detach().numpy()


@pytest.mark.parametrize("beta2", [0.9, 0.999])
@pytest.mark.parametrize("spec", [LOSSLESS, "ctk:start=100,min_size=0,vectors=on,preconditioned=on"])
def test_without_loss_on_one_rank_it_is_adamw_without_momentum(spec: str, beta2: float) -> None:
    """RMSProp with its bias corrected, and decoupled decay, as PyTorch computes it. A vector has all second moments."""
    rng = np.random.default_rng(0)
    gradients = [[(rng.standard_normal(300) * 10 ** rng.uniform(-6, 3, 300)).astype(np.float32)] for _ in range(30)]
    np.testing.assert_allclose(sgd(f"{spec},beta2={beta2}", gradients, 1), adamw(gradients, beta2), atol=3e-6)


def test_a_matrix_whose_squares_have_rank_one_is_as_good_as_a_vector() -> None:
    rng = np.random.default_rng(0)
    scale = np.outer(10 ** rng.uniform(-3, 3, 20), 10 ** rng.uniform(-3, 3, 30))
    gradients = [[(rng.choice([-1, 1], (20, 30)) * scale).astype(np.float32)] for _ in range(10)]
    np.testing.assert_allclose(sgd(LOSSLESS, gradients, 1), adamw(gradients, 0.95), atol=1e-5)


def test_ranks_have_second_moments_of_their_own() -> None:
    """The total is the sum of the updates that each rank would make."""
    rng = np.random.default_rng(0)
    steps = [[rng.standard_normal((20, 30)).astype(np.float32) * 10**rank for rank in range(3)] for _ in range(5)]
    world, alone = LocalWorld(parse(LOSSLESS), 3), [LocalWorld(parse(LOSSLESS), 1) for _ in range(3)]
    for arrays in steps:
        mean = world.step({"p": arrays})["p"][0]
        own = [one.step({"p": [array]})["p"][0] for one, array in zip(alone, arrays, strict=True)]
        np.testing.assert_allclose(mean, np.mean(own, axis=0), atol=1e-5)


def takes(spec: str, options: str) -> bool:
    """Return whether a method accepts these options."""
    try:
        return not parse(joined(spec, options)).linear
    except SpecError:
        return False


def joined(spec: str, options: str) -> str:
    return f"{spec}{',' if ':' in spec else ':'}{options}" if options else spec


ARRANGED = itertools.product(EXAMPLES, ("", "feedback=ef21", "every=2", "delay=2", "measure=on"))


@pytest.mark.parametrize(("spec", "options"), one_in(8, [case for case in ARRANGED if takes(*case)]))
def test_a_method_gets_updates_as_if_they_were_gradients(spec: str, options: str) -> None:
    """Compression of preconditioned gradients is that of gradients that were preconditioned before, bit for bit."""
    inner, bucket = parse(joined(spec, options)).core, bucket_of((20, 30), (4, 3, 5, 5), (1,), (7,))
    outer, ops, sides = Precondition(inner, 0.9), ops_of("numpy"), [sides_of(shape) for shape in bucket.shapes]
    before, after = ([method.init(ops, bucket, World(0, 2)) for _ in range(2)] for method in (inner, outer))
    seconds = [state.second for state in after]
    for step in range(4):
        xs = normal(bucket, 2, seed=step)
        made = [ops.precondition(x.copy(), second, sides, 0.9) for x, second in zip(xs, seconds, strict=True)]
        seconds = [second for _, second in made]
        plain = lockstep(ops, inner, bucket, [update.copy() for update, _ in made], before)
        outcome = lockstep(ops, outer, bucket, [x.copy() for x in xs], after)
        before, after = ([one.state for one in results] for results in (plain, outcome))
        np.testing.assert_array_equal(dense(ops, outcome[0].total), dense(ops, plain[0].total))


def test_dense_steps_of_others_sum_updates_too() -> None:
    """As where a schedule is put around it."""
    ops, method = ops_of("numpy"), schedule(Precondition(parse("topk:ratio=0.1").core, 0.9), every=2)
    states = [method.init(ops, BUCKET, World(0, 2)) for _ in range(2)]
    oracles, given, got = [Oracle(0.9), Oracle(0.9)], 0.0, 0.0
    for step in range(2):
        xs = normal(BUCKET, 2, seed=step)
        results = lockstep(ops, method, BUCKET, [x.copy() for x in xs], states)
        states = [result.state for result in results]
        updates = [one.update(pieces(x)) for one, x in zip(oracles, xs, strict=True)]
        given = given + sum(np.concatenate([part.reshape(-1) for part in own]) for own in updates)
        got = got + dense(ops, results[0].total)
    np.testing.assert_allclose(got, given, atol=1e-4)


def test_the_scale_of_gradients_does_not_matter() -> None:
    worlds = [LocalWorld(parse("ctk:preconditioned=on"), 2) for _ in range(2)]
    for step in range(3):
        x, y = (g.reshape(40, 50) for g in normal(bucket_of((40, 50)), 2, seed=step))
        small, large = (world.step({"p": [x * k, y * k]})["p"][0] for world, k in zip(worlds, (1, 2**20), strict=True))
        np.testing.assert_allclose(small, large, rtol=1e-4, atol=1e-5)


def test_clip_norm_limits_each_rank_before() -> None:
    """The second moments see the clipped gradient, so that a spike is as large as its neighbours."""
    calm, spiked = (LocalWorld(parse("topk:ratio=1,preconditioned=on,clip_norm=1"), 1) for _ in range(2))
    for step in range(4):
        (x,) = normal(bucket_of((40, 50)), 1, seed=step)
        one = calm.step({"p": [x.reshape(40, 50)]})["p"][0]
        other = spiked.step({"p": [x.reshape(40, 50) * (1e6 if step == 2 else 1)]})["p"][0]
        np.testing.assert_allclose(one, other, rtol=1e-4, atol=1e-5)


def test_vectors_and_small_gradients_are_preconditioned_too() -> None:
    world = LocalWorld(parse("ctk:preconditioned=on"), 1)
    means = world.step({"bias": [np.full(7, 1e-3, np.float32)], "small": [np.full((4, 4), -9, np.float32)]})
    np.testing.assert_allclose(means["bias"][0], 1, rtol=1e-4)
    np.testing.assert_allclose(means["small"][0], -1, rtol=1e-4)


@pytest.mark.parametrize(
    "spec",
    [
        "ctk:preconditioned=on",
        "ctk:clip_norm=1.0,preconditioned=on,beta2=0.99",
        "efsignsgd:block=256,hierarchical=on,start=4,delay=3,measure=on,preconditioned=on",
        "topk:momentum=0.5,clip_norm=2.0,preconditioned=on",
        "bf16:preconditioned=on",
    ],
)
def test_specs_are_written_as_they_are_read(spec: str) -> None:
    assert str(parse(spec)) == spec
    router = parse(spec)
    assert router.preconditioned and router.needs_plain_sgd


@pytest.mark.parametrize(
    ("spec", "message"),
    [
        ("ctk:beta2=0.9", "beta2=0.9 has no effect without preconditioned=on"),
        ("ctk:preconditioned=on,beta2=1", r"beta2=1.0 is not allowed: beta2 must be in \(0, 1\)"),
        ("ctk:preconditioned=on,clip_norm=-1", "clip_norm=-1.0 is not allowed"),
        ("ctk:clip_norm=1", "clip_norm needs both or preconditioned=on"),
        ("none:preconditioned=on", "unknown parameter 'preconditioned' of none"),
    ],
)
def test_bad_options(spec: str, message: str) -> None:
    with pytest.raises(SpecError, match=message):
        parse(spec)


def test_updates_and_gradients_do_not_mix() -> None:
    updates = "ctk:preconditioned=on"
    for rules in ({"a*": updates}, {"a*": updates, "*": "topk"}, {"a*": "none", "*": updates}):
        with pytest.raises(SpecError, match="by_name mixes updates with gradients"):
            by_name({name: parse(spec) for name, spec in rules.items()})
    assert by_name({"a*": parse(updates), "*": parse("bf16:preconditioned=on")}).preconditioned
    with pytest.raises(SpecError, match="phases do not support this form"):
        phases({0: parse("ctk"), 10: parse(updates)}).route("p", (40, 50))
