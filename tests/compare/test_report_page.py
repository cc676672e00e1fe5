"""The report and the tables: that they need nothing else, tell all, and take any text for what it is."""

from __future__ import annotations

import base64
import io
import re
from collections.abc import Callable
from html.parser import HTMLParser
from pathlib import Path

import pytest
from compare import examples
from compare.cases import ACCURACY, compared, timed
from rich.console import Console

from hvd_compress.tools.compare.judging import judge
from hvd_compress.tools.compare.report import page
from hvd_compress.tools.compare.report.captions import PICTURES
from hvd_compress.tools.compare.report.tables import main_table, markdown
from hvd_compress.tools.compare.results import Comparison, Failure

VOID = {"meta", "img", "wbr", "br", "hr"}
HOSTILE = """x"><script>alert('1')</script>&amp;$5|[red]"""


class Parsed(HTMLParser):
    """A page as a browser reads it, whose elements must be closed in order."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.tags: list[tuple[str, dict[str, str]]] = []
        self.text = ""
        self.rows: list[list[str]] = []
        self._open: list[str] = []
        self.feed(text)
        self.close()
        assert self._open == []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append((tag, {name: value or "" for name, value in attrs}))
        if tag not in VOID:
            self._open.append(tag)
        if tag == "tr":
            self.rows.append([])
        if tag in ("td", "th"):
            self.rows[-1].append("")

    def handle_endtag(self, tag: str) -> None:
        assert self._open.pop() == tag

    def handle_data(self, data: str) -> None:
        if "style" not in self._open:
            self.text += data
        if self._open and {"td", "th"} & set(self._open):
            self.rows[-1][-1] += data

    def row(self, first: str) -> list[str]:
        """The first row that begins with this."""
        return next(row for row in self.rows if row[0] == first)


COMPARISONS: dict[str, Callable[[], Comparison]] = {
    "usual": examples.comparison,
    "troubled": examples.troubled,
    "many": lambda: examples.comparison(examples.MANY, perplexity=True),
    "short": lambda: examples.comparison(examples.METHODS[:3], budget=60.0),
    "single": lambda: examples.comparison(examples.METHODS[1:3], seeds=1),
    "hostile": lambda: hostile(),
}


def hostile() -> Comparison:
    """Every text that is not ours, as bad as it may be."""
    made = examples.comparison(examples.METHODS[1:3], seeds=1)
    spec = made.methods[-1]
    outcomes = [
        one._replace(spec=HOSTILE if one.spec == spec else one.spec, goal=one.goal._replace(metric=HOSTILE))
        for one in made.outcomes
    ]
    return made._replace(
        task=HOSTILE, where=HOSTILE, command=HOSTILE, begun=HOSTILE, framework=HOSTILE, conditions={HOSTILE: HOSTILE},
        methods=["fp16", HOSTILE], outcomes=outcomes, tried=outcomes[:1], vnmse={HOSTILE: 0.5},
        machine=made.machine._replace(cpu=HOSTILE), failures=[Failure(HOSTILE, 0, None, HOSTILE)],
    )  # fmt: skip


@pytest.mark.slow
@pytest.mark.parametrize("name", COMPARISONS)
def test_the_page_needs_nothing_else(name: str, tmp_path: Path) -> None:
    page.write(COMPARISONS[name](), tmp_path / "report")
    text = (tmp_path / "report" / "report.html").read_text()
    found = Parsed(text)
    assert not {tag for tag, _ in found.tags} & {"script", "link", "iframe", "object", "base", "form", "a"}
    assert not re.search(r"url\(|@import", text)
    for tag, attributes in found.tags:
        assert not any(name.startswith("on") for name in attributes)
        assert attributes.get("src", "data:").startswith("data:")
        assert not any("http" in value for name, value in attributes.items() if name != "src")
        if tag == "img":
            assert attributes["alt"]
            svg = base64.b64decode(attributes["src"].partition(",")[2]).decode()
            assert all(link.startswith("#") for link in re.findall(r'href="([^"]*)"', svg))
    assert sum(tag == "img" for tag, _ in found.tags) == len(PICTURES)
    files = {path.name for path in (tmp_path / "report").iterdir()}
    assert files == {"report.html", "table.md"} | {f"{picture.name}.png" for picture in PICTURES}
    assert {"metric-time", "metric-steps", "time-to-target", "step", "bytes"} == {picture.name for picture in PICTURES}
    for picture in PICTURES:
        assert (tmp_path / "report" / f"{picture.name}.png").read_bytes().startswith(b"\x89PNG\r\n")


@pytest.mark.slow
def test_the_same_comparison_makes_the_same_page(tmp_path: Path) -> None:
    texts = []
    for name in ("one", "two"):
        page.write(COMPARISONS["single"](), tmp_path / name)
        texts.append((tmp_path / name / "report.html").read_bytes())
    assert texts[0] == texts[1]


def test_any_text_is_only_text() -> None:
    found = Parsed(page.html(hostile(), {}))
    text = " ".join(found.text.split())
    # title, heading and subtitle, words, tables, failure, command, machine
    assert text.count(HOSTILE) >= 12
    assert found.row(HOSTILE)[1].startswith("pays")


def test_the_page_tells_all() -> None:
    comparison = examples.troubled()
    found = Parsed(page.html(comparison, {}))
    heads = found.row("Method")
    assert heads == [
        "Method", "Verdict", "Learning rate", "Time to target, s", "Speedup over fp16", "Seeds at target",
        "Steps to target", "Final accuracy", "Steps trained", "Step, ms", "Bytes to Horovod", "Bytes at device",
        "vNMSE", "Peak memory",
    ]  # fmt: skip
    row = dict(zip(heads, found.row("powersgd:rank=4"), strict=True))
    assert row["Verdict"] == "pays"
    assert row["Learning rate"] == "0.05"
    assert row["Speedup over fp16"] == "7.47.3\u20138.2"
    assert row["Seeds at target"] == "3 of 3"
    assert row["Step, ms"] == "143"
    assert (row["Bytes to Horovod"], row["Bytes at device"], row["vNMSE"]) == ("561 kB", "844 kB", "0.310")
    assert dict(zip(heads, found.row("topk:ratio=0.01"), strict=True))["Verdict"] == "paysworse accuracy"
    assert dict(zip(heads, found.row(comparison.failures[0].spec), strict=True))["Verdict"] == "failed"
    for told in (comparison.command, str(comparison.machine), comparison.failures[0].message, "budget", "vNMSE, the"):
        assert told in found.text
    assert "diverged with 2 of 3 seeds" in found.text


def test_the_page_tells_parts_of_steps_and_learning_rates() -> None:
    found = Parsed(page.html(examples.troubled(), {}))
    rows = [row for row in found.rows if row[0] == "powersgd:rank=4"]
    assert rows[1] == ["powersgd:rank=4", "143", "54.7", "19.2", "61.0", "8.1", "measured"]
    assert [row[1] for row in rows[2:]] == ["0.05", "0.2"]
    assert [row[-1] for row in rows[2:]] == ["taken", "tried"]
    rows = [row for row in found.rows if row[0] == "none"]
    assert rows[1] == ["none", "2,760", "48.0", "-", "2,712", "-", "what is left"]
    assert rows[3][2:] == ["-", "-", "tried, diverged"]
    assert "Learning rates" not in Parsed(page.html(examples.comparison(), {})).text


def test_a_page_without_any_training() -> None:
    lost = examples.comparison(examples.METHODS[1:3])._replace(outcomes=[], vnmse={}, failures=[])
    found = Parsed(page.html(lost, {}))
    assert "No training ended" in found.text
    assert found.row("fp16")[1] == "failed"


def test_pictures_are_left_out_where_nothing_was_trained(tmp_path: Path) -> None:
    page.write(examples.comparison(examples.METHODS[1:3])._replace(outcomes=[], vnmse={}), tmp_path)
    assert {path.name for path in tmp_path.iterdir()} == {"report.html", "table.md"}


@pytest.mark.parametrize("width", [80, 100, 120, 160])
@pytest.mark.parametrize("name", COMPARISONS)
def test_the_table_fits_the_terminal(name: str, width: int) -> None:
    file = io.StringIO()
    comparison = COMPARISONS[name]()
    Console(file=file, width=width).print(main_table(comparison, width))
    lines = file.getvalue().splitlines()
    assert max(map(len, lines)) <= width
    assert "\u2026" not in file.getvalue()  # nothing is cut
    if name != "hostile":  # of each method, its name and its verdict, which may go over several lines
        words = file.getvalue().split()
        assert all(any(word.startswith(spec[:8]) for word in words) for spec in comparison.methods)
        for one in judge(comparison):
            assert set(one.verdict.value.split()) <= set(words)


def test_brackets_are_brackets() -> None:
    file = io.StringIO()
    Console(file=file, width=400).print(main_table(hostile(), 400))
    assert any(line.startswith(HOSTILE) and "pays" in line for line in file.getvalue().splitlines())


def test_wide_terminals_get_more() -> None:
    heads = {}
    for width in (80, 120):
        file = io.StringIO()
        Console(file=file, width=width).print(main_table(examples.troubled(), width))
        heads[width] = file.getvalue()
    assert "vNMSE" in heads[120] and "vNMSE" not in heads[80]
    assert all("lr 0.1" in text for text in heads.values())


def test_markdown() -> None:
    lines = markdown(examples.troubled()).splitlines()
    assert len(lines) == 2 + len(examples.troubled().methods)
    assert {line.count(" | ") for line in lines} == {13}
    assert lines[2].startswith("| powersgd:rank=4 | 0.05 | 51.1 (48.0\u201355.5) | 7.4 (7.3\u20138.2) | 3 of 3 | ")
    assert len({len(re.findall(r"(?<!\\)\|", line)) for line in markdown(hostile()).splitlines()}) == 1


def test_the_settings_of_the_task_are_named() -> None:
    goal = ACCURACY._replace(epochs=4, lr=0.05)
    done = timed(8.0)._replace(goal=goal)
    conditions = {"epochs": None, "budget": 600.0, "data": ""}
    found = Parsed(
        page.html(compared({"fp16": [done]}, conditions=conditions, where="2 ranks on this machine, gloo"), {})
    )
    assert [found.row(name)[1] for name in ("epochs", "steps", "learning rate", "budget")] == ["4", "40", "0.05", "600"]
    assert found.text.count("2 ranks") == 1
