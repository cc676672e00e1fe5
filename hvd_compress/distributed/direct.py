"""Direct calls: tensors that a program reduces itself."""

from __future__ import annotations

import zlib
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from hvd_compress.distributed.transport import GroupTransport
from hvd_compress.distributed.verdict import factor_of
from hvd_compress.errors import UnsupportedError


class Call(NamedTuple):
    """Call of ``compression.all_reduce``.

    Attributes:
        name: The ``name`` argument.
        tensors: All tensors of the call.
        op: ``"sum"`` or ``"mean"``.
        transport: The ranks.
    """

    name: str
    tensors: Sequence[Tensor]
    op: str
    transport: GroupTransport

    @classmethod
    def of(cls, tensors: Tensor | Sequence[Tensor], name: str, op: str, transport: GroupTransport) -> Call:
        """Return a call, after checking its tensors.

        Raises:
            UnsupportedError: If a tensor requires a gradient, or is sparse.
        """
        call = cls(name, [tensors] if isinstance(tensors, Tensor) else list(tensors), op, transport)
        for tensor in call.tensors:
            if tensor.requires_grad and torch.is_grad_enabled():
                raise UnsupportedError(
                    f"all_reduce(name={name!r}) was given a tensor that requires a gradient, but a compressed sum has"
                    " none: pass tensor.detach(), or call it under torch.no_grad()"
                )
            if tensor.is_sparse:
                raise UnsupportedError(
                    f"all_reduce(name={name!r}) was given a sparse tensor: reduce it by torch.distributed.all_reduce"
                )
        return call

    @property
    def key(self) -> tuple[Any, ...]:
        """Key of the state that calls share."""
        shapes = tuple((tuple(t.shape), str(t.dtype), str(t.device)) for t in self.tensors)
        everyone = self.transport.group is dist.group.WORLD
        ranks = () if everyone else tuple(self.transport.members)
        return self.name, shapes, self.op, ranks

    @property
    def label(self) -> str:
        """Short name of the key, the same on all ranks, and in a job with more of them."""
        return f"call.{zlib.crc32(repr(self.key).encode()):08x}"

    @property
    def named(self) -> list[tuple[str, Tensor]]:
        """The tensors with their names."""
        alone = len(self.tensors) == 1
        return [(self.name if alone else f"{self.name}.{i}", tensor) for i, tensor in enumerate(self.tensors)]

    @property
    def factor(self) -> float:
        """Factor of the sum over the ranks."""
        return factor_of(self.op, self.transport.world.size)


class Reduction:
    """A reduction on its way: what ``compression.all_reduce(..., async_op=True)`` returns.

    Args:
        tensors: The tensors, which will hold the results.
        advance: Advances it without waiting.
        finish: Waits for it, and writes its results.
    """

    def __init__(self, tensors: Sequence[Tensor], advance: Callable[[], None], finish: Callable[[], None]) -> None:
        self._tensors, self._advance = tensors, advance
        self._finish: Callable[[], None] | None = finish

    def advance(self) -> None:
        """Start the next round of collectives if the last one has come, as far as that is possible without waiting."""
        if self._finish is not None:
            self._advance()

    def wait(self) -> Sequence[Tensor]:
        """Wait until the tensors hold the results, and return them.

        All ranks wait for their reductions in the order in which these were started.
        """
        finish, self._finish = self._finish, None
        if finish is not None:
            finish()
        return self._tensors
