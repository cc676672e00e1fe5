"""The commands say what they predict, and refuse what cannot be."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from hvd_compress.tools.cli import complete

RUNNER = CliRunner(env={"COLUMNS": "120", "NO_COLOR": "1"})
JOB = ("--params", "2M", "--ranks", "4", "--rate", "100mbit", "--compute", "100ms", "--side", "256")
QUICK = ("--size", "16384", "--turns", "1")


def run(*arguments: str) -> Any:
    return RUNNER.invoke(complete().app, ["plan", *arguments])


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
    said = " ".join(result.output.split())
    for sentence in found["said"]:
        assert sentence in said
    assert "Predicted: 2M parameters, 4 ranks, 100 Mbit/s, 100 ms of compute" in said
    assert result.output.startswith(found["assumed"][:60]) and found["outside"] == []
    best = min(found["predictions"][:2], key=lambda one: one["step"])["spec"]
    assert found["baseline"] == best and f"than {best}" in said
    assert max(map(len, result.output.splitlines())) <= 120


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


def test_a_method_that_cannot_be_used_with_so_many() -> None:
    result = run(*JOB, *QUICK, "--methods", "int8,topkc", "--ranks", "500")
    assert result.exit_code == 0, result.output
    assert "int8: int8:bits=8 cannot sum over 500 ranks" in result.output
    assert "topkc" in result.output


def test_backends_and_constants_matter() -> None:
    methods = ("--methods", "none")
    outputs = [
        run(*JOB, *QUICK, *methods, *more).output.split("Method")[1]
        for more in (
            (),
            ("--backend", "nccl"),
            ("--backend", "mpi"),
            ("--device", "gpu", "--constant", "memory=1e-9"),
            ("--constant", "byte=1e-6"),
            ("--constant", "overlap=0"),
        )
    ]
    assert len(set(outputs)) == 6


CLUSTER = ("--params", "350M", "--ranks", "64", "--rate", "25gbit", "--compute", "250ms", "--side", "256")


@pytest.mark.parametrize(
    ("more", "assumed", "outside"),
    [
        ((), "Assumed: CPUs, one thread for each rank", "with 64 ranks, a rate of 25 Gbit/s."),
        (
            ("--device", "gpu", "--ranks-per-host", "8"),
            "Assumed, NOT MEASURED: GPUs",
            "with GPUs, NCCL, 64 ranks, 8 ranks on each host, a rate of 25 Gbit/s.",
        ),
    ],
)
def test_a_cluster_that_nobody_has_measured_gets_no_verdict(more: tuple[str, ...], assumed: str, outside: str) -> None:
    result = run(*CLUSTER, *QUICK, "--methods", "topkc:ratio=0.01", *more)
    assert result.exit_code == 0, result.output
    said = " ".join(result.output.split())
    assert said.startswith(assumed)
    assert "No verdict: outside the validated range (CPUs with Gloo, 2 to 8 ranks" in said and outside in said
    assert "pays" not in said and "Take" not in said and "topkc:ratio=0.01" in said


def test_on_gpus_fp16_is_no_slower_than_none() -> None:
    """Its sums are in hardware, and each step takes a tenth of what processors with Gloo would take."""
    steps = {}
    for device in ("cpu", "gpu"):
        result = run(*CLUSTER, *QUICK, "--methods", "none", "--device", device)
        rows = [line.split() for line in result.output.splitlines()]
        steps[device] = {row[0]: float(row[1].replace(",", "")) for row in rows if row and row[0] in ("none", "fp16")}
    assert steps["cpu"]["fp16"] > steps["cpu"]["none"] > steps["gpu"]["none"] > steps["gpu"]["fp16"]
    assert steps["cpu"]["fp16"] > 10 * steps["gpu"]["fp16"]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (JOB[2:], "params is missing: say --params, as in --params 350M"),
        ((*JOB[:2], *JOB[4:]), "ranks is missing: say --ranks, as in --ranks 8"),
        ((*JOB, "--params", "2X"), "params='2X' is not allowed"),
        ((*JOB, "--rate", "fast"), "rate='fast' is not allowed"),
        ((*JOB, "--compute", "0ms"), "compute='0ms' is not allowed"),
        ((*JOB, "--latency", "-1ms"), "latency='-1ms' is not allowed"),
        ((*JOB, "--merge", "0"), "merge=0 is not allowed"),
        ((*JOB, "--ranks", "64", "--ranks-per-host", "7"), "ranks-per-host=7 is not allowed"),
        ((*JOB, "--backend", "nccl", "--device", "cpu"), "backend=nccl is not allowed with device=cpu"),
        ((*JOB, "--backend", "gloo", "--device", "gpu"), "backend=gloo is not allowed with device=gpu"),
        ((*JOB, "--constant", "memory=1e-9"), "constant memory is not allowed with device=cpu"),
        ((*JOB, "--methods", "topkk"), "unknown method 'topkk'"),
        ((*JOB, "--methods", "topk:ratio=2"), "ratio"),
        ((*JOB, "--constant", "speed=1"), "unknown constant 'speed'"),
        ((*JOB, "--rates", "nothing.json"), "rates='nothing.json' cannot be read"),
        ((*JOB, "--methods", "topk,dgc,sidco,qsgd,int8,thc,loco", "--plot", "a.png"), "a plot of 9 methods"),
        (("validate", "--measured", "nothing.json"), "measured='nothing.json' cannot be read"),
        (("validate", "--hosts", "1"), "hosts='1' is not allowed: hosts must be whole numbers of at least 2"),
        (("validate", "--constant", "hop=-1"), "hop='-1' is not allowed"),
        (("validate", "--rate", "fast"), "rate='fast' is not allowed"),
        (("validate", "--rate", "400gbit"), "rate='400gbit' is not allowed"),
        (("validate", "--measured", "m.json", "--rate", "1gbit"), "rate='1gbit' is not allowed with --measured"),
        (("validate", "--measured", "m.json", "--hosts", "2"), "hosts='2' is not allowed with --measured"),
    ],
)
def test_refusals(arguments: tuple[str, ...], message: str) -> None:
    result = run(*arguments)
    assert result.exit_code == 2, result.output
    assert message in " ".join(result.output.split())
