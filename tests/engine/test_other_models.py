"""A state that is loaded into another model: its parameters find theirs, or the program is told."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from engine.ranks import Compression, Compressor, Job, Optimizer, batch, everyone, make_model
from torch import Tensor, nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper

from hvd_compress.checkpoint.agreement import unwrapped
from hvd_compress.errors import StateError
from hvd_compress.torch.reducer import Reducer

pytestmark = [pytest.mark.usefixtures("on_ranks"), pytest.mark.matched("names")]

SPEC = "topk:ratio=0.02"


class Wrapped(nn.Module):
    """A module that keeps the model as wrappers of training do."""

    def __init__(self, module: nn.Module) -> None:
        super().__init__()
        self.module = module

    def forward(self, x: Tensor) -> Tensor:
        return self.module(x)  # type: ignore[no-any-return]


def checkpointed() -> nn.Module:
    return Wrapped(nn.Sequential(*map(checkpoint_wrapper, make_model())))


def residuals(model: nn.Module, reducer: Reducer) -> list[Tensor]:
    """The residuals of parameters, for those with one."""
    places = [reducer.places[id(p)] for p in model.parameters() if id(p) in reducer.places]
    found = [(place.owner.residual, place.owner.spans[place.position]) for place in places]
    return [residual[span] for residual, span in found if residual is not None]


def test_names_without_what_wrappers_add() -> None:
    compiled: Any = torch.compile(make_model())
    plain = [name for name, _ in make_model().named_parameters()]
    for model in (compiled, checkpointed(), Wrapped(compiled)):
        names = [name for name, _ in model.named_parameters()]
        assert names != plain and unwrapped(names) == plain
    assert unwrapped(["module.0.weight", "head.weight"]) == ["module.0.weight", "head.weight"]


@pytest.mark.parametrize("late", [False, True])
def test_a_job_goes_on_with_its_model_in_a_wrapper_or_without_it(late: bool) -> None:
    """Loaded before the first step, or after it."""
    whole = Job(SPEC).run(6)
    for first, second in ((make_model, checkpointed), (checkpointed, make_model)):
        before, job = Job(SPEC, first()).run(3), Job(SPEC, second())
        if late:
            job.run(1)
        job.compression.load_state_dict(before.compression.state_dict())
        for mine, theirs in zip(job.model.parameters(), before.model.parameters(), strict=True):
            mine.data.copy_(theirs)
        assert torch.equal(job.run(range(3, 6)).weights, whole.weights)


@pytest.mark.parametrize("spec", [SPEC, "powersgd:rank=2"])
def test_a_model_with_a_layer_more_keeps_the_residuals_of_the_others(
    spec: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Whose parameters are in other buckets then; the new ones begin at zero, which is said once."""
    before = Job(spec).run(3)
    before.compression.save(tmp_path)
    everyone("saved")
    job = Job(spec, make_model().append(nn.Linear(10, 400))).run(1)
    job.compression.load(tmp_path)
    kept, theirs = residuals(job.model, job.reducer), residuals(before.model, before.reducer)
    assert len(kept) > len(theirs) and any(one.any() for one in theirs)
    assert all(torch.equal(one, other) for one, other in zip(kept, theirs, strict=False))
    assert not any(one.any() for one in kept[len(theirs) :])
    assert [session["steps"] for session in job.compression.state_dict()["sessions"].values()] == [3]
    everyone("loaded")
    said = [message for message in caplog.messages if "nothing for 2 of 8 parameters" in message]
    assert len(said) == 1 and said[0].endswith("whose residuals begin at zero: '5.weight', '5.bias'")
    job.run(range(3, 5))


@pytest.mark.parametrize("late", [False, True])
def test_parameters_that_are_divided_among_optimizers_find_their_residuals(late: bool) -> None:
    before = Job(SPEC).run(3)
    compression: Compressor = Compression.parse(SPEC, merge=2)
    model = make_model()
    optimizers = [Optimizer(Named(model, *part), compression) for part in (["0."], ["2.", "4."])]

    def step() -> None:
        x, y = batch(9)
        nn.functional.cross_entropy(model(x), y).backward()  # type: ignore[no-untyped-call]
        for optimizer in optimizers:
            optimizer.step()

    if late:
        step()
    compression.load_state_dict(before.compression.state_dict())
    if late:
        kept = [one for optimizer in optimizers if optimizer._reducer for one in residuals(model, optimizer._reducer)]
        assert all(torch.equal(a, b) for a, b in zip(kept, residuals(before.model, before.reducer), strict=True))
    else:
        step()
    assert [one["steps"] - (not late) for one in compression.state_dict()["sessions"].values()] == [3, 3]


class Named(nn.Module):
    """The parameters of a model whose names begin so."""

    def __init__(self, model: nn.Module, *prefixes: str) -> None:
        super().__init__()
        self._chosen = [(name, p) for name, p in model.named_parameters() if name.startswith(prefixes)]

    def named_parameters(self, *_: Any, **__: Any) -> Any:
        return iter(self._chosen)

    def parameters(self, *_: Any, **__: Any) -> Any:
        return (p for _, p in self._chosen)


@pytest.mark.parametrize("late", [False, True])
@pytest.mark.parametrize("spec", [SPEC, "onebit:twoway=on"])
def test_a_state_without_an_owner_is_an_error_that_names_both(spec: str, late: bool) -> None:
    """In `load` if there is a model, or in its first step; a state that cannot be divided needs the same model."""
    state = Job(spec).run(2).compression.state_dict()
    other = nn.Sequential(nn.Linear(32, 10)) if spec == SPEC else make_model().append(nn.Linear(10, 10))
    job = Job(spec, other)
    if late:
        job.run(1)
    before = job.compression.state_dict()["sessions"]
    words = (
        r"the loaded state is of 6 parameters \('0.weight' \(48, 32\), '0.bias' \(48,\), .*\), but the model has .*"
        " resume with the model that was saved, give a model that is new a compression object of its own"
    )
    with pytest.raises(StateError, match=words):
        job.compression.load_state_dict(state)
        job.run(1)
    after = job.compression.state_dict()["sessions"]
    assert after.keys() == (before.keys() if late else state["sessions"].keys() | after.keys())


def test_a_layer_begins_to_learn_while_the_state_of_another_model_waits() -> None:
    """One compressor, two models, of which the second one begins last."""

    def jobs(compression: Compressor) -> tuple[Job, Job]:
        model, other = make_model(), nn.Sequential(nn.Linear(32, 10))
        model[0].requires_grad_(False)
        return Job(compression, model), Job(compression, other)

    first = Compression.parse(SPEC, merge=2)
    for job in jobs(first):
        job.run(3)
    compression = Compression.parse(SPEC, merge=2)
    compression.load_state_dict(first.state_dict())
    job, other = jobs(compression)
    job.run(1).optimizer.close()
    job.model.requires_grad_(True)
    Job(compression, job.model).run(2)
    other.run(1)
    assert sorted(one["steps"] for one in compression.state_dict()["sessions"].values()) == [4, 6]
