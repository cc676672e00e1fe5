"""The demo: its table and its bars, what it refuses, and its runs on emulated hosts."""

from __future__ import annotations

import io
import os
import sys
from pathlib import Path

import pytest
from rich.console import Console

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "examples"))

import demo
from demo import EMULATED, HERE, METHODS, DemoError, Result, Run

SECONDS = {
    "PyTorch": dict(zip(METHODS, (0.4, 0.2, 0.05, 0.025), strict=True)),
    "Keras": dict(zip(METHODS, (0.1, 0.3, 0.2, 0.04), strict=True)),
}
RESULTS = {
    Run(framework, spec): Result(0.98, 220, 1_000_000, 4.0, step, True)
    for framework, steps in SECONDS.items()
    for spec, step in steps.items()
}


def shown(width: int) -> list[str]:
    """The lines that a terminal or a file gets."""
    file = io.StringIO()
    demo.show(Console(file=file, width=width), RESULTS, HERE)
    return file.getvalue().splitlines()


def test_the_speed_up_is_over_the_better_of_none_and_fp16() -> None:
    """In Keras that is none here: a method between the two does not gain."""
    last = [row[-1] for row in demo.rows(RESULTS)]
    assert last == ["0.50x", "1.00x", "4.0x", "8.0x", "1.00x", "0.33x", "0.50x", "2.5x"]


def test_the_markdown_has_the_rows_of_the_table() -> None:
    head, rule, *lines = demo.markdown(RESULTS).splitlines()
    assert len(lines) == len(RESULTS) and head.count("|") == rule.count("|") == len(demo.COLUMNS) + 1
    for line, row in zip(lines, demo.rows(RESULTS), strict=True):
        assert [cell.strip() for cell in line.strip("|").split("|")] == list(row)


@pytest.mark.parametrize("width", [80, 200])
def test_nothing_is_cut_off_in_a_terminal_of_80_columns(width: int) -> None:
    lines = shown(width)
    assert all(len(line) <= width for line in lines)
    for row in demo.rows(RESULTS):
        assert any(line.split() == " ".join(row).split() for line in lines), row


def test_bars_are_as_long_as_steps_take() -> None:
    bars = [line.count("█") for line in shown(80) if "█" in line]
    assert max(bars) == bars[0] == demo.BAR
    steps = [step for framework in SECONDS.values() for step in framework.values()]
    for bar, step in zip(bars, steps, strict=True):
        assert abs(bar - demo.BAR * step / max(steps)) < 1


@pytest.mark.parametrize(("baseline", "reached"), [(0.99, 0.93), (0.92, 0.89)])
def test_a_collapsed_accuracy_is_told(baseline: float, reached: float) -> None:
    none, topk = Run("Keras", "none"), Run("Keras", "topk:ratio=0.01")
    like = RESULTS[none]
    with pytest.raises(DemoError, match=r"^Keras topk:ratio=0\.01: the accuracy has collapsed to"):
        demo.check({none: like._replace(accuracy=baseline), topk: like._replace(accuracy=reached)})
    demo.check({none: like._replace(accuracy=baseline), topk: like._replace(accuracy=baseline - 0.01)})


def test_without_hosts_it_trains_here_and_says_how_to_get_them(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "geteuid", lambda: 1000)
    where, obstacle = demo.place()
    assert where == HERE and "sudo" in obstacle and "\n" not in obstacle


@pytest.mark.jobs
def test_a_run_that_fails_is_named_with_its_error() -> None:
    with pytest.raises(DemoError, match=r"(?s)^PyTorch fp16: horovodrun ended with status .*--lr"):
        demo.train(Run("PyTorch", "fp16", ("--lr", "high")), HERE, lambda done: None)


@pytest.mark.jobs
@pytest.mark.needs("hosts")
@pytest.mark.parametrize("framework", demo.FRAMEWORKS)
def test_runs_on_emulated_hosts(framework: str) -> None:
    """With 64 units, so that it takes seconds: the model that the demo trains there has eight times as many."""
    seen: list[int] = []
    found = demo.train(Run(framework, "fp16", ("--hidden", "64"), epochs=2), EMULATED, seen.append)
    assert found.ratio == 2 and found.bytes_per_step == 2 * (320 + 18_496 + 64 * 1025 + 650)
    assert found.accuracy > 0.3 and seen == sorted(seen) and seen[-1] == 2
    assert demo.place() == (EMULATED, "")
