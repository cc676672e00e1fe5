"""When and where: dense at first, milder at first, and never on what is too small."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest
from worlds import FRAMEWORKS, bucket_of, normal, ops_of

from hvd_compress import LocalWorld, parse
from hvd_compress.core.bucket import Bucket
from hvd_compress.core.collectives import Exchanging, State, World
from hvd_compress.core.method import Method, Wrapper
from hvd_compress.core.state_tree import residual_of
from hvd_compress.errors import SpecError
from hvd_compress.methods import REGISTRY
from hvd_compress.methods.cast import Dense, Half
from hvd_compress.methods.powersgd import PowerSGD
from hvd_compress.methods.topk import TopK
from hvd_compress.methods.wrappers.error_feedback import ErrorFeedback
from hvd_compress.methods.wrappers.router import Selective, by_name, phases
from hvd_compress.methods.wrappers.schedule import Delayed, Schedule, Stage
from hvd_compress.ops import Ops
from hvd_compress.ops.arrays import Array
from hvd_compress.transport.lockstep import lockstep


@pytest.mark.parametrize(
    ("shape", "compressed"),
    [((64, 64), True), ((1024, 1), True), ((1023,), False), ((5000,), False), ((31, 33), False), ((), False)],
)
def test_small_tensors_and_vectors_stay_dense(shape: tuple[int, ...], compressed: bool) -> None:
    method = Selective(TopK())
    assert method.route("w", shape) == (TopK() if compressed else Dense())


def test_options_move_the_border() -> None:
    method = Selective(TopK(), Half(), min_size=0, vectors=True)
    for shape in [(1,), (5000,), (2, 2)]:
        assert method.route("w", shape) == TopK()
    assert Selective(TopK(), Half(), min_size=10).route("w", (3, 3)) == Half()


def test_a_method_that_gains_nothing_is_not_used() -> None:
    method = Selective(ErrorFeedback(PowerSGD(rank=8)), min_size=0)
    assert method.route("w", (64, 64)) == ErrorFeedback(PowerSGD(rank=8))
    assert method.route("w", (20, 20)) == Dense()


@pytest.mark.parametrize("framework", FRAMEWORKS)
def test_start_is_dense_and_leaves_no_residual(framework: str) -> None:
    ops, bucket = ops_of(framework), bucket_of((50, 40))
    method = parse("topk:ratio=0.01,start=2").core
    states = [method.init(ops, bucket, World(0, 2)) for _ in range(2)]
    for step in range(4):
        xs = normal(bucket, 2, seed=step)
        results = lockstep(ops, method, bucket, [x.copy() for x in xs], states)
        states = [result.state for result in results]
        total, residual = np.asarray(results[0].total), np.asarray(states[0].inner.residual)
        if step < 2:
            np.testing.assert_array_equal(total, xs[0] + xs[1])
            assert not residual.any()
        else:
            assert np.count_nonzero(total) <= 40
            assert residual.any()
    assert int(states[0].step) == 4


@pytest.mark.parametrize("framework", FRAMEWORKS)
def test_warmup_sends_less_and_less(framework: str) -> None:
    ops, bucket = ops_of(framework), bucket_of((100, 100))
    method = parse("topk:ratio=0.00001,warmup=4,feedback=off").core
    state, sent = method.init(ops, bucket, World(0, 1)), []
    for step in range(6):
        (result,) = lockstep(ops, method, bucket, normal(bucket, 1, seed=step), [state])
        state = result.state
        sent.append(np.count_nonzero(np.asarray(result.total)))
    assert sent == [1000, 100, 10, 1, 1, 1]


def test_nothing_is_lost_through_start_and_warmup() -> None:
    world = LocalWorld("topk:ratio=0.01,start=3,warmup=8", size=2)
    rng, got, true = np.random.default_rng(0), 0.0, 0.0
    for _ in range(20):
        grads = [rng.standard_normal((40, 40)) for _ in range(2)]
        got, true = got + world.step(grads)[0], true + np.mean(grads, axis=0)
    kept = np.mean([world.residual(rank)[""] for rank in range(2)], axis=0)
    np.testing.assert_allclose(got + kept, true, atol=1e-12)


@pytest.mark.parametrize("framework", FRAMEWORKS)
@pytest.mark.parametrize("options", ["every=3", "start=1,every=3", "warmup=4,every=3"])
def test_every_third_step_sends_all_that_was_kept(options: str, framework: str) -> None:
    """What all got until then is the sum of all gradients, and the residual is gone."""
    ops, bucket, size = ops_of(framework), bucket_of((50, 40)), 2
    method = parse(f"topk:ratio=0.01,{options}").core
    states = [method.init(ops, bucket, World(0, size)) for _ in range(size)]
    got, true = np.zeros(2000), np.zeros(2000)
    for step in range(1, 13):
        xs = normal(bucket, size, seed=step)
        true += sum(xs)
        results = lockstep(ops, method, bucket, [x.copy() for x in xs], states)
        states = [result.state for result in results]
        got += np.asarray(results[0].total)
        residual = np.asarray(states[0].inner.residual)
        assert residual.any() == (step % 3 != 0 and (step != 1 or "start" not in options))
        if step % 3 == 0:
            np.testing.assert_allclose(got, true, atol=1e-5)


def test_rules_by_name() -> None:
    """The first pattern that fits counts; where none does, nothing is compressed."""
    rules = {"conv1.*": parse("none"), "*.bias": parse("topk:ratio=0.5,vectors=on"), "fc*": parse("powersgd:rank=2")}
    method = by_name(rules)
    assert method.route("conv1.weight", (64, 64)) == Dense()
    assert method.route("fc.bias", (5000,)) == ErrorFeedback(TopK(ratio=0.5))
    assert method.route("fc.weight", (64, 64)) == ErrorFeedback(PowerSGD(rank=2))
    assert method.route("fc.weight", (8, 8)) == Dense()  # the policy of the rule's own method goes on counting
    assert method.route("other", (64, 64)) == Dense()
    with pytest.raises(SpecError, match="at least one rule"):
        by_name({})


def test_rules_by_name_in_a_model() -> None:
    """A ratio for each layer, and a layer that stays dense."""
    method = by_name({"head": parse("none"), "embed*": parse("topk:ratio=0.001"), "*": parse("topk:ratio=0.1")})
    rng = np.random.default_rng(0)
    grads = {name: [rng.standard_normal((100, 100)) for _ in range(2)] for name in ("embedding", "body", "head")}
    means = LocalWorld(method, size=2).step(grads)
    assert [np.count_nonzero(means[name][0]) for name in grads] == pytest.approx([20, 2000, 10000], rel=0.1)


def test_phases_change_the_method_and_hand_the_residual_on() -> None:
    """Top-k, then EF-SignSGD with the same residual, then QSGD without: its first step sends what was left."""
    method = phases({0: parse("none"), 2: parse("topk:ratio=0.01"), 5: parse("efsignsgd"), 8: parse("qsgd:bits=8")})
    world, rng = LocalWorld(method, size=2), np.random.default_rng(0)
    got, true, sent = 0.0, 0.0, []
    for step in range(10):
        grads = [rng.standard_normal((40, 40)) for _ in range(2)]
        before = world.bytes_sent
        got, true = got + world.step({"w": grads})["w"][0], true + np.mean(grads, axis=0)
        kept = np.mean([world.residual(rank)["w"] for rank in range(2)], axis=0)
        assert kept.any() == (2 <= step < 8)
        if step < 8:
            np.testing.assert_allclose(got + kept, true, atol=1e-9)
        sent.append(world.bytes_sent - before)
    assert np.linalg.norm(got - true) < 0.02 * np.linalg.norm(true)  # 8 bits round a little
    assert sent == [12800] * 2 + [16 * 10] * 3 + [200 + 8] * 3 + [4 * 8 + 1600] * 2


def test_phases_with_and_without_nodes_hand_on_all_that_is_kept() -> None:
    """The servers of the nodes keep something as well, as do those of all ranks after them."""
    spec, nodes = "efsignsgd:twoway=on", "efsignsgd:twoway=on,hierarchical=on"
    method = phases({step: parse(one) for step, one in ((0, nodes), (3, spec), (6, nodes), (9, "none"))})
    world, rng = LocalWorld(method, size=4, local_size=2), np.random.default_rng(0)
    got = true = 0.0
    for _ in range(10):
        grads = [rng.standard_normal((40, 40)) for _ in range(4)]
        got, true = got + world.step({"w": grads})["w"][0], true + np.mean(grads, axis=0)
    np.testing.assert_allclose(got, true, atol=1e-9)


@pytest.mark.parametrize("framework", FRAMEWORKS)
def test_phases_agree_in_all_frameworks(framework: str) -> None:
    method = phases({0: parse("topk:ratio=0.1"), 2: parse("powersgd:rank=2"), 4: parse("int8")})
    rng = np.random.default_rng(0)
    world, oracle = LocalWorld(method, size=2, ops=ops_of(framework)), LocalWorld(method, size=2)
    for _ in range(6):
        grads = {"w": [rng.standard_normal((40, 40)) for _ in range(2)]}
        np.testing.assert_allclose(world.step(grads)["w"][0], oracle.step(grads)["w"][0], atol=1e-10)


def test_phases_that_cannot_be() -> None:
    for begins in ([], [1], [0, 5, 3]):
        with pytest.raises(SpecError, match="phases start at steps"):
            phases({begin: parse("topk") for begin in begins})
    with pytest.raises(SpecError, match="phases do not support"):
        LocalWorld(phases({0: parse("dgc"), 5: parse("topk")}), size=1).step({"w": [np.ones((40, 40))]})


@pytest.mark.parametrize("framework", FRAMEWORKS)
@pytest.mark.parametrize("inner", ["none", "topk:ratio=0.1,feedback=on"])
def test_delayed_weights_are_those_of_the_paper(inner: str, framework: str) -> None:
    """SGD with what each rank is handed ends where the paper's algorithm, written out, does."""
    method = Delayed(parse(inner).core, every=4)
    ops, bucket, n, lr = ops_of(framework), bucket_of((60,), dtype="float64"), 3, 0.1
    states = [method.init(ops, bucket, World(0, n)) for _ in range(n)]
    plain = parse(inner).core
    plain_states = [plain.init(ops, bucket, World(0, n)) for _ in range(n)]
    handed = [np.zeros(60) for _ in range(n)]
    shared, arriving = np.zeros(60), np.zeros(60)  # the paper: weights of the server, and the sum that is on its way
    for step in range(9):
        gs = normal(bucket, n, seed=step)
        results = lockstep(ops, method, bucket, gs, states)
        states = [result.state for result in results]
        handed = [w - lr * np.asarray(r.total) / n for w, r in zip(handed, results, strict=True)]

        shared = shared - lr * arriving / n
        due = step % 4 == 3
        starts = plain.dense if due else plain.exchange
        exchanges = lockstep(ops, _Only(plain, starts), bucket, gs, plain_states)
        plain_states = [exchange.state for exchange in exchanges]
        arriving = np.asarray(exchanges[0].total)
        if due:  # waits for the exact sum
            shared, arriving = shared - lr * arriving / n, np.zeros(60)
        local = [shared if due else shared - lr * g for g in gs]
        for mine, paper in zip(handed, local, strict=True):
            np.testing.assert_allclose(mine, paper, atol=1e-12)


class _Only(Wrapper):
    """A method that always exchanges in the given way."""

    def __init__(self, inner: Method, start: Callable[..., Exchanging]) -> None:
        object.__setattr__(self, "inner", inner)
        object.__setattr__(self, "start", start)

    def residual(self, state: State) -> Array | None:
        return self.inner.residual(state)

    def exchange(
        self, ops: Ops, bucket: Bucket, x: Array, state: State, world: World, return_error: bool = False
    ) -> Exchanging:
        exchanging: Exchanging = self.start(ops, bucket, x, state, world)  # type: ignore[attr-defined]
        return exchanging


@pytest.mark.parametrize("options", ["", ",measure=on", ",warmup=4", ",warmup=4,measure=on", ",every=4"])
def test_a_correction_sends_what_was_kept_however_deep(options: str) -> None:
    ops, bucket, method = ops_of("numpy"), bucket_of((50, 40)), parse(f"topk:ratio=0.01,delay=3{options}").core
    state, kept, owed = method.init(ops, bucket, World(0, 1)), [], np.zeros(bucket.numel)
    for step in range(6):
        (x,) = normal(bucket, 1, seed=step)
        (result,) = lockstep(ops, method, bucket, [x.copy()], [state])
        state, owed = result.state, owed + x - result.total
        kept.append(bool(residual_of(state).any()))
        if not kept[-1] and (step + 1) % 3 == 0:
            np.testing.assert_allclose(owed, 0, atol=1e-5)
    assert kept == [True, True, False, "every" not in options, True, False]


def test_delay_is_an_option() -> None:
    assert parse("topk:delay=5").core == Delayed(ErrorFeedback(TopK()), every=5)
    with pytest.raises(SpecError, match="delay=1 is not allowed"):
        parse("topk:delay=1")


@pytest.mark.parametrize("ends", [[], [0], [3, 3], [5, 2]])
def test_stages_must_grow(ends: list[int]) -> None:
    with pytest.raises(SpecError, match="stages end at steps"):
        Schedule(TopK(), tuple(Stage(end, Dense()) for end in ends))


def test_a_residual_that_holds_most_of_a_gradient_is_a_momentum() -> None:
    sparse = {"topk", "gtopk", "oktopk", "threshold", "sidco", "topkc", "arctopk", "scalecom", "randomk", "blockk"}
    lagging = sparse | {"ctk", "sparseloco", "onebit", "efsignsgd"}
    found = {name for name in REGISTRY if parse(name).adds_momentum}
    assert lagging <= found
    assert not found & {"none", "fp16", "bf16", "fp8", "int8", "qsgd", "terngrad", "natural", "thc", "loco", "powersgd"}
    options = ("warmup=8", "hierarchical=on", "every=9", "measure=on", "preconditioned=on")
    routers = [parse(f"topk:{option}") for option in options]
    routers += [by_name({"head": parse("none"), "*": parse("topk")}), phases({0: parse("none"), 9: parse("topk")})]
    assert all(router.adds_momentum for router in routers)
    assert not any(
        parse(spec).adds_momentum
        for spec in (
            "topk:feedback=off",
            "topk:feedback=ef21",
            "qsgd:feedback=on",
            "bf16:preconditioned=on",
            "topk:feedback=off,preconditioned=on",
        )
    )
