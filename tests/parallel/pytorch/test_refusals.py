"""What cannot work says so, on all ranks, in the same words, and at once."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable

import horovod.torch as hvd
import pytest
import torch
from parallel.pytorch.training import EVEN, ODD, Job, everyone, make_model
from torch import nn

from hvd_compress.errors import (
    CompressionError,
    DisagreementError,
    SpecError,
    UnsupportedError,
)
from hvd_compress.torch import Compression


def refused(job: Job, kind: type[CompressionError], loss: Callable[..., torch.Tensor] | None = None) -> str:
    """The message of the error that the first step of a job ends in; the same on all ranks."""
    with pytest.raises(kind) as error:
        job.run(1, loss)
    message, *others = everyone(str(error.value))
    assert others == [message] * (hvd.size() - 1)
    return str(message)


def test_compressors_are_horovods() -> None:
    for compression in (Compression.none, Compression.fp16, Compression.topk(), Compression.parse("int8")):
        assert isinstance(compression, hvd.compression.Compressor)


@pytest.mark.parametrize(
    ("specs", "message"),
    [
        (["topk:ratio=0.01", "topk:ratio=0.02"], "the method: rank 0 has 'topk', rank 1 has 'topk:ratio=0.02'"),
        (["none", "topk"], "rank 0 has 'none', rank 1 has 'topk'"),
        (["topk", "none"], "rank 0 has 'topk', rank 1 has 'none'"),
        (["none", "fp16"], "rank 0 has 'none', rank 1 has 'fp16'"),
    ],
)
def test_other_compression_on_one_rank(specs: list[str], message: str) -> None:
    assert message in refused(Job(specs[hvd.rank() == 1]), DisagreementError)


EITHER_WAY = pytest.mark.parametrize("spec", ["topk", "none"])
"""Methods with a state, and those that would do without asking the other ranks."""


@EITHER_WAY
def test_other_parameters_on_one_rank(spec: str) -> None:
    model = make_model()
    if hvd.rank() == 1:
        model[2] = nn.Linear(48, 64, bias=False)
    # A name of its own: Horovod waits for the bias of that rank for ever, so it can take no other of this name.
    model = nn.Sequential(OrderedDict([(f"alone {spec}", model)]))
    message = refused(Job(spec, model), DisagreementError)
    assert f"rank 0 has 'alone {spec}.2.bias' with shape (64,)" in message
    assert f"rank 1 has 'alone {spec}.4.weight'" in message


@pytest.mark.parametrize("spec", ["dgc", "topk:momentum=0.5,feedback=off", "signum", "topk:delay=5"])
def test_momentum_twice(spec: str) -> None:
    """The optimizer of a job has a momentum of 0.9, which SGD and Horovod do not tell the method."""
    message = refused(Job(spec), UnsupportedError)
    assert f"the optimizer has a momentum of 0.9, which is not supported with {spec}" in message
    assert "switch it off in the optimizer" in message


def test_momentum_once() -> None:
    Job("dgc:momentum=0").run(1)
    Job("signum:beta=0").run(1)


def test_adam_beside_a_residual_is_warned_of(caplog: pytest.LogCaptureFixture) -> None:
    def run(beta: float) -> None:
        Job("efsignsgd", optimizer=lambda model: torch.optim.Adam(model.parameters(), betas=(beta, 0.99))).run(2)

    run(0.5)
    run(0.92)
    assert caplog.text.count("first beta") == caplog.text.count("first beta is 0.92") == (hvd.rank() == 0)


def test_adasum() -> None:
    message = refused(Job("topk", op=hvd.Adasum), UnsupportedError)
    assert "op=hvd.Adasum is not supported with this compression" in message and "use op=hvd.Average" in message


def test_elastic_jobs(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOROVOD_ELASTIC", "1")
    with pytest.raises(UnsupportedError, match=r"direct calls of hvd\.allreduce") as error:
        hvd.allreduce(torch.ones(3), name="elastic.x", compression=Compression.topk())
    assert everyone(str(error.value)) == [str(error.value)] * hvd.size()
    job = Job("topk", process_set=EVEN if hvd.rank() % 2 == 0 else ODD)
    assert "process sets are not supported with this compression in an elastic job" in refused(job, UnsupportedError)


@pytest.mark.parametrize("name", ["none", "fp16"])
@pytest.mark.parametrize("dtype", [torch.int64, torch.float16, torch.float64])
def test_direct_calls_are_as_horovods_own(name: str, dtype: torch.dtype) -> None:
    tensor = (torch.arange(5) + hvd.rank()).to(dtype)
    mine, theirs = (
        hvd.allreduce(tensor, op=hvd.Sum, name="direct", compression=getattr(catalogue, name))
        for catalogue in (Compression, hvd.Compression)
    )
    assert torch.equal(mine, theirs) and mine.dtype == theirs.dtype == dtype


def test_a_factory_that_was_not_called() -> None:
    with pytest.raises(SpecError, match=r"the parentheses are missing: pass Compression.topk\(\)"):
        Job(Compression.topk).run(1)


def test_too_many_passes() -> None:
    """Horovod has a message of its own for this; nothing of ours may come before it."""
    job = Job("topk").run(1)
    job.backward(1)
    with pytest.raises(AssertionError, match="backward_passes_per_step"):
        job.backward(2)
    with pytest.warns(UserWarning, match="gradients were changed between"):  # what was added to them is lost
        job.optimizer.synchronize()
