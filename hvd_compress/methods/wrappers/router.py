"""Routers, which choose the method of each gradient; a spec string describes one."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from fnmatch import fnmatchcase

from hvd_compress.core.method import Method, check_whole
from hvd_compress.core.router import Everywhere, Routable, Router, routed
from hvd_compress.errors import SpecError
from hvd_compress.methods.cast import Dense
from hvd_compress.methods.wrappers.schedule import Phases
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


@dataclass(frozen=True)
class ByStep(Router):
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
    def needs_plain_sgd(self) -> bool:
        return any(router.needs_plain_sgd for _, router in self.phases)

    @property
    def adds_momentum(self) -> bool:
        return any(router.adds_momentum for _, router in self.phases)

    @property
    def hierarchical(self) -> bool:
        return any(router.hierarchical for _, router in self.phases)

    @property
    def core(self) -> Method:
        return self._with([router.core for _, router in self.phases])

    def route(self, name: str, shape: Shape) -> Method:
        return self._with([router.route(name, shape) for _, router in self.phases])

    def obstacle(self, name: str, shape: Shape) -> str:
        found = [router.obstacle(name, shape) for _, router in self.phases]
        return found[0] if all(found) else ""

    def _with(self, methods: list[Method]) -> Method:
        if len(set(methods)) == 1:
            return methods[0]
        return Phases(tuple(zip([begin for begin, _ in self.phases], methods, strict=True)))


def by_name(rules: Mapping[str, Routable]) -> ByName:
    """Choose methods by the parameter's name; see `ByName`."""
    return ByName(tuple((pattern, routed(method)) for pattern, method in rules.items()))


def phases(methods: Mapping[int, Routable]) -> ByStep:
    """Change methods during training; see `Phases`."""
    return ByStep(tuple((begin, routed(method)) for begin, method in methods.items()))
