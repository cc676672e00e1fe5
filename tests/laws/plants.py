"""Faults to plant: programs that find nothing must find these."""

from __future__ import annotations

from collections.abc import Callable
from importlib import import_module
from typing import Any, NamedTuple


class Plant(NamedTuple):
    """A fault.

    Attributes:
        sow: Plants it in this process.
        adapter: Where it must be found.
    """

    sow: Callable[[], None]
    adapter: str


def discard() -> None:
    """A discard reaches the other models of the compressor."""
    compressor = import_module("hvd_compress.torch.compressor").ReducingCompressor
    compressor._owned = lambda self, owner: [one for one in self._sessions() if not one.waiting]


def clip() -> None:
    """What float16 cannot hold is sent as an infinity."""
    for name in ("methods.cast", "methods.wrappers.hierarchy"):
        module: Any = import_module(f"hvd_compress.{name}")
        module.to_half = lambda ops, x, ranks=None: ops.cast(x, "float16")


def server() -> None:
    """A dense step keeps what servers hold back."""
    quantised = import_module("hvd_compress.methods.quantised").Quantised
    quantised.flush = lambda self, ops, bucket, x, state, world: (x, state)


def unused() -> None:
    """What a step does not use loses its residual."""
    state = import_module("hvd_compress.torch.bucket_state").BucketState
    state.rejoined = lambda self, new, idle, unused: new


def votes() -> None:
    """Only the replicas of a shard vote on whether its gradients are finite."""
    reducer = import_module("hvd_compress.distributed.sharded").ShardedReducer
    reducer._meet = lambda self: next(iter(self._transports.values()))


PLANTS = {
    "unused": Plant(unused, "ddp"),
    "clip": Plant(clip, "local"),
    "server": Plant(server, "local"),
    "discard": Plant(discard, "threads"),
    "votes": Plant(votes, "fsdp"),
}
