"""Direct calls: ``hvd.allreduce`` and ``hvd.grouped_allreduce`` with a compressor."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import horovod.torch as hvd
import pytest
import torch
from horovod.torch import mpi_ops
from parallel.pytorch.training import EVEN, ODD, assert_ranks_equal, everyone, leaves_of
from torch import Tensor

from hvd_compress.engine import direct_calls
from hvd_compress.errors import CompressionError, DisagreementError, UnknownParameterError, UnsupportedError
from hvd_compress.torch import Compression, TorchCompressor

SPEC = "topk:ratio=0.1,min_size=0"

CALLS: dict[str, dict[str, Any]] = {
    "average": {},
    "sum": {"op": hvd.Sum},
    "the old argument": {"average": False},
    "scaled": {"op": hvd.Sum, "prescale_factor": 0.5, "postscale_factor": -3.0},
    "a process set": {"process_set": EVEN if hvd.rank() % 2 == 0 else ODD} if hvd.is_initialized() else {},
}


def tensor(step: int = 0, shape: tuple[int, ...] = (8, 12), dtype: torch.dtype = torch.float32) -> Tensor:
    """Another one for each rank and step, of numbers that can be summed in any order."""
    generator = torch.Generator().manual_seed(100 * step + hvd.rank())
    return torch.randint(-99, 99, shape, generator=generator).to(dtype)


@pytest.mark.parametrize(
    ("spec", "call", "dtype"),
    [
        *(("topk:ratio=1.0,min_size=0", call, torch.float32) for call in CALLS),
        ("topk:ratio=1.0,min_size=0", "average", torch.float16),
        ("powersgd:rank=64,min_gain=0,min_size=0", "scaled", torch.float64),
    ],
)
def test_without_loss_it_is_horovods_own(spec: str, call: str, dtype: torch.dtype) -> None:
    options = dict(CALLS[call])
    if call == "a process set":
        options["process_set"] = EVEN if hvd.rank() % 2 == 0 else ODD
    mine, before = tensor(dtype=dtype), tensor(dtype=dtype)
    expected = hvd.allreduce(mine, name="expected", **options)
    result = hvd.allreduce(mine, name="direct.x", compression=Compression.parse(spec), **options)
    torch.testing.assert_close(result, expected, rtol=1e-3 if dtype == torch.float16 else 1e-5, atol=1e-3)
    assert result.dtype == dtype and torch.equal(mine, before)


def test_a_group_is_as_its_tensors() -> None:
    """Also with the same tensor twice, and with one without elements."""
    tensors = [tensor(1), tensor(2, (3,)), tensor(3, (0, 2)), tensor(4, (), torch.float64)]
    tensors.append(tensors[0])
    compression = Compression.parse("topk:ratio=1.0,min_size=0,vectors=on")
    for _ in range(2):
        results = hvd.grouped_allreduce(tensors, name="direct.group", compression=compression)
        for mine, result in zip(tensors, results, strict=True):
            torch.testing.assert_close(result, hvd.allreduce(mine, name="mine"), rtol=1e-6, atol=1e-4)


def test_what_was_not_sent_comes_later() -> None:
    """Over all steps and ranks: what was given out, and what is kept, is what was put in."""
    compression = Compression.parse(SPEC)
    given = [hvd.allreduce(tensor(step), name="direct.late", op=hvd.Sum, compression=compression) for step in range(4)]
    put_in = hvd.allreduce(sum(tensor(step) for step in range(4)), op=hvd.Sum, name="put_in")
    (kept,) = (leaf for path, leaf in leaves_of(compression).items() if path.endswith("residual"))
    torch.testing.assert_close(
        sum(given) + hvd.allreduce(kept, op=hvd.Sum, name="kept").view(8, 12), put_in, rtol=0, atol=1e-3
    )
    assert kept.any() and not torch.equal(given[0], hvd.allreduce(tensor(0), op=hvd.Sum, name="first"))
    assert_ranks_equal(given[-1])


def test_each_name_and_shape_has_a_state_of_its_own() -> None:
    def results(compression: TorchCompressor, others: Callable[[], object]) -> list[Tensor]:
        found = []
        for step in range(3):
            found.append(hvd.allreduce(tensor(step), name="direct.a", compression=compression))
            others()
        return found

    shared, alone = Compression.parse(SPEC), Compression.parse(SPEC)

    def others() -> None:
        hvd.allreduce(tensor(7), name="direct.b", compression=shared)
        hvd.allreduce(tensor(8, (12, 8)), name="direct.a", compression=shared)
        hvd.allreduce(tensor(9, dtype=torch.float64), name="direct.a", compression=shared)
        hvd.grouped_allreduce([tensor(9), tensor(10)], name="direct.a", compression=shared)

    for a, b in zip(results(shared, others), results(alone, lambda: None), strict=True):
        assert torch.equal(a, b)
    assert len(shared.state_dict()["sessions"]) == 5


def test_names_without_end_are_told_once_and_the_oldest_dropped(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """As where they hold the number of the step: no name comes again, and what is kept for each is lost."""
    monkeypatch.setattr(direct_calls, "MANY", 3)
    monkeypatch.setattr(direct_calls, "MOST", 5)
    compression = Compression.parse(SPEC)
    for step in range(6):
        hvd.allreduce(tensor(step), name=f"direct.{step % 2}", compression=compression)
    assert not caplog.messages
    for step in range(6):
        hvd.allreduce(tensor(step), name=f"direct.step{step}", compression=compression)
        hvd.allreduce(tensor(step), name="direct.1", compression=compression)
    told = [message for message in caplog.messages if "one name per tensor" in message]
    assert len(told) == (hvd.rank() == 0) and len(compression.state_dict()["sessions"]) == 5
    (kept,) = (reducer for reducer in compression._reducers if reducer.steps > 1)
    assert kept.steps == 9


def test_a_compressor_made_in_each_step_is_told_once(caplog: pytest.LogCaptureFixture) -> None:
    """As in Horovod's examples: what is not sent is lost with the object."""
    for step in range(30):
        hvd.allreduce(tensor(step), name="direct.new", compression=Compression.parse(SPEC))
        again = Compression.parse(SPEC)
        for _ in range(2):
            hvd.allreduce(tensor(step), name="direct.again", compression=again)
    told = [message for message in caplog.messages if "make the object once" in message]
    assert len(told) == (hvd.rank() == 0) and all("hvd.allreduce(name='direct.new')" in one for one in told)


def test_saved_and_restored() -> None:
    whole, second = Compression.parse(SPEC), Compression.parse(SPEC)
    for step in range(2):
        hvd.allreduce(tensor(step), name="direct.saved", compression=whole)
    second.load_state_dict(whole.state_dict())
    a, b = (hvd.allreduce(tensor(2), name="direct.saved", compression=c) for c in (whole, second))
    assert torch.equal(a, b)


def test_a_call_that_failed_leaves_no_trace(monkeypatch: pytest.MonkeyPatch) -> None:
    disturbed, calm = Compression.parse(SPEC), Compression.parse(SPEC)
    for step in range(3):
        with monkeypatch.context() as patch, pytest.raises(RuntimeError, match="the network is gone"):
            patch.setattr(mpi_ops, "HorovodGroupedAllreduce", Broken)
            hvd.grouped_allreduce([tensor(50), tensor(51)], name="direct.broken", compression=disturbed)
        a, b = (
            hvd.grouped_allreduce([tensor(step), tensor(step + 9)], name="direct.broken", compression=c)
            for c in (disturbed, calm)
        )
        assert torch.equal(a[0], b[0]) and torch.equal(a[1], b[1])


class Broken:
    """Stands for Horovod's operation."""

    @staticmethod
    def apply(*_: Any) -> None:
        raise RuntimeError("the network is gone")


def refusal(kind: type[CompressionError], call: Callable[[TorchCompressor], object]) -> str:
    with pytest.raises(kind) as error:
        call(Compression.parse(SPEC))
    message = str(error.value)
    assert everyone(message) == [message] * hvd.size()
    return message


def test_without_a_name() -> None:
    for call in (
        lambda c: hvd.allreduce(tensor(), compression=c),
        lambda c: hvd.grouped_allreduce([tensor()], compression=c),
    ):
        assert "give name=, the same on all ranks" in refusal(UnknownParameterError, call)


@pytest.mark.parametrize("op", ["Adasum", "Max"])
def test_other_reductions(op: str) -> None:
    call = lambda c: hvd.allreduce(tensor(), name="x", op=getattr(hvd, op), compression=c)  # noqa: E731
    assert f"op=hvd.{op} is not supported with this compression" in refusal(UnsupportedError, call)


def test_what_would_be_differentiated() -> None:
    mine = tensor().requires_grad_(True)
    message = refusal(UnsupportedError, lambda c: hvd.allreduce(mine, name="direct.g", compression=c))
    assert "pass tensor.detach()" in message
    with torch.no_grad():
        assert hvd.allreduce(mine, name="direct.g", compression=Compression.parse(SPEC)).isfinite().all()


def test_a_generator_of_tensors() -> None:
    call = lambda c: hvd.grouped_allreduce((tensor(i) for i in range(2)), name="x", compression=c)  # noqa: E731
    assert "pass a list" in refusal(UnsupportedError, call)


def test_other_names_on_two_ranks() -> None:
    name = f"direct.{min(hvd.rank(), 1)}"
    message = refusal(DisagreementError, lambda c: hvd.allreduce(tensor(), name=name, compression=c))
    assert "rank 0 has 'direct.0'" in message and "rank 1 has 'direct.1'" in message


def test_other_places() -> None:
    message = refusal(UnknownParameterError, lambda c: c.compress(tensor()))
    assert "outside of hvd.DistributedOptimizer, hvd.allreduce" in message
