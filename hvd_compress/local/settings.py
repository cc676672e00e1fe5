"""Settings of local steps, and published sets of them."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, field, fields
from typing import Any, TypedDict, TypeVar

from hvd_compress.core.method import check_range, check_whole
from hvd_compress.errors import SpecError
from hvd_compress.local.gossip import GossipSettings, check_options
from hvd_compress.local.graph import gossips

C = TypeVar("C")

_MOST = 10**9
"""Largest number of steps or fragments."""


@dataclass(frozen=True, kw_only=True)
class Outer:
    """The optimizer of the global model: SGD, with momentum or without.

    With a the global model, d the mean over the ranks of what they have subtracted from it, and v the momentum::

        v = momentum v + d        a = a - lr (d + momentum v)   if nesterov        a = a - lr v   otherwise

    The defaults make a the mean of the models of all ranks.

    Args:
        lr: Learning rate, above 0.
        momentum: In [0, 1).
        nesterov: Whether the momentum is Nesterov's.
    """

    lr: float = 1.0
    momentum: float = 0.0
    nesterov: bool = False

    def __post_init__(self) -> None:
        check_range("lr", self.lr, "above 0", 0 < self.lr < math.inf)
        check_range("momentum", self.momentum, "in [0, 1)", 0 <= self.momentum < 1)

    def step(self, anchor: Any, difference: Any, momentum: Any) -> None:
        """Make a step on one array of the global model, in place.

        Args:
            anchor: The array.
            difference: Mean over the ranks of what they have subtracted from it.
            momentum: Its momentum, in place, too; None if there is none.
        """
        if momentum is not None:
            momentum *= self.momentum
            momentum += difference
            difference = difference + self.momentum * momentum if self.nesterov else momentum
        anchor -= self.lr * difference


@dataclass(frozen=True, kw_only=True)
class LocalSettings:
    """Settings of local steps.

    Args:
        every: Steps of the optimizer between two exchanges of the same parameters.
        compression: How the differences are compressed: a spec, or a compression object.
        outer: The optimizer of the global model.
        fragments: Number of parts of the model, which are exchanged in turns, one every ``every / fragments`` steps.
        delay: Steps that are made while an exchange is on its way; less than ``every / fragments``.
        mix: Share of a rank's own model that is kept when the global one comes, in [0, 1].
        quorum: Least number of ranks that go on without the others; None for all ranks. A rank that is late goes on
            from the global model of the next exchange.
        patience: Seconds for which a quorum waits for the others; needs ``quorum``.
    """

    every: int
    compression: Any = "none"
    outer: Outer = field(default_factory=Outer)
    fragments: int = 1
    delay: int = 0
    mix: float = 0.0
    quorum: int | None = None
    patience: float = 10.0

    def __post_init__(self) -> None:
        for name, least in (("every", 1), ("fragments", 1), ("delay", 0)):
            check_whole(name, getattr(self, name), least, _MOST)
        check_range("mix", self.mix, "in [0, 1]", 0 <= self.mix <= 1)
        if self.quorum is not None:
            check_whole("quorum", self.quorum, 1, _MOST)
        elif self.patience != LocalSettings.patience:
            raise SpecError("patience= is not allowed without quorum=: then all ranks are waited for")
        check_range("patience", self.patience, "at least 0", 0 <= self.patience < math.inf)
        if not isinstance(self.outer, Outer):
            raise SpecError(f"outer={self.outer!r} is not allowed: write outer=Outer(lr=0.7, momentum=0.9)")
        if self.every % self.fragments:
            multiple = -(-self.every // self.fragments) * self.fragments
            raise SpecError(
                f"every={self.every} is not allowed with fragments={self.fragments}: each fragment is exchanged once in"
                f" `every` steps, so make it a multiple, such as every={multiple}"
            )
        if self.delay >= self.interval:
            raise SpecError(
                f"delay={self.delay} is not allowed with every={self.every} and fragments={self.fragments}: an exchange"
                f" ends before the next one begins, so it is at most {self.interval - 1}"
            )

    @property
    def interval(self) -> int:
        """Steps between two exchanges."""
        return self.every // self.fragments

    def begins(self, step: int) -> int | None:
        """Return the fragment whose exchange begins after a step, counted from 1; None for none."""
        return self._fragment(step + self.delay)

    def ends(self, step: int) -> int | None:
        """Return the fragment whose exchange ends after a step, counted from 1; None for none."""
        return self._fragment(step)

    def flies(self, step: int) -> int | None:
        """Return the fragment whose exchange is on its way after a step; None for none."""
        left = -step % self.interval
        return self._fragment(step + left) if 0 < left <= self.delay else None

    def _fragment(self, step: int) -> int | None:
        return (step // self.interval - 1) % self.fragments if step % self.interval == 0 else None


class LocalOptions(TypedDict, total=False):
    """Keyword arguments of `LocalSettings`."""

    every: int
    compression: Any
    outer: Outer
    fragments: int
    delay: int
    mix: float
    quorum: int | None
    patience: float


_NESTEROV = Outer(lr=0.7, momentum=0.9, nesterov=True)

PRESETS = {
    "diloco": LocalSettings(every=500, outer=_NESTEROV),
    "streaming": LocalSettings(every=96, compression="qsgd:bits=4", outer=_NESTEROV, fragments=8, delay=5, mix=0.5),
    "sparseloco": LocalSettings(every=30, compression="sparseloco:min_size=0,vectors=on"),
}
"""Published settings.

``diloco``: Douillard et al., DiLoCo, 2023: AdamW inside, Nesterov momentum outside. ``streaming``, after Douillard et
al., Streaming DiLoCo, 2025: fragments in turns, overlapped with further steps and mixed with them, in 4 bits.
``sparseloco``: Sarfi et al., SparseLoCo, 2025: top-k in chunks, in 2 bits, averaged over the senders of each
coordinate; the residual takes the place of the momentum.
"""


def settings(spec: str, options: LocalOptions) -> LocalSettings:
    """Return settings.

    Args:
        spec: A key of `PRESETS`, or ``NAME@STEPS`` with such a key or the spec of a compression; "" for none.
        options: What is to be different.

    Raises:
        SpecError: If the preset or an option is unknown, or a value is not allowed.
    """
    known = [one.name for one in fields(LocalSettings)]
    check_options("LocalSteps", options, known)
    name, at, every = spec.rpartition("@")
    if at and not every.isdigit():
        raise SpecError(f"{spec!r} is not allowed: write the steps between two averages after the @, as {name}@30")
    given: dict[str, Any] = {"every": int(every)} if at else {}
    preset = PRESETS.get(name if at else spec)
    if preset is not None:
        given = {one: getattr(preset, one) for one in known} | given
    elif at:
        given["compression"] = name
    elif spec:
        raise SpecError(f"preset={spec!r} is not known; allowed: {', '.join(map(repr, PRESETS))}, or a spec@30")
    given |= options
    if "every" not in given:
        raise SpecError(
            "LocalSteps needs every=, the steps between two averages, such as every=30, or a preset:"
            f" {', '.join(map(repr, PRESETS))}"
        )
    return LocalSettings(**given)


def compressor(given: Any, parse: Callable[[str], C], kind: type[C], module: str) -> C:
    """Return the compression object of some settings.

    Args:
        given: Their ``compression``.
        parse: Makes an object from a spec.
        kind: Type of the object.
        module: The module that has it, for the error.

    Raises:
        SpecError: If it is neither a spec nor such an object.
    """
    found = parse(given) if isinstance(given, str) else given
    if not isinstance(found, kind):
        raise SpecError(
            f"compression={given!r} is not allowed: pass a spec such as 'qsgd:bits=4', or a compression of {module}"
        )
    return found


def method_of(spec: str) -> str:
    """Return the spec of the compression in a spec of a method, in ``NAME@STEPS`` of local steps or ``NAME@GRAPH``."""
    if "@" not in spec:
        return spec
    return str(GossipSettings.of(spec, {}).method if gossips(spec) else settings(spec, {}).compression)
