"""What people write is read as they mean it, and refused with a cure where it cannot be."""

from __future__ import annotations

import math

import pytest

from hvd_compress.errors import SpecError
from hvd_compress.tools.units import read_count, read_rate, read_time, write_count, write_rate, write_time


@pytest.mark.parametrize(
    ("text", "number"),
    [("350M", 350_000_000), ("1.2B", 1_200_000_000), ("25557032", 25_557_032), ("7k", 7000), (" 3 m ", 3_000_000)],
)
def test_counts(text: str, number: int) -> None:
    assert read_count("params", text) == number


@pytest.mark.parametrize(
    ("text", "bits"),
    [
        ("10gbit", 1e10),
        ("400Gbit", 4e11),
        ("2.5 gbit", 2.5e9),
        ("100mbit", 1e8),
        ("1tbit", 1e12),
        ("25Gbps", 2.5e10),
        ("1 Gbit", 1e9),
        ("10 Gbit/s", 1e10),
    ],
)
def test_rates_have_no_upper_limit(text: str, bits: float) -> None:
    assert read_rate("rate", text) == bits


def test_a_rate_can_be_unlimited() -> None:
    assert read_rate("rate", "unlimited") == math.inf


@pytest.mark.parametrize(("text", "seconds"), [("250ms", 0.25), ("0.25s", 0.25), ("50us", 5e-5), ("50µs", 5e-5)])
def test_times(text: str, seconds: float) -> None:
    assert read_time("compute", text) == pytest.approx(seconds)


def test_only_some_times_may_be_nothing() -> None:
    assert read_time("latency", "0ms", zero=True) == 0
    with pytest.raises(SpecError, match=r"compute='0ms' is not allowed: compute must be a number above 0 .* 250ms"):
        read_time("compute", "0ms")


@pytest.mark.parametrize("text", ["", "350X", "0", "-5M", "M", "1e6", "0.4", "3_000"])
def test_counts_that_cannot_be(text: str) -> None:
    with pytest.raises(SpecError, match=rf"params='{text}' is not allowed: params must be .* such as 350M"):
        read_count("params", text)


@pytest.mark.parametrize("text", ["", "fast", "10", "0gbit", "-1gbit", "10gb", "1M", "25GBps", "10gbit/h"])
def test_rates_that_cannot_be(text: str) -> None:
    with pytest.raises(
        SpecError, match=rf"rate='{text}' is not allowed: rate must be .* kbit, mbit, gbit or tbit.* 400gbit"
    ):
        read_rate("rate", text)


@pytest.mark.parametrize("text", ["", "250", "-1ms", "1h", "inf s", "nanms"])
def test_times_that_cannot_be(text: str) -> None:
    with pytest.raises(SpecError, match=rf"latency='{text}' is not allowed: latency must be .* 250ms"):
        read_time("latency", text, zero=True)


@pytest.mark.parametrize(
    ("bits", "text"),
    [(1e8, "100 Mbit/s"), (1e9, "1 Gbit/s"), (4e11, "400 Gbit/s"), (2e13, "20 Tbit/s"), (math.inf, "unlimited")],
)
def test_rates_are_written(bits: float, text: str) -> None:
    assert write_rate(bits) == text


def test_counts_and_times_are_written() -> None:
    assert [write_count(n) for n in (900, 25_557_032, 350e6, 1.2e9)] == ["900", "25.6M", "350M", "1.2B"]
    assert [write_time(t) for t in (0, 5e-5, 0.0123, 0.25, 1.5, 12.34)] == [
        "0", "50 µs", "12.3 ms", "250 ms", "1,500 ms", "12.3 s",
    ]  # fmt: skip
