"""Emulated hosts without root: in a user namespace, where a user may make network namespaces.

The namespace has a /run and an /etc of its own, as ``ip netns`` writes to both. All of it ends with the program.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from collections.abc import Sequence

_MOUNTS = """
set -e
mount -t tmpfs tmpfs /run
mkdir /run/etc
mount --rbind /etc /run/etc
mount -t tmpfs tmpfs /etc
ln -s /run/etc/* /etc
rm -f /etc/netns /etc/resolv.conf
touch /etc/resolv.conf  # which may have been a link into the old /run
export PATH="$PATH:/usr/sbin:/sbin"
exec "$@"
"""

_TRIAL = "from hvd_compress.tools.cluster import Cluster\nwith Cluster(2, '1gbit'): pass"


def as_root(command: Sequence[str]) -> list[str]:
    """Return what runs a command as root of a user namespace; its process is that of the command."""
    return ["unshare", "--user", "--map-root-user", "--net", "--mount", "sh", "-c", _MOUNTS, "sh", *command]


def become_root() -> None:
    """Start this program anew as root of a user namespace, if hosts can be made there but not here.

    Without a user namespace, or if this program has root already, this does nothing.
    """
    if os.geteuid() == 0 or shutil.which("unshare") is None:
        return
    trial = subprocess.run(as_root([sys.executable, "-c", _TRIAL]), capture_output=True, stdin=subprocess.DEVNULL)
    if trial.returncode == 0:
        command = as_root([sys.executable, *sys.orig_argv[1:]])
        os.execvp(command[0], command)
