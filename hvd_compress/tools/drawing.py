"""The style of all figures. They need matplotlib, which is imported only where one is drawn."""

from __future__ import annotations

import importlib
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

from hvd_compress.errors import required

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.axis import Axis
    from matplotlib.figure import Figure

INK, GREY, PALE = "#1d2126", "#767c84", "#c9cdd2"
COLOURS = ("#0072b2", "#d55e00", "#009e73", "#cc79a7", "#e69f00", "#56b4e9")
"""Colours of Okabe and Ito that are visible on white and distinguishable for the colour-blind."""

BASELINES = {"fp16": INK, "none": GREY}
"""The colours of Horovod's own methods, which stand back."""


def require_matplotlib(what: str) -> None:
    """Refuse to begin without matplotlib, which ``what``, such as ``"plots"``, needs.

    Raises:
        MissingPackageError: If it is not installed.
    """
    with required(f"drawing {what}", "matplotlib", "bench"):
        importlib.import_module("matplotlib.figure")


def blank(width: float, height: float, title: str, columns: int = 1) -> tuple[Figure, list[Axes]]:
    """Return a figure of this size in inches, with its title and so many empty axes side by side, which share y.

    Raises:
        MissingPackageError: If matplotlib is not installed.
    """
    require_matplotlib("figures")
    from matplotlib.figure import Figure
    from matplotlib.layout_engine import ConstrainedLayoutEngine

    layout = ConstrainedLayoutEngine(w_pad=0.1, h_pad=0.1)
    drawn = Figure(figsize=(width, height), layout=layout, facecolor="white")
    drawn.suptitle(plain(title), fontsize=11, x=0.01, ha="left", color=INK)
    found = list(drawn.subplots(1, columns, sharey=True, squeeze=False)[0])
    for axes in found:
        axes.spines[["top", "right"]].set_visible(False)
        axes.spines[["left", "bottom"]].set_color(GREY)
        axes.tick_params(labelsize=9, color=GREY)
        axes.set_axisbelow(True)
    return drawn, found


def plain(text: str) -> str:
    """Escape dollars, which matplotlib would read as mathematics."""
    return text.replace("$", r"\$")


def logarithmic(axis: Axis, decades: float, form: Callable[[float], str] = "{:,.10g}".format) -> None:
    """Make an axis of so many decades logarithmic, with numbers as people write them."""
    from matplotlib.ticker import FuncFormatter, LogLocator, NullFormatter

    axis.axes.set(**{f"{axis.axis_name}scale": "log"})  # type: ignore[attr-defined]
    axis.set_major_locator(LogLocator(subs=(1, 2, 5) if decades < 2.5 else (1,), numticks=20))
    axis.set_major_formatter(FuncFormatter(lambda value, _: form(value)))
    axis.set_minor_formatter(NullFormatter())


def rows(axes: Axes, labels: Sequence[str]) -> None:
    """Make room for a row of each label, the first on top."""
    axes.set_yticks(range(len(labels)), [plain(label) for label in labels], fontsize=9)
    axes.set_ylim(len(labels) - 0.4, -0.6)
    axes.tick_params(axis="y", length=0)
    axes.spines["left"].set_visible(False)
    axes.grid(axis="x", color="#e6e8ea", lw=0.7)


def note(axes: Axes, x: float, y: float, text: str) -> None:
    """Write to the right of a place, over lines that pass there."""
    ground = {"facecolor": "white", "edgecolor": "none", "pad": 1.0}
    axes.annotate(
        plain(text), (x, y), xytext=(6, 0), textcoords="offset points", va="center", fontsize=9, color=INK, bbox=ground
    )


def legend_below(drawn: Figure, handles: Sequence[Any], labels: Sequence[str], columns: int | None = None) -> None:
    """Write a legend below all, in one line or in so many columns."""
    drawn.legend(handles, labels, loc="outside lower left", ncols=columns or len(labels), frameon=False, fontsize=9)
