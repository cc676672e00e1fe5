"""The results of a benchmark, from the reports of the ranks: medians, ratios, and the distance to the floor."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from statistics import mean, median
from typing import Any, NamedTuple

from hvd_compress.tools.bench.distributed.task import ALONE, Entry, Part, Task

Reports = Sequence[Sequence[Part]]


class Result(NamedTuple):
    """An entry's result. Times are in milliseconds per step, bytes per step and rank."""

    label: str
    ms: float = 0.0  # Median over steps of the slowest rank's time; of the step alone, the mean of the slowest rank
    spread: tuple[float, float] = (0.0, 0.0)  # The quartiles of that
    payload: float | None = None  # Bytes handed to Horovod; None if they are not counted
    # Bytes at the network device, the larger of sent and received, of the busiest host; None if unknown
    device: float | None = None
    floor: float | None = None  # What it cannot be faster than: computing alone, or its bytes on the link
    encode: float | None = None  # Time in compress
    wait: float | None = None  # Waiting for collectives in decompress
    decode: float | None = None  # Time in decompress, without waiting
    python: float | None = None  # In compress and decompress as Horovod sees them, without waiting
    memory: int | None = None  # Peak bytes beyond those of steps alone, of the rank with most
    profile: Sequence[dict[str, Any]] = ()  # The profile of rank 0

    @property
    def beyond(self) -> float | None:
        return self.ms / self.floor if self.floor else None


def results(task: Task, reports: Reports, bits_per_second: int | None) -> list[Result]:
    """Aggregate what the ranks have measured.

    The first entry is the step alone. Its time is part of the others', but is taken off those of bare exchanges.
    """
    found = [_result(entry, _parts_of(reports, index)) for index, entry in enumerate(task.entries)]
    alone = found[0].ms
    if task.what == "exchange":
        found = [found[0], *(_less(result, alone) for result in found[1:])]
        alone = 0.0
    return [result._replace(floor=_floor(alone, result.device, bits_per_second)) for result in found]


def _less(result: Result, ms: float) -> Result:
    first, third = result.spread
    return result._replace(ms=result.ms - ms, spread=(first - ms, third - ms))


def _parts_of(reports: Reports, index: int) -> list[list[Part]]:
    return [[part for part in parts if part.entry == index] for parts in reports]


def _result(entry: Entry, ranks: list[list[Part]]) -> Result:
    seconds = [[1000 * s for part in rank for s in part.seconds] for rank in ranks]
    steps = max(len(seconds[0]), 1)
    if entry.spec:
        times = sorted(max(step) for step in zip(*seconds, strict=True)) or [0.0]
    else:  # nobody waits for the others, and on shared cores now this rank is slow, now that one
        times = [max(map(mean, seconds))] if seconds[0] else [0.0]
    ours = bool(entry.spec) and not entry.own
    peaks = [part.memory for rank in ranks for part in rank if part.memory is not None]
    return Result(
        entry.label,
        median(times),
        (times[len(times) // 4], times[-1 - len(times) // 4]),
        payload=max(sum(part.payload for part in rank) for rank in ranks) / steps if ours else None,
        device=_device(ranks, steps),
        encode=_mean_ms(ranks, "encode", steps),
        wait=_mean_ms(ranks, "wait", steps),
        decode=_mean_ms(ranks, "decode", steps),
        python=_mean_ms(ranks, "called", steps),
        memory=max(peaks, default=None),
        profile=next((part.profile for part in ranks[0] if part.profile), []),
    )


def _mean_ms(ranks: list[list[Part]], name: str, steps: int) -> float | None:
    """Return the time of a phase per step, a mean over the ranks."""
    values = [getattr(part, name) for rank in ranks for part in rank]
    known = [value for value in values if value is not None]
    return 1000 * sum(known) / steps / len(ranks) if known else None


def _device(ranks: list[list[Part]], steps: int) -> float | None:
    totals = [_sum(getattr(part, way) for part in rank) for rank in ranks for way in ("sent", "received")]
    known = [total for total in totals if total is not None]
    return max(known) / steps if known else None


def _sum(values: Iterable[int | None]) -> int | None:
    known = [value for value in values if value is not None]
    return sum(known) if known else None


def _floor(alone: float, device: float | None, bits_per_second: int | None) -> float | None:
    if bits_per_second is None:
        return alone
    return None if device is None else max(alone, 1000 * 8 * device / bits_per_second)


def named(found: Sequence[Result], *labels: str) -> Result | None:
    """Return the first result with one of these labels, in the order of the labels."""
    by_label = {result.label: result for result in found}
    return next((by_label[label] for label in labels if label in by_label), None)


BASELINES = ("none", "fp16")
"""The methods that Horovod and DistributedDataParallel have themselves; gains are relative to the better one."""

DENSE = ["Horovod's none", "DDP's none", "FSDP's none", "none"]
HALF = ["Horovod's fp16", "DDP's fp16", "FSDP's bf16", "fp16"]
"""The labels of steps without compression, and with 16 bits."""


def baseline(found: Sequence[Result]) -> Result | None:
    """Return the fastest of none and fp16; None unless both were measured, as then nothing tells."""
    dense, half = ([one for one in found if one.label in labels] for labels in (DENSE, HALF))
    return min(half + dense, key=lambda one: one.ms) if dense and half else None


def baseline_name(found: Sequence[Result]) -> str:
    """Return ``none`` or ``fp16``, whichever is the baseline; empty if there is none."""
    base = baseline(found)
    return base.label.removeprefix("Horovod's ") if base else ""


def speedup(found: Sequence[Result], result: Result) -> float | None:
    """Return how many times faster than the baseline in the same run it is."""
    base = baseline(found)
    return base.ms / result.ms if base and result.ms else None


def over_layers(found: Sequence[Result], result: Result) -> float | None:
    """Return how many times faster than layer by layer it is."""
    method, merged, _ = result.label.partition(" merge=")
    base = named(found, f"{method} merge=layer") if merged else None
    return base.ms / result.ms if base and base != result else None


def scaling(found: Sequence[Result], result: Result) -> float | None:
    """Return the scaling factor: the share of the speed of a rank alone that is left."""
    alone = named(found, ALONE)
    return alone.ms / result.ms if alone and alone != result and result.ms else None


def overhead(found: Sequence[Result], result: Result) -> float | None:
    """Return how many milliseconds more than without compression it takes in the same run."""
    base = named(found, *DENSE)
    return result.ms - base.ms if base else None


def as_json(found: Sequence[Result]) -> list[dict[str, Any]]:
    return [
        result._asdict()
        | {
            "beyond_floor": result.beyond,
            "baseline": baseline_name(found),
            "speedup": speedup(found, result),
            "over_layers": over_layers(found, result),
            "overhead_ms": overhead(found, result),
        }
        for result in found
    ]
