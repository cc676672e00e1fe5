"""The whole command on real ranks: what it finds is consistent, and an interrupted comparison goes on."""

from __future__ import annotations

import os
import re
import select
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from hvd_compress.tools.compare.report.captions import PICTURES
from hvd_compress.tools.compare.results import Comparison

pytestmark = pytest.mark.jobs

HERE = Path(__file__).parent
PARAMETERS = 32 * 64 + 64 + 64 * 10 + 10
TOPK = "topk:ratio=0.05,min_size=0"
TINY = ("--task", "tiny:build", "--methods", f"fp16,{TOPK}")

for_real = pytest.mark.needs("hosts")


def command(*arguments: str) -> list[str]:
    return [sys.executable, "-m", "hvd_compress", "compare", *arguments]


def compare(*arguments: str, status: int = 0, folder: Path = HERE) -> subprocess.CompletedProcess[str]:
    done = subprocess.run(command(*arguments), capture_output=True, text=True, cwd=folder)
    assert done.returncode == status, done.stdout + done.stderr
    return done


def read(folder: Path) -> Comparison:
    return Comparison.read(folder / "results.json")


def repeatable(found: Comparison) -> dict[str, Any]:
    """What does not depend on the clock."""
    return {
        f"{one.spec} {one.seed}": ([(p.step, p.metric) for p in one.curve], one.payload, one.steps, one.ranks_equal)
        for one in found.outcomes
    } | {"vnmse": found.vnmse, "target": found.target}


@pytest.mark.parametrize("other", ["auto", pytest.param(TOPK, marks=pytest.mark.long)])
def test_what_is_found_is_consistent_and_nothing_is_done_again(other: str, tmp_path: Path) -> None:
    specs = ["fp16", other]
    folder = tmp_path / "out"
    arguments = (*TINY[:-1], ",".join(specs), "--seeds", "1", "--target", "0.7", "--output", str(folder))
    first = compare(*arguments)
    found = read(folder)
    assert [(one.spec, one.seed) for one in found.outcomes] == [(spec, 0) for spec in ("none", *specs)]
    for one in found.outcomes:
        assert one.goal.parameters == PARAMETERS
        assert one.gradient_bytes == 4 * PARAMETERS
        assert one.steps == one.goal.steps == 40
        assert [point.step for point in one.curve] == list(range(0, 41, 4))
        assert [p.seconds for p in one.curve] == sorted(p.seconds for p in one.curve)
        assert one.curve[-1].seconds == one.seconds == pytest.approx(40 * one.step_seconds)
        assert one.ranks_equal and not one.diverged
        assert one.curve[-1].metric > 0.6 > one.curve[0].metric
    assert found.of("fp16")[0].payload == 2 * PARAMETERS
    assert len({one.curve[0].metric for one in found.outcomes}) == 1  # the same seed
    assert found.vnmse.keys() == {TOPK} & {other} and all(0 < error < 2 for error in found.vnmse.values())
    files = {path.name for path in folder.iterdir()}
    assert {"report.md", *(f"{picture.name}.png" for picture in PICTURES)} <= files

    again = compare(*arguments)
    assert (again.stdout, again.stderr) == (first.stdout, "")  # no training has ended
    assert read(folder).outcomes == found.outcomes


@pytest.mark.long
def test_learning_rates_are_tried_and_the_best_is_taken(tmp_path: Path) -> None:
    rates = ("--methods", "fp16", "--seeds", "2", "--lr", "0.0001,0.05")
    compare("--task", "tiny:build", *rates, "--output", str(tmp_path / "out"))
    found = read(tmp_path / "out")
    assert [(one.spec, one.lr, one.seed) for one in found.tried] == [("none", 0.0001, 0), ("fp16", 0.0001, 0)]
    assert [(one.lr, one.seed) for one in found.of("fp16")] == [(0.05, 0), (0.05, 1)]
    assert found.of("fp16")[0].curve != found.of("fp16")[1].curve


@pytest.mark.long
def test_the_budget_ends_a_training_and_one_rank_is_compressed_too(tmp_path: Path) -> None:
    few = ("--seeds", "1", "--ranks", "1", "--budget", "0.0001s")
    compare(*TINY, *few, "--output", str(tmp_path / "out"))
    (one,) = read(tmp_path / "out").of(TOPK)
    assert one.steps == 4 < one.goal.steps
    assert 0 < one.payload < 2 * PARAMETERS


@pytest.mark.long
def test_a_training_that_diverges_ends(tmp_path: Path) -> None:
    arguments = ("--task", "tiny:explode", "--methods", "fp16", "--seeds", "1", "--output", str(tmp_path / "out"))
    compare(*arguments)
    for one in read(tmp_path / "out").outcomes:
        assert one.diverged and one.steps < one.goal.steps


@pytest.mark.long
def test_a_method_that_fails_does_not_stop_the_others(tmp_path: Path) -> None:
    methods = ("--methods", "dgc:min_size=0,fp16")
    arguments = ("--task", "tiny:break_off", *methods, "--seeds", "1", "--output", str(tmp_path / "out"))
    done = compare(*arguments, status=1)
    found = read(tmp_path / "out")
    assert {one.spec for one in found.outcomes} == {"none", "fp16"}
    assert {one.spec for one in found.failures} == {"dgc:min_size=0"}
    assert "momentum" in found.failures[0].message and "momentum" in done.stderr


@pytest.mark.long
def test_the_task_of_the_documentation(tmp_path: Path) -> None:
    text = (HERE.parents[1] / "docs" / "comparing.md").read_text()
    (block,) = re.findall(r"```python\n(.*?)```", text, re.DOTALL)
    (tmp_path / "mine.py").write_text(block)
    (line,) = re.findall(r"`hvd-compress compare (--task mine.py:build .*?)`", text)
    compare(*line.split(), "--seeds", "1", folder=tmp_path)
    found = read(tmp_path / "compare-mine-py-build")
    assert [one.curve[-1].metric > found.target == 0.9 for one in found.outcomes] == [True, True, True]


@for_real
@pytest.mark.long
@pytest.mark.parametrize("kind", [signal.SIGINT, signal.SIGKILL])
def test_interrupted_and_resumed_it_ends_as_if_it_had_not_been(tmp_path: Path, kind: signal.Signals) -> None:
    folder, pipe = tmp_path / "out", tmp_path / "pipe"
    os.mkfifo(pipe)
    few = ("--set", "epochs=40", "--set", f"tell={pipe}", "--hosts", "2", "--rate", "1gbit", "--seeds", "1")
    arguments = (*TINY, *few, "--output", str(folder))
    with subprocess.Popen(command(*arguments), cwd=HERE, stderr=subprocess.PIPE, text=True) as job:
        assert job.stderr is not None
        while "none" not in (line := job.stderr.readline()):
            assert line, "the first training has not ended"
        with pipe.open() as told:  # only now: this waits for the second
            workers = [os.pidfd_open(int(told.readline()))]
            job.send_signal(kind)
            job.stderr.read()
        select.select(workers, [], [])  # until it is gone
    left = remains(job.pid)
    assert [path.name for path in (folder / "runs").glob("*.json")] == ["none-seed=0.json"]
    if kind == signal.SIGINT:
        assert (job.returncode, left) == (130, [])
        return
    assert left  # nobody could remove the hosts
    kept = (folder / "runs" / "none-seed=0.json").read_text()
    done = compare(*arguments)
    assert not remains(job.pid) and not [*folder.rglob("*.part")]
    assert (folder / "runs" / "none-seed=0.json").read_text() == kept
    assert "none" not in done.stderr  # it was not done again
    compare(*arguments[:-1], str(tmp_path / "whole"))
    assert repeatable(read(folder)) == repeatable(read(tmp_path / "whole"))


def remains(pid: int) -> list[str]:
    """The hosts that a process has made."""
    found = [Path(folder).glob(f"hvd-compress-{pid}-*") for folder in ("/run/netns", "/etc/netns")]
    return [str(path) for paths in found for path in paths]
