"""One rank of a job that runs a file of Horovod's own tests, started by `horovod_tests.py`.

pytest runs them with the plugin `Recorder`: it notes in a file of this rank how each test goes, keeps the ranks in
step, and ends the job at the first test that fails, hangs or crashes. Before that, `inject` makes our compression the
default of Horovod's optimizers and tapes.
"""

from __future__ import annotations

import faulthandler
import functools
import importlib
import importlib.util
import inspect
import json
import math
import os
import sys
import time
import traceback
import types
import unittest
import unittest.mock
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import pytest

PACKAGE = "hvd_compress"
GRACE = 20
"""Seconds that a rank whose test has failed waits for the others to say how they fare."""

STARTING = 600
"""Seconds until the first test: frameworks are imported, and perhaps kernels compiled."""

ENDING = 120
"""Seconds after the last test, for Horovod to shut down."""

SKIPPED = (unittest.SkipTest, pytest.skip.Exception)

TARGETS: dict[str, dict[str, list[str]]] = {
    "torch": {"horovod.torch": ["DistributedOptimizer"]},
    "tensorflow": {
        "horovod.tensorflow": ["DistributedOptimizer", "DistributedGradientTape", "PartialDistributedGradientTape"],
        "horovod.tensorflow.keras": ["DistributedOptimizer"],
        "horovod.keras": ["DistributedOptimizer", "PartialDistributedOptimizer"],
    },
}
"""Functions with a default ``compression=``, by framework and module."""


class Job(NamedTuple):
    """Instructions for all ranks of a job.

    Attributes:
        checkout: Folder of Horovod's sources.
        file: Path of the tests in it.
        framework: A key of `TARGETS`.
        spec: Of the compression that becomes the default; empty for stock Horovod.
        keyword: Which tests, as with ``pytest -k``.
        tests: Names of those to run; None for all.
        limit: Seconds for a test.
        folder: Where records and logs are written.
    """

    checkout: str
    file: str
    framework: str
    spec: str
    keyword: str
    tests: list[str] | None
    limit: float
    folder: str

    @property
    def path(self) -> Path:
        """The file by which the ranks are told."""
        return Path(self.folder, "job.json")

    def write(self) -> Path:
        """Write the file for the ranks, in a new folder."""
        self.path.parent.mkdir(parents=True)
        self.path.write_text(json.dumps(self._asdict()))
        return self.path


def records(folder: str | Path, rank: int) -> Iterator[dict[str, Any]]:
    """Yield what a rank has noted so far; not a line that it is just writing."""
    path = Path(folder, f"rank{rank}.jsonl")
    for line in path.read_text().splitlines(keepends=True) if path.exists() else ():
        if line.endswith("\n"):
            yield json.loads(line)


def short_name(nodeid: str) -> str:
    """Return the name of a test without its file."""
    return nodeid.partition("::")[2]


class Recorder:
    """A pytest plugin: notes how each test goes, and waits after each until all ranks have come as far.

    Args:
        job: The job.
        rank: Of this process.
        size: How many there are.
    """

    def __init__(self, job: Job, rank: int, size: int) -> None:
        self._job, self._rank, self._size = job, rank, size
        self._notes = Path(job.folder, f"rank{rank}.jsonl").open("w", buffering=1)  # noqa: SIM115
        self._stack = Path(job.folder, f"stack{rank}").open("w")  # noqa: SIM115
        self._outcome = "passed"
        self._test = ""
        self.injected = 0
        faulthandler.enable(self._stack)
        self._arm(STARTING)

    def _note(self, event: str, **facts: Any) -> None:
        self._notes.write(json.dumps({"event": event, "test": self._test, "time": time.time(), **facts}) + "\n")

    def _arm(self, seconds: float) -> None:
        """End this process after some time, by a thread in C: it may hang in a collective that holds the GIL."""
        faulthandler.dump_traceback_later(seconds, exit=True, file=self._stack)

    def _failed(self, kind: str, text: str) -> None:
        if self._outcome != "failed":
            self._note("error", kind=kind, text=text)
            self._outcome = "failed"

    def pytest_pycollect_makeitem(self, obj: object) -> None:
        """Note errors where they happen, and let Horovod run from the first test to the last.

        Over Gloo, tearDown shuts Horovod down. To begin anew often fails: its rendezvous server may still have the
        addresses of the last time.
        """
        if isinstance(obj, type) and issubclass(obj, unittest.TestCase):
            if "tearDown" in vars(obj):
                del obj.tearDown
            for name in unittest.TestLoader().getTestCaseNames(obj):
                setattr(obj, name, self._noting(getattr(obj, name)))

    def _noting(self, test: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(test)
        def noting(*arguments: Any, **options: Any) -> Any:
            try:
                return test(*arguments, **options)
            except SKIPPED:
                raise
            except BaseException as error:
                self._failed(*describe(error))
                raise

        return noting

    @pytest.hookimpl(trylast=True)
    def pytest_collection_modifyitems(self, items: list[pytest.Item]) -> None:
        """Keep the tests that are to run; after those that ``-k`` has left out."""
        wanted = self._job.tests
        items[:] = [item for item in items if wanted is None or short_name(item.nodeid) in wanted]
        self._note("collected", tests=[short_name(item.nodeid) for item in items])

    def pytest_runtest_logstart(self, nodeid: str) -> None:
        """Begin a test."""
        self._test, self._outcome, self.injected = short_name(nodeid), "passed", 0
        self._note("start")
        self._arm(self._job.limit)

    def pytest_exception_interact(self, call: pytest.CallInfo[Any]) -> None:
        """Note an error outside of the test itself, or in a part of it."""
        if call.excinfo:
            self._failed(*describe(call.excinfo.value))

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        """Note that a test was skipped."""
        if report.skipped and self._outcome == "passed":
            self._outcome = "skipped"

    def pytest_runtest_logfinish(self) -> None:
        """End a test, and the job if it has failed on any rank: the ranks may no longer be in step."""
        self._note("end", outcome=self._outcome, injected=self.injected)
        self._arm(self._job.limit + GRACE)  # a rank that hangs ends first, and tells where
        until = time.monotonic() + GRACE if self._outcome == "failed" else math.inf
        while None in (outcomes := self._outcomes()) and time.monotonic() < until:
            time.sleep(0.02)
        if "failed" in outcomes:
            sys.stdout.flush()
            os._exit(1)
        self._arm(STARTING)

    def _outcomes(self) -> list[str | None]:
        """Return how this test has ended on all ranks so far."""
        ended = [
            {
                record["test"]: str(record["outcome"])
                for record in records(self._job.folder, rank)
                if "outcome" in record
            }
            for rank in range(self._size)
        ]
        return [outcomes.get(self._test) for outcomes in ended]

    def finish(self) -> None:
        """Begin to wait for the end of this process."""
        self._arm(ENDING)


def describe(error: BaseException) -> tuple[str, str]:
    """Return whether a test found other numbers or something went wrong, and a line that tells what and where."""
    frames = traceback.extract_tb(error.__traceback__)
    ours = [frame for frame in frames if f"/{PACKAGE}/" in frame.filename]
    shown = ours[-1] if ours else frames[-1]
    kind = "numbers" if isinstance(error, AssertionError) and not (ours and frames[-1] is ours[-1]) else "error"
    lines = [line.strip() for line in str(error).splitlines() if line.strip(" *\t")] or [""]
    # AutoGraph tells the calls first.
    line = lines[-1] if lines[0].startswith("in user code") else f"{type(error).__name__}: {lines[0]}"
    place = PACKAGE + shown.filename.rpartition(f"/{PACKAGE}")[2] if ours else Path(shown.filename).name
    return kind, f"{line} ({place}:{shown.lineno})"


def with_default(function: Callable[..., Any], make: Callable[[], Any], called: Callable[[], None]) -> Any:
    """Return a function that takes a compression of ours where its caller names none.

    Args:
        function: Has a parameter ``compression``.
        make: Makes the compression: a new one for each call, as users do.
        called: Called each time that a caller has named none.
    """
    signature = inspect.signature(function)

    @functools.wraps(function)
    def injected(*arguments: Any, **options: Any) -> Any:
        if "compression" not in signature.bind(*arguments, **options).arguments:
            called()
            options["compression"] = make()
        return function(*arguments, **options)

    return injected


def default(framework: str, spec: str) -> Callable[[], Any]:
    """Return a function that makes a compression of a spec; of stock Horovod, if it is empty."""
    none = importlib.import_module(f"horovod.{framework}").Compression.none
    if not spec:
        return lambda: none
    parse = importlib.import_module(f"{PACKAGE}.{framework}").Compression.parse
    if framework == "torch":
        return lambda: parse(spec)
    eager = importlib.import_module("tensorflow").compat.v1.executing_eagerly_outside_functions
    # Some tests run in a graph for a session of TensorFlow 1 first, where compressors with a state refuse to work.
    return lambda: parse(spec) if eager() else none


def inject(framework: str, spec: str, called: Callable[[], None]) -> None:
    """Make a spec the default compression of Horovod's optimizers and tapes; without a spec, only see who calls them.

    Args:
        framework: A key of `TARGETS`.
        spec: Of the compression, or empty.
        called: Called each time that a default is used.
    """
    make = default(framework, spec)
    for path, names in TARGETS[framework].items():
        module = importlib.import_module(path)
        for name in names:
            setattr(module, name, with_default(getattr(module, name), make, called))


def expand(cases: Iterable[Iterable[Any]]) -> Callable[[Callable[..., Any]], None]:
    """Make a method for each case, as the decorator ``parameterized.expand`` does."""

    def decorate(function: Callable[..., Any]) -> None:
        methods = sys._getframe(1).f_locals  # of the class that is being made
        for number, case in enumerate(cases):
            methods[f"{function.__name__}_{number}"] = functools.partialmethod(function, *case)

    return decorate


def prepare(tests: Path, framework: str) -> None:
    """Make what the tests import importable: their helpers, and packages that nothing else here needs."""
    sys.path += [str(tests.parent), str(tests.parents[1] / "utils")]
    parameterized = types.ModuleType("parameterized")
    parameterized.parameterized = types.SimpleNamespace(expand=expand)  # type: ignore[attr-defined]
    for name, module in {"mock": unittest.mock, "parameterized": parameterized}.items():
        if importlib.util.find_spec(name) is None:
            sys.modules[name] = module
    if framework == "torch":
        # The tests try every optimizer of torch.optim on vectors; this one, newer than they are, takes only matrices.
        newer = getattr(importlib.import_module("torch.optim"), "Muon", None)
        if newer:
            newer.__module__ = "torch.newer"


def rank_and_size() -> tuple[int, int]:
    """Return where this process stands in its job, over Gloo or under MPI."""
    prefix = next(prefix for prefix in ("HOROVOD", "OMPI_COMM_WORLD") if f"{prefix}_RANK" in os.environ)
    return int(os.environ[f"{prefix}_RANK"]), int(os.environ[f"{prefix}_SIZE"])


def main(path: str) -> int:
    """Run the tests of a job on this rank."""
    job = Job(**json.loads(Path(path).read_text()))
    rank, size = rank_and_size()
    with Path(job.folder, f"log{rank}").open("w") as log:
        os.dup2(log.fileno(), 1)
        os.dup2(log.fileno(), 2)
    recorder = Recorder(job, rank, size)

    def called() -> None:
        recorder.injected += 1

    tests = Path(job.checkout, job.file)
    prepare(tests, job.framework)
    inject(job.framework, job.spec, called)
    options = ["-q", "-p", "no:cacheprovider", "-p", "no:faulthandler", "-s", "--import-mode=importlib"]
    options += ["-k", job.keyword] if job.keyword else []
    code = pytest.main([*options, f"--rootdir={job.checkout}", str(tests)], plugins=[recorder])
    recorder.finish()
    return code


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
