"""Write docs/methods.md, or measure the errors of other specs.

The page is made of the docstrings, of measurements, and of ``accuracy.json`` and ``adamw.json`` beside it::

    python tools/methods_page page
    python tools/methods_page vnmse --specs topk:ratio=0.05,thc --inputs gaussian
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Any

import typer

ROOT = Path(__file__).resolve().parents[2]
sys.path[:0] = [str(ROOT), str(ROOT / "tools")]

from hvd_compress.tools.terminal import ToJson, progress, refusals, split_specs, writable, write_json  # noqa: E402
from methods_page import adamw, page  # noqa: E402
from methods_page.inputs import INPUTS  # noqa: E402
from methods_page.vnmse import default_specs, measure_all  # noqa: E402

app = typer.Typer(help=__doc__, rich_markup_mode=None)


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
) -> None:
    """Measure the error of compressed means (vNMSE), and print the section of the page."""
    with refusals():
        chosen = default_specs() if specs is None else split_specs(specs)
        wanted = [name.strip() for name in inputs.split(",")]
        measured = _measured(chosen, wanted, size=size, ranks=ranks, steps=steps)
        write_json(as_json, measured)
        typer.echo(page.vnmse_section(measured, _command_of(measured, specs)))


@app.command("page")
def write_page(
    output: Annotated[Path, typer.Option(metavar="FILE", callback=writable, help="The page to write.")] = (
        ROOT / "docs" / "methods.md"
    ),
    results: Annotated[
        Path | None,
        typer.Option("--vnmse", metavar="FILE", help="Results of `vnmse --json`; without them, measure now."),
    ] = None,
) -> None:
    """Write docs/methods.md."""
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
    options += [f"--ranks {measured['ranks']}", f"--steps {measured['steps']}"]
    return " ".join(["python tools/methods_page vnmse", *options])


if __name__ == "__main__":
    app()
