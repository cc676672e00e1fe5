"""The commands say what they predict, and refuse what cannot be."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from hvd_compress.engine.spec import auto
from hvd_compress.tools.advise.rates import Rate, Rates
from hvd_compress.tools.cli import complete

RUNNER = CliRunner(env={"COLUMNS": "120", "NO_COLOR": "1"})
JOB = ("--params", "2M", "--nodes", "4", "--rate", "100mbit", "--compute", "100ms", "--side", "256")
QUICK = ("--size", "16384", "--turns", "1")


def run(*arguments: str) -> Any:
    return RUNNER.invoke(complete().app, ["advise", *arguments])


@pytest.mark.slow
def test_advice_with_rates_of_this_machine(tmp_path: Path) -> None:
    written, drawn = tmp_path / "advice.json", tmp_path / "advice.png"
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


def test_advice_with_rates_from_files_is_always_the_same(tmp_path: Path) -> None:
    paths = []
    for ranks in (2, 8):
        lines = [{"spec": "qsgd", "encode_ms": 4.0, "encode": 2.0, "decode_ms": 1.0 + ranks}]
        facts = {"settings": {"size": 1_000_000, "ranks": ranks}, "results": lines}
        paths.append(tmp_path / f"{ranks}.json")
        paths[-1].write_text(json.dumps(facts))
    files = ("--rates", str(paths[0]), "--rates", str(paths[1]))
    options = ("--methods", "qsgd", *files, "--vectors", "0", "--constant", "coding=1.5")
    result = run(*JOB, *options, "--json", str(tmp_path / "advice.json"))
    assert result.exit_code == 0, result.output
    qsgd = json.loads((tmp_path / "advice.json").read_text())["predictions"][-1]
    assert qsgd["encode"] == pytest.approx(1.5 * 2 * 0.004)
    assert qsgd["decode"] == pytest.approx(1.5 * 2 * (0.001 + 4 * 0.001 + 0.002))
    again = run(*JOB, *options)
    assert again.output == result.output


CLUSTER = (
    "--params",
    "350M",
    "--nodes",
    "8",
    "--ranks-per-node",
    "8",
    "--rate",
    "25gbit",
    "--compute",
    "250ms",
    "--side",
    "256",
)


def test_a_cluster_that_nobody_has_measured_gets_an_answer_with_a_warning(tmp_path: Path) -> None:
    written = tmp_path / "advice.json"
    files = ("--rates", str(rates(tmp_path)), "--json", str(written))
    result = run(*CLUSTER, *files, "--methods", "topkc:ratio=0.01", "--device", "a100")
    assert result.exit_code == 0, result.output
    found = json.loads(written.read_text())
    assert found["outside"] == ["GPUs", "NCCL", "64 ranks", "8 ranks on each node", "a rate of 25 Gbit/s"]
    assert found["said"][1].startswith("Modelled, not measured") and "GPUs, NCCL, 64 ranks" in found["said"][1]
    assert found["said"][-1] == f"Take Compression.parse({found['chosen']!r})."
    assert "does not consider accuracy" in found["said"][2], "the user named the methods"


@pytest.mark.parametrize(("optimizer", "loss"), [("adamw", "none"), ("adamw", "small"), ("sgd", "none")])
def test_the_candidates_keep_the_loss_with_the_optimizer(optimizer: str, loss: str, tmp_path: Path) -> None:
    """They are those of ``auto``; only with AdamW, its updates may be compressed."""
    written = tmp_path / "advice.json"
    options = ("--device", "h100", "--optimizer", optimizer, "--loss", loss, "--json", str(written))
    result = run(*CLUSTER, *options)
    assert result.exit_code == 0, result.output
    found = {one["spec"] for one in json.loads(written.read_text())["predictions"]}
    candidates = auto(loss=loss).candidates
    kept = {one.spec for one in candidates if (one.with_adam if optimizer == "adamw" else one.with_sgd)}
    updates = {spec for spec in found if "preconditioned" in spec}
    assert found - updates - {"fp16"} == kept - {"fp16:feedback=on"}
    assert len(updates) == (2 if optimizer == "adamw" else 0), "one of them between nodes"
    between = {spec for spec in found if "hierarchical" in spec}
    assert len(between) == len(found - between - {"none", "fp16", "bf16"})


def test_without_nodes_of_several_ranks_nothing_is_hierarchical(tmp_path: Path) -> None:
    written = tmp_path / "advice.json"
    assert run(*JOB, "--json", str(written)).exit_code == 0
    assert not any("hierarchical" in one["spec"] for one in json.loads(written.read_text())["predictions"])


def test_a_model_of_the_user(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "its_model.py").write_text(
        "from torch import nn\ndef make():\n    return nn.Sequential(nn.Linear(300, 200), nn.Linear(200, 100))\n"
        "def number():\n    return 3\n"
    )
    monkeypatch.chdir(tmp_path)
    written = tmp_path / "advice.json"
    rest = ("--nodes", "4", "--rate", "100gbit", "--compute", "1ms", "--device", "h100", "--json", str(written))
    result = run("--model", "its_model.py:make", *rest)
    assert result.exit_code == 0, result.output
    setup = json.loads(written.read_text())["setup"]
    assert (setup["params"], setup["tensors"], setup["side"]) == (80_300, 4, 200)
    assert setup["vectors"] == pytest.approx(300 / 80_300)
    for name, message in {"number": "gives int; it must give", "maek": "did you mean 'make'"}.items():
        refused = run("--model", f"its_model.py:{name}", *rest)
        assert refused.exit_code == 2 and message in refused.stderr


def test_a_fast_network_and_a_long_step_need_no_method() -> None:
    result = run("--params", "10M", "--nodes", "2", "--rate", "400gbit", "--compute", "1s", "--device", "h100")
    assert "Nothing pays here; take fp16" in result.output
    assert "Take Compression.parse('fp16')." in result.output


def rates(folder: Path) -> Path:
    """A file with rates of a method."""
    path = folder / "rates.json"
    path.write_text(json.dumps({"rates": Rates(1e-10, {"topkc:ratio=0.01": Rate(1e-9, 1e-9, 0.0)}).as_json()}))
    return path


def test_on_gpus_fp16_is_no_slower_than_none() -> None:
    """Its sums are in hardware, and each step takes a tenth of what processors with Gloo would take."""
    steps = {}
    for device in ("cpu", "v100"):
        result = run(*CLUSTER, "--methods", "none", "--device", device)
        rows = [line.split() for line in result.output.splitlines()]
        steps[device] = {row[0]: float(row[1].replace(",", "")) for row in rows if row and row[0] in ("none", "fp16")}
    assert steps["cpu"]["none"] > steps["v100"]["none"] > steps["v100"]["fp16"]
    assert steps["cpu"]["fp16"] > 4 * steps["v100"]["fp16"]


def test_local_steps_where_the_network_is_slow() -> None:
    job = "--params", "10M", "--nodes", "4", "--rate", "10mbit", "--compute", "100ms", "--device", "h100"
    result = run(*job, "--methods", "qsgd,qsgd:bits=4@30")
    said = " ".join(result.output.split())
    assert "Take LocalSteps(optimizer, 'qsgd:bits=4@30')" in said and "this job has GPUs, NCCL" in said
    assert "local steps. This does not consider accuracy" in said
    refused = run(*job, "--methods", "powergossip@ring")
    assert refused.exit_code == 2 and "predicts no gossip" in refused.stderr
