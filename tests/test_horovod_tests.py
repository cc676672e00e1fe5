"""Horovod's own tests as ours: how each test went is known, whatever happens to its job."""

from __future__ import annotations

import json
import unittest
from collections.abc import Mapping, Sequence
from pathlib import Path

import horovod_tests
import horovod_worker
from horovod_tests import Verdict

PLACE = 'File "/horovod/test/test_torch.py", line 31 in test_it'
HUNG, CRASHED = (
    f'{head}\n\nCurrent thread 0x01 (most recent call first):\n  File "/site/threading.py", line 1 in wait\n  {PLACE}\n'
    for head in ("Timeout (0:00:04)!", "Fatal Python error: Aborted")
)
UNCONNECTED = CRASHED.replace("/site/threading.py", "/horovod/common/basics.py").replace("in wait", "in init")

GOOD, SKIPPED = ({"event": "end", "outcome": outcome, "injected": True} for outcome in ("passed", "skipped"))
OTHER_NUMBERS = {"event": "error", "time": 2, "kind": "numbers", "text": "0 is not 1"}
BROKEN = {"event": "error", "time": 1, "kind": "error", "text": "TypeError: broken"}

Notes = Sequence[Mapping[str, object]]


def judged(folder: Path, *ranks: Notes, stacks: tuple[str, str] = ("", "")) -> Verdict:
    """How a test went, of two ranks that have noted this and left these stacks behind."""
    for rank, (notes, stack) in enumerate(zip(ranks, stacks, strict=True)):
        lines: list[Mapping[str, object]] = [{"event": "collected", "test": "", "tests": ["it", "another"]}]
        lines += [{"test": "it", **note} for note in ({"event": "start"}, *notes)]
        text = "".join(f"{json.dumps(line)}\n" for line in lines)
        (folder / f"rank{rank}.jsonl").write_text(text + '{"event": "half a li')
        (folder / f"stack{rank}").write_text(stack)
    tests, verdicts = horovod_tests.read(folder, 2)
    assert tests == ["it", "another"] and list(verdicts) == ["it"]
    return verdicts["it"]


def test_how_a_test_went(tmp_path: Path) -> None:
    assert judged(tmp_path, [GOOD], [GOOD]) == Verdict("passed", "", True)
    assert judged(tmp_path, [SKIPPED], [SKIPPED]).outcome == "skipped"
    assert judged(tmp_path, [GOOD], [OTHER_NUMBERS, GOOD]) == Verdict("numbers", "0 is not 1", True)
    assert judged(tmp_path, [BROKEN, GOOD], [OTHER_NUMBERS, GOOD])[:2] == ("error", "TypeError: broken")
    assert judged(tmp_path, [GOOD], [], stacks=("", HUNG)) == Verdict("hung", PLACE, True)
    assert judged(tmp_path, [], [], stacks=(HUNG, CRASHED)).outcome == "crashed"
    assert judged(tmp_path, [BROKEN, GOOD], [], stacks=("", HUNG)).outcome == "error"
    assert judged(tmp_path, [BROKEN, GOOD], [], stacks=("", UNCONNECTED)).outcome == "unconnected"
    assert judged(tmp_path, [], []).outcome == "crashed"


def test_what_counts() -> None:
    stock = {"a": Verdict("passed", injected=True), "b": Verdict("passed"), "c": Verdict("error", injected=True)}
    assert horovod_tests.comparable(stock) == ["a"]
    outcomes = ("passed", "skipped", "numbers", "error", "hung", "crashed")
    verdicts = {outcome: Verdict(outcome) for outcome in outcomes}
    assert list(horovod_tests.failures(verdicts, lossy=False)) == list(outcomes[1:])
    assert list(horovod_tests.failures(verdicts, lossy=True)) == ["skipped", *outcomes[3:]]


def test_a_compression_of_its_own_for_each_caller_that_names_none() -> None:
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
