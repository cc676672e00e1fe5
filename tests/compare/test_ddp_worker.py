"""The worker of DistributedDataParallel on real ranks: it trains as that of Horovod does."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from hvd_compress.errors import ClusterError, SpecError
from hvd_compress.tools.bench.jobs import Launcher, LaunchSpec, execute
from hvd_compress.tools.compare.command import read_methods
from hvd_compress.tools.compare.comparison import WORKERS
from hvd_compress.tools.compare.job import Job

pytestmark = pytest.mark.jobs


def run(worker: str, spec: str, folder: Path, ranks: int = 2, task: str = "tiny:build") -> dict[str, Any]:
    """The outcome of a training."""
    log = folder / f"{worker}-{spec[:4]}-{ranks}"
    launcher: Launcher = "torchrun" if worker == "ddp" else "gloo"
    log.touch()
    job = Job(task, spec, seed=3, log=str(log))
    execute(["-m", WORKERS[worker], job.to_json()], LaunchSpec(0, "unlimited", ranks, launcher), lambda: None, 200)
    found: dict[str, Any] = json.loads(log.read_text().splitlines()[-1])["outcome"]
    return found


@pytest.mark.long
@pytest.mark.parametrize("spec", ["none", "topk:ratio=0.05,min_size=0"])
def test_it_trains_as_with_horovod(spec: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(Path(__file__).parent)
    horovod, ddp = run("torch", spec, tmp_path), run("ddp", spec, tmp_path)
    assert [one[2] for one in ddp["curve"]] == pytest.approx([one[2] for one in horovod["curve"]], abs=0.01)
    assert ddp["ranks_equal"] and ddp["gradient_bytes"] == horovod["gradient_bytes"]
    assert 0 < ddp["payload"] <= horovod["payload"]


def test_local_steps_are_those_of_horovod(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Averaged every 5 steps, in a fifth of the bytes of `none`, and at the end."""
    monkeypatch.chdir(Path(__file__).parent)
    horovod, ddp = run("torch", "none@5", tmp_path), run("ddp", "none@5", tmp_path)
    assert [one[2] for one in ddp["curve"]] == pytest.approx([one[2] for one in horovod["curve"]], abs=0.01)
    assert ddp["ranks_equal"] and horovod["ranks_equal"]
    assert ddp["payload"] == pytest.approx(4 * ddp["goal"]["parameters"] / 5, rel=0.3)


def test_gossip(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """All ranks end with the mean of their models."""
    monkeypatch.chdir(Path(__file__).parent)
    found = run("ddp", "powergossip@ring", tmp_path)
    assert found["ranks_equal"] and 0 < found["payload"] < 4 * found["goal"]["parameters"] / 2
    with pytest.raises(SpecError, match="take --framework ddp"):
        read_methods("powergossip@ring", "torch")


@pytest.mark.long
def test_a_rank_alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, without_horovod: None) -> None:
    """And a schedule that stops it half-way."""
    monkeypatch.chdir(Path(__file__).parent)
    found = run("ddp", "topk:ratio=0.05", tmp_path, ranks=1, task="tiny:halt")
    assert not found["diverged"] and found["goal"]["lr"] == 0.05
    metrics = {step: metric for step, _, metric in found["curve"]}
    assert metrics[0] < metrics[20] == metrics[40]


def test_more_ranks_than_gpus(without_horovod: None) -> None:
    ranks = torch.cuda.device_count() + 1
    job, where = Job("digits", "none", device="cuda"), LaunchSpec(0, "unlimited", ranks, "torchrun", device="cuda")
    with pytest.raises(ClusterError, match=r"UnsupportedError: --device cuda needs a GPU for each rank, and PyTorch"):
        execute(["-m", WORKERS["ddp"], job.to_json()], where, lambda: None, 200)
