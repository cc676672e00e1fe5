"""Routers, which choose the method of each gradient; a spec string describes one."""

from __future__ import annotations

import math
from abc import abstractmethod
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from fnmatch import fnmatchcase
from typing import NamedTuple

from hvd_compress.core.method import MOST_STEPS, Method, check_range, check_whole
from hvd_compress.core.router import Everywhere, Routable, Router, routed
from hvd_compress.errors import SpecError, UnsupportedError
from hvd_compress.methods.cast import Dense
from hvd_compress.methods.wrappers.alternatives import Choice, Phases
from hvd_compress.ops.arrays import Shape


@dataclass(frozen=True)
class Selective(Router):
    """Compress large tensors only.

    Vectors, such as biases and the scales of normalisation layers, save little traffic and are sensitive to errors.

    Args:
        inner: Method of the compressed gradients.
        dense_method: Method of the other gradients.
        min_size: Minimum number of elements of a compressed gradient.
        vectors: Compress vectors too.
        spec: The spec string that it was made from; "" if it was not.
    """

    inner: Method
    dense_method: Method = field(default_factory=Dense)
    min_size: int = 1024
    vectors: bool = False
    spec: str = field(default="", compare=False, repr=False)

    def __post_init__(self) -> None:
        check_whole("min_size", self.min_size, 0, 2**62)

    @property
    def core(self) -> Method:
        return self.inner

    def route(self, name: str, shape: Shape) -> Method:
        return self.dense_method if self.obstacle(name, shape) else self.inner

    def obstacle(self, name: str, shape: Shape) -> str:
        if len(shape) <= 1 and not self.vectors:
            return "vectors need vectors=on"
        if math.prod(shape) < self.min_size:
            return f"they are smaller than min_size={self.min_size}"
        return "" if self.inner.compresses(shape) else self.inner.too_small


@dataclass(frozen=True)
class ByName(Router):
    """Choose the router by the parameter's name.

    Args:
        rules: Patterns of parameter names, as in `fnmatch`, each with a router. The first match wins; gradients without
            a match are not compressed.
    """

    rules: tuple[tuple[str, Router], ...]

    def __post_init__(self) -> None:
        if not self.rules:
            raise SpecError("by_name needs at least one rule, such as {'*': 'topk:ratio=0.01'}")
        last, _ = self.rules[-1]
        if self.preconditioned and not (last == "*" and all(router.preconditioned for _, router in self.rules)):
            raise SpecError(
                "by_name mixes updates with gradients, which no optimizer can apply: give each rule preconditioned=on,"
                " and a last rule for '*', such as {'embed*': 'topk:preconditioned=on', '*': 'ctk:preconditioned=on'}"
            )

    def _find(self, name: str) -> Router:
        return next((router for pattern, router in self.rules if fnmatchcase(name, pattern)), Everywhere(Dense()))

    @property
    def needs_plain_sgd(self) -> bool:
        return any(router.needs_plain_sgd for _, router in self.rules)

    @property
    def adds_momentum(self) -> bool:
        return any(router.adds_momentum for _, router in self.rules)

    @property
    def preconditioned(self) -> bool:
        return any(router.preconditioned for _, router in self.rules)

    @property
    def hierarchical(self) -> bool:
        return any(router.hierarchical for _, router in self.rules)

    @property
    def core(self) -> Method:
        return self._find("").core

    def route(self, name: str, shape: Shape) -> Method:
        return self._find(name).route(name, shape)

    def obstacle(self, name: str, shape: Shape) -> str:
        return self._find(name).obstacle(name, shape)

    def unmatched(self, names: Iterable[str]) -> list[str]:
        """Return the patterns that match none of some names."""
        return [pattern for pattern, _ in self.rules if not any(fnmatchcase(name, pattern) for name in names)]


class Several(Router):
    """Base class of routers that use one of several others at a time."""

    @property
    @abstractmethod
    def routers(self) -> Sequence[Router]:
        """The routers."""

    @abstractmethod
    def combine(self, methods: Sequence[Method]) -> Method:
        """Return the method of a gradient, given those of the routers, of which two differ."""

    @property
    def needs_plain_sgd(self) -> bool:
        return any(router.needs_plain_sgd for router in self.routers)

    @property
    def adds_momentum(self) -> bool:
        return any(router.adds_momentum for router in self.routers)

    @property
    def hierarchical(self) -> bool:
        return any(router.hierarchical for router in self.routers)

    @property
    def core(self) -> Method:
        return self._one([router.core for router in self.routers])

    def route(self, name: str, shape: Shape) -> Method:
        return self._one([router.route(name, shape) for router in self.routers])

    def obstacle(self, name: str, shape: Shape) -> str:
        found = [router.obstacle(name, shape) for router in self.routers]
        return found[0] if all(found) else ""

    def _one(self, methods: Sequence[Method]) -> Method:
        return methods[0] if len(set(methods)) == 1 else self.combine(methods)


@dataclass(frozen=True)
class ByStep(Several):
    """Change the router during training; see `Phases`.

    Args:
        phases: First step of each phase, counted from 0, with its router; the first phase starts at step 0.
    """

    phases: tuple[tuple[int, Router], ...]

    def __post_init__(self) -> None:
        begins = [begin for begin, _ in self.phases]
        if not begins or begins[0] != 0 or sorted(set(begins)) != begins:
            raise SpecError(f"phases start at steps {begins}; start the first at step 0, and the others in order")

    @property
    def routers(self) -> Sequence[Router]:
        return [router for _, router in self.phases]

    def combine(self, methods: Sequence[Method]) -> Method:
        return Phases(tuple(zip([begin for begin, _ in self.phases], methods, strict=True)))


class Candidate(NamedTuple):
    """Candidate of `Auto`.

    Attributes:
        spec: Its spec string.
        router: Its router.
        with_adam: Whether it keeps the loss with Adam and its variants, or with an optimizer that is not known.
        with_sgd: Whether it keeps the loss with SGD.
    """

    spec: str
    router: Router
    with_adam: bool = True
    with_sgd: bool = True


@dataclass(frozen=True)
class Auto(Several):
    """Choose the router by measured step times; see `hvd_compress.engine.race`.

    Args:
        candidates: The candidates; the first one does not compress.
        max_error: Largest relative squared error of a step. None for 0.1, and no limit for methods with error feedback.
        probe: Maximum number of steps in which candidates are compared.
        spec: The spec string that it was made from; "" if it was not.
    """

    candidates: tuple[Candidate, ...]
    max_error: float | None = None
    probe: int = 60
    spec: str = field(default="", compare=False, repr=False)

    def __post_init__(self) -> None:
        if self.max_error is not None:
            check_range("max_error", self.max_error, "above 0", self.max_error > 0)
        check_whole("probe", self.probe, 20, MOST_STEPS)
        for one in self.candidates:
            if one.router.needs_plain_sgd or one.router.preconditioned or isinstance(one.router, Several | ByName):
                raise SpecError(
                    f"{one.spec} cannot be a candidate, as it needs an optimizer of its own or changes during training:"
                    " take methods such as 'qsgd' and 'powersgd:rank=16'"
                )
        _ = self.core  # refuses candidates that cannot take turns

    @property
    def routers(self) -> Sequence[Router]:
        return [candidate.router for candidate in self.candidates]

    @property
    def adds_momentum(self) -> bool:
        return False  # a candidate that does is not taken with Adam, unless the user names it

    @property
    def hierarchical(self) -> bool:
        return False

    @property
    def tries_nodes(self) -> bool:
        return super().hierarchical

    def obstacle(self, name: str, shape: Shape) -> str:
        return ""  # steps are measured with what a candidate leaves uncompressed

    def combine(self, methods: Sequence[Method]) -> Method:
        return Choice(tuple(methods))


def check_fixed(router: Routable, where: str) -> Routable:
    """Refuse `Auto` where it is not supported; return another router.

    Raises:
        UnsupportedError: If it is `Auto`.
    """
    if isinstance(router, Auto):
        raise UnsupportedError(
            f"auto is not supported {where}: name a method, such as 'qsgd'; auto chooses for DistributedDataParallel,"
            " FSDP2, and Horovod's optimizers and tapes, and logs the method to name"
        )
    return router


def by_name(rules: Mapping[str, Routable]) -> ByName:
    """Choose methods by the parameter's name; see `ByName`."""
    return ByName(tuple((pattern, routed(check_fixed(method, "within by_name"))) for pattern, method in rules.items()))


def phases(methods: Mapping[int, Routable]) -> ByStep:
    """Change methods during training; see `Phases`."""
    return ByStep(tuple((begin, routed(check_fixed(method, "within phases"))) for begin, method in methods.items()))
