"""The subcommand ``hvd-compress plan``."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Any, NamedTuple, TypeVar

import typer
from rich.markup import escape

from hvd_compress.engine.spec import parse
from hvd_compress.errors import SpecError, UnsupportedError
from hvd_compress.tools.bench.distributed.results import BASELINES
from hvd_compress.tools.bench.machine import Machine
from hvd_compress.tools.plan import curves, plot, rates, tables, words
from hvd_compress.tools.plan.constants import Constants, read_constants
from hvd_compress.tools.plan.model import Framework, Setup, baseline, matrix_side, predict
from hvd_compress.tools.plan.rates import Rates
from hvd_compress.tools.plan.target import Backend, Device, Target, read_target
from hvd_compress.tools.plan.validated import beyond
from hvd_compress.tools.terminal import (
    ToJson,
    app,
    note,
    refusals,
    say,
    screen,
    split_specs,
    status,
    writable,
    write_json,
)
from hvd_compress.tools.units import read_count, read_rate, read_time

Given = TypeVar("Given")

METHODS = "topk:ratio=0.01,topkc:ratio=0.01,powersgd:rank=4,efsignsgd,qsgd"


@app.command()
def plan(
    params: Annotated[
        str | None, typer.Option(help="Parameters of the model: 350M, 1.2B, 25557032. [required]")
    ] = None,
    ranks: Annotated[int | None, typer.Option(help="Number of ranks. [required]")] = None,
    rate: Annotated[
        str | None, typer.Option(help="Bandwidth of a host: 10gbit, 25Gbps; or unlimited. [required]")
    ] = None,
    compute: Annotated[
        str | None, typer.Option(help="Time of a step without any exchange: 250ms, 0.25s. [required]")
    ] = None,
    methods: Annotated[
        str,
        typer.Option(
            metavar="SPEC,...",
            help="Methods to compare with none and fp16.",
            show_default=METHODS.replace(",", ", "),
        ),
    ] = METHODS,
    latency: Annotated[str, typer.Option(help="Latency from one host to another.")] = "50us",
    merge: Annotated[int, typer.Option(help="Buckets that gradients are merged into.")] = 2,
    ranks_per_host: Annotated[int, typer.Option(help="Ranks that share a host's link; divides --ranks.")] = 1,
    cores_per_rank: Annotated[float, typer.Option(help="Below 1: ranks share cores, and take longer.")] = 1.0,
    side: Annotated[int, typer.Option(help="Rows and columns of the model's matrices.")] = 1024,
    vectors: Annotated[float, typer.Option(help="Share of the parameters in biases and other vectors.")] = 0.001,
    device: Annotated[
        Device | None, typer.Option(help="The device that computes and compresses. [gpu with nccl, else cpu]")
    ] = None,
    backend: Annotated[
        Backend | None, typer.Option(help="The communication backend. [nccl with gpu, else gloo]")
    ] = None,
    framework: Annotated[
        Framework, typer.Option(help="What exchanges gradients; ddp is DistributedDataParallel.")
    ] = "horovod",
    rates_from: Annotated[
        list[Path] | None,
        typer.Option(
            "--rates",
            metavar="FILE",
            help="Files with the times to compress, from plan --json or bench methods --json, instead of measuring.",
        ),
    ] = None,
    size: Annotated[
        int, typer.Option(min=1024, help="Numbers in the gradient that compressing is measured on.")
    ] = 4_194_304,
    turns: Annotated[int, typer.Option(min=1, help="How often that is measured.")] = 5,
    constant: Annotated[
        list[str] | None,
        typer.Option(
            "--constant", metavar="NAME=VALUE", help="In the place of a default, see docs/planning.md; repeatable."
        ),
    ] = None,
    to_plot: Annotated[
        Path | None,
        typer.Option(
            "--plot", metavar="FILE.png", callback=writable, help="Draw the gains against ranks and against bandwidth."
        ),
    ] = None,
    as_json: ToJson = None,
) -> None:
    """Predict the gain of each method on another cluster.

    For example: hvd-compress plan --params 25M --ranks 8 --rate 1gbit --compute 500ms

    A cost model adds up the parts of a step. The time to compress is measured on this machine's processor, or read from
    files with --rates. The first line tells what is assumed. Outside the range in which the model was validated there
    are predictions, but no verdict. The verdict names the fastest step; it does not consider accuracy.
    """
    with refusals():
        target = read_target(device, backend, framework)
        setup = Setup(
            read_count("params", _told("params", params, "350M")),
            _told("ranks", ranks, "8"),
            read_rate("rate", _told("rate", rate, "10gbit")),
            read_time("compute", _told("compute", compute, "250ms")),
            read_time("latency", latency, zero=True),
            merge,
            ranks_per_host,
            cores_per_rank,
            side,
            vectors,
            target.tree,
            framework,
        )
        setup.check()
        constants = read_constants(constant or (), target.constants)
        target.check(setup, constants)
        specs = named(methods)
        if to_plot:
            plot.check(specs)
        measured = rates.read(rates_from, specs) if rates_from else _rates(specs, size, matrix_side(size, side), turns)
        report(Job(setup, target, constants, measured), specs, to_plot, as_json)


def _told(name: str, value: Given | None, example: str) -> Given:
    if value is None:
        raise SpecError(f"{name} is missing: say --{name}, as in --{name} {example}")
    return value


def named(methods: str) -> list[str]:
    """Return none, fp16, and the methods that the user names, each once.

    Raises:
        SpecError: If one of them is none.
    """
    specs = list(dict.fromkeys([*BASELINES, *split_specs(methods)]))
    for spec in specs:
        parse(spec)
    return specs


def _rates(specs: Sequence[str], size: int, side: int, turns: int) -> Rates:
    with status("Measuring how long compressing takes here") as begins:
        return rates.measure(specs, size, side, turns, begins)


class Job(NamedTuple):
    """The input of a prediction."""

    setup: Setup
    target: Target
    constants: Constants  # The constants of the machines
    measured: Rates  # The speeds of the methods on this machine

    @property
    def rates(self) -> Rates:
        """The speeds of the methods on those machines."""
        return self.target.rates(self.measured, self.constants)


def report(job: Job, specs: list[str], to_plot: Path | None, as_json: Path | None) -> None:
    """Predict, and show, draw and write it."""
    setup, constants = job.setup, job.constants
    found, impossible = [], {}
    for spec in specs:
        try:
            found.append(predict(spec, setup, job.rates, constants))
        except UnsupportedError as error:
            impossible[spec] = str(error)
    with status("Predicting") as begins:
        by_ranks = curves.over_ranks(specs, setup, job.rates, constants, begins)
        by_bandwidth = curves.over_bandwidths(specs, setup, job.rates, constants)
    assumed, outside = job.target.assumptions(setup, constants), beyond(setup, job.target)
    if outside:
        said = [words.no_verdict(outside)]
    else:
        said = [words.verdict(found), *words.outlook(by_ranks, setup, found, job.rates, constants)]
    if to_plot:
        plot.draw(to_plot, by_ranks, by_bandwidth, setup)
    if as_json:
        facts: dict[str, Any] = {"machine": Machine.here()._asdict(), "setup": setup._asdict(), "said": said}
        facts |= {"target": job.target._asdict(), "assumed": assumed, "outside": outside}
        facts |= {"constants": constants._asdict(), "rates": job.measured.as_json(), "impossible": impossible}
        facts |= {"baseline": baseline(found).spec}
        facts |= {"predictions": [one._asdict() | {"step": one.step} for one in found]}
        facts |= {"over_ranks": [c._asdict() for c in by_ranks], "over_bandwidths": [c._asdict() for c in by_bandwidth]}
        write_json(as_json, _finite(facts))
    console = screen()
    say(assumed)
    console.print()
    console.print(tables.predictions(found, setup))
    note(tables.LEGEND)
    for spec, message in impossible.items():
        console.print(f"[yellow]{escape(spec)}[/]: {escape(message)}", highlight=False)
    for sentence in said:
        say(sentence, "bold" if sentence is said[0] else "")


def _finite(value: Any) -> Any:
    """Replace numbers that JSON does not have by None."""
    if isinstance(value, dict):
        return {key: _finite(one) for key, one in value.items()}
    if isinstance(value, list | tuple):
        return [_finite(one) for one in value]
    return None if isinstance(value, float) and value - value != 0 else value
