"""The command: what it prints, what it writes, and how it refuses."""

from __future__ import annotations

import io
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from doctor.machines import HEALTHY, machine
from rich.console import Console
from typer.testing import CliRunner

from hvd_compress.methods import REGISTRY, methods
from hvd_compress.tools.bench import tables
from hvd_compress.tools.bench.catalogue import short
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
        for word in f"{line.collective} {line.unbiased} {short(line.paper)}".split():
            assert word in text, "a word is cut"


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
    every = json.loads(run("methods", "--json").stdout)
    assert [line["name"] for line in every] == list(REGISTRY)
    one = json.loads(run("methods", "topk", "--json").stdout)
    assert one == every[list(REGISTRY).index("topk")]
    assert one["hyper_parameters"]["ratio"] == 0.01
    assert one["rounds"] == 1 and one["bits"] == {str(size): bits for size, bits in cost("topk").bits.items()}


@pytest.mark.parametrize(
    ("args", "message"),
    [
        (("methods", "topkk"), "unknown method 'topkk' (did you mean 'topk'?)"),
        (("vnmse", "--specs", "topk:ratio=0.1,powersdg"), "unknown method 'powersdg' (did you mean 'powersgd'?)"),
        (("vnmse", "--specs", "topk:ratio=2"), "ratio=2.0 is not allowed"),
        (("vnmse", "--inputs", "gausian"), "unknown input 'gausian' (did you mean 'gaussian'?)"),
        (("docs", "--vnmse", "/nowhere/vnmse.json"), "cannot read the results in /nowhere/vnmse.json"),
    ],
)
def test_mistakes_are_told_in_one_line(args: tuple[str, ...], message: str) -> None:
    result = run(*args)
    assert result.exit_code == 2
    assert message in result.stderr and result.stderr.startswith("hvd-compress: ")
    assert len(result.stderr.splitlines()) == 1 and result.stdout == ""


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
    assert "install them with: pip install 'hvd-compress[bench]'" in result.stderr
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
