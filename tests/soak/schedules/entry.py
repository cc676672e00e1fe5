"""Where forked ranks begin; imports their framework there only."""

from __future__ import annotations

from collections.abc import Callable
from importlib import import_module

from soak.schedules.rank import Order
from soak.schedules.schedule import Framework


def torch(order: Order) -> None:
    """Be a rank in PyTorch."""
    import_module("soak.schedules.torch_job").run(order)


def keras(order: Order) -> None:
    """Be a rank in Keras."""
    import_module("soak.schedules.keras_job").run(order)


ENTRIES: dict[Framework, Callable[[Order], None]] = {"torch": torch, "keras": keras}
