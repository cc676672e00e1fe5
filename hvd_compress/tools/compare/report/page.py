"""The report: a page in Markdown, and its pictures beside it."""

from __future__ import annotations

import io
import re
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

from hvd_compress.tools import tables
from hvd_compress.tools.compare.job import Outcome
from hvd_compress.tools.compare.judging import judge
from hvd_compress.tools.compare.measures import PARTS, final, reach
from hvd_compress.tools.compare.report.captions import MEASURED, PICTURES
from hvd_compress.tools.compare.report.tables import main_table_cells, target
from hvd_compress.tools.compare.report.wording import words
from hvd_compress.tools.compare.results import Comparison, write_whole
from hvd_compress.tools.units import NONE, counted, metric, number, seconds, setting

_DPI = 150
"""The resolution of the pictures."""

_SPECIAL = re.compile(r"([\\`*\[\]<>|#&~$]|(?<!\w)_|_(?!\w))")

_TABLE_NOTE = (
    "Medians over the seeds, and the range. Bytes are per step. vNMSE is the squared error of the compressed mean of"
    " the gradients, divided by the squared norm of the exact mean: 0 is exact."
)


def write(comparison: Comparison, folder: Path) -> None:
    """Write ``report.md`` and its pictures into a folder, which is made if there is none.

    Raises:
        MissingPackageError: If matplotlib is not installed.
        OSError: If a file cannot be written.
    """
    folder.mkdir(parents=True, exist_ok=True)
    for picture in PICTURES if comparison.outcomes else ():
        file = io.BytesIO()
        picture.draw(comparison).savefig(file, format="png", dpi=_DPI)
        write_whole(folder / f"{picture.name}.png", file.getvalue())
    write_whole(folder / "report.md", markdown(comparison))


def markdown(comparison: Comparison) -> str:
    """Return the page."""
    return "\n\n".join(_parts(comparison)) + "\n"


def _parts(comparison: Comparison) -> Iterator[str]:
    yield f"# Does compression pay for {_text(comparison.task)}?"
    yield _text("; ".join(_circumstances(comparison)))
    first, *rest = (_with_code(sentence, comparison.methods) for sentence in words(comparison))
    yield f"**{first}**"
    if rest:
        yield _list(rest)
    yield "## Methods, best first"
    heads, *rows = main_table_cells(comparison)
    yield _table(heads, rows)
    yield _TABLE_NOTE
    for picture in PICTURES if comparison.outcomes else ():
        yield f"## {picture.title}"
        yield f"![{picture.alt}]({picture.name}.png)"
        yield picture.caption
        if picture.name == "step":
            yield _split_table(comparison)
    yield from _learning_rates(comparison)
    yield from _failures(comparison)
    yield from _how(comparison)


def _circumstances(comparison: Comparison) -> Iterator[str]:
    yield comparison.framework
    yield comparison.where
    yield f"target: {target(comparison)}"
    yield f"{counted(comparison.seeds, 'seed')} each"
    yield comparison.begun.replace("T", " ").replace("+00:00", " UTC")


def _split_table(comparison: Comparison) -> str:
    """Return the parts of a step; those that were not measured are marked."""
    rows = []
    for one in judge(comparison):
        if one.split is None:
            continue
        unmeasured = {part for part in one.split.unmeasured if part != "wait"}
        parts = [NONE if part in unmeasured else number(1000 * getattr(one.split, part)) for part in PARTS]
        source = "what is left" if one.split.derived else "measured"
        rows.append([one.spec, number(1000 * (one.step or 0)), *parts, source])
    return _table(["Method", "Step, ms", "Compute, ms", "Encode, ms", "Wait, ms", "Decode, ms", "Wait is"], rows)


def _learning_rates(comparison: Comparison) -> Iterator[str]:
    """Yield the learning rates that were tried, if there were several."""
    if not comparison.tried:
        return
    known = [(one, "tried") for one in comparison.tried]
    known += [(one, "taken") for one in comparison.outcomes if one.seed == min(o.seed for o in comparison.of(one.spec))]
    order = {spec: place for place, spec in enumerate(comparison.methods)}
    known.sort(key=lambda pair: (order.get(pair[0].spec, len(order)), pair[0].lr or 0.0))
    yield "## Learning rates, with the first seed"
    heads = ["Method", "Learning rate", "Time to target, s", f"Final {comparison.goal.metric}", "Result"]
    yield _table(heads, [_learning_rate(one, what, comparison.target) for one, what in known])


def _learning_rate(one: Outcome, what: str, aim: float) -> list[str]:
    reached, end = reach(one, aim), final(one)
    return [
        one.spec,
        NONE if one.lr is None else setting(one.lr),
        seconds(reached.seconds) if reached else NONE,
        NONE if end != end else metric(end),
        f"{what}, diverged" if one.diverged else what,
    ]


def _failures(comparison: Comparison) -> Iterator[str]:
    if comparison.failures:
        yield "## Failures"
    for one in comparison.failures:
        rate = "" if one.lr is None else f", learning rate {setting(one.lr)}"
        yield f"{_code(one.spec)}, seed {one.seed}{rate}:"
        yield _block(one.message)


def _how(comparison: Comparison) -> Iterator[str]:
    """Yield how to reproduce the comparison, its machine, and how it was measured."""
    yield "## Reproduce"
    yield _block(comparison.command)
    yield f"On {_text(str(comparison.machine))}. All figures are in results.json."
    if settings := _settings(comparison):
        yield "## Conditions"
        yield _table(["Setting", "Value"], [[name, _value(value)] for name, value in settings.items()])
    yield "## Method of measurement"
    yield _list(MEASURED)


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


def _table(heads: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """Return a table of plain text."""
    cells = [[_text(cell) for cell in row] for row in (heads, *rows)]
    return tables.markdown(cells, f"l{'r' * (len(heads) - 2)}l")


def _list(items: Iterable[str]) -> str:
    return "\n".join(f"* {item}" for item in items)


def _text(text: str) -> str:
    """Return any text as Markdown that shows it as it is, on one line."""
    return _SPECIAL.sub(r"\\\1", " ".join(text.split()))


def _code(text: str) -> str:
    """Return any text as code within a line."""
    fence = "`" * (1 + max(map(len, re.findall("`+", text)), default=0))
    pad = " " if text.startswith("`") or text.endswith("`") else ""
    return f"{fence}{pad}{text}{pad}{fence}"


def _block(text: str) -> str:
    """Return any text as a block of code."""
    fence = "`" * max(3, 1 + max(map(len, re.findall("`+", text)), default=0))
    return f"{fence}text\n{text}\n{fence}"


def _with_code(sentence: str, methods: Iterable[str]) -> str:
    """Mark the methods in a sentence as code."""
    specs = sorted(methods, key=len, reverse=True)
    found = "|".join(re.escape(one) + (r"(?= \(no)" if one == "none" else "") for one in specs)
    parts = re.split(rf"(?<![\w:=,.])({found})(?![\w=]|[:,]\w)", sentence)
    return "".join(_code(part) if place % 2 else _SPECIAL.sub(r"\\\1", part) for place, part in enumerate(parts))
