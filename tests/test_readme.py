"""What the README says holds."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import numpy as np

import hvd_compress
from hvd_compress.face import Catalogue
from hvd_compress.methods import REGISTRY
from hvd_compress.spec import MEMORY, OPTIONS

README = (Path(__file__).resolve().parents[1] / "README.md").read_text()


def test_the_simulator_gives_what_stands_beside_it() -> None:
    (block,) = (b for b in re.findall(r"```python\n(.*?)```", README, re.DOTALL) if "LocalWorld" in b)
    names: dict[str, Any] = {}
    exec(block, names)
    np.testing.assert_array_equal(names["means"][0], [-2, 4, 0, 0])
    np.testing.assert_array_equal(names["world"].residual(0)[""], [1, 0, 3, 0])
    assert names["world"].bytes_sent == 10


def test_all_methods_and_options_are_listed() -> None:
    for name in REGISTRY:
        assert re.search(rf"^\|.*`{name}[`(]", README, re.MULTILINE), name
    for option in (*OPTIONS, *MEMORY, "feedback", "merge", "twoway"):
        assert re.search(rf"`{option}[`=]", README), option


def test_methods_by_name_and_step_can_be_made() -> None:
    (block,) = (b for b in re.findall(r"```python\n(.*?)```", README, re.DOTALL) if "by_name" in b)
    exec(block, {"Compression": Catalogue(lambda method, merge: method)})


def test_specs_parse() -> None:
    for spec in re.findall(r'parse\("([^"]+)"\)', README):
        hvd_compress.parse(spec)


def test_both_diffs_stand_within_the_first_screen() -> None:
    head = "\n".join(README.splitlines()[:20])
    assert head.count("+") == 4 and "hvd_compress.torch" in head and "hvd_compress.keras" in head
