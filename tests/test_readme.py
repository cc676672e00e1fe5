"""What the README says holds."""

from __future__ import annotations

import re
from pathlib import Path

import hvd_compress
from hvd_compress.methods import REGISTRY
from hvd_compress.spec import MEMORY, OPTIONS

README = (Path(__file__).resolve().parents[1] / "README.md").read_text()


def test_all_methods_and_options_are_listed() -> None:
    for name in REGISTRY:
        assert re.search(rf"^\|.*`{name}[`(]", README, re.MULTILINE), name
    for option in (*OPTIONS, *MEMORY, "feedback", "merge", "twoway"):
        assert re.search(rf"`{option}[`=]", README), option


def test_specs_parse() -> None:
    specs = re.findall(r'parse\("([^"]+)"', README)
    assert specs
    for spec in specs:
        hvd_compress.parse(spec)


def test_both_diffs_stand_within_the_first_screen() -> None:
    head = "\n".join(README.splitlines()[:20])
    assert head.count("+") == 4 and "hvd_compress.torch" in head and "hvd_compress.keras" in head
