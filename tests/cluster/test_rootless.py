"""Emulated hosts in a user namespace: they are made without root, and the machine sees nothing of them."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from hvd_compress.tools.cluster import become_root
from hvd_compress.tools.cluster.rootless import as_root

PROGRAM = """
import os
from pathlib import Path
from hvd_compress.tools.cluster import Cluster

with Cluster(2, "20mbit") as cluster:
    print(cluster.name, flush=True)
    print(os.geteuid(), *sorted(path.name.removeprefix(cluster.name) for path in Path("/run/netns").iterdir()))
    print(cluster.run(2, ["sh", "-c", "hostname; grep -c h1 /etc/hosts"]).output.split())
    print(Path("/etc/passwd").read_text().startswith("root:"), flush=True)
    input()  # until the test has looked at the machine
"""


@pytest.mark.needs("namespaces")
def test_hosts_are_made_where_the_machine_does_not_see_them() -> None:
    command = ["timeout", "300", *as_root([sys.executable, "-c", PROGRAM])]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as program:
        assert program.stdin is not None and program.stdout is not None
        name, *found = (program.stdout.readline().rstrip("\n") for _ in range(4))
        assert found == ["0 -h1 -h2 -switch", "['h2', '1']", "True"]
        # Other tests make hosts of their own at the same time.
        assert name and not list(Path("/run/netns").glob(f"{name}-*"))
        program.communicate("\n", timeout=60)
    assert program.returncode == 0


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
