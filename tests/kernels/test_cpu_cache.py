"""What is compiled for CPUs is kept apart for each kind of processor, as machines may share the folder."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import hvd_compress

COMPILED = Path(hvd_compress.__file__).parent / "kernels" / "cpu" / "compiled.py"
PROGRAM = """
import runpy, sys

compiled = runpy.run_path(sys.argv[1])


@compiled["loop"](compiled["INT"], compiled["INT"])
def twice(x):
    return 2 * x


assert twice(4) == 8
"""
FORKED = """
import os, runpy, sys

folder = runpy.run_path(sys.argv[1])["_folder"].__wrapped__
children = [os.fork() for _ in range(3)]
refused = sum(folder() is None for _ in range(2000))
if all(children):
    refused += sum(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) for child in children)
    print(refused, flush=True)
os._exit(min(refused, 100))
"""


def compile_for(processor: dict[str, str], cache: Path, program: Path) -> tuple[set[str], str]:
    """Compile a loop as on a machine with such a processor: the folders that there are then, and what was said."""
    environment = {**os.environ, "NUMBA_CACHE_DIR": str(cache), **processor}
    command = [sys.executable, str(program), str(COMPILED)]
    said = subprocess.run(command, env=environment, check=True, capture_output=True, text=True, timeout=120).stderr
    return {folder.name for folder in cache.iterdir()}, said


def test_processors_do_not_share_a_folder(tmp_path: Path) -> None:
    """The index of numba has no lock: two machines at a time could get each other's instructions."""
    cache, program = tmp_path / "cache", tmp_path / "program.py"
    cache.mkdir()
    program.write_text(PROGRAM)
    plain = {"NUMBA_CPU_NAME": "generic", "NUMBA_CPU_FEATURES": ""}
    mine, said = compile_for({}, cache, program)
    assert len(mine) == 1 and "compiling" in said
    both, said = compile_for(plain, cache, program)
    assert len(both) == 2 and mine < both and "compiling" in said
    for processor in ({}, plain):
        assert compile_for(processor, cache, program) == (both, "")


def test_processes_forked_from_one_find_the_folder_at_the_same_time(tmp_path: Path) -> None:
    """Their objects have the same addresses; one that found no folder would compile for half a minute, alone."""
    environment = {**os.environ, "NUMBA_CACHE_DIR": str(tmp_path)}
    command = [sys.executable, "-c", FORKED, str(COMPILED)]
    run = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=120)
    assert run.stdout.strip() == "0", run.stderr
