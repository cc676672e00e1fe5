"""The command ``hvd-compress``: each subcommand is in the folder of its name beside this file."""

from __future__ import annotations

import importlib
from types import ModuleType

_COMMANDS = ("methods.command", "bench.local.command", "doctor.command", "compare.command", "advise.command")
"""The modules that add commands to the app."""


def main() -> None:
    """Run the command."""
    complete().app(prog_name="hvd-compress")


def complete() -> ModuleType:
    """Load all commands, and return the module whose ``app`` has them."""
    for name in _COMMANDS:
        importlib.import_module(f"hvd_compress.tools.{name}")
    return importlib.import_module("hvd_compress.tools.terminal")
