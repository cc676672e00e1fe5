"""Functions of the user, as ``file.py:function`` or ``module:function``."""

from __future__ import annotations

import importlib
import os
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

from hvd_compress.engine.spec import nearest
from hvd_compress.errors import SpecError


def own_function(what: str, name: str) -> Callable[..., Any]:
    """Import a function of the user.

    Args:
        what: What it makes, for messages: ``"task"``.
        name: ``file.py:function`` or ``module:function``; the module is looked for in the working directory first.

    Raises:
        SpecError: If there is no such function.
    """
    place, _, function = name.rpartition(":")
    file = Path(place).resolve() if place.endswith(".py") else None
    module, folder = (file.stem, str(file.parent)) if file else (place, os.getcwd())
    if not all(part.isidentifier() for part in [*module.split("."), function]):
        raise SpecError(
            f"{what}={name!r} is not allowed: a {what} of your own is file.py:function or module:function, such as"
            f" my_{what}.py:build"
        )
    if file and not file.is_file():
        raise SpecError(f"the {what} {name!r} cannot be imported: there is no file {file}")
    if not {"", folder} & set(sys.path) or file:
        sys.path.insert(0, folder)  # as for `python -m` and `python FILE`; a console script does not have it
    try:
        imported = importlib.import_module(module)
    except ImportError as error:
        missing = isinstance(error, ModuleNotFoundError) and f"{module}.".startswith(f"{error.name}.")
        wrong = f"there is no module {error.name!r} in {folder} or on Python's path" if missing else f"{error}"
        raise SpecError(f"the {what} {name!r} cannot be imported: {wrong}") from error
    if file and imported.__file__ != str(file):
        raise SpecError(f"the {what} {name!r} cannot be imported: there is another module {module!r}; rename the file")
    known = [key for key, value in vars(imported).items() if callable(value) and not key.startswith("_")]
    if function not in known:
        raise SpecError(f"the module {module!r} has no function {function!r}{nearest(function, known)}")
    found: Callable[..., Any] = getattr(imported, function)
    return found
