"""DistributedDataParallel: equal to plain DDP where nothing is lost, equal to the Horovod adapter bit for bit."""

from __future__ import annotations

import contextlib
import copy
import gc
import pickle
import threading
import weakref
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any

import horovod.torch as hvd
import numpy as np
import pytest
import torch
import torch.distributed as dist
from catalogue import COMPOSED, EACH_KIND
from parallel.pytorch.ddp_training import assert_same_states, loss_of, train, weights
from parallel.pytorch.leaks import LARGE, in_use, left_by
from parallel.pytorch.training import EVEN, LOSSLESS, SIZE, Job, assert_ranks_equal, batch, everyone, make_model
from torch import Tensor, nn
from torch.distributed._composable.replicate import replicate
from torch.distributed.distributed_c10d import PrefixStore, _get_process_group_store
from torch.nn.parallel import DistributedDataParallel

import hvd_compress.torch
from hvd_compress.distributed import Compression, FullState, hook, meeting
from hvd_compress.distributed.compression import Registered
from hvd_compress.errors import DisagreementError, SpecError, StateError, UnsupportedError

pytestmark = pytest.mark.usefixtures("process_group")


class Unused(nn.Module):
    """A model of which a layer is never used, and another one only in every second step."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(32, 16), nn.Linear(16, 10)
        self.never, self.sometimes = nn.Linear(16, 16), nn.Linear(16, 16)
        self.calls = 0

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        x = self.first(x).relu()
        return self.last(self.sometimes(x) if self.calls % 2 else x)  # type: ignore[no-any-return]


class Mixed(nn.Module):
    """A model of two precisions."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(32, 40), nn.Linear(40, 10).double()

    def forward(self, x: Tensor) -> Tensor:
        return self.last(self.first(x).relu().double())  # type: ignore[no-any-return]


MODES: dict[str, tuple[Callable[[], nn.Module], dict[str, Any]]] = {
    "plain": (make_model, {}),
    "bucket views": (make_model, {"gradient_as_bucket_view": True}),
    "many buckets": (make_model, {"bucket_cap_mb": 0.005}),
    "static graph": (make_model, {"static_graph": True}),
    "unused parameters": (Unused, {"find_unused_parameters": True}),
    "two precisions": (Mixed, {}),
}


def seeded(make: Callable[[], nn.Module]) -> nn.Module:
    with torch.random.fork_rng():
        torch.manual_seed(0)
        return make()


@pytest.mark.parametrize(
    ("spec", "mode"),
    [*((LOSSLESS[0], mode) for mode in MODES), *((spec, "many buckets") for spec in ("none", *LOSSLESS))],
)
def test_lossless_equals_plain_ddp(mode: str, spec: str) -> None:
    make, options = MODES[mode]
    plain = train(None, model=seeded(make), **options)
    ours = train(spec, model=seeded(make), **options)
    torch.testing.assert_close(weights(ours), weights(plain), rtol=1e-4, atol=1e-5)
    assert_ranks_equal(weights(ours))


@pytest.mark.parametrize("most", [0, 256])
@pytest.mark.parametrize("merge", ["layer", 3])
def test_any_number_of_buckets_equals_plain_ddp(merge: str | int, most: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Over Gloo, buckets have connections of their own, unless there would be too many: then they take turns."""
    monkeypatch.setattr("hvd_compress.distributed.transport._MOST_CONNECTIONS", most)
    compression = Compression.parse("topkc:ratio=1.0,vectors=on,min_size=0", merge=merge)
    ours = train(compression)
    assert len(next(iter(compression.state_dict()["sessions"].values()))["buckets"]) == (6 if merge == "layer" else 3)
    torch.testing.assert_close(weights(ours), weights(train(None)), rtol=1e-3, atol=1e-4)


class Heads(nn.Module):
    """Heads of which each step uses some: the others are not computed, or not part of the loss."""

    def __init__(self) -> None:
        super().__init__()
        self.heads = nn.ModuleList(nn.Linear(32, 24, bias=False) for _ in range(3))

    def forward(self, x: Tensor, used: list[int], computed: bool) -> list[Tensor | None]:
        return [head(x) if computed or i in used else None for i, head in enumerate(self.heads)]


@pytest.mark.parametrize(
    ("spec", "views"), [("topk:ratio=0.05", False), ("efsignsgd:block=64", True), ("powersgd:rank=1,min_gain=0", False)]
)
def test_heads_in_turns_lose_nothing(spec: str, views: bool) -> None:
    """What a rank's heads give is delivered or stays in its residual, which is not sent for a head that nobody uses."""
    model = seeded(Heads)
    heads = list(model.parameters())
    wrapped = DistributedDataParallel(model, find_unused_parameters=True, gradient_as_bucket_view=views)
    compression = Compression.parse(f"{spec},min_size=0", merge=2).register(wrapped, op="sum")
    given, delivered = ([torch.zeros(24, 32) for _ in heads] for _ in range(2))
    for step in range(8):
        model.zero_grad(set_to_none=step % 3 > 0)
        used = [[0], [1, 2], [0, (hvd.rank() + 1) % 3], [hvd.rank() % 3]][step % 4]
        for last in (False, True) if step == 6 else (True,):
            with contextlib.nullcontext() if last else wrapped.no_sync():
                outputs = wrapped(batch(2 * step + last)[0], used, step % 2 == 0)
                loss = torch.stack([outputs[i].square().sum() for i in used]).sum()
                for i in set(used):
                    given[i] += torch.autograd.grad(loss, heads[i], retain_graph=True)[0]
                loss.backward()  # type: ignore[no-untyped-call]
        for total, head in zip(delivered, heads, strict=True):
            if head.grad is not None:
                total += head.grad
    (reducer,) = compression._registry
    for head, mine, total in zip(heads, given, delivered, strict=True):
        _, bucket, position = reducer.places[id(head)]
        assert bucket.residual is not None
        kept = bucket.residual[bucket.spans[position]].view(24, 32)
        summed, left = (torch.stack(one).sum(0) for one in zip(*everyone((mine, kept)), strict=True))
        torch.testing.assert_close(total + left, summed, rtol=1e-4, atol=1e-2)


class _Fail(torch.autograd.Function):
    """The identity; its backward pass raises an error."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        raise ArithmeticError("no gradient")


@pytest.mark.parametrize("spec", ["powersgd:rank=2", "topkc:ratio=0.1", "qsgd:feedback=on"])
def test_a_backward_pass_that_an_error_breaks_off_leaves_no_trace(spec: str) -> None:
    def run(broken: bool) -> Tensor:
        model, compression = make_model(), Compression.parse(spec, merge="layer")
        wrapped = DistributedDataParallel(model, bucket_cap_mb=0.005)
        compression.register(wrapped)
        for step in range(6):
            if broken and step in (2, 4):
                x, _ = batch(50 + step)
                hook = model[1].register_forward_hook(lambda _, inputs, output: _Fail.apply(output))  # type: ignore[no-untyped-call]
                with pytest.raises(ArithmeticError):
                    wrapped(x).sum().backward()
                hook.remove()
                model.zero_grad()
                wrapped = DistributedDataParallel(model, bucket_cap_mb=0.005)  # the old one refuses to go on
                compression.register(wrapped)
            loss_of(wrapped, step).backward()  # type: ignore[no-untyped-call]
            for parameter in model.parameters():
                assert parameter.grad is not None
                parameter.data -= 0.1 * parameter.grad
            model.zero_grad()
        return weights(model)

    assert torch.equal(run(broken=True), run(broken=False))


@pytest.mark.parametrize("spec", ["none", "topk:ratio=1.0"])
def test_accumulation_without_sync_equals_plain_ddp(spec: str) -> None:
    plain, ours = train(None, accumulate=True), train(spec, accumulate=True)
    torch.testing.assert_close(weights(ours), weights(plain), rtol=1e-4, atol=1e-5)


def test_ranks_with_fewer_batches_join() -> None:
    def run(spec: str | None) -> Tensor:
        model = make_model()
        wrapped = DistributedDataParallel(model)
        if spec:
            Compression.parse(spec).register(wrapped)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        with wrapped.join():
            for step in range(3 + hvd.rank()):
                loss_of(wrapped, step).backward()  # type: ignore[no-untyped-call]
                optimizer.step()
                optimizer.zero_grad()
        return weights(model)

    plain = run(None)
    for spec in ("none", "topk:ratio=1.0"):
        torch.testing.assert_close(run(spec), plain, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("spec", ["none", "topk:ratio=0.5"])
def test_the_mean_over_ranks_that_have_not_joined_is_refused(spec: str) -> None:
    wrapped = DistributedDataParallel(
        make_model(), process_group=dist.new_group([hvd.rank()], use_local_synchronization=True)
    )
    Compression.parse(spec).register(wrapped)
    with (
        pytest.raises(UnsupportedError, match="divide_by_initial_world_size"),
        wrapped.join(divide_by_initial_world_size=False),
    ):
        loss_of(wrapped, 0).backward()  # type: ignore[no-untyped-call]


def test_sparse_gradients_are_summed_as_they_are() -> None:
    def run(spec: str | None) -> Tensor:
        torch.manual_seed(1)
        model = nn.Sequential(nn.Embedding(20, 8, sparse=True), nn.Flatten(), nn.Linear(24, 4))
        wrapped = DistributedDataParallel(model)
        if spec:
            Compression.parse(spec).register(wrapped)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        for step in range(3):
            generator = torch.Generator().manual_seed(10 * step + hvd.rank())
            wrapped(torch.randint(20, (6, 3), generator=generator)).square().sum().backward()
            optimizer.step()
            optimizer.zero_grad()
        return weights(model)

    torch.testing.assert_close(run("topk:ratio=1.0"), run(None), rtol=1e-4, atol=1e-5)


GATHERED = [f"{spec},min_size=0,vectors=on" for spec in ("topk:ratio=0.1", "efsignsgd:block=64", "qsgd:twoway=on")]
"""Methods that sum no floats by allreduce: with three ranks, Horovod and PyTorch add them in other orders."""


@pytest.mark.parametrize("spec", [*EACH_KIND, *COMPOSED] if SIZE == 2 else GATHERED)
def test_equal_to_the_horovod_adapter_bit_for_bit(spec: str) -> None:
    """The same gradients on each rank: means and states are the same bits."""
    shapes = {"first": (48, 40), "second": (8, 6, 5, 5), "bias": (10,)}
    ours = {name: nn.Parameter(torch.zeros(shape)) for name, shape in shapes.items()}
    theirs = {name: nn.Parameter(torch.zeros(shape)) for name, shape in shapes.items()}
    model = Sum(theirs)
    wrapped = DistributedDataParallel(model)
    by_ddp = Compression.parse(COMPOSED.get(spec, spec)).register(wrapped)
    by_horovod = hvd_compress.torch.Compression.parse(COMPOSED.get(spec, spec))
    optimizer = hvd.DistributedOptimizer(
        torch.optim.SGD(ours.values(), lr=0.1), named_parameters=ours.items(), compression=by_horovod
    )
    for step in range(3):
        rng = np.random.default_rng((step, hvd.rank()))
        grads = [torch.from_numpy(rng.standard_normal(shape).astype(np.float32)) for shape in shapes.values()]
        torch.stack([(p * g).sum() for p, g in zip(ours.values(), grads, strict=True)]).sum().backward()  # type: ignore[no-untyped-call]
        optimizer.synchronize()
        wrapped(grads).backward()
        for mine, other in zip(ours.values(), theirs.values(), strict=True):
            assert mine.grad is not None and other.grad is not None
            assert torch.equal(mine.grad, other.grad), step
            mine.grad = other.grad = None
    assert_same_states(by_horovod.state_dict(), by_ddp.state_dict())


class Sum(nn.Module):
    """A model whose gradients are its inputs."""

    def __init__(self, parameters: dict[str, nn.Parameter]) -> None:
        super().__init__()
        for name, parameter in parameters.items():
            self.register_parameter(name, parameter)

    def forward(self, grads: list[Tensor]) -> Tensor:
        return torch.stack([(p * g).sum() for p, g in zip(self.parameters(), grads, strict=True)]).sum()


@pytest.mark.parametrize(
    "spec", ["topk:ratio=0.1,min_size=0", "powersgd:rank=2,min_size=0", "qsgd:twoway=on,min_size=0"]
)
def test_ranks_stay_equal(spec: str) -> None:
    assert_ranks_equal(weights(train(spec, range(15))))


@pytest.mark.parametrize("spec", ["none", "topk:ratio=0.5,min_size=0", "powersgd:rank=2,min_size=0"])
def test_a_gradient_that_is_not_finite_is_seen_by_all_and_leaves_no_trace(spec: str) -> None:
    model = make_model()
    wrapped = DistributedDataParallel(model)
    compression = Compression.parse(spec, merge=2).register(wrapped)
    loss_of(wrapped, 0).backward()  # type: ignore[no-untyped-call]
    before = copy.deepcopy(compression.state_dict())
    loss = loss_of(wrapped, 1)
    (loss * (float("nan") if hvd.rank() == SIZE - 1 else 1.0)).backward()  # type: ignore[no-untyped-call]
    assert not all(p.grad.isfinite().all() for p in model.parameters() if p.grad is not None)
    after = compression.state_dict()
    for label, session in before["sessions"].items():
        for key, leaves in session["buckets"].items():
            for path, leaf in leaves.items():
                assert torch.equal(
                    torch.as_tensor(leaf), torch.as_tensor(after["sessions"][label]["buckets"][key][path])
                )
    model.zero_grad()
    loss_of(wrapped, 2).backward()  # type: ignore[no-untyped-call]
    assert all(p.grad.isfinite().all() for p in model.parameters() if p.grad is not None)


@pytest.mark.parametrize("specs", ["topk topk:ratio=0.02", "none topk", "fp16 none"])
def test_ranks_that_differ_get_the_same_error(specs: str) -> None:
    wrapped = DistributedDataParallel(make_model())
    Compression.parse(specs.split()[hvd.rank() > 0]).register(wrapped)
    with pytest.raises(DisagreementError, match="disagree on the method") as caught:
        loss_of(wrapped, 0).backward()  # type: ignore[no-untyped-call]
    assert len(set(everyone(str(caught.value)))) == 1


def test_a_state_that_one_rank_alone_restores_is_an_error_on_all() -> None:
    wrapped = DistributedDataParallel(make_model())
    compression = Compression.topk(ratio=0.5, min_size=0, merge=2).register(wrapped)
    loss_of(wrapped, 0).backward()  # type: ignore[no-untyped-call]
    state = compression.state_dict()
    loss_of(wrapped, 1).backward()  # type: ignore[no-untyped-call]
    if hvd.rank() == 0:
        compression.load_state_dict(state)
    with pytest.raises(DisagreementError, match="restored state"):
        loss_of(wrapped, 2).backward()  # type: ignore[no-untyped-call]


def test_the_state_of_all_ranks_is_the_same_on_all_and_must_fit() -> None:
    wrapped = DistributedDataParallel(make_model())
    compression = Compression.topk(ratio=0.5, min_size=0, merge=2).register(wrapped)
    loss_of(wrapped, 0).backward()  # type: ignore[no-untyped-call]
    full = FullState(compression)
    state = full.state_dict()
    for one in everyone(state):
        for mine, theirs in zip(state["ranks"], one["ranks"], strict=True):
            assert_same_states(mine, theirs)
    full.load_state_dict(state)
    other = FullState(Compression.fp16()).state_dict()
    for wrong, message in (({}, "not the state of all"), (other, "'fp16'"), ({"ranks": state["ranks"][1:]}, "missing")):
        with pytest.raises(StateError, match=message):
            full.load_state_dict(wrong)
    with pytest.raises(StateError, match="as each rank has its own residual"):
        compression.load_state_dict(state["ranks"][hvd.rank() - 1])
    loss_of(wrapped, 1).backward()  # type: ignore[no-untyped-call]


def test_a_part_of_the_ranks_trains_and_saves(tmp_path: Path) -> None:
    """The others need not call anything; if they load, they get nothing."""
    folder = Path(hvd.broadcast_object(str(tmp_path)))
    group = dist.new_group(list(range(0, SIZE, 2)))
    if hvd.rank() % 2 == 0:
        compression = Compression.topk(ratio=0.1, min_size=0)
        model = train(compression, range(3), process_group=group)
        compression.save(folder)
        state = FullState(compression).state_dict()
        assert len(state["ranks"]) == group.size() and model is not None
    hvd.barrier()
    one, other = (Compression.topk(ratio=0.1, min_size=0) for _ in range(2))
    one.load(folder)
    if hvd.rank() % 2 == 0:
        FullState(other).load_state_dict(state)
        for loaded in (one, other):
            assert_same_states(loaded.state_dict(), compression.state_dict())
    else:
        assert not one.state_dict()["sessions"]


def test_a_rank_that_gathers_the_states_alone_is_told_so(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(meeting, "PATIENCE", 0.1)
    monkeypatch.setattr(meeting, "limit_of", lambda group: timedelta(seconds=0.3))
    full = FullState(Compression.topk())
    if hvd.rank() == 0:
        with pytest.raises(StateError, match=r"for the ranks \[1.*\] .* and not inside 'if rank == 0:'"):
            full.state_dict()
        assert caplog.text.count("which have not called it") == 1
    hvd.barrier()
    monkeypatch.undo()
    assert len(full.state_dict()["ranks"]) == SIZE


@pytest.mark.parametrize("spec", ["topk:ratio=0.1,min_size=0", "powersgd:rank=2,min_size=0"])
def test_a_job_moves_from_horovod_to_ddp_and_back(spec: str, tmp_path: Path) -> None:
    folder = Path(hvd.broadcast_object(str(tmp_path)))
    straight = Job(spec, momentum=0.0).run(range(9))
    first = Job(spec, momentum=0.0).run(range(3))
    first.compression.save(folder / "horovod")
    hvd.barrier()
    second = Compression.parse(spec, merge=2)
    second.load(folder / "horovod")
    model = copy.deepcopy(first.model)
    wrapped = DistributedDataParallel(model)
    second.register(wrapped)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for step in range(3, 6):
        loss_of(wrapped, step).backward()  # type: ignore[no-untyped-call]
        optimizer.step()
        optimizer.zero_grad()
    second.save(folder / "ddp")
    hvd.barrier()
    third = Job(spec, model=make_model(), momentum=0.0)
    third.compression.load(folder / "ddp")
    third.model.load_state_dict(model.state_dict())
    moved = third.run(range(6, 9)).weights
    assert torch.equal(moved, straight.weights) if SIZE == 2 else torch.allclose(moved, straight.weights, atol=1e-6)


def test_models_share_a_compressor_and_process_groups_train_apart() -> None:
    group = dist.new_group(list(range(0, SIZE, 2)))
    compression = Compression.parse("topk:ratio=1.0", merge=2)
    both = [train(compression, model=make_model()) for _ in range(2)]
    assert torch.equal(weights(both[0]), weights(both[1]))
    assert len(compression.state_dict()["sessions"]) == 2
    if hvd.rank() % 2 == 0:
        plain = train(None, process_group=group)
        ours = train("topk:ratio=1.0", process_group=group)
        torch.testing.assert_close(weights(ours), weights(plain), rtol=1e-4, atol=1e-5)
        assert_ranks_equal(weights(ours), EVEN)


@pytest.mark.parametrize("own_group", [False, True])
def test_deleted_models_leave_nothing_behind(own_group: bool) -> None:
    """Nor do their process groups: as much is open as after the same with plain DDP."""

    def cycle(compression: Any = None) -> Tensor:
        group = dist.new_group() if own_group else None
        layer = nn.Linear(LARGE, LARGE)
        model = DistributedDataParallel(layer, process_group=group)
        if compression is not None:
            compression.register(model)
        for _ in range(2):
            model(torch.ones(2, LARGE)).sum().backward()
        if group is not None:
            dist.barrier()
            dist.destroy_process_group(group)
        return layer.weight

    if own_group:
        left_by(cycle)
    plain, compression = in_use(), Compression.parse("topk:ratio=0.01")
    assert left_by(lambda: cycle(compression)).little
    assert compression.state_dict()["sessions"] == {}
    assert not own_group or (in_use() - plain).little


@pytest.mark.parametrize("sparse", [False, True])
def test_what_a_thread_of_gloo_calls_owns_no_connections(sparse: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """The thread may be the last owner: if it closes connections after Python has ended, the process is aborted."""
    kind, called = torch._C.Future, list[Any]()
    then = kind.then

    def kept(future: Any, call: Any) -> Any:
        called.append(call)
        return then(future, call)

    monkeypatch.setattr(kind, "then", kept)
    model = DistributedDataParallel(nn.Embedding(8, 4, sparse=sparse))
    state = Compression.parse("none").registered(model)
    model.register_comm_hook(state, hook)
    model(torch.arange(3)).sum().backward()
    left = [weakref.ref(one) for one in (state, state.transport, state.compressor, model)]
    del state, model
    gc.collect()
    assert len(called) == 1
    assert [one() for one in left] == [None] * 4


def test_two_models_take_turns_and_share_a_backward_pass() -> None:
    def run(spec: str | None) -> Tensor:
        models = [DistributedDataParallel(make_model()) for _ in range(2)]
        if spec:
            compression = Compression.parse(spec, merge=2)
            for model in models:
                compression.register(model)
        first, second = models
        loss_of(first, 0).backward()  # type: ignore[no-untyped-call]
        loss_of(second, 1).backward()  # type: ignore[no-untyped-call]
        (loss_of(first, 2) + loss_of(second, 3)).backward()  # type: ignore[no-untyped-call]
        graph = loss_of(first, 4)
        graph.backward(retain_graph=True)  # type: ignore[no-untyped-call]
        graph.backward()  # type: ignore[no-untyped-call]
        return torch.cat([p.grad.flatten() for one in models for p in one.parameters() if p.grad is not None])

    torch.testing.assert_close(run("topk:ratio=1.0"), run(None), rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("spec", ["none", "fp16", "topk:ratio=1.0"])
def test_a_model_takes_part_later_while_another_rank_is_slow(spec: str) -> None:
    """The first rank is in the first step of the second model, while buckets of the first model are in flight."""
    trunk, late = (DistributedDataParallel(make_model(), bucket_cap_mb=0.001) for _ in range(2))
    compression = Compression.parse(spec).register(trunk)
    compression.register(late)
    group = dist.group.WORLD
    assert group is not None
    store = PrefixStore(f"late.{spec}", _get_process_group_store(group))
    for step in range(4):
        loss: Any = loss_of(trunk, step) if step < 2 else loss_of(late, step) + loss_of(trunk, step)
        if hvd.rank() == 0:
            loss.register_hook(lambda grad, step=step: store.set(f"{step}", "begun"))
        else:
            store.wait([f"{step}"])
        loss.backward()
    assert_ranks_equal(torch.cat([p.grad.flatten() for p in late.parameters() if p.grad is not None]))


@pytest.mark.parametrize("spec", ["none", "topk:ratio=1.0", "powersgd:rank=2"])
@pytest.mark.parametrize("shared", [True, False])
def test_threads_train_models_over_groups_of_their_own(spec: str, shared: bool) -> None:
    models = [DistributedDataParallel(make_model(), process_group=dist.new_group()) for _ in range(2)]
    compression = Compression.parse(spec, merge=2)
    for model in models:
        (compression if shared else Compression.parse(spec, merge=2)).register(model)

    def run(model: nn.Module) -> None:
        for step in range(20):
            loss_of(model, step).backward()  # type: ignore[no-untyped-call]

    threads = [threading.Thread(target=run, args=(model,)) for model in models]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    first, second = (
        torch.cat([p.grad.flatten() for p in model.parameters() if p.grad is not None]) for model in models
    )
    torch.testing.assert_close(first, second)


@pytest.mark.parametrize("spec", ["none", "fp16", "topk:ratio=0.1"])
def test_a_step_is_counted_once(spec: str) -> None:
    layers = seeded(lambda: nn.Sequential(*(nn.Linear(256, 256) for _ in range(8))))
    model = DistributedDataParallel(layers, bucket_cap_mb=0.01)
    compression = Compression.parse(spec).register(model)
    for _ in range(10):
        model(torch.ones(256, 256)).sum().backward()
    assert compression.stats().steps == 10


@pytest.mark.parametrize("wrap", ["compile", "fabric", "replicate"])
def test_what_wraps_a_model_is_looked_through(wrap: str) -> None:
    class Fabric(nn.Module):
        """As Lightning Fabric wraps what it has wrapped in DistributedDataParallel."""

        def __init__(self, inner: nn.Module) -> None:
            super().__init__()
            self._forward_module = inner

        def forward(self, x: Tensor) -> Tensor:
            return self._forward_module(x)  # type: ignore[no-any-return]

    def run(spec: str | None) -> Tensor:
        net = make_model()
        model: Any = replicate(net) if wrap == "replicate" else DistributedDataParallel(net)
        if wrap != "replicate":
            model = torch.compile(model, backend="eager") if wrap == "compile" else Fabric(model)
        if spec:
            compression = Compression.parse(spec).register(model)
        for step in range(3):
            loss_of(model, step).backward()  # type: ignore[no-untyped-call]
        assert not spec or compression.stats().steps == 3
        return torch.cat([p.grad.flatten() for p in net.parameters() if p.grad is not None])

    torch.testing.assert_close(run("topk:ratio=1.0"), run(None), rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("spec", ["none", "topk:ratio=1.0", "int8"])
def test_a_layer_that_is_frozen_before_registering_is_trained_later(spec: str) -> None:
    def run(spec: str | None) -> Tensor:
        net = make_model()
        model = DistributedDataParallel(net, find_unused_parameters=True)
        net[0].requires_grad_(False)
        if spec:
            Compression.parse(spec).register(model)
        optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
        for step in range(6):
            net[0].requires_grad_(step >= 3)
            optimizer.zero_grad()
            loss_of(model, step).backward()  # type: ignore[no-untyped-call]
            optimizer.step()
        return weights(net)

    torch.testing.assert_close(run(spec), run(None), rtol=1e-2, atol=1e-3)


@pytest.mark.parametrize("how", ["new group", "update"])
def test_residuals_follow_a_model_to_another_process_group(how: str) -> None:
    """Nothing of what the ranks had is lost: it was delivered, or is kept, once."""
    net = nn.Linear(32, 10, bias=False)
    compression = Compression.topk(ratio=0.02, min_size=0)
    model, delivered, given = DistributedDataParallel(net), torch.zeros(10, 32), torch.zeros(10, 32)
    compression.register(model)
    for turn in range(3):
        if turn and how == "update":
            model._update_process_group(dist.new_group())  # type: ignore[no-untyped-call]
        elif turn:
            model = DistributedDataParallel(net, process_group=dist.new_group())
            compression.register(model)
        for step in range(4):
            given += torch.autograd.grad(loss_of(net, 10 * turn + step), net.weight)[0]
            net.zero_grad()
            loss_of(model, 10 * turn + step).backward()  # type: ignore[no-untyped-call]
            assert net.weight.grad is not None
            delivered += net.weight.grad
    (session,) = compression.state_dict()["sessions"].values()
    (leaves,) = session["buckets"].values()
    residual = sum(leaf.view(10, 32) for leaf in leaves.values() if torch.is_tensor(leaf) and leaf.numel() == 320)
    kept = torch.stack(everyone(given - residual)).sum(0)
    torch.testing.assert_close(kept, delivered * SIZE, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize(
    "state_of",
    [
        lambda registered: pickle.loads(pickle.dumps(registered)),
        lambda registered: registered.compressor,
        lambda _: None,
    ],
)
def test_a_hook_with_another_state_says_what_to_write(state_of: Callable[[Registered], object]) -> None:
    state = Compression.topk().registered(DistributedDataParallel(make_model()))
    again = DistributedDataParallel(make_model())
    again.register_comm_hook(state_of(state), hook)
    with pytest.raises(UnsupportedError, match=r"write compression.register\(model\); save by compression.save"):
        loss_of(again, 0).backward()  # type: ignore[no-untyped-call]


@pytest.mark.parametrize("compression", [Compression.fp16, Compression.topk()])
def test_a_compression_that_is_taken_for_a_hook_says_what_to_write(compression: Any) -> None:
    with pytest.raises(UnsupportedError, match=r"is no communication hook: write compression.register\(model\)"):
        DistributedDataParallel(make_model()).register_comm_hook(None, compression)


def test_a_rank_alone_trains_as_without_compression() -> None:
    group = dist.new_group([hvd.rank()], use_local_synchronization=True)
    ours, plain = (train(spec, process_group=group) for spec in ("topk:ratio=1.0", None))
    assert torch.equal(weights(ours), weights(plain))


def test_a_sum_is_size_times_the_mean() -> None:
    def gradient(op: str) -> Tensor:
        wrapped = DistributedDataParallel(make_model())
        state = Compression.topk(ratio=1.0).registered(wrapped, op)
        wrapped.register_comm_hook(state, hook)  # as frameworks do it
        loss_of(wrapped, 0).backward()  # type: ignore[no-untyped-call]
        return torch.cat([p.grad.flatten() for p in wrapped.parameters() if p.grad is not None])

    torch.testing.assert_close(gradient("sum"), SIZE * gradient("mean"))


def test_a_loss_scale_does_not_change_residuals() -> None:
    def run(scale: float) -> dict[str, Any]:
        wrapped = DistributedDataParallel(make_model())
        compression = Compression.parse("topk:ratio=0.1,min_size=0", merge=2).register(wrapped)
        compression.follow(lambda: scale)
        (loss_of(wrapped, 0) * scale).backward()  # type: ignore[no-untyped-call]
        return compression.state_dict()

    assert_same_states(run(1.0), run(1024.0))


def test_other_models_and_operations_are_refused() -> None:
    with pytest.raises(UnsupportedError, match="DistributedDataParallel first"):
        Compression.topk(ratio=0.1).register(make_model())
    with pytest.raises(SpecError, match="'mean', 'sum'"):
        Compression.topk(ratio=0.1).register(DistributedDataParallel(make_model()), op="average")
    wrapped = DistributedDataParallel(make_model())
    Compression.topk(ratio=0.1).register(wrapped)
    with pytest.raises(UnsupportedError, match="has a communication hook already"):
        Compression.none.register(wrapped)


def test_momentum_of_a_known_optimizer_is_refused_and_of_an_unknown_one_warned_of(
    caplog: pytest.LogCaptureFixture,
) -> None:
    wrapped = DistributedDataParallel(make_model())
    dgc = Compression.dgc(ratio=0.1)
    with pytest.raises(UnsupportedError, match=r"momentum of 0\.9.*Adam's momentum is its first beta"):
        dgc.register(wrapped, optimizer=torch.optim.AdamW(wrapped.parameters()))
    with pytest.raises(UnsupportedError, match="SGD trains no parameter of this model"):
        dgc.register(wrapped, optimizer=torch.optim.SGD(make_model().parameters()))
    with pytest.raises(UnsupportedError, match=r"optimizer=0\.1 is not supported"):
        dgc.register(wrapped, optimizer=0.1)  # type: ignore[arg-type]
    assert not caplog.messages
    dgc.register(wrapped, optimizer=[torch.optim.SGD(wrapped.parameters(), momentum=0.0)])
    assert not caplog.messages
    for _ in range(2):
        dgc.register(DistributedDataParallel(make_model()))
    (said,) = caplog.messages
    assert "register(model, optimizer=optimizer)" in said


def test_adam_beside_a_residual_is_warned_of_once(caplog: pytest.LogCaptureFixture) -> None:
    def register(spec: str, *betas: tuple[float, float]) -> None:
        wrapped = DistributedDataParallel(make_model())
        optimizers = [torch.optim.AdamW(wrapped.parameters(), betas=one) for one in betas]
        Compression.parse(spec).register(wrapped, optimizer=optimizers)

    for spec, beta in (("topk:ratio=0.1", 0.0), ("topk:ratio=0.1", 0.5), ("topk:feedback=off", 0.91), ("int8", 0.91)):
        register(spec, (beta, 0.99))
    assert "first beta" not in caplog.text
    for _ in range(2):
        register("topk:ratio=0.1", (0.0, 0.99), (0.91, 0.99))
    assert caplog.text.count("first beta is 0.91") == (hvd.rank() == 0)


def test_a_step_without_its_last_bucket_is_refused() -> None:
    options: dict[str, Any] = {"find_unused_parameters": True, "skip_all_reduce_unused_params": True}
    with pytest.raises(UnsupportedError, match="skip_all_reduce_unused_params=False"):
        Compression.topk(ratio=0.1).register(DistributedDataParallel(Unused(), **options))
    plain, ours = train(None, model=seeded(Unused), **options), train("none", model=seeded(Unused), **options)
    torch.testing.assert_close(weights(ours), weights(plain), rtol=1e-4, atol=1e-5)
