"""Tables of the errors of predictions."""

from __future__ import annotations

import re
from collections.abc import Sequence

from advise_validation.campaign import GOOD, Cell, Score
from hvd_compress.tools import tables
from hvd_compress.tools.tables import Grid
from hvd_compress.tools.units import size


def errors(cells: Sequence[Cell]) -> Grid:
    """Return how much too long the predictions are: methods from top to bottom, jobs from left to right."""
    rows = [(spec, *(f"{100 * cell.error:+.0f}%" for cell in of)) for spec, of in _by_spec(cells).items()]
    first = next(iter(_by_spec(cells).values()))
    links = [re.sub(r"(?<=\d)(?=[a-z])", "\n", cell.link) for cell in first]
    heads = ("Method", *(f"{cell.hosts}\nhosts\n{link}" for cell, link in zip(first, links, strict=True)))
    return Grid("Predicted less measured, as a share of the measured time", heads, rows)


def markdown(cells: Sequence[Cell]) -> str:
    """Return the same for a page, with times in milliseconds and the bytes at the network device."""
    heads = ("hosts", "link", "method", "measured", "predicted", "error", "bytes measured", "predicted")
    rows: list[tuple[str, ...]] = [heads]
    for cell in cells:
        times = (f"{1000 * value:,.0f} ms" for value in (cell.measured, cell.predicted))
        sizes = size(cell.traffic), size(cell.wire)
        rows.append((str(cell.hosts), cell.link, f"`{cell.spec}`", *times, f"{100 * cell.error:+.0f}%", *sizes))
    return f"{tables.markdown(rows, 'rrlrrrrr')}\n"


def summary(found: Score) -> str:
    """Return in a sentence how good the predictions are."""
    worst = found.worst
    return (
        f"{found.good:.0%} of {found.cells} predictions are within {GOOD:.0%} of what was measured; the median error is"
        f" {found.median:.0%}, the largest {worst.error:+.0%} ({worst.spec}, {worst.hosts} hosts, {worst.link})."
    )


def _by_spec(cells: Sequence[Cell]) -> dict[str, list[Cell]]:
    found: dict[str, list[Cell]] = {}
    for cell in cells:
        found.setdefault(cell.spec, []).append(cell)
    return found
