"""The methods as Markdown: from their docstrings, and from one exchange of each."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from hvd_compress.bench.docstrings import read
from hvd_compress.bench.inputs import RMS, gaussian
from hvd_compress.errors import SpecError
from hvd_compress.local import LocalWorld
from hvd_compress.measure import Measured
from hvd_compress.memory import EF21, ErrorFeedback, Momentum, MomentumCorrection
from hvd_compress.methods import REGISTRY, MethodInfo, methods
from hvd_compress.methods.base import Method
from hvd_compress.policy import ByName, Delayed, Phases, Schedule, Selective
from hvd_compress.spec import nearest, parse

MEMORIES: tuple[type[Method], ...] = (ErrorFeedback, EF21, MomentumCorrection, Momentum)
POLICIES: tuple[type[Method], ...] = (Selective, ByName, Schedule, Phases, Delayed, Measured)

SIDE = 512
RANKS = 4

_HEAD = """\
## Methods

*On the wire* is what a rank hands to collectives in one step, all metadata included, for a float32 matrix of {side} x
{side} normal numbers with a root mean square of {rms}, {ranks} ranks and default hyper-parameters. In an allgather a
rank receives as much from each of the others; with allreduce and alltoall the traffic does not grow with the ranks."""


def info(name: str) -> MethodInfo:
    """The line of the catalogue with this name.

    Raises:
        SpecError: If there is none.
    """
    for line in methods():
        if line.name == name:
            return line
    raise SpecError(f"unknown method {name!r}{nearest(name, REGISTRY)}; there are: {', '.join(REGISTRY)}")


def memory(line: MethodInfo) -> str:
    """What the method keeps of the gradient where the spec does not say."""
    options = getattr(REGISTRY[line.name], "memory", {})
    given = ", ".join(f"{key}={written(value)}" for key, value in options.items())
    if not line.feedback:
        return "off"
    return f"on ({given})" if given else "on"


def written(value: Any) -> str:
    """A value as in spec strings."""
    return {True: "on", False: "off"}[value] if isinstance(value, bool) else str(value)


def wire_bits(name: str) -> float:
    """Bits per coordinate that a rank hands to collectives, for one normal float32 matrix and default parameters."""
    world = LocalWorld(parse(name), RANKS)
    world.step([x.reshape(SIDE, SIDE) for x in gaussian(SIDE**2, RANKS).ranks])
    return 8 * world.bytes_sent / SIDE**2


def section(name: str) -> str:
    """All about one method."""
    line = info(name)
    doc = read(REGISTRY[name])
    facts = [
        f"Travels by: {line.collective}",
        f"On the wire: {wire_bits(name):.3g} bits per coordinate",
        f"Error feedback: {memory(line)}",
        f"Keeps{', besides the residual' if line.feedback else ''}: {line.state}",
        f"Paper: {line.paper}",
    ]
    parts = [f"### {name}", doc.text, "\n".join(f"* {fact}" for fact in facts)]
    if line.hyper_parameters:
        rows = [("Hyper-parameter", "Default", "Meaning")]
        rows += [(f"`{key}`", f"`{written(v)}`", doc.args.get(key, "")) for key, v in line.hyper_parameters.items()]
        parts.append(grid(rows, "lll"))
    return "\n\n".join(parts)


def families() -> list[type[Method]]:
    """Public base classes that several methods share."""
    found: dict[type[Method], None] = {}
    for cls in REGISTRY.values():
        for base in cls.__mro__[1:]:
            public = issubclass(base, Method) and base is not Method and not base.__name__.startswith("_")
            if public and base not in REGISTRY.values():
                found[base] = None
    return list(found)


def catalogue() -> str:
    """The methods, one after another, and what some of them share."""
    head = _HEAD.format(side=SIDE, rms=RMS, ranks=RANKS)
    shared = [f"### {cls.__name__}\n\n{read(cls).text}" for cls in families()]
    parts = [head, _overview(), *map(section, REGISTRY), "## What methods share", *shared]
    for title, classes in {"## Memories": MEMORIES, "## Policies": POLICIES}.items():
        parts += [title, *(f"### {cls.__name__}\n\n{read(cls).text}" for cls in classes)]
    return _linked("\n\n".join(parts)) + "\n"


def _linked(text: str) -> str:
    """Make links of the names of classes."""
    anchors = {cls.__name__: name for name, cls in REGISTRY.items()}
    anchors |= {cls.__name__: cls.__name__.lower() for cls in (*families(), *MEMORIES, *POLICIES)}
    for name, anchor in anchors.items():
        text = text.replace(f"`{name}`", f"[{name}](#{anchor})")
    return text


def _overview() -> str:
    rows = [("Name", "Travels by", "Error feedback", "Keeps")]
    rows += [(f"[`{line.name}`](#{line.name})", line.collective, memory(line), line.state) for line in methods()]
    return grid(rows, "llll")


def grid(rows: Sequence[tuple[str, ...]], align: str) -> str:
    """A Markdown table; the first row is its head, ``align`` has an l or an r for each column."""
    rule = tuple("---:" if side == "r" else "---" for side in align)
    return "\n".join(f"| {' | '.join(cells)} |" for cells in [rows[0], rule, *rows[1:]])
