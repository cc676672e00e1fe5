"""Lines of the pictures: what is in the median, where a target is crossed, and what is left out."""

from __future__ import annotations

import math

import numpy as np
import pytest
from compare import examples
from compare.cases import made, timed

from hvd_compress.tools.compare.report.curves import crossing, limits, line, unequal


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


def test_what_is_shown() -> None:
    """Logarithmic axes begin after zero, and the metrics before the first steps need no room."""
    assert not unequal(examples.comparison()) and unequal(examples.troubled())
    assert line([examples.outcome(examples.METHODS[1])], "seconds", positive=True).at[0] > 0
    stuck = examples.Example("signsgd", 100, 0.0, 0.94, 1000)
    found = limits(examples.comparison((*examples.METHODS[1:4], stuck), perplexity=True))
    assert found and found[1] < 400


def test_the_dot_of_the_target_is_on_the_line() -> None:
    found = line([made([(0, 0.0, 0.1), (20, 8.0, 0.8), (40, 12.0, 1.0)]), timed(9.0)], "seconds")
    at = crossing(found, 0.9, higher_is_better=True)
    assert at is not None and np.interp(at, found.at, found.median) == pytest.approx(0.9)
    assert crossing(found, 0.99, higher_is_better=True) is None
    assert crossing(found, 1.0, higher_is_better=False) == 0.0
