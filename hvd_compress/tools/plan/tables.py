"""Tables of predictions and of their errors."""

from __future__ import annotations

import re
from collections.abc import Sequence

from hvd_compress.tools import tables
from hvd_compress.tools.plan.model import Prediction, Setup, baseline
from hvd_compress.tools.plan.validation import GOOD, Cell, Score
from hvd_compress.tools.tables import Grid
from hvd_compress.tools.units import number, size, write_count, write_rate, write_time

LEGEND = (
    "Exchange: time that the collectives take; Hidden: the part of it that overlaps with the backward pass. Bytes at"
    " the NIC: sent in a step through the network device of a host. Step = compute + encode + decode + exchange"
    " - hidden."
)
"""Meaning of the columns of `predictions`."""


def predictions(found: Sequence[Prediction], setup: Setup) -> Grid:
    """Return the parts of each method's step, in milliseconds."""
    base = baseline(found)
    heads = (
        "Method", "Step\nms", f"Faster\nthan {base.spec}", "Encode\nms", "Decode\nms", "Exchange\nms",
        "Hidden\nms", "Bytes at\nthe NIC",
    )  # fmt: skip
    rows = [
        (
            one.spec,
            *_ms(one.step),
            f"{base.step / one.step:.2f}x",
            *_ms(one.encode, one.decode, one.exchange, one.hidden),
            size(one.wire),
        )
        for one in found
    ]
    title = (
        f"Predicted: {write_count(setup.params)} parameters, {setup.ranks:,} ranks, {write_rate(setup.rate)},"
        f" {write_time(setup.compute)} of compute"
    )
    return Grid(title, heads, rows)


def _ms(*seconds: float) -> list[str]:
    return [number(1000 * value) for value in seconds]


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
