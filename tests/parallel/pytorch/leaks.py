"""Count what models leave behind when they are deleted."""

from __future__ import annotations

import ctypes
import gc
import os
import weakref
from collections.abc import Callable
from typing import NamedTuple

import torch.distributed as dist
from torch import Tensor

CYCLES = 5

LARGE = 2048
"""Side of a matrix of 16 MiB."""

MOST = 64
"""MiB that memory in use may grow by: residuals of ``CYCLES`` large matrices are more."""


class Left(NamedTuple):
    """Growth between two measurements, or what there is.

    Attributes:
        threads: Number of threads.
        files: Number of open file descriptors.
        groups: Number of process groups.
        memory: Resident memory, without what malloc keeps free, in MiB.
    """

    threads: int
    files: int
    groups: int
    memory: int

    def __sub__(self, other: Left) -> Left:
        return Left(*(mine - theirs for mine, theirs in zip(self, other, strict=True)))

    @property
    def little(self) -> bool:
        """Whether it is less than one of each per cycle, as some connections close late."""
        return max(self[:3]) < CYCLES and self.memory < MOST


def in_use() -> Left:
    """Return what there is."""
    gc.collect()
    ctypes.CDLL(None).malloc_trim(0)
    threads, files = (len(os.listdir(f"/proc/self/{kind}")) for kind in ("task", "fd"))
    with open("/proc/self/statm") as pages:
        memory = int(pages.read().split()[1]) * os.sysconf("SC_PAGE_SIZE") >> 20
    return Left(threads, files, len(dist.distributed_c10d._world.pg_map), memory)


def left_by(cycle: Callable[[], Tensor]) -> Left:
    """Make, train and delete models; return what more of them leave behind than the first two.

    Args:
        cycle: Makes and trains a model, and returns one of its parameters, which must not stay alive.
    """
    alive = [weakref.ref(cycle()) for _ in range(2)]
    before = in_use()
    alive += [weakref.ref(cycle()) for _ in range(CYCLES)]
    after = in_use()
    assert [one() for one in alive] == [None] * len(alive)
    return after - before
