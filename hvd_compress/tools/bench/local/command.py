"""The subcommands ``hvd-compress bench kernels``, ``bench graph`` and ``bench methods``."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Annotated, Any, TypeVar

import typer
from rich.console import Console
from rich.markup import escape
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

from hvd_compress.tools.bench.bars import Bar, draw
from hvd_compress.tools.bench.commands import refusals
from hvd_compress.tools.bench.distributed.command import ToJson, ToPlot, bench
from hvd_compress.tools.bench.distributed.table import Grid
from hvd_compress.tools.bench.local import graph as graph_
from hvd_compress.tools.bench.local import kernels as kernels_
from hvd_compress.tools.bench.local import methods as methods_
from hvd_compress.tools.bench.machine import Machine
from hvd_compress.tools.units import number

__all__ = ["bench"]

L = TypeVar("L")

Size = Annotated[int, typer.Option(min=1024, help="Coordinates of the gradient.")]
Turns = Annotated[int, typer.Option(min=1, help="Measured turns of each.")]

_AXIS = "plain copies of the array"


@bench.command()
def kernels(size: Size = 25_000_000, turns: Turns = 7, as_json: ToJson = None, plot: ToPlot = None) -> None:
    """Measure the kernels for CPUs, in plain copies of the same array; torch.topk is timed beside them."""
    with refusals():
        lines = _visibly(len(kernels_.names()), lambda watch: kernels_.measure(size, turns, watch))
        title = f"Kernels, {size:,} float32, one thread"
        rows = [
            (line.name, number(line.ms, 2), number(line.ratio, 2), number(line.gb_per_s), _times(line.faster))
            for line in lines
        ]
        heads = ("Kernel", "ms", "Copies", "GB/s", "Faster than\ntorch.topk")
        ours = [
            line for line in lines if not line.name.startswith("torch.")
        ]  # whose bar would leave no room for others
        bars = [Bar(line.name, line.ratio, f"{number(line.ratio, 2)}x  {number(line.ms)} ms") for line in ours]
        settings = {"size": size, "turns": turns}
        _show(Grid(title, heads, rows), title, settings, [line._asdict() for line in lines], bars, as_json, plot)


@bench.command()
def graph(size: Size = 25_000_000, turns: Turns = 5, as_json: ToJson = None, plot: ToPlot = None) -> None:
    """Measure ways to do the same in a graph of TensorFlow: calling kernels, compiled by XLA, as plain operations."""
    with refusals():
        lines = _visibly(len(graph_.NAMES), lambda watch: graph_.measure(size, turns, watch))
        title = f"In a graph of TensorFlow, {size:,} float32, one thread, in plain copies"
        ways = ("kernel", "xla", "plain")
        rows = [(line.name, *(number(getattr(line, way), 2) for way in ways)) for line in lines]
        bars = [
            Bar(f"{line.name}: {way}", getattr(line, way), f"{number(getattr(line, way), 2)}x")
            for line in lines
            for way in ways
        ]
        table = Grid(title, ("Primitive", "Kernel", "XLA", "Plain"), rows)
        settings = {"size": size, "turns": turns}
        _show(table, title, settings, [line._asdict() for line in lines], bars, as_json, plot)


@bench.command()
def methods(
    specs: Annotated[list[str], typer.Argument(metavar="SPEC...", help="Methods, as topk:ratio=0.01.")],
    size: Size = 25_000_000,
    ranks: Annotated[int, typer.Option(min=1, help="Whose payloads are decoded.")] = 2,
    turns: Turns = 5,
    as_json: ToJson = None,
    plot: ToPlot = None,
) -> None:
    """Measure whole methods in this process: compressing with feedback, and decompressing, without any network."""
    with refusals():
        lines = _visibly(len(specs), lambda watch: methods_.measure(specs, size, ranks, turns, watch))
        title = f"Methods, {size:,} float32, {ranks} ranks, one thread each"
        rows = [
            (
                line.spec,
                *(number(value, 2) for value in (line.encode_ms, line.encode, line.decode_ms, line.decode)),
                number(line.bits, 3),
                f"{line.vnmse:.3g}",
            )
            for line in lines
        ]
        heads = ("Method", "Encode\nms", "Copies", "Decode\nms", "Copies", "Bits", "vNMSE")
        bars = [
            Bar(line.spec, line.encode + line.decode, f"{number(line.encode_ms)} + {number(line.decode_ms)} ms")
            for line in lines
        ]
        settings = {"size": size, "ranks": ranks, "turns": turns}
        _show(Grid(title, heads, rows), title, settings, [line._asdict() for line in lines], bars, as_json, plot)


def _visibly(total: int, run: Callable[[Callable[[str], None]], list[L]]) -> list[L]:
    """Run under a progress bar, if there is a terminal for it."""
    console = Console(stderr=True)
    columns = (BarColumn(), MofNCompleteColumn(), TimeElapsedColumn(), TextColumn("{task.description}"))
    with Progress(*columns, console=console, transient=True, disable=not console.is_terminal) as progress:
        bar, begun = progress.add_task("starting", total=total), 0

        def watch(name: str) -> None:
            nonlocal begun
            progress.update(bar, completed=begun, description=escape(name))
            begun += 1

        return run(watch)


def _show(
    table: Grid,
    title: str,
    settings: dict[str, int],
    results: Sequence[dict[str, Any]],
    bars: Sequence[Bar],
    as_json: Path | None,
    plot: Path | None,
) -> None:
    machine, console = Machine.here(), Console()
    if as_json:
        facts = {"title": title, "machine": machine._asdict(), "settings": settings, "results": list(results)}
        as_json.write_text(json.dumps(facts, indent=1) + "\n")
    if plot:
        draw(plot, bars, title=f"{title}\n{machine.cpu}", axis=_AXIS)
    console.print(table)
    console.print(f"[dim]{escape(str(machine))}[/dim]", highlight=False)


def _times(value: float | None) -> str:
    return "-" if value is None else f"{number(value)}x"
