"""Makes a cluster, starts a program on each host, says so and waits for its end; started by test_cluster.py."""

from __future__ import annotations

import sys

from hvd_compress.cluster import Cluster

if __name__ == "__main__":
    with Cluster(2) as cluster:
        print(cluster.name, flush=True)
        program = "import time; print('ready', flush=True); time.sleep(600)"
        cluster.launch([sys.executable, "-c", program], watch=lambda: print("running", flush=True))
