"""The whole command on real ranks: what it finds is consistent, and an interrupted comparison goes on."""

from __future__ import annotations

import json
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest

from hvd_compress.tools.compare.results import Comparison

pytestmark = pytest.mark.jobs

HERE = Path(__file__).parent
PARAMETERS = 32 * 64 + 64 + 64 * 10 + 10
TOPK = "topk:ratio=0.05,min_size=0"
METHODS = ["none", "fp16", TOPK]
TINY = ("--task", "tiny:build", "--methods", f"fp16,{TOPK}")
LONG = ("--set", "epochs=40")

for_real = pytest.mark.needs("hosts")


def command(*arguments: str) -> list[str]:
    return [sys.executable, "-m", "hvd_compress", "compare", *arguments]


def compare(*arguments: str, status: int = 0, folder: Path = HERE) -> subprocess.CompletedProcess[str]:
    done = subprocess.run(command(*arguments), capture_output=True, text=True, cwd=folder, timeout=600)
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


def test_what_is_found_is_consistent_and_nothing_is_done_again(tmp_path: Path) -> None:
    folder = tmp_path / "out"
    arguments = (*TINY, "--seeds", "1", "--target", "0.7", "--output", str(folder))
    first = compare(*arguments)
    found = read(folder)
    assert [(one.spec, one.seed) for one in found.outcomes] == [(spec, 0) for spec in METHODS]
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
    assert found.of("fp16")[0].curve[0].metric == found.of(TOPK)[0].curve[0].metric  # the same seed
    assert 0 < found.vnmse[TOPK] < 2 and "fp16" not in found.vnmse
    assert "The baseline, the better of none and fp16, is " in " ".join(first.stdout.split())
    assert "report.html" in first.stdout
    assert (folder / "report.html").exists() and list(folder.glob("*.png"))

    again = compare(*arguments)
    assert (again.stdout, again.stderr) == (first.stdout, "")  # no training has ended
    assert read(folder).outcomes == found.outcomes
    assert "epochs None and not 7" in compare(*arguments, "--epochs", "7", status=2).stderr


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
def test_a_training_that_diverges_says_so(tmp_path: Path) -> None:
    arguments = ("--task", "tiny:explode", "--methods", "fp16", "--seeds", "1", "--output", str(tmp_path / "out"))
    assert "fp16 diverged" in compare(*arguments).stdout
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
    (line,) = re.findall(r"`hvd-compress compare (--task mine:build .*?)`", text)
    compare(*line.split(), "--seeds", "1", folder=tmp_path)
    found = read(tmp_path / "compare-mine-build")
    assert [one.curve[-1].metric > found.target == 0.9 for one in found.outcomes] == [True, True, True]


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (("--methods", "topk,topk"), "topk twice"),
        (("--methods", "topkk"), "topkk"),
        (("--task", "digit"), "digits"),
        (("--budget", "soon"), "budget='soon' is not allowed"),
        (("--lr", "0.1,-1"), "--lr '0.1,-1' is not allowed"),
        (("--set", "hidden"), "--set 'hidden' is not allowed"),
        (("--set", "hidden=4"), "hidden"),
        (("--merge", "2,3"), "--merge '2,3' is not allowed"),
        (("--hosts", "2", "--rate", "fast"), "rate='fast' is not allowed"),
        (("--ranks", "2", "--rate", "fast"), "rate='fast' is not allowed"),
        (("--ranks", "2", "--rate", "1mbit"), "rate='1mbit' is not allowed without hosts"),
        (("--on", "h1:1,h2:1", "--rate", "1mbit"), "rate='1mbit' is not allowed without hosts"),
        (("--on", "h1:1,h2:1", "--hosts", "2"), "on='h1:1,h2:1' is not allowed with hosts=2"),
    ],
)
def test_bad_input_is_named_before_anything_is_done(tmp_path: Path, arguments: Sequence[str], said: str) -> None:
    done = compare(*arguments, "--output", str(tmp_path / "out"), status=2)
    assert said in done.stderr and done.stderr.count("\n") == 1
    assert not (tmp_path / "out").exists()


@for_real
@pytest.mark.long
@pytest.mark.parametrize("kind", [signal.SIGINT, signal.SIGKILL])
def test_interrupted_and_resumed_it_ends_as_if_it_had_not_been(tmp_path: Path, kind: signal.Signals) -> None:
    folder = tmp_path / "out"
    arguments = (*TINY, *LONG, "--hosts", "2", "--rate", "1gbit", "--seeds", "1", "--output", str(folder))
    job = subprocess.Popen(command(*arguments), cwd=HERE, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    wait_for(lambda: job.poll() is None and second_is_on_its_way(folder))
    job.send_signal(kind)
    _, said = job.communicate(timeout=60)
    wait_for(lambda: not workers(folder))
    left = remains(job.pid)
    assert [path.name for path in (folder / "runs").glob("*.json")] == ["none-seed=0.json"]
    if kind == signal.SIGINT:
        assert (job.returncode, left) == (130, [])
        assert "the same command goes on" in said
        return
    assert left  # nobody could remove the hosts
    kept = (folder / "runs" / "none-seed=0.json").read_text()
    done = compare(*arguments)
    assert not remains(job.pid) and not [*folder.rglob("*.part")]
    assert (folder / "runs" / "none-seed=0.json").read_text() == kept
    assert "none" not in done.stderr  # it was not done again
    compare(*arguments[:-1], str(tmp_path / "whole"))
    assert repeatable(read(folder)) == repeatable(read(tmp_path / "whole"))


def wait_for(condition: Callable[[], object], seconds: float = 300) -> None:
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, "nothing has come of it"
        time.sleep(0.02)


def second_is_on_its_way(folder: Path) -> bool:
    """Whether the second training has made steps."""
    log = folder / "runs" / "log.part"
    try:
        lines = log.read_text().split("\n")[:-1]
    except FileNotFoundError:
        return False
    steps = [json.loads(line).get("point", [0])[0] for line in lines]
    return (folder / "runs" / "none-seed=0.json").exists() and max(steps, default=0) > 0


def workers(folder: Path) -> list[str]:
    """The processes of a training."""
    found = subprocess.run(["pgrep", "-fa", "lab[.]torch_worker"], capture_output=True, text=True).stdout
    return [line for line in found.splitlines() if str(folder) in line]


def remains(pid: int) -> list[str]:
    """The hosts that a process has made."""
    found = [Path(folder).glob(f"hvd-compress-{pid}-*") for folder in ("/run/netns", "/etc/netns")]
    return [str(path) for paths in found for path in paths]
