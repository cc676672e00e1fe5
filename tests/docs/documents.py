"""The project's documents, taken apart."""

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
        document: Where it stands.
        line: Of its first line.
        language: What it is written in.
        text: Of the block.
    """

    document: Path
    line: int
    language: str
    text: str

    def __str__(self) -> str:
        return f"{self.document.relative_to(ROOT)}:{self.line}"


def blocks(*languages: str) -> list[Block]:
    """All blocks of code in some languages; all, if none is named."""
    found = [block for document in DOCUMENTS for block in _blocks(document)]
    return [block for block in found if not languages or block.language in languages]


def starts_a_job(block: Block) -> bool:
    """Whether a block of Python starts ranks of its own."""
    return "import ray" in block.text


def expecting(text: str) -> str:
    """A block that hands its expressions to ``expect``, with the value that is written beside each."""
    return RESULT.sub(r'expect(\1, "\2")  #', text)


def _blocks(document: Path) -> Iterator[Block]:
    for match in re.finditer(r"^```(\w*)\n(.*?)^```$", document.read_text(), re.DOTALL | re.MULTILINE):
        yield Block(document, match.string.count("\n", 0, match.start()) + 2, match[1], match[2])


def prose(document: Path) -> str:
    """A document without its blocks of code."""
    return re.sub(r"^```.*?^```$", "", document.read_text(), flags=re.DOTALL | re.MULTILINE)


def anchors(document: Path) -> set[str]:
    """What links into a document can name, as GitHub makes them of headings."""
    headings = re.findall(r"^#+ (.*)$", prose(document), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


def commands() -> list[tuple[str, str]]:
    """All commands, of blocks and of the text between them, with the place where they stand."""
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
    """What stands under a heading, without what stands under its subheadings.

    Attributes:
        document: Where it stands.
        headings: The headings above it and its own, the outermost first.
        text: Of the section.
    """

    document: Path
    headings: tuple[str, ...]
    text: str


def sections(document: Path) -> list[Section]:
    """Of a document, from top to bottom."""
    found, above = [], list[str]()
    parts = re.split(r"^(#+ .*)$", document.read_text(), flags=re.MULTILINE)
    for heading, text in zip(parts[1::2], parts[2::2], strict=True):
        level = len(heading) - len(heading.lstrip("#"))
        above = [*above[: level - 1], heading.lstrip("# ")]
        found.append(Section(document, tuple(above), text))
    return found
