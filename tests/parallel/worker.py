"""One rank of a test job: runs pytest on a folder and writes what it prints to a file of its own.

A rank that fails ends at once, and horovodrun ends the others: they would wait for it.
"""

from __future__ import annotations

import contextlib
import os
import sys
from pathlib import Path

import pytest


def main(logs: str, *tests: str) -> int:
    """Run the tests in a folder, or in some files."""
    rank = os.environ.get("HOROVOD_RANK") or os.environ["OMPI_COMM_WORLD_RANK"]
    options = ["-x", "-q", "-p", "no:cacheprovider", "-o", "faulthandler_timeout=240"]
    options += [f"--basetemp={logs}/files{rank}"]  # ranks must not clean up after each other
    with Path(logs, f"rank{rank}").open("w", buffering=1) as log, contextlib.redirect_stdout(log):
        return pytest.main([*options, *tests])


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
