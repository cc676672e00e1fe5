"""Compare predictions of ``hvd-compress advise`` with measured steps, on emulated hosts (as root).

It takes 10 minutes. The machine should do nothing else meanwhile::

    python tools/advise_validation --json measured.json --markdown measured.md
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated

import typer

ROOT = Path(__file__).resolve().parents[2]
sys.path[:0] = [str(ROOT), str(ROOT / "tools")]

from advise_validation import tables  # noqa: E402
from advise_validation.campaign import FITTED, METHODS, Campaign, Cell, compare, measure_job, score  # noqa: E402
from advise_validation.fitting import FREE, fit  # noqa: E402
from hvd_compress.errors import SpecError  # noqa: E402
from hvd_compress.tools.advise import rates  # noqa: E402
from hvd_compress.tools.advise.constants import Constants, read_constants  # noqa: E402
from hvd_compress.tools.advise.model import Framework, matrix_side  # noqa: E402
from hvd_compress.tools.advise.rates import Rates  # noqa: E402
from hvd_compress.tools.advise.target import read_target  # noqa: E402
from hvd_compress.tools.advise.validated import HOSTS, LINKS  # noqa: E402
from hvd_compress.tools.bench.distributed.shapes import WIDTH  # noqa: E402
from hvd_compress.tools.bench.jobs import read_link  # noqa: E402
from hvd_compress.tools.bench.machine import Machine  # noqa: E402
from hvd_compress.tools.terminal import (  # noqa: E402
    STDOUT,
    ToJson,
    note,
    refusals,
    remove_jobs_on_sigterm,
    say,
    screen,
    status,
    writable,
    write_json,
)

app = typer.Typer(rich_markup_mode=None)


@app.command()
def main(
    hosts: Annotated[
        str | None, typer.Option(help=f"Emulated hosts, of a rank each. [{','.join(map(str, HOSTS))}]")
    ] = None,
    rate: Annotated[str | None, typer.Option(help=f"Bandwidth of each host. [{','.join(LINKS)}]")] = None,
    framework: Annotated[Framework | None, typer.Option(help="What exchanges gradients. [horovod]")] = None,
    steps: Annotated[int, typer.Option(min=1, help="Measured steps of each method in each job.")] = 4,
    size: Annotated[
        int, typer.Option(min=1024, help="Numbers in the gradient that compressing is measured on.")
    ] = 8_388_608,
    turns: Annotated[int, typer.Option(min=1, help="How often that is measured.")] = 7,
    measured: Annotated[
        Path | None, typer.Option(metavar="FILE", help="Do not measure; take what --json has written.")
    ] = None,
    fitted: Annotated[bool, typer.Option("--fit", help="First fit the constants, to 2 and 8 hosts alone.")] = False,
    constant: Annotated[
        list[str] | None, typer.Option("--constant", metavar="NAME=VALUE", help="See docs/advise.md; repeatable.")
    ] = None,
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
            with status("Measuring how long compressing takes here") as begins:
                known = rates.measure(METHODS, size, matrix_side(size, WIDTH), turns, begins)
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
    wanted: Sequence[tuple[int, str]], framework: Framework, steps: int, known: Rates, path: Path | None
) -> Campaign:
    """Measure job by job; results are written at once, as it takes long."""
    campaign = Campaign(str(Machine.here()), known, [])
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


if __name__ == "__main__":
    app()
