"""The subcommand ``hvd-compress plan``."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated, Any, NamedTuple, Optional

import typer
from rich.console import Console
from rich.markup import escape

from hvd_compress.errors import SpecError, UnsupportedError
from hvd_compress.spec import parse
from hvd_compress.tools.bench.commands import refusals, split_specs
from hvd_compress.tools.bench.machine import Machine
from hvd_compress.tools.plan import curves, plot, rates, tables, words
from hvd_compress.tools.plan.constants import Constants, read_constants
from hvd_compress.tools.plan.model import HOROVODS, Setup, baseline, matrix_side, predict
from hvd_compress.tools.plan.rates import Rates
from hvd_compress.tools.plan.target import Backend, Device, Target, read_target
from hvd_compress.tools.plan.validated import beyond
from hvd_compress.tools.units import read_count, read_rate, read_time

METHODS = "topk:ratio=0.01,topkc:ratio=0.01,powersgd:rank=4,efsignsgd,qsgd"


Text = Optional[str]  # noqa: UP045
Size = Annotated[int, typer.Option(min=1024, help="Numbers in the gradient that compressing is measured on.")]
Turns = Annotated[int, typer.Option(min=1, help="How often that is measured.")]
Constant = Annotated[
    Optional[list[str]],  # noqa: UP045
    typer.Option(
        "--constant", metavar="NAME=VALUE", help="In the place of a default, see docs/planning.md; repeatable."
    ),
]
ToJson = Annotated[Optional[Path], typer.Option("--json", metavar="FILE", help="Write all of it.")]  # noqa: UP045


def plan(
    context: typer.Context,
    params: Annotated[Text, typer.Option(help="Parameters of the model: 350M, 1.2B, 25557032.")] = None,
    ranks: Annotated[int, typer.Option(help="How many ranks train.")] = 0,
    rate: Annotated[Text, typer.Option(help="What a host can send and receive: 10gbit; or unlimited.")] = None,
    compute: Annotated[Text, typer.Option(help="A step without any exchange: 250ms, 0.25s.")] = None,
    methods: Annotated[str, typer.Option(metavar="SPEC,...", help="What to compare, besides none and fp16.")] = METHODS,
    latency: Annotated[str, typer.Option(help="From one host to another.")] = "50us",
    merge: Annotated[int, typer.Option(help="Buckets that gradients are merged into.")] = 2,
    ranks_per_host: Annotated[int, typer.Option(help="Ranks that share a host's link; divides --ranks.")] = 1,
    cores_per_rank: Annotated[float, typer.Option(help="Below 1: ranks share cores, and take longer.")] = 1.0,
    side: Annotated[int, typer.Option(help="Rows and columns of the model's matrices.")] = 1024,
    vectors: Annotated[float, typer.Option(help="Share of the parameters in biases and other vectors.")] = 0.001,
    device: Annotated[
        Optional[Device],  # noqa: UP045
        typer.Option(help="What computes and compresses. [gpu with nccl, else cpu]"),
    ] = None,
    backend: Annotated[
        Optional[Backend],  # noqa: UP045
        typer.Option(help="What Horovod communicates by. [nccl with gpu, else gloo]"),
    ] = None,
    rates_from: Annotated[
        Optional[list[Path]],  # noqa: UP045
        typer.Option(
            "--rates", metavar="FILE", help="Do not measure; take what plan --json or bench methods --json has written."
        ),
    ] = None,
    size: Size = 4_194_304,
    turns: Turns = 5,
    constant: Constant = None,
    to_plot: Annotated[
        Optional[Path],  # noqa: UP045
        typer.Option("--plot", metavar="FILE.png", help="Draw the gains against ranks and against bandwidth."),
    ] = None,
    as_json: ToJson = None,
) -> None:
    """Predict what methods would save on a cluster that is not there, from a model of what a step is made of.

    How long compressing takes is measured on this machine's processor, or taken from files with --rates. The first line
    tells what is assumed. Outside the range in which the model was validated there are predictions, but no verdict.
    """
    if context.invoked_subcommand:
        return
    with refusals():
        target = read_target(device, backend)
        setup = Setup(
            read_count("params", _told("params", params, "350M")),
            ranks,
            read_rate("rate", _told("rate", rate, "10gbit")),
            read_time("compute", _told("compute", compute, "250ms")),
            read_time("latency", latency, zero=True),
            merge,
            ranks_per_host,
            cores_per_rank,
            side,
            vectors,
            target.tree,
        )
        setup.check()
        constants = read_constants(constant or (), target.constants)
        target.check(setup, constants)
        specs = named(methods)
        if to_plot:
            plot.check(specs)
        measured = (
            rates.read(rates_from, specs)
            if rates_from
            else measured_visibly(specs, size, matrix_side(size, side), turns)
        )
        report(Job(setup, target, constants, measured), specs, to_plot, as_json)


def _told(name: str, text: str | None, example: str) -> str:
    if text is None:
        raise SpecError(f"{name} is missing: say --{name}, as in --{name} {example}")
    return text


def named(methods: str) -> list[str]:
    """Horovod's own, and those that the user names, each once.

    Raises:
        SpecError: If one of them is none.
    """
    specs = list(dict.fromkeys([*HOROVODS, *split_specs(methods)]))
    for spec in specs:
        parse(spec)
    return specs


def measured_visibly(specs: Sequence[str], size: int, side: int, turns: int) -> Rates:
    """Measure how fast the methods are here, and say so meanwhile."""
    with visibly("Measuring how long compressing takes here") as progress:
        return rates.measure(specs, size, side, turns, progress)


@contextmanager
def visibly(what: str) -> Iterator[Callable[[str], None]]:
    """Show what is being done; gives what to call with each part."""
    with Console(stderr=True).status(f"{what} ...") as status:
        yield lambda part: status.update(f"{what}: {escape(part)} ...")


class Job(NamedTuple):
    """The input of a prediction.

    Attributes:
        setup: The training.
        target: The machines.
        constants: What is assumed of them.
        measured: How fast the methods are on this machine.
    """

    setup: Setup
    target: Target
    constants: Constants
    measured: Rates

    @property
    def rates(self) -> Rates:
        """How fast the methods are on those machines."""
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
    with visibly("Predicting") as progress:
        by_ranks = curves.over_ranks(specs, setup, job.rates, constants, progress)
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
        as_json.write_text(json.dumps(_finite(facts), indent=1) + "\n")
    console = Console()
    console.print(escape(assumed), highlight=False)
    console.print()
    console.print(tables.predictions(found, setup))
    for spec, message in impossible.items():
        console.print(f"[yellow]{escape(spec)}[/]: {escape(message)}", highlight=False)
    for sentence in said:
        console.print(escape(sentence), highlight=False, style="bold" if sentence is said[0] else "")


def _finite(value: Any) -> Any:
    """The same with None for numbers that JSON does not have."""
    if isinstance(value, dict):
        return {key: _finite(one) for key, one in value.items()}
    if isinstance(value, list | tuple):
        return [_finite(one) for one in value]
    return None if isinstance(value, float) and value - value != 0 else value
