"""Run a program in which Accelerate shards models over CPUs, which without this it replicates.

Its arguments are the program and those of it.
"""

from __future__ import annotations

import runpy
import sys
from typing import Any

from accelerate.state import AcceleratorState
from accelerate.utils import DistributedType

init = AcceleratorState.__init__


plugins: list[Any] = []


def sharding(state: AcceleratorState, *args: Any, fsdp_plugin: Any = None, **options: Any) -> None:
    init(state, *args, fsdp_plugin=fsdp_plugin, **options)  # many times; only the first one has the plugin
    plugins.extend([] if fsdp_plugin is None else [fsdp_plugin])
    if plugins:
        state.distributed_type, state.fsdp_plugin = DistributedType.FSDP, plugins[0]


setattr(AcceleratorState, "__init__", sharding)  # noqa: B010
del sys.argv[0]
runpy.run_path(sys.argv[0], run_name="__main__")
