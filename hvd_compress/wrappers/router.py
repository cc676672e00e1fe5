"""Which method carries which gradient. A router chooses and exchanges nothing; a spec string stands for one."""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass, field
from fnmatch import fnmatchcase
from typing import TypeAlias

from hvd_compress.core.bucket import Shape
from hvd_compress.errors import SpecError
from hvd_compress.methods.base import Method, check_range
from hvd_compress.methods.cast import Dense
from hvd_compress.wrappers.schedule import Phases


class Router(ABC):
    """Which method carries which gradient."""

    @property
    @abstractmethod
    def core(self) -> Method:
        """The method of what is compressed whatever its name and shape, such as a bare array."""

    @abstractmethod
    def route(self, name: str, shape: Shape) -> Method:
        """Give the method that carries the gradient of this name and shape."""

    @property
    def linear(self) -> bool:
        """Whether one linear method carries all gradients; see `Method.linear`."""
        return False

    @property
    def needs_plain_sgd(self) -> bool:
        """Whether the optimizer must have no momentum, as a method has it or could not cope with it."""
        return self.core.needs_plain_sgd


Routable: TypeAlias = Method | Router


def routed(method: Routable) -> Router:
    """Give the router of a method, which carries all gradients then; a router is its own."""
    return method if isinstance(method, Router) else Everywhere(method)


@dataclass(frozen=True)
class Everywhere(Router):
    """Where: the same method for all gradients.

    Args:
        method: That one.
    """

    method: Method

    @property
    def core(self) -> Method:
        return self.method

    def route(self, name: str, shape: Shape) -> Method:
        return self.method

    @property
    def linear(self) -> bool:
        return self.method.linear


@dataclass(frozen=True)
class Selective(Router):
    """Where: leave gradients uncompressed that are not worth it.

    Biases and the scales of normalisation layers are vectors: little to save, much to lose.

    Args:
        inner: For the tensors that are compressed.
        dense_method: For the others.
        min_size: Gradients with fewer elements are not compressed.
        vectors: Compress vectors too.
    """

    inner: Method
    dense_method: Method = field(default_factory=Dense)
    min_size: int = 1024
    vectors: bool = False

    def __post_init__(self) -> None:
        check_range("min_size", self.min_size, "at least 0", self.min_size >= 0)

    @property
    def core(self) -> Method:
        return self.inner

    def route(self, name: str, shape: Shape) -> Method:
        large = (len(shape) > 1 or self.vectors) and math.prod(shape) >= self.min_size
        return self.inner if large and self.inner.compresses(shape) else self.dense_method


@dataclass(frozen=True)
class ByName(Router):
    """Where: another method for some parameters.

    Args:
        rules: Patterns of parameter names, as in `fnmatch`, each with its router. The first that fits counts; where
            none does, gradients are not compressed.
    """

    rules: tuple[tuple[str, Router], ...]

    def __post_init__(self) -> None:
        if not self.rules:
            raise SpecError("by_name needs at least one rule, such as {'*': 'topk:ratio=0.01'}")

    def _find(self, name: str) -> Router:
        return next((router for pattern, router in self.rules if fnmatchcase(name, pattern)), Everywhere(Dense()))

    @property
    def needs_plain_sgd(self) -> bool:
        return any(router.needs_plain_sgd for _, router in self.rules)

    @property
    def core(self) -> Method:
        return self._find("").core

    def route(self, name: str, shape: Shape) -> Method:
        return self._find(name).route(name, shape)


@dataclass(frozen=True)
class ByStep(Router):
    """When: another choice during training, carried out by `Phases`.

    Args:
        phases: The step (counted from 0) from which on a router is in force, and the router; the first is 0.
    """

    phases: tuple[tuple[int, Router], ...]

    def __post_init__(self) -> None:
        begins = [begin for begin, _ in self.phases]
        if not begins or begins[0] != 0 or sorted(set(begins)) != begins:
            raise SpecError(f"phases begin at the steps {begins}; they must be whole numbers that grow, the first 0")

    @property
    def needs_plain_sgd(self) -> bool:
        return any(router.needs_plain_sgd for _, router in self.phases)

    @property
    def core(self) -> Method:
        return self._with([router.core for _, router in self.phases])

    def route(self, name: str, shape: Shape) -> Method:
        return self._with([router.route(name, shape) for _, router in self.phases])

    def _with(self, carriers: list[Method]) -> Method:
        if len(set(carriers)) == 1:
            return carriers[0]
        return Phases(tuple(zip([begin for begin, _ in self.phases], carriers, strict=True)))


def by_name(rules: Mapping[str, Routable]) -> ByName:
    """Choose methods by the names of parameters; see `ByName`."""
    return ByName(tuple((pattern, routed(method)) for pattern, method in rules.items()))


def phases(methods: Mapping[int, Routable]) -> ByStep:
    """Choose methods by the step; see `Phases`."""
    return ByStep(tuple((begin, routed(method)) for begin, method in methods.items()))
