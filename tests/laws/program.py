"""Programs for all adapters: models, optimizers and steps as plain data, drawn at random."""

from __future__ import annotations

import itertools
import math
import random
import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any, Literal, NamedTuple, TypeAlias

import numpy as np
import numpy.typing as npt
from catalogue import EXAMPLES, bare

from hvd_compress import parse
from hvd_compress.core.router import Router
from hvd_compress.engine.spec import auto
from hvd_compress.methods.wrappers.router import phases
from hvd_compress.transport.rank_threads import Matching

Arr: TypeAlias = npt.NDArray[Any]
Fate: TypeAlias = Literal["applied", "thrown", "discarded", "given up", "not finite"]
"""What becomes of reduced gradients: without ``"discarded"``, nobody tells the compressor that they are not applied."""

SWITCH = 4
"""Step from which phases are dense."""

LARGE = 2e5
"""Beyond float16."""

NORMAL = np.random.default_rng(0).standard_normal(52_000).astype(np.float32)
"""Gradients are parts of it."""


ORDERED: dict[Matching, set[str]] = {
    "names": set(),
    "channels": {"optimizers", "joint", "turned"},
    "turns": {"optimizers", "joint", "turned", "shuffled", "unused"},
}
"""What must not happen where collectives are matched by their order."""


class Model(NamedTuple):
    """A model.

    Attributes:
        shapes: Of its parameters.
        optimizers: The parameters of each of its optimizers.
        tied: Whether the first parameter is used twice in each pass.
    """

    shapes: tuple[tuple[int, ...], ...]
    optimizers: tuple[tuple[int, ...], ...]
    tied: bool = False


class Use(NamedTuple):
    """What a step does with a model.

    Attributes:
        model: Number of the model.
        unused: For each rank, the parameters that it does not use.
        frozen: Parameters that require no gradient.
        once: Parameters that are used in one of the passes only, with the number of this pass.
        large: Whether a gradient has an element beyond float16.
        fate: What becomes of the reduced gradients.
    """

    model: int
    unused: tuple[tuple[int, ...], ...] = ()
    frozen: tuple[int, ...] = ()
    once: tuple[tuple[int, int], ...] = ()
    large: bool = False
    fate: Fate = "applied"


class Step(NamedTuple):
    """A step: the backward passes through one or several models at once, and what follows.

    Attributes:
        uses: The models that take part.
        passes: Number of backward passes.
        shuffled: Whether each rank uses parameters in another order.
        turned: Whether odd ranks step the optimizers in reverse order.
        scale: Binary logarithm of the loss scale.
        before: What happens before: ``"renewed"``, optimizers are made anew; ``"resumed"``, all is made anew, from the
            saved state; ``"restarted"``, Horovod is started again.
    """

    uses: tuple[Use, ...]
    passes: int = 1
    shuffled: bool = False
    turned: bool = False
    scale: int = 0
    before: str = ""


@dataclass(frozen=True)
class Program:
    """A training program.

    Args:
        spec: Of the compression; ``"a -> none"`` for phases, and ``"a | b"`` for a choice by step times.
        merge: Buckets.
        ranks: Number of ranks.
        local_size: Number of ranks on each node.
        matching: How ranks as threads match collectives.
        models: The models, which share a compressor.
        steps: The steps.
        seed: Of the gradients.
    """

    spec: str
    models: tuple[Model, ...]
    steps: tuple[Step, ...]
    merge: int | str = 1
    ranks: int = 2
    local_size: int = 1
    matching: Matching = "names"
    seed: int = 0

    @property
    def method(self) -> Router | str:
        """The method, as compressors take it."""
        if " | " in self.spec:
            return auto(self.spec.split(" | "))
        first, _, then = self.spec.partition(" -> ")
        return phases({0: parse(first), SWITCH: parse(then)}) if then else self.spec

    @cached_property
    def ended(self) -> list[Step]:
        """The steps, and those after which nothing is outstanding: one of them is dense, or nothing more is given."""
        uses = [Use(number) for number in range(len(self.models))]
        last = [Step(tuple(uses))] if self.matching == "names" else [Step((use,)) for use in uses]
        large = sum(any(use.large for use in step.uses) for step in self.steps)
        drained = 24 + math.ceil(large * LARGE * self.ranks / 2**15)  # fp16 clips what a step sends
        return [*self.steps, *last * (drained if self.drains else SWITCH + 1)]

    @property
    def drains(self) -> bool:
        """Whether the last steps have no gradients, as no step is dense."""
        return "feedback=on" in self.spec and not re.search(",every=|,delay=| -> ", self.spec)

    @property
    def always_used(self) -> bool:
        """Whether all ranks use all parameters in all passes."""
        return not any(use.unused or use.frozen or use.once for step in self.steps for use in step.uses)

    def used(self, number: int, use: Use, part: int, rank: int) -> list[int]:
        """Return the parameters that a rank uses in a pass of a step, in order."""
        unused = {*(use.unused[rank] if use.unused else ()), *(p for p, only in use.once if only != part)}
        found = [p for p in range(len(self.models[use.model].shapes)) if p not in unused]
        if self.ended[number].shuffled:
            np.random.default_rng([self.seed, number, part, rank, use.model]).shuffle(found)
        return found

    def gradient(self, number: int, use: Use, part: int, rank: int, parameter: int) -> Arr:
        """Return the gradient of a parameter that a rank uses in a pass of a step."""
        model = self.models[use.model]
        place = hash((self.seed, number, part, rank, use.model, parameter)) % 50_000
        values = NORMAL[place : place + math.prod(model.shapes[parameter])].reshape(model.shapes[parameter]).copy()
        if self.drains and number >= len(self.steps):
            values[...] = 0
        chosen = parameter == self.seed % len(model.shapes) and rank == number % self.ranks and part == 0
        if values.size and chosen and (use.large or use.fate == "not finite"):
            values.flat[self.seed % values.size] = LARGE if use.large else np.nan
        return values

    def optimizers_of(self, use: Use) -> list[tuple[tuple[int, ...], Fate]]:
        """Return the parameters of each optimizer of a model, and what becomes of their gradients."""
        spoilt = self.seed % len(self.models[use.model].shapes)
        return [
            (own, "applied" if use.fate == "not finite" and spoilt not in own else use.fate)
            for own in self.models[use.model].optimizers
        ]


@dataclass(frozen=True)
class Able:
    """What an adapter can do.

    Args:
        specs: Specs to draw, with options after which nothing is outstanding in some steps.
        endless: Specs to draw as they are.
        settings: Numbers of ranks, ranks on each node, and how collectives are matched.
        fates: What may become of reduced gradients.
        before: What may happen before a step.
        events: Names of the other events: fields of `Use`, `Step` and `Model`.
        last_pass: Whether a parameter that is used once is used in the last pass.
        idle: Whether a rank may use nothing.
        chooses: Whether methods may be chosen by step times.
    """

    specs: Sequence[str]
    endless: Sequence[str] = ()
    settings: Sequence[tuple[int, int, Matching]] = ((2, 1, "names"),)
    fates: tuple[Fate, ...] = ("applied", "not finite")
    before: tuple[str, ...] = ()
    events: frozenset[str] = field(default_factory=frozenset)
    last_pass: bool = False
    idle: bool = False
    chooses: bool = False


ALL = frozenset({"tied", "unused", "frozen", "passes", "large", "shuffled", "scale", "delay"})

SHAPES: list[tuple[int, ...]] = [(1,), (7,), (12, 5), (40, 25), (3, 4, 2, 2), (300,)]


def conserving() -> Iterator[str]:
    """Yield the examples of all methods whose totals and residuals make up the gradients, with error feedback."""
    for spec, example in EXAMPLES.items():
        method = bare(spec)
        if example.total in ("lossy", "senders") or not (method.supports_feedback or spec == "none"):
            continue
        options = [*(["feedback=on"] if method.supports_feedback else [])]
        options += [f"{key}={0 if key == 'momentum' else 1}" for key in method.memory]  # these change the sum
        options += ["min_gain=0"] if "powersgd" in spec or "acpsgd" in spec else []
        yield f"{spec}{':' if ',' not in spec and ':' not in spec else ','}{','.join(options)}" if options else spec


SOME = ("none", "fp16", "topk:ratio=0.1,f", "powersgd:rank", "acpsgd", "efsignsgd", "qsgd", "dgc")

FAMILIES = [spec for spec in conserving() if spec.startswith(SOME)]
"""One or two of each family."""


class Draw(random.Random):
    """Draws a program.

    Args:
        able: What the adapter can do.
        seed: Seed of the run.
        number: Number of the program in the run.
    """

    def __init__(self, able: Able, seed: int, number: int) -> None:
        super().__init__(f"{seed}/{number}")
        self._able = able
        self._ranks, self._local_size, self._matching = self.choice(able.settings)
        self._events = able.events - ORDERED[self._matching]

    def program(self) -> Program:
        """Return the program."""
        models = tuple(self._model() for _ in range(self.choice([1, 1, 1, 2, 2, 3])))
        steps = tuple(self._step(models) for _ in range(self.randint(2, 6)))
        merges: list[int | str] = [1, 2, "layer"]
        setting = self._ranks, self._local_size, self._matching
        return Program(self._spec(), models, steps, self.choice(merges), *setting, self.randrange(1000))

    def _now(self, event: str, share: float = 0.25) -> bool:
        """Return whether something happens."""
        return event in self._events and self.random() < share

    def _some(self, size: int) -> tuple[int, ...]:
        return tuple(p for p in range(size) if self.random() < 0.5)

    def _spec(self) -> str:
        spec = self.choice([*self._able.specs, *self._able.endless, "fp16:feedback=on"])
        if spec.startswith(("none", "fp16")):
            return spec
        inside = [",hierarchical=on", ",hierarchical=on,inside=fp16", ",hierarchical=on,inside=int8"]
        among = self.choice(inside) if self._local_size > 1 else ""
        if self._able.chooses and self.random() < 0.15:
            known = [*self._able.specs, *self._able.endless]
            able = [one for one in known if re.search("(?<!fp16):.*feedback=on(?!.*momentum)", one)]
            return " | ".join(f"{one},min_size=0,vectors=on{self.choice(['', among])}" for one in self.sample(able, 2))
        if spec in self._able.endless:
            return f"{spec},min_size=0,vectors=on{among}"
        wide = self.choice(["min_size=0,vectors=on", "min_size=0,vectors=on", "min_size=60"])
        ends = [f",every={self.randint(2, 4)}"] * 3 + [",delay=2"] * ("delay" in self._events) + [" -> none"]
        return f"{spec}{',' if ':' in spec else ':'}{wide}{among}{self.choice(ends)}"

    def _model(self) -> Model:
        shapes = tuple(self.choice(SHAPES) for _ in range(self.randint(1, 4)))
        numbers = tuple(range(len(shapes)))
        ways: list[tuple[tuple[int, ...], ...]] = [(numbers,)]
        if "optimizers" in self._events and len(numbers) > 1:
            ways += [(numbers[:1], numbers[1:]), tuple((n,) for n in numbers)]
        return Model(shapes, self.choice(ways), self._now("tied"))

    def _step(self, models: Sequence[Model]) -> Step:
        passes = self.randint(2, 3) if self._now("passes") else 1
        joint = self._now("joint", 0.5) or len(models) == 1
        numbers = range(len(models)) if joint else [self.randrange(len(models))]
        return Step(
            tuple(self._use(number, len(models[number].shapes), passes) for number in numbers),
            passes,
            self._now("shuffled"),
            self._now("turned"),
            self.randint(-3, 12) if self._now("scale") else 0,
            self.choice(["", "", "", *(one for one in self._able.before if one != "resumed" or len(models) == 1)]),
        )

    def _use(self, model: int, size: int, passes: int) -> Use:
        fate = self.choice((*self._able.fates, *self._able.fates[:1] * 4))
        if fate in ("not finite", "given up"):
            return Use(model, fate=fate)
        unused: tuple[tuple[int, ...], ...] = ()
        if self._now("unused", 0.5):
            unused = tuple(self._some(size) for _ in range(self._ranks))
            unused = unused if self.random() < 0.5 else unused[:1] * self._ranks
        frozen = self._some(size) if self._now("frozen") else ()
        once: tuple[tuple[int, int], ...] = ()
        if passes > 1:
            once = tuple((p, passes - 1 if self._able.last_pass else self.randrange(passes)) for p in self._some(size))
        use = Use(model, unused, frozen, once, self._now("large"), fate)
        rest = [
            set(range(size)) - {*frozen, *(unused[rank] if unused else ()), *(p for p, only in once if only != part)}
            for rank, part in itertools.product(range(self._ranks), range(passes))
        ]
        return use if self._able.idle or all(rest) else use._replace(unused=(), frozen=(), once=())


def draw_programs(able: Able, count: int, seed: int = 0) -> list[Program]:
    """Return programs, the same ones for the same seed."""
    return [Draw(able, seed, number).program() for number in range(count)]


def smaller(program: Program) -> Iterator[Program]:
    """Yield programs in which less happens."""
    for number in range(len(program.models)) if len(program.models) > 1 else ():
        yield _without_model(program, number)
    for number, step in enumerate(program.steps):
        for other in [(), *((one,) for one in _smaller_steps(step))]:
            yield replace(program, steps=(*program.steps[:number], *other, *program.steps[number + 1 :]))


def _without_model(program: Program, number: int) -> Program:
    steps = []
    for step in program.steps:
        uses = [use._replace(model=use.model - (use.model > number)) for use in step.uses if use.model != number]
        steps += [step._replace(uses=tuple(uses))] if uses else []
    return replace(program, models=program.models[:number] + program.models[number + 1 :], steps=tuple(steps))


def _smaller_steps(step: Step) -> Iterator[Step]:
    for number, use in enumerate(step.uses):
        less = [(use._replace(**{key: value}),) for key, value in Use._field_defaults.items()]
        for other in [*([()] if len(step.uses) > 1 else []), *less]:
            yield step._replace(uses=(*step.uses[:number], *other, *step.uses[number + 1 :]))
    for key, value in Step._field_defaults.items():
        if key != "passes" or not any(use.once for use in step.uses):
            yield step._replace(**{key: value})


def reduced(program: Program, breaks: Callable[[Program], bool]) -> Program:
    """Return a program in which as little as possible happens, but that breaks the law as the first one does."""
    for one in smaller(program):
        if one != program and breaks(one):
            return reduced(one, breaks)
    return program
