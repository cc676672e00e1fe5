"""What README and guide say holds."""

from __future__ import annotations

import re
from pathlib import Path

import hvd_compress
from hvd_compress.spec import MEMORY, OPTIONS
from hvd_compress.tools.bench.catalogue import constructors

ROOT = Path(__file__).resolve().parents[1]
PAGE = ROOT / "docs" / "guide.md"
README, GUIDE = (ROOT / "README.md").read_text(), PAGE.read_text()
TABLE = re.compile(r"^\| `Compression\.` \|.*?(?=\n\n)", re.DOTALL | re.MULTILINE)


def test_the_table_of_methods_is_current() -> None:
    assert TABLE.findall(GUIDE) == [constructors()], f"run python {__file__}"


def test_all_options_are_listed() -> None:
    for option in (*OPTIONS, *MEMORY, "feedback", "merge", "twoway"):
        assert re.search(rf"`{option}[`=]", GUIDE), option


def test_methods_to_choose_from_can_be_made() -> None:
    (table,) = TABLE.findall(README)
    calls = re.findall(r"^\| `(\w+)\((.*?)\)` \|", table, re.MULTILINE)
    assert len(calls) == 5
    for name, params in calls:
        hvd_compress.parse(f"{name}:{params.replace('True', 'on')}" if params else name)


def test_specs_parse() -> None:
    specs = re.findall(r'parse\("([^"]+)"', README + GUIDE)
    assert specs
    for spec in specs:
        hvd_compress.parse(spec)


def test_both_diffs_stand_within_the_first_screen() -> None:
    head = "\n".join(README.splitlines()[:20])
    assert head.count("+") == 5 and "hvd_compress.torch" in head and "hvd_compress.distributed" in head


def test_the_readme_is_read_to_its_end() -> None:
    assert len(README.splitlines()) <= 150


if __name__ == "__main__":
    PAGE.write_text(TABLE.sub(lambda _: constructors(), GUIDE))
