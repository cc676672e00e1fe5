"""Local steps: models are averaged every few steps, over `torch.distributed` and over Horovod."""

from __future__ import annotations

import random
from collections.abc import Callable
from copy import deepcopy
from pathlib import Path
from typing import Any, Self

import horovod.torch as hvd
import pytest
import torch
from parallel.pytorch.training import EVEN, LOSSLESS, SIZE, assert_ranks_equal, everyone, make_model
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

import hvd_compress.torch
from hvd_compress.distributed import Compression, FullState, LocalSteps, Outer
from hvd_compress.errors import CompressionError, DisagreementError, SpecError, StateError, UnsupportedError

pytestmark = pytest.mark.usefixtures("process_group")

NESTEROV = Outer(lr=0.7, momentum=0.9, nesterov=True)
KINDS: dict[str, Any] = {"group": LocalSteps, "horovod": hvd_compress.torch.LocalSteps}
KINDS_OF_COMPRESSION: dict[str, Any] = {"group": Compression, "horovod": hvd_compress.torch.Compression}
both = pytest.mark.parametrize("kind", KINDS)

Make = Callable[[list[Tensor]], torch.optim.Optimizer]


def sgd(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.SGD(parameters, lr=0.1)


def adamw(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.AdamW(parameters, lr=3e-3)


def batch(step: int, rank: int) -> tuple[Tensor, Tensor]:
    x = torch.randn(16, 32, generator=torch.Generator().manual_seed(1000 * step + rank))
    return x, x[:, :10].argmax(1)


def learn(model: nn.Module, optimizer: torch.optim.Optimizer, step: int, rank: int | None = None) -> None:
    x, y = batch(step, hvd.rank() if rank is None else rank)
    optimizer.zero_grad()
    nn.functional.cross_entropy(model(x), y).backward()  # type: ignore[no-untyped-call]
    optimizer.step()


class Training:
    """A model of this rank that is averaged with those of the others."""

    def __init__(self, kind: str = "group", make: Make = sgd, *preset: str, **options: Any) -> None:
        self.model = make_model()
        self.optimizer = make(list(self.model.parameters()))
        self.local = KINDS[kind](self.optimizer, *preset, **options)
        self.steps = 0

    def run(self, steps: int) -> Self:
        for _ in range(steps):
            learn(self.model, self.optimizer, self.steps)
            self.steps += 1
        return self

    @property
    def weights(self) -> Tensor:
        return flat(self.model)


def flat(model: nn.Module) -> Tensor:
    return torch.cat([p.detach().flatten().clone() for p in model.parameters()])


def alone(make: Make, every: int, steps: int, outer: Outer, size: int = SIZE) -> Tensor:
    """DiLoCo as its paper has it (algorithm 1), of all ranks in one process, with PyTorch's own outer optimizer."""
    anchor = make_model()
    step_outside = torch.optim.SGD(anchor.parameters(), outer.lr, outer.momentum, nesterov=outer.nesterov)
    models = [make_model() for _ in range(size)]
    optimizers = [make(list(model.parameters())) for model in models]
    for step in range(steps):
        for rank, (model, optimizer) in enumerate(zip(models, optimizers, strict=True)):
            learn(model, optimizer, step, rank)
        if (step + 1) % every == 0:
            for p, *theirs in zip(anchor.parameters(), *(model.parameters() for model in models), strict=True):
                p.grad = torch.stack([p.detach() - one.detach() for one in theirs]).mean(0)
            step_outside.step()
            for model in models:
                model.load_state_dict(anchor.state_dict())
    return flat(models[hvd.rank() % size])


def close(found: Tensor, expected: Tensor) -> None:
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-5)


@both
@pytest.mark.parametrize("spec", ["none", *LOSSLESS])
def test_every_step_with_sgd_is_data_parallel_training(kind: str, spec: str) -> None:
    job = Training(kind, every=1, compression=spec).run(6)
    model = make_model()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for step in range(6):
        optimizer.zero_grad()
        for rank in range(SIZE):
            x, y = batch(step, rank)
            (nn.functional.cross_entropy(model(x), y) / SIZE).backward()  # type: ignore[no-untyped-call]
        optimizer.step()
    close(job.weights, flat(model))
    assert_ranks_equal(job.weights)


@both
@pytest.mark.parametrize("outer", [Outer(), Outer(lr=0.5), Outer(momentum=0.5), NESTEROV], ids=str)
@pytest.mark.parametrize("make", [sgd, adamw])
def test_twenty_steps_are_as_in_the_paper(kind: str, make: Make, outer: Outer) -> None:
    job = Training(kind, make, every=20, outer=outer).run(45)
    close(job.weights, alone(make, 20, 45, outer))
    assert len(everyone(job.weights)) == SIZE and not torch.equal(*everyone(job.weights)[:2])


def test_a_hundred_steps_of_diloco() -> None:
    job = Training("group", adamw, "diloco", every=10).run(100)
    close(job.weights, alone(adamw, 10, 100, NESTEROV))
    assert_ranks_equal(job.weights)


TORCHFT = {
    (0, 0.0): [(-11, -5), (-17, -23), (-35, -29), (-41, -47), (-59, -53)],
    (0, 0.5): [(-8, -5), (-14, -17), (-24.5, -23), (-30.5, -32), (-40.25, -38)],
    (0, 1.0): [(-5, -5), (-11, -11), (-17, -17), (-23, -23), (-29, -29)],
    (1, 0.0): [(-7, -5), (-13, -19), (-27, -25), (-33, -39), (-47, -45)],
    (1, 0.5): [(-6, -5), (-12, -15), (-21.5, -21), (-27.5, -29), (-35.75, -35)],
    (1, 1.0): [(-5, -5), (-11, -11), (-17, -17), (-23, -23), (-29, -29)],
}
"""Both parameters after every third step, by delay and mix: torchft's test_diloco_mocked_updates."""


@both
@pytest.mark.parametrize(("delay", "mix"), TORCHFT)
def test_fragments_are_those_of_torchft(kind: str, delay: int, mix: float) -> None:
    parameters = [nn.Parameter(torch.ones(1, 1)) for _ in range(2)]
    optimizer = torch.optim.SGD(parameters, lr=1.0)
    KINDS[kind](optimizer, every=6, fragments=2, delay=delay, mix=mix, outer=Outer(lr=2.0))
    found = []
    for step in range(15):
        for p in parameters:
            p.grad = torch.full_like(p, 2.0)
        optimizer.step()
        if step % 3 == 2:
            found.append(tuple(p.item() for p in parameters))
    assert found == TORCHFT[delay, mix]


@both
@pytest.mark.parametrize("spec", ["none", "qsgd:bits=4,min_size=0"])
def test_bytes_are_those_of_a_gradient_once_in_a_while(kind: str, spec: str) -> None:
    """And 32 more, by which ranks know that they are at the same step."""
    job = Training(kind, every=5, compression=spec).run(20)
    plain = KINDS_OF_COMPRESSION[kind].parse(spec)
    tensors = [torch.randn(p.shape) for p in job.model.parameters()]
    for _ in range(4):
        if kind == "group":
            plain.all_reduce(tensors, "plain")
        else:
            hvd.grouped_allreduce(tensors, name="plain", compression=plain)
    assert job.local.stats().bytes_sent == plain.stats().bytes_sent + 4 * 32


@both
def test_what_was_not_sent_comes_with_a_later_round(kind: str) -> None:
    """Ranks that stand still after a first round end at the mean of what they had then."""
    model = make_model()
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    KINDS[kind](optimizer, every=1, compression="topk:ratio=0.2,min_size=0")
    before, moved = flat(model), torch.zeros(())
    for step in range(40):
        for p in model.parameters():
            generator = torch.Generator().manual_seed(hvd.rank())
            p.grad = torch.randn(p.shape, generator=generator) if step == 0 else torch.zeros_like(p)
        if step == 0:
            moved = torch.cat([p.grad.flatten() for p in model.parameters() if p.grad is not None])
        optimizer.step()
    close(flat(model), before - torch.stack(everyone(moved)).mean(0))


def test_a_rank_that_has_gone_astray_comes_back(caplog: pytest.LogCaptureFixture) -> None:
    job = Training(every=4, compression="topk:ratio=0.1,min_size=0").run(4)
    before = job.weights
    job.run(2)
    if hvd.rank() == SIZE - 1:
        with torch.no_grad():
            next(job.model.parameters())[0, 0] = torch.nan
    job.run(2)
    assert torch.equal(job.weights, before)
    assert ("not finite after step 8" in caplog.text) == (hvd.rank() == 0)
    assert job.run(4).weights.isfinite().all() and not torch.equal(job.weights, before)


def test_all_begin_with_the_parameters_of_the_first_rank() -> None:
    parameter = nn.Parameter(torch.full((3,), float(hvd.rank())))
    LocalSteps(torch.optim.SGD([parameter], lr=1.0), every=2)
    assert not parameter.any()


@pytest.mark.parametrize("mix", [0.0, 0.5])
def test_the_end_right_after_an_average(mix: float) -> None:
    job = Training(every=3, mix=mix).run(3)
    job.local.finish()
    assert_ranks_equal(job.weights)


@both
def test_training_goes_on_after_an_end(kind: str) -> None:
    """It comes while an exchange is on its way, which is over then."""
    job = Training(kind, every=6, delay=2).run(5)
    job.local.finish()
    assert_ranks_equal(job.weights)
    job.run(7)
    assert_ranks_equal(job.weights)


@both
def test_the_end_and_the_evaluation(kind: str) -> None:
    job = Training(kind, adamw, every=6, delay=2, outer=NESTEROV).run(6)
    anchor = job.weights
    assert_ranks_equal(anchor)
    job.run(5)
    own = job.weights
    with job.local.averaged():
        assert torch.equal(job.weights, anchor)
    assert torch.equal(job.weights, own) and not torch.equal(own, anchor)
    job.local.finish()
    assert_ranks_equal(job.weights)
    job.local.remove()
    own = job.run(1).weights
    assert not torch.equal(*everyone(own)[:2]), "nothing is averaged any more"


def draw(generator: random.Random) -> dict[str, Any]:
    fragments = generator.choice([1, 1, 2, 3])
    every = fragments * generator.randint(1, 5)
    return {
        "every": every,
        "fragments": fragments,
        "delay": generator.randint(0, every // fragments - 1),
        "mix": generator.choice([0.0, 0.5, 1.0]),
        "outer": generator.choice([Outer(), Outer(lr=0.5, momentum=0.5), NESTEROV]),
        "compression": generator.choice(
            ["none", "fp16", "topk:ratio=0.1,min_size=0", "qsgd:bits=4,min_size=0", "powersgd:rank=2,min_size=0"]
        ),
    }


@pytest.mark.parametrize("seed", [*range(40), *(pytest.param(n, marks=pytest.mark.long) for n in range(40, 100))])
def test_a_job_goes_on_from_any_step_bit_for_bit(seed: int, tmp_path: Path) -> None:
    """Between exchanges, and while one is on its way."""
    generator = random.Random(seed)
    kind, make, options = generator.choice(list(KINDS)), generator.choice([sgd, adamw]), draw(generator)
    first, more = generator.randint(0, 12), generator.randint(1, 12)
    if kind == "group":
        options["quorum"] = generator.choice([None, SIZE])
    folder = hvd.broadcast_object(str(tmp_path)) if seed % 2 else ""
    job = Training(kind, make, **options).run(first)
    state = deepcopy((job.local.state_dict(), job.model.state_dict(), job.optimizer.state_dict()))
    if folder:
        job.local.save(folder)
    job.run(more)

    other = Training(kind, make, **options)
    other.steps = first
    if folder:
        other.local.load(folder)
    else:
        other.local.load_state_dict(state[0])
    other.model.load_state_dict(state[1])
    other.optimizer.load_state_dict(state[2])
    assert torch.equal(other.run(more).weights, job.weights), (kind, options, first, more)


def test_a_checkpoint_that_all_ranks_share() -> None:
    job = Training(every=3, compression="topk:ratio=0.1,min_size=0", outer=NESTEROV).run(3)
    state = deepcopy((FullState(job.local).state_dict(), job.model.state_dict()))
    other = Training(every=3, compression="topk:ratio=0.1,min_size=0", outer=NESTEROV)
    FullState(other.local).load_state_dict(state[0])
    other.model.load_state_dict(state[1])
    other.steps = 3
    assert torch.equal(other.run(3).weights, job.run(3).weights)


def test_wrong_states_change_nothing(tmp_path: Path) -> None:
    job = Training(every=4, outer=NESTEROV, delay=1).run(3)
    state, before = job.local.state_dict(), job.weights
    wrong: list[tuple[Any, str]] = [
        ({}, "not a compressor's state"),
        (Compression.parse("topk:ratio=0.1").state_dict(), "none of LocalSteps"),
        (Training(every=4, delay=1).run(3).local.state_dict(), "momentum.0"),
        (Training(every=4, outer=NESTEROV).run(3).local.state_dict(), "mean.0"),
        (Training(every=4, outer=NESTEROV, delay=1, compression="fp16").run(3).local.state_dict(), "fp16"),
    ]
    spoilt = deepcopy(state)
    next(iter(spoilt["sessions"].values()))["buckets"][""]["anchor.1"][0] = torch.inf
    for given, message in [*wrong, (spoilt, "not finite")]:
        with pytest.raises(StateError, match=message):
            job.local.load_state_dict(given)
    assert torch.equal(job.weights, before)
    other = Training(every=4, outer=NESTEROV, delay=1).run(3)
    assert torch.equal(job.run(5).weights, other.run(5).weights)


@both
def test_two_optimizers_share_a_compression(kind: str) -> None:
    """Each has a state of its own, although their parameters have the same shapes, as in a GAN."""
    spec = "topk:ratio=0.1,min_size=0"
    shared = KINDS_OF_COMPRESSION[kind].parse(spec)
    pair = [Training(kind, every=2, compression=shared) for _ in range(2)]
    apart = [Training(kind, every=2, compression=spec) for _ in range(2)]
    for part in (0, 1, 1, 0, 1, 0, 0, 1):
        pair[part].run(1)
        apart[part].run(1)
    assert all(torch.equal(a.weights, b.weights) for a, b in zip(pair, apart, strict=True))


def test_frozen_parameters_are_left_alone() -> None:
    model = make_model()
    for p in model[0].parameters():
        p.requires_grad_(False)
    optimizer = sgd(model.parameters())
    local = LocalSteps(optimizer, every=2)
    for step in range(4):
        learn(model, optimizer, step)
    trained = sum(p.numel() for p in model.parameters() if p.requires_grad)
    assert local.stats().gradient_bytes == 2 * 4 * trained
    model[0].requires_grad_(True)
    with pytest.raises(UnsupportedError, match="6 parameters that require a gradient, but it had 4"):
        learn(model, optimizer, 4)


def test_a_schedule_of_the_learning_rate_and_a_closure() -> None:
    job = Training(make=lambda parameters: torch.optim.LBFGS(parameters, lr=0.1, max_iter=2), every=2)
    schedule = torch.optim.lr_scheduler.StepLR(job.optimizer, 2)
    for step in range(4):
        x, y = batch(step, hvd.rank())

        def closure() -> Tensor:
            job.optimizer.zero_grad()
            loss = nn.functional.cross_entropy(job.model(x), y)  # noqa: B023
            loss.backward()  # type: ignore[no-untyped-call]
            return loss

        job.optimizer.step(closure)  # type: ignore[arg-type]
        schedule.step()
    assert_ranks_equal(job.weights)
    assert schedule.get_last_lr() == [pytest.approx(0.001)]


@pytest.mark.skipif(SIZE % 2 == 1, reason="needs two nodes of as many ranks: of two ranks, each is a node")
def test_shards_of_fsdp_are_averaged_between_replicas() -> None:
    shards = SIZE // 2
    mesh = init_device_mesh("cpu", (2, shards), mesh_dim_names=("replicas", "shards"))
    model = make_model()
    fully_shard(model, mesh=mesh["shards"])
    optimizer = adamw(model.parameters())
    LocalSteps(optimizer, every=3, group=mesh.get_group("replicas"), outer=NESTEROV)
    for step in range(6):
        learn(model, optimizer, step, hvd.rank() // shards)
    sharded: Any = list(model.parameters())
    found = torch.cat([p.full_tensor().detach().flatten() for p in sharded])
    assert_ranks_equal(found)
    close(found, alone(adamw, 3, 6, NESTEROV, size=2))


@pytest.mark.skipif(SIZE % 2 == 1, reason="needs two nodes of as many ranks: of two ranks, each is a node")
@pytest.mark.parametrize("compression", ["none", "qsgd:bits=4,min_size=0"])
def test_data_parallel_within_a_node(compression: str) -> None:
    """Gradients are reduced in each step by DistributedDataParallel, and models averaged between the nodes."""
    ranks = SIZE // 2
    mesh = init_device_mesh("cpu", (2, ranks), mesh_dim_names=("between", "within"))
    model, node = make_model(), hvd.rank() // ranks
    whole = DistributedDataParallel(model, process_group=mesh.get_group("within"))
    optimizer = adamw(model.parameters())
    LocalSteps(optimizer, every=3, group=mesh.get_group("between"), outer=NESTEROV, compression=compression)
    for step in range(6):
        learn(whole, optimizer, step, node)
        of_all = everyone(flat(model))
        assert all(torch.equal(of_all[rank], of_all[rank // ranks * ranks]) for rank in range(SIZE)), "within a node"
        assert torch.equal(of_all[0], of_all[-1]) == (step in (2, 5))
    if compression == "none":
        close(flat(model), alone(adamw, 3, 6, NESTEROV, size=2))


def test_a_process_set_of_horovod() -> None:
    mine = flat(make_model())
    if EVEN.included():
        mine = Training("horovod", every=2, process_set=EVEN).run(4).weights
    found = everyone(mine)
    assert all(torch.equal(found[rank], found[0]) for rank in EVEN.ranks)


def refused(error: type[CompressionError], message: str, **options: Any) -> None:
    with pytest.raises(error, match=message):
        Training(**options)


def test_settings_that_are_not_allowed() -> None:
    refused(SpecError, "needs every=")
    refused(SpecError, "every=0 is not allowed", every=0)
    refused(SpecError, "such as every=12", every=10, fragments=4)
    refused(SpecError, "at most 4", every=10, fragments=2, delay=5)
    refused(SpecError, "mix=1.5 is not allowed", every=10, mix=1.5)
    refused(SpecError, "no option 'evry'", evry=10)
    refused(SpecError, "fragments=7 is not allowed: the optimizer has 6 parameters", every=7, fragments=7)
    refused(SpecError, "write outer=Outer", every=2, outer="nesterov")
    refused(SpecError, "hvd_compress.distributed", every=2, compression=hvd_compress.torch.Compression.fp16)
    refused(UnsupportedError, "preconditioned", every=2, compression="topk:ratio=0.1,preconditioned=on")
    with pytest.raises(SpecError, match="'diloco', 'streaming', 'sparseloco'"):
        Training("group", sgd, "dilocoo")
    refused(SpecError, "quorum=0 is not allowed", every=2, quorum=0)
    refused(SpecError, f"quorum=9 is not allowed: there are {SIZE} ranks", every=2, quorum=9)
    refused(SpecError, "patience=-1 is not allowed", every=2, quorum=1, patience=-1)
    refused(SpecError, "patience= is not allowed without quorum=", every=2, patience=60)
    refused(UnsupportedError, "hvd_compress.distributed.LocalSteps only", kind="horovod", every=2, quorum=1)
    with pytest.raises(SpecError, match="lr=0 is not allowed"):
        Outer(lr=0)


def test_ranks_with_other_settings_are_told() -> None:
    with pytest.raises(DisagreementError, match=r"settings: rank 0 has .*every=2.* rank 1 has .*every=3"):
        Training(every=2 + (hvd.rank() > 0))


def test_ranks_at_other_steps_are_told() -> None:
    job = Training(every=4).run(4)
    state = job.local.state_dict()
    next(iter(state["sessions"].values()))["steps"] += 4 * (hvd.rank() == 0)
    job.local.load_state_dict(state)
    with pytest.raises(DisagreementError, match="one is at 12, another at 8, in the same job"):
        job.run(4)
