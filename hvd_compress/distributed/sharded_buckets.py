"""The buckets of a group of parameters that FSDP reduces together."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import accumulate, product
from typing import NamedTuple

import torch
from torch import Tensor

from hvd_compress.checkpoint.resharding import BucketSnapshot, Leaves, inherit
from hvd_compress.checkpoint.state_dict import Buckets
from hvd_compress.core.bucket import Bucket
from hvd_compress.core.bucketing import Planned, gradient
from hvd_compress.core.collectives import World
from hvd_compress.core.method import Method
from hvd_compress.core.state_tree import flatten
from hvd_compress.distributed.sharded_groups import FSDPUnit
from hvd_compress.ops.numpy import NumpyOps
from hvd_compress.torch.bucket_state import BucketState


class Part(NamedTuple):
    """Parameters of a group that FSDP has always reduced together, with their bucket.

    Attributes:
        members: Their positions in the group.
        bucket: The bucket with its state.
    """

    members: tuple[int, ...]
    bucket: BucketState


class GroupBuckets:
    """The buckets of a group.

    FSDP reduces the gradients that are there: in most programs all of a group, together. A parameter that a step does
    not use, or that is frozen, is left out. So each set of parameters that were always reduced together has a bucket of
    its own: nothing is sent for others, and their residuals stay. So have parameters that tensor parallelism divides:
    others must not depend on what only some of their ranks have.

    Args:
        group: The group.
        method: Method of all its buckets.
        world: Ranks that sum the gradients.
        rows: Number of parts that a bucket consists of, one for each rank that receives one.

    Attributes:
        group: The group.
        method: Method of all its buckets.
        rows: Number of parts.
    """

    def __init__(self, group: FSDPUnit, method: Method, world: World, rows: int) -> None:
        self.group, self.method, self.rows = group, method, rows
        self._world = world
        self._parts: list[Part] = []

    def __iter__(self) -> Iterator[Part]:
        return iter(self._parts)

    def covering(self, members: Sequence[int]) -> list[Part]:
        """Return the parts that together have exactly these members, which are reduced now."""
        wanted = set(members)
        found = [part for part in self._parts if wanted.intersection(part.members)]
        missing = sorted(wanted.difference(*(part.members for part in found)))
        for divided in (False, True):
            if some := [one for one in missing if self.group.parameters[one].divided is divided]:
                found.append(self._add(some))
        found = [part if wanted.issuperset(part.members) else self._split(part, wanted) for part in found]
        return sorted(found, key=lambda part: part.members)  # the same order on all ranks

    def _add(self, members: Sequence[int]) -> Part:
        part = Part(tuple(members), BucketState(self._planned(members), self.group.device, self._world))
        self._parts.append(part)
        return part

    def _split(self, part: Part, inside: set[int]) -> Part:
        """Replace a part by two; return that of the members that are in a set."""
        self._parts.remove(part)
        former = self._kept(part.members, part.bucket.read())
        halves = [[one for one in part.members if (one in inside) is within] for within in (True, False)]
        new = [self._add(half) for half in halves]
        for half in new:
            half.bucket.write(inherit(self._kept(half.members, half.bucket.read()), [former]))
        return new[0]

    def _kept(self, members: Sequence[int], leaves: Leaves) -> BucketSnapshot:
        """Return a state as one that is divided by the ranks that receive shards, and by parameters."""
        names = [self.group.parameters[member].name for member in members]
        bucket, method, _ = self._planned(members)
        return BucketSnapshot(list(product(range(self.rows), names)), bucket, method, leaves)

    def _planned(self, members: Sequence[int]) -> Planned:
        parameters = [self.group.parameters[member] for member in members]
        shards = [one.shard for one in parameters]
        dtype = gradient(parameters[0].name, (), parameters[0].dtype).dtype
        return Planned(Bucket(self.key(members), tuple(self.rows * shards), dtype), self.method, ())

    def key(self, members: Sequence[int]) -> str:
        """Return the key of a bucket: the group's name, with the positions of the members if others are missing."""
        if len(members) == len(self.group.parameters):
            return self.group.name
        return f"{self.group.name}/{','.join(map(str, members))}"

    def members(self, key: str) -> tuple[int, ...] | None:
        """Undo `key`; None if it belongs to another group."""
        everything = range(len(self.group.parameters))
        name, slash, positions = key.rpartition("/")
        if key == self.group.name:
            return tuple(everything)
        if not slash or name != self.group.name or not positions.replace(",", "").isdigit():
            return None
        members = tuple(map(int, positions.split(",")))
        return members if set(members) <= set(everything) else None

    def fresh(self, key: str) -> BucketSnapshot | None:
        """Return the initial state of a bucket; None if it is no bucket of this group."""
        members = self.members(key)
        if members is None:
            return None
        bucket, method, _ = self._planned(members)
        return self._kept(members, flatten(method.init(NumpyOps(), bucket, self._world)))

    def adopt(self, former: GroupBuckets) -> None:
        """Take over the states of former buckets of the same group."""
        self._parts = former._parts

    def restore(self, buckets: Buckets) -> None:
        """Replace all buckets by those of a saved state that belong to this group."""
        self._parts = []
        for key, leaves in buckets.items():
            if (members := self.members(key)) is not None:
                self._add(members).bucket.write(leaves)

    def columns(self, members: Sequence[int], part: Part) -> list[slice]:
        """Return where the members of a part are within each row of the gradients of ``members``."""
        sizes = [self.group.parameters[member].numel for member in members]
        spans = [slice(end - size, end) for end, size in zip(accumulate(sizes), sizes, strict=True)]
        return [spans[members.index(member)] for member in part.members]

    def take(self, grad: Tensor, columns: Sequence[slice]) -> Tensor:
        """Return some columns of gradients, one for each parameter, as gradients of a part."""
        rows = grad.view(self.rows, -1)
        return torch.cat([rows[:, column] for column in columns], 1).flatten()

    def put(self, out: Tensor, columns: Sequence[slice], total: Tensor) -> None:
        """Write the result of a part to its columns."""
        sizes = [column.stop - column.start for column in columns]
        for column, piece in zip(columns, torch.split(total, sizes), strict=True):
            out[column] = piece

    def pieces(self, bucket: BucketState, out: Tensor) -> list[tuple[slice, Tensor]]:
        """Return the slices of a bucket's total with the tensors that they are written to."""
        out = out.view(-1)
        return [(slice(0, out.numel()), out)] if self.rows > 1 else [(span, out[span]) for span in bucket.spans]

    def numel(self, members: Sequence[int]) -> int:
        """Return the number of elements of the gradients of some members, with padding."""
        return self.rows * sum(self.group.parameters[member].numel for member in members)
