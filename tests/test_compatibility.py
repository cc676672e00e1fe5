"""docs/compatibility.md names tests that exist."""

from __future__ import annotations

import re
from pathlib import Path

TESTS = Path(__file__).resolve().parent
PAGE = (TESTS.parent / "docs" / "compatibility.md").read_text()


def test_every_line_has_a_test() -> None:
    lines = [line for line in PAGE.splitlines() if line.startswith("|") and "---" not in line]
    shown = [line for line in lines if "::" in line or "*soak*" in line or line.endswith("| - |")]
    assert len(lines) - len(shown) == PAGE.count("Shown by")  # the headings


def test_the_tests_exist() -> None:
    named = sorted(set(re.findall(r"`([\w/]+\.py)::(\w+)`", PAGE)))
    files = {file: [path for path in (TESTS / file, TESTS / "parallel" / file) if path.exists()] for file, _ in named}
    gone = [
        f"{file}::{name}"
        for file, name in named
        if not any(f"\ndef {name}(" in path.read_text() for path in files[file])
    ]
    assert len(named) > 50 and gone == []
