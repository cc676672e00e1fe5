"""The states of all ranks in one state dict, for checkpoints that all ranks share."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from typing import Any

import torch.distributed as dist

from hvd_compress.checkpoint.saves import flaw, needed
from hvd_compress.distributed.compression import DistributedCompressor, alone
from hvd_compress.distributed.gossip import Gossip
from hvd_compress.distributed.local_steps import LocalSteps
from hvd_compress.distributed.meeting import meet
from hvd_compress.errors import StateError
from hvd_compress.torch.compressor import parse

_LOG = logging.getLogger("hvd_compress")


class FullState:
    """The states of all ranks of a compressor, for a checkpoint that all ranks share.

    Such a checkpoint keeps one value of each key, but each rank has its own residual::

        torch.distributed.checkpoint.save({"compression": FullState(compression)}, checkpoint_id=folder)

    Each rank gathers the states of all ranks, which takes memory for all residuals; `DistributedCompressor.save` does
    not.

    Args:
        compression: The compressor; or `hvd_compress.distributed.LocalSteps` or `Gossip`, whose state includes that of
            its own.
    """

    def __init__(self, compression: DistributedCompressor | LocalSteps | Gossip) -> None:
        self._compression = compression

    def state_dict(self) -> dict[str, Any]:
        """Gather the states of all ranks. Call it on all ranks of the models, after the same step.

        Returns:
            The states that `DistributedCompressor.state_dict` returns on each rank; the same on all ranks.

        Raises:
            StateError: If another rank does not call it within the time limit of the process group.
        """
        mine = self._compression.state_dict()
        if alone():
            return {"ranks": (mine,)}
        group = self._compression.group()
        meet(group, "FullState(compression).state_dict()")
        states: list[Any] = [None] * group.size()
        dist.all_gather_object(states, mine, group)
        # torch.distributed.checkpoint loads only keys that are there before it loads. Those of a compressor before its
        # first step are not, so all states are one value: a tuple is not flattened into keys.
        return {"ranks": tuple(states)}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Load the state of this rank, at once or in the first step of the model.

        If the world size has changed, residuals are resharded and their sum is preserved.

        Args:
            state: State from `state_dict`.

        Raises:
            StateError: If it is not such a state, or belongs to another method or model. Nothing is changed.
        """
        if not isinstance(state, Mapping) or not state.get("ranks"):
            raise StateError(
                "this is not the state of all ranks: pass what FullState(compression).state_dict() returned; the"
                " state of one rank is loaded by compression.load_state_dict"
            )
        found = [parse(one) for one in state["ranks"]]
        if why := flaw(found, found[0].size):
            raise StateError(f"this state of all ranks cannot be loaded: {why}; load another one")
        world = self._compression._world()
        linear = isinstance(self._compression, DistributedCompressor) and self._compression.method.linear
        if not (linear or any(one.sessions or one.carried for one in found)):
            _LOG.warning("the checkpoint has no state of this compression: residuals begin at zero")
        self._compression._load(needed(found, world.rank, world.size))
