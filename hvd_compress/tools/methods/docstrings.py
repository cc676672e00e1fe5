"""Docstrings as Markdown: paragraphs, equations after a ``::``, and the section ``Args``."""

from __future__ import annotations

import inspect
import re
import textwrap
from typing import NamedTuple


class Doc(NamedTuple):
    """A docstring in parts."""

    text: str  # Summary and body, as Markdown
    args: dict[str, str]  # The arguments by name, as Markdown


def read(thing: type) -> Doc:
    """Read the docstring of a class; arguments that it inherits are looked up where they are documented."""
    args: dict[str, str] = {}
    for cls in reversed(thing.__mro__[:-1]):
        args |= _arguments(_own(cls)[1])
    return Doc(_markdown(_own(thing)[0]), args)


def _own(cls: type) -> tuple[str, str]:
    """Return the docstring of this very class before and after ``Args:``."""
    before, _, after = inspect.cleandoc(cls.__dict__.get("__doc__") or "").partition("\nArgs:\n")
    return before.strip(), re.split(r"\n(?=\S)", after)[0]


def _arguments(section: str) -> dict[str, str]:
    items = re.split(r"^ {4}(\w+): ", section, flags=re.MULTILINE)[1:]
    return {name: _inline(" ".join(text.split())) for name, text in zip(items[::2], items[1::2], strict=True)}


def _markdown(text: str) -> str:
    """Keep paragraphs; make code of what is indented after a ``::``."""
    parts = re.split(r"::\n\n((?:(?: {4}.*)?\n)*(?: {4}.*))", text)
    written = []
    for number, part in enumerate(parts):
        if number % 2:
            written.append(f"```text\n{textwrap.dedent(part).strip()}\n```")
        elif part.strip():
            colon = ":" if number + 1 < len(parts) else ""
            written.append(_inline(part.strip()) + colon)
    return "\n\n".join(written)


def _inline(text: str) -> str:
    return text.replace("``", "`")
