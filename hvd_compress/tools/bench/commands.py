"""The subcommands of ``hvd-compress``."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated, Any, Optional

import typer
from rich.console import Console
from rich.markdown import Markdown
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

from hvd_compress.errors import CompressionError, SpecError
from hvd_compress.methods import methods
from hvd_compress.tools.bench import page, tables
from hvd_compress.tools.bench.catalogue import info, section
from hvd_compress.tools.bench.inputs import INPUTS
from hvd_compress.tools.bench.traffic import cost
from hvd_compress.tools.bench.vnmse import default_specs, measure_all

app = typer.Typer(help="Gradient compression for Horovod.", no_args_is_help=True, add_completion=False)


@app.command("methods")
def list_methods(
    name: Annotated[Optional[str], typer.Argument(help="Tell all about one method.")] = None,  # noqa: UP045
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
) -> None:
    """List the methods that there are."""
    with refusals():
        lines = [info(name)] if name else methods()
        if as_json:
            facts = [line._asdict() | cost(line.name)._asdict() for line in lines]
            print(json.dumps(facts[0] if name else facts, indent=2))
        elif name:
            Console().print(Markdown(section(name)))
        else:
            Console().print(tables.methods_table(lines))


@app.command()
def vnmse(
    specs: Annotated[
        Optional[str],  # noqa: UP045
        typer.Option(help="What to measure, as in: topk:ratio=0.01,values=fp16,int8"),
    ] = None,
    inputs: Annotated[str, typer.Option(help="Gradients to measure on.")] = ",".join(INPUTS),
    size: Annotated[int, typer.Option(min=1, help="Coordinates of the synthetic inputs.")] = 1_000_000,
    ranks: Annotated[int, typer.Option(min=1, help="How many gradients there are in the mean.")] = 4,
    steps: Annotated[int, typer.Option(min=0, help="Exchanges before, for methods that learn from them.")] = 8,
    as_json: Annotated[
        Optional[Path],  # noqa: UP045
        typer.Option("--json", metavar="FILE", help="Also write the results to this file."),
    ] = None,
    markdown: Annotated[
        Optional[Path],  # noqa: UP045
        typer.Option(metavar="FILE", help="Also write the table to this file."),
    ] = None,
) -> None:
    """Measure the error of the mean: vNMSE = ||mean_hat - mean||^2 / ||mean||^2, at how many bits."""
    with refusals():
        chosen = default_specs() if specs is None else split_specs(specs)
        wanted = [name.strip() for name in inputs.split(",")]
        measured = measured_visibly(chosen, wanted, size=size, ranks=ranks, steps=steps)
        if as_json:
            as_json.write_text(json.dumps(measured, indent=1) + "\n")
        if markdown:
            markdown.write_text(page.vnmse_section(measured, command_of(measured, specs)))
        console = Console()
        console.print(tables.vnmse_table(measured))
        for note in page.notes(measured):
            console.print(f"[dim]{note}[/dim]", highlight=False)


@app.command(hidden=True)
def docs(
    output: Annotated[Path, typer.Option(metavar="FILE", help="The page to write.")] = Path("docs/methods.md"),
    results: Annotated[
        Optional[Path],  # noqa: UP045
        typer.Option("--vnmse", metavar="FILE", help="Results of `vnmse --json`; without them, measure now."),
    ] = None,
) -> None:
    """Write docs/methods.md; accuracies come from accuracy.json beside it, if it is there."""
    with refusals():
        if results:
            measured = page.read_json(results, ("ranks", "steps", "sizes", "results"))
        else:
            measured = measured_visibly(default_specs(), list(INPUTS))
        found = output.parent / "accuracy.json"
        accuracy = page.read_json(found, page.ACCURACY) if found.exists() else []
        output.parent.mkdir(parents=True, exist_ok=True)
        output.write_text(page.page(measured, command_of(measured, None), accuracy))


@contextmanager
def refusals() -> Iterator[None]:
    """Say what is wrong in one line: status 2 for what was asked for, 1 for what is missing here."""
    try:
        yield
    except (CompressionError, OSError) as error:
        typer.echo(f"hvd-compress: {error}", err=True)
        raise typer.Exit(2 if isinstance(error, SpecError) else 1) from None


def split_specs(text: str) -> list[str]:
    """Read specs apart by commas; what has no name of its own (``key=value``) belongs to the spec before."""
    specs: list[str] = []
    for item in text.split(","):
        if specs and ":" in specs[-1] and "=" in item and ":" not in item:
            specs[-1] += f",{item.strip()}"
        else:
            specs.append(item.strip())
    return specs


def measured_visibly(specs: Sequence[str], inputs: Sequence[str], **settings: int) -> dict[str, Any]:
    """Measure under a progress bar, if there is a terminal for it."""
    console = Console(stderr=True)
    columns = (BarColumn(), MofNCompleteColumn(), TimeElapsedColumn(), TextColumn("{task.description}"))
    with Progress(*columns, console=console, transient=True, disable=not console.is_terminal) as bars:
        task = bars.add_task("", total=len(inputs) * (len(specs) + 1))
        begun = False

        def progress(what: str) -> None:
            nonlocal begun
            bars.update(task, description=what, advance=int(begun))
            begun = True

        return measure_all(specs, inputs, progress=progress, **settings)


def command_of(measured: dict[str, Any], specs: str | None) -> str:
    """The command that gives these results."""
    sizes = {size for name, size in measured["sizes"].items() if name != "digits"}
    options = [f"--specs '{specs}'"] if specs else []
    options += [f"--inputs {','.join(measured['sizes'])}", *(f"--size {size}" for size in sizes)]
    return " ".join(["hvd-compress vnmse", *options, f"--ranks {measured['ranks']}", f"--steps {measured['steps']}"])
