"""On a cluster, the command measures: its ranks exchange gradients, and one of them answers."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from hvd_compress.tools.advise.models import NormalModel, squares

pytestmark = [pytest.mark.slow, pytest.mark.jobs]

MODEL = """
import torch
from torch import nn

def shapes():
    return nn.Linear(64, 64)

def trained():
    torch.manual_seed(0)
    x = torch.randn(8, 64)
    return nn.Linear(64, 64), lambda model: model(x).square().mean()

def number():
    return 3
"""


def torchrun(ranks: int, *arguments: str, folder: Path) -> Any:
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(ranks)]
    words = [*command, "-m", "hvd_compress", "advise", *arguments]
    return subprocess.run(words, cwd=folder, capture_output=True, text=True, timeout=300, check=False)


@pytest.mark.parametrize(
    "what",
    [("--params", "100K", "--compute", "2ms"), ("--model", "its.py:shapes"), ("--model", "its.py:trained")],
    ids=" ".join,
)
def test_ranks_compare_the_candidates(what: tuple[str, ...], tmp_path: Path) -> None:
    (tmp_path / "its.py").write_text(MODEL)
    methods = ("--methods", "qsgd:min_size=0,topk:ratio=0.1,min_size=0", "--json", "found.json")
    done = torchrun(2, *what, *methods, folder=tmp_path)
    assert done.returncode == 0, done.stderr
    found = json.loads((tmp_path / "found.json").read_text())
    specs = [one["spec"] for one in found["candidates"]]
    assert specs == ["none", "fp16:feedback=on", "qsgd:min_size=0", "topk:ratio=0.1,min_size=0"]
    assert found["ranks"] == 2 and found["chosen"] in [spec.replace(":feedback=on", "") for spec in specs]
    chosen = [one for one in found["candidates"] if one["verdict"] == "chosen"]
    assert len(chosen) == 1 and chosen[0]["times"]
    assert done.stdout.count("Measured: ") == done.stdout.count("Take ") == 1, "one rank answers"


@pytest.mark.parametrize(
    ("ranks", "arguments", "message"),
    [
        (1, ("--params", "10K"), "at least 2 ranks"),
        (2, ("--params", "10K", "--nodes", "4"), "--nodes is not allowed by torchrun"),
        (2, ("--params", "10K", "--framework", "horovod"), "--framework is not allowed by torchrun"),
        (2, ("--params", "10K", "--methods", "qsgd,none@30"), "none@30 is not allowed by torchrun"),
        (2, ("--model", "its.py:number"), "gives int; it must give a torch.nn.Module"),
    ],
)
def test_what_cannot_be_measured(ranks: int, arguments: tuple[str, ...], message: str, tmp_path: Path) -> None:
    (tmp_path / "its.py").write_text(MODEL)
    done = torchrun(ranks, *arguments, folder=tmp_path)
    assert done.returncode != 0 and message in done.stderr


def test_gradients_are_normal_numbers_and_differ_by_rank() -> None:
    shapes = squares(100 * 100 + 30, 100)
    assert shapes == [(100, 100), (1, 100)]
    models = [NormalModel(shapes, 0.0, rank) for rank in (0, 0, 1)]
    for model in models:
        model().backward()
    first, same, other = ([one.grad for one in model.parameters()] for model in models)
    assert first[0] is not None and other[0] is not None and same[0] is not None
    assert torch.equal(first[0], same[0]) and not torch.equal(first[0], other[0])
    assert first[0].std() == pytest.approx(0.003, rel=0.05)
