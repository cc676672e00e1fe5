"""The plot can be read: nothing lies over anything else, and nothing is cut off."""

from __future__ import annotations

from itertools import combinations
from pathlib import Path
from typing import Any

import pytest
from plan.setups import JOB, QUICK, SLOW, SPECS, TOPK

from hvd_compress.errors import SpecError
from hvd_compress.tools.plan import plot
from hvd_compress.tools.plan.constants import Constants
from hvd_compress.tools.plan.curves import over_bandwidths, over_ranks
from hvd_compress.tools.plan.model import Setup
from hvd_compress.tools.plan.rates import Rates


def figure(setup: Setup = JOB, known: Rates = QUICK, more: tuple[str, ...] = ()) -> Any:
    known = known._replace(methods={**known.methods, **dict.fromkeys(more, known.methods[TOPK])})
    specs = (*SPECS, *more)
    by_ranks, by_bandwidth = (make(specs, setup, known, Constants()) for make in (over_ranks, over_bandwidths))
    return plot.figure(by_ranks, by_bandwidth, setup)


LONG = ("topk:ratio=0.001,values=fp16,warmup=400", "efsignsgd:twoway=on,momentum=0.9")


@pytest.mark.slow
@pytest.mark.parametrize("more", [(), LONG])
@pytest.mark.parametrize("known", [QUICK, SLOW])
@pytest.mark.parametrize(
    "setup", [JOB, JOB._replace(params=1_234_567_890, ranks=3000, ranks_per_host=8, rate=25e9, compute=12.34)]
)
def test_no_words_overlap(setup: Setup, known: Rates, more: tuple[str, ...]) -> None:
    drawn = figure(setup, known, more)
    drawn.draw_without_rendering()
    words: list[Any] = [*drawn.texts, *(text for legend in drawn.legends for text in legend.get_texts())]
    for axes in drawn.axes:
        words += [axes.title, axes.xaxis.label, axes.yaxis.label, *axes.get_xticklabels()]
    words += drawn.axes[0].get_yticklabels()
    boxes = {word: word.get_window_extent() for word in words if word.get_text()}
    assert len(boxes) > 20
    for box in boxes.values():
        assert drawn.bbox.x0 <= box.x0 and box.x1 <= drawn.bbox.x1, "cut off"
        assert drawn.bbox.y0 <= box.y0 and box.y1 <= drawn.bbox.y1, "cut off"
    for (one, box), (other, beside) in combinations(boxes.items(), 2):
        assert not box.overlaps(beside), f"{one.get_text()!r} lies over {other.get_text()!r}"


def test_axes_are_named_and_logarithmic() -> None:
    left, right = figure().axes
    assert [axes.get_xscale() for axes in (left, right)] == [axes.get_yscale() for axes in (left, right)] == ["log"] * 2
    assert left.get_ylabel() == "step, times faster than the better of none and fp16"
    assert (left.get_xlabel(), right.get_xlabel()) == ("ranks", "bandwidth of a host")
    assert [tick.get_text() for tick in left.get_xticklabels()][::9] == ["2", "1,024"]
    assert [tick.get_text() for tick in right.get_xticklabels()][::4] == ["100\nMbit/s", "400\nGbit/s"]


def test_every_method_has_a_line_and_a_name() -> None:
    drawn = figure()
    assert [text.get_text() for text in drawn.legends[0].get_texts()] == list(SPECS)
    for axes in drawn.axes:
        lines = axes.get_lines()[: len(SPECS)]
        assert len({line.get_color() for line in lines}) == len(SPECS)
        assert [line.is_dashed() for line in lines] == [spec in (TOPK, "qsgd") for spec in SPECS]


def test_too_many_lines() -> None:
    plot.check(["a"] * plot.MOST)
    with pytest.raises(SpecError, match=r"a plot of 9 methods is not allowed: there can be 8 lines.* name at most 6"):
        plot.check(["a"] * 9)


def test_a_name_that_is_no_image(tmp_path: Path) -> None:
    by_ranks, by_bandwidth = (make(SPECS, JOB, QUICK, Constants()) for make in (over_ranks, over_bandwidths))
    plot.draw(tmp_path / "plan.png", by_ranks, by_bandwidth, JOB)
    assert (tmp_path / "plan.png").read_bytes().startswith(b"\x89PNG")
    with pytest.raises(SpecError, match=r"plan.xyz' is not allowed: .* take a name such as plan.png"):
        plot.draw(tmp_path / "plan.xyz", by_ranks, by_bandwidth, JOB)
