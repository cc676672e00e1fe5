"""``docs/methods.md``: the catalogue, then what was measured."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from hvd_compress.errors import SpecError
from hvd_compress.methods import REGISTRY
from hvd_compress.methods.lowrank import LowRank
from hvd_compress.tools.tables import markdown
from hvd_compress.tools.units import error
from methods_page import adamw
from methods_page.catalogue import catalogue
from methods_page.vnmse import BUDGETS, bare, name_of

MEASURED = "## Error of one exchange"
"""The heading that ends the part which depends on the code alone."""

ACCURACY = ("framework", "spec", "accuracy", "baseline", "bytes_per_step", "tolerance", "note")


def page(
    measured: Mapping[str, Any],
    command: str,
    accuracy: Sequence[Mapping[str, Any]] = (),
    with_adamw: adamw.Rows = (),
) -> str:
    """Return the page of what a command has ``measured``, and of ``accuracy.json`` and ``adamw.json``."""
    parts = [static(with_adamw), vnmse_section(measured, command), claims_section()]
    if accuracy:
        parts.append(accuracy_section(accuracy))
    if with_adamw:
        parts.append(adamw.section(with_adamw))
    return "\n".join(parts)


def static(with_adamw: adamw.Rows = ()) -> str:
    """Return the description of the methods, the part before `MEASURED`."""
    head = "# The methods and their errors\n\nWritten by `python tools/methods_page page`; do not edit."
    return f"{head}\n\n{catalogue(with_adamw)}"


def rows(measured: Mapping[str, Any]) -> dict[str, list[tuple[str, ...]]]:
    """Return the results as text: spec, bits, then the error on each input; by budget, as on the first input."""
    table: dict[str, dict[str, Any]] = {}
    for result in measured["results"]:
        table.setdefault(result["spec"], {})[result["input"]] = result
    found: dict[str, list[tuple[str, ...]]] = {name: [] for name in BUDGETS}
    for spec, cells in table.items():
        errors = [figure(cells[name]) if name in cells else "" for name in measured["sizes"]]
        bits = [cell["bits"] for cell in cells.values()]
        found[next(name for name, least in BUDGETS.items() if bits[0] >= least)].append((spec, span(bits), *errors))
    return {name: lines for name, lines in found.items() if lines}


def figure(result: Mapping[str, Any]) -> str:
    """Return an error as text; where the mean has no scale, that of its direction, with a mark."""
    sign = REGISTRY[name_of(result["spec"])].scaleless
    value = result["direction" if sign else "vnmse"]
    return error(value) + "*" * sign


def span(bits: Sequence[float]) -> str:
    """Return bits per coordinate, or their range where inputs differ."""
    least, most = (f"{b:.2f}" if b < 10 else f"{b:.1f}" for b in (min(bits), max(bits)))
    return most if max(bits) < 1.03 * min(bits) else f"{least}-{most}"


def notes(measured: Mapping[str, Any]) -> Iterator[str]:
    """Yield what a reader of the table must know."""
    sizes = ", ".join(f"{name} {size:,}" for name, size in measured["sizes"].items())
    names = dict.fromkeys(name_of(result["spec"]) for result in measured["results"])
    warmed = ", ".join(name for name in names if REGISTRY[name].card.learns)
    signs = ", ".join(name for name in names if REGISTRY[name].scaleless)
    yield f"{measured['ranks']} ranks. Coordinates: {sizes}."
    yield "Bits per coordinate are those that a rank hands to collectives, with all metadata."
    yield "One exchange, without error feedback: what is missing here comes later in training where feedback is on."
    for name in names:
        if REGISTRY[name].card.nonzero < 1:
            yield f"{name} is for gradients that are mostly zero, as in embedding; the others it sends as they are."
    if warmed:
        yield f"After {measured['steps']} exchanges of the same gradients, which flatters: {warmed}."
    if any(issubclass(REGISTRY[name], LowRank) for name in names):
        yield "Low-rank methods get synthetic inputs as a square matrix, and the digits as the tensors of the model."
    if signs:
        yield f"* {signs}: the mean is 1 or -1 everywhere, so this is the error at the best scale."


def vnmse_section(measured: Mapping[str, Any], command: str) -> str:
    """Return the table of errors as Markdown, with bounds beside it."""
    head = ("Method", "Bits", *measured["sizes"], "Bound")
    parts = [
        MEASURED,
        "`vNMSE = ||mean_hat - mean||^2 / ||mean||^2`, the metric of Han et al., Beyond Throughput and Compression"
        " Ratios, 2024.\nLower is better: 0 is exact, and 1 is what sending nothing gives.",
        f"```sh\n{command}\n```",
        _INPUTS,
        "How to read the tables:",
        "\n".join(f"* {note}".replace("* *", "* \\*") for note in notes(measured)),
        _BOUNDS,
    ]
    for budget, lines in rows(measured).items():
        table = [head, *((f"`{line[0]}`", *line[1:], _bound(line[0])) for line in lines)]
        parts += [f"### {budget.capitalize()}", markdown(table, "l" + "r" * (len(head) - 1))]
    return "\n\n".join(parts) + "\n"


def _bound(spec: str) -> str:
    value = bare(spec).core.bound
    return "" if value is None else f"{value:.3g}"


def claims_section() -> str:
    """Return the claims of the papers."""
    rows = [
        ("Method", "Stated"),
        *((f"[`{name}`](#{name})", cls.card.claim) for name, cls in REGISTRY.items() if cls.card.claim),
    ]
    note = "As given there, for their models, data and machines; none of it was reproduced here."
    return f"## What the papers' abstracts state\n\n{note}\n\n{markdown(rows, 'll')}\n"


def accuracy_section(results: Sequence[Mapping[str, Any]]) -> str:
    """Return the accuracies of the demo."""
    head = ("Framework", "Method", "Accuracy", "Uncompressed", "Bytes per step", "Allowed loss", "Note")
    table: list[tuple[str, ...]] = [head]
    for r in results:
        numbers = f"{r['accuracy']:.4f}", f"{r['baseline']:.4f}", f"{r['bytes_per_step']:,}", f"{r['tolerance']:.3f}"
        table.append((str(r["framework"]), f"`{r['spec']}`", *numbers, str(r.get("note") or "")))
    return f"## Accuracy on the demo's CNN\n\n{_ACCURACY}\n\n{markdown(table, 'llrrrrl')}\n"


def read_json(path: Path, keys: Sequence[str] = ()) -> Any:
    """Read a file of results.

    Raises:
        SpecError: If it cannot be read, or lacks a key.
    """
    try:
        data = json.loads(path.read_text())
        for item in data if isinstance(data, list) else [data]:
            for key in keys:
                item[key]
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise SpecError(f"cannot read the results in {path}: {type(error).__name__} {error}") from None
    return data


_ACCURACY = """\
Of `examples/pytorch/digits.py` and `examples/keras/digits.py` under `horovodrun` with 2 ranks: 10 epochs, 220 steps,
one seed, so differences below one per cent mean nothing. SGD with learning rate 0.1 and momentum 0.8, unless noted.

```sh
python examples/accuracy.py docs/accuracy.json
```"""

_INPUTS = """\
Inputs:

* `gaussian`: independent normal numbers, on all ranks. The ranks have nothing in common.
* `blocky`: heavy-tailed (Student's t times a log-normal magnitude for each 256 neighbours). Half of its energy is
  common to all ranks.
* `shuffled`: `blocky` with its coordinates in random order: methods that choose places, such as `topkc`, must lose.
* `embedding`: mostly zero. Each rank has used 1% of the rows of 64, others than the other ranks.
* `digits`: a real gradient, of the CNN in `examples/pytorch/digits.py` after 2 epochs, one minibatch of 32 for each
  rank. It is small: 151,306 coordinates."""

_BOUNDS = """\
*Bound* is a textbook worst case of the error of one rank: `1 - k/d` for the top or random k of d coordinates,
`min(d/s^2, sqrt(d)/s)` for QSGD with s levels and blocks of d, 1/8 for natural compression. It holds on average, and
for the mean where the ranks' gradients are independent (`gaussian`); where they are equal and rounded independently,
the error of the mean of n ranks is n times smaller."""
