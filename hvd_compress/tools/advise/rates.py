"""The speed of compressing and decompressing: measured here and now, or read from files of `bench methods --json`."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from statistics import median
from typing import Any, NamedTuple

import numpy as np

from hvd_compress.core.bucket import Bucket
from hvd_compress.engine.spec import parse
from hvd_compress.errors import SpecError
from hvd_compress.ops import Ops
from hvd_compress.tools.bench.local.methods import normal_gradients, numpy_ops, timed_steps
from hvd_compress.tools.bench.traffic import grows, sent

RANKS = (2, 8)
"""With so many ranks' payloads decoding is measured; it grows along the line through these. They are far apart, so that
little of the noise gets into the slope."""


class Timed(NamedTuple):
    """One measurement, in seconds per parameter."""

    ranks: int  # The world size
    encode: float  # From the gradient to the last payload, with all that is kept for the next step
    decode: float  # From the last reply to the total
    copy: float  # Seconds of a plain copy of the gradient or array


class Rate(NamedTuple):
    """The cost of a method for a rank with a core of its own, in seconds per parameter."""

    encode: float  # Compressing, with all that is kept for the next step
    decode: float  # Decompressing, without what each rank adds to it
    each: float  # What each rank's payload adds to decompressing

    def decoding(self, ranks: int) -> float:
        """Return the time to decompress what so many ranks have sent."""
        return self.decode + self.each * ranks


class Rates(NamedTuple):
    """The rates of all methods."""

    copy: float  # Seconds per parameter of a plain copy of the gradient
    methods: Mapping[str, Rate]  # By spec, without those that travel as Horovod's own allreduce

    def at(self, copy: float) -> Rates:
        """Return those of a machine that copies at another speed, and needs as many passes over its memory."""
        by = copy / self.copy
        return Rates(copy, {spec: Rate(*(by * value for value in rate)) for spec, rate in self.methods.items()})

    def as_json(self) -> dict[str, Any]:
        return {"copy": self.copy, "methods": {spec: rate._asdict() for spec, rate in self.methods.items()}}

    @classmethod
    def from_json(cls, facts: Mapping[str, Any]) -> Rates:
        return cls(facts["copy"], {spec: Rate(**rate) for spec, rate in facts["methods"].items()})


NO_RATES = Rates(1.0, {})
"""Those of no method."""


def measure(
    specs: Sequence[str], size: int, side: int, turns: int, progress: Callable[[str], None] = lambda what: None
) -> Rates:
    """Measure on this machine, in this process.

    Args:
        specs: The methods.
        size: Numbers in the gradient; times are proportional to it where it does not fit the caches.
        side: Rows and columns of the matrices that it is made of; the gradient has at least one.
        turns: How often each is measured.
        progress: Told what is measured next.
    """
    found: dict[str, list[Timed]] = {}
    for spec in dict.fromkeys(["none", *specs]):
        if spec == "none" or not parse(spec).linear:
            for ranks in RANKS:
                progress(f"{spec}, {ranks} ranks")
                found.setdefault(spec, []).append(time_method(spec, size, side, ranks, turns))
    return _rates(found)


def time_method(spec: str, size: int, side: int, ranks: int, turns: int) -> Timed:
    """Time a method on normal gradients: the best of several turns, as noise only ever adds to a time.

    The last rank is timed, whose memory has been used before, as in training.

    Args:
        spec: The method.
        size: The gradient's numbers, about.
        side: Rows and columns of the matrices that it is made of.
        ranks: The world size.
        turns: Measured steps.
    """
    bucket = Bucket("b0", ((side, side),) * max(1, size // side**2), "float32")
    steps = timed_steps(_ops(), parse(spec).core, bucket, normal_gradients(bucket, ranks), turns, rank=-1)
    times = [(step.encode, step.decode, step.copy) for step in steps][1:]
    encode, decode, copy = (min(column) / bucket.numel for column in zip(*times, strict=True))
    return Timed(ranks, encode, decode, copy)


def _ops() -> Ops:
    """Return PyTorch's primitives with one thread, as a rank on a CPU has; numpy's where it is not installed."""
    plain = numpy_ops()
    try:
        import torch
    except ImportError:
        return plain
    from hvd_compress.ops.torch_devices import torch_ops

    torch.set_num_threads(1)
    return torch_ops("cpu")


def read(paths: Sequence[Path], specs: Sequence[str]) -> Rates:
    """Take rates from files.

    Args:
        paths: One that ``hvd-compress advise --json`` has written; or some of ``hvd-compress bench methods --json``,
            with at least two numbers of ranks in all.
        specs: What must be in them.

    Raises:
        SpecError: If a file is not one, or something is missing.
    """
    found: dict[str, list[Timed]] = {}
    for path in paths:
        try:
            facts = json.loads(path.read_text())
            if "rates" in facts:
                return _checked(Rates.from_json(facts["rates"]), specs, path)
            size, ranks = facts["settings"]["size"], facts["settings"]["ranks"]
            for line in facts["results"]:
                found.setdefault(line["spec"], []).append(_timed(line, size, ranks))
        except (OSError, ValueError, KeyError, TypeError, ZeroDivisionError) as error:
            if isinstance(error, SpecError):
                raise
            raise SpecError(
                f"rates={str(path)!r} cannot be read ({type(error).__name__}: {error}); it must be a file that"
                " 'hvd-compress advise --json FILE' or 'hvd-compress bench methods SPEC... --json FILE' has written"
            ) from None
    for spec in specs:
        if not parse(spec).linear and len({one.ranks for one in found.get(spec, [])}) < len(RANKS):
            raise SpecError(
                f"rates={','.join(map(str, paths))!r} is not allowed: {spec} must have been measured with two numbers"
                f" of ranks, to know how decompressing grows; run 'hvd-compress bench methods {spec} --ranks {RANKS[0]}"
                f" --json FILE', the same with --ranks {RANKS[1]}, and give --rates for both files"
            )
    return _rates(found)


def _checked(rates: Rates, specs: Sequence[str], path: Path) -> Rates:
    lacking = [spec for spec in specs if not parse(spec).linear and spec not in rates.methods]
    if lacking:
        raise SpecError(
            f"rates={str(path)!r} is not allowed: it lacks {', '.join(lacking)}; write it anew with --methods for these"
        )
    return rates


def _timed(line: Mapping[str, Any], size: int, ranks: int) -> Timed:
    encode, decode = (line[name] / 1000 / size for name in ("encode_ms", "decode_ms"))
    return Timed(ranks, encode, decode, encode / line["encode"])


def _rates(found: Mapping[str, Sequence[Timed]]) -> Rates:
    copy = median(one.copy for timed in found.values() for one in timed)
    return Rates(copy, {spec: _line(spec, timed) for spec, timed in found.items() if not parse(spec).linear})


def _line(spec: str, timed: Sequence[Timed]) -> Rate:
    """Fit a line over the ranks where payloads are gathered; all others take equally long with any number.

    Of what should be the same, the least counts, as all else that a machine does only adds to it.
    """
    encode = min(one.encode for one in timed)
    if not grows(sent(spec, 2)):
        return Rate(encode, min(one.decode for one in timed), 0.0)
    slope, _ = np.polyfit([one.ranks for one in timed], [one.decode for one in timed], 1)
    most = min(one.decode / one.ranks for one in timed)  # with no ranks, there is not less than nothing to do
    each = min(max(0.0, float(slope)), most)
    return Rate(encode, min(one.decode - each * one.ranks for one in timed), each)
