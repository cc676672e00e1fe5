"""Pictures: that all is told, that nothing that is written covers anything else, and what they leave out."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterator

import numpy as np
import pytest
from compare import examples
from compare.cases import made, timed
from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.cbook import is_math_text
from matplotlib.figure import Figure
from matplotlib.text import Text
from matplotlib.transforms import Bbox

from hvd_compress.tools.compare.job import Outcome
from hvd_compress.tools.compare.report import charts, plots
from hvd_compress.tools.compare.report.captions import PICTURES, Picture
from hvd_compress.tools.compare.report.curves import crossing, limits, line, unequal
from hvd_compress.tools.compare.report.plots import looks
from hvd_compress.tools.compare.results import Comparison

FAR = "8 ranks on " + ",".join(f"machine-{n}.cluster.example.org:2" for n in range(4)) + ", gloo"

COMPARISONS: dict[str, Callable[[], Comparison]] = {
    "usual": examples.comparison,
    "troubled": examples.troubled,
    "many": lambda: examples.comparison(examples.MANY, perplexity=True, where=FAR),
    "short": lambda: examples.comparison(budget=60.0),
    "single": lambda: examples.comparison(examples.METHODS[1:3], seeds=1),
    "device unknown": lambda: _blind(examples.comparison(examples.METHODS[1:4])),
}


def _blind(comparison: Comparison) -> Comparison:
    return comparison._replace(outcomes=[one._replace(device=None) for one in comparison.outcomes])


def written(figure: Figure) -> list[tuple[str, Bbox]]:
    """All that is to be read, and where it is; the legend as one."""
    renderer = FigureCanvasAgg(figure).get_renderer()  # type: ignore[no-untyped-call]
    figure.draw(renderer)
    texts: list[Text] = list(figure.texts)
    for axes in figure.axes:
        texts += [*axes.texts, axes.xaxis.label, axes.yaxis.label, *_tick_labels(axes)]
    found = [(one.get_text(), one.get_window_extent(renderer)) for one in texts if one.get_visible() and one.get_text()]
    return found + [("the legend", one.get_window_extent(renderer)) for one in figure.legends]


def _tick_labels(axes: Axes) -> Iterator[Text]:
    for axis in (axes.xaxis, axes.yaxis):
        low, high = sorted(axis.get_view_interval())
        yield from (tick.label1 for tick in axis.get_major_ticks() if low <= tick.get_loc() <= high)


def clashes(figure: Figure) -> list[str]:
    """What covers what, or is not in the picture as a whole."""
    texts = written(figure)
    # A pixel for rounding, and for the room around letters that has no ink.
    inner = [(text, Bbox.from_extents(box.x0 + 1, box.y0 + 1, box.x1 - 1, box.y1 - 1)) for text, box in texts]
    found = [f"{one} / {other}" for (one, a), (other, b) in itertools.combinations(inner, 2) if a.overlaps(b)]
    whole = figure.bbox
    return found + [
        text for text, box in inner if box.x0 < whole.x0 or box.y0 < whole.y0 or box.x1 > whole.x1 or box.y1 > whole.y1
    ]


@pytest.mark.parametrize("picture", PICTURES, ids=lambda one: one.name)
@pytest.mark.parametrize("name", COMPARISONS)
def test_nothing_that_is_written_covers_anything_else(name: str, picture: Picture) -> None:
    assert clashes(picture.draw(COMPARISONS[name]())) == []


def test_clashes_are_found() -> None:
    figure = charts.step_split(examples.comparison())
    axes = figure.axes[0]
    axes.annotate("over the axis", (0.5, 0.0), xycoords="axes fraction", va="top", fontsize=30)
    figure.text(1.0, 0.5, "over the edge", ha="center")
    assert any("over the axis" in one and "/" in one for one in clashes(figure))
    assert "over the edge" in clashes(figure)


def legend_of(figure: Figure) -> list[str]:
    (legend,) = figure.legends
    return [text.get_text() for text in legend.get_texts()]


def test_all_methods_are_in_the_pictures() -> None:
    comparison = COMPARISONS["troubled"]()
    for draw in (plots.metric_by_time, plots.metric_by_steps):
        told = legend_of(draw(comparison))
        assert {text.partition(" ")[0] for text in told} == {*comparison.methods, "target:"}
        assert f"{examples.MANY[-1].spec} (failed)" in told
    rows = [label.get_text() for label in charts.time_to_target(comparison).axes[0].get_yticklabels()]
    assert sorted(rows) == sorted(comparison.methods)
    assert len(charts.step_split(comparison).axes[0].get_yticklabels()) == len(comparison.methods) - 1  # one failed


def test_a_method_that_never_ended_well_is_named() -> None:
    comparison = examples.comparison(examples.METHODS[1:3])
    lost = [one._replace(diverged=one.spec != "fp16") for one in comparison.outcomes]
    assert "topk:ratio=0.01 (diverged)" in legend_of(plots.metric_by_steps(comparison._replace(outcomes=lost)))


def test_what_is_out_of_the_picture_is_told() -> None:
    stuck = examples.Example("signsgd", 100, 0.0, 0.94, 1000)
    comparison = examples.comparison((*examples.METHODS[1:4], stuck), perplexity=True)
    _, high = limits(comparison) or (math.nan, math.nan)
    assert high < 400  # and not the thousands that all begin with
    (told,) = [text for text in legend_of(plots.metric_by_steps(comparison)) if text.startswith("signsgd")]
    assert told.startswith("signsgd (ends at 6,")


def test_a_line_is_the_median_where_all_seeds_are_known() -> None:
    one = examples.outcome(examples.METHODS[1])
    slow, fast = (
        one._replace(curve=[point._replace(seconds=times * point.seconds) for point in one.curve]) for times in (4, 1)
    )
    middle = one._replace(curve=[point._replace(seconds=2 * point.seconds) for point in one.curve])
    found = line([slow, middle, fast], "seconds")
    assert found.at[-1] == fast.curve[-1].seconds
    assert (found.low <= found.median).all() and (found.median <= found.high).all()
    x, y = np.array([(point.seconds, point.metric) for point in middle.curve]).T
    at = 3 * one.curve[3].seconds
    assert np.interp(at, found.at, found.low) == pytest.approx(np.interp(at, 4 * x / 2, y))
    assert np.interp(at, found.at, found.high) == pytest.approx(np.interp(at, x / 2, y))


def test_trainings_that_diverged_are_not_in_the_median() -> None:
    good, bad = examples.outcome(examples.METHODS[1]), examples.outcome(examples.METHODS[1], 1, diverged=True)
    bad = bad._replace(curve=[*bad.curve[:3], bad.curve[3]._replace(metric=math.nan)])
    found = line([good, bad], "step")
    np.testing.assert_allclose(found.median, [point.metric for point in good.curve])
    ((x, _),) = found.lost
    assert list(x) == [0, 20, 40]
    assert len(line([bad], "step").at) == 0


def test_logarithmic_axes_begin_after_zero() -> None:
    assert not unequal(examples.comparison())
    assert unequal(COMPARISONS["troubled"]())
    assert line([examples.outcome(examples.METHODS[1])], "seconds", positive=True).at[0] > 0
    scales = [
        draw(COMPARISONS["troubled"]()).axes[0].get_xscale() for draw in (plots.metric_by_time, plots.metric_by_steps)
    ]
    assert scales == ["log", "linear"]


def test_logarithmic_axes_begin_after_zero_also_where_all_is_drawn() -> None:
    axes = plots.metric_by_time(COMPARISONS["troubled"]()._replace(target=0.2)).axes[0]
    assert axes.get_ylim()[0] < 0.1 + 0.02
    assert 0 < axes.get_xlim()[0] < 3
    assert all(min(np.asarray(drawn.get_xdata())) > 0 for drawn in axes.lines[:1])


def test_dollars_are_dollars() -> None:
    comparison = examples.comparison(examples.METHODS[1:3], task="dollars$and$cents")
    named = comparison._replace(methods=["fp16", "$x$"], outcomes=[_renamed(one) for one in comparison.outcomes])
    for picture in PICTURES:
        drawn = picture.draw(named)
        texts = [one.get_text() for one in drawn.findobj(Text)]
        assert any("dollars" in text for text in texts)
        assert not any(is_math_text(text) for text in texts)


def _renamed(one: Outcome) -> Outcome:
    return one if one.spec == "fp16" else one._replace(spec="$x$", goal=one.goal._replace(metric="$y$"))


def test_bars_of_bytes_are_logarithmic_where_they_differ_much() -> None:
    near = [examples.METHODS[1], examples.METHODS[-1]]
    scales = [
        charts.bytes_per_step(one).axes[0].get_xscale() for one in (examples.comparison(), examples.comparison(near))
    ]
    assert scales == ["log", "linear"]


def test_all_methods_look_different() -> None:
    found = looks(examples.comparison(examples.MANY))
    assert len(set(found.values())) == len(examples.MANY)


def test_the_dot_of_the_target_is_on_the_line() -> None:
    found = line([made([(0, 0.0, 0.1), (20, 8.0, 0.8), (40, 12.0, 1.0)]), timed(9.0)], "seconds")
    at = crossing(found, 0.9, higher_is_better=True)
    assert at is not None and np.interp(at, found.at, found.median) == pytest.approx(0.9)
    assert crossing(found, 0.99, higher_is_better=True) is None
    assert crossing(found, 1.0, higher_is_better=False) == 0.0
