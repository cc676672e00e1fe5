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


def test_links_lead_somewhere() -> None:
    for document in DOCUMENTS:
        for target in re.findall(r"\]\(([^)\s]+)\)", prose(document)):
            link = urlparse(target)
            if link.scheme:
                assert link.scheme == "https" and link.netloc, target
                continue
            path = (document.parent / link.path).resolve() if link.path else document
            assert path.exists(), f"{document.name}: {target} is not there"
            if link.fragment:
                assert link.fragment in anchors(path), f"{path.name} has no heading for {target} of {document.name}"


def test_files_that_are_named_exist() -> None:
    for document in DOCUMENTS:
        for name in re.findall(r"`([\w-]+/[\w./-]*\.[a-z]+)`", prose(document)):
            places = (ROOT, ROOT / "hvd_compress", ROOT / "tests", document.parent)
            assert any((place / name).exists() for place in places), f"{document.name}: {name}"


def test_measured_numbers_have_their_commands() -> None:
    """A table with measurements has a command in its section, or in one above it."""
    known = commands()
    for document in DOCUMENTS:
        place, has_command = str(document.relative_to(ROOT)), dict[tuple[str, ...], bool]()
        mine = [command for command, at in known if place in at]
        for section in sections(document):
            words = " ".join(section.text.split())
            has_command[section.headings] = any(command in words for command in mine)
            text = re.sub(r"`[^`]*`", "", section.text)  # a number in code is set
            rows = [line for line in text.splitlines() if line.startswith("|")]
            if any(MEASURED.search(row) for row in rows):
                above = [section.headings[:depth] for depth in range(1, len(section.headings) + 1)]
                assert any(has_command.get(headings) for headings in above), f"{place}: {' / '.join(section.headings)}"


def test_blocks_can_be_read() -> None:
    for block in blocks():
        assert block.language in ("sh", "python", "diff", "text", "yaml"), block
        if block.language == "python":
            compile(block.text, str(block), "exec")
    assert [yaml.safe_load(block.text)["kind"] for block in blocks("yaml")] == ["MPIJob"]


@pytest.mark.long
def test_every_block_of_python_runs(tmp_path: Path) -> None:
    """Run all of them in a job of two ranks."""
    found = horovodrun(2, "mpi", Path(__file__).with_name("block_job.py"), tmp_path)
    for block in blocks("python"):
        if not starts_a_job(block):
            assert found.stdout.count(f"{block} ran on rank") == 2, block


@pytest.mark.long
def test_blocks_that_start_a_job_run(tmp_path: Path) -> None:
    """Compare what they print with the comment."""
    for number, block in enumerate(filter(starts_a_job, blocks("python"))):
        program = tmp_path / f"{number}.py"
        program.write_text(block.text)
        found = run([sys.executable, program], 300)
        (expected,) = re.findall(r"^print\(.*\)  # \[(\d+\.\d)", block.text, re.MULTILINE)
        assert found.returncode == 0 and f"[{expected}" in found.stdout, found.stdout
