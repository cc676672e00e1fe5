"""What users change while training: frozen and new parameters, new optimizers, steps that are given up."""

from __future__ import annotations

import gc
from typing import Any

import horovod.torch as hvd
import pytest
import torch
from parallel.pytorch.leaks import LARGE, left_by
from parallel.pytorch.training import Job, assert_ranks_equal, everyone, leaves_of, make_model
from torch import Tensor, nn

from hvd_compress.errors import UnsupportedError
from hvd_compress.torch import Compression


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


@pytest.mark.parametrize("spec", ["topk:ratio=0.05,start=2"])
def test_a_new_optimizer_goes_on_where_the_old_one_ended(spec: str) -> None:
    whole, first = Job(spec, momentum=0).run(6), Job(spec, momentum=0).run(3)
    second = again(first).run(range(3, 6))
    assert torch.equal(second.weights, whole.weights)
    assert len(list(second.compression._reducers)) == 1


def test_deleted_models_leave_nothing_behind() -> None:
    """Neither in Horovod nor in the compressor."""
    compression = Compression.parse("topk:ratio=0.01")

    def cycle(compression: Any = hvd.Compression.none) -> Tensor:
        model = nn.Linear(LARGE, LARGE)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        optimizer = hvd.DistributedOptimizer(optimizer, model.named_parameters(), compression=compression)
        for _ in range(2):
            optimizer.zero_grad()
            model(torch.ones(2, LARGE)).sum().backward()
            optimizer.step()
        return model.weight

    left_by(cycle)
    assert left_by(lambda: cycle(compression)).little
    assert compression.state_dict()["sessions"] == {}


def test_a_new_optimizer_beside_the_old_one_is_refused() -> None:
    """Horovod's own message would say that a name is in use."""
    old = Job("topk").run(1)
    message = refused(Job(old.compression, old.model))
    assert "two distributed optimizers" in message and "call gc.collect()" in message
    old.optimizer.synchronize()


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
        ("powersgd:rank=2", {}, "in backward"),
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
