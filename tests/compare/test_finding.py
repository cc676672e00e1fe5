"""Tasks by their names, and of one's own."""

from __future__ import annotations

import re
import sys
from dataclasses import fields
from pathlib import Path

import pytest

from hvd_compress.errors import MissingPackageError, SpecError
from hvd_compress.lab import Setting
from hvd_compress.tools.compare.tasks import TASKS, find
from hvd_compress.tools.compare.tasks.options import FashionOptions, LmOptions, NoOptions


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
    for framework in ("torch", "keras"):
        assert find("of_mine:build", framework)(Setting(seed=7)).epochs == 7
    with pytest.raises(SpecError, match=r"'of_mine:wrong' gives int; it must give a hvd_compress.lab.Training"):
        find("of_mine:wrong", "torch")(Setting())
    for name, message in {
        "of_mine:buidl": r"the module 'of_mine' has no function 'buidl' .did you mean 'build'",
        "of_mine:number": "has no function 'number'",
        "of_yours:build": f"there is no module 'of_yours' in {tmp_path}",
        "of_mine.inner:build": "there is no module 'of_mine.inner'|'of_mine' is not a package",
        "unfinished:build": "cannot be imported: No module named 'a_package_that_is_not_there'",
        "of mine:build": "module:function, such as",
        ":build": "module:function, such as",
        "of_mine:": "module:function, such as",
    }.items():
        with pytest.raises(SpecError, match=message):
            find(name, "torch")


@pytest.mark.parametrize(
    ("name", "framework", "message"),
    [
        ("digit", "torch", r"unknown task 'digit' .did you mean 'digits'.*there are: digits, fashion, lm"),
        ("lm", "keras", "the task 'lm' is not there in keras, but in torch"),
        ("digits", "jax", "framework='jax' is not allowed: framework must be one of torch, keras, ddp"),
    ],
)
def test_tasks_that_there_are_not(name: str, framework: str, message: str) -> None:
    with pytest.raises(SpecError, match=message):
        find(name, framework)


def test_a_missing_framework_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    for module in ("hvd_compress.tools.compare.tasks.keras_tasks", "tensorflow"):
        monkeypatch.delitem(sys.modules, module, raising=False)
    monkeypatch.setitem(sys.modules, "tensorflow", None)
    with pytest.raises(MissingPackageError, match=r"the task 'digits' needs keras .* pip install '\.\[tensorflow\]'"):
        find("digits", "keras")


@pytest.mark.parametrize(("name", "kind"), [("digits", NoOptions), ("fashion", FashionOptions), ("lm", LmOptions)])
def test_every_task_is_described_with_its_options(name: str, kind: type[NoOptions]) -> None:
    told = re.search(r" \(options (.*)\)$", TASKS[name])
    assert (told[1].split(", ") if told else []) == [field.name for field in fields(kind)]
    assert set(TASKS) == {"digits", "fashion", "lm"}
