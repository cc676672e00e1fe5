"""Ranks that differ get the same error, whenever they find out; and can go on afterwards."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from engine.ranks import Compression, Job, everyone, make_model, rank, size
from torch import Tensor, nn

from hvd_compress.errors import CompressionError, DisagreementError, GradientError
from hvd_compress.torch import agreement

pytestmark = [pytest.mark.usefixtures("on_ranks"), pytest.mark.matched("names", "channels", "turns")]


def refused(job: Job, kind: type[CompressionError], loss: Callable[..., Tensor] | None = None) -> str:
    """The message of the error that the first step of a job ends in; the same on all ranks."""
    with pytest.raises(kind) as error:
        job.run(1, loss)
    message, *others = everyone(str(error.value))
    assert others == [message] * (size() - 1)
    return str(message)


def squares(model: nn.Module, *_: object) -> Tensor:
    """A loss with a gradient in each parameter, whatever the model."""
    return torch.stack([p.float().square().sum() for p in model.parameters()]).sum()


@pytest.mark.parametrize(
    ("specs", "message"),
    [
        (["topk:ratio=0.01", "topk:ratio=0.02"], "the method: rank 0 has 'topk', rank 1 has 'topk:ratio=0.02'"),
        (["topk", "powersgd"], "rank 0 has 'topk', rank 1 has 'powersgd'"),
        (["topk", "topk:feedback=off"], "rank 1 has 'topk:feedback=off'"),
        (["none", "qsgd"], "rank 0 has 'none', rank 1 has 'qsgd'"),
    ],
)
def test_other_compression_on_one_rank(specs: list[str], message: str) -> None:
    assert message in refused(Job(specs[rank() == 1]), DisagreementError)


def test_other_merge_on_one_rank() -> None:
    job = Job(Compression.topk(merge=1 + (rank() == 1)))
    assert "the merge: rank 0 has 1, rank 1 has 2" in refused(job, DisagreementError)


def model_of(kind: str) -> nn.Module:
    """A model that differs on one rank."""
    model = make_model()
    if kind == "order":
        names = ["b", "a"] if rank() == 1 else ["a", "b"]
        return nn.ModuleDict({name: nn.Linear(32, 32, bias=False) for name in names})
    if rank() == 1 and kind == "parameters":
        model[2] = nn.Linear(48, 64, bias=False)
    if rank() == 1 and kind == "shape":
        model[0], model[2] = nn.Linear(32, 40), nn.Linear(40, 64)
    if rank() == 1 and kind == "dtype":
        model[2].double()
    return model


@pytest.mark.parametrize(
    ("kind", "message"),
    [
        ("parameters", "rank 0 has '2.bias' with shape (64,)"),
        ("shape", "(48, 32)"),
        ("dtype", "(64, 48) and float64 at position 2"),
        ("order", "rank 1 has 'b.weight'"),
    ],
)
def test_another_model_on_one_rank(kind: str, message: str) -> None:
    assert message in refused(Job("topk", model_of(kind)), DisagreementError, squares)


def test_training_goes_on_after_a_refusal() -> None:
    refused(Job(["topk", "int8"][rank() == 1]), DisagreementError)
    Job("topk").run(2)


def test_a_rank_that_does_not_say_what_it_has_is_not_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    """One has ended before it could: the others are told what differs, if not how."""
    monkeypatch.setattr(agreement, "PATIENCE", 0.05)
    monkeypatch.setattr(agreement._Comparison, "_refuse", _silent(agreement._Comparison._refuse))
    with pytest.raises(DisagreementError, match=r"the ranks disagree on the method(:|.*on all ranks)") as error:
        Job(["topk", "int8"][rank() == 1]).run(1)
    assert ("rank 0 has" not in str(error.value)) == (rank() != 1)
    everyone("have been told")


def _silent(original: Callable[..., object]) -> Callable[..., object]:
    def refuse(self: agreement._Comparison, title: str) -> object:
        if rank() == 1:
            raise DisagreementError(f"the ranks disagree on the {title}: rank 0 has ended")
        return original(self, title)

    return refuse


def test_a_dtype_that_cannot_be_compressed() -> None:
    model = nn.ParameterDict({"w": nn.Parameter(torch.ones(40, 40, dtype=torch.complex64))})
    with pytest.raises(GradientError, match="the gradient of 'w' has dtype complex64"):
        Job("topk", model).run(1, lambda m, x, y: m["w"].abs().sum())
