"""Parse the project's documents: blocks of code, commands, sections."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).resolve().parents[2]
DOCUMENTS = [*sorted(ROOT.glob("*.md")), *sorted(ROOT.glob("docs/*.md")), *sorted(ROOT.glob("docker/*.md"))]

COMMAND = re.compile(r"(?:sudo |\.venv/bin/)?(?:hvd-compress|make|python|pip|horovodrun|mpirun) [^`]+")
RESULT = re.compile(r"^([a-z][^=\n]*?)  # (array\(.*?\)|\{.*?\}|\d+(?:\.\d+)?)(?=$|:| )", re.MULTILINE)


class Block(NamedTuple):
    """A block of code.

    Attributes:
        document: The file that contains it.
        line: The number of its first line.
        language: The word after the opening fence.
        text: The code.
    """

    document: Path
    line: int
    language: str
    text: str

    def __str__(self) -> str:
        return f"{self.document.relative_to(ROOT)}:{self.line}"


def blocks(*languages: str) -> list[Block]:
    """Return all blocks of code in these languages, or in any if none is given."""
    found = [block for document in DOCUMENTS for block in _blocks(document)]
    return [block for block in found if not languages or block.language in languages]


def starts_a_job(block: Block) -> bool:
    """Return whether a block of Python starts a job of its own."""
    return "import ray" in block.text


def expecting(text: str) -> str:
    """Return a block that passes each commented expression to ``expect``, with the value in its comment."""
    return RESULT.sub(r'expect(\1, "\2")  #', text)


def _blocks(document: Path) -> Iterator[Block]:
    for match in re.finditer(r"^```(\w*)\n(.*?)^```$", document.read_text(), re.DOTALL | re.MULTILINE):
        yield Block(document, match.string.count("\n", 0, match.start()) + 2, match[1], match[2])


def prose(document: Path) -> str:
    """Return a document without its blocks of code."""
    return re.sub(r"^```.*?^```$", "", document.read_text(), flags=re.DOTALL | re.MULTILINE)


def anchors(document: Path) -> set[str]:
    """Return the anchors of a document, as GitHub derives them from headings."""
    headings = re.findall(r"^#+ (.*)$", prose(document), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


def commands() -> list[tuple[str, str]]:
    """Return all commands, in blocks and in prose, with the place of each."""
    found = []
    for block in blocks("sh"):
        lines = block.text.replace("\\\n", " ").splitlines()
        found += [(line.partition("  #")[0].strip(), str(block)) for line in lines if not line.startswith("#")]
    for document in DOCUMENTS:
        spans = re.findall(r"(?<!`)`([^`]+)`(?!`)", prose(document))
        names = (" ".join(span.split()) for span in spans)
        found += [(name, str(document.relative_to(ROOT))) for name in names if COMMAND.fullmatch(name)]
    return [(re.sub(r"\s+", " ", command), place) for command, place in found if command]


class Section(NamedTuple):
    """The text under a heading, without that under its subheadings.

    Attributes:
        document: The file that contains it.
        headings: The headings above it and its own, outermost first.
        text: The text.
    """

    document: Path
    headings: tuple[str, ...]
    text: str


def sections(document: Path) -> list[Section]:
    """Return the sections of a document, from top to bottom."""
    found, above = [], list[str]()
    parts = re.split(r"^(#+ .*)$", document.read_text(), flags=re.MULTILINE)
    for heading, text in zip(parts[1::2], parts[2::2], strict=True):
        level = len(heading) - len(heading.lstrip("#"))
        above = [*above[: level - 1], heading.lstrip("# ")]
        found.append(Section(document, tuple(above), text))
    return found
