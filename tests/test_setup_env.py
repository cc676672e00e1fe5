"""The set-up as a whole: its failures are one line each, and nothing is done twice."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from collections import Counter
from pathlib import Path
from typing import NamedTuple

import pytest
import tomllib
from setup_support import ROOT, checkout_with_pip, empty_checkout, fake_wheel, message

import setup_env
from setup_shell import Paths, SetupError

TOOLS = ("setup_env.py", "setup_shell.py", "horovod_wheel.py")


@pytest.fixture
def paths(tmp_path: Path) -> Paths:
    return empty_checkout(tmp_path)


@pytest.fixture
def with_pip(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Paths:
    return checkout_with_pip(tmp_path / "pip", monkeypatch)


def run_script(root: Path, **variables: str) -> subprocess.CompletedProcess[str]:
    """Runs a copy of the script in a checkout of its own, as `make setup` does."""
    (root / "tools").mkdir()
    for name in TOOLS:
        shutil.copy(ROOT / "tools" / name, root / "tools")
    command = [sys.executable, str(root / "tools" / "setup_env.py")]
    return subprocess.run(command, capture_output=True, text=True, env={**os.environ, **variables})


class TestWhatIsMissing:
    def test_another_python(self) -> None:
        text = message(setup_env.require_python, (3, 12, 1), True)
        assert text.startswith("Python 3.11 is needed, this is 3.12: apt-get install python3.11 ")

    def test_no_ensurepip(self) -> None:
        assert message(setup_env.require_python, (3, 11, 2), False) == (
            "Python's venv module is incomplete (no ensurepip): apt-get install python3-venv"
        )

    def test_no_compiler_is_one_line_before_anything_is_made(self, paths: Paths, tmp_path: Path) -> None:
        shutil.rmtree(paths.venv)
        nothing = tmp_path / "nothing"
        nothing.mkdir()
        done = run_script(paths.root, PATH=str(nothing), XDG_CACHE_HOME=str(tmp_path / "caches"))
        assert (done.returncode, done.stdout) == (1, "")
        expected = "setup: missing to build Horovod: g++ and make: apt-get install g++ make\n"
        assert done.stderr == expected
        assert not paths.venv.exists()

    def test_no_such_environment(self, capsys: pytest.CaptureFixture[str]) -> None:
        assert setup_env.main("keras4") == 1
        said = "setup: there is no environment 'keras4': give none or dev, for .venv, or keras3 or cuda\n"
        assert capsys.readouterr().err == said

    def test_a_broken_system_is_one_line_too(self, paths: Paths, tmp_path: Path) -> None:
        (tmp_path / "caches").write_text("a file where a folder should be")
        done = run_script(paths.root, XDG_CACHE_HOME=str(tmp_path / "caches"))
        assert done.returncode == 1
        assert done.stderr.startswith("setup: [Errno ")
        assert done.stderr.count("\n") == 1

    def test_the_base_python_cannot_make_an_environment(self, paths: Paths, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(sys, "_base_executable", shutil.which("false"))
        text = message(setup_env.make_venv, paths)
        cure = "apt-get install python3-venv may help"
        assert text == f".venv cannot be made: {cure}. Log: {paths.log}"


class TestEnvironment:
    def test_a_package_that_is_not_to_be_had(self, with_pip: Paths) -> None:
        (with_pip.root / "pyproject.toml").write_text('[dependency-groups]\npackages = ["no-such-package==1.0"]\n')
        text = message(setup_env.install_group, "packages", with_pip)
        assert text == (
            "Installing requirements.lock: no-such-package is not to be had: "
            f"check the network and pip's configuration. Log: {with_pip.log}"
        )
        assert "no-such-package was not found" in with_pip.log.read_text()

    def test_kernels_that_cannot_be_compiled_now_do_not_stop_the_set_up(
        self, with_pip: Paths, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setenv("NUMBA_CACHE_DIR", str(with_pip.root / "pyproject.toml"))
        said = setup_env.compile_kernels(with_pip)
        assert said == "Left the CPU kernels to their first calls"

    def test_half_installed_distributions_are_installed_again(self, paths: Paths) -> None:
        whole, half, renamed = (paths.site / name for name in ("a-1.dist-info", "b-1.dist-info", "~c"))
        for folder in (whole, half, renamed):
            folder.mkdir()
        (whole / "INSTALLER").touch()
        setup_env.remove_half_installed(paths)
        assert [whole.exists(), half.exists(), renamed.exists()] == [True, False, False]

    def test_the_hook_puts_the_environment_first_on_path_once(self) -> None:
        code = f"{setup_env.PATH_HOOK}{setup_env.PATH_HOOK}print(os.environ['PATH'])"
        command = [sys.executable, "-S", "-E", "-c", code]
        done = subprocess.run(command, env={"PATH": "/other"}, capture_output=True, text=True, check=True)
        assert done.stdout.endswith("/bin:/other\n")
        assert done.stdout.count(":") == 1


class Recorder(NamedTuple):
    """Steps that take no time, and the names of those that were taken."""

    taken: list[str]
    broken: list[str]

    def step(self, step: setup_env.Step) -> setup_env.Step:
        """A step with the key of the real one."""

        def run(paths: Paths) -> str:
            self.taken.append(step.name)
            if step.name in self.broken:
                raise SetupError("killed here")
            if step.name == "venv":
                shutil.rmtree(paths.venv, ignore_errors=True)
                paths.python.parent.mkdir(parents=True)
                paths.python.touch()
            if step.name == "uv":
                paths.uv.touch()
            return step.name

        return step._replace(run=run)


@pytest.fixture
def recorder(paths: Paths, monkeypatch: pytest.MonkeyPatch) -> Recorder:
    """All steps, recorded instead of run."""
    recorder = Recorder([], [])
    fake_wheel(paths, "any")
    for name in ("FIRST", "HOROVOD", "BESIDE"):
        monkeypatch.setattr(setup_env, name, tuple(recorder.step(step) for step in getattr(setup_env, name)))
    monkeypatch.setattr(setup_env, "DEVELOPMENT_STEP", recorder.step(setup_env.DEVELOPMENT_STEP))
    return recorder


FIRST = ["venv", "uv", "frameworks"]
BESIDE = ["packages", "package", "kernels"]
ALL = [*FIRST, "horovod", *BESIDE]


class TestSteps:
    def test_a_second_run_does_nothing(self, paths: Paths, recorder: Recorder) -> None:
        for _ in range(2):
            setup_env.set_up(paths)
            assert sorted(recorder.taken) == sorted(ALL)

    def test_horovod_is_built_beside_what_it_does_not_need(self, paths: Paths, recorder: Recorder) -> None:
        setup_env.set_up(paths)
        assert recorder.taken[:3] == FIRST
        assert [name for name in recorder.taken[3:] if name != "horovod"] == BESIDE

    def test_what_developers_need_comes_when_it_is_asked_for(self, paths: Paths, recorder: Recorder) -> None:
        setup_env.set_up(paths)
        recorder.taken.clear()
        for _ in range(2):
            setup_env.set_up(paths, development=True)
            assert recorder.taken == ["development"]

    def test_each_step_says_how_long_it_took(
        self, paths: Paths, recorder: Recorder, capsys: pytest.CaptureFixture[str]
    ) -> None:
        setup_env.set_up(paths)
        assert sorted(re.findall(r"^(\w+) in \d+ s\.$", capsys.readouterr().out, re.MULTILINE)) == sorted(ALL)

    @pytest.mark.parametrize(
        ("file", "steps"),
        [
            ("requirements.lock", ["frameworks", "packages"]),
            ("pyproject.toml", ["frameworks", "packages", "package"]),
            ("hvd_compress/_version.py", ["package"]),
        ],
    )
    def test_a_change_takes_only_what_depends_on_it(
        self, paths: Paths, recorder: Recorder, file: str, steps: list[str]
    ) -> None:
        setup_env.set_up(paths)
        recorder.taken.clear()
        (paths.root / file).write_text("changed")
        setup_env.set_up(paths)
        assert recorder.taken == steps

    @pytest.mark.parametrize(("info", "step"), [("torch-2.14.0", "horovod"), ("numba-0.70.0", "kernels")])
    def test_another_version_takes_what_is_compiled_by_it(
        self, paths: Paths, recorder: Recorder, info: str, step: str
    ) -> None:
        setup_env.set_up(paths)
        recorder.taken.clear()
        (paths.site / f"{info}.dist-info").mkdir(parents=True)
        setup_env.set_up(paths)
        assert recorder.taken == [step]

    @pytest.mark.parametrize("name", ALL)
    def test_a_broken_off_run_is_completed(self, paths: Paths, recorder: Recorder, name: str) -> None:
        recorder.broken.append(name)
        assert message(setup_env.set_up, paths) == "killed here"
        recorder.broken.clear()
        setup_env.set_up(paths)
        assert Counter(recorder.taken) == Counter([*ALL, name])

    def test_an_environment_without_uv_gets_it(self, paths: Paths, recorder: Recorder) -> None:
        setup_env.set_up(paths)
        recorder.taken.clear()
        paths.uv.unlink()
        setup_env.set_up(paths)
        assert recorder.taken == ["uv"]

    def test_a_broken_off_change_is_not_taken_for_done_when_undone(self, paths: Paths, recorder: Recorder) -> None:
        setup_env.set_up(paths)
        recorder.broken.append("frameworks")
        lock = paths.root / "requirements.lock"
        before = lock.read_text()
        lock.write_text("changed")
        message(setup_env.set_up, paths)
        lock.write_text(before)
        recorder.broken.clear()
        setup_env.set_up(paths)
        assert Counter(recorder.taken) == Counter([*ALL, "frameworks", "frameworks"])

    def test_a_moved_checkout_gets_a_new_environment(self, paths: Paths, recorder: Recorder) -> None:
        setup_env.set_up(paths)
        moved = paths._replace(root=paths.root.rename(paths.root.with_name("moved")))
        setup_env.set_up(moved)
        assert Counter(recorder.taken) == Counter(ALL + ALL)

    @pytest.mark.parametrize("stamp", ["", "[1]", "{half"])
    def test_a_damaged_stamp_counts_as_nothing_done(self, paths: Paths, recorder: Recorder, stamp: str) -> None:
        setup_env.set_up(paths)
        (paths.venv / "setup.json").write_text(stamp)
        setup_env.set_up(paths)
        assert Counter(recorder.taken) == Counter(ALL + ALL)


@pytest.mark.parametrize(
    ("file", "pin"),
    [
        ("requirements.lock", "torch==2.13.0"),
        ("requirements-keras3.lock", "tensorflow==2.21.0"),
        ("requirements-cuda.lock", "nvidia-nccl-cu13==2.29.7"),
    ],
)
def test_the_lock_file_pins_every_distribution(file: str, pin: str) -> None:
    lines = (ROOT / file).read_text().splitlines()
    pins = [line for line in lines if not line.startswith("#")]
    assert pin in pins
    assert all(line.count("==") == 1 for line in pins)


@pytest.mark.parametrize("suffix", ["", "-keras3", "-cuda"])
def test_all_that_a_group_names_is_pinned(suffix: str) -> None:
    groups = tomllib.loads((ROOT / "pyproject.toml").read_text())["dependency-groups"]
    steps = ("frameworks", "packages") if suffix else ("frameworks", "packages", "development")
    named = [entry for step in steps for entry in groups[f"{step}{suffix}"]]
    entries = [
        entry for name in named for entry in (groups[name["include-group"]] if isinstance(name, dict) else [name])
    ]
    lines = (ROOT / f"requirements{suffix}.lock").read_text().splitlines()
    pinned = {line.split("==")[0].lower().replace("_", "-") for line in lines}
    assert {re.split(r"[^\w-]", entry)[0] for entry in entries} <= pinned
    assert len(entries) > 10
