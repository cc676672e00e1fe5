"""Horovod's rendezvous server, as a program: ``python -m hvd_compress.tools.cluster.rendezvous h1:1,h2:1``.

It prints its port, and serves until it is ended.
"""

from __future__ import annotations

import importlib
import sys
import threading


def main(hosts: str) -> None:
    """Serve."""
    slots = importlib.import_module("horovod.runner.common.util.hosts")
    server = importlib.import_module("horovod.runner.http.http_server").RendezvousServer()
    port = server.start()
    found = slots.parse_hosts(hosts)
    server.init(slots.get_host_assignments(found, sum(one.slots for one in found)))
    print(port, flush=True)
    threading.Event().wait()


if __name__ == "__main__":
    main(*sys.argv[1:])
