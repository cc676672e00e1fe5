"""The speed benches on real ranks: small jobs, whose figures only have to be consistent."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from launching import horovodrun
from typer.testing import CliRunner

from hvd_compress.tools.bench.distributed import command
from hvd_compress.tools.bench.distributed.results import results
from hvd_compress.tools.bench.distributed.task import ALONE, Entry, Task, run
from hvd_compress.tools.bench.jobs import LaunchSpec

pytestmark = pytest.mark.jobs

RUNNER = CliRunner(env={"COLUMNS": "160", "NO_COLOR": "1"})
NUMBERS = 500 * 64 * 32

for_real = pytest.mark.needs("hosts")


def bench(file: Path, *arguments: str) -> dict[str, dict[str, Any]]:
    result = RUNNER.invoke(command.bench, [*arguments, "--steps", "2", "--warmup", "1", "--json", str(file)])
    assert result.exit_code == 0, result.output
    return {one["label"]: one for one in json.loads(file.read_text())["results"]}


@pytest.mark.long
def test_the_worker() -> None:
    job = horovodrun(2, "mpi", Path(__file__).with_name("distributed_job.py"))
    assert job.stdout.count("all is well on rank") == 2


@for_real
@pytest.mark.long
def test_steps_on_hosts(tmp_path: Path) -> None:
    plot = tmp_path / "plot.png"
    where = ("--hosts", "2", "--rate", "1gbit", "--model", "many", "--plot", str(plot))
    found = bench(tmp_path / "r.json", "steps", "none", "qsgd", *where, "--merge", "2", "--against", "horovod")
    assert list(found) == [ALONE, "Horovod's none", "Horovod's fp16", "none", "qsgd merge=2"]
    assert found["none"]["payload"] == 4 * NUMBERS
    assert found["qsgd merge=2"]["payload"] < NUMBERS
    for one in list(found.values())[1:]:
        sent = {"Horovod's fp16": 2 * NUMBERS, "qsgd merge=2": found["qsgd merge=2"]["payload"]}
        least = sent.get(one["label"], 4 * NUMBERS)  # two ranks: an allreduce sends half of it twice
        assert least <= one["device"] < 1.5 * least + 200_000
        assert one["ms"] > 0
        assert one["floor"] >= 1000 * 8 * one["device"] / 10**9
    assert plot.exists()


@pytest.mark.long
def test_steps_of_two_drivers(tmp_path: Path) -> None:
    against = ("--framework", "ddp", "--against", "ddp", "--against", "horovod")
    specs = ("topk:ratio=0.01", "ctk:preconditioned=on")
    found = bench(tmp_path / "r.json", "steps", *specs, *against, "--ranks", "2", "--model", "many")
    own = ["DDP's none", "DDP's fp16", "DDP's PowerSGD, rank 4", "Horovod's none", "Horovod's fp16"]
    assert list(found) == [ALONE, *own, *(f"{spec} by {driver}" for spec in specs for driver in ("ddp", "horovod"))]
    assert all(one["ms"] > 0 for one in found.values())
    ddp, horovod = found["topk:ratio=0.01 by ddp"], found["topk:ratio=0.01 by horovod"]
    assert 0 < ddp["payload"] < horovod["payload"] < ddp["payload"] + 10 * 500  # a placeholder for each gradient


@for_real
@pytest.mark.long
def test_ddp_on_hosts_without_horovod(tmp_path: Path, without_horovod: None) -> None:
    where = ("--framework", "ddp", "--hosts", "2", "--ranks-per-host", "2", "--rate", "1gbit", "--model", "many")
    found = bench(tmp_path / "r.json", "steps", "qsgd:hierarchical=on", *where, "--against", "ddp")
    assert found["DDP's none"]["device"] > 2 * found["qsgd:hierarchical=on"]["device"] > 0


def test_horovod_that_is_missing_is_named_with_what_goes_without(without_horovod: None) -> None:
    result = RUNNER.invoke(command.bench, ["steps", "none"])
    assert result.exit_code == 1 and len(result.stderr.splitlines()) == 1
    assert "no Horovod here" in result.stderr and "--framework ddp" in result.stderr


@pytest.mark.long
def test_steps_of_a_sharded_model(tmp_path: Path, without_horovod: None) -> None:
    where = ("--framework", "fsdp", "--against", "fsdp", "--ranks", "2", "--model", "many")
    found = bench(tmp_path / "r.json", "steps", "qsgd:bits=8", *where)
    assert list(found) == [ALONE, "FSDP's none", "FSDP's bf16", "qsgd:bits=8"]
    assert all(one["ms"] > 0 for one in found.values())
    assert NUMBERS < found["qsgd:bits=8"]["payload"] < 1.02 * NUMBERS


@pytest.mark.long
def test_exchanges_here_with_a_profile(tmp_path: Path) -> None:
    where = ("--ranks", "2", "--controller", "mpi", "--shapes", "many", "--merge", "2", "--profile")
    found = bench(tmp_path / "r.json", "exchange", "efsignsgd", *where)
    assert list(found) == [ALONE, "efsignsgd merge=2"]
    one = found["efsignsgd merge=2"]
    assert one["device"] is None
    assert one["encode"] + one["decode"] <= one["python"] * 1.001
    called = {row["function"].split()[-1]: row["calls"] for row in one["profile"]}
    assert called["compress"] == called["decompress"] == 500


@pytest.mark.long
def test_keras() -> None:
    task = Task("steps", "small", [Entry(ALONE), Entry("none", "none")], 2, 1, 0, "")
    reports = run(task, "keras", LaunchSpec(0, "", 2, "mpi"), lambda done: None)
    _, none = results(task, reports, None)
    assert none.payload == 4 * (64 * 64 + 64)
    assert none.ms > 0
