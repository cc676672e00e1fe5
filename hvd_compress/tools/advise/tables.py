"""The table of predictions."""

from __future__ import annotations

from collections.abc import Sequence

from hvd_compress.tools.advise.model import Prediction, Setup, baseline
from hvd_compress.tools.tables import Grid
from hvd_compress.tools.units import number, size, write_count, write_rate, write_time

LEGEND = (
    "Exchange: time that the collectives take; Hidden: the part of it that overlaps with computing. Bytes at the NIC:"
    " sent in a step through the network device of a host. Step = compute + encode + decode + exchange - hidden; of"
    " SPEC@STEPS, the average over so many."
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
