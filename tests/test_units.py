"""What people write is read as they mean it, and refused where it cannot be."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import pytest

from hvd_compress.errors import SpecError
from hvd_compress.tools.units import read_count, read_rate, read_time, size, write_count, write_rate, write_time


@pytest.mark.parametrize(
    ("read", "given"),
    [
        (read_count, {"350M": 350_000_000, "1.2B": 1_200_000_000, "25557032": 25_557_032, "7k": 7000, " 3 m ": 3e6}),
        (read_rate, {"10gbit": 1e10, "400Gbit": 4e11, "2.5 gbit": 2.5e9, "100mbit": 1e8, "1tbit": 1e12}),
        (read_rate, {"25Gbps": 2.5e10, "1 Gbit": 1e9, "10 Gbit/s": 1e10, "unlimited": math.inf}),
        (read_time, {"250ms": 0.25, "0.25s": 0.25, "50us": 5e-5, "50µs": 5e-5}),
    ],
)
def test_what_is_read(read: Callable[[str, str], float], given: dict[str, float]) -> None:
    assert {text: read("x", text) for text in given} == pytest.approx(given)


@pytest.mark.parametrize(
    ("read", "given"),
    [
        (read_count, ["", "350X", "0", "-5M", "M", "1e6", "0.4", "3_000"]),
        (read_rate, ["", "fast", "10", "0gbit", "-1gbit", "10gb", "1M", "25GBps", "10gbit/h"]),
        (read_time, ["", "250", "-1ms", "1h", "inf s", "nanms", "0ms"]),
    ],
)
def test_what_cannot_be(read: Callable[[str, str], Any], given: list[str]) -> None:
    for text in given:
        with pytest.raises(SpecError, match=f"x='{text}' is not allowed"):
            read("x", text)


def test_only_some_times_may_be_nothing() -> None:
    assert read_time("latency", "0ms", zero=True) == 0


def test_what_is_written() -> None:
    assert [write_rate(bits) for bits in (1e8, 1e9, 4e11, 2e13, math.inf)] == [
        "100 Mbit/s", "1 Gbit/s", "400 Gbit/s", "20 Tbit/s", "unlimited",
    ]  # fmt: skip
    assert [write_count(n) for n in (900, 25_557_032, 350e6, 1.2e9)] == ["900", "25.6M", "350M", "1.2B"]
    assert [write_time(t) for t in (0, 5e-5, 0.0123, 0.25, 1.5, 12.34)] == [
        "0", "50 µs", "12.3 ms", "250 ms", "1,500 ms", "12.3 s",
    ]  # fmt: skip
    assert [size(n) for n in (0, 999, 1000, 33.6e6, 2e9)] == ["0 B", "999 B", "1 kB", "33.6 MB", "2 GB"]
