"""Set-up of all tests: what ``make quick`` leaves out, and what a machine may lack."""

from __future__ import annotations

import os
import re
import signal
import sys
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import launching
import pytest
from hypothesis import settings
from needs import NEEDS

# Small arrays: threads would wait for each other more than they work. Before any framework is loaded.
for variable in ("OMP_NUM_THREADS", "TF_NUM_INTRAOP_THREADS"):
    os.environ.setdefault(variable, "1")

# How long an example takes depends on the machine and on what else it does; which examples, on nothing.
settings.register_profile("patient", deadline=None, derandomize=True)
settings.register_profile("quick", parent=settings.get_profile("patient"), max_examples=20)
settings.load_profile("patient")

# A shell starts jobs in the background with Ctrl-C ignored, and all that these start would ignore it, too.
signal.signal(signal.SIGINT, signal.default_int_handler)


SLOW_FILE = re.compile(r"^pytestmark = pytest\.mark\.(?:jobs|tensorflow)$", re.MULTILINE)
"""The line of a file that ``make quick`` leaves out as a whole."""

LEFT_OUT = ("slow", "jobs", "long", "tensorflow", "needs")
"""Marks of tests that ``make quick`` leaves out."""


def pytest_addoption(parser: pytest.Parser) -> None:
    """Add the options of ``make quick`` and ``make soak``."""
    parser.addoption("--quick", action="store_true", help=f"leave out tests marked {', '.join(LEFT_OUT)}")
    parser.addoption("--long", action="store_true", help="run the tests marked long, which are left out otherwise")


def pytest_configure(config: pytest.Config) -> None:
    """For ``make quick``, draw fewer examples, and notice a test that starts a job and lacks its mark."""
    if config.getoption("quick"):
        settings.load_profile("quick")
        launching.run = launching.horovodrun = refused  # type: ignore[assignment]


@pytest.fixture
def without_horovod(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Let nothing import Horovod, here and in programs that are started."""
    folder = tmp_path / "without"
    folder.mkdir()
    (folder / "horovod.py").write_text("raise ModuleNotFoundError('no Horovod here')")
    for name in [name for name in sys.modules if name.partition(".")[0] == "horovod"]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setenv("PYTHONPATH", str(folder), prepend=os.pathsep)
    monkeypatch.syspath_prepend(str(folder))


def refused(*_: object, **__: object) -> None:
    """Stand in for what starts jobs."""
    pytest.fail("make quick starts no job: mark this test with pytest.mark.jobs")


def pytest_ignore_collect(collection_path: Path, config: pytest.Config) -> bool | None:
    """Leave out files without importing them: TensorFlow takes long to load."""
    quick = config.getoption("quick") and collection_path.suffix == ".py"
    return True if quick and SLOW_FILE.search(collection_path.read_text()) else None


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Leave out single tests, and put files with jobs first: two processes end at about the same time so."""
    marks = LEFT_OUT if config.getoption("quick") else ("long",)
    left_out = {item for item in items if any(map(item.get_closest_marker, marks)) != config.getoption("long")}
    config.hook.pytest_deselected(items=list(left_out))
    items[:] = [item for item in items if item not in left_out]
    items.sort(key=lambda item: not item.get_closest_marker("jobs"))


@pytest.hookimpl(wrapper=True)
def pytest_runtest_call(item: pytest.Item) -> Iterator[None]:
    """Notice a test that loads TensorFlow and lacks its mark."""
    yield
    if item.config.getoption("quick") and sys.modules.get("tensorflow"):
        pytest.fail("make quick has loaded TensorFlow: mark this test, or one before it, with pytest.mark.tensorflow")


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_setup(item: pytest.Item) -> None:
    """Skip a test that needs what is not there. CI has all of it: there the test fails."""
    for name in (name for mark in item.iter_markers("needs") for name in mark.args):
        if not NEEDS[name].met():
            (pytest.fail if os.environ.get("CI") else pytest.skip)(f"needs {NEEDS[name].name}: {NEEDS[name].cure}")


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    """Say in one line which tests were skipped, and how to run them."""
    reasons = [str(report.longrepr) for report in terminalreporter.getreports("skipped")]
    counts = Counter(need for need in NEEDS.values() for reason in reasons if f"needs {need.name}: " in reason)
    told = [f"{count} for want of {need.name} ({need.cure})" for need, count in counts.items()]
    if told:
        terminalreporter.write_line(f"Tests not run: {'; '.join(told)}", yellow=True)
