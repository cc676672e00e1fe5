"""Base class of the compressors for PyTorch."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING, Any, NoReturn, Protocol

import numpy as np
import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from hvd_compress.checkpoint.saving import SaveLoadMixin
from hvd_compress.checkpoint.state_dict import PendingStates, Restorable, Saved, SavedSession, from_dict, to_dict
from hvd_compress.core.bucketing import Merge
from hvd_compress.core.collectives import State
from hvd_compress.core.method import check_range
from hvd_compress.core.router import Router
from hvd_compress.engine.api import CompressorBase
from hvd_compress.engine.race import Race
from hvd_compress.engine.stats import Meter, Stats
from hvd_compress.errors import UnsupportedError
from hvd_compress.methods.wrappers.measure import vnmse
from hvd_compress.torch.loss_scale import LossScale
from hvd_compress.torch.optimizers import parameters_of
from hvd_compress.torch.reducer import EngineSettings, Reducer
from hvd_compress.torch.registry import Registry
from hvd_compress.torch.waiting import StepLock

_ELSEWHERE = {
    "register": "import Compression from hvd_compress.distributed for DistributedDataParallel and FSDP2",
    "compress": "import Compression from hvd_compress.torch for Horovod",
}
"""Attributes that only the compressors of the other adapter have, with the cure."""


class Session(Restorable, Protocol):
    """Interface of the reducers of a compressor, one per optimizer or model.

    Attributes:
        label: Name that is the same on all ranks.
    """

    label: str

    @property
    def race(self) -> Race | None:
        """The race that chooses the method, with ``auto``."""

    @property
    def begun(self) -> bool:
        """Whether its states exist."""

    def states(self) -> list[State]:
        """Return the states of all buckets."""

    def saved(self) -> SavedSession:
        """Return copies of the states of all buckets."""

    def discard(self) -> None:
        """Undo the last step."""

    def living(self) -> set[int]:
        """Return the keys of its parameters."""


class ReducingCompressor(SaveLoadMixin, CompressorBase):
    """A compressor with a reducer for each optimizer or model.

    Args:
        method: The method, as a router.
        merge: Assignment of gradients to buckets; see `hvd_compress.core.bucketing.plan`.
        reducers: An empty registry.
        cure: Cure for parameters that were added later, for error messages.
    """

    def __init__(self, method: Router, merge: Merge, reducers: Registry, cure: str) -> None:
        self.method = method
        self._linear = method.linear
        self.merge = merge
        self._meter = Meter()
        self._loaded = PendingStates()
        self._scale = LossScale()
        self._lock = StepLock()  # autograd has one thread per device
        self._registry = reducers
        self._common = EngineSettings(method, merge, self._meter, self._scale, self._lock, cure)

    def __repr__(self) -> str:
        return f"Compression.parse({str(self.method)!r}, merge={self.merge!r})"

    if not TYPE_CHECKING:  # mypy would take any attribute for known

        def __getattr__(self, name: str) -> NoReturn:
            if name == "__signature__":  # which DistributedDataParallel looks for, as it inspects a hook
                raise UnsupportedError("a compression is no communication hook: write compression.register(model)")
            message = f"{type(self).__name__!r} object has no attribute {name!r}"
            if name in _ELSEWHERE:
                raise AttributeError(f"{message}: {_ELSEWHERE[name]}")
            raise AttributeError(message, name=name, obj=self)

    def follow(self, scaler: Any) -> None:
        """Keep residuals in unscaled units while a loss scaler changes its scale.

        Without it, residuals are in units of the scaled gradients. Call it once before training, and reduce gradients
        before they are unscaled: ``optimizer.synchronize()``, then ``scaler.unscale_(optimizer)`` if you clip
        gradients, then ``scaler.step(optimizer)`` within ``optimizer.skip_synchronize()``. Stateless methods do not
        need it.

        Args:
            scaler: A ``torch.amp.GradScaler`` or another object with ``get_scale()``, or a function that returns the
                scale. It is read once per step, with the first gradient.

        Raises:
            SpecError: If it is neither.
        """
        self._scale.follow(scaler)

    def optimizer(
        self, model: nn.Module | Iterable[Any], lr: float, weight_decay: float = 0.01, beta1: float = 0.0
    ) -> Optimizer:
        """Return the optimizer for ``preconditioned=on``, in place of ``torch.optim.AdamW``.

        It is SGD, whose weight decay is that of AdamW: what the compression delivers is an update. AdamW's second beta
        is ``beta2=`` of the compression.

        Args:
            model: The model, or what other optimizers take: parameters, or groups of them.
            lr: Learning rate, as for AdamW.
            weight_decay: Weight decay, as for AdamW.
            beta1: First beta, in [0, 1): a momentum that is a running mean. Error feedback that sends a small share of
                an update is a momentum by itself, so leave it 0 then.

        Raises:
            SpecError: If ``beta1`` is out of range.
            UnsupportedError: If the compression delivers gradients.
        """
        check_range("beta1", beta1, "in [0, 1)", 0 <= beta1 < 1)
        if not self.method.preconditioned:
            raise UnsupportedError(
                f"compression.optimizer is for preconditioned=on: {self.method} delivers gradients, which any"
                " optimizer can apply"
            )
        parameters = model.parameters() if isinstance(model, nn.Module) else model
        return torch.optim.SGD(parameters, lr, momentum=beta1, dampening=beta1, weight_decay=weight_decay)

    def discard(self, owner: nn.Module | Optimizer | None = None) -> None:
        """Undo the last step, if its reduced gradients are discarded instead of applied.

        It restores residuals and all other state from before the step. Call it on all ranks, after
        the gradients were reduced and before the next ``backward()``, for example if you skip a loss spike.

        Args:
            owner: The model or the optimizer whose last step is undone. None if this compressor has only one.

        Raises:
            UnsupportedError: If gradients of the current step have not been reduced yet, or ``owner`` is missing, or an
                optimizer that trains only a part of what is reduced together.
        """
        for session in self._owned(owner):
            session.discard()

    def _owned(self, owner: nn.Module | Optimizer | None) -> list[Session]:
        """Return the sessions of a model or optimizer."""
        sessions = self._sessions()
        if owner is None:
            if len(sessions) > 1:
                raise UnsupportedError(
                    f"compression.discard() would undo the last step of all {len(sessions)} models, optimizers or"
                    " direct calls that share this compressor: pass the one whose gradients are discarded, as"
                    " compression.discard(optimizer) or compression.discard(model), or use a compressor for each"
                )
            return sessions
        keys = {id(parameter) for parameter in parameters_of(owner)}
        found = [session for session in sessions if session.living() & keys]
        if others := {key for session in found for key in session.living() - keys}:
            raise UnsupportedError(
                f"compression.discard({type(owner).__name__}) is not supported: {len(others)} parameters that are"
                " reduced together with its own are not among them; pass the whole model"
            )
        return found

    def stats(self) -> Stats:
        """Return bytes and times of this rank so far, over all optimizers that use this compressor."""
        states = [state for session in self._sessions() for state in session.states()]
        return self._meter.read(waits=not self._linear)._replace(vnmse=vnmse(states), chosen=self._chosen())

    def races(self) -> dict[str, Race]:
        """Return the race of each model or optimizer, by its label; none unless the method is ``auto``."""
        return {one.label: one.race for one in self._sessions() if one.race is not None}

    def state_dict(self) -> dict[str, Any]:
        """Return the state of this rank: residuals, warm starts and step counts.

        Returns:
            Nested dicts of tensors, numbers and strings, which ``torch.load(..., weights_only=True)`` can read. Each
            rank has its own state, so save one file per rank.
        """
        return to_tensors(self._saved())

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Load a saved state, at once or in the first step of the optimizer.

        Args:
            state: State from `state_dict` on the same rank.

        Raises:
            StateError: If it is not a saved state, or belongs to another method, rank, world size or model. Nothing is
                changed.
        """
        self._load([parse(state)])

    def _saved(self) -> Saved:
        sessions = {one.label: one.saved() for one in self._sessions() if one.begun}
        return self._loaded.join(str(self.method), self._world(), sessions)

    def _load(self, saved: list[Saved]) -> None:
        loaded = PendingStates()
        loaded.put(saved, str(self.method))
        loaded.give({session.label: session for session in self._sessions()})
        self._loaded = loaded

    def _sessions(self) -> list[Session]:
        return list(self._registry)

    def _restored(self, reducer: Reducer) -> Reducer:
        """Restore the loaded state of a new reducer, if any, unless it has taken over that of another; return it."""
        if not reducer.steps or reducer.label in self._loaded.names():
            self._loaded.give({reducer.label: reducer})
        return reducer


def to_tensors(saved: Saved) -> dict[str, Any]:
    """Return a saved state as nested dicts of tensors, numbers and strings."""
    return to_dict(saved, lambda leaf: torch.as_tensor(leaf) if isinstance(leaf, np.ndarray) else leaf)


def parse(state: Any) -> Saved:
    """Undo `to_tensors`.

    Raises:
        StateError: If it is not a saved state, or damaged.
    """
    return from_dict(state, lambda leaf: leaf.cpu().numpy() if isinstance(leaf, Tensor) else leaf)
