"""Horovod's rendezvous server, as a program: ``python -m hvd_compress.tools.cluster.rendezvous h1:1,h2:1``.

It prints its port, and serves until it is ended.
"""

from __future__ import annotations

import sys
import threading

from horovod.runner.common.util.hosts import get_host_assignments, parse_hosts
from horovod.runner.http.http_server import RendezvousServer


def main(hosts: str) -> None:
    """Print the port, and serve."""
    server = RendezvousServer()
    port = server.start()
    found = parse_hosts(hosts)
    server.init(get_host_assignments(found, sum(one.slots for one in found)))
    print(port, flush=True)
    threading.Event().wait()


if __name__ == "__main__":
    main(*sys.argv[1:])
