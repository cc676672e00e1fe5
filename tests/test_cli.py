"""The command: what it prints, what it writes, and how it refuses."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
from doctor.machines import HEALTHY, machine
from typer.main import get_command
from typer.testing import CliRunner

from hvd_compress._version import __version__
from hvd_compress.methods import REGISTRY
from hvd_compress.tools.bench.traffic import cost
from hvd_compress.tools.cli import complete
from hvd_compress.tools.doctor import command
from hvd_compress.tools.doctor.facts import Facts
from hvd_compress.tools.doctor.trials import Trial
from hvd_compress.tools.terminal import split_specs, writable

RUNNER = CliRunner(env={"COLUMNS": "100", "NO_COLOR": "1"})


def run(*args: str) -> Any:
    return RUNNER.invoke(complete().app, args)


def test_methods() -> None:
    result = run("methods")
    assert result.exit_code == 0
    rows = result.stdout.splitlines()
    for name in REGISTRY:
        assert any(row.startswith(f"{name} ") for row in rows), name
    every = json.loads(run("methods", "--json", "-").stdout)
    assert [line["name"] for line in every] == list(REGISTRY)
    one = json.loads(run("methods", "topk", "--json", "-").stdout)
    assert one == every[list(REGISTRY).index("topk")]
    assert one["hyper_parameters"]["ratio"] == 0.01
    assert one["rounds"] == 1 and one["bits"] == {str(size): bits for size, bits in cost("topk").bits.items()}


ADVISE = "advise --params 1M --nodes 4 --rate 1gbit --compute 10ms"

WRONG = {
    "nothing": "No such command 'nothing'",
    "methods topkk": "unknown method 'topkk' (did you mean 'topk'?)",
    "doctor --timeout soon": "Invalid value for '--timeout'",
    "compare --methods topk,topk": "--methods has topk twice",
    "compare --methods topk@often": "write the steps between two averages after the @, as topk@30",
    "compare --methods topkk@30": "unknown method 'topkk'",
    "compare --methods topk@30 --framework keras": "compare local steps in PyTorch",
    "compare --hosts 2 --on h1:1": "on='h1:1' is not allowed with hosts=2",
    "compare --hosts 2 --device cuda": "device='cuda' is not allowed with hosts=2",
    "compare --framework keras --device cuda": "device='cuda' is not allowed with framework='keras'",
    "bench steps topk --hosts 2 --rate 1M": "rate='1M' is not allowed",
    "bench exchange topkk": "unknown method 'topkk'",
    "bench methods topk --plot /dev/null/file": "/dev/null",
    f"{ADVISE} --nodes 0": "Invalid value for '--nodes'",
    f"{ADVISE} --ranks-per-node 0": "Invalid value for '--ranks-per-node'",
    f"{ADVISE} --framework ddp --backend mpi": "backend=mpi is not allowed with framework=ddp",
}
"""Requests that are wrong, and a part of the line that says so."""


def test_a_wrong_request_is_refused_in_one_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    for words, message in WRONG.items():
        result = run(*words.split())
        assert result.exit_code == 2, f"{words}: {result.output}"
        assert message in result.stderr and result.stderr.startswith("hvd-compress: "), result.stderr
        assert len(result.stderr.splitlines()) == 1 and result.stdout == ""
    assert list(tmp_path.iterdir()) == []


def commands(group: Any, path: tuple[str, ...] = ()) -> dict[tuple[str, ...], Any]:
    found = {path: group}
    for name, below in getattr(group, "commands", {}).items():
        found |= commands(below, (*path, name))
    return found


def test_every_command_with_results_writes_json() -> None:
    groups = {(), ("bench",)}
    for path, found in commands(get_command(complete().app)).items():
        if path not in groups and not found.hidden:
            [option] = [one for one in found.params if "--json" in one.opts]
            assert not option.is_flag and option.metavar == "FILE", path


def test_ranks_try_the_same_file(tmp_path: Path) -> None:
    path = tmp_path / "found.json"
    with ThreadPoolExecutor(4) as pool:
        assert set(pool.map(writable, [path] * 2000)) == {path}


def test_specs_are_apart_by_commas() -> None:
    assert split_specs("int8, topk:ratio=0.1, values=fp16,qsgd:bits=2,none") == [
        "int8",
        "topk:ratio=0.1,values=fp16",
        "qsgd:bits=2",
        "none",
    ]
    assert split_specs("topk,ratio=0.1") == ["topk", "ratio=0.1"]


@pytest.mark.slow
def test_in_a_pipe() -> None:
    """As a module, in a terminal of no width, it cuts no cell."""
    spec = "topk:ratio=0.01,values=fp16,min_size=100"
    variables = {name: value for name, value in os.environ.items() if name != "COLUMNS"}
    command = [sys.executable, "-m", "hvd_compress", "bench", "methods", spec, "--size", "1024", "--turns", "1"]
    done = subprocess.run(command, capture_output=True, text=True, env=variables, check=True)
    assert any(line.startswith(f"{spec} ") for line in done.stdout.splitlines())
    assert "vNMSE" in done.stdout and "\x1b" not in done.stdout


def test_the_version() -> None:
    assert run("--version").stdout == f"hvd-compress {__version__}\n"


def test_doctor_tells_what_works(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    written = tmp_path / "found.json"

    def doctor(facts: Facts, *args: str) -> tuple[int, Any]:
        monkeypatch.setattr(command, "collect", lambda: facts)
        result = run("doctor", *args, "--json", str(written))
        return result.exit_code, json.loads(written.read_text())

    status, found = doctor(HEALTHY)
    assert (status, found["works"], found["trials"]) == (0, ["torch", "tensorflow"], [])
    assert {finding["status"] for finding in found["findings"]} == {"ok"}
    status, found = doctor(machine(horovod=None))
    assert (status, found["works"]) == (1, [])
    for works in (True, False):  # what was tried counts

        def attempt(_: Facts, framework: str, controller: str, timeout: float, works: bool = works) -> Trial:
            return Trial(framework, controller, works and framework == "torch" and controller == "gloo", "")

        monkeypatch.setattr(command, "attempt", attempt)
        status, found = doctor(HEALTHY, "--run", "--timeout", "7")
        assert status == (not works) and len(found["trials"]) == 4
