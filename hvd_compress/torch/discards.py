"""Notice reduced gradients that are cleared before an optimizer applies them, as those of a GAN's other net."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable, Sequence
from typing import Any, ClassVar, NamedTuple

import torch
from torch import Tensor

_PROBES, _PROBE = 3, 64
"""Number of parameters of which some coordinates are looked at, and number of these coordinates."""


class _Probe(NamedTuple):
    """Parameter with its version and some of its coordinates, after a reduction."""

    parameter: weakref.ref[Tensor]
    version: int
    some: Tensor

    @classmethod
    def of(cls, parameter: Tensor) -> _Probe:
        return cls(weakref.ref(parameter), parameter._version, _some(parameter).clone())

    def unchanged(self) -> bool:
        """Return whether the parameter is as it was; a write to ``p.data`` leaves its version."""
        p = self.parameter()
        return p is not None and p._version == self.version and torch.equal(_some(p), self.some)


def _some(parameter: Tensor) -> Tensor:
    vector = parameter.detach()
    vector = vector.view(-1) if vector.is_contiguous() else vector.flatten()
    return vector[:: max(1, vector.numel() // _PROBE)]


class DiscardWatch:
    """Notice reduced gradients that are cleared before an optimizer applies them.

    A gradient is looked at just before the next one is added to it: cleared are gradients that are all None or zero
    then, while gradients that accumulate are not.

    An optimizer applies gradients by its ``step``. Before its first one, gradients also count as applied if parameters
    have changed, or if no other optimizer has made a step since: some programs write to parameters themselves, or only
    look at gradients. Cleared gradients are no longer reported once a step has applied others than those that were
    reduced last: the program keeps gradients aside and adds them up itself.

    Args:
        parameters: The parameters, in the order in which the model uses them.
        optimizers: Their optimizers, as far as they are known.

    Attributes:
        knows: Whether optimizers are known.
    """

    _all_steps: ClassVar[int] = 0  # of all known optimizers

    def __init__(self, parameters: Iterable[Tensor], optimizers: Sequence[Any]) -> None:
        self._parameters = [weakref.ref(parameter) for parameter in parameters if parameter.numel()]
        self.knows = bool(optimizers)
        self._pending = self._cleared = self._stepping = self._stepped = self._combines = False
        self._probes: list[_Probe] = []
        self._steps_before = 0
        self._had: dict[weakref.ref[Tensor], bool] = {}
        self._reduced: tuple[weakref.ref[Tensor], int] | None = None
        self._handles: list[Any] = []
        for optimizer in optimizers:
            self._handles.append(optimizer.register_step_pre_hook(weakly(self._begin_step)))
            self._handles.append(optimizer.register_step_post_hook(weakly(self._end_step)))
        weakref.finalize(self, _remove, self._handles)
        if self._parameters:
            self._watch(self._parameters[-1])

    def _watch(self, parameter: weakref.ref[Tensor]) -> None:
        """Look at gradients before this parameter gets another one."""
        tensor = parameter()
        if parameter not in self._had and tensor is not None and tensor.requires_grad:
            self._had[parameter] = False
            look = weakly(self._look)
            self._handles.append(tensor.register_hook(lambda grad: look(parameter)))  # type: ignore[no-untyped-call]

    def reduced(self, first: Tensor | None) -> None:
        """Note that a step has been reduced.

        Args:
            first: Parameter whose gradient came first.
        """
        self._pending, self._cleared = not self._stepping, False  # an optimizer with a closure reduces within its step
        if first is None or not self._pending:
            return
        self._watch(weakref.ref(first))
        for parameter in self._had:
            tensor = parameter()
            self._had[parameter] = tensor is not None and tensor.grad is not None
        self._reduced = None if first.grad is None else (weakref.ref(first), first.grad.data_ptr())
        if not self._stepped:
            every = max(1, len(self._parameters) // _PROBES)
            self._steps_before = DiscardWatch._all_steps
            self._probes = [_Probe.of(p) for one in self._parameters[::every] if (p := one()) is not None]

    def _look(self, parameter: weakref.ref[Tensor]) -> None:
        if not self._pending or self._cleared:
            return
        tensor = parameter()
        if tensor is not None and tensor.grad is None and self._had[parameter]:
            self._cleared = True
        else:
            grads = (p.grad for one in self._parameters if (p := one()) is not None)
            self._cleared = not any(grad is not None and bool(grad.any()) for grad in grads)

    def _begin_step(self, *_: Any) -> None:
        self._stepping = True
        if self._pending and self._reduced is not None and (first := self._reduced[0]()) is not None:
            self._combines |= first.grad is not None and first.grad.data_ptr() != self._reduced[1]

    def _end_step(self, *_: Any) -> None:
        self._stepping = self._pending = False
        self._stepped = True
        DiscardWatch._all_steps += 1

    def discarded(self) -> bool:
        """Return whether the gradients of the last step were cleared and not applied; ask once, as the next begins."""
        pending, self._pending = self._pending, False
        if not pending or not self._cleared or self._combines:
            return False
        if self._stepped:
            return True
        others = DiscardWatch._all_steps > self._steps_before
        return (others or not self.knows) and all(probe.unchanged() for probe in self._probes)


def weakly(method: Callable[..., None]) -> Callable[..., None]:
    """Return a function that calls a method as long as its object exists."""
    weak = weakref.WeakMethod(method)

    def call(*args: Any) -> None:
        found = weak()
        if found is not None:
            found(*args)

    return call


def _remove(handles: Sequence[Any]) -> None:
    for handle in handles:
        handle.remove()
