"""Run every command of the documents, on little data and for few steps."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from compare.files import write_images, write_text
from docs.documents import ROOT, Block, blocks
from docs.test_commands import MINE, ON_RANKS, STAND_INS, name_of, specs_of

SMALL = {
    ("bench", "exchange"): ["--steps", "1", "--warmup", "1"],
    ("bench", "methods"): ["--size", "4096"],
    ("bench", "steps"): ["--steps", "1", "--warmup", "1"],
    ("compare",): ["--seeds", "1", "--epochs", "1", "--budget", "3s", "--output", "results"],
    ("advise",): ["--size", "4096", "--turns", "1"],
}
"""Options that make a command short: the last value of an option counts."""


def run_command(words: list[str], folder: Path) -> None:
    """Run a command; a failure shows its output."""
    program = Path(sys.executable).with_name("hvd-compress")
    found = subprocess.run([program, *words], cwd=folder, capture_output=True, text=True, timeout=600)
    assert found.returncode == 0, found.stdout + found.stderr


def case(words: list[str]) -> Any:
    """Return a command with its marker."""
    return pytest.param(words, marks=[pytest.mark.needs("hosts")] if "--hosts" in words else [], id=" ".join(words))


@pytest.mark.parametrize("words", [case(one) for one in MINE if len(one) > len(name_of(one))])
def test_commands_run(words: list[str], tmp_path: Path) -> None:
    (tmp_path / "mine.py").write_text(own_task().text)
    asked = fewer([STAND_INS.get(word, word) for word in words])
    if "fashion" in words:
        asked += ["--data", str(write_images(tmp_path))]
    if "lm" in words:
        asked += ["--data", str(write_text(tmp_path / "text.txt"))]
    if "--hosts" in words:
        asked += ["--hosts", "2"]
    run_command([*asked, *SMALL.get(name_of(words), [])], tmp_path)


@pytest.mark.parametrize("words", ON_RANKS, ids=" ".join)
def test_commands_on_ranks_run(words: list[str], tmp_path: Path) -> None:
    launch = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    few = ["--params", "10K", "--compute", "0ms"]
    subprocess.run([*launch, "-m", "hvd_compress", *words, *few], cwd=tmp_path, check=True, timeout=300)


FEW_IMAGES = ["--images", "64", "--epochs", "1", "--bytes", "4000", "--seeds", "1"]


def test_the_study_of_boundaries_runs(tmp_path: Path) -> None:
    program, text = ROOT / "examples" / "pytorch" / "boundary_study.py", write_text(tmp_path / "text.txt")
    few = ["--data", str(write_images(tmp_path)), "--text", str(text), "--only", "minmax:bits=2", *FEW_IMAGES]
    command = [sys.executable, str(program), "study.json", *few]
    runs = [subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=True) for _ in range(2)]
    assert runs[0].stdout == runs[1].stdout and "| 2 bits |" in runs[0].stdout
    assert runs[1].stderr == ""  # the second run finds all results


@pytest.mark.needs("hosts")
def test_pipelines_on_emulated_hosts_run(tmp_path: Path) -> None:
    program, folder = ROOT / "examples" / "pytorch" / "pipeline_speed.py", write_images(tmp_path)
    few = ["--train", "64", "--test", "32", "--batch", "16", "--epochs", "1", "--width", "4", "--data", str(folder)]
    command: list[str | Path] = [
        sys.executable,
        program,
        "fp16/fp16",
        "topk:ratio=0.1/shared",
        "--hosts",
        "2",
        "--seeds",
        "1",
        *few,
    ]
    printed = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    assert "| topk:ratio=0.1 | shared |" in printed and "2 emulated hosts, 100mbit; 1 seeds." in printed


def fewer(words: list[str]) -> list[str]:
    """Return a command with only the last of its methods; most comparisons keep only the baseline."""
    specs = specs_of(words)
    if words[0] == "bench":
        return [word for word in words if word not in specs[:-1]]
    if words[0] == "compare":
        return [*words, "--methods", specs[-1] if "digits" in words else "fp16"]
    return words


def own_task() -> Block:
    """Return the custom task in the document on comparing."""
    (block,) = (block for block in blocks("python") if "def build(setting: Setting)" in block.text)
    return block
