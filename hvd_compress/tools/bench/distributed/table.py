"""The results as tables and as bars."""

from __future__ import annotations

from collections.abc import Sequence

from hvd_compress.tools.bench.bars import Bar
from hvd_compress.tools.bench.distributed.results import Result, baseline_name, over_layers, overhead, scaling, speedup
from hvd_compress.tools.bench.distributed.task import ALONE
from hvd_compress.tools.tables import Grid
from hvd_compress.tools.units import NONE, number, size

LEGEND = (
    "Scaling factor: time of a step without communication, divided by the step's. Over none: the step's time less that"
    " of none. Payload: bytes that a rank passes to collectives in a step. At the device: bytes that the busiest"
    " network device sends or receives. Floor: no step can be faster than the step without communication, nor than its"
    " bytes need on the link; x floor: the step's time divided by that."
)
"""Meaning of the columns of `steps_table`."""

NO_NETWORK = "All ranks are on this machine, without a limited link: this does not show what a network costs."


def steps_table(found: Sequence[Result], title: str) -> Grid:
    heads = (
        "Method", "Step\nms", "Quartiles\nms", "Scaling\nfactor", f"Faster\nthan {baseline_name(found)}",
        "Faster\nthan layer", "Over\nnone ms", "Payload", "At the\ndevice",
        "Floor\nms", "x floor", "Encode\nms", "Wait\nms", "Decode\nms",
    )  # fmt: skip
    rows = [
        (
            one.label,
            number(one.ms),
            _quartiles(one),
            number(scaling(found, one), 2),
            _times(speedup(found, one) if one.label != ALONE else None),
            _times(over_layers(found, one)),
            number(overhead(found, one) if one.label != ALONE else None),
            size(one.payload),
            size(one.device if one.label != ALONE else None),
            number(one.floor if one.label != ALONE else None),
            number(one.beyond if one.label != ALONE else None, 2),
            *_phases(one),
        )
        for one in found
    ]
    return Grid(title, heads, rows)


def exchange_table(found: Sequence[Result], title: str) -> Grid:
    heads = (
        "Method", "Exchange\nms", "Quartiles\nms", "Faster\nthan layer", f"Faster\nthan {baseline_name(found)}",
        "Payload", "At the\ndevice", "Calls\nms", "Encode\nms", "Wait\nms", "Decode\nms",
    )  # fmt: skip
    rows = [
        (
            one.label,
            number(one.ms),
            _quartiles(one),
            _times(over_layers(found, one)),
            _times(speedup(found, one)),
            size(one.payload),
            size(one.device),
            number(one.python),
            *_phases(one),
        )
        for one in found[1:]
    ]
    return Grid(title, heads, rows)


def memory_table(found: Sequence[Result], title: str, gradient_bytes: int) -> Grid:
    heads = ("Method", "Beyond parameters\nand gradients", "x gradients")
    rows = [(one.label, size(one.memory), number((one.memory or 0) / gradient_bytes, 2)) for one in found]
    return Grid(title, heads, rows)


def profile_table(result: Result) -> Grid:
    heads = ("Function", "Calls", "Own ms", "With callees ms")
    rows = [
        (row["function"], number(row["calls"]), number(1000 * row["own"], 2), number(1000 * row["with_callees"], 2))
        for row in result.profile
    ]
    return Grid(f"{result.label}: of rank 0, each step, under the profiler", heads, rows)


def bars(found: Sequence[Result]) -> list[Bar]:
    """Return a bar for each entry; Horovod's own and the step alone stand back."""
    shown = []
    for one in found:
        alone, gain = one.label == ALONE, speedup(found, one)
        note = f"{number(one.ms)} ms" + (f"  ({number(gain, 2)}x)" if gain and not alone else "")
        strong = not alone and not one.label.startswith("Horovod's ")
        shown.append(Bar(one.label, one.ms, note, None if alone else one.floor or None, strong))
    return shown


def _quartiles(one: Result) -> str:
    return f"{number(one.spread[0])} {number(one.spread[1])}"


def _phases(one: Result) -> tuple[str, str, str]:
    return number(one.encode), number(one.wait), number(one.decode)


def _times(value: float | None) -> str:
    return NONE if value is None else f"{number(value, 2)}x"
