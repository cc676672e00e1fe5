"""What the README says holds."""

from __future__ import annotations

import re
from pathlib import Path

import hvd_compress
from hvd_compress.spec import MEMORY, OPTIONS
from hvd_compress.tools.bench.catalogue import constructors

PATH = Path(__file__).resolve().parents[1] / "README.md"
README = PATH.read_text()
TABLE = re.compile(r"^\| `Compression\.` \|.*?(?=\n\n)", re.DOTALL | re.MULTILINE)


def test_the_table_of_methods_is_current() -> None:
    assert TABLE.findall(README) == [constructors()], f"run python {__file__}"


def test_all_options_are_listed() -> None:
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


if __name__ == "__main__":
    PATH.write_text(TABLE.sub(lambda _: constructors(), README))
