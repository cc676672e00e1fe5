"""The report in a browser, on a wide screen and on a narrow one: nothing is cut, covered or missing."""

from __future__ import annotations

import html
import json
import re
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from compare import examples
from needs import browser

from hvd_compress.tools.compare.report import page
from hvd_compress.tools.compare.report.captions import PICTURES
from hvd_compress.tools.compare.results import Comparison

pytestmark = pytest.mark.needs("chromium")

OPTIONS = (
    "--headless", "--no-sandbox", "--disable-gpu", "--disable-background-networking", "--disable-component-update",
    "--disable-sync", "--no-first-run", "--window-size=1600,1000", "--virtual-time-budget=5000",
)  # fmt: skip

PROBE = """<script>
addEventListener("load", () => {
  const box = (one) => { const r = one.getBoundingClientRect(); return [r.left, r.top, r.right, r.bottom]; };
  const all = (what) => [...document.querySelectorAll(what)];
  const named = (one) => [one.textContent.slice(0, 60), ...box(one)];
  const blocks = all("h1, h2, p, li, pre, figcaption, .scroll").map(named);
  const cells = all("th, td").map((one) => [...named(one), one.scrollWidth, one.clientWidth]);
  const images = all("img").map((one) => [one.complete, one.naturalWidth, one.clientWidth]);
  const boxes = all(".scroll").map((one) => [one.getAttribute("aria-label"), one.scrollWidth, one.clientWidth]);
  const size = [innerWidth, document.documentElement.scrollWidth, document.documentElement.scrollHeight];
  const found = {blocks, cells, images, boxes, size, shown: all("h1, table").map(box)};
  parent.postMessage(JSON.stringify(found), "*");
});
</script>"""

FRAME = """<!doctype html><body style="margin: 0"><pre id="found"></pre>
<script>addEventListener("message", (event) => { document.getElementById("found").textContent = event.data; });</script>
<iframe src="probed.html" style="border: 0; width: %dpx; height: 900px"></iframe>"""


def laid_out(folder: Path, width: int) -> dict[str, Any]:
    """The page of a folder in a window of so many pixels; browsers have no windows below 500, but frames."""
    text = (folder / "report.html").read_text()
    (folder / "probed.html").write_text(text.replace("</body>", f"{PROBE}</body>"))
    (folder / "frame.html").write_text(FRAME % width)
    command = [
        str(browser()),
        *OPTIONS,
        f"--user-data-dir={folder / 'profile'}",
        "--dump-dom",
        f"file://{folder}/frame.html",
    ]
    ended = subprocess.run(command, capture_output=True, text=True, timeout=300, check=False)
    match = re.search(r'<pre id="found">(.+?)</pre>', ended.stdout, re.DOTALL)
    assert match, f"the browser told nothing:\n{ended.stdout[-2000:]}\n{ended.stderr[-2000:]}"
    found: dict[str, Any] = json.loads(html.unescape(match[1]))
    return found


def covers(one: list[Any], other: list[Any]) -> bool:
    """Whether two boxes share more than a pixel, and neither is within the other."""
    (_, left, top, right, bottom), (_, x, y, to, down) = one[:5], other[:5]
    across, along = min(right, to) - max(left, x), min(bottom, down) - max(top, y)
    within = (left <= x and top <= y and right >= to and bottom >= down) or (
        x <= left and y <= top and to >= right and down >= bottom
    )
    return across > 1 and along > 1 and not within


def covered(boxes: list[list[Any]]) -> list[tuple[str, str]]:
    """Which texts are over each other."""
    return [(a[0], b[0]) for place, a in enumerate(boxes) for b in boxes[:place] if covers(a, b)]


COMPARISONS: dict[str, Callable[[], Comparison]] = {
    "troubled": examples.troubled,
    "many": lambda: examples.comparison(examples.MANY, perplexity=True),
}


@pytest.fixture(scope="module", params=COMPARISONS)
def folder(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    made = tmp_path_factory.mktemp("report")
    page.write(COMPARISONS[request.param](), made)
    return made


@pytest.mark.parametrize("width", [400, 1400])
def test_the_layout(folder: Path, width: int) -> None:
    found = laid_out(folder, width)
    inner, content, height = found["size"]
    assert inner == width
    assert content <= inner
    assert height > 900
    assert len(found["images"]) == len(PICTURES)
    assert all(complete and natural > 0 and shown >= 600 for complete, natural, shown in found["images"])
    assert all(right - left > 100 and bottom - top > 20 for left, top, right, bottom in found["shown"])
    assert len(found["shown"]) >= 1 + 2
    assert covered(found["blocks"]) == []
    assert [cell for cell in found["cells"] if cell[5] > cell[6] + 1] == []  # no text is wider than its cell
    for text, left, _, right, _ in found["blocks"]:
        assert 0 <= left <= right <= width, text
    wide = {label for label, whole, shown in found["boxes"] if whole > shown + 1}
    assert "Methods" in wide if width == 400 else not wide  # narrow screens scroll, wide ones need not


def test_a_page_that_is_too_wide_is_noticed(folder: Path, tmp_path: Path) -> None:
    text = (folder / "report.html").read_text()
    broken = text.replace(".scroll { overflow-x: auto;", ".scroll {").replace(
        "margin: 0 0 .4rem;", "margin: 0 0 -3rem;"
    )
    assert broken != text
    (tmp_path / "report.html").write_text(broken)
    found = laid_out(tmp_path, 400)
    assert found["size"][1] > 400
    assert covered(found["blocks"])
