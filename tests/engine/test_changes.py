"""What users change while training: frozen and new parameters, new optimizers, steps that are given up."""

from __future__ import annotations

import gc
import math
from typing import Any

import pytest
import torch
from engine.ranks import Compression, Compressor, Job, assert_ranks_equal, everyone, leaves_of, make_model, rank, size
from torch import Tensor, nn

from hvd_compress.errors import DisagreementError, ExchangeError, UnknownParameterError, UnsupportedError

pytestmark = pytest.mark.usefixtures("on_ranks")

FROZEN = "2.weight"


def kept(compression: Compressor) -> dict[int, Tensor]:
    """The residual of each parameter, by the parameter's id."""
    found = {}
    for reducer in compression._registry:
        for key in reducer.living() & reducer.places.keys():
            _, bucket, position = reducer.places[key]
            residual = bucket.read().get("residual")
            if residual is not None:
                found[key] = torch.from_numpy(residual)[bucket.spans[position]]
    return found


@pytest.mark.parametrize("spec", ["efsignsgd:twoway=on,block=64", "block8:block=64", "topk:ratio=0.05"])
def test_what_is_held_of_a_frozen_parameter_is_forgotten_as_a_whole(spec: str) -> None:
    """By its own rank and by the rank that serves it: nothing of it comes in a later step."""
    job = Job(f"{spec},min_size=0,vectors=on,every=4").run(2)
    frozen = job.model.get_parameter(FROZEN)
    frozen.requires_grad_(False)
    job.run(range(2, 3))
    frozen.requires_grad_(True).register_hook(torch.zeros_like)  # type: ignore[no-untyped-call]
    job.backward(3)
    job.optimizer.synchronize()  # a dense step, in which all comes that is held
    assert frozen.grad is not None and not frozen.grad.any()


@pytest.mark.matched("nodes")
@pytest.mark.parametrize("spec", ["efsignsgd:twoway=on,block=64", "block8:block=64"])
def test_nor_does_a_node_keep_what_it_serves_of_a_frozen_parameter(spec: str) -> None:
    test_what_is_held_of_a_frozen_parameter_is_forgotten_as_a_whole(f"{spec},hierarchical=on")


@pytest.mark.parametrize("spec", ["topk:ratio=0.05", "topk:ratio=0.05,feedback=ef21", "powersgd:rank=2"])
def test_a_frozen_parameter_is_one_whose_gradient_is_zero(spec: str) -> None:
    """And of which nothing is kept: neither in it nor in its neighbours is a trace of what was. Then it is trained."""
    frozen, twin = Job(spec).run(3), Job(spec).run(3)
    frozen.model.get_parameter(FROZEN).requires_grad_(False)
    place = twin.reducer.places[id(twin.model.get_parameter(FROZEN))]
    place.owner.forget([place.position])
    hook = twin.model.get_parameter(FROZEN).register_hook(torch.zeros_like)  # type: ignore[no-untyped-call]
    for job in (frozen, twin):
        job.run(range(3, 5))
    frozen.model.get_parameter(FROZEN).requires_grad_(True)
    hook.remove()
    for job in (frozen, twin):
        job.run(range(5, 7))
    assert torch.equal(frozen.weights, twin.weights)
    assert_ranks_equal(frozen.weights)


@pytest.mark.parametrize("spec", ["topk:ratio=0.05", "topk:ratio=0.05,feedback=ef21"])
def test_what_is_kept_of_a_frozen_parameter_goes_with_the_first_step_that_counts(spec: str) -> None:
    job = Job(spec).run(3)
    before = leaves_of(job.compression)
    job.model.get_parameter(FROZEN).requires_grad_(False)
    job.backward(3, lambda model, x, y: model(x).sum() * math.nan)
    job.optimizer.synchronize()
    job.optimizer.zero_grad()
    after = leaves_of(job.compression)
    assert after.keys() == before.keys() and all(torch.equal(after[path], before[path]) for path in before)
    job.run(range(4, 5))
    assert not all(torch.equal(leaf, before[path]) for path, leaf in leaves_of(job.compression).items())
    assert_ranks_equal(job.weights)


@pytest.mark.parametrize("spec", ["onebit", "efsignsgd", "topk:ratio=0.05", "int8:feedback=on"])
def test_nothing_leaks_into_a_frozen_parameter(spec: str) -> None:
    """Not even where a method has no code for zero."""
    job = Job(spec).run(2)
    parameter = job.model.get_parameter(FROZEN).requires_grad_(False)
    before = parameter.detach().clone()
    assert kept(job.compression)[id(parameter)].abs().max() > 0
    for step in range(2, 4):
        job.backward(step)
        job.optimizer.step()
        assert parameter.grad is not None and not parameter.grad.any()
        assert not kept(job.compression)[id(parameter)].any()
        job.optimizer.zero_grad()
    assert torch.equal(parameter.detach(), before)
    assert_ranks_equal(job.weights)


def half_frozen() -> nn.Sequential:
    """A model of which only the head is trained."""
    model = make_model()
    for name in ("0", "2"):
        model.get_submodule(name).requires_grad_(False)
    return model


def again(job: Job) -> Job:
    """A new optimizer over the same parameters, with the same compressor; the old one must go, with its hooks."""
    model, compression = job.model, job.compression
    job.optimizer.close()
    del job.optimizer
    return Job(compression, model)


@pytest.mark.parametrize("spec", ["topk:ratio=0.05,start=2", "powersgd:rank=2", "int8:feedback=on"])
def test_a_new_optimizer_goes_on_where_the_old_one_ended(spec: str) -> None:
    whole, first = Job(spec).run(6), Job(spec).run(3)
    second = again(first).run(range(3, 6))
    assert torch.equal(second.weights, whole.weights)
    assert len(list(second.compression._registry)) == 1


@pytest.mark.matched("names")  # with channels, all ranks connect anew at the same time
def test_a_new_optimizer_on_one_rank_alone_goes_on() -> None:
    job, calm = Job("topk:ratio=0.05"), Job("topk:ratio=0.05")
    for step in range(4):
        if step == 2 and rank() == 0:
            job = again(job)
        for one in (job, calm):
            one.run(range(step, step + 1))
    assert torch.equal(job.weights, calm.weights)


@pytest.mark.matched("names")  # no rank prepares a step early where the order counts
def test_a_first_step_that_one_rank_has_prepared_when_it_is_given_up() -> None:
    """As while it waits for another optimizer: the new optimizer begins at zero on all ranks, as does a saved state."""
    job, calm = Job("topk:ratio=0.05"), Job("topk:ratio=0.05").run(3)
    job.backward(7)
    while not (job.reducer._buckets.begun if rank() else job.reducer._coming):
        job.reducer.advance(None)
    job.optimizer.load_state_dict(job.optimizer.state_dict())
    job.optimizer.zero_grad()
    assert job.compression.state_dict()["sessions"] == {}
    assert torch.equal(again(job).run(3).weights, calm.weights)
    assert len(list(job.compression._registry)) == 1


def test_a_new_optimizer_beside_the_old_one_is_refused() -> None:
    old = Job("topk").run(1)
    old.backward(1)
    new = Job(old.compression, old.model)
    with pytest.raises(UnsupportedError, match="two distributed optimizers"):
        new.backward(1)
    old.optimizer.close()
    new.optimizer.close()
    old.optimizer.synchronize()


def test_a_new_optimizer_over_more_parameters_inherits_what_there_is() -> None:
    job = Job("topk:ratio=0.05,min_size=0", half_frozen()).run(3)
    head = job.model.get_parameter("4.weight")
    before = kept(job.compression)[id(head)]
    assert before.any()
    job.model.requires_grad_(True)
    both = again(job)
    both.backward(3)
    assert torch.equal(kept(both.compression)[id(head)], before)  # the step has not ended yet
    assert len(list(both.compression._registry)) == 1
    both.optimizer.step()
    both.optimizer.zero_grad()
    assert_ranks_equal(both.run(range(4, 6)).weights)


def test_a_new_optimizer_over_fewer_parameters_leaves_the_others() -> None:
    """What is not trained for a while is not lost: a third optimizer, over all again, has both parts."""
    job = Job("topk:ratio=0.05,min_size=0").run(3)
    inner, head = (job.model.get_parameter(name) for name in ("2.weight", "4.weight"))
    before = kept(job.compression)
    for name in ("0", "2"):
        job.model.get_submodule(name).requires_grad_(False)
    part = again(job).run(range(3, 5))
    between = kept(part.compression)
    assert torch.equal(between[id(inner)], before[id(inner)])
    assert not torch.equal(between[id(head)], before[id(head)])
    part.model.requires_grad_(True)
    third = again(part)
    third.backward(5)
    after = kept(third.compression)
    assert torch.equal(after[id(inner)], before[id(inner)]) and torch.equal(after[id(head)], between[id(head)])
    third.optimizer.step()
    assert len(list(third.compression._registry)) == 1
    assert_ranks_equal(third.weights)


def test_optimizers_over_other_parameters_leave_each_other_alone() -> None:
    """Two models with the same names, one compressor: as two models with a compressor each."""
    spec = "topk:ratio=0.05"
    compression = Compression.parse(spec)
    first, second = Job(compression), Job(compression, lr=0.05)
    alone = [Job(spec), Job(spec, lr=0.05)]
    for step in range(4):
        for job in (first, second, *alone):
            job.run(range(step, step + 1))
    assert torch.equal(first.weights, alone[0].weights)
    assert torch.equal(second.weights, alone[1].weights)


def test_names_do_not_depend_on_what_was_collected() -> None:
    """One rank has forgotten a model of the same names, the others have not: collectives still find each other."""
    compression = Compression.topk(ratio=0.05)
    first = Job(compression).run(1)
    first.optimizer.close()
    held = [first] if rank() else []
    del first
    gc.collect()
    second = Job(compression).run(2)
    labels = [reducer.label for reducer in compression._registry]
    assert labels[-1].endswith(".1") and len(labels) == 1 + len(held)
    assert_ranks_equal(second.weights)


class GivenUpError(Exception):
    """The user's own."""


def give_up(job: Job, step: int, when: str) -> None:
    """Begin a step and leave it, in the way in which a rollback does."""

    def fail(grad: Tensor) -> Tensor:
        raise GivenUpError

    hook = None
    if when == "in backward":
        hook = job.model.get_parameter("0.weight").register_hook(fail)  # type: ignore[no-untyped-call]
    try:
        job.backward(step)
        raise GivenUpError
    except GivenUpError:
        job.optimizer.load_state_dict(job.optimizer.state_dict())
        job.optimizer.zero_grad()
    if hook is not None:
        hook.remove()


@pytest.mark.parametrize(
    ("spec", "options", "when"),
    [
        ("topk:ratio=0.05", {}, "in backward"),
        ("qsgd:twoway=on", {}, "after backward"),
        ("powersgd:rank=2", {}, "in backward"),
        ("powersgd:rank=2", {"passes": 2}, "after backward"),
    ],
)
def test_a_step_that_was_given_up_leaves_no_trace(spec: str, options: dict[str, Any], when: str) -> None:
    given_up, calm = Job(spec, **options), Job(spec, **options)
    for step in range(4):
        if step in (1, 3):
            give_up(given_up, 77 + step, when)
        for job in (given_up, calm):
            job.run(range(step, step + 1))
    assert torch.equal(given_up.weights, calm.weights)
    for path, leaf in leaves_of(calm.compression).items():
        assert torch.equal(leaf, leaves_of(given_up.compression)[path]), path
    assert_ranks_equal(given_up.weights)


@pytest.mark.parametrize("spec", ["topk:ratio=0.05", "powersgd:rank=2", "randomk:ratio=0.05", "dgc:ratio=0.05", "qsgd"])
def test_discarded_steps_leave_no_trace(spec: str) -> None:
    skipping, calm = Job(spec), Job(spec)
    for step in [90, 0, 1, 91, 92, 2, 3]:
        for job in (skipping, calm) if step < 90 else (skipping,):
            job.optimizer.zero_grad()
            job.backward(step)
            job.optimizer.synchronize()
            if step < 90:
                with job.optimizer.skip_synchronize():
                    job.optimizer.step()
            else:
                job.compression.discard()
    assert torch.equal(skipping.weights, calm.weights)
    for path, leaf in leaves_of(calm.compression).items():
        assert torch.equal(leaf, leaves_of(skipping.compression)[path]), path


@pytest.mark.parametrize("spec", ["topk:ratio=0.05", "powersgd:rank=2"])
def test_discard_of_a_model_does_not_reach_another_one_with_the_same_compressor(spec: str) -> None:
    shared, calm = Compression.parse(spec, merge=2), Job(spec)
    used, other = Job(shared), Job(shared)
    for step in range(4):
        used.backward(step)
        other.backward(step + 50)
        other.optimizer.synchronize()
        if step % 2:
            shared.discard(other.model)  # while a step of the other one is running
            used.optimizer.step()
        else:
            used.optimizer.step()
            shared.discard(other.optimizer.local)
        used.optimizer.zero_grad()
        other.optimizer.zero_grad()
        calm.run(range(step, step + 1))
    assert torch.equal(used.weights, calm.weights)
    residuals = kept(shared)
    assert not any(residuals[id(p)].any() for p in other.model.parameters() if id(p) in residuals)
    with pytest.raises(UnsupportedError, match=r"all 2 models.*discard\(optimizer\)"):
        shared.discard()
    part = torch.optim.SGD(list(used.model.parameters())[:2])
    with pytest.raises(UnsupportedError, match="4 parameters that are reduced together with its own"):
        shared.discard(part)


def test_discard_before_the_reduction_is_refused() -> None:
    job = Job("topk:ratio=0.05").run(1)
    job.compression.discard()
    job.backward(1)
    with pytest.raises(UnsupportedError, match=r"optimizer.synchronize\(\) first"):
        job.compression.discard()
    job.optimizer.step()


def last() -> bool:
    """Whether this is the last rank."""
    return rank() == size() - 1


def told(job: Job, step: int) -> str:
    """The error of a step, the same on all ranks."""
    with pytest.raises(DisagreementError) as error:
        job.run(range(step, step + 1))
    words = everyone(str(error.value))
    assert words == words[:1] * size()
    return str(words[0])


def states(job: Job) -> list[dict[str, Any]]:
    """The states after each of three steps."""
    found = []
    for step in range(3):
        job.run(range(step, step + 1))
        found.append(job.compression.state_dict())
    return found


def test_ranks_that_go_on_from_other_steps_are_told() -> None:
    """One rank discards a step alone, restores another step than the others, or goes back alone."""
    job = Job("randomk:ratio=0.05").run(2)
    if last():
        job.compression.discard()
    assert "the restored state: rank 0 has 'step 2" in told(job, 2)

    saved = states(Job("randomk:ratio=0.05"))
    job = Job("randomk:ratio=0.05")
    job.compression.load_state_dict(saved[2 if last() else 1])
    assert "the restored state: rank 0 has 'step 2 of job" in told(job, 0)

    job = Job("randomk:ratio=0.05")
    saved = states(job)
    if last():
        job.compression.load_state_dict(saved[0])
    assert "'step 1 of job" in told(job, 3)


def test_all_ranks_go_back() -> None:
    job, straight = Job("randomk:ratio=0.05"), Job("randomk:ratio=0.05")
    saved = states(straight)
    job.model.load_state_dict(Job("randomk:ratio=0.05").run(1).model.state_dict())
    job.compression.load_state_dict(saved[0])
    job.run(range(1, 3))
    assert torch.equal(job.weights, straight.weights)


class Unused(nn.Module):
    """A large layer that is not used, before and after those that are."""

    def __init__(self) -> None:
        super().__init__()
        self.before, self.a, self.b = nn.Linear(100, 100), nn.Linear(32, 48), nn.Linear(48, 10)
        self.after = nn.Linear(100, 100)
        generator = torch.Generator().manual_seed(0)
        with torch.no_grad():
            for p in self.parameters():
                p.copy_(torch.randn(p.shape, generator=generator) / 10)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.b(torch.relu(self.a(x)))
        return out


def test_unused_parameters_keep_no_bucket_waiting() -> None:
    """In the second step all buckets of what is used are on their way when the backward pass ends."""
    job = Job(Compression.topk(ratio=0.05, merge=2), Unused()).run(1)
    job.backward(1)
    assert job.reducer.step is not None
    begun = [one.bucket.shapes for one in job.reducer.step.exchanges if one.begun]
    assert {shape for shapes in begun for shape in shapes} == {(48, 32), (48,), (10, 48), (10,)}
    job.optimizer.step()
    assert_ranks_equal(job.weights)


def test_a_parameter_that_is_used_later_is_exchanged() -> None:
    def both(model: Any, x: Tensor, y: Tensor) -> Tensor:
        return nn.functional.cross_entropy(model(x) + model.after(x.repeat(1, 4)[:, :100])[:, :10], y)

    job = Job("topk:ratio=1.0,min_size=0", Unused()).run(2)
    before = job.model.get_parameter("after.weight").detach().clone()
    job.run(range(2, 4), both)
    assert not torch.equal(job.model.get_parameter("after.weight"), before)
    assert_ranks_equal(job.weights)


def test_a_gradient_that_nobody_announced_or_that_comes_twice() -> None:
    job = Job("topk").run(1)
    late, parameter = nn.Parameter(torch.ones(2, 2)), next(job.model.parameters())
    with pytest.raises(UnknownParameterError, match="was added to the optimizer after"):
        job.reducer.add(id(late), torch.ones(2, 2))
    job.reducer.add(id(parameter), torch.ones_like(parameter))
    with pytest.raises(ExchangeError, match=r"the gradient of '0\.weight' came twice in one step"):
        job.reducer.add(id(parameter), torch.ones_like(parameter))
    job.reducer.abort()
