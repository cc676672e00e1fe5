"""The catalogue: one file per method or family of methods.

All modules of this package are imported, so a file with a `register` in it is all that a method takes. A method outside
of the package is known as soon as its module is imported; those that the environment variable ``HVD_COMPRESS_METHODS``
names, parted by commas, are imported with this package, so that the command and the processes that it starts know them.
"""

from __future__ import annotations

import os
from dataclasses import fields
from importlib import import_module
from pkgutil import iter_modules
from typing import Any, NamedTuple

from hvd_compress.methods.base import REGISTRY, register

__all__ = ["REGISTRY", "MethodInfo", "methods", "register"]


class MethodInfo(NamedTuple):
    """A line of the catalogue.

    Attributes:
        name: As in spec strings.
        collective: What it needs of Horovod in each step.
        state: What it keeps between steps, besides the residual.
        unbiased: ``"yes"``, ``"exact"``, ``"no"``, or with which parameters; error feedback aside.
        feedback: Whether error feedback (a residual of the gradient's size) is on by default.
        hyper_parameters: Names and defaults.
        paper: The source.
    """

    name: str
    collective: str
    state: str
    unbiased: str
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
            cls.unbiasedness,
            cls.feedback,
            {field.name: field.default for field in fields(cls)},  # type: ignore[arg-type]
            cls.paper,
        )
        for cls in REGISTRY.values()
    ]


for _module in iter_modules(__path__, f"{__name__}."):
    import_module(_module.name)
for _name in filter(None, os.environ.get("HVD_COMPRESS_METHODS", "").split(",")):
    import_module(_name.strip())
