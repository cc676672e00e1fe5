"""The subcommands ``hvd-compress bench kernels``, ``bench graph`` and ``bench methods``."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Annotated, Any, TypeVar

import typer

from hvd_compress.tools.bench.bars import Bar, draw
from hvd_compress.tools.bench.distributed.command import bench
from hvd_compress.tools.bench.local import graph as graph_
from hvd_compress.tools.bench.local import kernels as kernels_
from hvd_compress.tools.bench.local import methods as methods_
from hvd_compress.tools.bench.machine import Machine
from hvd_compress.tools.tables import Grid
from hvd_compress.tools.terminal import ToJson, ToPlot, note, progress, refusals, screen, write_json
from hvd_compress.tools.units import NONE, number

__all__ = ["bench"]

L = TypeVar("L", bound=Any)

Size = Annotated[int, typer.Option(min=1024, help="Coordinates of the gradient.")]
Turns = Annotated[int, typer.Option(min=1, help="Measured turns of each.")]


@bench.command()
def kernels(size: Size = 25_000_000, turns: Turns = 7, as_json: ToJson = None, plot: ToPlot = None) -> None:
    """Measure the CPU kernels.

    Times are also given in plain copies of the same array, and compared with torch.topk.
    """
    with refusals():
        lines = _measured(kernels_.names(), lambda begins: kernels_.measure(size, turns, begins))
        rows = [
            (line.name, number(line.ms, 2), number(line.ratio, 2), number(line.gb_per_s), _times(line.faster))
            for line in lines
        ]
        heads = ("Kernel", "ms", "Copies", "GB/s", "Faster than\ntorch.topk")
        # The bar of torch.topk would leave no room for the others.
        ours = [line for line in lines if not line.name.startswith("torch.")]
        bars = [Bar(line.name, line.ratio, f"{number(line.ratio, 2)}x  {number(line.ms)} ms") for line in ours]
        table = Grid(f"Kernels, {size:,} float32, one thread", heads, rows)
        _show(table, {"size": size, "turns": turns}, lines, bars, as_json, plot)


@bench.command()
def graph(size: Size = 25_000_000, turns: Turns = 5, as_json: ToJson = None, plot: ToPlot = None) -> None:
    """Measure primitives in a TensorFlow graph.

    Each is measured in three ways: as a call of our kernel, compiled by XLA, and as plain operations.
    """
    with refusals():
        lines = _measured(graph_.NAMES, lambda begins: graph_.measure(size, turns, begins))
        ways = ("kernel", "xla", "plain")
        rows = [(line.name, *(number(getattr(line, way), 2) for way in ways)) for line in lines]
        bars = [
            Bar(f"{line.name}: {way}", getattr(line, way), f"{number(getattr(line, way), 2)}x")
            for line in lines
            for way in ways
        ]
        title = f"In a graph of TensorFlow, {size:,} float32, one thread, in plain copies"
        table = Grid(title, ("Primitive", "Kernel", "XLA", "Plain"), rows)
        _show(table, {"size": size, "turns": turns}, lines, bars, as_json, plot)


@bench.command()
def methods(
    specs: Annotated[list[str], typer.Argument(metavar="SPEC...", help="Methods, as topk:ratio=0.01.")],
    size: Size = 25_000_000,
    ranks: Annotated[int, typer.Option(min=1, help="Ranks whose payloads are decoded.")] = 2,
    turns: Turns = 5,
    as_json: ToJson = None,
    plot: ToPlot = None,
) -> None:
    """Measure compression and decompression in one process.

    Compression includes error feedback. No network is used.
    """
    with refusals():
        lines = _measured(specs, lambda begins: methods_.measure(specs, size, ranks, turns, begins))
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
        table = Grid(f"Methods, {size:,} float32, {ranks} ranks, one thread each", heads, rows)
        _show(table, {"size": size, "ranks": ranks, "turns": turns}, lines, bars, as_json, plot)


def _measured(names: Sequence[str], run: Callable[[Callable[[str], None]], list[L]]) -> list[L]:
    with progress(len(names)) as begins:
        return run(begins)


def _show(
    table: Grid,
    settings: dict[str, int],
    lines: Sequence[Any],
    bars: Sequence[Bar],
    as_json: Path | None,
    plot: Path | None,
) -> None:
    machine, results = Machine.here(), [line._asdict() for line in lines]
    facts = {"title": table.title, "machine": machine._asdict(), "settings": settings, "results": results}
    write_json(as_json, facts)
    if plot:
        draw(plot, bars, title=f"{table.title}\n{machine.cpu}", axis="plain copies of the array")
    screen().print(table)
    note(machine)


def _times(value: float | None) -> str:
    return NONE if value is None else f"{number(value)}x"
