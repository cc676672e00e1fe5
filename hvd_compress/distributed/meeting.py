"""Wait for all ranks at a call that all of them must make, and say which do not come."""

from __future__ import annotations

import logging
import time
import weakref
from datetime import timedelta
from typing import Any

import torch.distributed as dist
from torch.distributed.distributed_c10d import _get_process_group_store, default_pg_timeout

from hvd_compress.errors import StateError
from hvd_compress.torch.waiting import nap

PATIENCE = 10.0
"""Seconds after which the ranks that are waited for are named in the log."""

_LOG = logging.getLogger("hvd_compress")
_MEETINGS: weakref.WeakKeyDictionary[Any, int] = weakref.WeakKeyDictionary()
"""Number of meetings of each process group so far."""


def meet(group: dist.ProcessGroup, call: str) -> None:
    """Wait until all ranks of a process group make a call.

    It exchanges nothing in the group, where another rank may be in the middle of a step.

    Args:
        group: The process group.
        call: The call, for messages.

    Raises:
        StateError: If another rank does not make it within the time limit of the group.
    """
    store, begin, told = _get_process_group_store(group), time.monotonic(), False
    name = f"hvd_compress.meeting.{_MEETINGS.get(group, 0)}"
    store.set(f"{name}.{group.rank()}", "here")
    while missing := [rank for rank in range(group.size()) if not store.check([f"{name}.{rank}"])]:
        waited = time.monotonic() - begin
        words = (
            f"{call} has waited {waited:.0f} s for the ranks {missing} of the process group, which have not called it:"
            " call it on all ranks, after the same step, and not inside 'if rank == 0:'"
        )
        if waited > _limit(group).total_seconds():
            raise StateError(words)
        if waited > PATIENCE and not told:
            _LOG.warning(words)
            told = True
        nap(begin)
    _MEETINGS[group] = _MEETINGS.get(group, 0) + 1


def _limit(group: dist.ProcessGroup) -> timedelta:
    """Return the time limit of a process group."""
    options: Any = getattr(group._get_backend(group._device_types[0]), "options", None)
    limit: timedelta = getattr(options, "_timeout", default_pg_timeout)
    return limit
