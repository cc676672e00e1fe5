"""The subcommand ``hvd-compress advise``."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Any, Literal, NamedTuple, TypeVar, get_args

import typer
from rich.markup import escape

from hvd_compress.engine import race_report
from hvd_compress.engine.candidates import BASELINES as AUTO_BASELINES
from hvd_compress.engine.candidates import LOSSES, STANDARD, between_nodes
from hvd_compress.engine.race import pinned
from hvd_compress.engine.spec import parse
from hvd_compress.errors import SpecError, UnsupportedError, required
from hvd_compress.local.graph import gossips
from hvd_compress.local.settings import method_of
from hvd_compress.tools.advise import curves, plot, rates, tables, words
from hvd_compress.tools.advise.constants import Constants, read_constants
from hvd_compress.tools.advise.curves import Curve
from hvd_compress.tools.advise.model import Framework, Prediction, Setup, baseline, matrix_side, predict
from hvd_compress.tools.advise.rates import Rates
from hvd_compress.tools.advise.request import Request, Shapes
from hvd_compress.tools.advise.target import Backend, Device, Target, read_target
from hvd_compress.tools.advise.validated import beyond
from hvd_compress.tools.bench.distributed.results import BASELINES
from hvd_compress.tools.bench.machine import Machine
from hvd_compress.tools.tables import Grid
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
from hvd_compress.tools.units import counted, read_count, read_rate, read_time, write_count

Given = TypeVar("Given")

Optimizer = Literal["adamw", "sgd"]
Loss = Literal["none", "small"]
assert get_args(Loss) == LOSSES

PRECONDITIONED = "ctk:preconditioned=on,vectors=on,min_size=0"
"""Keeps the loss of AdamW with a hundredth of the bytes, by an optimizer of its own: docs/results.md, AdamW."""


MEASURING = {"params", "model", "optimizer", "loss", "compute", "methods", "side", "as_json"}
"""Parameters of `advise` by torchrun; others describe a cluster, which is measured then."""


@app.command()
def advise(
    context: typer.Context,
    params: Annotated[str | None, typer.Option(help="Parameters of the model: 350M, 1.2B, 25557032.")] = None,
    model: Annotated[
        str | None, typer.Option(metavar="FILE.py:FUNCTION", help="Instead: a function that makes the model.")
    ] = None,
    optimizer: Annotated[
        Optimizer, typer.Option(help="What applies the gradients; adamw stands for all that are not SGD.")
    ] = "adamw",
    loss: Annotated[Loss, typer.Option(help="Allowed increase of the loss.")] = "none",
    compute: Annotated[
        str | None, typer.Option(help="Time of a step without any exchange: 250ms, 0.25s. [required; 0ms by torchrun]")
    ] = None,
    methods: Annotated[
        str | None,
        typer.Option(
            metavar="SPEC,...",
            help="Compare these with none and 16 bits; qsgd:bits=4@30 exchanges models every 30 steps. [those that keep"
            " the loss]",
        ),
    ] = None,
    nodes: Annotated[int | None, typer.Option(min=1, help="Number of nodes. [required, except by torchrun]")] = None,
    ranks_per_node: Annotated[int, typer.Option(min=1, help="Ranks that share the link of a node.")] = 1,
    rate: Annotated[
        str | None,
        typer.Option(help="Bandwidth of a node: 10gbit, 25Gbps; or unlimited. [required, except by torchrun]"),
    ] = None,
    device: Annotated[Device, typer.Option(help="The device that computes and compresses.")] = "cpu",
    backend: Annotated[
        Backend | None, typer.Option(help="The communication backend. [nccl with a GPU, else gloo]")
    ] = None,
    framework: Annotated[
        Framework, typer.Option(help="What exchanges gradients; ddp is DistributedDataParallel.")
    ] = "ddp",
    latency: Annotated[str, typer.Option(help="Latency from one node to another.")] = "50us",
    merge: Annotated[int, typer.Option(help="Buckets that gradients are merged into.")] = 2,
    cores_per_rank: Annotated[float, typer.Option(help="Below 1: ranks share cores, and take longer.")] = 1.0,
    side: Annotated[int, typer.Option(help="Rows and columns of the model's matrices.")] = 1024,
    vectors: Annotated[float, typer.Option(help="Share of the parameters in biases and other vectors.")] = 0.001,
    rates_from: Annotated[
        list[Path] | None,
        typer.Option(
            "--rates",
            metavar="FILE",
            help="Files with the times to compress, from advise --json or bench methods --json, instead of measuring.",
        ),
    ] = None,
    size: Annotated[
        int, typer.Option(min=1024, help="Numbers in the gradient that compressing is measured on.")
    ] = 4_194_304,
    turns: Annotated[int, typer.Option(min=1, help="How often that is measured.")] = 5,
    constant: Annotated[
        list[str] | None,
        typer.Option(
            "--constant", metavar="NAME=VALUE", help="In the place of a default, see docs/advise.md; repeatable."
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
    """Advise on the method to train with, without training.

    On a cluster, it measures: torchrun --nproc-per-node 8 -m hvd_compress advise --params 350M --compute 250ms

    It then exchanges gradients of that model by DistributedDataParallel until the candidates are compared, as auto does
    in training.

    Elsewhere, it predicts: hvd-compress advise --params 350M --nodes 4 --ranks-per-node 8 --rate 25gbit --device h100
    --compute 250ms

    A cost model adds up the parts of a step. The first line says what is assumed. For CPUs, the time to compress is
    measured on this machine, or read from files with --rates.

    The answer is the method with the fastest step among those that keep the loss with the optimizer, or that you name.
    """
    with refusals():
        if (params is None) == (model is None):
            raise SpecError("one of params and model is needed: say --params 350M, or --model FILE.py:FUNCTION")
        number = read_count("params", params) if params else 0
        asked = split_specs(methods) if methods else []
        if "LOCAL_WORLD_SIZE" in os.environ:
            _check_measuring(context, asked)
            seconds = 0.0 if compute is None else read_time("compute", compute, zero=True)
            adam, its_side = optimizer == "adamw", matrix_side(number or side**2, side)
            measure(Request(number, its_side, model or "", seconds, adam, loss, asked), as_json)
            return
        target = read_target(device, backend, framework)
        shapes = _shapes(model) if model else Shapes(number, 0, side, vectors)
        setup = Setup(
            shapes.params,
            _told("nodes", nodes, "4") * ranks_per_node,
            read_rate("rate", _told("rate", rate, "10gbit")),
            read_time("compute", _told("compute", compute, "250ms")),
            read_time("latency", latency, zero=True),
            merge,
            ranks_per_node,
            cores_per_rank,
            shapes.side,
            shapes.vectors,
            target.tree,
            framework,
            shapes.tensors,
        )
        setup.check()
        constants = read_constants(constant or (), target.constants)
        target.check(setup, constants)
        specs = named(asked or standard(optimizer, loss, setup))
        if to_plot:
            plot.check(specs)
        coded = list(dict.fromkeys(map(method_of, specs)))
        unknown = target.unknown(coded)
        here = rates.read(rates_from, unknown) if rates_from else _rates(unknown, size, setup.side, turns)
        job = Job(setup, target, constants, target.rates(here, coded, constants), "" if asked else optimizer)
        report(job, specs, to_plot, as_json)


def _check_measuring(context: typer.Context, asked: Sequence[str]) -> None:
    """Refuse options and methods that the measurement by torchrun would ignore.

    Raises:
        SpecError: If there is one.
    """
    for one in context.command.params:
        source = context.get_parameter_source(one.name or "")
        if source is not None and source.name == "COMMANDLINE" and one.name not in MEASURING:
            raise SpecError(f"{one.opts[0]} is not allowed by torchrun, which measures this cluster with DDP: omit it")
    if local := [spec for spec in asked if "@" in spec]:
        raise SpecError(f"{local[0]} is not allowed by torchrun, which compares methods in each step: leave it out")


def _told(name: str, value: Given | None, example: str) -> Given:
    if value is None:
        raise SpecError(f"{name} is missing: say --{name}, as in --{name} {example}; or start it by torchrun")
    return value


def _shapes(model: str) -> Shapes:
    with required("advise --model", "torch", "torch"):
        from hvd_compress.tools.advise.models import shapes_of
    return shapes_of(model)


def standard(optimizer: Optimizer, loss: Loss, setup: Setup) -> list[str]:
    """Return the candidates of ``auto``, and those that compress updates of AdamW, which it cannot take turns with."""
    adam = optimizer == "adamw"
    specs = [one.spec for one in STANDARD if one.keeps(loss, adam) and one.spec not in AUTO_BASELINES]
    specs += [PRECONDITIONED, between_nodes(PRECONDITIONED)] if adam else []
    nodes = 1 < setup.ranks_per_node < setup.ranks
    return [one for one in specs if nodes or not parse(one).hierarchical]


def named(methods: Sequence[str]) -> list[str]:
    """Return none, fp16, and the methods, each once.

    Raises:
        SpecError: If one of them is none.
    """
    specs = list(dict.fromkeys([*BASELINES, *methods]))
    for spec in specs:
        if gossips(spec):
            raise SpecError(f"{spec} is not supported by advise, which predicts no gossip: leave it out of --methods")
        parse(method_of(spec))
    return specs


def _rates(specs: Sequence[str], size: int, side: int, turns: int) -> Rates:
    if not specs:
        return rates.NO_RATES
    with status("Measuring how long compressing takes here") as begins:
        return rates.measure(specs, size, matrix_side(size, side), turns, begins)


def measure(request: Request, as_json: Path | None) -> None:
    """Compare the candidates on these ranks, and let one of them show it."""
    with required("advise by torchrun", "torch", "torch"):
        import torch

        from hvd_compress.tools.advise import here
    rank, found = here.race(request, "cuda" if torch.cuda.is_available() else "cpu")
    if rank.rank:
        return
    chosen = pinned(found.runners[found.chosen].spec)
    what, nodes = request.model or f"{write_count(request.params)} parameters", rank.size // rank.local_size
    title = f"Measured: {what}, {rank.size} ranks on {counted(nodes, 'node')}, {rank.device.partition(':')[0]}"
    screen().print(Grid(title, race_report.HEADS, race_report.rows(found)))
    say(race_report.words(found))
    if not (request.model or request.compute):
        note("Without --compute, a step is its exchange alone; the longer a step computes, the less there is to gain.")
    say(_taken(chosen), "bold")
    candidates = [one._asdict() | {"facts": one.facts._asdict()} for one in found.runners]
    facts: dict[str, Any] = {"machine": Machine.here()._asdict(), "request": request._asdict(), "ranks": rank.size}
    write_json(as_json, _finite(facts | {"chosen": chosen, "candidates": candidates}))


def _take(found: Sequence[Prediction]) -> str:
    """Return how to take the method to choose, also one that leaves the optimizer as it is."""
    chosen = words.choice(found)
    if not parse(method_of(chosen)).preconditioned:
        return _taken(chosen)
    others = [one for one in found if not parse(method_of(one.spec)).preconditioned]
    return (
        f"{_taken(chosen)[:-1]}, and its optimizer: docs/guide.md, AdamW. With your own optimizer:"
        f" {_taken(words.choice(others))[5:]}"
    )


def _taken(spec: str) -> str:
    if "@" in spec:
        return f"Take LocalSteps(optimizer, {spec!r}): docs/guide.md, Local steps."
    return "Take no compression." if spec == "none" else f"Take Compression.parse({spec!r})."


class Job(NamedTuple):
    """The input of a prediction.

    Attributes:
        setup: The training job.
        target: The machines.
        constants: Their constants.
        rates: The speeds of the methods on them.
        optimizer: The optimizer with which all candidates keep the loss; "" if the user named the candidates.
    """

    setup: Setup
    target: Target
    constants: Constants
    rates: Rates
    optimizer: str = ""


def report(job: Job, specs: list[str], to_plot: Path | None, as_json: Path | None) -> None:
    """Predict, and show, draw and write it."""
    setup, constants = job.setup, job.constants
    found, impossible = [], {}
    for spec in specs:
        try:
            found.append(predict(spec, setup, job.rates, constants))
        except UnsupportedError as error:
            impossible[spec] = str(error)
    assumed, outside = job.target.assumptions(setup, constants), beyond(setup, job.target, specs)
    by_ranks, by_bandwidth = list[Curve](), list[Curve]()
    if to_plot or as_json or not outside:
        with status("Predicting") as begins:
            by_ranks = curves.over_ranks(specs, setup, job.rates, constants, begins)
            by_bandwidth = curves.over_bandwidths(specs, setup, job.rates, constants)
    said = [words.verdict(found, words.FAR if outside else words.SURE)]
    said += [words.caution(outside)] if outside else words.outlook(by_ranks, setup, found, job.rates, constants)
    said += [words.accuracy(job.optimizer), _take(found)]
    if to_plot:
        plot.draw(to_plot, by_ranks, by_bandwidth, setup)
    if as_json:
        facts: dict[str, Any] = {"machine": Machine.here()._asdict(), "setup": setup._asdict(), "said": said}
        facts |= {"target": job.target._asdict(), "assumed": assumed, "outside": outside}
        facts |= {"constants": constants._asdict(), "rates": job.rates.as_json(), "impossible": impossible}
        facts |= {"baseline": baseline(found).spec, "chosen": words.choice(found)}
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
        say(sentence, "bold" if sentence in (said[0], said[-1]) else "")


def _finite(value: Any) -> Any:
    """Replace numbers that JSON does not have by None."""
    if isinstance(value, dict):
        return {key: _finite(one) for key, one in value.items()}
    if isinstance(value, list | tuple):
        return [_finite(one) for one in value]
    return None if isinstance(value, float) and value - value != 0 else value
