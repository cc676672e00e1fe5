"""Run PyTorch's own tests of DistributedDataParallel and FSDP2 with our communication.

Use::

    python tools/pytorch_tests.py [path/to/pytorch] [--ranks 3] [--spec topk:ratio=1.0] [-k expression]

Most of these tests of DistributedDataParallel are part of the installed PyTorch; a checkout of its repository adds two
files, and those of FSDP2. They run over Gloo on CPUs, also those that ask for a GPU per rank. Each runs without our
hook first. Those that pass, and that train a model which our hook can serve, run again with each spec. They must pass
with specs that lose nothing, and neither hang nor crash with any. Models of FSDP2 also gather parameters in our way,
exactly with specs that lose nothing, else in 8 bits.
"""

from __future__ import annotations

import argparse
import contextlib
import re
import sys
import time
import unittest
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT / "tools"))

from horovod_tests import LOSSLESS, LOSSY, Verdict, Verdicts, comparable, failures, halted, row, show  # noqa: E402
from pytorch_cases import EXACT, FILES, INAPPLICABLE, WAITING, Case, Job, cases_of, prepare, read  # noqa: E402

LOGS = ROOT / "build" / "pytorch-tests"


def judge(result: unittest.TestResult, folder: Path, ranks: int) -> Verdict:
    """Return how a test went: the first error on any rank tells why."""
    records = read(folder)
    used = any(record.models for record in records)
    errors = sorted(record for record in records if record.kind in ("numbers", "error"))
    problems = [text for _, text in result.errors + result.failures]
    if errors:
        return Verdict(errors[0].kind, errors[0].text, used)
    if len(records) < ranks and (records or not result.skipped):
        halting = [rank for rank in range(ranks) if not (folder / f"record{rank}").exists()]
        return halted(folder, halting, used)
    if problems:
        return Verdict("error", problems[0].strip().splitlines()[-1], used)
    skips = [record.text for record in records if record.kind == "skipped"] + [why for _, why in result.skipped]
    return Verdict("skipped", skips[0]) if skips else Verdict("passed", "", used)


class Runner:
    """Runs tests, each in processes of its own.

    Args:
        limit: Seconds for a test.
        logs: Folder for what the ranks print and note; each run of a test gets a folder in it.
        op: What the hook makes of the gradients of all ranks; the tests expect ``mean``.
    """

    def __init__(self, limit: float, logs: Path, op: str = "mean") -> None:
        self._limit, self._logs, self._op = limit, logs, op

    def run(self, case: type[Case], spec: str, tests: list[str]) -> dict[str, Verdict]:
        """Run tests of a class.

        Args:
            case: The class.
            spec: Of the compression; empty for PyTorch without our hook.
            tests: Their names.
        """
        return {test: self._run(case, spec, test) for test in tests}

    def _run(self, case: type[Case], spec: str, name: str) -> Verdict:
        folder = self._logs / (re.sub(r"\W+", "-", spec) or "stock") / name
        folder.mkdir(parents=True)
        case.job = Job(spec, self._op, folder, self._limit)
        test, result = case(name), unittest.TestResult()
        with Path(folder, "log").open("w") as log, contextlib.redirect_stdout(log):
            test.run(result)
        return judge(result, folder, int(test.world_size))


def compare(runner: Runner, name: str, case: type[Case], lossless: list[str], lossy: list[str], keyword: str) -> int:
    """Run a class of tests without our hook, then with each spec; print the table.

    Returns:
        How many tests fail because of compression.
    """
    begin = time.monotonic()
    names = [test for test in unittest.TestLoader().getTestCaseNames(case) if re.search(keyword, test)]
    stock = runner.run(case, "", names)
    row(name, "", stock, time.monotonic() - begin)
    tests, total = [test for test in comparable(stock) if test not in INAPPLICABLE], 0
    show("fail without our hook, and are not run again", select(stock, "numbers", "error", "hung", "crashed"))
    show("are skipped", select(stock, "skipped"))
    show("train no model that our hook can serve", {t: v for t, v in select(stock, "passed").items() if not v.injected})
    show(
        "cannot pass with our hook",
        {test: Verdict("passed", INAPPLICABLE[test]) for test in stock if test in INAPPLICABLE},
    )
    print(f"  {len(tests)} of those that pass run again with our hook", flush=True)
    for spec in [*lossless, *lossy] if tests else []:
        begin = time.monotonic()
        strict = WAITING if spec in lossy else EXACT if spec.startswith("powersgd") else {}
        verdicts = runner.run(case, spec, [test for test in tests if test not in strict])
        row(name, spec, verdicts, time.monotonic() - begin)
        ours = failures(verdicts, spec in lossy)
        show("cannot pass with it", {test: Verdict("passed", why) for test, why in strict.items() if test in tests})
        show("fail only with compression", ours)
        show("have other numbers, as they may", select(verdicts, "numbers") if spec in lossy else {})
        total += len(ours)
    return total


def select(verdicts: Verdicts, *outcomes: str) -> dict[str, Verdict]:
    """Return the tests that went in one of some ways."""
    return {test: verdict for test, verdict in verdicts.items() if verdict.outcome in outcomes}


def arguments(words: list[str]) -> argparse.Namespace:
    """Read the command line."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument(
        "checkout", type=Path, nargs="?", help="a checkout of PyTorch, of the version that is installed"
    )
    parser.add_argument("--file", action="append", choices=list(FILES), help="only these tests (may be repeated)")
    parser.add_argument("--spec", action="append", metavar="SPEC", help="only this spec, which loses nothing")
    parser.add_argument(
        "--lossy", action="append", metavar="SPEC", help="only this spec, with which numbers may differ"
    )
    parser.add_argument(
        "-k", default="", metavar="PATTERN", help="only tests whose names match this regular expression"
    )
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument(
        "--op", choices=["mean", "sum"], default="mean", help="sum: a wrong hook, which tests must notice"
    )
    parser.add_argument("--limit", type=float, default=400, help="seconds after which a test hangs")
    parser.add_argument("--logs", type=Path, default=LOGS, help="where to write what the ranks print")
    return parser.parse_args(words)


def main(*words: str) -> int:
    """Compare PyTorch without our hook with each spec, file by file."""
    options = arguments(list(words))
    given = options.spec or options.lossy
    logs = options.logs.resolve() / time.strftime("%Y%m%d-%H%M%S")
    prepare(options.ranks, options.limit)
    print(f"Logs: {logs}")
    total = 0
    for name in options.file or FILES:
        file = FILES[name]
        if file.path and not options.checkout:
            print(f"{name}: only with a checkout of PyTorch")
            continue
        lossless, lossy = (["none", *LOSSLESS], LOSSY) if file.bases else (["none"], ["qsgd:bits=8"])
        if given:
            lossless, lossy = options.spec or [], options.lossy or []
        for case in cases_of(file, options.checkout and options.checkout.resolve()):
            runner, title = Runner(options.limit, logs / name, options.op), name if file.bases else case.__name__
            total += compare(runner, title, case, lossless, lossy, options.k or file.keyword)
    print("Nothing fails because of compression." if not total else f"{total} fail because of compression.")
    return bool(total)


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
