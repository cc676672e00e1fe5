"""The command: what it prints, what it writes, and how it refuses."""

from __future__ import annotations

import io
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from doctor.machines import HEALTHY, machine
from rich.console import Console
from typer.main import get_command
from typer.testing import CliRunner

from hvd_compress._version import __version__
from hvd_compress.methods import REGISTRY, methods
from hvd_compress.tools.bench import tables
from hvd_compress.tools.bench.catalogue import short, summary
from hvd_compress.tools.bench.traffic import cost
from hvd_compress.tools.cli import complete
from hvd_compress.tools.doctor import command
from hvd_compress.tools.doctor.facts import Facts
from hvd_compress.tools.doctor.trials import Trial
from hvd_compress.tools.terminal import split_specs

RUNNER = CliRunner(env={"COLUMNS": "100", "NO_COLOR": "1"})


def run(*args: str) -> Any:
    return RUNNER.invoke(complete().app, args)


def test_methods_are_listed() -> None:
    result = run("methods")
    assert result.exit_code == 0
    for line in methods():
        assert any(row.startswith(f"{line.name} ") for row in result.stdout.splitlines())


@pytest.mark.parametrize("width", [80, 120])
def test_the_list_fits_the_terminal(width: int) -> None:
    console = Console(width=width, file=io.StringIO(), record=True)
    console.print(tables.methods_table(methods()))
    text = console.export_text()
    assert max(map(len, text.splitlines())) <= width
    assert "…" not in text
    for line in methods():
        assert f"\n{line.name} " in text
        for word in summary(line.name).split():
            assert word in text, "a word is cut"
    assert len(text.splitlines()) <= 100


@pytest.mark.parametrize(
    ("paper", "expected"),
    [
        ("Strom, Scalable Distributed DNN Training, 2015", "Strom 2015"),
        ("Aji, Heafield, Sparse Communication, 2017", "Aji, Heafield 2017"),
        ("Vogels, Karimireddy, Jaggi, PowerSGD: Practical, 2019 (Random Block)", "Vogels et al. 2019"),
        ("Bernstein et al., signSGD with Majority Vote, 2019", "Bernstein et al. 2019"),
        ("Han et al., Beyond, 2024; Sun et al., Optimizing, 2019", "Han et al. 2024; Sun et al. 2019"),
        ("uncompressed synchronous SGD", "uncompressed synchronous SGD"),
    ],
)
def test_papers_are_shortened(paper: str, expected: str) -> None:
    assert short(paper) == expected


@pytest.mark.parametrize("name", REGISTRY)
def test_one_method_is_told_in_full(name: str) -> None:
    result = run("methods", name)
    assert result.exit_code == 0
    words = " ".join(result.stdout.split())
    assert words.startswith(name) and "Bits per coordinate that a rank sends" in words
    for key in methods()[list(REGISTRY).index(name)].hyper_parameters:
        assert key in words


def test_json() -> None:
    every = json.loads(run("methods", "--json", "-").stdout)
    assert [line["name"] for line in every] == list(REGISTRY)
    one = json.loads(run("methods", "topk", "--json", "-").stdout)
    assert one == every[list(REGISTRY).index("topk")]
    assert one["hyper_parameters"]["ratio"] == 0.01
    assert one["rounds"] == 1 and one["bits"] == {str(size): bits for size, bits in cost("topk").bits.items()}


PLAN = "plan --params 1M --ranks 4 --rate 1gbit --compute 10ms"

WRONG = {
    "nothing": "No such command 'nothing'",
    "methods topkk": "unknown method 'topkk' (did you mean 'topk'?)",
    "methods --nothing": "No such option: --nothing",
    "vnmse --specs topk:ratio=0.1,powersdg": "unknown method 'powersdg' (did you mean 'powersgd'?)",
    "vnmse --specs topk:ratio=2": "ratio=2.0 is not allowed",
    "vnmse --inputs gausian": "unknown input 'gausian' (did you mean 'gaussian'?)",
    "vnmse --size 0": "Invalid value for '--size'",
    "docs --output methods.md --vnmse /nowhere/vnmse.json": "cannot read the results in /nowhere/vnmse.json",
    "doctor --timeout 0": "Invalid value for '--timeout'",
    "doctor --timeout soon": "Invalid value for '--timeout'",
    "compare --task digit": "unknown task 'digit' (did you mean 'digits'?)",
    "compare --task nothing:build": "there is no module 'nothing'",
    "compare --methods topkk": "unknown method 'topkk'",
    "compare --methods topk,topk": "--methods has topk twice",
    "compare --rate 1gbit": "rate='1gbit' is not allowed without hosts",
    "compare --hosts 2 --rate fast": "rate='fast' is not allowed",
    "compare --hosts -1": "Invalid value for '--hosts'",
    "compare --hosts 2 --on h1:1": "on='h1:1' is not allowed with hosts=2",
    "compare --seeds 0": "Invalid value for '--seeds'",
    "compare --framework jax": "Invalid value for '--framework'",
    "compare --budget soon": "budget='soon' is not allowed",
    "compare --lr -1": "--lr '-1' is not allowed",
    "compare --merge 1,2": "--merge '1,2' is not allowed",
    "compare --set hidden": "--set 'hidden' is not allowed",
    "compare --output /dev/null/report": "cannot make /dev/null/report",
    "bench nothing": "No such command 'nothing'",
    "bench steps": "Missing argument 'SPEC...'",
    "bench steps topkk": "unknown method 'topkk'",
    "bench steps topk --ranks 0": "Invalid value for '--ranks'",
    "bench steps topk --ranks-per-host 2": "ranks_per_host=2 is not allowed without hosts",
    "bench steps topk --on h1": "on='h1' is not allowed: name each machine with its number of ranks",
    "compare --on h1:4,h2:4 --ranks 9": "ranks=9 is not allowed with on='h1:4,h2:4'",
    "bench steps topk --rate 1gbit": "rate='1gbit' is not allowed without hosts",
    "bench steps topk --hosts 2 --rate 1M": "rate='1M' is not allowed",
    "bench steps topk --model bert": "Invalid value for '--model'",
    "bench steps topk --merge most": "merge",
    "bench exchange topkk": "unknown method 'topkk'",
    "bench exchange topk --steps -1": "Invalid value for '--steps'",
    "bench exchange topk --rate 1gbit": "rate='1gbit' is not allowed without hosts",
    "bench kernels --size 1": "Invalid value for '--size'",
    "bench graph --turns 0": "Invalid value for '--turns'",
    "bench methods topkk": "unknown method 'topkk'",
    "bench methods topk --ranks 0": "Invalid value for '--ranks'",
    "plan": "params is missing",
    f"{PLAN} --rate 25GBps": "rate='25GBps' is not allowed",
    f"{PLAN} --rate 1M": "rate='1M' is not allowed: rate must be a number above 0 with kbit, mbit, gbit or tbit",
    f"{PLAN} --ranks -4": "ranks=-4 is not allowed",
    f"{PLAN} --methods topkk": "unknown method 'topkk'",
    f"{PLAN} --rates nothing.json": "rates='nothing.json' cannot be read",
    f"{PLAN} --framework ddp --backend mpi": "backend=mpi is not allowed with framework=ddp",
    "plan validate --hosts 1": "hosts='1' is not allowed",
    "plan validate --rate fast": "rate='fast' is not allowed",
    "plan validate --measured nothing.json": "measured='nothing.json' cannot be read",
}
"""Requests that are wrong, and a part of the line that says so."""

OUTPUTS = {
    "methods": ["--json"],
    "vnmse": ["--json", "--markdown"],
    "docs": ["--output"],
    "doctor": ["--json"],
    "compare": ["--json"],
    "bench steps topk": ["--json", "--plot"],
    "bench exchange topk": ["--json", "--plot"],
    "bench kernels": ["--json", "--plot"],
    "bench graph": ["--json", "--plot"],
    "bench methods topk": ["--json", "--plot"],
    PLAN: ["--json", "--plot"],
    "plan validate": ["--json", "--markdown"],
}
UNWRITABLE = {f"{command} {option} /dev/null/file": "/dev/null" for command in OUTPUTS for option in OUTPUTS[command]}


@pytest.mark.parametrize(("words", "message"), (WRONG | UNWRITABLE).items(), ids=[*WRONG, *UNWRITABLE])
def test_a_wrong_request_is_refused_in_one_line(
    words: str, message: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    result = run(*words.split())
    assert result.exit_code == 2, result.output
    assert message in result.stderr and result.stderr.startswith("hvd-compress: ")
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


def test_help_shows_defaults_in_full_at_80_columns() -> None:
    for path, found in commands(get_command(complete().app)).items():
        text = RUNNER.invoke(complete().app, [*path, "--help"], env={"COLUMNS": "80"}).stdout
        assert max(map(len, text.splitlines())) <= 80
        assert "\u2026" not in text
        assert text.count("[default:") == len(
            [one for one in found.params if one.default is not False and one.default not in (None, "")]
        )


def test_the_version() -> None:
    assert run("--version").stdout == f"hvd-compress {__version__}\n"


def test_json_alone_is_on_standard_output() -> None:
    result = run("vnmse", "--specs", "none", "--inputs", "gaussian", "--size", "64", "--json", "-")
    assert json.loads(result.stdout)["results"][0]["spec"] == "none"
    assert "gaussian" in result.stderr


def test_a_pipe_gets_plain_text_and_whole_cells() -> None:
    spec = "topk:ratio=0.01,values=fp16,min_size=100"
    variables = {name: value for name, value in os.environ.items() if name != "COLUMNS"}
    command = [sys.executable, "-m", "hvd_compress", "bench", "methods", spec, "--size", "1024", "--turns", "1"]
    done = subprocess.run(command, capture_output=True, text=True, env=variables, check=True)
    assert any(line.startswith(f"{spec} ") for line in done.stdout.splitlines())
    assert "vNMSE" in done.stdout and "\x1b" not in done.stdout


def test_vnmse_prints_and_writes(tmp_path: Path) -> None:
    files = tmp_path / "vnmse.json", tmp_path / "vnmse.md"
    specs = "none,topk:ratio=0.01,values=fp16,powersgd:rank=2,signsgd"
    args = ("--specs", specs, "--inputs", "gaussian,blocky", "--size", "2500", "--ranks", "2", "--steps", "1")
    result = run("vnmse", *args, "--json", str(files[0]), "--markdown", str(files[1]))
    assert result.exit_code == 0, result.stderr
    measured = json.loads(files[0].read_text())
    assert (measured["ranks"], measured["steps"], measured["sizes"]) == (2, 1, {"gaussian": 2500, "blocky": 2500})
    assert len(measured["results"]) == 4 * 2
    written = files[1].read_text()
    for spec in ("none", "topk:ratio=0.01,values=fp16", "powersgd:rank=2", "signsgd"):
        assert spec in result.stdout and f"| `{spec}` |" in written
    command = f"hvd-compress vnmse --specs '{specs}' --inputs gaussian,blocky --size 2500 --ranks 2 --steps 1"
    assert command in written


def test_specs_are_apart_by_commas() -> None:
    assert split_specs("int8, topk:ratio=0.1, values=fp16,qsgd:bits=2,none") == [
        "int8",
        "topk:ratio=0.1,values=fp16",
        "qsgd:bits=2",
        "none",
    ]
    assert split_specs("topk,ratio=0.1") == ["topk", "ratio=0.1"]


@pytest.mark.parametrize("package", ["rich", "typer"])
def test_a_missing_package_is_named_with_its_cure(package: str) -> None:
    code = f"import sys; sys.modules[{package!r}] = None; from hvd_compress.tools.cli import main; main()"
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert result.returncode == 1
    assert "pip install '.[bench]'" in result.stderr
    assert "Traceback" not in result.stderr


@pytest.mark.parametrize("package", ["torch", "sklearn"])
def test_digits_say_what_they_need(package: str, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in [name for name in sys.modules if name == package or name.startswith(f"{package}.")]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, package, None)
    monkeypatch.delitem(sys.modules, "hvd_compress.tools.bench.digits", raising=False)
    result = run("vnmse", "--specs", "none", "--inputs", "digits")
    assert result.exit_code == 1
    assert "'digits' needs PyTorch and scikit-learn" in result.stderr and "pip install" in result.stderr


def test_the_package_loads_neither_rich_nor_typer() -> None:
    code = "import sys, hvd_compress as hc, hvd_compress.tools.cli; hc.methods()"
    code += "; print({'rich', 'typer'} & set(sys.modules))"
    assert _output("-c", code).strip() == "set()"


def test_it_runs_as_a_module() -> None:
    text = _output("-m", "hvd_compress", "--help")
    assert "hvd-compress" in text and "methods" in text and "vnmse" in text and "doctor" in text


def doctor(monkeypatch: pytest.MonkeyPatch, facts: Facts, *args: str) -> Any:
    monkeypatch.setattr(command, "collect", lambda: facts)
    return run("doctor", *args)


def test_doctor_on_a_healthy_machine(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    result = doctor(monkeypatch, HEALTHY, "--json", str(tmp_path / "found.json"))
    assert result.exit_code == 0, result.output
    assert "Compression can work here, with PyTorch and TensorFlow. To try it out: hvd-compress doctor --run" in (
        " ".join(result.stdout.split())
    )
    found = json.loads((tmp_path / "found.json").read_text())
    assert found["works"] == ["torch", "tensorflow"] and found["facts"]["frameworks"][1]["keras"] == "2.15.0"
    assert {finding["status"] for finding in found["findings"]} == {"ok"} and found["trials"] == []


def test_doctor_names_faults_and_their_cures(monkeypatch: pytest.MonkeyPatch) -> None:
    result = doctor(monkeypatch, machine(horovod=None))
    assert result.exit_code == 1
    lines = result.stdout.splitlines()
    assert any(line.startswith("fault ") and "not installed" in line for line in lines)
    assert lines[-1] == "Compression cannot work here yet."
    [build] = [line for line in lines if "HOROVOD_WITH_PYTORCH=1" in line]
    assert build.startswith("    pip install") and build.endswith("./horovod-0.28.1"), "it cannot be copied"
    assert max(len(line) for line in lines if line != build) <= 100


@pytest.mark.parametrize(("works", "status"), [(True, 0), (False, 1)])
def test_doctor_believes_what_it_tried(works: bool, status: int, monkeypatch: pytest.MonkeyPatch) -> None:
    def attempt(_: Facts, framework: str, controller: str, timeout: float) -> Trial:
        return Trial(framework, controller, works and framework == "torch" and controller == "gloo", f"after {timeout}")

    monkeypatch.setattr(command, "attempt", attempt)
    result = doctor(monkeypatch, HEALTHY, "--run", "--timeout", "7")
    assert result.exit_code == status
    assert result.stdout.count("after 7.0") == 4
    last = "Compression works here, with PyTorch." if works else "Compression cannot work here yet."
    assert result.stdout.splitlines()[-1] == last


def _output(*args: str) -> str:
    return subprocess.run([sys.executable, *args], capture_output=True, text=True, check=True).stdout
