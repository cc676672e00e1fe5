"""The command ``hvd-compress``: each subcommand is in the folder of its name beside this file."""

from __future__ import annotations

import importlib
import sys
from types import ModuleType

from hvd_compress.errors import MissingPackageError

_COMMANDS = ("bench.commands", "bench.local.command", "doctor.command", "compare.command", "plan.command")
"""The modules that add commands to the app."""


def main() -> None:
    """Run the command, or say what to install for it."""
    try:
        commands = complete()
    except MissingPackageError as error:
        sys.exit(f"hvd-compress: {error}")  # status 1
    commands.app(prog_name="hvd-compress")


def complete() -> ModuleType:
    """Load all commands, and return the module whose ``app`` has them.

    Raises:
        MissingPackageError: If rich or typer is not installed.
    """
    for package in ("rich", "typer"):
        try:
            importlib.import_module(package)
        except ImportError as error:
            raise MissingPackageError(
                f"the command needs rich and typer ({error}); install them, in the clone of this package,"
                " with: pip install '.[bench]'"
            ) from error
    for name in _COMMANDS:
        importlib.import_module(f"hvd_compress.tools.{name}")
    return importlib.import_module("hvd_compress.tools.terminal")
