"""Break the package in one place at a time, and see which of its tests notice.

Use::

    python tools/mutants.py [--seed 0] [--count 100] [--at COMMIT] [--json FILE] [--against FILE] [--list]

Each mutant differs from the package in one operator, condition, number or statement. A seed draws the same number from
each room of the package, and draws the same ones again after other code has changed. The tests that belong to the room
run in a scratch clone; a mutant is found if one of them fails, or does not end. With ``--against``, a mutant that an
earlier run has found and this one has not is a failure.

mutmut runs all mutants in one process, where compiled kernels would stay as they were, and cosmic-ray has one command
for all of them; here a mutant of an adapter is run by a job of several ranks, and one of a method is not.
"""

from __future__ import annotations

import argparse
import ast
import contextlib
import hashlib
import json
import os
import shlex
import signal
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from queue import SimpleQueue
from typing import NamedTuple

ROOT = Path(__file__).resolve().parents[1]

MARK = "HVD_COMPRESS_MUTANT"
"""Environment variable that marks all processes of a mutant, so that none outlives it."""

PYTEST = "-m pytest -x -q -p no:cacheprovider"
PARALLEL = "tests/parallel/run.py"
CORE = "tests/ops tests/methods tests/test_local_world.py tests/test_policy.py tests/test_schedules.py"
METHODS = [f"{PYTEST} --quick {CORE}", f"{PYTEST} {CORE}"]
TORCH = [f"{PYTEST} tests/engine tests/test_bucketing.py", f"{PARALLEL} pytorch 2", f"{PARALLEL} pytorch mpi"]

ROOMS: dict[str, list[str]] = {
    "ops": [f"{PYTEST} tests/kernels", *METHODS],
    "core": [f"{PYTEST} tests/test_bucketing.py tests/checkpoint tests/test_units.py", *METHODS, *TORCH[:2]],
    "methods": [*METHODS, f"{PYTEST} tests/test_measure.py tests/test_spec.py tests/test_api.py"],
    "transport": [f"{PYTEST} tests/test_transport.py", *METHODS, *TORCH[:2]],
    "engine": [f"{PYTEST} tests/test_spec.py tests/test_api.py tests/test_bucket_autotune.py", *METHODS, *TORCH[:2]],
    "torch": [*TORCH, f"{PYTEST} tests/test_resume.py tests/test_repartition.py"],
    "distributed": [*TORCH, f"{PYTEST} tests/test_ddp_faults.py", f"{PARALLEL} pytorch 2+2"],
    "tensorflow": [f"{PARALLEL} keras 2", f"{PARALLEL} keras mpi", f"{PARALLEL} keras 2+2"],
    "checkpoint": [f"{PYTEST} tests/checkpoint", *TORCH[:2], f"{PYTEST} tests/test_resume.py tests/test_nodes.py"],
    "mpi": [f"{PYTEST} tests/test_mpi.py"],
    "pipeline": [f"{PYTEST} tests/pipeline"],
}
"""Rooms of the package, with the arguments of Python that run their tests, the fastest first."""

COMPARISONS: dict[type[ast.cmpop], ast.cmpop] = {
    ast.Lt: ast.LtE(), ast.LtE: ast.Lt(), ast.Gt: ast.GtE(), ast.GtE: ast.Gt(), ast.Eq: ast.NotEq(),
    ast.NotEq: ast.Eq(), ast.Is: ast.IsNot(), ast.IsNot: ast.Is(), ast.In: ast.NotIn(), ast.NotIn: ast.In(),
}  # fmt: skip
OPERATORS: dict[type[ast.operator], ast.operator] = {
    ast.Add: ast.Sub(), ast.Sub: ast.Add(), ast.Mult: ast.Add(), ast.Div: ast.Mult(), ast.FloorDiv: ast.Mult(),
    ast.Mod: ast.Add(), ast.Pow: ast.Mult(), ast.LShift: ast.RShift(), ast.RShift: ast.LShift(),
    ast.BitAnd: ast.BitOr(), ast.BitOr: ast.BitAnd(), ast.BitXor: ast.BitOr(),
}  # fmt: skip


class Mutant(NamedTuple):
    """One change of a file.

    Attributes:
        room: Folder of the package.
        path: The file, from the root of the repository.
        line: Line of the change.
        name: Equal in all versions of the file in which the changed code is the same.
        start: Offset in bytes of what is replaced.
        end: Offset of its end.
        before: What is replaced.
        after: What replaces it.
    """

    room: str
    path: str
    line: int
    name: str
    start: int
    end: int
    before: str
    after: str


class Outcome(NamedTuple):
    """What became of a mutant.

    Attributes:
        mutant: The mutant.
        by: The command that noticed it; empty if none did.
        how: ``"failed"``, ``"did not end"``, or ``"missed"``.
        seconds: How long that took.
    """

    mutant: Mutant
    by: str
    how: str
    seconds: float


def changes(node: ast.AST) -> Iterator[tuple[ast.AST, str]]:
    """Yield what to replace at a node, and by what."""
    if isinstance(node, ast.Compare) and len(node.ops) == 1 and type(node.ops[0]) in COMPARISONS:
        new: ast.expr = ast.Compare(node.left, [COMPARISONS[type(node.ops[0])]], node.comparators)
        yield node, f"({ast.unparse(new)})"
    elif isinstance(node, ast.BinOp) and type(node.op) in OPERATORS:
        yield node, f"({ast.unparse(ast.BinOp(node.left, OPERATORS[type(node.op)], node.right))})"
    elif isinstance(node, ast.BoolOp):
        other = ast.Or() if isinstance(node.op, ast.And) else ast.And()
        yield node, f"({ast.unparse(ast.BoolOp(other, node.values))})"
    elif isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.Not | ast.USub):
        yield node, f"({ast.unparse(node.operand)})"
    elif isinstance(node, ast.If | ast.IfExp) and not isinstance(node.test, ast.Compare | ast.BoolOp | ast.UnaryOp):
        yield node.test, f"(not ({ast.unparse(node.test)}))"
    elif isinstance(node, ast.Constant) and isinstance(node.value, bool | int | float):
        yield node, str(not node.value if isinstance(node.value, bool) else node.value + 1)
    elif (
        isinstance(node, ast.AugAssign)
        or (isinstance(node, ast.Assign) and isinstance(node.targets[0], ast.Attribute | ast.Subscript))
        or (isinstance(node, ast.Expr) and isinstance(node.value, ast.Call))
    ):
        yield node, "pass"


def children(node: ast.AST) -> Iterator[ast.AST]:
    """Yield the parts of a node that run and decide something; not messages, types and texts."""
    for field, value in ast.iter_fields(node):
        if field in ("annotation", "returns", "decorator_list", "bases"):
            continue
        for part in value if isinstance(value, list) else [value]:
            if isinstance(part, ast.Raise | ast.Assert | ast.JoinedStr | ast.AnnAssign) and not (
                isinstance(part, ast.AnnAssign) and part.value and not isinstance(node, ast.Module)
            ):
                continue
            if isinstance(part, ast.FunctionDef) and part.name in ("__repr__", "__getattr__"):
                continue
            if isinstance(part, ast.AST):
                yield part


def mutants_of(room: str, path: Path, root: Path) -> list[Mutant]:
    """Return all mutants of a file."""
    source = path.read_bytes()
    lines = [0]
    for line in source.splitlines(keepends=True):
        lines.append(lines[-1] + len(line))
    found: list[Mutant] = []
    seen: Counter[str] = Counter()

    def visit(node: ast.AST, place: str) -> None:
        if isinstance(node, ast.FunctionDef | ast.ClassDef):
            place = f"{place}.{node.name}"
        if isinstance(node, ast.stmt | ast.expr):
            for old, after in changes(node):
                assert isinstance(old, ast.stmt | ast.expr)
                assert old.end_lineno is not None and old.end_col_offset is not None
                start, end = lines[old.lineno - 1] + old.col_offset, lines[old.end_lineno - 1] + old.end_col_offset
                before = source[start:end].decode()
                name = f"{path.relative_to(root)}{place} {before} -> {after}"
                seen[name] += 1
                found.append(
                    Mutant(
                        room,
                        str(path.relative_to(root)),
                        old.lineno,
                        f"{name} #{seen[name]}",
                        start,
                        end,
                        before,
                        after,
                    )
                )
        for child in children(node):
            visit(child, place)

    visit(ast.parse(source), "")
    return found


def draw(root: Path, seed: int, count: int) -> list[Mutant]:
    """Draw mutants, as many of each room as of any other."""
    drawn: list[list[Mutant]] = []
    for room in ROOMS:
        files = sorted((root / "hvd_compress" / room).rglob("*.py"))
        mutants = [mutant for path in files for mutant in mutants_of(room, path, root)]
        drawn.append(sorted(mutants, key=lambda one: hashlib.sha256(f"{seed} {one.name}".encode()).digest()))
    turns = [mutants[turn] for turn in range(count) for mutants in drawn if turn < len(mutants)]
    return sorted(turns[:count], key=lambda one: (one.room, one.path, one.line))


def there(command: str, root: Path) -> list[str]:
    """Return the arguments of a command, without tests that this version does not have."""
    words = shlex.split(command)
    return [word for word in words if not word.startswith("tests/") or (root / word).exists()]


class Clone:
    """A scratch clone, whose tests see its own package.

    Args:
        root: Where it is.
        commit: What is checked out.
    """

    def __init__(self, root: Path, commit: str) -> None:
        self.root = root
        subprocess.run(["git", "clone", "--quiet", "--shared", str(ROOT), str(root)], check=True)
        subprocess.run(["git", "-C", str(root), "checkout", "--quiet", commit], check=True)
        (root / ".venv").symlink_to(Path(sys.executable).parents[1])

    def run(self, command: str, limit: float) -> tuple[str, float]:
        """Run tests; return ``"failed"``, ``"did not end"`` or nothing, and how many seconds they took."""
        variables = {**os.environ, "PYTHONPATH": str(self.root), MARK: str(self.root)}
        begin = time.monotonic()
        job = subprocess.Popen(
            [sys.executable, *there(command, self.root)],
            cwd=self.root,
            env=variables,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
        )
        try:
            self.said, _ = job.communicate(timeout=limit)
            how = "failed" if job.returncode not in (0, 5) else ""
        except subprocess.TimeoutExpired:
            how = "did not end"
        self._end_all()
        job.wait()
        return how, time.monotonic() - begin

    def _end_all(self) -> None:
        """End what a job has left running."""
        mark = f"{MARK}={self.root}\0".encode()
        for process in Path("/proc").glob("[0-9]*"):
            with contextlib.suppress(OSError):
                if mark in (process / "environ").read_bytes():
                    os.kill(int(process.name), signal.SIGKILL)

    def test(self, mutant: Mutant, limits: dict[str, float]) -> Outcome:
        """Run the tests of a mutant's room until one notices."""
        path = self.root / mutant.path
        original = path.read_bytes()
        path.write_bytes(original[: mutant.start] + mutant.after.encode() + original[mutant.end :])
        begin = time.monotonic()
        try:
            for command in ROOMS[mutant.room]:
                how, _ = self.run(command, limits[command])
                if how:
                    return Outcome(mutant, command, how, time.monotonic() - begin)
        finally:
            path.write_bytes(original)
        return Outcome(mutant, "", "missed", time.monotonic() - begin)


def measure(clone: Clone, rooms: Sequence[str]) -> dict[str, float]:
    """Return the seconds after which each command counts as one that does not end.

    Raises:
        SystemExit: If tests fail without any mutant.
    """
    limits: dict[str, float] = {}
    for command in dict.fromkeys(command for room in rooms for command in ROOMS[room]):
        how, seconds = clone.run(command, 3600)
        if how:
            sys.exit(f"mutants: without any mutant, {command} {how}:\n{clone.said.decode()[-3000:]}")
        limits[command] = 60 + 3 * seconds
        print(f"{seconds:5.0f} s  {command}", flush=True)
    return limits


def report(outcomes: Sequence[Outcome]) -> str:
    """Return the score of each room, and the mutants that were missed."""
    rows = ["| room | mutants | found |", "| --- | ---: | ---: |"]
    for room in [*ROOMS, ""]:
        mine = [one for one in outcomes if room in ("", one.mutant.room)]
        rows.append(f"| {room or 'all'} | {len(mine)} | {sum(bool(one.by) for one in mine)} |")
    missed = [one.mutant for one in outcomes if not one.by]
    return "\n".join([*rows, "", *(f"missed: {one.path}:{one.line}: {one.before} -> {one.after}" for one in missed)])


def main(*arguments: str) -> int:
    """Draw and test mutants; return whether tests have become worse."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--count", type=int, default=100)
    parser.add_argument("--at", default="HEAD", metavar="COMMIT", help="commit that is tested")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write all outcomes to a file")
    parser.add_argument("--against", type=Path, metavar="FILE", help="outcomes of an earlier run")
    parser.add_argument("--list", action="store_true", help="only list the mutants")
    parser.add_argument("--jobs", type=int, default=2, help="mutants tested at a time")
    parser.add_argument("--limit", type=float, help="seconds for a command, in place of three times what it takes")
    parser.add_argument("--rooms", nargs="+", choices=list(ROOMS), default=list(ROOMS), help="rooms to draw from")
    options = parser.parse_args(arguments)
    with tempfile.TemporaryDirectory() as folder:
        clones = [Clone(Path(folder, f"clone{number}"), options.at) for number in range(options.jobs)]
        drawn = draw(clones[0].root, options.seed, options.count)
        drawn = [one for one in drawn if one.room in options.rooms]
        if options.list:
            print("\n".join(f"{one.path}:{one.line}: {one.before} -> {one.after}" for one in drawn))
            return 0
        commands = {command for room in options.rooms for command in ROOMS[room]}
        limits = dict.fromkeys(commands, options.limit) if options.limit else measure(clones[0], options.rooms)
        free: SimpleQueue[Clone] = SimpleQueue()
        for clone in clones:
            free.put(clone)

        def test(mutant: Mutant) -> Outcome:
            clone = free.get()
            outcome = clone.test(mutant, limits)
            free.put(clone)
            print(f"{outcome.how:12}{outcome.seconds:5.0f} s  {mutant.path}:{mutant.line}: ", end="", flush=True)
            print(f"{' '.join(mutant.before.split())} -> {mutant.after}", flush=True)
            return outcome

        with ThreadPoolExecutor(options.jobs) as pool:
            outcomes = list(pool.map(test, drawn))
    print(f"\n{report(outcomes)}")
    if options.json:
        rows = [{**one.mutant._asdict(), "by": one.by, "how": one.how, "seconds": one.seconds} for one in outcomes]
        options.json.write_text(json.dumps(rows, indent=1))
    if options.against is None:
        return 0
    earlier = {row["name"] for row in json.loads(options.against.read_text()) if row["by"]}
    worse = [one.mutant for one in outcomes if one.mutant.name in earlier and not one.by]
    print("".join(f"\nfound before, missed now: {one.path}:{one.line}: {one.before} -> {one.after}" for one in worse))
    return bool(worse)


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
