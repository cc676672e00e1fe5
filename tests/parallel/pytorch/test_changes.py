"""What users change while training: frozen and new parameters, new optimizers, steps that are given up."""

from __future__ import annotations

import gc
import math
from typing import Any

import horovod.torch as hvd
import pytest
import torch
from parallel.pytorch.training import Job, assert_ranks_equal, everyone, leaves_of, make_model
from torch import Tensor, nn

from hvd_compress.errors import UnsupportedError
from hvd_compress.torch import Compression, TorchCompressor

FROZEN = "2.weight"


def kept(compression: TorchCompressor) -> dict[int, Tensor]:
    """The residual of each parameter, by the parameter's id."""
    found = {}
    for reducer in compression._reducers:
        for key in reducer.living():
            if key in reducer.places:
                _, bucket, position = reducer.places[key]
                residual = bucket.read().get("residual")
                if residual is not None:
                    found[key] = torch.from_numpy(residual)[bucket.spans[position]]
    return found


def forget(job: Job, name: str) -> None:
    """Clear what is kept of a parameter."""
    for reducer in job.compression._reducers:
        place = reducer.places[id(job.model.get_parameter(name))]
        place.owner.forget([place.position])


@pytest.mark.parametrize("spec", ["topk:ratio=0.05", "topk:ratio=0.05,feedback=ef21", "powersgd:rank=2"])
def test_a_frozen_parameter_is_one_whose_gradient_is_zero(spec: str) -> None:
    """And of which nothing is kept: neither in it nor in its neighbours is a trace of what was. Then it is trained."""
    frozen, twin = Job(spec), Job(spec)
    for job in (frozen, twin):
        job.run(3)
    frozen.model.get_parameter(FROZEN).requires_grad_(False)
    forget(twin, FROZEN)
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
    with job.optimizer.skip_synchronize():
        job.optimizer.step()
    after = leaves_of(job.compression)
    assert after.keys() == before.keys() and all(torch.equal(after[path], before[path]) for path in before)
    job.run(range(4, 5))
    assert not all(torch.equal(leaf, before[path]) for path, leaf in leaves_of(job.compression).items())
    assert_ranks_equal(job.weights)


@pytest.mark.parametrize("spec", ["onebit", "efsignsgd", "topk:ratio=0.05", "int8:feedback=on"])
def test_nothing_leaks_into_a_frozen_parameter(spec: str) -> None:
    """Not even where a method has no code for zero."""
    job = Job(spec, momentum=0).run(2)
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


def refused(job: Job) -> str:
    """The message in which the next step ends, on all ranks."""
    with pytest.raises(UnsupportedError) as error:
        job.run(1)
    assert everyone(str(error.value)) == [str(error.value)] * hvd.size()
    return str(error.value)


def test_a_parameter_that_is_unfrozen_later_is_refused() -> None:
    """Stock Horovod never reduces it. The cure in the message is tested below."""
    job = Job("topk:ratio=0.05", half_frozen()).run(2)
    job.model.get_parameter("2.weight").requires_grad_(True)
    message = refused(job)
    assert "frozen or not there when hvd.DistributedOptimizer was made: '2.weight';" in message
    assert "make a new hvd.DistributedOptimizer with the same compression object" in message


def test_a_parameter_that_is_added_later_is_refused() -> None:
    job = Job("topk:ratio=0.05").run(1)
    job.optimizer.add_param_group({"params": [nn.Parameter(torch.ones(2))]})
    assert "'number 0 of parameter group 1'" in refused(job)


def again(job: Job) -> Job:
    """A new optimizer over the same parameters, with the same compressor; the old one must go, with its hooks."""
    model, compression = job.model, job.compression
    del job.optimizer
    gc.collect()
    return Job(compression, model, momentum=0)


@pytest.mark.parametrize("spec", ["topk:ratio=0.05,start=2", "powersgd:rank=2", "int8:feedback=on"])
def test_a_new_optimizer_goes_on_where_the_old_one_ended(spec: str) -> None:
    whole, first = Job(spec, momentum=0).run(6), Job(spec, momentum=0).run(3)
    second = again(first).run(range(3, 6))
    assert torch.equal(second.weights, whole.weights)
    assert len(list(second.compression._reducers)) == 1


def test_a_new_optimizer_beside_the_old_one_is_refused() -> None:
    """Horovod's own message would say that a name is in use."""
    old = Job("topk").run(1)
    message = refused(Job(old.compression, old.model))
    assert "two distributed optimizers" in message and "call gc.collect()" in message
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
    assert len(list(both.compression._reducers)) == 1
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
    assert len(list(third.compression._reducers)) == 1
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
        ("powersgd:rank=2", {}, "in backward"),
        ("powersgd:rank=2", {}, "after backward"),
        ("topk:ratio=0.05", {"groups": 2}, "after backward"),  # a group that is half full, Horovod itself cannot forget
        ("powersgd:rank=2", {"backward_passes_per_step": 2}, "after backward"),
    ],
)
def test_a_step_that_was_given_up_leaves_no_trace(spec: str, options: dict[str, Any], when: str) -> None:
    given_up, calm = Job(spec, **options), Job(spec, **options)
    for step in range(4):
        if step in (0, 2):
            give_up(given_up, 77 + step, when)
        for job in (given_up, calm):
            job.run(range(step, step + 1))
    assert torch.equal(given_up.weights, calm.weights)
    for path, leaf in leaves_of(calm.compression).items():
        assert torch.equal(leaf, leaves_of(given_up.compression)[path]), path
    assert_ranks_equal(given_up.weights)


def test_names_do_not_depend_on_what_was_collected() -> None:
    """One rank has forgotten a model of the same names, the others have not: collectives still find each other."""
    compression = Compression.topk(ratio=0.05)
    first = Job(compression).run(1)
    kept = [first] if hvd.rank() else []
    del first
    gc.collect()
    second = Job(compression).run(2)
    labels = [reducer.label for reducer in compression._reducers]
    assert labels[-1].endswith(".1") and len(labels) == 1 + len(kept)
    assert_ranks_equal(second.weights)
