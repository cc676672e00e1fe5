"""Spreads and methods in sentences."""

from __future__ import annotations

from collections.abc import Callable

from hvd_compress.tools.compare.measures import Spread


def span(found: Spread, form: Callable[[float], str], between: str = " to ") -> str:
    """Write the range over seeds; empty if it is a single figure."""
    low, high = form(found.low), form(found.high)
    return f"{low}{between}{high}" if low != high else ""


def with_span(found: Spread, form: Callable[[float], str]) -> str:
    """Write a median and its range, as in ``4.8 (4.5 to 5.1)``."""
    reaches = span(found, form)
    return form(found.median) + (f" ({reaches})" if reaches else "")


def named(spec: str) -> str:
    """Name a method in a sentence, where ``none`` could be read as the word."""
    return "none (no compression)" if spec == "none" else spec
