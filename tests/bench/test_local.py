"""The benches of one process measure what they say."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
from typer.testing import CliRunner

import kernel_speed
from hvd_compress.methods import REGISTRY
from hvd_compress.tools.bench.local import command, methods
from hvd_compress.tools.bench.local.timing import plain_copy, timed

ROOT = Path(__file__).resolve().parents[2]


@pytest.mark.slow
def test_every_kernel_is_timed_in_copies() -> None:
    lines = kernel_speed.measure(256, 1)
    for line in lines:
        assert line.ms > 0 and line.ratio > 0 and line.gb_per_s > 0
    assert [line.name for line in lines if line.faster] == ["exact top 1%"]


def test_a_function_is_timed_beside_a_copy() -> None:
    calls: list[int] = []
    found = timed(lambda: calls.append(1), plain_copy(1000), 3)
    assert len(calls) == 4
    assert found.ratio == found.seconds / found.copy


def test_bits_and_errors_are_those_of_the_method() -> None:
    exact, half, some = methods.measure(["none", "fp16", "topk:ratio=0.25"], 4096, 2, 2)
    assert (exact.bits, half.bits) == (32, 16)
    assert exact.vnmse < 1e-12 < half.vnmse < 1e-6 < 0.01 < some.vnmse < 1
    assert some.bits == 0.25 * (32 + 16)


@pytest.mark.slow
def test_methods_are_taken_apart() -> None:
    lines = methods.measure([*REGISTRY], 1024, 2, 1)
    assert [line.spec for line in lines] == [*REGISTRY]
    for line in lines:
        assert line.encode_ms > 0 and line.decode_ms > 0 and line.bits > 0 and np.isfinite(line.vnmse), line.spec


@pytest.mark.slow
def test_results_are_shown_and_written(tmp_path: Path) -> None:
    written, drawn = tmp_path / "results.json", tmp_path / "results.png"
    options = ["--size", "2048", "--turns", "1", "--json", str(written), "--plot", str(drawn)]
    result = CliRunner().invoke(command.bench, ["methods", *options, "topk:ratio=0.25"])
    assert result.exit_code == 0, result.output
    found = json.loads(written.read_text())
    assert found["settings"]["size"] == 2048 and found["machine"]["cores"] > 0
    assert [one["spec"] for one in found["results"]] == ["topk:ratio=0.25"]
    assert drawn.read_bytes().startswith(b"\x89PNG")
