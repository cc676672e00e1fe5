"""Documents: no dead link, no block of code that does not run, no measured number without its command."""

from __future__ import annotations

import re
import sys
from pathlib import Path
from urllib.parse import urlparse

import pytest
import yaml  # type: ignore[import-untyped]
from docs.documents import DOCUMENTS, ROOT, anchors, blocks, commands, prose, sections, starts_a_job
from launching import horovodrun, run

MEASURED = re.compile(r"\d (?:ms|s|MB|GB|kB|min)\b|\d\.\d+x?\b")
"""A measured number, as opposed to one that is set."""


@pytest.mark.parametrize("document", DOCUMENTS, ids=lambda path: str(path.relative_to(ROOT)))
def test_links_lead_somewhere(document: Path) -> None:
    for target in re.findall(r"\]\(([^)\s]+)\)", prose(document)):
        link = urlparse(target)
        if link.scheme:
            assert link.scheme == "https" and link.netloc, target
            continue
        path = (document.parent / link.path).resolve() if link.path else document
        assert path.exists(), f"{target} is not there"
        if link.fragment:
            assert link.fragment in anchors(path), f"{path.name} has no heading for {target}"


@pytest.mark.parametrize("document", DOCUMENTS, ids=lambda path: str(path.relative_to(ROOT)))
def test_files_that_are_named_exist(document: Path) -> None:
    for name in re.findall(r"`([\w-]+/[\w./-]*\.[a-z]+)`", prose(document)):
        places = (ROOT, ROOT / "hvd_compress", ROOT / "tests", document.parent)
        assert any((place / name).exists() for place in places), name


def test_every_block_says_what_it_is() -> None:
    assert {block.language for block in blocks()} <= {"sh", "python", "diff", "text", "yaml"}


@pytest.mark.parametrize("document", DOCUMENTS, ids=lambda path: str(path.relative_to(ROOT)))
def test_measured_numbers_have_their_commands(document: Path) -> None:
    """A table with measurements has a command in its section, or in one above it."""
    has_command: dict[tuple[str, ...], bool] = {}
    for section in sections(document):
        place = str(document.relative_to(ROOT))
        has_command[section.headings] = any(
            command in " ".join(section.text.split()) for command, at in commands() if place in at
        )
        text = re.sub(r"`[^`]*`", "", section.text)  # a number in code is set
        rows = [line for line in text.splitlines() if line.startswith("|")]
        if any(MEASURED.search(row) for row in rows):
            above = [section.headings[:depth] for depth in range(1, len(section.headings) + 1)]
            assert any(has_command.get(headings) for headings in above), f"{place}: {' / '.join(section.headings)}"


def test_blocks_of_yaml_can_be_read() -> None:
    found = [yaml.safe_load(block.text) for block in blocks("yaml")]
    assert [document["kind"] for document in found] == ["MPIJob"]


@pytest.mark.jobs
def test_every_block_of_python_runs(tmp_path: Path) -> None:
    """Run all of them in a job of two ranks."""
    found = horovodrun(2, "mpi", Path(__file__).with_name("block_job.py"), tmp_path)
    for block in blocks("python"):
        if not starts_a_job(block):
            assert found.stdout.count(f"{block} ran on rank") == 2, block


@pytest.mark.jobs
def test_blocks_that_start_a_job_run(tmp_path: Path) -> None:
    """Compare what they print with the comment."""
    for number, block in enumerate(filter(starts_a_job, blocks("python"))):
        program = tmp_path / f"{number}.py"
        program.write_text(block.text)
        found = run([sys.executable, program], 300)
        (expected,) = re.findall(r"^print\(.*\)  # \[(\d+\.\d)", block.text, re.MULTILINE)
        assert found.returncode == 0 and f"[{expected}" in found.stdout, found.stdout
