"""The end of a backward pass, which PyTorch tells those who ask while it goes on."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch.autograd import Variable


def at_end_of_backward(callback: Callable[[], None]) -> None:
    """Have a function called when the backward pass that is going on has given all gradients; never, if there is none.

    PyTorch's own data-parallel wrappers learn it in the same way.
    """
    engine: Any = Variable._execution_engine
    if in_backward():
        engine.queue_callback(callback)


def in_backward() -> bool:
    """Whether this thread computes gradients now."""
    return torch._C._current_graph_task_id() != -1
