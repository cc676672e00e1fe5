"""The subcommands ``hvd-compress bench steps`` and ``hvd-compress bench exchange``."""

from __future__ import annotations

import json
import signal
from collections.abc import Sequence
from enum import Enum
from pathlib import Path
from typing import Annotated, NamedTuple, Optional

import typer
from rich.console import Console
from rich.markup import escape
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

from hvd_compress.merging import Merge
from hvd_compress.tools.bench.bars import draw
from hvd_compress.tools.bench.commands import refusals
from hvd_compress.tools.bench.distributed import table
from hvd_compress.tools.bench.distributed.launcher import run
from hvd_compress.tools.bench.distributed.results import Result, as_json, baseline_name, results
from hvd_compress.tools.bench.distributed.shapes import SHAPES, count
from hvd_compress.tools.bench.distributed.task import Part, Task, entries
from hvd_compress.tools.bench.jobs import Where, read_where
from hvd_compress.tools.bench.machine import Machine
from hvd_compress.tools.cluster.rates import bits_per_second
from hvd_compress.tools.units import size

bench = typer.Typer(no_args_is_help=True)

_PROFILED = 10
"""Steps under the profiler."""


class Framework(str, Enum):
    """What trains."""

    torch = "torch"
    keras = "keras"


class Controller(str, Enum):
    """What Horovod communicates by."""

    gloo = "gloo"
    mpi = "mpi"


class Model(str, Enum):
    """Whose gradients are exchanged."""

    linear = "linear"
    resnet50 = "resnet50"
    many = "many"


class Rival(str, Enum):
    """What to compare with."""

    horovod = "horovod"


class Outputs(NamedTuple):
    """Where results go besides the terminal."""

    json: Path | None
    plot: Path | None


Specs = Annotated[list[str], typer.Argument(metavar="SPEC...", help="Methods, as topk:ratio=0.01.")]
Hosts = Annotated[int, typer.Option(min=0, help="Emulated hosts, of a rank each (needs root); 0: this machine.")]
Rate = Annotated[
    Optional[str],  # noqa: UP045
    typer.Option(help="What an emulated host can send and receive: 100mbit, 1gbit ...; with --hosts. [unlimited]"),
]
Ranks = Annotated[int, typer.Option(min=1, help="Ranks on this machine, without --hosts.")]
By = Annotated[Controller, typer.Option(help="What Horovod communicates by, without --hosts.")]
Steps = Annotated[int, typer.Option(min=1, help="Measured steps of each method.")]
Warmup = Annotated[int, typer.Option(min=1, help="Steps of each before.")]
Merging = Annotated[
    Optional[list[str]],  # noqa: UP045
    typer.Option(help="Partitions to compare, as layer,2,auto; by default the package's own. Can be repeated."),
]
Against = Annotated[
    Optional[Rival],  # noqa: UP045
    typer.Option(help="Also measure Horovod's own none and fp16: the faster one is the baseline."),
]
ToJson = Annotated[Optional[Path], typer.Option("--json", metavar="FILE", help="Write the results.")]  # noqa: UP045
ToPlot = Annotated[Optional[Path], typer.Option(metavar="FILE.png", help="Draw the results.")]  # noqa: UP045


@bench.callback()
def _begin() -> None:
    """Measure how fast it is."""
    signal.signal(signal.SIGTERM, signal.default_int_handler)  # so that hosts and ranks are removed after that, too


@bench.command()
def steps(
    specs: Specs,
    hosts: Hosts = 0,
    rate: Rate = None,
    ranks: Ranks = 2,
    controller: By = Controller.gloo,
    framework: Annotated[Framework, typer.Option(help="What trains.")] = Framework.torch,
    model: Annotated[Model, typer.Option(help="What is trained.")] = Model.linear,
    steps: Steps = 12,
    warmup: Warmup = 4,
    merge: Merging = None,
    against: Against = None,
    memory: Annotated[bool, typer.Option("--memory", help="Measure peak memory, and not time.")] = False,
    as_json: ToJson = None,
    plot: ToPlot = None,
) -> None:
    """Measure whole training steps under Horovod; the methods take turns in the same processes.

    linear has eight linear layers of 1024 with ReLU between them and a head, at batch size 32; resnet50 four images of
    64 x 64; many has 500 matrices of 64 x 32, whose gradients cost nothing. A step is the time of the slowest rank.
    The floor of a method is the time of the step alone, or of its bytes on the link if that is more.
    """
    with refusals():
        compared = entries(specs, read_merges(merge or []), against is not None)
        task = Task("memory" if memory else "steps", model.value, compared, steps, warmup, 0, "")
        where = read_where(hosts, rate, ranks, controller.value)
        title = f"Steps of {model.value} with {framework.value}, {where}"
        found = _measured(task, framework.value, where)
        if memory:
            total = 4 * count(SHAPES[model.value]())
            shown = [table.memory_table(found, f"Peak memory: {title}; gradients {size(total)}", total)]
        else:
            shown = [table.steps_table(found, title)]
        _show(shown, found, task, Outputs(as_json, None if memory else plot), where, title)


@bench.command()
def exchange(
    specs: Specs,
    hosts: Hosts = 0,
    rate: Rate = None,
    ranks: Ranks = 2,
    controller: By = Controller.gloo,
    shapes: Annotated[Model, typer.Option(help="Of the gradients.")] = Model.resnet50,
    steps: Steps = 12,
    warmup: Warmup = 4,
    merge: Merging = None,
    against: Against = None,
    profile: Annotated[bool, typer.Option("--profile", help="Also tell which functions take the time.")] = False,
    as_json: ToJson = None,
    plot: ToPlot = None,
) -> None:
    """Measure compressing, exchanging and decompressing alone, in PyTorch, of gradients that are there already.

    The backward pass hands them out one after another, the last parameter's first, without computing or copying. The
    time is that of this pass and of the optimizer's synchronize(), less that of the same pass without Horovod. Calls
    are compress and decompress as Horovod sees them, without waiting: what they cost in Python and in kernels.
    """
    with refusals():
        compared = entries(specs, read_merges(merge or []), against is not None)
        task = Task("exchange", shapes.value, compared, steps, warmup, _PROFILED if profile else 0, "")
        where = read_where(hosts, rate, ranks, controller.value)
        sizes = SHAPES[shapes.value]()
        title = f"Exchange of {len(sizes)} gradients of {shapes.value}, {count(sizes):,} numbers, {where}"
        found = _measured(task, "torch", where)
        shown = [table.exchange_table(found, title)]
        shown += [table.profile_table(one) for one in found[1:] if one.profile]
        _show(shown, found, task, Outputs(as_json, plot), where, title)


def read_merges(given: Sequence[str]) -> list[Merge | None]:
    """Read partitions as in ``layer,2,auto``; one such as ``at:12,40`` stands alone."""
    words = [word for text in given for word in ([text] if text.startswith("at:") else text.split(","))]
    return [int(word) if word.strip().isdigit() else word.strip() for word in words] or [None]


def _measured(task: Task, framework: str, where: Where) -> list[Result]:
    bits = bits_per_second(where.rate) if where.hosts else None
    if task.what != "memory":
        return results(task, _visibly(task, framework, where), bits)
    found = []
    for entry in task.entries[1:]:  # each in processes of its own, whose memory no other has touched
        alone = task._replace(entries=[task.entries[0], entry])
        found.append(results(alone, _visibly(alone, framework, where), bits)[1])
    return found


def _visibly(task: Task, framework: str, where: Where) -> list[list[Part]]:
    """Run a task under a progress bar, if there is a terminal for it."""
    console = Console(stderr=True)
    columns = (BarColumn(), MofNCompleteColumn(), TimeElapsedColumn(), TextColumn("{task.description}"))
    with Progress(*columns, console=console, transient=True, disable=not console.is_terminal) as progress:
        bar = progress.add_task("starting", total=task.parts)

        def watch(done: int) -> None:
            upcoming = task.entries[done % len(task.entries)].label if done < task.parts else ""
            progress.update(bar, completed=done, description=escape(upcoming))

        return run(task, framework, where, watch)


def _show(
    tables: Sequence[table.Grid], found: Sequence[Result], task: Task, outputs: Outputs, where: Where, title: str
) -> None:
    machine, console = Machine.here(), Console()
    if outputs.json:
        settings = {"what": task.what, "model": task.model, "steps": task.steps, "warmup": task.warmup}
        facts = {"title": title, "machine": machine._asdict(), "settings": settings | {"where": where._asdict()}}
        outputs.json.write_text(json.dumps(facts | {"results": as_json(found)}, indent=1) + "\n")
    if outputs.plot:
        exchange = task.what == "exchange"
        gains = f" (in brackets: times faster than {base})" if (base := baseline_name(found)) else ""
        axis = f"ms for each {'exchange' if exchange else 'step'}{gains}"
        what = "the bytes on the link" if exchange else "computing alone, or the bytes on the link"
        bars = table.bars(found[1:] if exchange else found)
        draw(outputs.plot, bars, title=f"{title}\n{machine.cpu}", axis=axis, mark=f"the floor: {what}")
    for one in tables:
        console.print(one)
        console.print()
    console.print(f"[dim]{escape(str(machine))}[/dim]", highlight=False)
