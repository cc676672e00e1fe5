"""Compilation of loops: each at its first call, once for each kind of processor, and then kept on disk."""

from __future__ import annotations

import hashlib
import logging
import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import cache
from pathlib import Path
from tempfile import TemporaryFile
from typing import Any

import numba
from numba import types
from numba.core import config
from numba.core.compiler_lock import global_compiler_lock
from numba.core.registry import cpu_target

_CONFIG: Any = config
_LOG = logging.getLogger("hvd_compress")

NO_FOLDER = "no folder to keep them in is writable; set NUMBA_CACHE_DIR to one that is"


def given(dtype: types.Type, axes: int = 1) -> types.Array:
    """The type of an array that is only read, so that it may be read-only."""
    return types.Array(dtype, axes, "C", readonly=True)


def filled(dtype: types.Type, axes: int = 1) -> types.Array:
    """The type of an array that is written."""
    return types.Array(dtype, axes, "C")


def several(dtype: types.Type, count: int) -> types.Type:
    """The type of a tuple."""
    return types.UniTuple(dtype, count)  # type: ignore[no-untyped-call]


FLOATS, FLOATS_OUT = given(types.float32), filled(types.float32)
BYTES, BYTES_OUT = given(types.uint8), filled(types.uint8)
ROWS = given(types.uint8, 2)
INDICES, INDICES_OUT = given(types.int64), filled(types.int64)
INTEGERS, INTEGERS_OUT = given(types.int32), filled(types.int32)
SHORTS, SHORTS_OUT = given(types.uint16), filled(types.uint16)
INT, FLOAT, WORD, FLAG, NOTHING = types.int64, types.float32, types.uint32, types.boolean, types.void


LOOPS: list[Any] = []
"""All loops, in the order in which they are declared."""


def loop(result: types.Type, *arguments: types.Type) -> Callable[[Callable[..., Any]], Any]:
    """Compile a function for arguments of these types at its first call; it runs without the interpreter's lock.

    Later calls go straight to the compiled code. What two loops share is a `part`.
    """

    def declare(function: Callable[..., Any]) -> Any:
        dispatcher: Any = numba.njit(nogil=True)(function)

        def compile_declared(*_: Any) -> Any:
            _compile(dispatcher, result(*arguments))
            return dispatcher

        dispatcher._compile_for_args = compile_declared  # numba's hook for a call that no compiled code fits
        LOOPS.append(compile_declared)
        return dispatcher

    return declare


def _compile(dispatcher: Any, signature: Any) -> None:
    """Compile a loop, or load it from disk; other threads that call it wait."""
    with global_compiler_lock:
        if not dispatcher._can_compile:  # another thread was first
            return
        with _kept() as folder:
            if folder is not None:
                dispatcher.enable_caching()
        dispatcher.compile(signature)
        dispatcher.disable_compile()
    if folder is None or dispatcher.stats.cache_misses:
        _announce(folder)


def part(function: Callable[..., Any]) -> Any:
    """Let loops call a function; it becomes part of them."""
    return numba.njit(forceinline=True)(function)


def total(function: Callable[..., Any]) -> Any:
    """Let loops call a function that adds up floats in the order that is fastest."""
    return numba.njit(fastmath={"reassoc"}, forceinline=True)(function)


@contextmanager
def _kept() -> Iterator[Path | None]:
    """Have numba keep loops in the folder, if there is one, that are set up while this is open."""
    before, folder = _CONFIG.CACHE_DIR, cache_folder()
    _CONFIG.CACHE_DIR = "" if folder is None else str(folder)
    try:
        yield folder
    finally:
        _CONFIG.CACHE_DIR = before


@cache
def cache_folder() -> Path | None:
    """Return the folder for what is compiled of these sources for this kind of processor; None if it is not writable.

    A change of any source is a change of all. Processors have folders apart, as numba's own index of a folder takes
    no lock: machines that share it and compile at the same time could each load what another has compiled.
    """
    sources = sorted(Path(__file__).parent.glob("*.py"))
    processor: tuple[str, ...] = cpu_target.target_context.codegen().magic_tuple()
    facts = [repr((numba.__version__, processor)).encode(), *(source.read_bytes() for source in sources)]
    name = hashlib.sha256(b"".join(facts)).hexdigest()[:16]
    try:
        home = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
        folder = Path(_CONFIG.CACHE_DIR or home / "hvd_compress") / f"kernels-{name}"
        folder.mkdir(parents=True, exist_ok=True)
        with TemporaryFile(dir=folder):  # whose name no other process has, be it forked from the same one
            pass
    except (OSError, RuntimeError):  # no such user, or no right to write
        return None
    return folder


@cache
def _announce(folder: Path | None) -> None:
    kept = f"once; they are kept in {folder}" if folder else f"at every start: {NO_FOLDER}"
    _LOG.warning("compiling CPU kernels when they are first used (%s)", kept)
