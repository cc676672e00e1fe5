"""The subcommands ``hvd-compress bench steps`` and ``hvd-compress bench exchange``."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Literal

import typer

from hvd_compress.core.bucketing import Merge
from hvd_compress.tools.bench.bars import draw
from hvd_compress.tools.bench.distributed import table
from hvd_compress.tools.bench.distributed.results import Result, as_json, baseline_name, results
from hvd_compress.tools.bench.distributed.shapes import SHAPES, count
from hvd_compress.tools.bench.distributed.task import Measured, Part, Task, entries, run
from hvd_compress.tools.bench.jobs import (
    Controller,
    LaunchSpec,
    choose_launcher,
    on_device,
    read_where,
)
from hvd_compress.tools.bench.machine import Machine
from hvd_compress.tools.cluster.rates import bits_per_second
from hvd_compress.tools.ranks.process import Device
from hvd_compress.tools.tables import Grid
from hvd_compress.tools.terminal import (
    ToJson,
    ToPlot,
    app,
    help_without_command,
    note,
    progress,
    refusals,
    remove_jobs_on_sigterm,
    screen,
    write_json,
)
from hvd_compress.tools.units import size

bench = typer.Typer(invoke_without_command=True, rich_markup_mode=None)
app.add_typer(bench, name="bench")

_PROFILED = 10
"""Steps under the profiler."""

Model = Literal["linear", "mlp", "resnet50", "many"]
"""Model whose gradients are exchanged: a key of `SHAPES`."""


Specs = Annotated[
    list[str],
    typer.Argument(metavar="SPEC...", help="Methods, separated by spaces, such as topk:ratio=0.01 powersgd:rank=4."),
]
Hosts = Annotated[int, typer.Option(min=0, help="Emulated hosts (needs root); 0: this machine.")]
RanksPerHost = Annotated[int, typer.Option(min=1, help="Number of ranks on each emulated host.")]
On = Annotated[
    str, typer.Option(metavar="h1:4,h2:4", help="Other machines, as horovodrun -H takes them; rank 0 must be here.")
]
Rate = Annotated[
    str | None,
    typer.Option(help="Bandwidth of an emulated host, with --hosts: 100mbit, 1gbit ... [unlimited]"),
]
Ranks = Annotated[int | None, typer.Option(min=1, help="Number of ranks, without --hosts. [2, or all slots of --on]")]
By = Annotated[
    Controller | None,
    typer.Option(help="The library that Horovod communicates by, without --hosts. [gloo; none without Horovod]"),
]
Computes = Annotated[
    Device,
    typer.Option(help="What ranks compute on, in PyTorch; with cuda, each has a GPU of its own."),
]
Steps = Annotated[int, typer.Option(min=1, help="Measured steps of each method.")]
Warmup = Annotated[int, typer.Option(min=1, help="Steps of each method before those.")]
Merging = Annotated[
    list[str] | None,
    typer.Option(help="Partitions to compare, such as layer,2,search; by default the package's own. Can be repeated."),
]
Gathers = Annotated[
    list[str] | None,
    typer.Option(
        metavar="none|int8|fp8|int4", help="Gathers of parameters to compare, with --framework fsdp. Can be repeated."
    ),
]
Against = Annotated[
    list[str] | None,
    typer.Option(
        metavar="horovod|ddp|fsdp",
        help="Also measure its own none and fp16; the fastest is the baseline. With --framework ddp, horovod also"
        " measures the methods by Horovod. Can be repeated.",
    ),
]


@bench.callback()
def _begin(context: typer.Context) -> None:
    """Measure speed and memory."""
    remove_jobs_on_sigterm()
    help_without_command(context)


@bench.command()
def steps(
    specs: Specs,
    hosts: Hosts = 0,
    rate: Rate = None,
    ranks_per_host: RanksPerHost = 1,
    ranks: Ranks = None,
    controller: By = None,
    on: On = "",
    device: Computes = "cpu",
    framework: Annotated[
        Measured,
        typer.Option(help="The framework; ddp and fsdp are PyTorch's own DistributedDataParallel and FSDP2."),
    ] = "torch",
    model: Annotated[Model, typer.Option(help="The model.")] = "linear",
    steps: Steps = 12,
    warmup: Warmup = 4,
    merge: Merging = None,
    gather: Gathers = None,
    replicas: Annotated[
        bool, typer.Option("--replicas", help="Each node has a replica of the model (HSDP), with --framework fsdp.")
    ] = False,
    against: Against = None,
    memory: Annotated[bool, typer.Option("--memory", help="Measure peak memory instead of time.")] = False,
    as_json: ToJson = None,
    plot: ToPlot = None,
) -> None:
    """Measure whole training steps.

    With --hosts and --rate, a limited link connects emulated hosts on this machine; with --on, your own machines train.
    Without, all ranks are on this machine and exchange gradients through memory: the result does not show what a
    network costs.

    The methods take turns in the same processes. linear has eight linear layers of 1024 with ReLU between them and a
    head, mlp 80 of 256 with LayerNorm, both at batch size 32; resnet50 takes four images of 64 x 64; many has 500
    matrices of 64 x 32, whose gradients cost nothing. A step is the time of the slowest rank.
    """
    with refusals():
        compared = entries(specs, read_merges(merge or []), against or [], framework, gather or [], replicas)
        task = Task("memory" if memory else "steps", model, compared, steps, warmup, 0, "", device)
        launcher = choose_launcher(controller, bool(on) or task.needs_horovod)
        where = on_device(read_where(hosts, rate, ranks_per_host, ranks, launcher, on), device, framework)
        title = f"Steps of {model} with {framework}, {where}"
        found = _measured(task, framework, where)
        if memory:
            total = 4 * count(SHAPES[model]())
            shown = [table.memory_table(found, f"Peak memory: {title}; gradients {size(total)}", total)]
        else:
            shown = [table.steps_table(found, title)]
        _show(shown, found, task, where, title, as_json, None if memory else plot)
        if not memory:
            note(table.LEGEND if where.hosts or where.on else f"{table.LEGEND} {table.NO_NETWORK}")


@bench.command()
def exchange(
    specs: Specs,
    hosts: Hosts = 0,
    rate: Rate = None,
    ranks_per_host: RanksPerHost = 1,
    ranks: Ranks = None,
    controller: By = None,
    on: On = "",
    device: Computes = "cpu",
    shapes: Annotated[Model, typer.Option(help="The model whose gradients are exchanged.")] = "resnet50",
    steps: Steps = 12,
    warmup: Warmup = 4,
    merge: Merging = None,
    against: Against = None,
    profile: Annotated[bool, typer.Option("--profile", help="Also list the functions that take the time.")] = False,
    as_json: ToJson = None,
    plot: ToPlot = None,
) -> None:
    """Measure the exchange of gradients alone, in PyTorch.

    An exchange is compressing, communicating and decompressing gradients that are there already. The backward pass
    hands them out one after another, the last parameter's first, without computing or copying. The time is that of this
    pass and of the optimizer's synchronize(), less that of the same pass without Horovod. Calls are compress and
    decompress as Horovod sees them, without waiting: their cost in Python and in kernels.
    """
    with refusals():
        compared = entries(specs, read_merges(merge or []), against or [])
        task = Task("exchange", shapes, compared, steps, warmup, _PROFILED if profile else 0, "", device)
        where = on_device(read_where(hosts, rate, ranks_per_host, ranks, controller or "gloo", on), device, "torch")
        sizes = SHAPES[shapes]()
        title = f"Exchange of {len(sizes)} gradients of {shapes}, {count(sizes):,} numbers, {where}"
        found = _measured(task, "torch", where)
        shown = [table.exchange_table(found, title)]
        shown += [table.profile_table(one) for one in found[1:] if one.profile]
        _show(shown, found, task, where, title, as_json, plot)


def read_merges(given: Sequence[str]) -> list[Merge | None]:
    """Read partitions, such as ``layer,2,search``; one such as ``at:12,40`` stands alone."""
    words = [word for text in given for word in ([text] if text.startswith("at:") else text.split(","))]
    return [int(word) if word.strip().isdigit() else word.strip() for word in words] or [None]


def _measured(task: Task, framework: Measured, where: LaunchSpec) -> list[Result]:
    bits = bits_per_second(where.rate) if where.hosts else None
    if task.what != "memory":
        return results(task, _reports(task, framework, where), bits)
    found = []
    for entry in task.entries[1:]:  # each in processes of its own, whose memory no other has touched
        alone = task._replace(entries=[task.entries[0], entry])
        found.append(results(alone, _reports(alone, framework, where), bits)[1])
    return found


def _reports(task: Task, framework: Measured, where: LaunchSpec) -> list[list[Part]]:
    with progress(task.parts) as begins:

        def watch(done: int) -> None:
            begins(task.entries[done % len(task.entries)].label if done < task.parts else "", done)

        return run(task, framework, where, watch)


def _show(
    tables: Sequence[Grid],
    found: Sequence[Result],
    task: Task,
    where: LaunchSpec,
    title: str,
    json_to: Path | None,
    plot: Path | None,
) -> None:
    machine, console = Machine.here(), screen()
    settings = {"what": task.what, "model": task.model, "steps": task.steps, "warmup": task.warmup}
    facts = {"title": title, "machine": machine._asdict(), "settings": settings | {"where": where._asdict()}}
    write_json(json_to, facts | {"results": as_json(found)})
    if plot:
        exchange = task.what == "exchange"
        gains = f" (in brackets: times faster than {base})" if (base := baseline_name(found)) else ""
        axis = f"ms for each {'exchange' if exchange else 'step'}{gains}"
        what = "the bytes on the link" if exchange else "computing alone, or the bytes on the link"
        bars = table.bars(found[1:] if exchange else found)
        draw(plot, bars, title=f"{title}\n{machine.cpu}", axis=axis, mark=f"the floor: {what}")
    for one in tables:
        console.print(one)
        console.print()
    note(machine)
