"""What the set-up steps share: messages for pip's failures, a clean environment, locks, no stray commands."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest
from setup_support import ROOT, empty_checkout, message

import setup_shell
from setup_shell import Paths


@pytest.fixture
def paths(tmp_path: Path) -> Paths:
    return empty_checkout(tmp_path)


def running(pid: int) -> bool:
    """Tells whether a process is alive; a zombie is not."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0] != "Z"
    except OSError:
        return False


def wait_for(condition: Callable[[], object]) -> str:
    """Waits until a condition holds, and returns what it gave."""
    end = time.monotonic() + 10
    while time.monotonic() < end:
        if found := condition():
            return str(found)
        time.sleep(0.02)
    raise AssertionError("waited in vain")


class TestRefusals:
    def test_too_little_disk(self, paths: Paths) -> None:
        text = message(setup_shell.require_space, paths.root, 10**9)
        assert text.startswith(f"{paths.root} needs 1000000000 GiB of free disk and has ")

    @pytest.mark.parametrize(
        ("output", "expected"),
        [
            (
                "Collecting torch==2.13.0\nERROR: No space left on device\n",
                "pip stopped at torch==2.13.0 (No ",
            ),
            ("Collecting a==1\nERROR: Exception:\nTraceback:\nReadTimeout: late\n", "(ReadTimeout: late)"),
            ("", "pip stopped (no output)"),
        ],
    )
    def test_other_failures_name_the_package_and_the_reason(self, output: str, expected: str) -> None:
        assert expected in setup_shell.pip_problem(output)


class TestCommands:
    def test_what_the_shell_has_activated_does_not_matter(self, paths: Paths) -> None:
        shell = {"PATH": "/other/bin", "VIRTUAL_ENV": "/other", "PYTHONPATH": "/x", "MAKEFLAGS": "-j9"}
        seen = setup_shell.environment(paths, {**shell, "PIP_USER": "1", "HOME": "/home/me"})
        assert seen["PATH"] == f"{paths.venv}/bin:/other/bin"
        assert set(seen) == {"PATH", "HOME", "PIP_DISABLE_PIP_VERSION_CHECK", "PIP_NO_INPUT"}

    def test_the_users_pip_configuration_is_kept(self, paths: Paths) -> None:
        assert setup_shell.environment(paths, {"PIP_CERT": "/my/cert"})["PIP_CERT"] == "/my/cert"

    def test_a_killed_set_up_leaves_no_command_at_work(self, paths: Paths) -> None:
        code = (
            "import sys; from pathlib import Path; import setup_shell\n"
            "paths = setup_shell.Paths(Path(sys.argv[1]), Path())\n"
            "setup_shell.run(paths, 'sh', '-c', 'echo $$; exec sleep 60')"
        )
        env = {**os.environ, "PYTHONPATH": str(ROOT / "tools")}
        parent = subprocess.Popen([sys.executable, "-c", code, str(paths.root)], env=env)
        try:
            pid = wait_for(lambda: paths.log.exists() and "".join(paths.log.read_text().splitlines()[1:2]))
        finally:
            parent.kill()
            parent.wait()
        wait_for(lambda: not running(int(pid)))

    def test_a_second_process_waits_for_the_lock(self, paths: Paths) -> None:
        code = (
            "import sys; from pathlib import Path; from setup_shell import locked\n"
            "with locked(Path(sys.argv[1]), 'waiting'): print('mine')"
        )
        env = {**os.environ, "PYTHONPATH": str(ROOT / "tools")}
        command = [sys.executable, "-c", code, str(paths.cache / "lock")]
        with setup_shell.locked(paths.cache / "lock", "not shown"):
            other = subprocess.Popen(command, env=env, stdout=subprocess.PIPE, text=True)
            assert other.stdout is not None
            assert other.stdout.readline() == "waiting\n"
            assert other.poll() is None
        assert other.communicate()[0] == "mine\n"
