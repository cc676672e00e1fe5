"""The report and the tables: that they need nothing else, tell all, and take any text for what it is."""

from __future__ import annotations

import io
import re
from html.parser import HTMLParser
from pathlib import Path

from compare import examples
from rich.console import Console

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


def test_a_report_is_made() -> None:
    """A page that loads nothing, whose figures are those of the trainings."""
    found = Parsed(page.html(examples.troubled(), {picture.name: b"" for picture in PICTURES}))
    assert not {tag for tag, _ in found.tags} & {"script", "link", "iframe", "object", "base", "form", "a"}
    images = [attributes for tag, attributes in found.tags if tag == "img"]
    assert len(images) == len(PICTURES) and all(one["src"].startswith("data:") for one in images)
    heads, rows = found.row("Method"), [row for row in found.rows if row[0] == "powersgd:rank=4"]
    row = dict(zip(heads, rows[0], strict=True))
    assert (row["Verdict"], row["Learning rate"], row["Seeds at target"]) == ("pays", "0.05", "3 of 3")
    assert (row["Speedup over fp16"], row["Step, ms"]) == ("7.47.3\u20138.2", "143")
    assert (row["Bytes to Horovod"], row["Bytes at device"], row["vNMSE"]) == ("561 kB", "844 kB", "0.310")
    assert rows[1] == ["powersgd:rank=4", "143", "54.7", "19.2", "61.0", "8.1", "measured"]
    assert [row[1] for row in rows[2:]] == ["0.05", "0.2"]
    assert dict(zip(heads, found.row(examples.MANY[-1].spec), strict=True))["Verdict"] == "failed"
    lines = markdown(examples.troubled()).splitlines()
    assert len(lines) == 2 + len(examples.troubled().methods)
    assert lines[2].startswith("| powersgd:rank=4 | 0.05 | 51.1 (48.0\u201355.5) | 7.4 (7.3\u20138.2) | 3 of 3 | ")


def test_any_text_is_only_text() -> None:
    found = Parsed(page.html(hostile(), {}))
    # title, heading and subtitle, words, tables, failure, command, machine
    assert " ".join(found.text.split()).count(HOSTILE) >= 12
    assert found.row(HOSTILE)[1].startswith("pays")
    assert len({len(re.findall(r"(?<!\\)\|", line)) for line in markdown(hostile()).splitlines()}) == 1
    file = io.StringIO()
    Console(file=file, width=400).print(main_table(hostile(), 400))
    assert any(line.startswith(HOSTILE) and "pays" in line for line in file.getvalue().splitlines())


def test_a_page_without_any_training(tmp_path: Path) -> None:
    page.write(examples.comparison(examples.METHODS[1:3])._replace(outcomes=[], vnmse={}), tmp_path)
    assert {path.name for path in tmp_path.iterdir()} == {"report.html", "table.md"}
    assert Parsed((tmp_path / "report.html").read_text()).row("fp16")[1] == "failed"
