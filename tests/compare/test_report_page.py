"""The report and the tables: that they tell all, and take any text for what it is."""

from __future__ import annotations

import io
from itertools import pairwise
from pathlib import Path

from compare import examples
from markdown_it import MarkdownIt
from markdown_it.token import Token
from rich.console import Console

from hvd_compress.tools.compare.report import page
from hvd_compress.tools.compare.report.captions import PICTURES
from hvd_compress.tools.compare.report.tables import main_table
from hvd_compress.tools.compare.results import Comparison, Failure

HOSTILE = """x"><script>alert('1')</script>&amp;$5|[red](a)`*_#~"""


class Parsed:
    """A page as a viewer of Markdown shows it."""

    def __init__(self, text: str) -> None:
        blocks = MarkdownIt("commonmark").enable("table").parse(text)
        tokens = [token for block in blocks for token in (block, *(block.children or []))]
        self.kinds = {token.type for token in tokens}
        self.images = [str(token.attrs["src"]) for token in tokens if token.type == "image"]
        self.texts = [_shown(block) for block in blocks if block.type in ("inline", "fence")]
        self.rows: list[list[str]] = []
        for before, block in pairwise(blocks):
            if before.type == "tr_open":
                self.rows.append([])
            if before.type in ("th_open", "td_open"):
                self.rows[-1].append(_shown(block))

    def row(self, first: str) -> list[str]:
        """The first row that begins with this."""
        return next(row for row in self.rows if row[0] == first)


def _shown(block: Token) -> str:
    return "".join(child.content for child in block.children) if block.children else block.content


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
    """Its figures are those of the trainings."""
    found = Parsed(page.markdown(examples.troubled()))
    assert found.images == [f"{picture.name}.png" for picture in PICTURES]
    heads, rows = found.row("Method"), [row for row in found.rows if row[0] == "powersgd:rank=4"]
    row = dict(zip(heads, rows[0], strict=True))
    assert (row["Verdict"], row["Learning rate"], row["Seeds at target"]) == ("pays", "0.05", "3 of 3")
    assert row["Time to target, s"] == "51.1 (48.0\u201355.5)"
    assert (row["Speedup over fp16"], row["Step, ms"]) == ("7.4 (7.3\u20138.2)", "143")
    assert (row["Bytes to Horovod"], row["Bytes at device"], row["vNMSE"]) == ("561 kB", "844 kB", "0.310")
    assert rows[1] == ["powersgd:rank=4", "143", "54.7", "19.2", "61.0", "8.1", "measured"]
    assert [row[1] for row in rows[2:]] == ["0.05", "0.2"]
    assert dict(zip(heads, found.row(examples.MANY[-1].spec), strict=True))["Verdict"] == "failed"
    assert any("horovodrun ended with status 1; it printed:\n<out> of memory" in text for text in found.texts)


def test_any_text_is_only_text() -> None:
    found = Parsed(page.markdown(hostile()))
    assert not {"html_inline", "html_block", "link_open", "entity"} & found.kinds
    # heading and subtitle, words, tables, failure, command, machine
    assert sum(text.count(HOSTILE) for text in found.texts) >= 12
    assert found.row(HOSTILE)[-1].startswith("pays")
    file = io.StringIO()
    Console(file=file, width=400).print(main_table(hostile(), 400))
    assert any(line.startswith(HOSTILE) and "pays" in line for line in file.getvalue().splitlines())


def test_a_page_without_any_training(tmp_path: Path) -> None:
    page.write(examples.comparison(examples.METHODS[1:3])._replace(outcomes=[], vnmse={}), tmp_path)
    assert {path.name for path in tmp_path.iterdir()} == {"report.md"}
    assert Parsed((tmp_path / "report.md").read_text()).row("fp16")[-1] == "failed"
