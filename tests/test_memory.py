"""What is kept between steps: each memory is that of its paper's equations, around any method."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from catalogue import one_in
from worlds import FRAMEWORKS, Arr, bucket_of, leaves, normal, ops_of

from hvd_compress import parse
from hvd_compress.core.collectives import World
from hvd_compress.core.method import Method
from hvd_compress.core.state_tree import flatten, unflatten
from hvd_compress.errors import SpecError
from hvd_compress.methods.cast import Dense
from hvd_compress.methods.dgc import DGC
from hvd_compress.methods.powersgd import PowerSGD
from hvd_compress.methods.scalecom import ScaleCom
from hvd_compress.methods.topk import TopK
from hvd_compress.methods.wrappers.error_feedback import EF21, ErrorFeedback
from hvd_compress.methods.wrappers.momentum import Momentum, MomentumCorrection
from hvd_compress.methods.wrappers.router import Selective
from hvd_compress.ops import Ops
from hvd_compress.ops.numpy import NumpyOps
from hvd_compress.transport.lockstep import lockstep

BUCKET = bucket_of((40, 25), dtype="float64")


class Run:
    """Ranks that exchange normal gradients, others in each step."""

    def __init__(self, method: Method, ranks: int = 2, framework: str = "numpy") -> None:
        self.ops, self.method, self.ranks, self.number = ops_of(framework), method, ranks, 0
        self.states: list[Any] = [method.init(self.ops, BUCKET, World(0, ranks)) for _ in range(ranks)]

    def step(self, xs: list[Arr] | None = None) -> tuple[list[Arr], Arr]:
        """Gives the gradients and the total."""
        xs = normal(BUCKET, self.ranks, seed=self.number) if xs is None else xs
        results = lockstep(self.ops, self.method, BUCKET, xs, self.states)
        self.states = [result.state for result in results]
        self.totals = [np.asarray(result.total) for result in results]
        self.number += 1
        return xs, self.totals[0].copy()

    def leaf(self, name: str) -> list[Arr]:
        return [np.array(getattr(state, name)) for state in self.states]


def largest(x: Arr, k: int) -> Arr:
    """Everything but the k largest magnitudes set to zero."""
    kept = np.zeros_like(x)
    places = np.argsort(-np.abs(x), kind="stable")[:k]
    kept[places] = x[places]
    return kept


@pytest.mark.parametrize("framework", FRAMEWORKS)
@pytest.mark.parametrize(("decay", "lowpass"), [(1.0, 1.0), (0.9, 1.0), (1.0, 0.1), (0.5, 0.3)])
def test_error_feedback(decay: float, lowpass: float, framework: str) -> None:
    run = Run(ErrorFeedback(TopK(ratio=0.02), decay, lowpass), framework=framework)
    residuals = [np.zeros(1000)] * 2
    for _ in range(5):
        xs, total = run.step()
        ps = [x + decay * e for x, e in zip(xs, residuals, strict=True)]
        np.testing.assert_allclose(total, sum(largest(p, 20) for p in ps), atol=1e-12)
        residuals = [(1 - lowpass) * e + lowpass * (p - largest(p, 20)) for p, e in zip(ps, residuals, strict=True)]
        for mine, true in zip(run.leaf("residual"), residuals, strict=True):
            np.testing.assert_allclose(mine, decay * true, atol=1e-12)


@pytest.mark.parametrize("framework", FRAMEWORKS)
def test_ef21(framework: str) -> None:
    run = Run(EF21(TopK(ratio=0.1)), framework=framework)
    known = [np.zeros(1000)] * 2
    for _ in range(5):
        xs, total = run.step()
        known = [h + largest(x - h, 100) for h, x in zip(known, xs, strict=True)]
        np.testing.assert_allclose(total, sum(known), atol=1e-12)


@pytest.mark.parametrize(
    "spec", one_in(5, ["topk:ratio=0.1", "onebit", "powersgd:rank=2", "qsgd:bits=3", "blockk:ratio=0.1"])
)
def test_ef21_comes_to_a_gradient_that_stays(spec: str) -> None:
    """The error of a constant gradient falls to zero, however little is sent."""
    run = Run(EF21(parse(f"{spec},feedback=off" if ":" in spec else f"{spec}:feedback=off").core))
    xs = normal(BUCKET, 2)
    errors = [np.linalg.norm(run.step(xs)[1] - sum(xs)) for _ in range(120)]
    assert errors[-1] < 0.05 * errors[0]


@pytest.mark.parametrize("framework", FRAMEWORKS)
@pytest.mark.parametrize("clip", [0.0, 3.0])
@pytest.mark.parametrize("nesterov", [False, True])
@pytest.mark.parametrize("method", [TopK(ratio=0.02), DGC(ratio=0.02, sample=1.0)])
def test_deep_gradient_compression(method: TopK | DGC, nesterov: bool, clip: float, framework: str) -> None:
    """20 steps of Algorithm 4 of Lin et al., in dense mathematics, and for Nesterov's momentum its section B."""
    m, ranks = 0.9, 3
    run = Run(MomentumCorrection(method, m, nesterov, clip), ranks, framework)
    u, v = [np.zeros(1000)] * ranks, [np.zeros(1000)] * ranks
    for _ in range(20):
        gs, total = run.step()
        sent = []
        for i, g in enumerate(gs):
            if clip:
                g = g * min(1.0, clip / np.sqrt(ranks) / np.linalg.norm(g))
            if nesterov:
                u[i] = m * (u[i] + g)
                v[i] = v[i] + u[i] + g
            else:
                u[i] = m * u[i] + g
                v[i] = v[i] + u[i]
            mask = largest(v[i], 20) != 0
            sent.append(v[i] * mask)
            v[i], u[i] = v[i] * ~mask, u[i] * ~mask
        np.testing.assert_allclose(total, sum(sent), atol=1e-10)
    for mine, true in zip(run.leaf("velocity"), u, strict=True):
        np.testing.assert_allclose(mine, true, atol=1e-10)


@pytest.mark.parametrize("nesterov", [False, True])
def test_momentum_is_that_of_an_optimizer(nesterov: bool) -> None:
    """SGD without momentum, given the totals, takes the steps of `torch.optim.SGD` with momentum."""
    import torch

    run = Run(Momentum(Dense(), 0.9, nesterov))
    weights, parameter = np.zeros(1000), torch.nn.Parameter(torch.zeros(1000, dtype=torch.float64))
    optimizer = torch.optim.SGD([parameter], lr=0.1, momentum=0.9, nesterov=nesterov)
    for _ in range(5):
        xs, total = run.step()
        weights = weights - 0.1 * total
        parameter.grad = torch.tensor(sum(xs))
        optimizer.step()
        np.testing.assert_allclose(weights, parameter.detach().numpy(), atol=1e-12)


def test_without_loss_momentum_correction_is_momentum() -> None:
    """If everything is sent there is nothing to mask but the velocity itself (ratio 1 masks it all: plain SGD)."""
    plain, corrected = Run(Momentum(PowerSGD(rank=25))), Run(MomentumCorrection(PowerSGD(rank=25)))
    for _ in range(5):
        np.testing.assert_allclose(plain.step()[1], corrected.step()[1], atol=1e-9)


@pytest.mark.parametrize(
    "memory",
    [ErrorFeedback(TopK()), ErrorFeedback(TopK(), decay=0.5), EF21(TopK()), MomentumCorrection(TopK())],
)
def test_a_dense_exchange_sends_all_that_was_kept(memory: Any) -> None:
    """After it nothing waits: of error feedback the residual is gone, and EF21 knows the gradients exactly."""
    run = Run(memory)
    for _ in range(3):
        run.step()
    before = run.states
    xs = normal(BUCKET, 2, seed=9)
    dense = lockstep(run.ops, _dense(memory), BUCKET, xs, before)
    total, states = np.asarray(dense[0].total), [result.state for result in dense]
    if isinstance(memory, ErrorFeedback):
        np.testing.assert_allclose(total, sum(xs) + sum(s.residual for s in before), atol=1e-12)
    if isinstance(memory, EF21):
        np.testing.assert_allclose(total, sum(xs), atol=1e-12)
        np.testing.assert_array_equal(states[1].local, xs[1])
    if isinstance(memory, MomentumCorrection):
        us = [0.9 * s.velocity + x for s, x in zip(before, xs, strict=True)]
        np.testing.assert_allclose(total, sum(us) + sum(s.residual for s in before), atol=1e-12)
    for state in states:
        assert not np.any(getattr(state, "residual", 0))


def _dense(memory: Method) -> Any:
    class Dense(type(memory)):  # type: ignore[misc]
        exchange = type(memory).dense

    return Dense(**{name: getattr(memory, name) for name in memory.__dataclass_fields__})  # type: ignore[attr-defined]


@pytest.mark.parametrize(
    "spec",
    ["topk:feedback=ef21", "topk:momentum=0.9", "dgc:ratio=0.1", "qsgd:momentum=0.9", "topk:every=2", "topk:delay=2"],
)
def test_totals_share_no_memory_with_the_state(spec: str) -> None:
    """Drivers scale totals in place."""
    calm, rough = Run(parse(spec).core), Run(parse(spec).core)
    for _ in range(4):
        np.testing.assert_array_equal(calm.step()[1], rough.step()[1])
        rough.totals[0] *= 0


@pytest.mark.parametrize(
    ("spec", "memory"),
    [
        ("topk", ErrorFeedback(TopK())),
        ("topk:feedback=off", TopK()),
        ("topk:feedback=ef21", EF21(TopK())),
        ("topk:decay=0.9", ErrorFeedback(TopK(), decay=0.9)),
        ("topk:momentum=0.5,nesterov=on,clip_norm=2", MomentumCorrection(TopK(), 0.5, True, 2.0)),
        ("topk:momentum=0.5,feedback=off", Momentum(TopK(), 0.5)),
        ("dgc", MomentumCorrection(DGC(), 0.9)),
        ("dgc:momentum=0", ErrorFeedback(DGC())),
        ("scalecom", ErrorFeedback(ScaleCom(), lowpass=0.1)),
        ("scalecom:lowpass=1", ErrorFeedback(ScaleCom())),
        ("scalecom:feedback=off", ScaleCom()),
        ("scalecom:feedback=ef21", EF21(ScaleCom())),
    ],
)
def test_what_specs_mean(spec: str, memory: Method) -> None:
    assert parse(spec).core == memory


def test_dense_tensors_get_their_momentum_too() -> None:
    """The optimizer has none, so biases would go without."""
    method = parse("dgc:momentum=0.8,nesterov=on")
    assert isinstance(method, Selective)
    assert method.route("bias", (10,)) == Momentum(Dense(), 0.8, True)
    assert parse("topk").route("bias", (10,)) == Dense()


@pytest.mark.parametrize(
    ("spec", "message"),
    [
        ("topk:feedback=off,decay=0.5", "decay=0.5 has no effect for topk with this feedback"),
        ("topk:feedback=ef21,lowpass=0.5", "lowpass=0.5 has no effect"),
        ("topk:momentum=0.9,decay=0.5", "decay=0.5 has no effect"),
        ("topk:nesterov=on", "nesterov=on has no effect"),
        ("topk:clip_norm=1", "clip_norm=1.0 has no effect"),
        ("topk:momentum=0.9,feedback=ef21", "momentum is not supported with feedback=ef21"),
        ("topk:momentum=1", "momentum=1.0 is not allowed"),
        ("topk:decay=0", "decay=0.0 is not allowed"),
        ("topk:lowpass=2", "lowpass=2.0 is not allowed"),
        ("topk:momentum=0.9,clip_norm=-1", "clip_norm=-1.0 is not allowed"),
        ("signsgd:feedback=ef21", "feedback=ef21 is not supported"),
        ("signsgd:momentum=0.9,feedback=on", "feedback=on is not supported"),
    ],
)
def test_memories_that_cannot_be(spec: str, message: str) -> None:
    with pytest.raises(SpecError, match=message.replace("(", r"\(")):
        parse(spec)


@pytest.mark.parametrize("framework", FRAMEWORKS)
@pytest.mark.parametrize(
    "spec",
    [
        "topk:ratio=0.05",
        "topk:ratio=0.05,values=fp16",
        "topk:ratio=0.05,decay=0.5",
        "qsgd:feedback=on",
        "efsignsgd:twoway=on",
        "powersgd:rank=2",
        "topk:ratio=0.05,start=1,warmup=4",
        "topk:ratio=0.05,every=2",
    ],
)
def test_a_residual_counts_as_a_part_of_the_gradient(spec: str, framework: str) -> None:
    """So an engine may add it while it copies the gradient to the bucket."""
    bucket = bucket_of((40, 25))
    method = parse(spec + ",min_size=0").route("", (40, 25))
    ops = ops_of(framework)
    states: list[Any] = [method.init(ops, bucket, World(0, 2)) for _ in range(2)]
    for step in range(7):
        xs = normal(bucket, 2, seed=step)
        results = lockstep(ops, method, bucket, [x.copy() for x in xs], states)
        sums = [x + np.asarray(method.residual(state)) for x, state in zip(xs, states, strict=True)]
        empty = [unflatten(state, without_residual(ops, state)) for state in states]
        again = lockstep(ops, method, bucket, sums, empty)
        for mine, theirs in zip(again, results, strict=True):
            np.testing.assert_array_equal(np.asarray(mine.total), np.asarray(theirs.total))
            kept, wanted = leaves(mine.state), leaves(theirs.state)
            assert kept.keys() == wanted.keys()
            for path, leaf in kept.items():
                np.testing.assert_array_equal(leaf, wanted[path])
        states = [result.state for result in results]


def without_residual(ops: Ops, state: Any) -> dict[str, Any]:
    """The leaves of a state whose residual is zero."""
    return {
        path: ops.zeros(tuple(leaf.shape), ops.dtype(leaf)) if path.endswith("residual") else leaf
        for path, leaf in flatten(state).items()
    }


@pytest.mark.parametrize("spec", ["dgc", "topk:feedback=off", "topk:feedback=ef21", "qsgd"])
def test_what_is_kept_in_another_way_is_not_added_to_the_gradient(spec: str) -> None:
    method = parse(spec).route("", (40, 25))
    assert method.residual(method.init(NumpyOps(), bucket_of((40, 25)), World(0, 2))) is None
