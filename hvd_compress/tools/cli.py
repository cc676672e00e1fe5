"""The command ``hvd-compress``: each subcommand is in the folder of its name beside this file."""

from __future__ import annotations

import importlib
import sys
from types import ModuleType

from hvd_compress.errors import MissingPackageError


def main() -> None:
    """Run the command, or say what to install for it."""
    try:
        commands = complete()
    except MissingPackageError as error:
        sys.exit(f"hvd-compress: {error}")  # status 1
    commands.app(prog_name="hvd-compress")


def complete() -> ModuleType:
    """Put all commands together; the module that is given has them as ``app``.

    Raises:
        MissingPackageError: If rich or typer is not installed.
    """
    for package in ("rich", "typer"):
        try:
            importlib.import_module(package)
        except ImportError as error:
            raise MissingPackageError(
                f"the command needs rich and typer ({error}); install them with: pip install 'hvd-compress[bench]'"
            ) from error
    from hvd_compress.tools.bench import commands
    from hvd_compress.tools.bench.local.command import (
        bench,  # that of hvd_compress.tools.bench.distributed, with more commands
    )

    commands.app.add_typer(bench, name="bench")
    for package in ("doctor", "compare", "plan"):  # each adds its commands to the same app
        importlib.import_module(f"hvd_compress.tools.{package}.command")
    return commands
