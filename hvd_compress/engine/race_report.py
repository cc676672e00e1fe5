"""Report of a race: what was tried, what it cost, and why the choice was made."""

from __future__ import annotations

import html
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

from hvd_compress.engine.race import NO_NODES, Comparison, Race, Runner
from hvd_compress.errors import SpecError, short

HEADS = ("Candidate", "Expected exchange, ms", "Relative error", "Steps", "Median step, ms", "Verdict")

_LEGEND = (
    "Expected exchange: compression, measured on a sample of the gradients, and the link, by its measured latency and"
    " bandwidth; it decides only what is tried first, and what is not tried at all. Relative error: squared, of one"
    " rank's gradients in one step. Step times are those of rank 0, in training."
)


def write(path: str | Path, races: Mapping[str, Race]) -> None:
    """Write a report as Markdown, or as HTML if the name ends with ``.html``.

    Args:
        path: The file; one that exists is replaced.
        races: The race of each model or optimizer, by its label.

    Raises:
        SpecError: If the name ends with neither ``.md`` nor ``.html``.
    """
    path = Path(path)
    form = _FORMS.get(path.suffix)
    if form is None:
        raise SpecError(f"path={short(str(path))} is not allowed: its name must end with .md or .html")
    path.write_text(form.page.format("\n\n".join(_blocks(races, form))))


class _Form(NamedTuple):
    """A file format: templates, and how to write a table."""

    page: str
    title: str
    heading: str
    text: str
    table: Callable[[Sequence[Sequence[str]]], str]
    escape: Callable[[str], str]


def _blocks(races: Mapping[str, Race], form: _Form) -> Iterator[str]:
    yield form.title.format("What auto chose")
    for label, race in races.items():
        if len(races) > 1:
            yield form.heading.format(form.escape(label))
        if not race.comparisons or not race.comparisons[0].steps:
            yield form.text.format(f"Nothing yet: the first comparison has not ended after {race.steps} steps.")
        for one in race.comparisons:
            if one.steps:
                yield form.text.format(form.escape(words(one)))
                yield form.table([HEADS, *rows(one)])
    yield form.text.format(_LEGEND)


def words(one: Comparison) -> str:
    """Describe a comparison that has ended, in a few sentences."""
    chosen = one.runners[one.chosen]
    rate = "too fast to be measured" if math.isinf(one.rate) else f"{one.rate / 1e6:.3g} MB/s"
    return (
        f"Steps {one.begin + 1} to {one.begin + one.steps}: chose {chosen.spec}, whose steps took"
        f" {1000 * chosen.seconds:.4g} ms. The link: latency {1000 * one.latency:.3g} ms, bandwidth {rate}. The"
        f" comparison cost {one.cost:.3g} s more than as many steps of {chosen.spec}, as much as"
        f" {one.cost / chosen.seconds:.0f} of them."
    )


def rows(one: Comparison) -> list[list[str]]:
    """Return the cells below `HEADS`, without candidates that need nodes of several ranks if there are none."""
    return [_row(runner) for runner in one.runners if runner.verdict != NO_NODES]


def _row(one: Runner) -> list[str]:
    expected = "-" if math.isnan(one.exchange) else f"{1000 * one.exchange:.3g}"
    error = "-" if math.isnan(one.facts.error) else f"{one.facts.error:.2g}"
    median = f"{1000 * one.seconds:.4g}" if one.times else "-"
    return [one.spec, expected, error, str(len(one.times)), median, one.verdict]


def _markdown_table(rows: Sequence[Sequence[str]]) -> str:
    heads, *others = rows
    return "\n".join("| " + " | ".join(row) + " |" for row in [heads, ["---"] * len(heads), *others])


def _html_table(rows: Sequence[Sequence[str]]) -> str:
    heads, *others = ["".join(f"<td>{html.escape(cell)}</td>" for cell in row) for row in rows]
    lines = [heads.replace("td>", "th>"), *others]
    return "<table>\n" + "\n".join(f"<tr>{line}</tr>" for line in lines) + "\n</table>"


_PAGE = (
    '<!doctype html>\n<meta charset="utf-8">\n<title>What auto chose</title>\n'
    "<style>body {{font-family: sans-serif}} td, th {{padding: 0.2em 0.8em; text-align: left}}</style>\n{}\n"
)

_FORMS = {
    ".md": _Form("{}\n", "# {}", "## {}", "{}", _markdown_table, str),
    ".html": _Form(_PAGE, "<h1>{}</h1>", "<h2>{}</h2>", "<p>{}</p>", _html_table, html.escape),
}
