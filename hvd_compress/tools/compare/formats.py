"""Figures as text."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from hvd_compress.tools.compare.measures import Spread

NONE = "-"
"""Where there is no figure."""


def figure(value: float) -> str:
    """A target or a learning rate, as people write it."""
    return f"{value:,.0f}" if 9999.5 <= abs(value) < 1e9 else f"{value:.4g}"


def metric(value: float) -> str:
    """What was measured, in four digits."""
    return f"{value:,.0f}" if 999.95 <= abs(value) < 1e9 else f"{value:#.4g}"


def seconds(value: float) -> str:
    """Without the unit, in about three digits."""
    return f"{value:,.0f}" if value >= 99.95 else f"{value:#.3g}"


def times(value: float) -> str:
    """A ratio: the closer to 1, the more digits."""
    return f"{value:,.{2 if value < 1.995 else 1 if value < 9.95 else 0}f}"


def error(value: float) -> str:
    """An error of compressed sums."""
    return "0" if value < 1e-12 else f"{value:.3f}" if value >= 0.01 else f"{value:.1e}"


def span(found: Spread, form: Callable[[float], str], between: str = " to ") -> str:
    """From where to where; empty if that is one figure."""
    low, high = form(found.low), form(found.high)
    return f"{low}{between}{high}" if low != high else ""


def with_span(found: Spread, form: Callable[[float], str]) -> str:
    """A median and its span, as in ``4.8 (4.5 to 5.1)``."""
    reaches = span(found, form)
    return form(found.median) + (f" ({reaches})" if reaches else "")


def count(number: int, what: str) -> str:
    """As in ``1 seed`` and ``3 seeds``."""
    return f"{number} {what}{'s' if number != 1 else ''}"


def named(spec: str) -> str:
    """A method in a sentence, where ``none`` could be read as the word."""
    return "none (no compression)" if spec == "none" else spec


def listed(words: Sequence[str]) -> str:
    """As in ``a, b and c``."""
    return " and ".join(part for part in (", ".join(words[:-1]), *words[-1:]) if part)
