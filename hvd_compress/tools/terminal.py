"""The app of all commands and what they share: options, refusals, progress, and how results are shown and written."""

from __future__ import annotations

import itertools
import json
import signal
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.markup import escape
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

from hvd_compress.errors import CompressionError, SpecError

app = typer.Typer(help="Gradient compression for Horovod.", no_args_is_help=True, add_completion=False)

ToJson = Annotated[Path | None, typer.Option("--json", metavar="FILE", help="Write the results.")]
ToPlot = Annotated[Path | None, typer.Option(metavar="FILE.png", help="Draw the results.")]


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
    """Show what is being done; yields a function to call with the name of each part."""
    with Console(stderr=True).status(f"{what} ...") as shown:
        yield lambda part: shown.update(f"{what}: {escape(part)} ...")


def say(text: object, style: str = "") -> None:
    """Print text as it is."""
    Console().print(escape(str(text)), highlight=False, style=style)


def note(text: object) -> None:
    """Print text that explains a result, such as the machine it was measured on."""
    say(text, "dim")


def write_json(path: Path | None, facts: Any) -> None:
    """Write results to a file, if one was asked for."""
    if path:
        path.write_text(json.dumps(facts, indent=1) + "\n")
