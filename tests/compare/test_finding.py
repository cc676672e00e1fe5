"""Tasks by their names, and of one's own."""

from __future__ import annotations

import re
import sys
from dataclasses import fields
from pathlib import Path

import pytest

from hvd_compress.errors import SpecError
from hvd_compress.lab import Setting
from hvd_compress.tools.compare.tasks import TASKS, find
from hvd_compress.tools.compare.tasks.options import FashionOptions, LmOptions, NoOptions, TransformerOptions


def test_a_task_of_ones_own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "of_mine.py").write_text(
        "from hvd_compress.lab import Training\n"
        "def build(setting):\n"
        "    return Training('model', None, None, None, None, epochs=setting.seed)\n"
        "def wrong(setting):\n"
        "    return 3\n"
        "number = 3\n"
    )
    (tmp_path / "unfinished.py").write_text("import a_package_that_is_not_there\n")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [one for one in sys.path if one])
    (tmp_path / "folder").mkdir()
    (tmp_path / "folder" / "inner.py").write_text("from beside import build\n")
    (tmp_path / "folder" / "beside.py").write_text((tmp_path / "of_mine.py").read_text())
    (tmp_path / "json.py").write_text((tmp_path / "of_mine.py").read_text())
    for framework in ("torch", "keras"):
        for name in ("of_mine:build", "of_mine.py:build", "folder/inner.py:build", f"{tmp_path}/folder/inner.py:build"):
            assert find(name, framework)(Setting(seed=7)).epochs == 7
    with pytest.raises(SpecError, match=r"another module 'json'; rename the file"):
        find("json.py:build", "torch")
    with pytest.raises(SpecError, match=r"there is no file .*/absent.py"):
        find("absent.py:build", "torch")
    with pytest.raises(SpecError, match=r"'of_mine:wrong' gives int; it must give a hvd_compress.lab.Training"):
        find("of_mine:wrong", "torch")(Setting())
    for name in (
        *("of_mine:buidl", "of_mine:number", "of_yours:build", "of_mine.inner:build", "unfinished:build"),
        *("of mine:build", ":build", "of_mine:", "digit"),
    ):
        with pytest.raises(SpecError):
            find(name, "torch")
    with pytest.raises(SpecError, match="not there in keras"):
        find("lm", "keras")


KINDS = {"digits": NoOptions, "fashion": FashionOptions, "lm": LmOptions, "transformer": TransformerOptions}


@pytest.mark.parametrize(("name", "kind"), KINDS.items())
def test_every_task_is_described_with_its_options(name: str, kind: type[NoOptions]) -> None:
    told = re.search(r" \(options (.*)\)$", TASKS[name])
    assert (told[1].split(", ") if told else []) == [field.name for field in fields(kind)]
    assert set(TASKS) == set(KINDS)
