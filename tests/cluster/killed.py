"""Makes a cluster, starts a program on each host, says once that all run and waits; started by test_cluster.py."""

from __future__ import annotations

import sys
from pathlib import Path

from hvd_compress.tools.cluster import Cluster

PROGRAM = (
    "import os, pathlib, sys, time; pathlib.Path(sys.argv[1], os.environ['HOROVOD_RANK']).touch(); time.sleep(600)"
)


def main(folder: Path) -> None:
    """Run until the end is brought about from outside."""
    said: list[str] = []

    def say() -> None:
        if not said and len(list(folder.iterdir())) == 2:
            said.append("running")
            print(*said, flush=True)

    with Cluster(2) as cluster:
        print(cluster.name, flush=True)
        cluster.launch([sys.executable, "-c", PROGRAM, str(folder)], watch=say)


if __name__ == "__main__":
    main(Path(sys.argv[1]))
