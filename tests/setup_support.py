"""What the tests of the set-up share: a checkout made of nothing, and the form of a failure."""

from __future__ import annotations

import shutil
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from setup_shell import Paths, SetupError

ROOT = Path(__file__).resolve().parents[1]


def empty_checkout(folder: Path) -> Paths:
    """An empty checkout and an empty cache."""
    paths = Paths(folder / "checkout", folder / "cache")
    for part in (paths.root / "hvd_compress", paths.cache, paths.site):
        part.mkdir(parents=True)
    for name in ("requirements.lock", "pyproject.toml", "hvd_compress/_version.py"):
        (paths.root / name).write_text(f"{name}\n")
    return paths


def checkout_with_pip(folder: Path, monkeypatch: pytest.MonkeyPatch) -> Paths:
    """A checkout whose environment is the one of the tests, with a pip that has no network."""
    paths = empty_checkout(folder)
    shutil.rmtree(paths.venv)
    paths.venv.symlink_to(sys.prefix)
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(paths.cache))
    return paths


def message(action: Callable[..., object], *arguments: object) -> str:
    """The message of the SetupError that an action ends in: one line."""
    with pytest.raises(SetupError) as caught:
        action(*arguments)
    text = str(caught.value)
    assert "\n" not in text
    return text


def fake_wheel(paths: Paths, key: str) -> Path:
    """A file in the cache that is named like a finished wheel."""
    wheel = paths.cache / "wheels" / key / "horovod-0.28.1-cp311-cp311-linux_x86_64.whl"
    wheel.parent.mkdir(parents=True, exist_ok=True)
    wheel.write_text("damaged")
    return wheel
