"""FSDP2: equal to plain FSDP2 where nothing is lost, and the method's own reduce-scatter where something is."""

from __future__ import annotations

import copy
import itertools
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import horovod.torch as hvd
import pytest
import torch
import torch.distributed as dist
from catalogue import bare
from parallel.pytorch.leaks import LARGE, in_use, left_by
from parallel.pytorch.training import SIZE, batch, everyone, make_model
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import CPUOffloadPolicy, MixedPrecisionPolicy, fully_shard
from torch.nn.parallel import DistributedDataParallel
from torch.utils.checkpoint import checkpoint
from worlds import bucket_of

from hvd_compress.core.collectives import World
from hvd_compress.core.method import ReduceScattered
from hvd_compress.distributed import Compression, DistributedCompressor, FullState
from hvd_compress.errors import DisagreementError, SpecError, StateError, UnsupportedError
from hvd_compress.ops.torch_devices import torch_ops
from hvd_compress.transport.lockstep import lockstep

pytestmark = pytest.mark.usefixtures("process_group")

EIGHT_BITS = "vectors=on,min_size=0"
FEEDBACK = "qsgd:bits=8,feedback=on,vectors=on,min_size=0"
ONE_BIT = "efsignsgd:vectors=on,min_size=0"


def mesh() -> DeviceMesh:
    return init_device_mesh("cpu", (SIZE,))


def each_layer(model: nn.Sequential, **options: Any) -> None:
    for layer in model:
        if isinstance(layer, nn.Linear):
            fully_shard(layer, mesh=mesh(), **options)
    fully_shard(model, mesh=mesh(), **options)


def as_one(model: nn.Sequential) -> None:
    fully_shard(model, mesh=mesh())


def two_layers_together(model: nn.Sequential) -> None:
    fully_shard([model[0], model[2]], mesh=mesh())
    fully_shard(model, mesh=mesh())


def in_half_precision(model: nn.Sequential) -> None:
    precision = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    each_layer(model, mp_policy=precision)


def reduced_in_half_precision(model: nn.Sequential) -> None:
    each_layer(model, mp_policy=MixedPrecisionPolicy(reduce_dtype=torch.float16))


def with_a_frozen_layer(model: nn.Sequential) -> None:
    model[2].requires_grad_(False)
    each_layer(model)


def kept_after_forward(model: nn.Sequential) -> None:
    each_layer(model, reshard_after_forward=False)


def offloaded(model: nn.Sequential) -> None:
    each_layer(model, offload_policy=CPUOffloadPolicy(pin_memory=False))


def gathered_ahead(model: Any) -> None:
    each_layer(model)
    model._set_unshard_async_op(True)
    model[0].set_modules_to_forward_prefetch([model[2]])
    model[2].set_modules_to_backward_prefetch([model[0]])


MODES: list[Callable[[nn.Sequential], None]] = [
    each_layer,
    as_one,
    two_layers_together,
    in_half_precision,
    reduced_in_half_precision,
    with_a_frozen_layer,
    kept_after_forward,
    offloaded,
    gathered_ahead,
]


class Job:
    """A sharded model in training."""

    def __init__(
        self,
        compression: DistributedCompressor | str | None,
        shard: Callable[[nn.Sequential], None] = each_layer,
        **options: Any,
    ) -> None:
        self.model: Any = make_model()
        shard(self.model)
        self.compression = Compression.parse(compression) if isinstance(compression, str) else compression
        if self.compression is not None:
            self.compression.register(self.model, **options)
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=0.1, momentum=0.9)

    def backward(self, step: int, factor: float = 1.0) -> None:
        x, y = batch(step)
        loss = nn.functional.cross_entropy(self.model(x).float(), y) * factor
        loss.backward()  # type: ignore[no-untyped-call]

    def run(self, steps: range) -> Job:
        for step in steps:
            self.backward(step)
            self.optimizer.step()
            self.optimizer.zero_grad()
        return self

    def weights(self) -> Tensor:
        return torch.cat([p.full_tensor().flatten() for p in self.model.parameters()]).detach()

    def grads(self) -> Tensor:
        return torch.cat([p.grad.full_tensor().flatten() for p in self.model.parameters() if p.grad is not None])


@pytest.mark.parametrize("shard", [as_one, two_layers_together, in_half_precision, reduced_in_half_precision])
def test_no_compression_equals_plain_fsdp(shard: Callable[[nn.Sequential], None]) -> None:
    plain, ours = Job(None, shard).run(range(6)), Job("none", shard).run(range(6))
    tolerance = 1e-3 if shard is reduced_in_half_precision else 1e-5  # ours sums in float32
    torch.testing.assert_close(ours.weights(), plain.weights(), rtol=1e-4, atol=tolerance)


@pytest.mark.parametrize(
    ("spec", "shard"),
    [
        *((f"qsgd:bits=8,{EIGHT_BITS}", shard) for shard in MODES),
        *((spec, each_layer) for spec in ("bf16", FEEDBACK)),
        *(
            pytest.param(*case, marks=pytest.mark.long)
            for case in (
                ("fp16", each_layer),
                (f"int8:bits=16,{EIGHT_BITS}", each_layer),
                (FEEDBACK, two_layers_together),
            )
        ),
    ],
)
def test_a_few_bits_train_as_plain_fsdp_does(spec: str, shard: Callable[[nn.Sequential], None]) -> None:
    plain, ours = Job(None, shard).run(range(10)), Job(spec, shard).run(range(10))
    start = Job(None, shard).weights()
    assert (ours.weights() - plain.weights()).norm() < 0.1 * (plain.weights() - start).norm()


def test_updates() -> None:
    """The mean over the ranks of what each would do by its own second moments, which each shard has in factors."""
    compression = Compression.parse("bf16:preconditioned=on,beta2=0.9")
    model: Any = make_model()
    own = copy.deepcopy(model)
    each_layer(model)
    compression.register(model, optimizer=compression.optimizer(model, lr=0.01))
    second: list[Any] = [(0.0, 0.0)] * SIZE * len(list(own.parameters()))
    for step in range(3):
        x, y = batch(step)
        grads = torch.autograd.grad(nn.functional.cross_entropy(own(x), y), list(own.parameters()))
        shards = [shard.reshape(len(shard), -1) for grad in grads for shard in grad.chunk(SIZE)]
        means = [(shard.square().mean(1), shard.square().mean(0)) for shard in shards]
        second = [
            [0.9 * v + 0.1 * new for v, new in zip(*pair, strict=True)] for pair in zip(second, means, strict=True)
        ]
        roots = [(torch.outer(r, c) / r.mean() / (1 - 0.9 ** (step + 1))).sqrt() for r, c in second]
        expected = torch.cat([(g / (root + 1e-8)).flatten() for g, root in zip(shards, roots, strict=True)])
        torch.autograd.backward(nn.functional.cross_entropy(model(x), y))
        found = torch.cat([p.grad.full_tensor().flatten() for p in model.parameters()])
        dist.all_reduce(expected)
        expected /= SIZE
        torch.testing.assert_close(found, expected, rtol=0, atol=0.05)
        model.zero_grad()
    with pytest.raises(UnsupportedError, match="AdamW is not supported with ctk"):
        Compression.parse("ctk:preconditioned=on").register(model, optimizer=torch.optim.AdamW(model.parameters()))


def test_updates_that_were_clipped_are_refused() -> None:
    compression = Compression.parse("ctk:ratio=0.1,chunk=64,preconditioned=on,vectors=on,min_size=0")
    model: Any = make_model()
    each_layer(model)
    optimizer = compression.optimizer(model, lr=0.01)
    compression.register(model, optimizer=optimizer)
    for step, clips in enumerate((False, True)):
        optimizer.zero_grad()
        for part in range(2):  # gradients of two passes, which add up
            x, y = batch(2 * step + part)
            torch.autograd.backward(nn.functional.cross_entropy(model(x), y))
        if not clips:
            optimizer.step()
    torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    with pytest.raises(UnsupportedError, match=r"instead of torch\.nn\.utils\.clip_grad_norm_, .*clip_norm"):
        optimizer.step()


def test_phases_hand_the_residual_on() -> None:
    plain, ours = Job(None), Job(Compression.phases({0: "none", 2: FEEDBACK, 4: ONE_BIT, 6: "none"}))
    given, delivered = torch.zeros(()), torch.zeros(())
    for step in range(7):
        for job in (plain, ours):
            job.backward(step)
        given, delivered = given + plain.grads(), delivered + ours.grads()
        assert torch.allclose(given, delivered, atol=1e-5) is (step not in (2, 3, 4, 5))
        for job in (plain, ours):
            job.optimizer.zero_grad()


def test_the_sum() -> None:
    mean, total = Job("none"), Job("none", op="sum")
    mean.backward(0)
    total.backward(0)
    torch.testing.assert_close(total.grads(), mean.grads() * SIZE)


def test_a_mesh_with_one_replica_is_one_without_replicas() -> None:
    def shard(model: nn.Sequential) -> None:
        both = init_device_mesh("cpu", (1, SIZE), mesh_dim_names=("replicate", "shard"))
        for module in [layer for layer in model if isinstance(layer, nn.Linear)] + [model]:
            fully_shard(module, mesh=both)

    assert torch.equal(Job(FEEDBACK, shard).run(range(4)).weights(), Job(FEEDBACK).run(range(4)).weights())


def test_accumulation_without_sync() -> None:
    def run(spec: str | None) -> Tensor:
        job = Job(spec)
        for step in range(3):
            job.model.set_requires_gradient_sync(False)
            job.backward(step + 100)
            job.model.set_requires_gradient_sync(True)
            job.run(range(step, step + 1))
        return job.weights()

    torch.testing.assert_close(run("none"), run(None), rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("spec", ["qsgd:bits=4", "loco", "bf16", "fp8", "block8"])
def test_the_bits_are_those_of_the_method(spec: str) -> None:
    """The gradient of a linear layer is known: the batch itself."""
    method = ReduceScattered(bare(spec))
    layer = nn.Linear(128, 8 * SIZE, bias=False)
    fully_shard(layer, mesh=mesh())
    Compression.parse(spec).register(layer)
    inputs = [torch.randn(8 * SIZE, 128, generator=torch.Generator().manual_seed(rank)) for rank in range(SIZE)]
    layer(torch.eye(128)).backward(inputs[hvd.rank()].T)
    grad = layer.weight.grad
    assert grad is not None
    bucket = bucket_of((1024 * SIZE,))._replace(key="")
    ops = torch_ops("cpu")
    states = [method.init(ops, bucket, World(0, SIZE)) for _ in inputs]
    ends = lockstep(ops, method, bucket, [one.flatten().numpy() for one in inputs], states)
    expected = torch.as_tensor(ends[hvd.rank()].total) / SIZE
    torch.testing.assert_close(grad.to_local().flatten(), expected, rtol=0, atol=0)  # type: ignore[attr-defined]


@pytest.mark.parametrize("spec", [FEEDBACK, "loco"])
def test_a_gradient_that_is_not_finite_is_seen_by_all_and_leaves_no_trace(spec: str) -> None:
    job = Job(spec).run(range(3))
    assert job.compression is not None
    before, weights = job.compression.state_dict(), job.weights()
    job.backward(3, factor=float("nan") if hvd.rank() == SIZE - 1 else 1.0)
    local = torch.cat([p.grad.to_local().flatten() for p in job.model.parameters() if p.grad is not None])
    assert local.isnan().all()
    job.optimizer.zero_grad()
    torch.testing.assert_close(job.weights(), weights)
    after = job.compression.state_dict()
    for (_, ours), (_, theirs) in zip(leaves_of(before), leaves_of(after), strict=True):
        torch.testing.assert_close(ours, theirs, rtol=0, atol=0)
    job.run(range(4, 6))
    assert job.weights().isfinite().all()


def test_a_discarded_step_leaves_no_trace() -> None:
    one, other = Job(FEEDBACK).run(range(3)), Job(FEEDBACK).run(range(3))
    one.backward(7)
    assert one.compression is not None
    one.compression.discard()
    one.optimizer.zero_grad()
    assert torch.equal(one.run(range(3, 5)).weights(), other.run(range(3, 5)).weights())


def leaves_of(state: Any, path: str = "") -> list[tuple[str, Tensor]]:
    if isinstance(state, dict):
        return [leaf for key in sorted(state) for leaf in leaves_of(state[key], f"{path}/{key}")]
    return [(path, state)] if isinstance(state, Tensor) else []


@pytest.mark.parametrize(("spec", "early"), [(FEEDBACK, True), ("loco", False), ("qsgd", True)])
def test_resumes_bit_for_bit(spec: str, early: bool, tmp_path: Path) -> None:
    folder = everyone(str(tmp_path))[0]
    straight = Job(spec).run(range(6)).weights()
    first = Job(spec).run(range(3))
    assert first.compression is not None
    first.compression.save(folder)
    dist.barrier()
    compression = Compression.parse(spec)
    if early:
        compression.load(folder)
    second = Job(compression)
    if not early:
        compression.load(folder)
    second.model.load_state_dict(first.model.state_dict())
    second.optimizer.load_state_dict(first.optimizer.state_dict())
    assert torch.equal(second.run(range(3, 6)).weights(), straight)


def test_a_group_whose_name_is_a_number_resumes_beside_one_without_a_name() -> None:
    def shard(model: nn.Sequential) -> None:
        fully_shard(model[0], mesh=mesh())
        fully_shard(model, mesh=mesh())

    first, second, whole = (Job(FEEDBACK, shard) for _ in range(3))
    first.run(range(3))
    second.compression.load_state_dict(first.compression.state_dict())  # type: ignore[union-attr]
    second.model.load_state_dict(first.model.state_dict())
    second.optimizer.load_state_dict(first.optimizer.state_dict())
    assert torch.equal(second.run(range(3, 6)).weights(), whole.run(range(6)).weights())


@pytest.mark.parametrize("spec", [FEEDBACK, "auto"])
def test_residuals_of_another_number_of_ranks_are_refused(spec: str) -> None:
    job = Job(spec).run(range(2))
    assert job.compression is not None
    states = FullState(job.compression).state_dict()
    *_, last = states["ranks"]
    more = tuple(copy.deepcopy(state) for state in (*states["ranks"], last))
    for rank, state in enumerate(more):
        for part in (state, *state["sessions"].values()):
            part["rank"], part["size"] = rank, SIZE + 1
    with pytest.raises(StateError, match=f"saved on {SIZE + 1} ranks"):
        FullState(job.compression).load_state_dict({"ranks": more})
    FullState(job.compression).load_state_dict(states)


def test_a_method_without_residuals_is_restored_on_any_number_of_ranks() -> None:
    job = Job(f"int8:{EIGHT_BITS}").run(range(2))
    assert job.compression is not None
    *states, last = FullState(job.compression).state_dict()["ranks"]
    more = [copy.deepcopy(state) for state in (*states, last, last)]
    for rank, state in enumerate(more):
        for part in (state, *state["sessions"].values()):
            part["rank"], part["size"] = rank, SIZE + 1
    later = Job(f"int8:{EIGHT_BITS}")
    assert later.compression is not None
    FullState(later.compression).load_state_dict({"ranks": tuple(more)})
    (session,) = later.run(range(2, 3)).compression.state_dict()["sessions"].values()  # type: ignore[union-attr]
    assert session["steps"] == 3


def test_states_of_different_steps_are_the_same_error_on_all() -> None:
    """Also on ranks that have trained together before."""
    job = Job(FEEDBACK)
    assert job.compression is not None
    states = []
    for step in range(2):
        job.run(range(step, step + 1))
        states.append(copy.deepcopy(job.compression.state_dict()))
    job.compression.load_state_dict(states[hvd.rank() % 2])
    with pytest.raises(DisagreementError, match=r"'step 1 of job .*'step 2 of job") as caught:
        job.run(range(2, 3))
    assert len(set(everyone(str(caught.value)))) == 1


def test_a_loss_scale_is_followed() -> None:
    plain = Job(FEEDBACK).run(range(1))
    plain.backward(1)
    scaled = Job(FEEDBACK)
    scales = iter([1.0, 1024.0])
    assert scaled.compression is not None
    scaled.compression.follow(lambda: next(scales))
    scaled.run(range(1)).backward(1, factor=1024.0)
    torch.testing.assert_close(scaled.grads() / 1024, plain.grads(), rtol=1e-5, atol=1e-6)


class Branches(nn.Module):
    """A model of which each step uses some layers."""

    def __init__(self, method: str | None, apart: bool = False, **options: Any) -> None:
        super().__init__()
        with torch.random.fork_rng():
            torch.manual_seed(3)
            self.layers = nn.ModuleList([nn.Linear(32, 10) for _ in range(3)])
        for layer in self.layers if apart else ():
            fully_shard(layer, mesh=mesh())
        fully_shard(self, mesh=mesh())
        if method:
            self.compression = Compression.parse(method).register(self, **options)

    def forward(self, x: Tensor, used: str) -> Tensor:
        return torch.cat([self.layers[int(number)](x) for number in used])

    def step(self, number: int, used: str) -> list[Tensor | None]:
        """Return the gradients of a step, of all shards."""
        self.zero_grad()
        x, _ = batch(number)
        self(x, used).pow(2).mean().backward()
        grads: list[Any] = [p.grad for p in self.parameters()]
        return [grad if grad is None else grad.full_tensor() for grad in grads]


USES = ["01", "0", "12", "02", "012", "1", "20"]


@pytest.mark.parametrize("spec", ["none", "qsgd:bits=8", "loco:vectors=on,min_size=0", ONE_BIT])
def test_parameters_that_a_step_does_not_use(spec: str) -> None:
    """They have no gradient, as in plain FSDP2."""
    plain, ours = Branches(None), Branches(spec)
    for number, used in enumerate(USES):
        for expected, grad in zip(plain.step(number, used), ours.step(number, used), strict=True):
            assert (grad is None) == (expected is None)
            if spec == "none" and grad is not None:
                torch.testing.assert_close(grad, expected)


def test_nothing_is_lost_whatever_parameters_a_step_uses() -> None:
    """The sum of all gradients is what was delivered and what is still to be sent."""
    plain, ours = Branches(None), Branches(ONE_BIT)
    given = delivered = 0.0
    for number, used in enumerate(USES * 2):
        for model in (plain, ours):
            weight: Any = model.layers[0].weight
            weight.requires_grad_(number not in (3, 4))  # frozen for a while
        given += sum(float(grad.double().sum()) for grad in plain.step(number, used) if grad is not None)
        delivered += sum(float(grad.double().sum()) for grad in ours.step(number, used) if grad is not None)
        residuals = sum(float(leaf.double().sum()) for _, leaf in leaves_of(ours.compression.state_dict()))
        assert delivered + sum(everyone(residuals)) / SIZE == pytest.approx(given, rel=1e-4)
    later = Branches(ONE_BIT)
    later.compression.load_state_dict(ours.compression.state_dict())
    for number, used in enumerate(USES):
        for one, other in zip(ours.step(number, used), later.step(number, used), strict=True):
            assert (one is None and other is None) or torch.equal(one, other)  # type: ignore[arg-type]


def test_second_moments_are_those_of_their_parameters_whatever_a_step_uses() -> None:
    """So they do not depend on which parameters are reduced together."""
    together, apart = Branches(None), Branches(None, apart=True)
    for model in (together, apart):
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        Compression.parse("bf16:preconditioned=on").register(model, optimizer=optimizer)
    for number, used in enumerate(("012", *USES)):
        for expected, grad in zip(apart.step(number, used), together.step(number, used), strict=True):
            assert (expected is None and grad is None) or torch.equal(grad, expected)  # type: ignore[arg-type]


class Chunked(nn.Module):
    """A language model with a loss in chunks, each with a backward pass of its own."""

    def __init__(self) -> None:
        super().__init__()
        with torch.random.fork_rng():
            torch.manual_seed(3)
            self.body = nn.Linear(32, 16)
            self.norm, self.head = nn.RMSNorm(16), nn.Linear(16, 40)
        fully_shard(self.body, mesh=mesh())
        fully_shard([self.norm, self.head], mesh=mesh())
        fully_shard(self, mesh=mesh())

    def forward(self, x: Tensor) -> Tensor:
        return self.norm(self.body(x))  # type: ignore[no-any-return]

    def step(self, number: int, factor: float = 1.0) -> Tensor:
        """Return the gradients of a step."""
        self.zero_grad()
        hidden = self(batch(number)[0])
        chunks = [chunk.requires_grad_() for chunk in hidden.detach().clone().chunk(3)]
        for chunk in chunks:
            (self.head(chunk).pow(2).mean() * factor).backward()
        hidden.backward(torch.cat([chunk.grad for chunk in chunks]))
        grads: list[Any] = [p.grad for p in self.parameters()]
        return torch.cat([grad.full_tensor().flatten() for grad in grads])


def test_a_group_that_is_reduced_in_parts() -> None:
    """The step ends where the backward pass of the whole model ends."""
    plain, ours, lossy = Chunked(), Chunked(), Chunked()
    exact, compression = Compression.none().register(ours), Compression.parse(FEEDBACK).register(lossy)
    for number in range(3):
        expected = plain.step(number)
        torch.testing.assert_close(ours.step(number), expected)
        torch.testing.assert_close(lossy.step(number), expected, rtol=0.1, atol=0.1)
    assert exact.stats().steps == compression.stats().steps == 3
    before = leaves_of(compression.state_dict())
    assert not lossy.step(3, float("nan") if hvd.rank() == SIZE - 1 else 1.0).isfinite().any()
    for (_, ours_now), (_, then) in zip(leaves_of(compression.state_dict()), before, strict=True):
        assert torch.equal(ours_now, then)


def test_reentrant_checkpoints() -> None:
    """All gradients are reduced in backward passes within the backward pass of the model."""
    model: Any = nn.Sequential(nn.Linear(32, 32), nn.Linear(32, 32))
    for layer in model:
        fully_shard(layer, mesh=mesh())
        layer.forward = partial(checkpoint, layer.forward, use_reentrant=True)
    fully_shard(model, mesh=mesh())
    compression = Compression.parse(FEEDBACK).register(model)
    for step in range(3):
        x, _ = batch(step)
        model(x.requires_grad_()).sum().backward()
    assert compression.stats().steps == 3


def test_a_sum_that_overflows_leaves_no_trace() -> None:
    layer: Any = nn.Linear(32, 32, bias=False)
    fully_shard(layer, mesh=mesh(), mp_policy=MixedPrecisionPolicy(reduce_dtype=torch.float16))
    compression = Compression.parse(FEEDBACK).register(layer, op="sum")

    def backward(size: float) -> None:
        layer.zero_grad()
        (layer(torch.eye(32)) * batch(0)[0][:1] * size).sum().backward()

    backward(1)
    before = leaves_of(compression.state_dict())
    backward(60000 / float(batch(0)[0][:1].abs().max()))
    assert not layer.weight.grad.full_tensor().isfinite().all()
    for (_, now), (_, then) in zip(leaves_of(compression.state_dict()), before, strict=True):
        assert torch.equal(now, then)


def test_registered_again_it_goes_on() -> None:
    job, straight = Job(FEEDBACK).run(range(3)), Job(FEEDBACK).run(range(5))
    assert job.compression is not None
    job.compression.register(job.model)
    assert torch.equal(job.run(range(3, 5)).weights(), straight.weights())
    (session,) = job.compression.state_dict()["sessions"].values()
    assert session["steps"] == 5
    with pytest.raises(UnsupportedError, match="registered already"):
        job.compression.register(job.model, op="sum")


def test_registered_before_it_has_memory() -> None:
    with torch.device("meta"):
        model: Any = nn.Sequential(nn.Linear(32, 16), nn.Linear(16, 10))
    for layer in model:
        fully_shard(layer, mesh=mesh())
    fully_shard(model, mesh=mesh())
    compression = Compression.parse(FEEDBACK).register(model)
    model.to_empty(device="cpu")
    for parameter in model.parameters():
        nn.init.constant_(parameter, 0.1)
    model(batch(0)[0]).sum().backward()
    assert compression.stats().steps == 1


def test_connections_do_not_grow_with_the_number_of_groups() -> None:
    kept: list[Any] = []

    def more(layers: int) -> int:
        model: Any = nn.Sequential(*(nn.Linear(32, 32) for _ in range(layers)))
        each_layer(model)
        Compression.parse(FEEDBACK).register(model)
        before = in_use()
        model(batch(0)[0]).sum().backward()
        kept.append(model)
        return (in_use() - before).threads

    assert more(12) == more(2)


def test_deleted_models_leave_nothing_behind() -> None:
    compression = Compression.parse(ONE_BIT)

    def cycle() -> Tensor:
        model: Any = nn.Sequential(nn.Linear(LARGE, LARGE))
        fully_shard(model, mesh=mesh())
        compression.register(model)
        for _ in range(2):
            model(torch.ones(2, LARGE)).sum().backward()
        return model[0].weight  # type: ignore[no-any-return]

    assert left_by(cycle).little
    assert compression.state_dict()["sessions"] == {}


def test_several_models_with_one_compressor() -> None:
    compression = Compression.parse(FEEDBACK)
    jobs = [Job(compression) for _ in range(3)]
    for step, (number, job) in itertools.product(range(3), enumerate(jobs)):
        job.run(range(10 * number + step, 10 * number + step + 1))
    assert len(compression.state_dict()["sessions"]) == 3
    assert torch.equal(jobs[1].weights(), Job(FEEDBACK).run(range(10, 13)).weights())


def test_statistics_count_the_payload() -> None:
    job = Job(f"qsgd:bits=8,{EIGHT_BITS}").run(range(3))
    assert job.compression is not None
    stats = job.compression.stats()
    assert stats.steps == 3
    assert 3.5 < stats.ratio < 4


def test_what_is_not_supported_says_so() -> None:
    with pytest.raises(UnsupportedError, match=r"take one of none, fp16, .*qsgd"):
        Job("topk:ratio=0.1")
    with pytest.raises(UnsupportedError, match="cannot reduce-scatter"):
        Job("qsgd:start=8,bits=8")
    with pytest.raises(UnsupportedError, match="fully_shard"):
        Compression.qsgd().register(make_model())
    with pytest.raises(SpecError, match="op='max'"):
        Job("qsgd", op="max")
    with pytest.raises(UnsupportedError, match="replicas="):
        Compression.qsgd().register(DistributedDataParallel(make_model()), replicas=dist.group.WORLD)
    model = make_model()
    fully_shard(model, mesh=init_device_mesh("cpu", (SIZE, 1), mesh_dim_names=("replicate", "shard")))
    with pytest.raises(UnsupportedError, match="replicas= differs"):
        Compression.qsgd().register(model, replicas=False)
    job = Job("qsgd")
    job.model[0].set_force_sum_reduction_for_comms(False)
    with pytest.raises(UnsupportedError, match="set_force_sum_reduction_for_comms"):
        job.backward(0)


def test_other_settings_on_one_rank_are_the_same_error_on_all() -> None:
    job = Job("qsgd:bits=4" if hvd.rank() == 0 else "qsgd:bits=8")
    with pytest.raises(DisagreementError, match="rank 0 has 'qsgd"):
        job.backward(0)


@pytest.mark.parametrize("spec", ["none", "topk:ratio=1.0,vectors=on,min_size=0", "powersgd:rank=64,min_gain=0"])
def test_replicas_equal_plain_ddp(spec: str) -> None:
    """Each rank is a node of its own, with all shards."""
    meshes = init_device_mesh("cpu", (SIZE, 1), mesh_dim_names=("replicate", "shard"))

    def shard(model: nn.Sequential) -> None:
        for layer in model:
            if isinstance(layer, nn.Linear):
                fully_shard(layer, mesh=meshes["shard"])
        fully_shard(model, mesh=meshes["shard"])

    ours = Job(spec, shard, replicas=meshes["replicate"].get_group()).run(range(6))
    model = make_model()
    wrapped = DistributedDataParallel(model)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    for step in range(6):
        x, y = batch(step)
        nn.functional.cross_entropy(wrapped(x), y).backward()  # type: ignore[no-untyped-call]
        optimizer.step()
        optimizer.zero_grad()
    plain = torch.cat([p.detach().flatten() for p in model.parameters()])
    torch.testing.assert_close(ours.weights(), plain, rtol=1e-4, atol=1e-5)
