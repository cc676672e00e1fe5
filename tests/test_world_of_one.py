"""A job with one process, whose model Lightning and Accelerate do not wrap: compression has nothing to do there."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

from hvd_compress.distributed import Compression, DistributedCompressor, FullState
from hvd_compress.errors import SpecError, UnsupportedError


@pytest.fixture(params=["no process group", "a group of one"])
def _job(request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> object:
    monkeypatch.delenv("WORLD_SIZE", raising=False)
    if request.param == "a group of one":
        dist.init_process_group("gloo", init_method=f"file://{tmp_path}/store", rank=0, world_size=1)
        request.addfinalizer(dist.destroy_process_group)
    return None


def trained(compression: DistributedCompressor | None) -> Tensor:
    torch.manual_seed(0)
    model = nn.Linear(64, 64)
    if compression is not None:
        assert compression.register(model, optimizer=torch.optim.AdamW(model.parameters())) is compression
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for _ in range(3):
        optimizer.zero_grad()
        model(torch.ones(2, 64)).square().mean().backward()
        optimizer.step()
    return model.weight.detach()


@pytest.mark.usefixtures("_job")
def test_it_trains_saves_and_resumes_as_without(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    compression, again = Compression.topk(ratio=0.01), Compression.topk(ratio=0.01)
    assert torch.equal(trained(compression), trained(None))
    assert ["nothing is compressed" in message for message in caplog.messages] == [True]
    assert compression.stats().steps == 0
    compression.save(tmp_path / "compression")
    again.load(tmp_path / "compression")
    FullState(again).load_state_dict(FullState(compression).state_dict())


@pytest.mark.usefixtures("_job")
def test_what_would_be_wrong_is_refused() -> None:
    model = nn.Linear(64, 64)
    with pytest.raises(SpecError, match="'mean', 'sum'"):
        Compression.topk(ratio=0.01).register(model, op="average")
    with pytest.raises(UnsupportedError, match="DistributedDataParallel first"):
        Compression.dgc(ratio=0.01).register(model)  # its momentum would be missing


def test_one_of_several_processes_is_not_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WORLD_SIZE", "2")
    with pytest.raises(UnsupportedError, match="DistributedDataParallel first"):
        Compression.topk(ratio=0.01).register(nn.Linear(64, 64))
