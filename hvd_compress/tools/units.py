"""Numbers as people write them: 350M parameters, 10gbit, 250ms, 1.2 MB."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping, Sequence

from hvd_compress.core.method import check_range

UNLIMITED = "unlimited"
"""A bandwidth without a limit."""

RATE_FORMS = (
    "a number above 0 with kbit, mbit, gbit or tbit, such as 100mbit, 10gbit or 400gbit (10Gbit/s and 10Gbps mean the"
    f" same); or {UNLIMITED!r}"
)
"""The bandwidths that `read_rate` accepts, for messages."""

NONE = "-"
"""The cell of a table for which there is no number."""

_COUNTS = {"": 1.0, "k": 1e3, "m": 1e6, "b": 1e9, "g": 1e9, "t": 1e12}
_BITS = {f"{prefix}{unit}": _COUNTS[prefix] for prefix in "kmgt" for unit in ("bit", "bit/s", "bps")}
_SHORT_TIMES = {"us": 1e-6, "µs": 1e-6, "ms": 1e-3, "s": 1.0}
_LONG_TIMES = {"": 1.0, "s": 1.0, "m": 60.0, "h": 3600.0}


def read_count(name: str, text: str) -> int:
    """Read a number of parameters, such as ``350M``, ``1.2B`` or ``25557032``.

    Args:
        name: The option, for messages.
        text: The value; case is ignored.

    Raises:
        SpecError: If it cannot be read, or is less than 1.
    """
    value = round(_read(text, _COUNTS))
    forms = "a number of at least 1, with k, M, B or T behind it or without, such as 350M, 1.2B or 25557032"
    check_range(name, text, forms, value >= 1)
    return value


def read_rate(name: str, text: str) -> float:
    """Read a bandwidth, such as ``10gbit``, ``10 Gbit/s`` or ``10Gbps``.

    Case is ignored, except that ``10GBps``, which are bytes, is refused.

    Returns:
        Bits per second; infinite for ``"unlimited"``.

    Raises:
        SpecError: If it cannot be read, or is 0.
    """
    value = math.inf if text.strip().lower() == UNLIMITED else _read(text, _BITS)
    check_range(name, text, RATE_FORMS, value > 0 and "Bp" not in text)
    return value


def read_time(name: str, text: str, *, zero: bool = False, long: bool = False) -> float:
    """Read a time, such as ``250ms`` or ``50us``.

    Args:
        name: The option, for messages.
        text: The value.
        zero: Whether 0 is allowed.
        long: Whether the units are seconds, minutes and hours, such as ``10m``; a bare number is in seconds then.

    Returns:
        Seconds.

    Raises:
        SpecError: If it cannot be read, or is 0 where that is not allowed.
    """
    value = _read(text, _LONG_TIMES if long else _SHORT_TIMES)
    least = "of at least 0" if zero else "above 0"
    units = "s, m or h, such as 90s, 10m or 1h" if long else "us, ms or s, such as 50us or 250ms"
    check_range(name, text, f"a number {least} with {units}", value > 0 or (value == 0 and zero))
    return value


def _read(text: str, units: Mapping[str, float]) -> float:
    """Return a number times its unit; -1 if it cannot be read."""
    match = re.fullmatch(r"(\d+(?:\.\d+)?)\s*([a-zµ/]*)", text.strip().lower())
    return float(match[1]) * units[match[2]] if match and match[2] in units else -1.0


def number(value: float | None, digits: int = 1) -> str:
    """Write a number with a fixed count of decimals, one fewer from 100 on."""
    return NONE if value is None else f"{value:,.{max(0, digits - (abs(value) >= 100))}f}"


def significant(value: float, digits: int) -> str:
    """Write a number with so many significant digits, trailing zeros included."""
    return f"{value:,.0f}" if 10 ** (digits - 1) - 0.05 <= abs(value) < 1e9 else f"{value:#.{digits}g}"


def metric(value: float) -> str:
    """Write a measured metric."""
    return significant(value, 4)


def seconds(value: float) -> str:
    """Write a time in seconds, without the unit."""
    return significant(value, 3)


def setting(value: float) -> str:
    """Write a target or a learning rate as a user would."""
    return f"{value:,.0f}" if 9999.5 <= abs(value) < 1e9 else f"{value:.4g}"


def times(value: float) -> str:
    """Write a ratio: the closer to 1, the more digits."""
    return f"{value:,.{2 if value < 1.995 else 1 if value < 9.95 else 0}f}"


def error(value: float) -> str:
    """Write a normalised squared error; 0 stands for the rounding of float32 sums, too."""
    return "0" if value < 1e-12 else f"{value:.3f}" if value >= 0.01 else f"{value:.1e}"


def size(value: float | None) -> str:
    """Write bytes in decimal units, as networks count them."""
    return NONE if value is None else _scaled(value, (" GB", 1e9), (" MB", 1e6), (" kB", 1e3), (" B", 1.0))


def write_rate(bits: float) -> str:
    """Write a bandwidth, as in ``10 Gbit/s``."""
    units = (" Tbit/s", 1e12), (" Gbit/s", 1e9), (" Mbit/s", 1e6), (" kbit/s", 1e3)
    return UNLIMITED if math.isinf(bits) else _scaled(bits, *units)


def write_count(value: float) -> str:
    """Write a number of parameters, as in ``350M``."""
    return _scaled(value, ("T", 1e12), ("B", 1e9), ("M", 1e6), ("k", 1e3), ("", 1.0))


def write_time(value: float) -> str:
    """Write a time given in seconds, as in ``250 ms``; milliseconds up to 10 s."""
    units = (" s", 1.0), (" ms", 1e-3), (" µs", 1e-6)
    return _scaled(value, *units[value < 10 :]) if value else "0"


def _scaled(value: float, *units: tuple[str, float]) -> str:
    """Write three digits in the largest unit that does not make the number less than 1."""
    name, factor = next((one for one in units if abs(value) >= 0.9995 * one[1]), units[-1])
    value /= factor
    return f"{value:,.0f}{name}" if abs(value) >= 99.95 else f"{value:.3g}{name}"


def counted(value: int, what: str) -> str:
    """Write a count with its noun: ``1 seed``, ``3 seeds``."""
    return f"{value:,} {what}{'s' if value != 1 else ''}"


def listed(words: Sequence[str]) -> str:
    """Join words: ``a, b and c``."""
    return " and ".join(part for part in (", ".join(words[:-1]), *words[-1:]) if part)
