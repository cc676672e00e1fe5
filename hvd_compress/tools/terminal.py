"""The app of all commands and what they share: options, refusals, progress, and how results are shown and written."""

from __future__ import annotations

import itertools
import json
import os
import signal
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from pathlib import Path
from typing import Annotated, Any, NoReturn

import typer
from rich.console import Console
from rich.markup import escape
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from typer.core import TyperGroup

from hvd_compress._version import __version__
from hvd_compress.errors import CompressionError, SpecError

STDOUT = Path("-")
"""The file name that stands for standard output."""

_json_to_stdout: ContextVar[bool] = ContextVar("json_on_stdout", default=False)
"""Whether JSON takes standard output, so that all else goes to standard error."""

_UNLIMITED = 1000
"""Columns of a file or a pipe."""


_UsageError: Any = typer.BadParameter.__base__  # typer does not export it


class _Commands(TyperGroup):
    """A group that reports wrong usage in one line, like every other error."""

    def main(self, *args: Any, **options: Any) -> NoReturn:
        """Run the command and exit."""
        _json_to_stdout.set(False)
        try:
            code = super().main(*args, **options | {"standalone_mode": False})
        except _UsageError as error:
            typer.echo(f"hvd-compress: {' '.join(error.format_message().split())}", err=True)
            sys.exit(2)
        except typer.Abort:
            sys.exit(130)
        sys.exit(code if isinstance(code, int) else 0)


app = typer.Typer(
    cls=_Commands,
    invoke_without_command=True,
    add_completion=False,
    rich_markup_mode=None,  # rich's boxes cut defaults at 80 columns
    pretty_exceptions_enable=False,
)


def _print_version(asked: bool) -> None:
    if asked:
        typer.echo(f"hvd-compress {__version__}")
        raise typer.Exit


def help_without_command(context: typer.Context) -> None:
    """Print the help of a group that is called without a subcommand."""
    if context.invoked_subcommand is None:
        typer.echo(context.get_help())


@app.callback()
def _app(
    context: typer.Context,
    version: Annotated[
        bool, typer.Option("--version", is_eager=True, callback=_print_version, help="Print the version.")
    ] = False,
) -> None:
    """Gradient compression for Horovod."""
    help_without_command(context)


def writable(path: Path | None) -> Path | None:
    """Return the path of an output file, which must be writable before the work begins."""
    if path is None:
        return None
    existed = path.exists()
    try:
        with path.open("ab"):
            pass
    except OSError as error:
        raise typer.BadParameter(f"cannot write {path} ({error.strerror}); name a file in an existing folder") from None
    if not existed:
        path.unlink(missing_ok=True)  # other ranks try it at the same time
    return path


def _json_file(path: Path | None) -> Path | None:
    if path != STDOUT:
        return writable(path)
    _json_to_stdout.set(True)
    return path


ToJson = Annotated[
    Path | None,
    typer.Option(
        "--json", metavar="FILE", callback=_json_file, help="Write the results as JSON; '-' is standard output."
    ),
]
ToPlot = Annotated[Path | None, typer.Option(metavar="FILE.png", callback=writable, help="Draw the results.")]


def screen() -> Console:
    """Return the console of the tables and sentences of a command.

    It is standard error if ``--json -`` takes standard output. Files and pipes get lines of any length, so that no
    cell is cut, unless COLUMNS is set.
    """
    console = Console(stderr=_json_to_stdout.get())
    if not console.is_terminal and not os.environ.get("COLUMNS", "").isdigit():
        console.width = _UNLIMITED
    return console


@contextmanager
def refusals() -> Iterator[None]:
    """Turn an error into one line and an exit status: 2 for a wrong request, 1 for what this machine lacks."""
    try:
        yield
    except (CompressionError, OSError) as error:
        typer.echo(f"hvd-compress: {error}", err=True)
        raise typer.Exit(2 if isinstance(error, SpecError) else 1) from None


def remove_jobs_on_sigterm() -> None:
    """Let SIGTERM end the command as Ctrl-C does, so that its hosts and ranks are removed."""
    signal.signal(signal.SIGTERM, signal.default_int_handler)


def split_specs(text: str) -> list[str]:
    """Split specs at commas; an item without a name of its own (``key=value``) belongs to the spec before."""
    specs: list[str] = []
    for item in text.split(","):
        if specs and ":" in specs[-1] and "=" in item and ":" not in item:
            specs[-1] += f",{item.strip()}"
        else:
            specs.append(item.strip())
    return specs


@contextmanager
def progress(total: int) -> Iterator[Callable[..., None]]:
    """Show a progress bar if there is a terminal.

    Yields:
        A function to call with the name of each part as it begins, and with how many are done if that is not the count
        of calls.
    """
    console, begun = Console(stderr=True), itertools.count()
    columns = (BarColumn(), MofNCompleteColumn(), TimeElapsedColumn(), TextColumn("{task.description}"))
    with Progress(*columns, console=console, transient=True, disable=not console.is_terminal) as bar:
        task = bar.add_task("starting", total=total)

        def begins(name: str, done: int | None = None) -> None:
            bar.update(task, completed=next(begun) if done is None else done, description=escape(name))

        yield begins


@contextmanager
def status(what: str) -> Iterator[Callable[[str], None]]:
    """Show the current activity; yields a function to call with the name of each part."""
    with Console(stderr=True).status(f"{what} ...") as shown:
        yield lambda part: shown.update(f"{what}: {escape(part)} ...")


def say(text: object, style: str = "") -> None:
    """Print text as it is."""
    screen().print(escape(str(text)), highlight=False, style=style)


def note(text: object) -> None:
    """Print text that explains a result, such as the machine it was measured on."""
    say(text, "dim")


def write_json(path: Path | None, facts: Any) -> None:
    """Write results to a file, or to standard output for ``-``, if either was asked for."""
    text = json.dumps(facts, indent=1)
    if path == STDOUT:
        typer.echo(text)
    elif path:
        path.write_text(f"{text}\n")
