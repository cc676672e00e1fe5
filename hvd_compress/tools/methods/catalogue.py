"""Facts of the methods: from their docstrings, and from one exchange of each."""

from __future__ import annotations

import re

from hvd_compress.core.method import written
from hvd_compress.engine.spec import unknown
from hvd_compress.errors import SpecError
from hvd_compress.methods import REGISTRY, MethodInfo, methods
from hvd_compress.tools.bench.traffic import SIZES, cost
from hvd_compress.tools.methods.docstrings import read
from hvd_compress.tools.tables import markdown


def info(name: str) -> MethodInfo:
    """Return the line of the catalogue with this name.

    Raises:
        SpecError: If there is none.
    """
    for line in methods():
        if line.name == name:
            return line
    raise SpecError(unknown("method", name, REGISTRY))


def memory(line: MethodInfo) -> str:
    """Return the memory that a method has where the spec does not say."""
    options = REGISTRY[line.name].memory
    given = ", ".join(f"{key}={written(value)}" for key, value in options.items())
    if not line.feedback:
        return "off"
    return f"on ({given})" if given else "on"


def numbers(name: str) -> tuple[str, str, str, str]:
    """Return rounds, whether traffic is constant in the ranks, bytes of state per coordinate, bits by world size."""
    found = cost(name)
    bits = " / ".join(f"{value:.3g}" for value in found.bits.values())
    return str(found.rounds), "yes" if found.allreduce else "no", f"{found.state_bytes:.3g}", bits


def section(name: str) -> str:
    """Return the description of a method, as Markdown."""
    line = info(name)
    doc = read(REGISTRY[name])
    rounds, allreduce, state, bits = numbers(name)
    facts = [
        f"Travels by: {line.collective}; rounds: {rounds}; traffic about constant with more ranks: {allreduce}",
        f"Bits per coordinate that a rank sends, with {', '.join(map(str, SIZES))} ranks: {bits}",
        f"Unbiased: {line.unbiased}",
        f"Error feedback: {memory(line)}",
        f"Keeps{', besides the residual' if line.feedback else ''}: {line.state}; bytes per coordinate: {state}",
        f"Paper: {line.paper}",
    ]
    parts = [f"### {name}", doc.text, "\n".join(f"* {fact}" for fact in facts)]
    if line.hyper_parameters:
        rows = [("Hyper-parameter", "Default", "Meaning")]
        rows += [(f"`{key}`", f"`{written(v)}`", doc.args.get(key, "")) for key, v in line.hyper_parameters.items()]
        parts.append(markdown(rows, "lll"))
    return "\n\n".join(parts)


def summary(name: str) -> str:
    """Return the first sentence of a method's docstring, without references to its paper."""
    does = read(REGISTRY[name]).text.partition("\n\n")[0].replace("\n", " ").partition(". ")[0].rstrip(".:")
    return re.sub(r" \([^)]* of the paper[^)]*\)", "", does)
