"""Measure the speedup of a pipeline with compressed boundaries on a slow network, and its cost in accuracy.

``pipeline_cnn.py`` is trained on emulated hosts, a stage on each, with one choice of operators after another, and all
of that again with other seeds. As root::

    python examples/pytorch/pipeline_speed.py fp16/fp16 topk:ratio=0.1,values=fp16/shared:values=fp16 \
        --hosts 4 --rate 100mbit
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from statistics import mean, median
from typing import Any

from hvd_compress.tools.bench.machine import Machine
from hvd_compress.tools.cluster import Cluster

EXAMPLE = Path(__file__).with_name("pipeline_cnn.py")
ENVIRONMENT = {"OMP_NUM_THREADS": "1", "TF_CPP_MIN_LOG_LEVEL": "3", "CUDA_VISIBLE_DEVICES": ""}


def train(cluster: Cluster, operators: str, seed: int, options: Sequence[str]) -> dict[str, Any]:
    """Figures in the last line of the example."""
    forward, _, backward = operators.partition("/")
    with tempfile.TemporaryDirectory() as folder:
        report = Path(folder, "report")
        command = [sys.executable, str(EXAMPLE), "--link", "horovod", "--stages", str(cluster.hosts)]
        command += ["--forward", forward, "--backward", backward or forward, "--seed", str(seed)]
        ended = cluster.launch([*command, "--report", str(report), *options], ENVIRONMENT, timeout=3000)
        if any(one.code for one in ended):
            sys.exit("\n".join(one.output for one in ended if one.code))
        told: dict[str, Any] = json.loads(report.read_text().splitlines()[-1])
        return told


def line(operators: str, found: Sequence[dict[str, Any]], first: Sequence[dict[str, Any]]) -> str:
    """A row of the table: medians of the times over the seeds, the mean of accuracies, and in brackets the range."""
    seconds, accuracy = [one["step_seconds"] for one in found], [100 * one["accuracy"] for one in found]
    faster = [a["step_seconds"] / b["step_seconds"] for a, b in zip(first, found, strict=True)]
    forward, _, backward = operators.partition("/")
    return (
        f"| {forward} | {backward or forward} | {found[0]['bytes_per_step']:,} | {1000 * median(seconds):.0f} |"
        f" {median(faster):.1f} ({min(faster):.1f} to {max(faster):.1f}) |"
        f" {mean(accuracy):.1f} ({min(accuracy):.1f} to {max(accuracy):.1f}) |"
    )


def main() -> None:
    """Do the runs, and print a table in Markdown."""
    parser = argparse.ArgumentParser(
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        epilog="All other options go to pipeline_cnn.py.",
    )
    parser.add_argument(
        "operators", nargs="+", metavar="FORWARD/BACKWARD", help="the others are compared with the first"
    )
    parser.add_argument("--hosts", default=4, type=int, choices=[2, 4], help="default: %(default)s")
    parser.add_argument("--rate", default="100mbit", help="of each host; default: %(default)s")
    parser.add_argument("--seeds", default=3, type=int, help="default: %(default)s")
    args, options = parser.parse_known_args()
    found: dict[str, list[dict[str, Any]]] = {operators: [] for operators in args.operators}
    with Cluster(args.hosts, args.rate) as cluster:
        for seed in range(args.seeds):
            for operators, results in found.items():
                results.append(train(cluster, operators, seed, options))
                print(operators, results[-1], file=sys.stderr, flush=True)
    print("| activations | gradients | bytes per step | ms per step | times faster | accuracy in % |")
    print("| --- | --- | ---: | ---: | ---: | ---: |")
    for operators, results in found.items():
        print(line(operators, results, found[args.operators[0]]))
    print(f"\n{args.hosts} emulated hosts, {args.rate}; {args.seeds} seeds. {Machine.here()}")


if __name__ == "__main__":
    main()
