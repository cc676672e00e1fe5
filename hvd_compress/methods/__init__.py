"""The catalogue: one file per method or family of methods."""

from __future__ import annotations

from dataclasses import fields
from typing import Any, NamedTuple

from hvd_compress.methods.base import Method
from hvd_compress.methods.cast import Dense, Half
from hvd_compress.methods.int8 import Int8
from hvd_compress.methods.powersgd import PowerSGD
from hvd_compress.methods.randomk import RandomK
from hvd_compress.methods.topk import TopK

REGISTRY: dict[str, type[Method]] = {cls.name: cls for cls in (Dense, Half, TopK, RandomK, Int8, PowerSGD)}


class MethodInfo(NamedTuple):
    """A line of the catalogue.

    Attributes:
        name: As in spec strings.
        collective: What it needs of Horovod in each step.
        state: What it keeps between steps, besides the residual.
        feedback: Whether error feedback (a residual of the gradient's size) is on by default.
        hyper_parameters: Names and defaults.
        paper: The source.
    """

    name: str
    collective: str
    state: str
    feedback: bool
    hyper_parameters: dict[str, Any]
    paper: str


def methods() -> list[MethodInfo]:
    """List the methods that there are."""
    return [
        MethodInfo(
            cls.name,
            cls.collective,
            cls.keeps,
            cls.feedback,
            {field.name: field.default for field in fields(cls)},  # type: ignore[arg-type]
            cls.paper,
        )
        for cls in REGISTRY.values()
    ]
