"""Compile all kernels for this machine's CPUs, on all of its cores: ``python -m hvd_compress.kernels.cpu``."""

from __future__ import annotations

import logging
import os
import sys
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context

from hvd_compress.kernels import cpu  # noqa: F401  # declares all loops
from hvd_compress.kernels.cpu.compiled import LOOPS, NO_FOLDER, cache_folder


def compile_number(number: int) -> None:
    """Compile one of the loops."""
    LOOPS[number]()


def main() -> str | None:
    """Compile what is not on disk yet; the return value is the error, for `sys.exit`."""
    folder = cache_folder()
    if folder is None:
        return f"CPU kernels: {NO_FOLDER}"
    logging.getLogger("hvd_compress").setLevel(logging.ERROR)  # each process would say that it compiles
    cores = len(os.sched_getaffinity(0))
    with ProcessPoolExecutor(cores, mp_context=get_context("fork")) as pool:
        list(pool.map(compile_number, range(len(LOOPS))))
    print(f"{len(LOOPS)} CPU kernels are in {folder}")
    return None


if __name__ == "__main__":
    sys.exit(main())
