"""Compression methods, one file per method or family.

All modules of this package are imported, so a new method takes one file with a `register` in it. A method outside of
the package is known once its module is imported. Modules listed in the environment variable ``HVD_COMPRESS_METHODS``,
separated by commas, are imported with this package, so that the command and its processes know them too.
"""

from __future__ import annotations

import os
from dataclasses import fields
from importlib import import_module
from pkgutil import iter_modules
from typing import Any, NamedTuple

from hvd_compress.core.method import REGISTRY, register

__all__ = ["REGISTRY", "MethodInfo", "methods", "register"]


class MethodInfo(NamedTuple):
    """Description of a method.

    Attributes:
        name: Name in spec strings.
        collective: Collectives of one step.
        state: State between steps, besides the residual.
        unbiased: ``"yes"``, ``"exact"``, ``"no"``, or the parameters that make it unbiased; without error feedback.
        feedback: Whether error feedback (a residual of the gradient's size) is on by default.
        hyper_parameters: Names and defaults.
        paper: Source.
    """

    name: str
    collective: str
    state: str
    unbiased: str
    feedback: bool
    hyper_parameters: dict[str, Any]
    paper: str


def methods() -> list[MethodInfo]:
    """Return a description of each registered method."""
    return [
        MethodInfo(
            cls.name,
            cls.card.collective,
            cls.card.keeps,
            cls.card.unbiased,
            cls.feedback,
            {field.name: field.default for field in fields(cls)},  # type: ignore[arg-type]
            cls.card.paper,
        )
        for cls in REGISTRY.values()
    ]


for _module in iter_modules(__path__, f"{__name__}."):
    import_module(_module.name)
for _name in filter(None, os.environ.get("HVD_COMPRESS_METHODS", "").split(",")):
    import_module(_name.strip())
