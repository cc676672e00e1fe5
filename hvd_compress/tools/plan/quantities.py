"""Reading and writing what people say of a job: 350M parameters, 10gbit, 250ms."""

from __future__ import annotations

import math
import re

from hvd_compress.errors import SpecError
from hvd_compress.tools.cluster.rates import UNLIMITED

_COUNTS = {"": 1.0, "k": 1e3, "m": 1e6, "b": 1e9, "g": 1e9, "t": 1e12}
_RATES = {"kbit": 1e3, "mbit": 1e6, "gbit": 1e9, "tbit": 1e12}
_TIMES = {"us": 1e-6, "µs": 1e-6, "ms": 1e-3, "s": 1.0}


def read_count(name: str, text: str) -> int:
    """Read a number of parameters, as ``350M``, ``1.2B`` or ``25557032``.

    Args:
        name: Of the option, for messages.
        text: What was given; capitals do not matter.

    Raises:
        SpecError: If it cannot be read, or is less than 1.
    """
    value = round(_read(text, _COUNTS))
    if value < 1:
        raise SpecError(
            f"{name}={text!r} is not allowed: {name} must be a number of at least 1, with k, M, B or T behind it or"
            " without, such as 350M, 1.2B or 25557032"
        )
    return value


def read_rate(name: str, text: str) -> float:
    """Read a bandwidth, as ``10gbit``; there is no upper limit, as nothing has to be emulated.

    Returns:
        Bits in a second; infinite for ``"unlimited"``.

    Raises:
        SpecError: If it cannot be read, or is 0.
    """
    value = math.inf if text.strip().lower() == UNLIMITED else _read(text, _RATES)
    if value <= 0:
        raise SpecError(
            f"{name}={text!r} is not allowed: {name} must be a number above 0 with kbit, mbit, gbit or tbit, such as"
            f" 100mbit, 10gbit or 400gbit; or {UNLIMITED!r}"
        )
    return value


def read_time(name: str, text: str, *, zero: bool = False) -> float:
    """Read a time, as ``250ms``, ``0.25s`` or ``50us``.

    Args:
        name: Of the option, for messages.
        text: What was given.
        zero: Whether there may be none at all.

    Returns:
        Seconds.

    Raises:
        SpecError: If it cannot be read, or is 0 and must not be.
    """
    value = _read(text, _TIMES)
    if value < 0 or (value == 0 and not zero):
        allowed = "of at least 0" if zero else "above 0"
        raise SpecError(
            f"{name}={text!r} is not allowed: {name} must be a number {allowed} with us, ms or s, such as 50us or 250ms"
        )
    return value


def _read(text: str, units: dict[str, float]) -> float:
    """A number times its unit; -1 if it cannot be read."""
    match = re.fullmatch(r"(\d+(?:\.\d+)?)\s*([a-zµ]*)", text.strip().lower())
    if not match or match[2] not in units:
        return -1.0
    return float(match[1]) * units[match[2]]


def write_rate(bits: float) -> str:
    """A bandwidth for people, as ``10 Gbit/s``."""
    if math.isinf(bits):
        return UNLIMITED
    for unit, size in (("Tbit/s", 1e12), ("Gbit/s", 1e9), ("Mbit/s", 1e6)):
        if bits >= size * 0.9995 and (unit != "Tbit/s" or bits >= 1e13):
            return f"{bits / size:.3g} {unit}"
    return f"{bits / 1e3:.3g} kbit/s"


def write_count(number: float) -> str:
    """A number of parameters for people, as ``350M``."""
    for unit, size in (("T", 1e12), ("B", 1e9), ("M", 1e6), ("k", 1e3)):
        if number >= size * 0.9995:
            return f"{number / size:.3g}{unit}"
    return f"{number:.0f}"


def write_time(seconds: float) -> str:
    """A time for people, as ``250 ms``."""
    for unit, size in (("s", 1.0), ("ms", 1e-3)):
        if seconds >= size * (10 if unit == "s" else 0.9995):
            return f"{seconds / size:,.0f} {unit}" if seconds / size >= 100 else f"{seconds / size:.3g} {unit}"
    return f"{1e6 * seconds:.3g} µs" if seconds else "0"
