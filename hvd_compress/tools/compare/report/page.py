"""The report: one page that needs nothing else, and the pictures beside it."""

from __future__ import annotations

import base64
import io
from collections.abc import Mapping
from html import escape
from pathlib import Path
from typing import TYPE_CHECKING

from hvd_compress.tools.compare.report import sections, tables
from hvd_compress.tools.compare.report.captions import PICTURES
from hvd_compress.tools.compare.report.sheet import CSS
from hvd_compress.tools.compare.results import Comparison, write_whole

if TYPE_CHECKING:
    from matplotlib.figure import Figure

_DPI = 150
"""The resolution of the PNG files."""


def write(comparison: Comparison, folder: Path) -> None:
    """Write ``report.html``, its pictures and its main table as Markdown into a folder, which is made if there is none.

    Raises:
        MissingPackageError: If matplotlib is not installed.
        OSError: If a file cannot be written.
    """
    folder.mkdir(parents=True, exist_ok=True)
    drawn = {}
    for picture in PICTURES if comparison.outcomes else ():
        made = picture.draw(comparison)
        write_whole(folder / f"{picture.name}.png", _image(made, "png"))
        drawn[picture.name] = _image(made, "svg")
    write_whole(folder / "report.html", html(comparison, drawn))
    write_whole(folder / "table.md", f"{tables.markdown(comparison)}\n")


def html(comparison: Comparison, drawn: Mapping[str, bytes]) -> str:
    """Return the page with these pictures, which are SVG, by name."""
    title = f"Does compression pay for {comparison.task}?"
    parts = [sections.head(comparison, title), sections.verdict(comparison), sections.main_table(comparison)]
    for picture in PICTURES:
        if picture.name in drawn:
            source = f"data:image/svg+xml;base64,{base64.b64encode(drawn[picture.name]).decode()}"
            parts.append(sections.figure(picture.title, source, picture.alt, picture.caption))
        if picture.name == "step":
            parts.append(sections.split_table(comparison))
    parts += [sections.rates(comparison), sections.failures(comparison), sections.how(comparison)]
    body = "\n".join(part for part in parts if part)
    return (
        '<!doctype html>\n<html lang="en">\n<head>\n<meta charset="utf-8">\n'
        '<meta name="viewport" content="width=device-width, initial-scale=1">\n'
        f"<title>{escape(title)}</title>\n<style>{CSS}</style>\n</head>\n<body>\n<main>\n{body}\n</main>\n</body>\n</html>\n"
    )


def _image(drawn: Figure, kind: str) -> bytes:
    """Return an image; the same figure gives the same bytes."""
    import matplotlib

    file = io.BytesIO()
    with matplotlib.rc_context({"svg.hashsalt": "hvd-compress"}):
        drawn.savefig(file, format=kind, dpi=_DPI, metadata={"Date": None} if kind == "svg" else None)
    return file.getvalue()
