"""The subcommands ``methods``, ``vnmse`` and ``docs``."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.markdown import Markdown

from hvd_compress.methods import methods
from hvd_compress.tools.bench import adamw, page, tables
from hvd_compress.tools.bench.catalogue import info, section
from hvd_compress.tools.bench.inputs import INPUTS
from hvd_compress.tools.bench.traffic import cost
from hvd_compress.tools.bench.vnmse import default_specs, measure_all
from hvd_compress.tools.terminal import ToJson, app, progress, refusals, screen, split_specs, writable, write_json

_READABLE = 120
"""Columns of running text, at most."""


@app.command("methods")
def list_methods(
    name: Annotated[str | None, typer.Argument(help="A method, to see its parameters and properties.")] = None,
    as_json: ToJson = None,
) -> None:
    """List the methods, or describe one."""
    with refusals():
        lines = [info(name)] if name else methods()
        if as_json:
            facts = [line._asdict() | cost(line.name)._asdict() for line in lines]
            write_json(as_json, facts[0] if name else facts)
        if name:
            screen().print(Markdown(section(name)), width=min(screen().width, _READABLE))
        else:
            screen().print(tables.methods_table(lines), width=min(screen().width, _READABLE))


@app.command()
def vnmse(
    specs: Annotated[
        str | None, typer.Option(help="Methods, such as topk:ratio=0.01,values=fp16,int8; by default all.")
    ] = None,
    inputs: Annotated[str, typer.Option(help="Gradients to measure on, separated by commas.")] = ",".join(INPUTS),
    size: Annotated[int, typer.Option(min=1, help="Coordinates of the synthetic inputs.")] = 1_000_000,
    ranks: Annotated[int, typer.Option(min=1, help="Ranks, each with its own gradient.")] = 4,
    steps: Annotated[
        int, typer.Option(min=0, help="Exchanges before the measured one, for methods that learn from them.")
    ] = 8,
    as_json: ToJson = None,
    markdown: Annotated[
        Path | None, typer.Option(metavar="FILE", callback=writable, help="Write the table as Markdown.")
    ] = None,
) -> None:
    """Measure the error of compressed means (vNMSE).

    vNMSE = ||mean_hat - mean||^2 / ||mean||^2, where mean_hat is the compressed mean of the ranks' gradients. The table
    also has the bits per coordinate that a rank passes to collectives. How often these travel depends on the number of
    ranks: see the bits of hvd-compress methods.
    """
    with refusals():
        chosen = default_specs() if specs is None else split_specs(specs)
        wanted = [name.strip() for name in inputs.split(",")]
        measured = _measured(chosen, wanted, size=size, ranks=ranks, steps=steps)
        write_json(as_json, measured)
        if markdown:
            markdown.write_text(page.vnmse_section(measured, _command_of(measured, specs)))
        console = screen()
        console.print(tables.vnmse_table(measured))
        for note in page.notes(measured):
            console.print(f"[dim]{note}[/dim]", highlight=False)


@app.command(hidden=True)
def docs(
    output: Annotated[Path, typer.Option(metavar="FILE", callback=writable, help="The page to write.")] = Path(
        "docs/methods.md"
    ),
    results: Annotated[
        Path | None,
        typer.Option("--vnmse", metavar="FILE", help="Results of `vnmse --json`; without them, measure now."),
    ] = None,
) -> None:
    """Write docs/methods.md; accuracies come from accuracy.json and adamw.json beside it, if they are there."""
    with refusals():
        if results:
            measured = page.read_json(results, ("ranks", "steps", "sizes", "results"))
        else:
            measured = _measured(default_specs(), list(INPUTS))
        accuracy = _beside(output, "accuracy.json", page.ACCURACY)
        with_adamw = _beside(output, "adamw.json", adamw.KEYS)
        output.write_text(page.page(measured, _command_of(measured, None), accuracy, with_adamw))


def _beside(output: Path, name: str, keys: Sequence[str]) -> list[dict[str, Any]]:
    """Read results beside the page, if they are there."""
    found = output.parent / name
    results: list[dict[str, Any]] = page.read_json(found, keys) if found.exists() else []
    return results


def _measured(specs: Sequence[str], inputs: Sequence[str], **settings: int) -> dict[str, Any]:
    with progress(len(inputs) * (len(specs) + 1)) as begins:
        return measure_all(specs, inputs, progress=begins, **settings)


def _command_of(measured: dict[str, Any], specs: str | None) -> str:
    """Return the command that gives these results."""
    sizes = {size for name, size in measured["sizes"].items() if name != "digits"}
    options = [f"--specs '{specs}'"] if specs else []
    options += [f"--inputs {','.join(measured['sizes'])}", *(f"--size {size}" for size in sizes)]
    return " ".join(["hvd-compress vnmse", *options, f"--ranks {measured['ranks']}", f"--steps {measured['steps']}"])
