"""Meet all ranks of a process group without a collective, and say which do not come."""

from __future__ import annotations

import logging
import time
import weakref
from collections import Counter
from datetime import timedelta
from typing import Any

import torch.distributed as dist
from torch.distributed.distributed_c10d import _get_process_group_store, default_pg_timeout

from hvd_compress.errors import DisagreementError, StateError
from hvd_compress.torch.waiting import nap

PATIENCE = 10.0
"""Seconds after which the ranks that are waited for are named in the log."""

_LOG = logging.getLogger("hvd_compress")
_MEETINGS: weakref.WeakKeyDictionary[Any, Counter[str]] = weakref.WeakKeyDictionary()
"""Number of meetings of each name so far, by process group."""


def meet(group: dist.ProcessGroup, call: str) -> None:
    """Wait until all ranks of a process group make a call.

    Args:
        group: The process group.
        call: The call, for messages.

    Raises:
        StateError: If another rank does not make it within the time limit of the group.
    """
    cure = "call it on all ranks, after the same step, and not inside 'if rank == 0:'"
    _gather(group, "meeting", "here", f"{call} has waited {{:.0f}} s for", f"which have not called it: {cure}")


def compare(group: dist.ProcessGroup, name: str, what: str, mine: str) -> None:
    """Verify that a setting is the same on all ranks of a process group.

    Args:
        group: The process group.
        name: Name of the comparison, the same on all ranks.
        what: What is compared, for messages.
        mine: The setting of this rank.

    Raises:
        DisagreementError: If it is not.
        StateError: If another rank does not compare it within the time limit of the group.
    """
    told = _gather(group, name, mine, f"the comparison of {what} has waited {{:.0f}} s for", "which have not begun")
    for rank, other in enumerate(told):
        if other != told[0]:
            raise DisagreementError(
                f"the ranks disagree on {what}: rank 0 has {told[0]!r}, and rank {rank} has {other!r}: pass the same on"
                " all ranks"
            )


def _gather(group: dist.ProcessGroup, name: str, mine: str, waited: str, cure: str) -> list[str]:
    """Gather a string from each rank without a collective, as a rank may be in the middle of a step."""
    store, begin, logged = _get_process_group_store(group), time.monotonic(), False
    meetings = _MEETINGS.setdefault(group, Counter())
    keys = [f"hvd_compress.{name}.{meetings[name]}.{rank}" for rank in range(group.size())]
    store.set(keys[group.rank()], mine)
    while missing := [rank for rank, key in enumerate(keys) if not store.check([key])]:
        seconds = time.monotonic() - begin
        words = f"{waited.format(seconds)} the ranks {missing} of the process group, {cure}"
        if seconds > limit_of(group).total_seconds():
            raise StateError(words)
        if seconds > PATIENCE and not logged:
            _LOG.warning(words)
            logged = True
        nap(begin)
    meetings[name] += 1
    return [store.get(key).decode() for key in keys]


def limit_of(group: dist.ProcessGroup) -> timedelta:
    """Return the time limit of a process group."""
    options: Any = getattr(group._get_backend(group._device_types[0]), "options", None)
    limit: timedelta = getattr(options, "_timeout", default_pg_timeout)
    return limit
