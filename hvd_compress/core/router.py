"""Interface of routers, which choose the method of each gradient."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import TypeAlias

from hvd_compress.core.method import Method
from hvd_compress.ops.arrays import Shape


class Router(ABC):
    """Interface of routers: choose the method of each gradient.

    Attributes:
        spec: The spec string that it was made from; "" if it was composed by hand.
    """

    spec: str = ""

    @property
    @abstractmethod
    def core(self) -> Method:
        """Method of gradients that are compressed regardless of name and shape, such as a bare array."""

    @abstractmethod
    def route(self, name: str, shape: Shape) -> Method:
        """Return the method of the gradient with this name and shape."""

    def obstacle(self, name: str, shape: Shape) -> str:
        """Return why a gradient is not compressed that is meant to be, as advice on options; "" otherwise."""
        del name, shape
        return ""

    def unmatched(self, names: Iterable[str]) -> list[str]:
        """Return the patterns of parameter names that match none of some names."""
        del names
        return []

    def __str__(self) -> str:
        """Return the spec string that it was made from, without defaults; its repr if it was composed by hand."""
        return self.spec or repr(self)

    @property
    def linear(self) -> bool:
        """Whether all gradients have the same linear method; see `Method.linear`."""
        return False

    @property
    def needs_plain_sgd(self) -> bool:
        """Whether the optimizer must be without momentum; see `Method.needs_plain_sgd`."""
        return self.core.needs_plain_sgd

    @property
    def adds_momentum(self) -> bool:
        """Whether Adam's own momentum costs loss; see `Method.adds_momentum`."""
        return self.core.adds_momentum

    @property
    def preconditioned(self) -> bool:
        """Whether parameter updates are returned instead of gradients; see `Method.preconditioned`."""
        return self.core.preconditioned

    @property
    def hierarchical(self) -> bool:
        """Whether a method is hierarchical; see `Method.hierarchical`."""
        return self.core.hierarchical

    @property
    def tries_nodes(self) -> bool:
        """Whether hierarchical methods are used only if every node has the same number of ranks, and more than one."""
        return False


Routable: TypeAlias = Method | Router


def routed(method: Routable) -> Router:
    """Return a router that chooses a method for all gradients; return a router unchanged."""
    return method if isinstance(method, Router) else Everywhere(method)


@dataclass(frozen=True)
class Everywhere(Router):
    """Use the same method for all gradients.

    Args:
        method: The method.
        spec: The spec string that it was made from; "" if it was not.
    """

    method: Method
    spec: str = field(default="", compare=False, repr=False)

    @property
    def core(self) -> Method:
        return self.method

    def route(self, name: str, shape: Shape) -> Method:
        return self.method

    @property
    def linear(self) -> bool:
        return self.method.linear
