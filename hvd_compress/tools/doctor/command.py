"""The subcommand ``hvd-compress doctor``."""

from __future__ import annotations

from typing import Annotated, Any

import typer
from rich.console import Console
from rich.markup import escape

from hvd_compress.tools.doctor.cures import Cure
from hvd_compress.tools.doctor.facts import TITLES, Facts, collect
from hvd_compress.tools.doctor.rules import Finding, judge, usable
from hvd_compress.tools.doctor.trials import Trial, attempt, findings, jobs
from hvd_compress.tools.tables import plain
from hvd_compress.tools.terminal import ToJson, app, refusals, screen, write_json

_MARKS = {"ok": "[green]ok[/]", "note": "[dim]note[/]", "warning": "[yellow]warning[/]", "fault": "[red]fault[/]"}


@app.command()
def doctor(
    run: Annotated[
        bool, typer.Option("--run", help="Also make a step on two ranks of this machine; can take minutes.")
    ] = False,
    timeout: Annotated[float, typer.Option(min=1, help="Seconds after which a trial that hangs is ended.")] = 180,
    as_json: ToJson = None,
) -> None:
    """Check whether compression can work here.

    Each fault comes with its cure. The exit status is 1 if compression cannot work.
    """
    waiting, console = Console(stderr=True), screen()
    typer.echo(
        "Importing the frameworks and Horovod. On the first run, kernels are compiled, which takes minutes ...",
        err=True,
    )
    with waiting.status("Importing ..."):
        facts = collect()
    found, done = judge(facts), []
    show(console, found)
    for framework, controller in jobs(facts) if run else ():
        typer.echo(f"Trying {framework.title} with {controller}, at most {timeout:g} s ...", err=True)
        done.append(attempt(facts, framework.name, controller, timeout))
    tried = list(findings(facts, done))
    if tried:
        show(console, tried)
    works = working(facts, done, run)
    with refusals():
        write_json(as_json, report(facts, found + tried, done, works))
    console.print(verdict(works, run), highlight=False)
    raise typer.Exit(not works)


def working(facts: Facts, done: list[Trial], run: bool) -> list[str]:
    """Return the frameworks with which compression works, if that was tried, or else can work."""
    proven = {trial.framework for trial in done if trial.works}
    return [name for name in usable(facts) if name in proven or not run]


def verdict(works: list[str], run: bool) -> str:
    if not works:
        return "[bold red]Compression cannot work here yet.[/]"
    *others, last = (TITLES[name] for name in works)
    titles = f"{', '.join(others)} and {last}" if others else last
    if run:
        return f"[bold green]Compression works here, with {titles}.[/]"
    return f"[bold green]Compression can work here, with {titles}.[/] To try it out: hvd-compress doctor --run"


def report(facts: Facts, found: list[Finding], done: list[Trial], works: list[str]) -> dict[str, Any]:
    return {
        "works": works,
        "findings": [f._asdict() | {"cure": f.cure._asdict() if f.cure else None} for f in found],
        "facts": facts._asdict() | {"frameworks": [framework._asdict() for framework in facts.frameworks]},
        "trials": [trial._asdict() for trial in done],
    }


def show(console: Console, found: list[Finding]) -> None:
    """Print the findings, and below them what to do."""
    drawn = plain(gap=2)
    drawn.add_column("", no_wrap=True)
    drawn.add_column("Part", style="bold", no_wrap=True)
    drawn.add_column("Found", overflow="fold")
    for finding in found:
        drawn.add_row(_MARKS[finding.status], escape(finding.subject), escape(finding.found))
    console.print(drawn)
    for cure, subjects in remedies(found).items():
        what = f"{_MARKS[subjects[0].status]} [bold]{escape(', '.join(f.subject for f in subjects))}[/]"
        console.print(f"\n{what}: {escape(cure.text)}")
        if cure.command:  # in one line however long, so that it can be copied
            console.print(f"    {escape(cure.command)}", soft_wrap=True, highlight=False, style="cyan")
    console.print()


def remedies(found: list[Finding]) -> dict[Cure, list[Finding]]:
    """Return what to do, faults first, and for which findings: one cure may help against several."""
    cures: dict[Cure, list[Finding]] = {}
    for finding in sorted(found, key=lambda finding: finding.status != "fault"):
        if finding.cure:
            cures.setdefault(finding.cure, []).append(finding)
    return cures
