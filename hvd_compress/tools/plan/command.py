"""The subcommands ``hvd-compress plan`` and ``hvd-compress plan validate``.

They are added to the app of `hvd_compress.tools.bench.commands`.
"""

from __future__ import annotations

import typer

from hvd_compress.tools.bench.commands import app
from hvd_compress.tools.plan.planning import plan
from hvd_compress.tools.plan.validating import validate

__all__ = ["app", "planning"]

planning = typer.Typer(invoke_without_command=True)
planning.callback()(plan)
planning.command()(validate)
app.add_typer(planning, name="plan")
