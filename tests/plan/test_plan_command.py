"""The commands say what they predict, and refuse what cannot be."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from hvd_compress.tools.cli import complete
from hvd_compress.tools.plan.rates import Rate, Rates

RUNNER = CliRunner(env={"COLUMNS": "120", "NO_COLOR": "1"})
JOB = ("--params", "2M", "--ranks", "4", "--rate", "100mbit", "--compute", "100ms", "--side", "256")
QUICK = ("--size", "16384", "--turns", "1")


def run(*arguments: str) -> Any:
    return RUNNER.invoke(complete().app, ["plan", *arguments])


@pytest.mark.slow
def test_a_plan_with_rates_of_this_machine(tmp_path: Path) -> None:
    written, drawn = tmp_path / "plan.json", tmp_path / "plan.png"
    methods = ("--methods", "topk:ratio=0.01,values=fp16,powersgd:rank=2,int8")
    result = run(*JOB, *QUICK, *methods, "--json", str(written), "--plot", str(drawn))
    assert result.exit_code == 0, result.output
    found = json.loads(written.read_text())
    specs = ["none", "fp16", "topk:ratio=0.01,values=fp16", "powersgd:rank=2", "int8"]
    assert [one["spec"] for one in found["predictions"]] == specs
    assert list(found["rates"]["methods"]) == specs[2:]
    assert (found["setup"]["params"], found["setup"]["rate"]) == (2_000_000, 1e8)
    for one in found["predictions"]:
        parts = [one[part] for part in ("compute", "encode", "decode", "exchange")]
        assert one["step"] == pytest.approx(sum(parts) - one["hidden"])
    int8 = next(curve for curve in found["over_ranks"] if curve["spec"] == "int8")
    assert int8["gains"][-1] is None, "it ends at 127 ranks"
    assert drawn.read_bytes().startswith(b"\x89PNG")
    assert found["outside"] == []
    best = min(found["predictions"][:2], key=lambda one: one["step"])["spec"]
    assert found["baseline"] == best


def test_a_plan_with_rates_from_files_is_always_the_same(tmp_path: Path) -> None:
    paths = []
    for ranks in (2, 8):
        lines = [{"spec": "qsgd", "encode_ms": 4.0, "encode": 2.0, "decode_ms": 1.0 + ranks}]
        facts = {"settings": {"size": 1_000_000, "ranks": ranks}, "results": lines}
        paths.append(tmp_path / f"{ranks}.json")
        paths[-1].write_text(json.dumps(facts))
    files = ("--rates", str(paths[0]), "--rates", str(paths[1]))
    options = ("--methods", "qsgd", *files, "--vectors", "0", "--constant", "coding=1.5")
    result = run(*JOB, *options, "--json", str(tmp_path / "plan.json"))
    assert result.exit_code == 0, result.output
    qsgd = json.loads((tmp_path / "plan.json").read_text())["predictions"][-1]
    assert qsgd["encode"] == pytest.approx(1.5 * 2 * 0.004)
    assert qsgd["decode"] == pytest.approx(1.5 * 2 * (0.001 + 4 * 0.001 + 0.002))
    again = run(*JOB, *options)
    assert again.output == result.output


CLUSTER = ("--params", "350M", "--ranks", "64", "--rate", "25gbit", "--compute", "250ms", "--side", "256")


def test_a_cluster_that_nobody_has_measured_gets_no_verdict(tmp_path: Path) -> None:
    written = tmp_path / "plan.json"
    files = ("--rates", str(rates(tmp_path)), "--json", str(written))
    result = run(*CLUSTER, *files, "--methods", "topkc:ratio=0.01", "--device", "gpu", "--ranks-per-host", "8")
    assert result.exit_code == 0, result.output
    found = json.loads(written.read_text())
    assert found["outside"] == ["GPUs", "NCCL", "64 ranks", "8 ranks on each host", "a rate of 25 Gbit/s"]
    assert len(found["said"]) == 1 and found["said"][0].startswith("No verdict")


def rates(folder: Path) -> Path:
    """A file with rates of a method."""
    path = folder / "rates.json"
    path.write_text(json.dumps({"rates": Rates(1e-10, {"topkc:ratio=0.01": Rate(1e-9, 1e-9, 0.0)}).as_json()}))
    return path


def test_on_gpus_fp16_is_no_slower_than_none() -> None:
    """Its sums are in hardware, and each step takes a tenth of what processors with Gloo would take."""
    steps = {}
    for device in ("cpu", "gpu"):
        result = run(*CLUSTER, *QUICK, "--methods", "none", "--device", device)
        rows = [line.split() for line in result.output.splitlines()]
        steps[device] = {row[0]: float(row[1].replace(",", "")) for row in rows if row and row[0] in ("none", "fp16")}
    assert steps["cpu"]["fp16"] > steps["cpu"]["none"] > steps["gpu"]["none"] > steps["gpu"]["fp16"]
    assert steps["cpu"]["fp16"] > 10 * steps["gpu"]["fp16"]
