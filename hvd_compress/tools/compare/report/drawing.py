"""What all pictures of a comparison have in common."""

from __future__ import annotations

import textwrap
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

from hvd_compress.tools.bench.drawing import require_matplotlib
from hvd_compress.tools.compare.results import Comparison

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.axis import Axis
    from matplotlib.figure import Figure

WIDTH = 10.5
"""Inches."""

INK, GREY, PALE = "#1d2126", "#767c84", "#c9cdd2"
COLOURS = ("#0072b2", "#d55e00", "#009e73", "#cc79a7", "#e69f00", "#56b4e9")
"""Those of Okabe and Ito's that can be told apart with any eyes and are seen on white."""

DASHES: tuple[Any, ...] = ("-", (0, (5, 1.5)), (0, (1.2, 1.2)))
"""Methods beyond the sixth have a colour again, but another dash."""

_PLAIN = {"fp16": (INK, "-"), "none": (GREY, "-")}
"""What all are compared with stands back."""


class Look(NamedTuple):
    """Of a method: the colour and the dash of its line."""

    colour: str
    dash: Any


def looks(comparison: Comparison) -> dict[str, Look]:
    """By method; the same in all pictures."""
    rest = [spec for spec in comparison.methods if spec not in _PLAIN]
    found = {spec: Look(COLOURS[n % 6], DASHES[n // 6 % 3]) for n, spec in enumerate(rest)}
    return {**found, **{spec: Look(*look) for spec, look in _PLAIN.items()}}


def blank(height: float, what: str, comparison: Comparison, columns: int = 105) -> tuple[Figure, Axes]:
    """A picture of so many inches with nothing but its title, whose lines have so many columns.

    Raises:
        MissingPackageError: If matplotlib is not installed.
    """
    require_matplotlib("reports")
    from matplotlib.figure import Figure
    from matplotlib.layout_engine import ConstrainedLayoutEngine

    title = f"{what[:1].upper()}{what[1:]}: {comparison.task}, {comparison.framework}, {comparison.where}"
    lines = textwrap.wrap(plain(title), columns)
    layout = ConstrainedLayoutEngine(w_pad=0.1, h_pad=0.1)
    drawn = Figure(figsize=(WIDTH, height + 0.2 * len(lines)), layout=layout, facecolor="white")
    drawn.suptitle("\n".join(lines), fontsize=11, x=0.01, ha="left", color=INK)
    axes = drawn.add_subplot()
    axes.spines[["top", "right"]].set_visible(False)
    axes.spines[["left", "bottom"]].set_color(GREY)
    axes.tick_params(labelsize=9, color=GREY)
    axes.set_axisbelow(True)
    return drawn, axes


def plain(text: str) -> str:
    """Without the meaning that dollars have in matplotlib."""
    return text.replace("$", r"\$")


def _number(value: float) -> str:
    return f"{value:,.10g}"


def logarithmic(axis: Axis, decades: float, form: Callable[[float], str] = _number) -> None:
    """Make an axis of so many decades logarithmic, with figures as people write them."""
    from matplotlib.ticker import FuncFormatter, LogLocator, NullFormatter

    axis.axes.set(**{f"{axis.axis_name}scale": "log"})  # type: ignore[attr-defined]
    axis.set_major_locator(LogLocator(subs=(1, 2, 5) if decades < 2.5 else (1,), numticks=20))
    axis.set_major_formatter(FuncFormatter(lambda value, _: form(value)))
    axis.set_minor_formatter(NullFormatter())


def rows(axes: Axes, specs: Sequence[str]) -> None:
    """Make room for a row of each method, the first on top."""
    axes.set_yticks(range(len(specs)), [plain(spec) for spec in specs], fontsize=9)
    axes.set_ylim(len(specs) - 0.4, -0.6)
    axes.tick_params(axis="y", length=0)
    axes.spines["left"].set_visible(False)
    axes.grid(axis="x", color="#e6e8ea", lw=0.7)


def note(axes: Axes, x: float, y: float, text: str) -> None:
    """Write to the right of a place, and over lines that pass there."""
    ground = {"facecolor": "white", "edgecolor": "none", "pad": 1.0}
    axes.annotate(
        plain(text), (x, y), xytext=(6, 0), textcoords="offset points", va="center", fontsize=9, color=INK, bbox=ground
    )


def legend_below(drawn: Figure, handles: Sequence[Any], labels: Sequence[str]) -> None:
    """In one line below all."""
    drawn.legend(handles, labels, loc="outside lower left", ncols=len(labels), frameon=False, fontsize=9)
