"""The subcommand ``hvd-compress plan validate``."""

from __future__ import annotations

import signal
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Optional

import typer
from rich.console import Console
from rich.markup import escape

from hvd_compress.errors import SpecError
from hvd_compress.tools.bench.commands import refusals
from hvd_compress.tools.bench.distributed.shapes import WIDTH
from hvd_compress.tools.bench.jobs import read_link
from hvd_compress.tools.bench.machine import Machine
from hvd_compress.tools.plan import tables
from hvd_compress.tools.plan.constants import Constants, read_constants
from hvd_compress.tools.plan.fitting import FREE, fit
from hvd_compress.tools.plan.model import matrix_side
from hvd_compress.tools.plan.planning import Constant, Size, ToJson, Turns, measured_visibly, visibly
from hvd_compress.tools.plan.rates import Rates
from hvd_compress.tools.plan.validation import (
    FITTED,
    HOSTS,
    LINKS,
    METHODS,
    Campaign,
    Cell,
    compare,
    measure_job,
    score,
)


def validate(
    hosts: Annotated[
        Optional[str],  # noqa: UP045
        typer.Option(help=f"Emulated hosts, of a rank each. [{','.join(map(str, HOSTS))}]"),
    ] = None,
    rate: Annotated[
        Optional[str],  # noqa: UP045
        typer.Option(help=f"What each can send and receive. [{','.join(LINKS)}]"),
    ] = None,
    steps: Annotated[int, typer.Option(min=1, help="Measured steps of each method in each job.")] = 4,
    size: Size = 8_388_608,
    turns: Turns = 7,
    measured: Annotated[
        Optional[Path],  # noqa: UP045
        typer.Option(metavar="FILE", help="Do not measure; take what --json has written."),
    ] = None,
    fitted: Annotated[bool, typer.Option("--fit", help="First fit the constants, to 2 and 8 hosts alone.")] = False,
    constant: Constant = None,
    as_json: ToJson = None,
    to_markdown: Annotated[
        Optional[Path],  # noqa: UP045
        typer.Option("--markdown", metavar="FILE", help="Write measured and predicted times as a table."),
    ] = None,
) -> None:
    """Measure whole steps on emulated hosts, and tell how far from them the predictions are (as root).

    The machine should do nothing else meanwhile.
    """
    signal.signal(signal.SIGTERM, signal.default_int_handler)  # so that hosts and ranks are removed after that, too
    with refusals():
        constants = read_constants(constant or ())
        numbers = list(HOSTS) if hosts is None else read_hosts(hosts)
        links = list(LINKS) if rate is None else read_links(rate)
        if measured:
            for name, given in (("hosts", hosts), ("rate", rate)):
                if given is not None:
                    raise SpecError(f"{name}={given!r} is not allowed with --measured: FILE has its own; leave it out")
            campaign = Campaign.read(measured)
        else:
            wanted = [(number, link) for number in numbers for link in links]
            campaign = _measure(
                wanted, steps, measured_visibly(METHODS, size, matrix_side(size, WIDTH), turns), as_json
            )
        if fitted:
            constants = _fitted(campaign, constants)
        cells = compare(campaign.jobs, campaign.rates, constants)
        if to_markdown:
            to_markdown.write_text(tables.markdown(cells))
        _show(cells, campaign.machine)


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


def _measure(wanted: Sequence[tuple[int, str]], steps: int, rates: Rates, path: Path | None) -> Campaign:
    """Job by job; what is measured is written at once, as it takes long."""
    campaign = Campaign(str(Machine.here()), rates, [])
    with visibly("Measuring steps") as progress:
        for number, (hosts, link) in enumerate(wanted):
            progress(f"{hosts} hosts, {link}, job {number + 1} of {len(wanted)}")
            campaign = campaign._replace(jobs=[*campaign.jobs, measure_job(hosts, link, steps)])
            if path:
                campaign.write(path)
    return campaign


def _fitted(campaign: Campaign, start: Constants) -> Constants:
    """Fit, and say how good that is where it was fitted."""
    jobs = [job for job in campaign.jobs if job.hosts in FITTED]
    if not jobs:
        allowed = " or ".join(map(str, FITTED))
        raise SpecError(f"fit is not possible: there is no job with {allowed} hosts; measure with --hosts {FITTED[0]}")
    found = fit(jobs, campaign.rates, start)
    said = " ".join(f"--constant {name}={getattr(found, name):.3g}" for name in FREE)
    Console().print(f"Fitted to {len(jobs)} jobs: {said}", highlight=False, soft_wrap=True)
    return found


def _show(cells: Sequence[Cell], machine: str) -> None:
    """The errors, all together and for those numbers of hosts to which constants are fitted or not."""
    console = Console()
    console.print(tables.errors(cells))
    known, unknown = ([cell for cell in cells if (cell.hosts in FITTED) == those] for those in (True, False))
    for of, some in (("All jobs", cells), ("Those for fitting", known), ("The others", unknown)):
        if some:
            console.print(f"{of}: {tables.summary(score(some))}", highlight=False)
    console.print(f"[dim]{escape(machine)}[/dim]", highlight=False)
