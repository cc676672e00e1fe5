"""Compile all kernels for this machine's CPUs, on all of its cores: ``python -m hvd_compress.ops.kernels.cpu``."""

from __future__ import annotations

import logging
import os
import sys
from multiprocessing import get_context
from typing import Any

from hvd_compress.ops.kernels import cpu  # noqa: F401  # declares all loops
from hvd_compress.ops.kernels.cpu.compiled import LOOPS, NO_FOLDER, cache_folder


def compile_some(first: Any) -> None:
    """Compile one loop after another, the first of which no process has begun with."""
    while True:
        with first.get_lock():
            number, first.value = first.value, first.value + 1
        if number >= len(LOOPS):
            return
        LOOPS[number]()


def main() -> str | None:
    """Compile what is not on disk yet; the return value is the error, for `sys.exit`."""
    folder = cache_folder()
    if folder is None:
        return f"CPU kernels: {NO_FOLDER}"
    logging.getLogger("hvd_compress").setLevel(logging.ERROR)  # each process would say that it compiles
    fork = get_context("fork")
    first, cores = fork.Value("q", 0), len(os.sched_getaffinity(0))
    processes = [fork.Process(target=compile_some, args=(first,)) for _ in range(cores)]
    for process in processes:
        process.start()
    for process in processes:
        process.join()
    if any(process.exitcode for process in processes):
        return "CPU kernels: not all are compiled"
    print(f"{len(LOOPS)} CPU kernels are in {folder}")
    return None


if __name__ == "__main__":
    sys.exit(main())
