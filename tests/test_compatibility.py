"""docs/compatibility.md names tests that exist."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

TESTS = Path(__file__).resolve().parent
PAGE = TESTS.parent / "docs" / "compatibility.md"
NAMED = sorted(set(re.findall(r"`([\w/]+\.py)::(\w+)`", PAGE.read_text())))


def test_every_line_has_a_test() -> None:
    lines = [line for line in PAGE.read_text().splitlines() if line.startswith("|") and "---" not in line]
    shown = [line for line in lines if "::" in line or "*soak*" in line or line.endswith("| - |")]
    assert len(NAMED) > 50
    assert len(lines) - len(shown) == PAGE.read_text().count("Shown by")  # the headings


@pytest.mark.parametrize(("file", "name"), NAMED, ids=[f"{file}-{name}" for file, name in NAMED])
def test_it_exists(file: str, name: str) -> None:
    path = next(p for p in (TESTS / file, TESTS / "parallel" / file) if p.exists())
    assert f"\ndef {name}(" in path.read_text()
