"""The part of the page that depends on the code alone."""

from __future__ import annotations

import re

import numpy as np

from hvd_compress.core.method import Method, written
from hvd_compress.core.router import Routable
from hvd_compress.engine.local_world import LocalWorld
from hvd_compress.engine.spec import MINOR, parse
from hvd_compress.methods import REGISTRY, methods
from hvd_compress.methods.wrappers.alternatives import Phases
from hvd_compress.methods.wrappers.error_feedback import EF21, ErrorFeedback
from hvd_compress.methods.wrappers.measure import Measured
from hvd_compress.methods.wrappers.momentum import Momentum, MomentumCorrection
from hvd_compress.methods.wrappers.router import ByName, Selective
from hvd_compress.methods.wrappers.schedule import Delayed, Schedule
from hvd_compress.tools.bench.traffic import RMS, SEED, SIDE, SIZES
from hvd_compress.tools.methods.catalogue import info, numbers, section, summary
from hvd_compress.tools.methods.docstrings import read
from hvd_compress.tools.tables import markdown
from methods_page import adamw

MEMORIES: tuple[type[Method], ...] = (ErrorFeedback, EF21, MomentumCorrection, Momentum)
POLICIES: tuple[type[Routable], ...] = (Selective, ByName, Schedule, Phases, Delayed, Measured)

_HEAD = """\
## Methods

*Bits* are what a rank sends for each coordinate in one step, all metadata included, with 2, 8 and 64 ranks: of a
float32 matrix of {side} x {side} normal numbers with a root mean square of {rms} ({zeros}), with default
hyper-parameters, and rings for allreduce and allgather. Uncompressed it is 32, 56 and 63 bits. *Constant* tells
whether that stays about the same with more ranks. *Zeros* tells whether a coordinate that is zero on all ranks, such as
one of a padding row or of an absent token, stays so up to rounding; if not, it moves too: with `signsgd` and `signum`
as far as all others in each step, but to either side at random. *AdamW* is the loss that the method adds to a training
with AdamW, in nats per byte, and to one whose optimizer has `betas=(0.0, b2)` ([measured](#with-adamw)). *State* is
what a rank keeps between steps, in bytes for each coordinate, the residual included."""


def families() -> list[type[Method]]:
    """Return the public base classes that several methods share."""
    found: dict[type[Method], None] = {}
    for cls in REGISTRY.values():
        for base in cls.__mro__[1:]:
            public = issubclass(base, Method) and base is not Method and not base.__name__.startswith("_")
            if public and base not in REGISTRY.values():
                found[base] = None
    return list(found)


def catalogue(with_adamw: adamw.Rows = ()) -> str:
    """Return the part of the page that describes the methods; its table has what `adamw.json` says."""
    shared = [f"### {cls.__name__}\n\n{read(cls).text}" for cls in families()]
    nonzero = {name: cls.card.nonzero for name, cls in REGISTRY.items()}
    zeros = [f"{name}: of one with {1 - share:.0%} zeros" for name, share in nonzero.items() if share < 1]
    parts = [
        _HEAD.format(side=SIDE, rms=RMS, zeros=", ".join(zeros)),
        _overview(with_adamw),
        *map(section, REGISTRY),
        "## What methods share",
        *shared,
    ]
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


def _overview(with_adamw: adamw.Rows) -> str:
    rows = [("Name", "Travels by", "Rounds", "Constant", "Unbiased", "Zeros", "AdamW", "State", "Bits", "Paper")]
    for line in methods():
        rounds, allreduce, state, bits = numbers(line.name)
        name = f"[`{line.name}`](#{line.name})"
        zeros = "stay" if keeps_zeros(line.name) else "move"
        facts = line.collective, rounds, allreduce, line.unbiased, zeros, adamw.cell(with_adamw, line.name)
        rows.append((name, *facts, state, bits, short(line.paper)))
    return markdown(rows, "llrllllrrl")


def constructors(with_adamw: adamw.Rows) -> str:
    """Return the table of the guide: how each method is called, travels and bears AdamW, and what it does."""
    rows = [("`Compression.`", "travels by", "what it does", "loss with AdamW")]
    for name, cls in REGISTRY.items():
        does = summary(name).replace("|", "\\|")
        does += "; the optimizer must have no momentum" * parse(name).needs_plain_sgd
        call = f"`{name}`" if cls.linear else f"`{name}({known_by(name)})`"
        rows.append((call, cls.card.collective, does, adamw.cell(with_adamw, name)))
    return markdown(rows, "llll")


def known_by(name: str) -> str:
    """Return a method's main hyper-parameter with its default, as in spec strings; "" if it has none."""
    own = info(name).hyper_parameters
    return next((f"{key}={written(value)}" for key, value in own.items() if key not in MINOR), "")


def keeps_zeros(name: str) -> bool:
    """Return whether coordinates stay zero, up to rounding, that are zero on all ranks."""
    world, rng = LocalWorld(parse(name).core, SIZES[0]), np.random.default_rng(SEED)
    absent = rng.random(SIDE) < 0.5
    for _ in range(2):  # with a residual, too
        gradients = [rng.standard_normal((SIDE, SIDE)).astype(np.float32) for _ in range(SIZES[0])]
        for gradient in gradients:
            gradient[absent] = 0
        mean = np.abs(world.step(gradients)[0])
    return bool(mean[absent].max() < 1e-6 * mean.max())


def short(paper: str) -> str:
    """Return the authors and years of the sources, without titles."""
    return "; ".join(map(_authors, paper.split("; ")))


def _authors(source: str) -> str:
    found = re.match(r"(?P<names>\w+ et al\.|[A-Z]\w+(?:, [A-Z]\w+)*), .*, (?P<year>\d{4})", source)
    if not found:
        return source
    names = found["names"].split(", ")
    return f"{names[0]} et al. {found['year']}" if len(names) > 2 else f"{', '.join(names)} {found['year']}"
