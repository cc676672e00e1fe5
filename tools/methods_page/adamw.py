"""The loss that methods add with AdamW, as ``hvd-compress compare`` has measured it: ``docs/adamw.json``."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from hvd_compress.engine.spec import parse
from hvd_compress.tools.tables import markdown

Rows = Sequence[Mapping[str, Any]]

LOSSES = ("loss", "loss_without_beta1", "loss_preconditioned")
KEYS = ("spec", *LOSSES, "ratio")
"""Keys of a row; losses are relative to that of ``none``, and null if not measured."""
HEADING = "With AdamW"
KEPT = 0.02
"""A difference that other seeds of the same method make as well."""
CURE = "`betas=(0.0, b2)`"
UPDATES = "`preconditioned`"

_COMPARE = "hvd-compress compare --task transformer --framework ddp --ranks 2 --seeds 3"
_WITHOUT = "--set beta1=0 --output compare-transformer-beta1-0"

_TEXT = """\
A short training of a small model: a byte-level transformer of 0.67 million parameters, 300 steps of 2,048 bytes, on
Python's own sources, by `DistributedDataParallel` with two ranks as processes on one machine with 2 CPU cores (Gloo,
PyTorch 2.13). The loss is that of bytes that the model was not trained on, in nats per byte: 2.055 with `none` for the
first seed. *Loss* is what a method adds to it, *without beta1* what it adds to the same loss of `none` if the optimizer
has `betas=(0.0, b2)`, and *preconditioned* what it adds to that of `none` with AdamW's usual betas if it compresses
updates: medians of three seeds. Up to {kept:g} means nothing, as other seeds make such differences, too. *Ratio* is
float32 bytes for each byte that is sent."""

_READING = f"""\
* **8 bits and 4 bits** (`block8`, `fp8`, `int8`, `natural`, `loco`, `thc`, `qsgd`) keep the loss. Take them with AdamW.
* **Low rank** costs some: `powersgd` next to nothing with `rank=16`, more with `rank=4`; `acpsgd` twice as much.
* **Sparse and one-bit methods with error feedback** lose much with AdamW's usual `b1=0.9`: a residual sends most of a
  gradient in later steps, so it is a momentum, and that of Adam comes on top. {CURE} is the cure: most of the loss
  comes back, at the same bytes (of `arctopk` and `topkc` a third to a half). A warning says so where the optimizer is
  known. `warmup` helps less. With
  `preconditioned=on`, `ctk` and `efsignsgd` keep the loss, as they compress updates: see the last column, and
  [longer trainings](results.md#adamw-with-a-hundredth-of-the-bytes).
* `signum` and `dgc` have a momentum of their own, so {CURE} is all that they accept."""


def cell(rows: Rows, name: str) -> str:
    """Return what a table of methods says on a method: what it adds to the loss, and what helps.

    Args:
        rows: The measurements; without any of this method, only what helps is known.
        name: The method's.
    """
    mine = [row for row in rows if row["spec"].partition(":")[0] == name]
    usual, without, updates = (span(row[key] for row in mine) for key in LOSSES)
    if usual == "kept":
        return usual
    if parse(name).adds_momentum or parse(name).needs_plain_sgd:
        without = without or "not measured"
    parts = [usual, without and f"{CURE}: {without}", updates and f"{UPDATES}: {updates}"]
    return "; ".join(filter(None, parts)) or "not measured"


def span(losses: Iterable[float | None]) -> str:
    """Return the differences as text: one, or the smallest and the largest; nothing where none is measured."""
    known = sorted(loss for loss in losses if loss is not None)
    if known and known[-1] <= KEPT:
        return "kept"
    return " to ".join(dict.fromkeys(map(_figure, (*known[:1], *known[-1:]))))


def section(rows: Rows) -> str:
    """Return the section of ``docs/methods.md``: the commands, the table, and how to read it."""
    usual, without, updates = ([row["spec"] for row in rows if row[key] is not None] for key in LOSSES)
    usual += [f"{spec}{',' if ':' in spec else ':'}preconditioned=on" for spec in updates]
    commands = f"{_COMPARE} --methods {','.join(usual)}\n{_COMPARE} {_WITHOUT} --methods {','.join(without)}"
    table = [("Method", "Ratio", "Loss", "Without beta1", "Preconditioned"), *map(_line, rows)]
    parts = (_TEXT.format(kept=KEPT), f"```sh\n{commands}\n```", markdown(table, "lrrrr"), _READING)
    return f"## {HEADING}\n\n" + "\n\n".join(parts) + "\n"


def _line(row: Mapping[str, Any]) -> tuple[str, ...]:
    refused = row["loss"] is None and parse(row["spec"]).needs_plain_sgd
    usual = "an error" if refused else _figure(row["loss"])
    others = map(_figure, (row[key] for key in LOSSES[1:]))
    return f"`{row['spec']}`", f"{row['ratio']:.1f}", usual, *others


def _figure(loss: float | None) -> str:
    return "" if loss is None else f"{loss:+.3f}"
