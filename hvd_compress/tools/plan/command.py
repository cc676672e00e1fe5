"""The subcommands ``hvd-compress plan`` and ``hvd-compress plan validate``."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Any, NamedTuple, TypeVar

import typer
from rich.markup import escape

from hvd_compress.errors import SpecError, UnsupportedError
from hvd_compress.spec import parse
from hvd_compress.tools.bench.distributed.results import BASELINES
from hvd_compress.tools.bench.distributed.shapes import WIDTH
from hvd_compress.tools.bench.jobs import read_link
from hvd_compress.tools.bench.machine import Machine
from hvd_compress.tools.plan import curves, plot, rates, tables, words
from hvd_compress.tools.plan.constants import Constants, read_constants
from hvd_compress.tools.plan.fitting import FREE, fit
from hvd_compress.tools.plan.model import Framework, Setup, baseline, matrix_side, predict
from hvd_compress.tools.plan.rates import Rates
from hvd_compress.tools.plan.target import Backend, Device, Target, read_target
from hvd_compress.tools.plan.validation import (
    FITTED,
    HOSTS,
    LINKS,
    Campaign,
    Cell,
    beyond,
    compare,
    measure_job,
    score,
)
from hvd_compress.tools.plan.validation import METHODS as VALIDATED
from hvd_compress.tools.terminal import (
    STDOUT,
    ToJson,
    app,
    note,
    refusals,
    remove_jobs_on_sigterm,
    say,
    screen,
    split_specs,
    status,
    writable,
    write_json,
)
from hvd_compress.tools.units import read_count, read_rate, read_time

planning = typer.Typer(invoke_without_command=True, rich_markup_mode=None)
app.add_typer(planning, name="plan")

Given = TypeVar("Given")

METHODS = "topk:ratio=0.01,topkc:ratio=0.01,powersgd:rank=4,efsignsgd,qsgd"

Size = Annotated[int, typer.Option(min=1024, help="Numbers in the gradient that compressing is measured on.")]
Turns = Annotated[int, typer.Option(min=1, help="How often that is measured.")]
Constant = Annotated[
    list[str] | None,
    typer.Option(
        "--constant", metavar="NAME=VALUE", help="In the place of a default, see docs/planning.md; repeatable."
    ),
]
Exchanger = Annotated[Framework, typer.Option(help="What exchanges gradients; ddp is DistributedDataParallel.")]


@planning.callback()
def plan(
    context: typer.Context,
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
    framework: Exchanger = "horovod",
    rates_from: Annotated[
        list[Path] | None,
        typer.Option(
            "--rates",
            metavar="FILE",
            help="Files with the times to compress, from plan --json or bench methods --json, instead of measuring.",
        ),
    ] = None,
    size: Size = 4_194_304,
    turns: Turns = 5,
    constant: Constant = None,
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
    if context.invoked_subcommand:
        return
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


@planning.command()
def validate(
    hosts: Annotated[
        str | None, typer.Option(help=f"Emulated hosts, of a rank each. [{','.join(map(str, HOSTS))}]")
    ] = None,
    rate: Annotated[str | None, typer.Option(help=f"Bandwidth of each host. [{','.join(LINKS)}]")] = None,
    framework: Annotated[Framework | None, typer.Option(help="What exchanges gradients. [horovod]")] = None,
    steps: Annotated[int, typer.Option(min=1, help="Measured steps of each method in each job.")] = 4,
    size: Size = 8_388_608,
    turns: Turns = 7,
    measured: Annotated[
        Path | None, typer.Option(metavar="FILE", help="Do not measure; take what --json has written.")
    ] = None,
    fitted: Annotated[bool, typer.Option("--fit", help="First fit the constants, to 2 and 8 hosts alone.")] = False,
    constant: Constant = None,
    as_json: ToJson = None,
    to_markdown: Annotated[
        Path | None,
        typer.Option(
            "--markdown", metavar="FILE", callback=writable, help="Write measured and predicted times as a table."
        ),
    ] = None,
) -> None:
    """Compare predictions with measured steps (as root).

    The steps run on emulated hosts, and take 10 minutes. The machine should do nothing else meanwhile.
    """
    remove_jobs_on_sigterm()
    with refusals():
        numbers = list(HOSTS) if hosts is None else read_hosts(hosts)
        links = list(LINKS) if rate is None else read_links(rate)
        if measured:
            for name, given in (("hosts", hosts), ("rate", rate), ("framework", framework)):
                if given is not None:
                    raise SpecError(f"{name}={given!r} is not allowed with --measured: FILE has its own; leave it out")
            campaign = Campaign.read(measured)
            constants = read_constants(constant or (), read_target("cpu", "gloo", campaign.framework).constants)
        else:
            framework = framework or "horovod"
            constants = read_constants(constant or (), read_target("cpu", "gloo", framework).constants)
            wanted = [(number, link) for number in numbers for link in links]
            known = _rates(VALIDATED, size, matrix_side(size, WIDTH), turns)
            campaign = _measure(wanted, framework, steps, known, as_json)
        write_json(as_json, campaign.facts())
        if fitted:
            constants = _fitted(campaign, constants)
        cells = compare(campaign.jobs, campaign.rates, constants)
        if to_markdown:
            to_markdown.write_text(tables.markdown(cells))
        _show_errors(cells, campaign.machine)


def read_hosts(text: str) -> list[int]:
    """Read numbers of hosts, as ``2,4,8``.

    Raises:
        SpecError: If they cannot be.
    """
    words = [word.strip() for word in text.split(",")]
    if not all(word.isdigit() and int(word) >= 2 for word in words):
        raise SpecError(f"hosts={text!r} is not allowed: hosts must be whole numbers of at least 2, such as 2,4,8")
    return list(dict.fromkeys(map(int, words)))


def read_links(text: str) -> list[str]:
    """Read bandwidths, as ``100mbit,1gbit``.

    Raises:
        SpecError: If they cannot be emulated.
    """
    return list(dict.fromkeys(read_link(word.strip()) for word in text.split(",")))


def _measure(
    wanted: Sequence[tuple[int, str]], framework: Framework, steps: int, rates: Rates, path: Path | None
) -> Campaign:
    """Measure job by job; results are written at once, as it takes long."""
    campaign = Campaign(str(Machine.here()), rates, [])
    with status("Measuring steps") as begins:
        for number, (hosts, link) in enumerate(wanted):
            begins(f"{hosts} hosts, {link}, job {number + 1} of {len(wanted)}")
            campaign = campaign._replace(jobs=[*campaign.jobs, measure_job(hosts, link, steps, framework)])
            if path != STDOUT:
                write_json(path, campaign.facts())
    return campaign


def _fitted(campaign: Campaign, start: Constants) -> Constants:
    """Fit the constants, and say how good that is where they were fitted."""
    jobs = [job for job in campaign.jobs if job.hosts in FITTED]
    if not jobs:
        allowed = " or ".join(map(str, FITTED))
        raise SpecError(f"fit is not possible: there is no job with {allowed} hosts; measure with --hosts {FITTED[0]}")
    found = fit(jobs, campaign.rates, start)
    said = " ".join(f"--constant {name}={getattr(found, name):.3g}" for name in FREE)
    screen().print(f"Fitted to {len(jobs)} jobs: {said}", highlight=False, soft_wrap=True)
    return found


def _show_errors(cells: Sequence[Cell], machine: str) -> None:
    """Show the errors, all together and apart for the numbers of hosts to which constants are fitted."""
    screen().print(tables.errors(cells))
    known, unknown = ([cell for cell in cells if (cell.hosts in FITTED) == those] for those in (True, False))
    for of, some in (("All jobs", cells), ("Those for fitting", known), ("The others", unknown)):
        if some:
            say(f"{of}: {tables.summary(score(some))}")
    note(machine)
