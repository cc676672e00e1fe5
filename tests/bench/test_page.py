"""docs/methods.md: what it is made of, and that the one in the repository is current."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from typer.testing import CliRunner

from hvd_compress.errors import SpecError
from hvd_compress.methods import REGISTRY, methods
from hvd_compress.tools.bench import docstrings, page
from hvd_compress.tools.bench.catalogue import catalogue, families, info, memory
from hvd_compress.tools.bench.vnmse import default_specs, measure_all, name_of
from hvd_compress.tools.cli import complete

PAGE = Path(__file__).resolve().parents[2] / "docs" / "methods.md"
REMEDY = "docs/methods.md is not current: run hvd-compress docs"
ACCURACY = {
    "framework": "PyTorch",
    "spec": "topk:ratio=0.01",
    "accuracy": 0.9922,
    "baseline": 0.9919,
    "bytes_per_step": 13848,
    "tolerance": 0.01,
    "note": "as good",
}


def test_the_page_in_the_repository_is_current() -> None:
    static, heading, _ = PAGE.read_text().partition(page.MEASURED)
    assert heading, REMEDY
    assert static.strip() == page.static().strip(), REMEDY


def test_the_page_in_the_repository_has_all_measurements() -> None:
    measured = PAGE.read_text().partition(page.MEASURED)[2]
    for spec in default_specs():
        assert f"| `{spec}` | " in measured, REMEDY


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


@pytest.mark.parametrize("name", REGISTRY)
def test_each_hyper_parameter_is_documented(name: str) -> None:
    documented = docstrings.read(REGISTRY[name]).args
    assert all(documented.get(key) for key in info(name).hyper_parameters)


def test_the_catalogue_has_what_the_docstrings_say() -> None:
    text = catalogue()
    for line in methods():
        assert f"\n### {line.name}\n" in text and f"* Paper: {line.paper}\n" in text
        assert f"* Error feedback: {memory(line)}\n" in text
    for cls in families():
        assert f"\n### {cls.__name__}\n" in text
    assert "::" not in text and "``" not in text.replace("```", "")
    assert "See [Sparse](#sparse) for the exchange." in text


def test_claims_are_listed() -> None:
    claims = [cls.claim for cls in REGISTRY.values() if cls.claim]
    assert len(claims) == 14 and all(f" | {claim} |" in page.claims_section() for claim in claims)


@pytest.mark.parametrize(
    ("spec", "value", "direction", "text"),
    [
        ("none", 1e-15, 0, "0"),
        ("int8", 0.0025, 0, "2.5e-03"),
        ("topk:ratio=0.1", 0.5, 0, "0.500"),
        ("signsgd", 9e5, 0.64, "0.640*"),
    ],
)
def test_figures(spec: str, value: float, direction: float, text: str) -> None:
    assert page.figure({"spec": spec, "vnmse": value, "direction": direction}) == text


def test_spans() -> None:
    assert page.span([8.03, 8.04]) == "8.04"
    assert page.span([2.05, 12.08]) == "2.05-12.1"


def test_docs_writes_the_page(tmp_path: Path) -> None:
    results, output = tmp_path / "vnmse.json", tmp_path / "docs" / "methods.md"
    measured = measure_all(["natural", "topk:ratio=0.5", "int8:bits=16,block=64"], ["gaussian"], size=900, ranks=2)
    results.write_text(json.dumps(measured))
    output.parent.mkdir()
    args = ["docs", "--output", str(output), "--vnmse", str(results)]

    assert CliRunner().invoke(complete().app, args).exit_code == 0
    text = output.read_text()
    assert text.startswith(page.static()) and "hvd-compress vnmse --inputs gaussian --size 900 --ranks 2" in text
    (row,) = (line for line in text.splitlines() if line.startswith("| `topk:ratio=0.5` |"))
    assert row.endswith(f" | {page.figure(measured['results'][1])} | 0.5 |")
    assert "### 16 bits and more" in text and "| `int8:bits=16,block=64` |" in text
    assert "Accuracy" not in text

    (output.parent / "accuracy.json").write_text(json.dumps([ACCURACY]))
    assert CliRunner().invoke(complete().app, args).exit_code == 0
    text = output.read_text()
    assert "## Accuracy on the demo's CNN" in text
    assert "| PyTorch | `topk:ratio=0.01` | 0.9922 | 0.9919 | 13,848 | 0.010 | as good |" in text


def test_every_method_has_trained_the_demo_to_its_stated_accuracy() -> None:
    rows = page.read_json(Path(__file__).parents[2] / "docs" / "accuracy.json", page.ACCURACY)
    for framework in ("PyTorch", "Keras"):
        mine = [row for row in rows if row["framework"] == framework]
        assert {name_of(row["spec"]) for row in mine} == set(REGISTRY)
        for row in mine:
            assert row["accuracy"] >= row["baseline"] - row["tolerance"], row
            assert row["tolerance"] <= 0.05 or row["note"], row


@pytest.mark.parametrize("content", ["", "{", "[1]", '[{"framework": "Keras"}]'])
def test_results_that_are_none(content: str, tmp_path: Path) -> None:
    path = tmp_path / "accuracy.json"
    path.write_text(content)
    with pytest.raises(SpecError, match=r"cannot read the results in .*accuracy\.json"):
        page.read_json(path, page.ACCURACY)
