"""How loops are compiled: when their module is imported, once for each kind of processor, and then kept on disk."""

from __future__ import annotations

import hashlib
import logging
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import cache
from pathlib import Path
from tempfile import TemporaryFile
from typing import Any

import numba
from numba import types
from numba.core import config
from numba.core.registry import cpu_target

_CONFIG: Any = config
_LOG = logging.getLogger("hvd_compress")


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


def loop(result: types.Type, *arguments: types.Type) -> Callable[[Callable[..., Any]], Any]:
    """Compile a function for arguments of these types; it runs without the interpreter's lock."""

    def compile_it(function: Callable[..., Any]) -> Any:
        with _kept() as folder:
            compiled = numba.njit(result(*arguments), nogil=True, cache=folder is not None)(function)
        if folder is None or compiled.stats.cache_misses:
            _announce(folder)
        return compiled

    return compile_it


def part(function: Callable[..., Any]) -> Any:
    """Let loops call a function; it becomes part of them."""
    return numba.njit(forceinline=True)(function)


def total(function: Callable[..., Any]) -> Any:
    """Let loops call a function that adds up floats in the order that is fastest."""
    return numba.njit(fastmath={"reassoc"}, forceinline=True)(function)


@contextmanager
def _kept() -> Iterator[Path | None]:
    """Where compiled loops are kept while this is open; None if there is no place."""
    before, folder = _CONFIG.CACHE_DIR, _folder()
    _CONFIG.CACHE_DIR = "" if folder is None else str(folder)
    try:
        yield folder
    finally:
        _CONFIG.CACHE_DIR = before


@cache
def _folder() -> Path | None:
    """The folder for what is compiled of these sources for this kind of processor.

    A change of any source is a change of all. Processors have folders apart, as numba's own index of a folder takes
    no lock: machines that share it and compile at the same time could each load what another has compiled.
    """
    sources = sorted(Path(__file__).parent.glob("*.py"))
    processor: tuple[str, ...] = cpu_target.target_context.codegen().magic_tuple()
    facts = [repr((numba.__version__, processor)).encode(), *(source.read_bytes() for source in sources)]
    name = hashlib.sha256(b"".join(facts)).hexdigest()[:16]
    base = Path(_CONFIG.CACHE_DIR) if _CONFIG.CACHE_DIR else Path("~/.cache/hvd_compress").expanduser()
    folder = base / f"kernels-{name}"
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with TemporaryFile(dir=folder):  # whose name no other process has, be it forked from the same one
            pass
    except (OSError, RuntimeError):  # no such user, or no right to write
        return None
    return folder


@cache
def _announce(folder: Path | None) -> None:
    if folder is None:
        where = "no folder to keep them in can be written, so every start does this; NUMBA_CACHE_DIR can name one"
    else:
        where = f"once; they are kept in {folder}"
    _LOG.warning("compiling the CPU kernels, which takes about half a minute (%s)", where)
