"""How many bytes a method sends, with any number of ranks: from the messages of one exchange."""

from __future__ import annotations

import math
from functools import cache
from typing import Any, NamedTuple

import numpy as np

from hvd_compress.core.bucket import Bucket
from hvd_compress.core.collectives import AllGather, AllToAll, Collective, Drive, World, take_branches
from hvd_compress.core.lowering import LACKS, lower
from hvd_compress.methods.base import Method
from hvd_compress.ops.numpy import NumpyOps
from hvd_compress.spec import parse
from hvd_compress.tools.bench.inputs import RMS, SEED
from hvd_compress.tools.bench.traffic import SPARSE, messages, share


class Message(NamedTuple):
    """A collective of one exchange, for each parameter of the gradient.

    Attributes:
        kind: ``"AllReduce"``, ``"AllGather"``, ``"AllToAll"`` or ``"Broadcast"``.
        bytes: That a rank hands to it.
        halves: How many numbers of 16 bits are summed in it.
    """

    kind: str
    bytes: float
    halves: float

    def wire(self, ranks: int, ranks_per_host: int = 1) -> float:
        """Bytes through the network device of a host, for each parameter; 0 if there is but one host.

        In a ring, ranks of a host are neighbours, and so one of them alone sends to another host. In an alltoall, each
        of them sends to all that are elsewhere.
        """
        if ranks <= ranks_per_host:
            return 0.0
        if self.kind == "AllToAll":
            return self.bytes * ranks_per_host * (ranks - ranks_per_host) / ranks
        return self.bytes * share(self.kind, ranks)


@cache
def sent(spec: str, ranks: int, side: int) -> tuple[Message, ...]:
    """What rank 0 asks Horovod for in one exchange of a matrix of ``side * side`` numbers.

    How many messages there are is the same with any number of ranks, so that two ranks tell it. With more, the exchange
    goes up to the last message and no further: to decode what a thousand ranks gather would take long.

    Raises:
        SpecError: If the spec is not one.
        UnsupportedError: If the method cannot be used with so many ranks.
    """
    method, bucket = parse(spec).core, Bucket("b0", ((side, side),), "float32")
    rng = np.random.default_rng(SEED)
    kept = rng.random(bucket.numel) < SPARSE.get(spec.partition(":")[0], 1)
    x = (RMS * rng.standard_normal(bucket.numel) * kept).astype(np.float32)
    first = messages(method, bucket, x, 2)
    asked = first if ranks == 2 else _first_messages(method, bucket, x, ranks, len(first))
    return tuple(_message(one, bucket.numel) for one in asked)


def _first_messages(method: Method, bucket: Bucket, x: Any, ranks: int, number: int) -> list[Collective]:
    ops, world = NumpyOps(), World(0, ranks)
    exchanging = method.exchange(ops, bucket, x, method.init(ops, bucket, ranks), world)
    drive = Drive(take_branches(lower(exchanging, ops, world, LACKS)))
    asked: list[Collective] = []
    while drive.message is not None and len(asked) < number:
        asked.append(drive.message)
        drive.resume(_reply(drive.message, ranks))
    return asked


def _reply(message: Collective, ranks: int) -> Any:
    """As if all ranks had sent the same; what they add to it is zero."""
    array = message.array
    if isinstance(message, AllGather) and message.ragged:
        return np.tile(array, ranks)
    if isinstance(message, AllGather | AllToAll):
        row = array if isinstance(message, AllGather) else array[0]
        return np.broadcast_to(row, (ranks, *row.shape)).copy()
    return array.copy()


def _message(message: Collective, numbers: int) -> Message:
    array = message.array
    halves = array.size if array.dtype == np.float16 else 0
    return Message(type(message).__name__, array.nbytes / numbers, halves / numbers)


def matrix_side(parameters: int, side: int) -> int:
    """Of the matrices that a model is taken to be made of: as told, unless it has fewer parameters."""
    return max(1, min(side, math.isqrt(parameters)))


def grows(asked: tuple[Message, ...]) -> bool:
    """Whether what a rank receives, and so has to decode, grows with the ranks.

    An allgather that hands out what an alltoall has collected does not.
    """
    kinds = {message.kind for message in asked}
    return "AllGather" in kinds and "AllToAll" not in kinds
