"""Count what a step costs a reader: the files of the package that run in it, and the package's lines of code by room.

Run one of::

    horovodrun -np 2 -H localhost:2 --gloo python tools/way.py horovod [SPEC]
    torchrun --standalone --nproc-per-node 2 tools/way.py ddp [SPEC]
    torchrun --standalone --nproc-per-node 2 tools/way.py fsdp [SPEC]
    python tools/way.py lines

The first three train a model of one bucket and let the interpreter's profiler count. A world of one rank skips most of
the engine, so they need two.
"""

from __future__ import annotations

import argparse
import ast
import os
import sys
import threading
import tokenize
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from types import FrameType
from typing import NamedTuple

import hvd_compress

ROOT = Path(hvd_compress.__file__).parent
METHOD_OR_PRIMITIVE = ("methods/", "ops/", "errors")
SPECS = {
    "horovod": "topk:ratio=0.1,min_size=0",
    "ddp": "topk:ratio=0.1,min_size=0",
    "fsdp": "int8:feedback=on,min_size=0",  # FSDP2 needs a method that can reduce-scatter
}
WARM_UP, STEPS = 5, 10


class Way(NamedTuple):
    """What runs of the package in some steps of a rank.

    Attributes:
        calls: Number of calls in each file, by its path in the package; calls differ from run to run, as ranks poll.
        changes: How often a call was in another file than the call before.
    """

    calls: Counter[str]
    changes: int

    @property
    def engine(self) -> list[str]:
        """The files that are neither method nor primitive; a wrapper counts as engine."""
        return [
            file
            for file in self.calls
            if not file.startswith(METHOD_OR_PRIMITIVE) or file.startswith("methods/wrappers/")
        ]

    def __str__(self) -> str:
        return (
            f"{len(self.calls)} files run in a step, {len(self.engine)} of them neither method nor primitive;"
            f" {self.calls.total() / STEPS:.0f} calls, {self.changes / STEPS:.0f} changes of file"
        )


def followed(step: Callable[[], None]) -> Way:
    """Run steady steps and return their way through the package, in all threads."""
    for _ in range(WARM_UP):
        step()
    order: list[str] = []
    prefix = f"{ROOT}{os.sep}"

    def profile(frame: FrameType, event: str, _: object) -> None:
        if event == "call" and frame.f_code.co_filename.startswith(prefix):
            order.append(frame.f_code.co_filename.removeprefix(prefix))

    threading.setprofile(profile)
    sys.setprofile(profile)
    for _ in range(STEPS):
        step()
    sys.setprofile(None)
    threading.setprofile(None)
    changes = sum(file != before for file, before in zip(order, ["", *order], strict=False))
    return Way(Counter(order), changes)


def training(adapter: str, spec: str) -> tuple[Callable[[], None], int]:
    """Join the job; return the step of a model of one bucket, and the rank."""
    import torch
    import torch.distributed as dist
    from torch.distributed.fsdp import fully_shard

    model: torch.nn.Module = torch.nn.Linear(64, 64)
    if adapter == "horovod":
        import horovod.torch as hvd

        from hvd_compress.torch import Compression

        hvd.init()
        rank = hvd.rank()
        optimizer: torch.optim.Optimizer = hvd.DistributedOptimizer(
            torch.optim.SGD(model.parameters(), lr=0.1),
            named_parameters=model.named_parameters(),
            compression=Compression.parse(spec),
        )
    else:
        from hvd_compress.distributed import Compression as DistributedCompression

        dist.init_process_group("gloo")
        rank = dist.get_rank()
        if adapter == "fsdp":
            fully_shard(model)
        else:
            model = torch.nn.parallel.DistributedDataParallel(model)
        DistributedCompression.parse(spec).register(model)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

    def step() -> None:
        optimizer.zero_grad()
        model(torch.randn(8, 64)).square().mean().backward()
        optimizer.step()

    return step, rank


def _lines_of(nodes: Iterator[ast.stmt]) -> set[int]:
    return {line for node in nodes for line in range(node.lineno, (node.end_lineno or node.lineno) + 1)}


def code_lines(path: Path) -> int:
    """Return how many lines of a file are neither blank nor comment, docstring or import."""
    skipped = {tokenize.COMMENT, tokenize.NL, tokenize.NEWLINE, tokenize.INDENT, tokenize.DEDENT, tokenize.ENDMARKER}
    with path.open("rb") as file:
        tokens = [token for token in tokenize.tokenize(file.readline) if token.type not in skipped]
    written = {line for token in tokens[1:] for line in range(token.start[0], token.end[0] + 1)}
    statements = [node for node in ast.walk(ast.parse(path.read_text())) if isinstance(node, ast.stmt)]
    imports = (node for node in statements if isinstance(node, ast.Import | ast.ImportFrom))
    strings = (
        node
        for node in statements
        if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant) and isinstance(node.value.value, str)
    )
    return len(written - _lines_of(imports) - _lines_of(strings))


def lines_by_room() -> dict[str, tuple[int, int]]:
    """Return files and lines of code by room, a folder or file at the top of the package, the longest first."""
    files: Counter[str] = Counter()
    lines: Counter[str] = Counter()
    for path in ROOT.rglob("*.py"):
        room = path.relative_to(ROOT).parts[0].removesuffix(".py")
        files[room] += 1
        lines[room] += code_lines(path)
    return {room: (files[room], count) for room, count in lines.most_common()}


def main() -> None:
    """Count and print; rank 0 speaks for all."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", choices=(*SPECS, "lines"))
    parser.add_argument("spec", nargs="?")
    parser.add_argument("--files", action="store_true", help="also list the calls in each file")
    arguments = parser.parse_args()
    if arguments.what == "lines":
        rooms = lines_by_room()
        for room, (files, lines) in rooms.items():
            print(f"{room:14} {files:4} files {lines:6} lines of code")
        totals = [sum(column) for column in zip(*rooms.values(), strict=True)]
        print(f"{'all':14} {totals[0]:4} files {totals[1]:6} lines of code")
        return
    spec = arguments.spec or SPECS[arguments.what]
    step, rank = training(arguments.what, spec)
    way = followed(step)
    if rank == 0:
        print(f"{arguments.what} {spec}: {way}", flush=True)
        for file, calls in way.calls.most_common() if arguments.files else ():
            print(f"{calls / STEPS:8.1f}  {file}", flush=True)


if __name__ == "__main__":
    main()
