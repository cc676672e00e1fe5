"""Callbacks at the end of a backward pass."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch.autograd import Variable


def at_end_of_backward(callback: Callable[[], None]) -> None:
    """Call a function at the end of the running backward pass; do nothing outside of one.

    DistributedDataParallel uses the same mechanism.
    """
    engine: Any = Variable._execution_engine
    if in_backward():
        engine.queue_callback(callback)


def in_backward() -> bool:
    """Return whether this thread runs a backward pass."""
    return torch._C._current_graph_task_id() != -1
