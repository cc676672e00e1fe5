"""Upper bounds on what a reader has to know: files that run in a step, and lines of code. They may only shrink."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from launching import horovodrun, torchrun

import way

TOOL = Path(way.__file__)
CODE_LINES = 22_310


def files(said: str) -> tuple[int, int]:
    """The number of files in a step, and of those that are neither method nor primitive."""
    found = re.search(r"(\d+) files run in a step, (\d+) of them", said)
    assert found, said
    return int(found[1]), int(found[2])


@pytest.mark.jobs
def test_a_step_with_horovod_runs_few_files() -> None:
    run, engine = files(horovodrun(2, "gloo", TOOL, "horovod").stdout)
    assert run <= 38 and engine <= 24


@pytest.mark.jobs
def test_a_step_with_ddp_runs_few_files() -> None:
    run, engine = files(torchrun(2, TOOL, "ddp").stdout)
    assert run <= 34 and engine <= 20


def test_the_package_does_not_grow() -> None:
    assert sum(lines for _, lines in way.lines_by_room().values()) <= CODE_LINES


def test_what_counts_as_a_line_of_code(tmp_path: Path) -> None:
    file = tmp_path / "some.py"
    file.write_text(
        '"""A docstring\n\nof three lines."""\nimport os\nfrom os import (\n    path,\n)\n\n# A comment\n'
        'X = 1  # Code\n"""What X is."""\n\n\ndef f() -> str:\n    """Return it."""\n    return """two\n    lines"""\n'
    )
    assert way.code_lines(file) == 4
