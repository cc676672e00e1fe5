"""The tasks: those of this package, by name, and those of the user, as ``file.py:function`` or ``module:function``."""

from __future__ import annotations

import functools
import importlib
from collections.abc import Callable
from typing import Any

from hvd_compress.core.method import check_range
from hvd_compress.engine.spec import unknown
from hvd_compress.errors import SpecError, required
from hvd_compress.lab import Setting, Training
from hvd_compress.tools.own_code import own_function

Builder = Callable[[Setting], Training]

TASKS = {
    "digits": "a small CNN on scikit-learn's handwritten digits, 8x8",
    "fashion": "a CNN of 3.2 million parameters on Fashion-MNIST (options batch, test)",
    "lm": "a word-level LSTM on the text --data FILE, in PyTorch only (options vocabulary, hidden, dropout, batch,"
    " words, test)",
    "transformer": "a byte-level transformer with AdamW on Python's own sources, or --data FILE, in PyTorch only"
    " (options layers, width, heads, context, batch, steps, every, test, beta1, beta2, decay)",
}
"""The tasks that this package has, with a line of description each."""

_PLACES = {
    "torch": {
        "digits": "torch_tasks:digits",
        "fashion": "torch_tasks:fashion",
        "lm": "torch_lm:lm",
        "transformer": "torch_transformer:transformer",
    },
    "keras": {"digits": "keras_tasks:digits", "fashion": "keras_tasks:fashion"},
}
"""Modules and functions of the tasks of this package, by framework."""

_PLACES["ddp"] = _PLACES["torch"]

_EXTRAS = {"torch": "torch", "keras": "tensorflow", "ddp": "torch"}


def find(name: str, framework: str) -> Builder:
    """Find the builder of a task. This loads the framework.

    Args:
        name: One of `TASKS`, or ``file.py:function``, or ``module:function``; the module is looked for in the working
            directory first.
        framework: ``"torch"``, ``"keras"`` or ``"ddp"``.

    Raises:
        SpecError: If there is no such task, or none in this framework.
        MissingPackageError: If the framework is not installed.
    """
    check_range("framework", framework, f"one of {', '.join(_PLACES)}", framework in _PLACES)
    if ":" in name:
        return _of_user(name)
    if name not in TASKS:
        raise SpecError(f"{unknown('task', name, TASKS)}; one of your own is file.py:function")
    if name not in _PLACES[framework]:
        there = " and ".join(other for other in _PLACES if name in _PLACES[other])
        raise SpecError(f"the task {name!r} is not there in {framework}, but in {there}")
    module, function = _PLACES[framework][name].split(":")
    with required(f"the task {name!r}", framework, _EXTRAS[framework]):
        return _function(importlib.import_module(f"{__name__}.{module}"), function)


def _of_user(name: str) -> Builder:
    return functools.partial(_checked, name, own_function("task", name))


def _function(module: Any, name: str) -> Builder:
    found: Builder = getattr(module, name)
    return found


def _checked(name: str, builder: Builder, setting: Setting) -> Training:
    made: Any = builder(setting)
    if not isinstance(made, Training):
        raise SpecError(
            f"the task {name!r} gives {type(made).__name__}; it must give a hvd_compress.lab.Training of what it is to"
            " train"
        )
    return made
