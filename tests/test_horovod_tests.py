"""Horovod's own tests as ours: how each test went is known, whatever happens to its job."""

from __future__ import annotations

import os
import subprocess
import sys
import unittest
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, ClassVar

import pytest

import horovod_tests
import horovod_worker
from horovod_tests import File, Runner, Verdict

pytestmark = pytest.mark.jobs

LIMIT = 4.0

HOROVOD = """
class Compression:
    none = "stock"

def DistributedOptimizer(optimizer, compression=Compression.none):
    return compression
"""

BASICS = """
import os
from pathlib import Path

def init():
    try:
        Path(__file__).with_name("tried" + os.environ["HOROVOD_RANK"]).touch(exist_ok=False)
    except FileExistsError:
        return
    os.abort()
"""

TESTS = """
import os
import threading
import unittest

import horovod.torch as hvd
from horovod.common.basics import init

RANK = int(os.environ["HOROVOD_RANK"])

class Tests(unittest.TestCase):
    def tearDown(self):
        raise RuntimeError("shut down")

    def test_1_uses_the_default(self):
        assert hvd.DistributedOptimizer(None) == "stock"

    def test_2_names_its_own(self):
        assert hvd.DistributedOptimizer(None, compression="own") == "own"

    def test_3_other_numbers_on_a_rank(self):
        assert RANK == 0, "other numbers"

    def test_4_leaves_a_rank_waiting(self):
        if RANK == 0:
            raise TypeError("broken")
        threading.Event().wait()

    def test_5_hangs(self):
        if RANK == 1:
            threading.Event().wait()

    def test_6_crashes(self):
        if RANK == 1:
            os.abort()

    @unittest.skip("no GPU")
    def test_7_skipped(self):
        raise AssertionError

    def test_8_fails_in_a_part(self):
        with self.subTest("first"):
            raise TypeError("of a part")

    def test_9_passes_if_horovod_connects(self):
        init()
"""


def two_ranks(_: int, __: str, *arguments: str | Path, **options: Any) -> subprocess.CompletedProcess[str]:
    """Start two processes as horovodrun does: when one fails, the other is ended."""
    python = Path(str(arguments[-1])).parents[2] / "horovod_of_test"
    variables = {**os.environ, **options["environment"], "HOROVOD_SIZE": "2", "PYTHONPATH": str(python)}
    command = [sys.executable, *map(str, arguments)]
    ranks = [subprocess.Popen(command, env={**variables, "HOROVOD_RANK": str(rank)}) for rank in range(2)]

    def wait(rank: subprocess.Popen[bytes]) -> int:
        code = rank.wait()
        for other in ranks if code else ():
            other.kill()
        return code

    with ThreadPoolExecutor(2) as pool:
        codes = list(pool.map(wait, ranks))
    return subprocess.CompletedProcess(command, any(codes), "")


@pytest.fixture
def runner(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Runner:
    modules = tmp_path / "horovod_of_test" / "horovod"
    modules.mkdir(parents=True)
    (modules / "__init__.py").touch()
    (modules / "common").mkdir()
    (modules / "common" / "basics.py").write_text(BASICS)
    (modules / "torch.py").write_text(HOROVOD)
    (tmp_path / "checkout" / "test").mkdir(parents=True)
    (tmp_path / "checkout" / "test" / "test_torch.py").write_text(TESTS)
    monkeypatch.setattr(horovod_tests, "horovodrun", two_ranks)
    return Runner(tmp_path / "checkout", 2, "gloo", LIMIT, tmp_path / "logs")


@pytest.mark.long
class TestOneFile:
    FILE = File("test/test_torch.py", "torch")

    def test_a_test_that_fails_or_hangs_or_crashes_does_not_keep_the_others_from_running(self, runner: Runner) -> None:
        verdicts = runner.run(self.FILE, "")
        assert list(verdicts) == sorted(verdicts) and len(verdicts) == 9
        assert [verdict.outcome for verdict in verdicts.values()] == [
            *("passed", "passed", "numbers", "error", "hung", "crashed", "skipped", "error", "passed")
        ]
        used = [name for name, verdict in verdicts.items() if verdict.injected]
        assert used == horovod_tests.comparable(verdicts) == ["Tests::test_1_uses_the_default"]
        texts = [verdict.text for verdict in verdicts.values()]
        assert texts[2] == "AssertionError: other numbers (test_torch.py:22)"
        assert texts[3] == "TypeError: broken (test_torch.py:26)"
        assert texts[4].endswith('test_torch.py", line 31 in test_5_hangs')
        assert texts[7].startswith("TypeError: of a part")
        assert texts[5].startswith("Fatal Python error: Aborted File ") and texts[5].endswith(" in test_6_crashes")

    def test_some_tests(self, runner: Runner) -> None:
        assert list(runner.run(self.FILE, "", "default or own or hangs", tests=["Tests::test_2_names_its_own"])) == [
            "Tests::test_2_names_its_own"
        ]

    def test_a_job_that_crashes_after_its_last_test(self, runner: Runner, tmp_path: Path) -> None:
        text = "import atexit, os, unittest\natexit.register(os.abort)\n"
        text += "class Tests(unittest.TestCase):\n    def test_it(self): pass\n"
        (tmp_path / "checkout" / "test" / "test_torch.py").write_text(text)
        verdicts = runner.run(self.FILE, "")
        assert [verdict.outcome for verdict in verdicts.values()] == ["passed", "crashed"]
        assert list(verdicts)[1] == "the end of the job"

    def test_a_file_that_cannot_be_imported(self, runner: Runner, tmp_path: Path) -> None:
        (tmp_path / "checkout" / "test" / "test_torch.py").write_text("import nothing_of_that_name")
        with pytest.raises(horovod_tests.JobError, match=r"test_torch\.py could not run"):
            runner.run(self.FILE, "")


class TestDefault:
    def test_a_compression_of_its_own_for_each_caller_that_names_none(self) -> None:
        calls: list[int] = []

        def wrap(optimizer: str, name: str = "", compression: object = None) -> object:
            return compression

        wrapped = horovod_worker.with_default(wrap, object, lambda: calls.append(1))
        first, second = wrapped("sgd"), wrapped("sgd", name="x")
        assert None not in (first, second) and first is not second
        assert wrapped("sgd", compression="own") == wrapped("sgd", "x", "own") == "own"
        assert len(calls) == 2


def test_cases_of_a_parameter() -> None:
    seen: list[tuple[bool, str]] = []

    class Tests(unittest.TestCase):
        @horovod_worker.expand([[True, "a"], [False, "b"]])
        def test_it(self, flag: bool, letter: str) -> None:
            seen.append((flag, letter))

    unittest.defaultTestLoader.loadTestsFromTestCase(Tests).run(unittest.TestResult())
    assert seen == [(True, "a"), (False, "b")]


class TestResult:
    STOCK: ClassVar = {
        "T::good": Verdict("passed", injected=True),
        "T::other": Verdict("passed"),
        "T::bad": Verdict("error", "RuntimeError: of stock", injected=True),
    }

    def main(self, monkeypatch: pytest.MonkeyPatch, *words: str, **outcomes: str) -> int:
        """Run the comparison, with stock Horovod as above and what the tests give with compression."""
        asked: list[Any] = []

        def run(_: Runner, __: File, spec: str, ___: str = "", tests: list[str] | None = None) -> dict[str, Verdict]:
            asked.append(tests)
            return {"T::good": Verdict(outcomes["good"], "why")} if spec else self.STOCK

        monkeypatch.setattr(Runner, "run", run)
        code = horovod_tests.main("checkout", "--file", "torch", *words)
        assert asked[1:] and all(tests == ["T::good"] for tests in asked[1:])
        return code

    @pytest.mark.parametrize(
        ("option", "outcome", "code"),
        [
            ("--spec", "passed", 0),
            ("--spec", "numbers", 1),
            ("--spec", "hung", 1),
            ("--spec", "skipped", 1),
            ("--lossy", "passed", 0),
            ("--lossy", "numbers", 0),
            ("--lossy", "error", 1),
            ("--lossy", "crashed", 1),
        ],
    )
    def test_exit_code(self, option: str, outcome: str, code: int, monkeypatch: pytest.MonkeyPatch) -> None:
        assert self.main(monkeypatch, option, "topk", good=outcome) == code

    def test_failures_of_stock_horovod_are_listed_and_not_counted(
        self, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
    ) -> None:
        assert self.main(monkeypatch, good="passed") == 0
        printed = capsys.readouterr().out
        assert "error    bad  RuntimeError: of stock" in printed
        assert printed.endswith("Nothing fails because of compression.\n")
