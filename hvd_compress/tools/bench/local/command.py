"""The subcommand ``hvd-compress bench methods``."""

from __future__ import annotations

from typing import Annotated

import typer

from hvd_compress.tools.bench.bars import Bar, draw
from hvd_compress.tools.bench.distributed.command import bench
from hvd_compress.tools.bench.local.methods import measure
from hvd_compress.tools.bench.machine import Machine
from hvd_compress.tools.tables import Grid
from hvd_compress.tools.terminal import ToJson, ToPlot, note, progress, refusals, screen, write_json
from hvd_compress.tools.units import number

__all__ = ["bench"]


@bench.command()
def methods(
    specs: Annotated[list[str], typer.Argument(metavar="SPEC...", help="Methods, as topk:ratio=0.01.")],
    size: Annotated[int, typer.Option(min=1024, help="Coordinates of the gradient.")] = 25_000_000,
    ranks: Annotated[int, typer.Option(min=1, help="Ranks whose payloads are decoded.")] = 2,
    turns: Annotated[int, typer.Option(min=1, help="Measured turns of each.")] = 5,
    as_json: ToJson = None,
    plot: ToPlot = None,
) -> None:
    """Measure compression and decompression in one process.

    Compression includes error feedback. No network is used.
    """
    with refusals():
        with progress(len(specs)) as begins:
            lines = measure(specs, size, ranks, turns, begins)
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
        machine = Machine.here()
        table = Grid(f"Methods, {size:,} float32, {ranks} ranks, one thread each", heads, rows)
        facts = {"title": table.title, "machine": machine._asdict(), "results": [line._asdict() for line in lines]}
        write_json(as_json, facts | {"settings": {"size": size, "ranks": ranks, "turns": turns}})
        if plot:
            bars = [
                Bar(line.spec, line.encode + line.decode, f"{number(line.encode_ms)} + {number(line.decode_ms)} ms")
                for line in lines
            ]
            draw(plot, bars, title=f"{table.title}\n{machine.cpu}", axis="plain copies of the array")
        screen().print(table)
        note(machine)
