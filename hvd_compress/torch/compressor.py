"""What all compressors of PyTorch gradients have in common, whoever calls them."""

from __future__ import annotations

import threading
from collections.abc import Mapping
from typing import Any

import numpy as np
import torch
from torch import Tensor

from hvd_compress.api import Made
from hvd_compress.bucketing import Merge
from hvd_compress.checkpoint.saving import Saving
from hvd_compress.checkpoint.state_dict import Loaded, Saved, from_dict, to_dict
from hvd_compress.spec import to_spec
from hvd_compress.stats import Meter, Stats
from hvd_compress.torch.loss_scale import LossScale
from hvd_compress.torch.reducer import Common, Reducer
from hvd_compress.torch.registry import Registry
from hvd_compress.wrappers.measure import vnmse
from hvd_compress.wrappers.router import Router


class ReducingCompressor(Saving, Made):
    """A compressor with a reducer for each optimizer or model.

    Args:
        method: What compresses.
        merge: How gradients are put into buckets; see `hvd_compress.bucketing.plan`.
        reducers: Has none yet.
        cure: What to do after parameters were added, for messages.
    """

    def __init__(self, method: Router, merge: Merge, reducers: Registry, cure: str) -> None:
        self.method = method
        self.merge = merge
        self._meter = Meter()
        self._loaded = Loaded()
        self._scale = LossScale()
        self._lock = threading.Condition()  # autograd calls from a thread for each device
        self._registry = reducers
        self._common = Common(method, merge, self._meter, self._scale, self._lock, cure)

    def __repr__(self) -> str:
        return f"Compression.parse({to_spec(self.method)!r}, merge={self.merge!r})"

    def follow(self, scaler: Any) -> None:
        """Keep residuals in true units while a loss scaler changes its scale.

        Without it, they are kept in the units of the gradients that Horovod gets: scaled ones. Call it once, before
        training, and reduce gradients before they are unscaled: ``optimizer.synchronize()``, then
        ``scaler.unscale_(optimizer)`` where gradients are clipped, then ``scaler.step(optimizer)`` within
        ``optimizer.skip_synchronize()``. Methods that keep nothing need it not, and are as without it.

        Args:
            scaler: A ``torch.amp.GradScaler`` or another object with ``get_scale()``, or a function that gives the
                scale. It is asked once in each step, when the first gradient has come.

        Raises:
            SpecError: If it is something else.
        """
        self._scale.follow(scaler)

    def discard(self) -> None:
        """Take the last step back, if its reduced gradients are thrown away instead of applied.

        What is kept between steps is then as if that step had not been. Call it on all ranks, after
        ``optimizer.synchronize()`` and before the next ``backward()``, for example where a spike is skipped, or for the
        critic's gradients of a generator's loss. It holds for all optimizers that use this compressor.

        Raises:
            UnsupportedError: If gradients have come that have not been reduced.
        """
        with self._lock:
            for reducer in self._registry:
                reducer.discard()

    def stats(self) -> Stats:
        """Bytes and time so far, on this rank, of all optimizers that use this compressor."""
        states = [state for reducer in self._registry for state in reducer.states()]
        return self._meter.read(waits=not self.method.linear)._replace(vnmse=vnmse(states))

    def state_dict(self) -> dict[str, Any]:
        """What this rank would lose: residuals, warm starts, step counts.

        Returns:
            Tensors, numbers and strings in dicts, so that ``torch.load(..., weights_only=True)`` reads it. It belongs
            to this rank: each rank saves a file of its own.
        """
        return to_dict(self._saved(), lambda leaf: torch.as_tensor(leaf) if isinstance(leaf, np.ndarray) else leaf)

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on from a saved state; at once where the optimizer has made a step, else in its first step.

        Args:
            state: From `state_dict`, of the same rank.

        Raises:
            StateError: If it is not such a state, or of another method, rank, world size or model. Nothing is changed.
        """
        self._load([from_dict(state, lambda leaf: leaf.cpu().numpy() if isinstance(leaf, Tensor) else leaf)])

    def _saved(self) -> Saved:
        reducers = {one.label: one.saved() for one in self._registry if one.begun}
        return self._loaded.join(to_spec(self.method), self._world(), reducers)

    def _load(self, saved: list[Saved]) -> None:
        loaded = Loaded()
        loaded.put(saved, to_spec(self.method))
        loaded.give({reducer.label: reducer for reducer in self._registry})
        self._loaded = loaded

    def _restored(self, reducer: Reducer) -> Reducer:
        """Take over what was loaded before the reducer began."""
        self._loaded.give({reducer.label: reducer})
        return reducer
