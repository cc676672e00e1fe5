"""docs/methods.md: what it is made of, and that the one in the repository is current."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from typer.testing import CliRunner

from hvd_compress.engine.spec import parse
from hvd_compress.methods import REGISTRY
from hvd_compress.tools.methods import docstrings
from hvd_compress.tools.methods.catalogue import info
from hvd_compress.tools.terminal import split_specs
from methods_page import adamw, page
from methods_page.__main__ import app
from methods_page.vnmse import default_specs, measure_all, name_of

DOCS = Path(__file__).resolve().parents[2] / "docs"
PAGE = DOCS / "methods.md"
ADAMW: adamw.Rows = page.read_json(DOCS / "adamw.json", adamw.KEYS)
REMEDY = "docs/methods.md is not current: run python tools/methods_page page"


@pytest.mark.slow
def test_the_page_in_the_repository_is_current() -> None:
    static, heading, _ = PAGE.read_text().partition(page.MEASURED)
    assert heading, REMEDY
    assert static.strip() == page.static(ADAMW).strip(), REMEDY


def test_the_page_in_the_repository_has_all_measurements() -> None:
    measured = PAGE.read_text().partition(page.MEASURED)[2]
    for spec in default_specs():
        assert f"| `{spec}` | " in measured, REMEDY
    assert measured.endswith(adamw.section(ADAMW)), REMEDY


def test_methods_that_are_said_to_lose_with_adamw_do_and_others_hardly() -> None:
    for row in ADAMW:
        method, (usual, without, updates) = parse(row["spec"]), (row[key] for key in adamw.LOSSES)
        assert (usual is None) == method.needs_plain_sgd, row
        if method.adds_momentum:
            assert usual > 0.15, row  # more than signs without a residual, and than a low rank
            assert without is None or without < usual / (1.4 if row["spec"] == "arctopk" else 1.8), row
        elif usual is not None and row["ratio"] < 8:
            assert usual <= adamw.KEPT, row
        if updates is not None:
            assert updates < usual and updates <= without + adamw.KEPT, row


def test_tables_of_methods_say_what_adamw_costs() -> None:
    cells = {name: adamw.cell(ADAMW, name) for name in ("qsgd", "powersgd", "topk", "ctk", "dgc", "gtopk", "terngrad")}
    assert cells == {
        "qsgd": "kept",
        "powersgd": "+0.018 to +0.139; `betas=(0.0, b2)`: +0.108; `preconditioned`: +0.126",
        "topk": "+0.191 to +0.502; `betas=(0.0, b2)`: -0.014 to +0.175; `preconditioned`: +0.109",
        "ctk": "+0.530; `betas=(0.0, b2)`: kept; `preconditioned`: kept",
        "dgc": "`betas=(0.0, b2)`: +0.184",
        "gtopk": "`betas=(0.0, b2)`: not measured",
        "terngrad": "not measured",
    }


class _Base:
    """What both share.

    Args:
        old: Documented ``here``,
            over two lines.
        both: Of the base.
    """


class _Sub(_Base):
    """A summary of ``x``. Then the equations::

        a = b

          c = d

    And the end.

    Args:
        both: Of the class.

    Raises:
        Nothing: At all.
    """


def test_docstrings_become_markdown() -> None:
    doc = docstrings.read(_Sub)
    assert doc.text == "A summary of `x`. Then the equations:\n\n```text\na = b\n\n  c = d\n```\n\nAnd the end."
    assert doc.args == {"old": "Documented `here`, over two lines.", "both": "Of the class."}


def test_each_hyper_parameter_is_documented() -> None:
    for name, cls in REGISTRY.items():
        documented = docstrings.read(cls).args
        assert all(documented.get(key) for key in info(name).hyper_parameters), name


def test_figures() -> None:
    for spec, value, direction, text in (
        ("none", 1e-15, 0, "0"),
        ("int8", 0.0025, 0, "2.5e-03"),
        ("topk:ratio=0.1", 0.5, 0, "0.500"),
        ("signsgd", 9e5, 0.64, "0.640*"),
    ):
        assert page.figure({"spec": spec, "vnmse": value, "direction": direction}) == text
    assert (page.span([8.03, 8.04]), page.span([2.05, 12.08])) == ("8.04", "2.05-12.1")


@pytest.mark.slow
def test_docs_writes_the_page(tmp_path: Path) -> None:
    results, output = tmp_path / "vnmse.json", tmp_path / "methods.md"
    measured = measure_all(["natural", "topk:ratio=0.5"], ["gaussian"], size=900, ranks=2)
    results.write_text(json.dumps(measured))
    args = ["page", "--output", str(output), "--vnmse", str(results)]
    assert CliRunner().invoke(app, args).exit_code == 0
    text = output.read_text()
    assert text.startswith(page.static())
    assert "python tools/methods_page vnmse --inputs gaussian --size 900 --ranks 2" in text
    (row,) = (line for line in text.splitlines() if line.startswith("| `topk:ratio=0.5` |"))
    assert row.endswith(f" | {page.figure(measured['results'][1])} | 0.5 |")


def test_the_errors_of_some_specs_are_printed_and_written(tmp_path: Path) -> None:
    results = tmp_path / "vnmse.json"
    specs = "none,topk:ratio=0.01,values=fp16,powersgd:rank=2,signsgd"
    args = ["--inputs", "gaussian,blocky", "--size", "2500", "--ranks", "2", "--steps", "1", "--json", str(results)]
    printed = CliRunner().invoke(app, ["vnmse", "--specs", specs, *args])
    assert printed.exit_code == 0, printed.stderr
    measured = json.loads(results.read_text())
    assert (measured["ranks"], measured["steps"], measured["sizes"]) == (2, 1, {"gaussian": 2500, "blocky": 2500})
    assert len(measured["results"]) == 4 * 2
    assert all(f"| `{spec}` |" in printed.stdout for spec in split_specs(specs))


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ("vnmse --specs topk:ratio=2", "ratio=2.0 is not allowed"),
        ("vnmse --inputs gausian", "unknown input 'gausian' (did you mean 'gaussian'?)"),
        ("page --output methods.md --vnmse /nowhere/vnmse.json", "cannot read the results in /nowhere/vnmse.json"),
    ],
)
def test_mistakes_are_told(words: str, message: str) -> None:
    told = CliRunner().invoke(app, words.split())
    assert told.exit_code == 2 and message in told.stderr


def test_every_method_has_trained_the_demo_to_its_stated_accuracy() -> None:
    rows = page.read_json(Path(__file__).parents[2] / "docs" / "accuracy.json", page.ACCURACY)
    for framework in ("PyTorch", "Keras"):
        mine = [row for row in rows if row["framework"] == framework]
        assert {name_of(row["spec"]) for row in mine} == set(REGISTRY)
        for row in mine:
            assert row["accuracy"] >= row["baseline"] - row["tolerance"], row
            assert row["tolerance"] <= 0.05 or row["note"], row
