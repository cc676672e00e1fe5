"""Emulated hosts in a user namespace: they are made without root, and the machine sees nothing of them."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

from hvd_compress.tools.cluster import become_root
from hvd_compress.tools.cluster.rootless import as_root

PROGRAM = """
import os
from pathlib import Path
from hvd_compress.tools.cluster import Cluster

with Cluster(2, "20mbit") as cluster:
    print(os.geteuid(), *sorted(path.name.removeprefix(cluster.name) for path in Path("/run/netns").iterdir()))
    print(cluster.run(2, ["sh", "-c", "hostname; grep -c h1 /etc/hosts"]).output.split())
    print(Path("/etc/passwd").read_text().startswith("root:"))
"""


@pytest.mark.needs("namespaces")
def test_hosts_are_made_where_the_machine_does_not_see_them() -> None:
    before = os.listdir("/run/netns") if os.path.exists("/run/netns") else None
    found = subprocess.run(as_root([sys.executable, "-c", PROGRAM]), capture_output=True, text=True, timeout=300)
    assert found.returncode == 0, found.stderr
    assert found.stdout.splitlines() == ["0 -h1 -h2 -switch", "['h2', '1']", "True"]
    assert (os.listdir("/run/netns") if os.path.exists("/run/netns") else None) == before


@pytest.mark.parametrize("works", [True, False])
def test_a_program_starts_anew_only_where_that_helps(monkeypatch: pytest.MonkeyPatch, works: bool) -> None:
    started: list[list[str]] = []
    trial = subprocess.CompletedProcess[bytes]([], 0 if works else 1)
    monkeypatch.setattr(os, "geteuid", lambda: 1000)
    monkeypatch.setattr(subprocess, "run", lambda *_, **__: trial)
    monkeypatch.setattr(os, "execvp", lambda _, command: started.append(command))
    become_root()
    assert started == ([as_root([sys.executable, *sys.orig_argv[1:]])] if works else [])
    monkeypatch.setattr(os, "geteuid", lambda: 0)
    become_root()
    assert len(started) == works
