"""``compression.all_reduce``: for programs that reduce their gradients themselves."""

from __future__ import annotations

from typing import Any

import horovod.torch as hvd
import pytest
import torch
import torch.distributed as dist
from parallel.pytorch.training import EVEN, SIZE, assert_ranks_equal, batch, everyone, leaves_of, make_model
from torch import Tensor, nn

import hvd_compress.torch
from hvd_compress.distributed import Compression, FullState
from hvd_compress.engine import direct_calls
from hvd_compress.errors import CompressionError, DisagreementError, GradientError, SpecError, UnsupportedError

pytestmark = pytest.mark.usefixtures("process_group")

SPEC = "topk:ratio=0.1,min_size=0"
LOSSLESS = "topk:ratio=1.0,min_size=0,vectors=on"


def tensor(step: int = 0, shape: tuple[int, ...] = (8, 12), dtype: torch.dtype = torch.float32) -> Tensor:
    """Another one for each rank and step, of numbers that can be summed in any order."""
    generator = torch.Generator().manual_seed(100 * step + dist.get_rank())
    return torch.randint(-99, 99, shape, generator=generator).to(dtype)


def plain(given: Tensor, op: str = "sum", group: dist.ProcessGroup | None = None) -> Tensor:
    """The reduction of PyTorch."""
    total = given.clone()
    dist.all_reduce(total, group=group)
    return total / dist.get_world_size(group) if op == "mean" else total


@pytest.mark.parametrize("spec", ["none", LOSSLESS, "powersgd:rank=64,min_gain=0,min_size=0"])
@pytest.mark.parametrize("op", ["sum", "mean"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_without_loss_it_is_pytorchs_own(spec: str, op: str, dtype: torch.dtype) -> None:
    mine, other = tensor(dtype=dtype), tensor(1, dtype=dtype).t()
    expected = [plain(mine, op), plain(other.contiguous(), op)]
    compression = Compression.parse(spec)
    for _ in range(2):
        found = [mine.clone(), other.clone()]
        compression.all_reduce(found, "both", op=op)
        torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-3)
    alone = mine.clone()
    compression.all_reduce(alone, "alone", op=op)
    torch.testing.assert_close(alone, expected[0], rtol=1e-5, atol=1e-3)


def test_what_was_not_sent_comes_later() -> None:
    """Over all steps and ranks: what was given out, and what is kept, is what was put in."""
    compression, out = Compression.parse(SPEC), torch.zeros(8, 12)
    for step in range(4):
        given = tensor(step)
        compression.all_reduce(given, "late")
        assert_ranks_equal(given)
        out += given
    (kept,) = (leaf for path, leaf in leaves_of(compression).items() if path.endswith("residual"))
    assert kept.any()
    put_in = plain(torch.stack([tensor(step) for step in range(4)]).sum(0))
    torch.testing.assert_close(out + plain(kept).view(8, 12), put_in, rtol=0, atol=1e-3)
    assert compression.stats().steps == 4 and compression.stats().ratio > 4


@pytest.mark.parametrize("spec", ["topk:ratio=0.05,min_size=0", "powersgd:rank=2,min_size=0", "int8:min_size=0"])
def test_it_is_what_horovods_direct_calls_give(spec: str) -> None:
    ours, theirs = Compression.parse(spec), hvd_compress.torch.Compression.parse(spec)
    for step in range(3):
        given = [tensor(step), tensor(step + 50, (16, 6))]
        expected = hvd.grouped_allreduce(given, name="direct.same", op=hvd.Sum, compression=theirs)
        ours.all_reduce(given, "direct.same")
        torch.testing.assert_close(given, expected, rtol=1e-6, atol=1e-4)


def test_a_program_that_reduces_its_gradients_itself_trains_as_without() -> None:
    """As cleanrl does: a sum, which the program divides."""

    def trained(compression: Any) -> list[Tensor]:
        torch.manual_seed(0)
        model = make_model()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
        for step in range(4):
            x, y = batch(step)
            optimizer.zero_grad()
            nn.functional.cross_entropy(model(x), y).backward()  # type: ignore[no-untyped-call]
            grads = [p.grad for p in model.parameters() if p.grad is not None]
            if compression is not None:
                compression.all_reduce(grads, "model")
            for grad in grads:
                if compression is None:
                    dist.all_reduce(grad)
                grad /= SIZE
            optimizer.step()
        return [p.detach() for p in model.parameters()]

    torch.testing.assert_close(trained(Compression.parse(LOSSLESS)), trained(None), rtol=1e-4, atol=1e-5)


def test_each_name_shape_and_op_has_a_state_of_its_own() -> None:
    shared, alone = Compression.parse(SPEC), Compression.parse(SPEC)
    for step in range(3):
        a, b = tensor(step), tensor(step)
        shared.all_reduce(a, "a")
        alone.all_reduce(b, "a")
        assert torch.equal(a, b)
        shared.all_reduce(tensor(7), "b")
        shared.all_reduce(tensor(8, (12, 8)), "a")
        shared.all_reduce(tensor(9), "a", op="mean")
        shared.all_reduce([tensor(9), tensor(10)], "a")
    assert len(shared.state_dict()["sessions"]) == 5


def test_a_name_that_is_new_after_a_save_begins_at_zero() -> None:
    """Also if it comes first, while the state of the other name still waits."""
    saved, loaded = Compression.parse(SPEC), Compression.parse(SPEC)
    saved.all_reduce(tensor(), "old")
    loaded.load_state_dict(saved.state_dict())
    new, expected = tensor(1, (12, 8)), tensor(1, (12, 8))
    loaded.all_reduce(new, "new")
    Compression.parse(SPEC).all_reduce(expected, "new")
    assert torch.equal(new, expected)
    old, expected = tensor(2), tensor(2)
    loaded.all_reduce(old, "old")
    saved.all_reduce(expected, "old")
    assert torch.equal(old, expected)


def test_a_part_of_the_ranks() -> None:
    group = dist.new_group(EVEN.ranks)
    if dist.get_rank() in EVEN.ranks:
        mine = tensor()
        Compression.parse(LOSSLESS).all_reduce(mine, "part", op="mean", group=group)
        torch.testing.assert_close(mine, plain(tensor(), "mean", group))


def test_saved_and_restored() -> None:
    whole, second, third = (Compression.parse(SPEC) for _ in range(3))
    for step in range(2):
        whole.all_reduce(tensor(step), "saved")
    second.load_state_dict(whole.state_dict())
    FullState(third).load_state_dict(FullState(whole).state_dict())
    results = [tensor(2) for _ in range(3)]
    for compression, result in zip((whole, second, third), results, strict=True):
        compression.all_reduce(result, "saved")
    assert torch.equal(results[0], results[1]) and torch.equal(results[0], results[2])


def test_a_call_that_failed_leaves_no_trace() -> None:
    disturbed, calm = Compression.parse(SPEC), Compression.parse(SPEC)
    for step in range(3):
        results = [[tensor(step), tensor(step + 9)] for _ in range(2)]
        calm.all_reduce(results[0], "failing")
        disturbed.all_reduce(results[1], "failing")
        assert torch.equal(results[0][0], results[1][0]) and torch.equal(results[0][1], results[1][1])
        bad = [tensor(step), tensor(step + 9) * (torch.nan if dist.get_rank() == 0 else 1)]
        disturbed.all_reduce(bad, "failing")
        assert bad[1].isnan().all()


def test_names_without_end_and_compressors_made_anew_are_told(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(direct_calls, "MANY", 3)
    compression = Compression.parse(SPEC)
    for step in range(direct_calls.RENEWED):
        compression.all_reduce(tensor(step), f"step{step}")
        Compression.parse(SPEC).all_reduce(tensor(step), "new")
    told = "\n".join(caplog.messages)
    first = dist.get_rank() == 0
    assert ("direct calls of compression.all_reduce have used 3 names" in told) == first
    assert ("compression.all_reduce(name='new') was given 10 Compression objects" in told) == first


def refusal(kind: type[CompressionError], given: Tensor, name: str = "refused", **options: Any) -> str:
    with pytest.raises(kind) as error:
        Compression.parse(SPEC).all_reduce(given, name, **options)
    assert everyone(str(error.value)) == [str(error.value)] * SIZE
    return str(error.value)


def test_what_cannot_be_reduced_is_refused() -> None:
    assert "op='max' is not known" in refusal(SpecError, tensor(), op="max")
    assert "pass tensor.detach()" in refusal(UnsupportedError, tensor().requires_grad_())
    assert "torch.distributed.all_reduce" in refusal(UnsupportedError, torch.eye(3).to_sparse())
    assert "complex" in refusal(GradientError, tensor(dtype=torch.complex64))
    message = refusal(DisagreementError, tensor(), name=f"other.{min(dist.get_rank(), 1)}")
    assert "rank 0 has 'other.0'" in message and "rank 1 has 'other.1'" in message
