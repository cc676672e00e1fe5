"""Starts the workers, on emulated hosts or on this machine, and collects what they report."""

from __future__ import annotations

import tempfile
from collections.abc import Callable
from pathlib import Path

from hvd_compress.tools.bench.distributed.task import Part, Task, read_report
from hvd_compress.tools.bench.jobs import Framework, Where, execute

WORKERS: dict[Framework, str] = {"torch": "torch_worker", "keras": "keras_worker"}


def run(task: Task, framework: Framework, where: Where, watch: Callable[[int], None]) -> list[list[Part]]:
    """Run a task.

    Args:
        task: What to measure; its folder for reports is chosen here.
        framework: A key of `WORKERS`.
        where: What the ranks run on.
        watch: Called again and again with how many parts are done.

    Returns:
        The report of each rank.

    Raises:
        ClusterError: If the hosts cannot be made, or the job fails.
    """
    with tempfile.TemporaryDirectory(prefix="hvd-compress-bench-") as folder:
        task = task._replace(reports=folder)
        written = Path(folder, "task.json")
        task.write(written)
        module = f"hvd_compress.tools.bench.distributed.{WORKERS[framework]}"
        execute(module, str(written), where, lambda: watch(len(read_report(task.report(0)))))
        return [read_report(task.report(rank)) for rank in range(where.size)]
