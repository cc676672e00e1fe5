"""Nested phases are counted once."""

from __future__ import annotations

import itertools

import pytest

from hvd_compress.engine.stats import Meter


def test_time_inside_counts_only_there(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = itertools.count()  # every look at the clock is a second later
    monkeypatch.setattr("hvd_compress.engine.stats.time.perf_counter", lambda: float(next(clock)))
    meter = Meter()
    with meter.time("decode"):  # from 0 to 5
        with meter.time("wait"):  # from 1 to 2
            pass
        with meter.time("wait"):  # from 3 to 4
            pass
    assert (meter.decode, meter.wait, meter.encode) == (3.0, 2.0, 0.0)


def test_time_is_counted_when_the_block_fails() -> None:
    meter = Meter()
    with pytest.raises(KeyError), meter.time("encode"):
        raise KeyError
    assert meter.encode > 0


def test_ratio() -> None:
    assert Meter().read(waits=True).ratio == 1.0
    read = Meter(steps=2, gradient_bytes=100, bytes_sent=25).read(waits=False)
    assert (read.ratio, read.bytes_per_step, read.wait_seconds, read.steps) == (4.0, 12.5, None, 2)
    assert Meter().read(waits=True).bytes_per_step == 0


def test_it_prints_what_a_step_costs() -> None:
    assert str(Meter(steps=2, gradient_bytes=80_000, bytes_sent=2_000, encode=0.004).read(waits=True)) == (
        "2 steps; per step: 1,000 of 40,000 bytes sent (ratio 40.0), encode 2 ms, wait 0 ms, decode 0 ms"
    )
