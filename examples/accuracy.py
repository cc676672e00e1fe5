"""Train the demo's CNN with every method, in PyTorch and in Keras, and write down how well it ends.

The file that it writes is what `python tools/methods_page page` makes a table of::

    python examples/accuracy.py docs/accuracy.json
"""

from __future__ import annotations

import argparse
import itertools
import json
import sys
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from demo import FRAMEWORKS, DemoError, Results, Run, train_all
from rich.console import Console

from hvd_compress.methods import REGISTRY


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

_CASES = (
    Case("none", 0.0),
    Case("fp16"),
    Case("bf16"),
    Case("topk:ratio=0.01"),
    Case("topk:ratio=0.01,feedback=ef21", 0.05),
    Case("threshold:threshold=0.01"),
    Case("dgc:ratio=0.01,momentum=0.8", options=PLAIN, note="SGD without momentum: the method has it"),
    Case("sidco:ratio=0.01"),
    Case("gtopk:ratio=0.01"),
    Case("randomk:ratio=0.1", 0.05, note="ten times the ratio of top-k"),
    Case("randomk:ratio=0.01,feedback=off", 1.0, note="negative control: without feedback, most is lost"),
    Case(
        "blockk:ratio=0.25", 0.05, ("--lr", "0.05"), "a fourth of the coordinates, learning rate 0.05: blocks wait long"
    ),
    Case("topkc:ratio=0.01"),
    Case("scalecom:ratio=0.01", 0.05),
    Case("oktopk:ratio=0.01"),
    Case("arctopk:ratio=0.05,width=64", 0.05, note="a twentieth of the rows of 64 coordinates"),
    Case("qsgd"),
    Case("qsgd:bits=2,twoway=on", 0.05),
    Case("terngrad"),
    Case("fp8"),
    Case("fp8:format=e5m2"),
    Case("block8"),
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
CASES = (*_CASES, *(Case(name) for name in REGISTRY if name not in {case.spec.partition(":")[0] for case in _CASES}))
"""The specs above, and the default of every other method."""


def rows_of(results: Results, before: Sequence[Mapping[str, Any]]) -> Iterator[Mapping[str, Any]]:
    """Return the result of each case: from this run, or else from the previous one."""
    old = {(row["framework"], row["spec"]): row for row in before}
    for framework, case in itertools.product(FRAMEWORKS, CASES):
        result = results.get(Run(framework, case.spec, case.options))
        if result is None:
            yield old[framework, case.spec]
        else:
            yield {
                "framework": framework,
                "spec": case.spec,
                "accuracy": result.accuracy,
                "baseline": results[Run(framework, "none")].accuracy,
                "bytes_per_step": result.bytes_per_step,
                "tolerance": case.tolerance,
                "note": case.note,
            }


def main() -> None:
    """Do the runs."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("output", type=Path, help="the file to write")
    parser.add_argument("--only", metavar="NAMES", help="run these methods, such as qsgd,loco, and keep the other rows")
    args = parser.parse_args()
    names = ["none", *args.only.split(",")] if args.only else REGISTRY
    cases = [case for case in CASES if case.spec.partition(":")[0] in names]
    runs = [Run(framework, case.spec, case.options) for framework in FRAMEWORKS for case in cases]
    before = json.loads(args.output.read_text()) if args.only else []
    try:
        rows = list(rows_of(train_all(Console(), runs), before))
    except DemoError as error:
        sys.exit(f"accuracy: {error}")
    args.output.write_text(json.dumps(rows, indent=1) + "\n")
    missed = [row for row in rows if row["accuracy"] < row["baseline"] - row["tolerance"]]
    for row in missed:
        print(f"{row['framework']} {row['spec']}: {row['accuracy']} misses {row['baseline']} - {row['tolerance']}")
    sys.exit(bool(missed))


if __name__ == "__main__":
    main()
