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


def test_the_guide_lists_all_methods_and_options() -> None:
    assert TABLE.findall(GUIDE) == [constructors()], f"run python {__file__}"
    for option in (*OPTIONS, *MEMORY, "feedback", "merge", "twoway"):
        assert re.search(rf"`{option}[`=]", GUIDE), option


def test_methods_that_are_named_can_be_made() -> None:
    (table,) = TABLE.findall(README)
    calls = re.findall(r"^\| `(\w+)\((.*?)\)` \|", table, re.MULTILINE)
    specs = re.findall(r'parse\("([^"]+)"', README + GUIDE)
    assert calls and specs
    specs += [f"{name}:{params.replace('True', 'on')}" if params else name for name, params in calls]
    for spec in specs:
        hvd_compress.parse(spec)


if __name__ == "__main__":
    PAGE.write_text(TABLE.sub(lambda _: constructors(), GUIDE))
