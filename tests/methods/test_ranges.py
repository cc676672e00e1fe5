"""A hyper-parameter accepts the whole range that its error message states, and nothing outside of it."""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Iterator
from functools import partial
from typing import Any

import pytest

from hvd_compress.errors import SpecError
from hvd_compress.methods import REGISTRY
from hvd_compress.methods.topk import TopK
from hvd_compress.methods.wrappers.error_feedback import ErrorFeedback
from hvd_compress.methods.wrappers.momentum import Momentum, MomentumCorrection
from hvd_compress.methods.wrappers.router import Selective

KINDS: dict[str, Any] = REGISTRY | {
    kind.__name__: partial(kind, TopK()) for kind in (ErrorFeedback, MomentumCorrection, Momentum, Selective)
}
INTERVAL = re.compile(r"in ([\[(])([\d.]+), ([\d.]+)([\])])")
WHOLE = re.compile(r"in (\d+) \.\. 2\*\*(\d+)-1")
LIST = re.compile(r"\d+(, \d+)* or \d+")
TINY = 1e-9


def numbers() -> Iterator[tuple[str, str]]:
    """Yield the numeric hyper-parameters of methods and wrappers, none of which accepts -1."""
    for name, kind in KINDS.items():
        for field in dataclasses.fields(getattr(kind, "func", kind)):
            if type(field.default) in (int, float):
                yield name, field.name


def message(name: str, field: str, value: float) -> str:
    """Return the error message for a value, or an empty string if it is accepted."""
    try:
        KINDS[name](**{field: value})
    except SpecError as error:
        return str(error)
    return ""


def ends(allowed: str) -> tuple[list[float], list[float]]:
    """Return the ends of the range that a message states, and the values just outside of it."""
    if found := INTERVAL.match(allowed):
        low, high = float(found[2]), float(found[3])
        within = [low if found[1] == "[" else low + TINY, high if found[4] == "]" else high - TINY]
        return within, [low - TINY if found[1] == "[" else low, high + TINY if found[4] == "]" else high]
    if found := WHOLE.match(allowed):
        return [int(found[1]), 2 ** int(found[2]) - 1], [int(found[1]) - 1, 2 ** int(found[2])]
    if found := re.search(r"in (\d+) \.\. (\d+)", allowed):
        least, most = int(found[1]), int(found[2])
        return ([least, most, 0], [-1, most + 1]) if ", or 0" in allowed else ([least, most], [least - 1, most + 1])
    if found := re.match(r"(\d+) to (\d+)", allowed):
        return [int(found[1]), int(found[2])], [int(found[1]) - 1, int(found[2]) + 1]
    if LIST.match(allowed):
        listed = [int(one) for one in re.findall(r"\d+", allowed)]
        return list(listed), [one for end in listed for one in (end - 1, end + 1) if one not in listed]
    if found := re.match(r"above (\d+)", allowed):
        return [int(found[1]) + TINY], [int(found[1])]
    lowest = re.findall(r"at least (\d+)", allowed)
    assert lowest, f"no rule for {allowed!r}"
    if re.search(r"\b0\b", allowed) and int(lowest[0]) > 0:
        return [int(lowest[0]), 0], [-1]
    return [int(lowest[0])], [int(lowest[0]) - 1]


@pytest.mark.parametrize(("name", "field"), numbers())
def test_what_is_allowed_is_what_the_message_says(name: str, field: str) -> None:
    _, _, allowed = message(name, field, -1).partition(f"{field} must be ")
    within, beyond = ends(allowed)
    assert not [said for value in within if (said := message(name, field, value))]
    assert all(message(name, field, value).endswith(allowed) for value in beyond)
