"""The demo: its figures, what it refuses, and its jobs."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "examples"))

import demo
from demo import EMULATED, HERE, METHODS, DemoError, Result, Run

from hvd_compress.tools.bench.jobs import LaunchSpec

SECONDS = {
    "PyTorch": dict(zip(METHODS, (0.4, 0.2, 0.05, 0.025), strict=True)),
    "Keras": dict(zip(METHODS, (0.1, 0.3, 0.2, 0.04), strict=True)),
}
RESULTS = {
    Run(framework, spec): Result(0.98, 220, 1_000_000, 4.0, step, True)
    for framework, steps in SECONDS.items()
    for spec, step in steps.items()
}


def test_the_speed_up_is_over_the_better_of_none_and_fp16() -> None:
    """In Keras that is none here: a method between the two does not gain."""
    last = [row[-1] for row in demo.rows(RESULTS)]
    assert last == ["0.50x", "1.00x", "4.0x", "8.0x", "1.00x", "0.33x", "0.50x", "2.5x"]


def test_a_collapsed_accuracy_is_told() -> None:
    none, topk = Run("Keras", "none"), Run("Keras", "topk:ratio=0.01")
    like = RESULTS[none]
    for baseline, reached in ((0.99, 0.93), (0.92, 0.89)):
        with pytest.raises(DemoError, match=r"^Keras topk:ratio=0\.01"):
            demo.check({none: like._replace(accuracy=baseline), topk: like._replace(accuracy=reached)})
        demo.check({none: like._replace(accuracy=baseline), topk: like._replace(accuracy=baseline - 0.01)})


@pytest.mark.jobs
@pytest.mark.parametrize(
    "framework", [pytest.param(one, marks=[pytest.mark.long] * (one != "PyTorch")) for one in demo.FRAMEWORKS]
)
def test_digits(framework: str) -> None:
    """The demo's job: an example of its framework, here with 64 units."""
    runs_in(HERE, framework)


@pytest.mark.needs("hosts")
@pytest.mark.long
@pytest.mark.parametrize("framework", demo.FRAMEWORKS)
def test_digits_on_emulated_hosts(framework: str) -> None:
    runs_in(EMULATED, framework)
    assert demo.place() == (EMULATED, "")


def runs_in(place: LaunchSpec, framework: str) -> None:
    seen: list[int] = []
    found = demo.train(Run(framework, "fp16", ("--hidden", "64"), epochs=2), place, seen.append)
    assert found.ratio == 2 and found.bytes_per_step == 2 * (320 + 18_496 + 64 * 1025 + 650)
    assert found.accuracy > 0.3 and seen == sorted(seen) and seen[-1] == 2
