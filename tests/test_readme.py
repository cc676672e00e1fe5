"""What README and guide say holds."""

from __future__ import annotations

import re
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(ROOT), str(ROOT / "tools")]

import hvd_compress  # noqa: E402
from hvd_compress.engine.spec import MEMORY, OPTIONS, parse  # noqa: E402
from methods_page import adamw, page  # noqa: E402
from methods_page.catalogue import constructors  # noqa: E402

PAGE = ROOT / "docs" / "guide.md"
README, GUIDE = (ROOT / "README.md").read_text(), PAGE.read_text()
ADAMW: adamw.Rows = page.read_json(ROOT / "docs" / "adamw.json", adamw.KEYS)
TABLE = re.compile(r"^\| `Compression\.` \|.*?(?=\n\n)", re.DOTALL | re.MULTILINE)
FEW = re.compile(r"^\| to choose by hand \|.*?(?=\n\n)", re.DOTALL | re.MULTILINE)


def test_the_guide_lists_all_methods_and_options() -> None:
    assert TABLE.findall(GUIDE) == [constructors(ADAMW)], f"run python {__file__}"
    for option in (*OPTIONS, *MEMORY, "feedback", "merge", "twoway"):
        assert re.search(rf"`{option}[`=]", GUIDE), option


def test_methods_that_are_named_can_be_made() -> None:
    (table,) = FEW.findall(GUIDE)
    calls = re.findall(r"^\| `(\w+)\((.*?)\)` \|", table, re.MULTILINE)
    specs = re.findall(r'parse\("([^"]+)"', README + GUIDE)
    assert calls and specs
    specs += [f"{name}:{params.replace('True', 'on')}" if params else name for name, params in calls]
    for spec in specs:
        hvd_compress.parse(spec)


def test_the_guide_says_what_adamw_costs_as_it_was_measured() -> None:
    (table,) = FEW.findall(GUIDE)
    rows = re.findall(r"^\| `(\w+)\((.*?)\)` \|.* \| (.*?) \|$", table, re.MULTILINE)
    for name, params, said in rows:
        spec = f"{name}:{params.replace('True', 'on')}" if params else name
        (row,) = (row for row in ADAMW if row["spec"] == spec)
        usual, without, updates = (adamw.span([row[key]]) for key in adamw.LOSSES)
        expected = [usual]
        if parse(spec).adds_momentum:
            expected.append(f"{adamw.CURE}: {without}")
        if updates:
            expected.append(f"{adamw.UPDATES}: {updates}")
        assert said == "; ".join(expected), spec


if __name__ == "__main__":
    PAGE.write_text(TABLE.sub(lambda _: constructors(ADAMW), GUIDE))
