"""What the set-up steps share: messages for pip's failures, a clean environment, locks, no stray commands."""

from __future__ import annotations

import os
import subprocess
import sys
import time
import zipfile
from collections import Counter
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from setup_support import ROOT, checkout_with_pip, empty_checkout, message

import setup_shell
from setup_shell import Paths

ALWAYS = {"UV_INDEX_STRATEGY": "unsafe-best-match", "UV_COMPILE_BYTECODE": "1"}
"""What uv is told whatever the configuration of pip."""


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

    @pytest.mark.parametrize(
        ("output", "expected"),
        [
            (
                "cause: Because a was not found in the package registry and you require a==1, we can ...",
                "a is not to be",
            ),
            ("  cause: Because there is no version of b==9 and you require b==9, we can conclude", "b==9 is not to be"),
            (
                "error: Request failed after 3 retries\n  cause: Failed to fetch\n  cause: Connection refused\n",
                "uv stopped (Request failed after 3 retries: Connection refused)",
            ),
            ("", "uv stopped (no output)"),
        ],
    )
    def test_failures_of_uv_do_so_too(self, output: str, expected: str) -> None:
        assert setup_shell.uv_problem(output).startswith(expected)


class TestUv:
    """uv looks where pip is configured to look."""

    def test_pips_configuration_is_handed_on(self) -> None:
        listed = (
            "global.extra-index-url='https://one.example/simple\\nhttps://two.example/simple'\n"
            "global.index-url='https://old.example/simple'\n"
            "install.index-url='https://new.example/simple'\n"
            "download.index-url='https://not.example/simple'\n"
            "global.find-links='/a /b'\n"
            ":env:.find-links='/wheels /more'\n"
            ":env:.no-input='1'\n"
        )
        assert setup_shell.uv_variables(setup_shell.pip_configuration(listed)) == {
            **ALWAYS,
            "UV_DEFAULT_INDEX": "https://new.example/simple",
            "UV_INDEX": "https://one.example/simple https://two.example/simple",
            "UV_FIND_LINKS": "/wheels,/more",
        }

    def test_without_any_configuration_the_public_index_is_left(self) -> None:
        assert setup_shell.uv_variables(setup_shell.pip_configuration("")) == ALWAYS

    def test_a_wheel_is_found_where_pip_would_find_it(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        paths = checkout_with_pip(tmp_path, monkeypatch)
        with zipfile.ZipFile(paths.cache / "only_here-1.0-py3-none-any.whl", "w") as wheel:
            wheel.writestr("only_here-1.0.dist-info/METADATA", "Metadata-Version: 2.1\nName: only-here\nVersion: 1.0\n")
            wheel.writestr(
                "only_here-1.0.dist-info/WHEEL", "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n"
            )
            wheel.writestr("only_here-1.0.dist-info/RECORD", "")
        assert setup_shell.uv(paths, "Trying", "--dry-run", "only-here") == 1

    def test_no_address_gets_into_the_log(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        paths = checkout_with_pip(tmp_path, monkeypatch)
        monkeypatch.delenv("PIP_NO_INDEX")
        for name in ("PIP_INDEX_URL", "PIP_EXTRA_INDEX_URL"):
            monkeypatch.setenv(name, "https://me:secret@localhost:1/simple")
        monkeypatch.setenv("UV_HTTP_RETRIES", "0")
        message(setup_shell.uv, paths, "Trying", "--dry-run", "no-such-package")
        log = paths.log.read_text()
        assert "localhost:1" in log and "secret" not in log


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

    def test_commands_at_the_same_time_get_their_own_output(self, paths: Paths) -> None:
        loop = "for i in $(seq 200); do echo {}; done"
        with ThreadPoolExecutor(2) as pool:
            found = list(pool.map(lambda name: setup_shell.run(paths, "sh", "-c", loop.format(name)), "ab"))
        assert found == [(True, "a\n" * 200), (True, "b\n" * 200)]
        assert Counter(paths.log.read_text().splitlines())["b"] == 200

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
