"""Kernels for CPUs are compiled at their first call, once, and kept on disk, apart for each kind of processor."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

import hvd_compress

pytestmark = pytest.mark.jobs

COMPILED = Path(hvd_compress.__file__).parent / "ops" / "kernels" / "cpu" / "compiled.py"
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

folder = runpy.run_path(sys.argv[1])["cache_folder"].__wrapped__
children = [os.fork() for _ in range(3)]
refused = sum(folder() is None for _ in range(2000))
if all(children):
    refused += sum(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) for child in children)
    print(refused, flush=True)
os._exit(min(refused, 100))
"""

FIRST_CALL = """
import sys
import numpy as np
from hvd_compress.ops.kernels import cpu

if sys.argv[1:]:
    print(cpu.ascending(np.array([1, 2, 4]), int(sys.argv[1])))
"""
THREADS = """
import threading
from concurrent.futures import ThreadPoolExecutor
import numpy as np
from hvd_compress.ops.kernels.cpu import scatter

barrier = threading.Barrier(8)


def call(n):
    barrier.wait()
    return scatter.ascending(np.array([1, 3, 4]), n)


with ThreadPoolExecutor(8) as pool:
    print(list(pool.map(call, range(8))).index(True), sum(scatter._ascending.stats.cache_misses.values()))
"""
WRONG_TYPE = """
import numpy as np
from hvd_compress.ops.kernels import cpu

for turn in range(2):
    try:
        cpu.ascending("ab", 5)
    except TypeError as error:
        print(str(error).splitlines()[0])
print(cpu.ascending(np.array([1, 2, 4]), 5))
"""
ALL_FROM_DISK = """
from hvd_compress.ops.kernels import cpu
from hvd_compress.ops.kernels.cpu.compiled import LOOPS

print(len(LOOPS), sum(sum(loop().stats.cache_misses.values()) for loop in LOOPS))
"""


def python(*arguments: str, cache: Path) -> subprocess.CompletedProcess[str]:
    """Run Python with a folder for compiled kernels."""
    command, environment = [sys.executable, *arguments], {**os.environ, "NUMBA_CACHE_DIR": str(cache)}
    return subprocess.run(command, env=environment, check=True, capture_output=True, text=True, timeout=600)


def loops_in(cache: Path) -> list[str]:
    """The names of the loops that a folder has in compiled form."""
    return sorted(index.name.split("-")[0] for index in cache.rglob("*.nbi"))


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
    """Their objects have the same addresses; one that found no folder would compile at every start."""
    environment = {**os.environ, "NUMBA_CACHE_DIR": str(tmp_path)}
    command = [sys.executable, "-c", FORKED, str(COMPILED)]
    run = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=120)
    assert run.stdout.strip() == "0", run.stderr


def test_the_first_call_compiles_that_kernel_alone_and_the_next_process_nothing(tmp_path: Path) -> None:
    assert python("-c", FIRST_CALL, cache=tmp_path).stderr == ""
    assert loops_in(tmp_path) == []
    first = python("-c", FIRST_CALL, "5", cache=tmp_path)
    assert first.stdout == "True\n" and first.stderr.count("compiling") == 1
    assert loops_in(tmp_path) == ["scatter._ascending"]
    second = python("-c", FIRST_CALL, "4", cache=tmp_path)
    assert (second.stdout, second.stderr) == ("False\n", "")


def test_threads_that_call_first_at_the_same_time_compile_once(tmp_path: Path) -> None:
    assert python("-c", THREADS, cache=tmp_path).stdout == "5 1\n"


def test_wrong_types_are_refused_by_the_first_call_as_by_the_next(tmp_path: Path) -> None:
    refused = "No matching definition for argument type(s) unicode_type, int64"
    assert python("-c", WRONG_TYPE, cache=tmp_path).stdout.splitlines() == [refused, refused, "True"]


def test_the_command_compiles_all_kernels() -> None:
    """In the user's own cache, where `make setup` has done so: compiling all takes half a minute."""
    caches = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
    cache = Path(os.environ.get("NUMBA_CACHE_DIR") or caches / "hvd_compress")
    said = python("-m", "hvd_compress.ops.kernels.cpu", cache=cache).stdout
    count, missed = python("-c", ALL_FROM_DISK, cache=cache).stdout.split()
    assert said.startswith(f"{count} CPU kernels are in {cache}") and int(count) > 30 and missed == "0"


def test_without_a_folder_named_for_them_kernels_are_kept_in_the_users_cache(tmp_path: Path) -> None:
    environment = {**os.environ, "XDG_CACHE_HOME": str(tmp_path)}
    environment.pop("NUMBA_CACHE_DIR", None)
    subprocess.run(
        [sys.executable, "-c", FIRST_CALL, "5"], env=environment, check=True, capture_output=True, timeout=120
    )
    assert loops_in(tmp_path / "hvd_compress") == ["scatter._ascending"]


def test_the_command_says_where_no_kernel_can_be_kept(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    environment = {**os.environ, "NUMBA_CACHE_DIR": str(tmp_path / "file")}
    command = [sys.executable, "-m", "hvd_compress.ops.kernels.cpu"]
    run = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=120)
    assert run.returncode == 1 and "NUMBA_CACHE_DIR" in run.stderr
