"""Checked settings of a boundary."""

from __future__ import annotations

import zlib
from collections.abc import Callable, Mapping
from dataclasses import fields, replace
from typing import Any, NamedTuple, TypeAlias

from hvd_compress.core.method import Method
from hvd_compress.engine.spec import make, nearest, read
from hvd_compress.errors import SpecError
from hvd_compress.methods.cast import Dense
from hvd_compress.methods.wrappers.error_feedback import EF21, ErrorFeedback
from hvd_compress.pipeline.operators import SharedMask, is_sparse, operator
from hvd_compress.pipeline.samples import AQSGD

Memory: TypeAlias = str | AQSGD

FEEDBACK: Mapping[str, Callable[[Method], Method]] = {"ef": ErrorFeedback, "ef21": EF21}


class Settings(NamedTuple):
    """Settings of a boundary.

    Attributes:
        forward: Operator of activations.
        backward: Operator of gradients.
        forward_memory: ``"none"``, ``"ef"``, ``"ef21"`` or an `AQSGD`.
        backward_memory: The same, but for `AQSGD`.
        inference: Whether activations are compressed outside of training, too.
    """

    forward: Method
    backward: Method
    forward_memory: Memory
    backward_memory: Memory
    inference: bool

    @property
    def shares_mask(self) -> bool:
        """Whether gradients share the mask of activations."""
        return isinstance(self.backward, SharedMask)

    @property
    def fingerprint(self) -> int:
        """32 bits by which two ends tell whether they were made alike."""
        memory = self.forward_memory
        alike = self._replace(forward_memory=replace(memory, folder="") if isinstance(memory, AQSGD) else memory)
        return zlib.crc32(repr(alike).encode())

    def specs(self) -> dict[str, Any]:
        """Return the arguments of `of` as spec strings; ``memory`` is a list of two."""
        memories = [_spec(self.forward_memory), _spec(self.backward_memory)]
        operators = {"forward": _spec(self.forward), "backward": _spec(self.backward)}
        return {**operators, "memory": memories, "inference": self.inference}

    @classmethod
    def of(
        cls,
        forward: str | Method = "none",
        backward: str | Method = "none",
        memory: Memory | tuple[Memory, Memory] = "none",
        inference: bool = True,
    ) -> Settings:
        """Read the arguments of a boundary; see ``CompressedBoundary``.

        Raises:
            SpecError: If an argument is unknown, not allowed, or not supported with the others.
        """
        methods = operator(forward), operator(backward, backward=True)
        memories = memory if isinstance(memory, tuple) else (memory, memory)
        if len(memories) != 2:
            raise SpecError(f"memory={memory!r} is not allowed: of a tuple, give that of activations and of gradients")
        first, second = (_memory(m) for m in memories)
        if isinstance(second, AQSGD):
            if isinstance(memory, tuple):
                raise SpecError("aqsgd is a memory of activations: the gradients of a sample change too much")
            second = "none"
        if isinstance(methods[1], SharedMask) and not is_sparse(methods[0]):
            raise SpecError(
                f"backward='shared' takes the mask of activations, and forward={forward!r} has none: take a sparse"
                " operator forward, such as topk"
            )
        return cls(*methods, _suited(methods[0], first), _suited(methods[1], second), inference)


def _spec(of: Method | Memory) -> str:
    """Return the spec string of an operator or of a memory."""
    if isinstance(of, str):
        return of
    values = {field.name: (getattr(of, field.name), field.default) for field in fields(of)}  # type: ignore[arg-type]
    params = ",".join(f"{key}={value}" for key, (value, default) in values.items() if value != default)
    return ":".join(filter(None, ["aqsgd" if isinstance(of, AQSGD) else of.name, params]))


def _memory(memory: Memory) -> Memory:
    """Read ``none``, ``ef``, ``ef21`` or ``aqsgd:samples=n,...``."""
    if isinstance(memory, AQSGD):
        return memory
    name, params = read(memory)
    if name == "aqsgd":
        return make(AQSGD, name, params)
    known = ["none", *FEEDBACK, "aqsgd"]
    if name not in known or params:
        raise SpecError(
            f"memory={memory!r} is not allowed{nearest(name, known)}: write 'none', 'ef', 'ef21' or 'aqsgd:samples=n'"
        )
    return name


def _suited(method: Method, memory: Memory) -> Memory:
    """Return the memory of a direction: ``"none"`` if it is not compressed.

    Raises:
        SpecError: If the operator does not support the memory.
    """
    if isinstance(method, Dense):
        return "none"
    if memory in FEEDBACK and not method.supports_feedback:
        raise SpecError(
            f"memory={memory!r} is not supported with {method}: its error cannot be kept, or would grow;"
            " take memory='none', or a pair: that of activations and that of gradients"
        )
    return memory
