"""Train the demo's CNN with every method, in PyTorch and in Keras, and write down how well it ends.

The file that it writes is what `hvd-compress docs` makes a table of::

    python examples/accuracy.py docs/accuracy.json
"""

from __future__ import annotations

import argparse
import json
import shutil
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

from demo import FRAMEWORKS, DemoError, Results, Run, train_all
from rich.console import Console


class Case(NamedTuple):
    """A method and what is expected of it.

    Attributes:
        spec: The method.
        tolerance: How far below the accuracy without compression it may end.
        options: Of the example.
        note: What a reader should know.
    """

    spec: str
    tolerance: float = 0.02
    options: tuple[str, ...] = ()
    note: str = ""


PLAIN = ("--momentum", "0")
SIGNS = ("--momentum", "0", "--lr", "0.002")

CASES = (
    Case("none", 0.0),
    Case("fp16"),
    Case("bf16"),
    Case("topk:ratio=0.01"),
    Case("topk:ratio=0.01,feedback=ef21", 0.05),
    Case("topk:ratio=0.01,delay=10", 0.05, note="the delayed exchange of CD-SGD, corrected every 10 steps"),
    Case("threshold:threshold=0.01"),
    Case("dgc:ratio=0.01,momentum=0.8", options=PLAIN, note="SGD without momentum: the method has it"),
    Case("sidco:ratio=0.01"),
    Case("gtopk:ratio=0.01"),
    Case("randomk:ratio=0.1", 0.05, note="ten times the ratio of top-k"),
    Case("randomk:ratio=0.01,feedback=off", 1.0, note="negative control: without feedback, most is lost"),
    Case("blockk:ratio=0.1", 0.05, note="ten times the ratio of top-k"),
    Case("topkc:ratio=0.01"),
    Case("scalecom:ratio=0.01", 0.05),
    Case("qsgd"),
    Case("qsgd:bits=2,twoway=on", 0.05),
    Case("terngrad"),
    Case("natural"),
    Case("onebit"),
    Case("onebit:twoway=on"),
    Case("signsgd", 0.05, options=SIGNS, note="learning rate 0.002 without momentum: all steps have one size"),
    Case("signum", 0.05, options=SIGNS, note="learning rate 0.002: all steps have one size"),
    Case("efsignsgd"),
    Case("efsignsgd:twoway=on"),
    Case("int8"),
    Case("thc"),
    Case("thc:rotation=full,overflow=saturate"),
    Case("loco"),
    Case("powersgd:rank=4"),
    Case("acpsgd:rank=4"),
    Case("homomorphic", note="these gradients are not sparse, so they travel as they are"),
)


def table(results: Results) -> Iterator[dict[str, Any]]:
    """What is written down of each run."""
    cases = {case.spec: case for case in CASES}
    for run, result in results.items():
        yield {
            "framework": run.framework,
            "spec": run.method,
            "accuracy": result.accuracy,
            "baseline": results[Run(run.framework, "none")].accuracy,
            "bytes_per_step": result.bytes_per_step,
            "tolerance": cases[run.method].tolerance,
            "note": cases[run.method].note,
        }


def main() -> None:
    """Do all runs."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("output", type=Path, help="the file to write")
    output = parser.parse_args().output
    runs = [Run(framework, case.spec, case.options) for framework in FRAMEWORKS for case in CASES]
    folder = Path(tempfile.mkdtemp(prefix="hvd-compress-accuracy-"))
    try:
        rows = list(table(train_all(Console(), folder, runs)))
    except DemoError as error:
        sys.exit(f"{error.output}accuracy: {error}; the logs are in {folder}")
    output.write_text(json.dumps(rows, indent=1) + "\n")
    shutil.rmtree(folder)
    missed = [row for row in rows if row["accuracy"] < row["baseline"] - row["tolerance"]]
    for row in missed:
        print(f"{row['framework']} {row['spec']}: {row['accuracy']} misses {row['baseline']} - {row['tolerance']}")
    sys.exit(bool(missed))


if __name__ == "__main__":
    main()
