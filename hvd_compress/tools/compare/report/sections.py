"""The parts of the page, in HTML. All text goes through `escape`."""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from html import escape
from typing import Any

from hvd_compress.tools.compare.job import Outcome
from hvd_compress.tools.compare.judging import Verdict, judge
from hvd_compress.tools.compare.measures import PARTS, final, reach
from hvd_compress.tools.compare.report.captions import MEASURED
from hvd_compress.tools.compare.report.tables import Cell, columns, target
from hvd_compress.tools.compare.report.wording import words
from hvd_compress.tools.compare.results import Comparison
from hvd_compress.tools.units import NONE, counted, metric, number, seconds, setting

_MARKS = {
    Verdict.PAYS: "good",
    Verdict.REACHED: "good",
    Verdict.DIVERGED: "bad",
    Verdict.FAILED: "bad",
}


def head(comparison: Comparison, title: str) -> str:
    what = [
        comparison.framework,
        comparison.where,
        f"target: {target(comparison)}",
        f"{counted(comparison.seeds, 'seed')} each",
        comparison.begun.replace("T", " ").replace("+00:00", " UTC"),
    ]
    return f'<h1>{escape(title)}</h1>\n<p class="soft">{escape("; ".join(what))}</p>'


def verdict(comparison: Comparison) -> str:
    first, *rest = (_with_code(sentence, comparison.methods) for sentence in words(comparison))
    pays = any(_MARKS.get(one.verdict) == "good" for one in judge(comparison))
    more = f"\n<ul>{''.join(f'<li>{one}</li>' for one in rest)}</ul>" if rest else ""
    return f'<section class="card verdict{"" if pays else " no"}">\n<p class="lead">{first}</p>{more}\n</section>'


def _with_code(sentence: str, methods: Iterable[str]) -> str:
    """Mark the methods in a sentence."""
    specs = sorted((escape(one) for one in methods), key=len, reverse=True)
    found = "|".join(re.escape(one) + (r"(?= \(no)" if one == "none" else "") for one in specs)
    pattern = rf"(?<![\w:=,.])({found})(?![\w:=]|,\w)"
    return re.sub(pattern, lambda match: f"<code>{_breakable(match[1])}</code>", escape(sentence))


def _breakable(spec: str) -> str:
    """Let a spec, as HTML, break at its punctuation."""
    return re.sub("([:,])", r"\1<wbr>", spec)


def main_table(comparison: Comparison) -> str:
    _, *figures, last = columns(comparison)
    rows = []
    for one in judge(comparison):
        mark = f'<span class="mark {_MARKS.get(one.verdict, "")}">{escape(one.verdict.value)}</span>'
        found = f"{mark}{_under(last.cell(one))}"
        rows.append([escape(one.spec), found, *(_cell(column.cell(one)) for column in figures)])
    heads = ["Method", "Verdict", *(column.head for column in figures)]
    note = (
        '<p class="soft">Medians over the seeds; below them, the range. Bytes are per step. vNMSE is the squared'
        " error of the compressed mean of the gradients, divided by the squared norm of the exact mean: 0 is exact.</p>"
    )
    return f"<h2>Methods, best first</h2>\n{_table('Methods', heads, rows, 'methods')}\n{note}"


def _cell(cell: Cell) -> str:
    return escape(cell.text) + _under(cell)


def _under(cell: Cell) -> str:
    return f'<span class="under">{escape(cell.under)}</span>' if cell.under else ""


def figure(title: str, source: str, alt: str, caption: str) -> str:
    """Return a picture that scrolls on narrow screens."""
    box = f'<div class="scroll" tabindex="0" role="region" aria-label="{escape(title)}">'
    return (
        f"<h2>{escape(title)}</h2>\n<figure>\n{box}"
        f'<img src="{source}" alt="{escape(alt)}"></div>\n<figcaption>{escape(caption)}</figcaption>\n</figure>'
    )


def split_table(comparison: Comparison) -> str:
    """Return the parts of a step as figures; those that were not measured are marked."""
    rows = []
    for one in judge(comparison):
        if one.split is None:
            continue
        unmeasured = {part for part in one.split.unmeasured if part != "wait"}
        parts = [NONE if part in unmeasured else number(1000 * getattr(one.split, part)) for part in PARTS]
        source = "what is left" if one.split.derived else "measured"
        rows.append([escape(cell) for cell in (one.spec, number(1000 * (one.step or 0)), *parts, source)])
    heads = ["Method", "Step, ms", "Compute, ms", "Encode, ms", "Wait, ms", "Decode, ms", "Wait is"]
    return _table("The parts of a step", heads, rows) if rows else ""


def rates(comparison: Comparison) -> str:
    """Return the learning rates that were tried, if there were several."""
    if not comparison.tried:
        return ""
    known = [(one, "tried") for one in comparison.tried]
    known += [(one, "taken") for one in comparison.outcomes if one.seed == min(o.seed for o in comparison.of(one.spec))]
    order = {spec: place for place, spec in enumerate(comparison.methods)}
    known.sort(key=lambda pair: (order.get(pair[0].spec, len(order)), pair[0].lr or 0.0))
    rows = [[escape(cell) for cell in _rate(one, what, comparison.target)] for one, what in known]
    heads = ["Method", "Learning rate", "Time to target, s", f"Final {comparison.goal.metric}", "Result"]
    return f"<h2>Learning rates, with the first seed</h2>\n{_table('Learning rates', heads, rows)}"


def _rate(one: Outcome, what: str, aim: float) -> list[str]:
    reached, end = reach(one, aim), final(one)
    return [
        one.spec,
        NONE if one.lr is None else setting(one.lr),
        seconds(reached.seconds) if reached else NONE,
        NONE if end != end else metric(end),
        f"{what}, diverged" if one.diverged else what,
    ]


def failures(comparison: Comparison) -> str:
    told = []
    for one in comparison.failures:
        rate = "" if one.lr is None else f", learning rate {setting(one.lr)}"
        told.append(
            f"<p><code>{escape(one.spec)}</code>, seed {one.seed}{escape(rate)}:</p>\n<pre>{escape(one.message)}</pre>"
        )
    return "\n".join(["<h2>Failures</h2>", *told]) if told else ""


def how(comparison: Comparison) -> str:
    """Return how to reproduce the comparison, its machine, and how it was measured."""
    conditions = [[escape(name), escape(_value(value))] for name, value in _settings(comparison).items()]
    notes = "".join(f"<li>{escape(one)}</li>" for one in MEASURED)
    parts = [
        "<h2>Reproduce</h2>",
        f"<pre>{escape(comparison.command)}</pre>",
        f'<p class="soft">On {escape(str(comparison.machine))}. All figures are in results.json.</p>',
        "<h2>Method of measurement</h2>",
        f'<ul class="prose">{notes}</ul>',
    ]
    if conditions:
        parts.insert(3, f"<h2>Conditions</h2>\n{_table('Conditions', ['Setting', 'Value'], conditions, 'words')}")
    return "\n".join(parts)


def _settings(comparison: Comparison) -> dict[str, Any]:
    """Return the conditions, with the task's own epochs and learning rate where the user named none."""
    found = {name: value for name, value in comparison.conditions.items() if value not in (None, {}, [], "")}
    if comparison.outcomes:
        goal = comparison.goal
        found |= {"epochs": goal.epochs} if goal.epochs else {}
        found |= {"steps": goal.steps, "parameters": f"{goal.parameters:,}"}
        if goal.lr is not None and all(one.lr is None for one in comparison.outcomes):
            found["learning rate"] = goal.lr
    return found


def _value(value: Any) -> str:
    if value is None or value in ({}, [], ""):
        return NONE
    if isinstance(value, dict):
        return ", ".join(f"{name}={_value(one)}" for name, one in value.items())
    return f"{value:g}" if isinstance(value, float) else str(value)


def _table(label: str, heads: Sequence[str], rows: Iterable[Sequence[str]], kind: str = "") -> str:
    """Return a table that scrolls in a box of its own; cells are HTML already."""
    top = "".join(f'<th scope="col">{escape(one)}</th>' for one in heads)
    body = "\n".join(
        f'<tr><th scope="row">{_breakable(row[0])}</th>{"".join(f"<td>{cell}</td>" for cell in row[1:])}</tr>'
        for row in rows
    )
    return (
        f'<div class="card scroll" tabindex="0" role="region" aria-label="{escape(label)}">\n<table class="{kind}">\n'
        f"<thead><tr>{top}</tr></thead>\n<tbody>\n{body}\n</tbody>\n</table>\n</div>"
    )
