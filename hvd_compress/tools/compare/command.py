"""The subcommand ``hvd-compress compare``."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Annotated, NoReturn

import typer
from rich.console import Console
from rich.markup import escape

from hvd_compress.engine.spec import parse
from hvd_compress.errors import SpecError
from hvd_compress.lab import Setting
from hvd_compress.local.graph import gossips
from hvd_compress.local.settings import method_of
from hvd_compress.tools.bench.distributed.command import By, Computes, Hosts, On, Ranks, RanksPerHost, Rate, read_merges
from hvd_compress.tools.bench.distributed.results import BASELINES
from hvd_compress.tools.bench.jobs import choose_launcher, on_device, read_where
from hvd_compress.tools.cluster import Cluster
from hvd_compress.tools.compare.comparison import ComparisonRun
from hvd_compress.tools.compare.progress import Bars
from hvd_compress.tools.compare.report import page, tables
from hvd_compress.tools.compare.report.wording import words
from hvd_compress.tools.compare.request import Framework, Request
from hvd_compress.tools.compare.results import Comparison
from hvd_compress.tools.compare.store import Store
from hvd_compress.tools.compare.tasks import TASKS, find
from hvd_compress.tools.drawing import require_matplotlib
from hvd_compress.tools.terminal import (
    ToJson,
    app,
    note,
    refusals,
    remove_jobs_on_sigterm,
    say,
    screen,
    split_specs,
    write_json,
)
from hvd_compress.tools.units import read_time

_METHODS = "none,fp16,topk:ratio=0.01,powersgd:rank=4"
_TASKS = "; ".join(f"{name}: {what}" for name, what in TASKS.items())


@app.command()
def compare(
    task: Annotated[str, typer.Option(help=f"The task. {_TASKS}; or file.py:function of your own.")] = "digits",
    methods: Annotated[
        str, typer.Option(help=f"Specs, separated by commas. {' and '.join(BASELINES)} are always among them.")
    ] = _METHODS,
    hosts: Hosts = 0,
    rate: Rate = None,
    ranks_per_host: RanksPerHost = 1,
    ranks: Ranks = None,
    controller: By = None,
    on: On = "",
    device: Computes = "cpu",
    framework: Annotated[
        Framework, typer.Option(help="The framework; ddp is PyTorch with DistributedDataParallel instead of Horovod.")
    ] = "torch",
    seeds: Annotated[int, typer.Option(min=1, help="Trainings of each method.")] = 3,
    target: Annotated[float | None, typer.Option(help="The metric to reach; by default the task's own.")] = None,
    budget: Annotated[str, typer.Option(help="Time limit of each training: 90s, 10m, 1h.")] = "10m",
    lr: Annotated[str, typer.Option(help="Learning rates to try for each method, such as 0.05,0.1.")] = "",
    epochs: Annotated[
        int | None, typer.Option(min=1, help="Epochs of each training; by default the task's own.")
    ] = None,
    merge: Annotated[str, typer.Option(help="How gradients are merged into buckets: 2, layer, search ...")] = "2",
    data: Annotated[str, typer.Option(metavar="PATH", help="The task's data, if it is not in the default place.")] = "",
    options: Annotated[
        list[str] | None,
        typer.Option("--set", metavar="KEY=VALUE", help="An option of the task. Can be repeated."),
    ] = None,
    output: Annotated[
        Path | None,
        typer.Option(metavar="FOLDER", help="Folder of the report; the same command again resumes. [compare-TASK]"),
    ] = None,
    as_json: ToJson = None,
) -> None:
    """Train with several methods and compare times to a target.

    none and fp16 are always trained, too: the better of them is the baseline.

    With --hosts, training runs on emulated hosts with a limited network; this needs root.
    """
    with refusals():
        launcher = choose_launcher(controller, bool(on) or framework != "ddp")
        request = Request(
            task=task,
            framework=framework,
            methods=read_methods(methods, framework),
            where=on_device(read_where(hosts, rate, ranks_per_host, ranks, launcher, on), device, framework),
            seeds=seeds,
            target=target,
            budget=read_time("budget", budget, long=True),
            lrs=read_rates(lr),
            epochs=epochs,
            merge=_merge(merge),
            data=str(Path(data).resolve()) if data else "",
            options=read_options(options or []),
        )
        _try_task(request)
        require_matplotlib("reports")
        if hosts:
            Cluster(hosts, request.where.rate, ranks_per_host)  # refuses what cannot be
        folder = output or Path(f"compare-{re.sub('[^A-Za-z0-9]+', '-', task)}")
        raise typer.Exit(_run(request, folder, as_json))


def _try_task(request: Request) -> None:
    """Find mistakes before anything is started; a task of the user may need what only ranks have."""
    make = find(request.task, request.framework)
    if request.task in TASKS:
        make(Setting(size=request.where.size, data=request.data, options=request.options))


def _run(request: Request, folder: Path, as_json: Path | None) -> int:
    """Compare, and show the result; return the exit code."""
    remove_jobs_on_sigterm()
    console, store = screen(), Store(folder, request.conditions)

    def save(known: Comparison) -> None:
        known.write(folder / "results.json")

    trainings = len(request.lrs) + request.seeds - 1
    try:
        with Bars(request.methods, trainings, Console(stderr=True)) as bars:
            known = ComparisonRun(request, store, bars).run(save)
        if known is None:
            typer.echo("hvd-compress: no training has ended; the first error is above", err=True)
            return 1
        save(known)
        page.write(known, folder)
        write_json(as_json, known.facts())
    except KeyboardInterrupt:
        _interrupted(folder)
    finally:
        store.close()
    console.print(tables.main_table(known, console.width))
    console.print()
    for sentence in words(known):
        say(sentence)
    note(known.machine)
    console.print(f"The report: {escape(str(folder / 'report.md'))}", highlight=False, soft_wrap=True)
    for failure in known.failures:
        typer.echo(f"hvd-compress: {failure.spec}, seed {failure.seed}: {failure.message}", err=True)
    return 1 if known.failures else 0


def _interrupted(folder: Path) -> NoReturn:
    typer.echo(f"hvd-compress: interrupted; what has ended is in {folder}, and the same command goes on", err=True)
    raise typer.Exit(130)


def read_methods(text: str, framework: Framework = "torch") -> list[str]:
    """Read specs; Horovod's own methods are added where they are not among them.

    Raises:
        SpecError: If one is not a spec, or is there twice, or the framework does not know it.
    """
    specs = split_specs(text)
    for spec in specs:
        parse(method_of(spec))
        if "@" in spec and framework == "keras":
            raise SpecError(f"--methods {spec} is not supported with --framework keras: compare local steps in PyTorch")
        if gossips(spec) and framework != "ddp":
            raise SpecError(f"--methods {spec} is not supported with --framework {framework}: take --framework ddp")
    if twice := {spec for spec in specs if specs.count(spec) > 1}:
        raise SpecError(f"--methods has {', '.join(sorted(twice))} twice: name each once")
    return [*(spec for spec in BASELINES if spec not in specs), *specs]


def read_rates(text: str) -> list[float | None]:
    """Read learning rates.

    Raises:
        SpecError: If one is not a positive number, or is there twice.
    """
    if not text:
        return [None]
    try:
        rates = [float(word) for word in text.split(",")]
    except ValueError:
        rates = []
    if not rates or not all(0 < rate < float("inf") for rate in rates) or len(set(rates)) < len(rates):
        raise SpecError(f"--lr {text!r} is not allowed: name different positive numbers, as 0.05,0.1")
    return list(rates)


def read_options(words_: list[str]) -> dict[str, str]:
    """Read options of a task.

    Raises:
        SpecError: If one is not ``key=value``.
    """
    pairs = [word.partition("=") for word in words_]
    for word, (key, equals, _) in zip(words_, pairs, strict=True):
        if not key or not equals:
            raise SpecError(f"--set {word!r} is not allowed: write KEY=VALUE, as hidden=200")
    return {key: value for key, _, value in pairs}


def _merge(text: str) -> int | str:
    (merge,) = found if len(found := read_merges([text])) == 1 else [None]
    if merge is None:
        raise SpecError(f"--merge {text!r} is not allowed: name one way, as 2, layer or search")
    return merge
