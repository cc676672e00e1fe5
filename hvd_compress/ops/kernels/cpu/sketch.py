"""Count-sketches: several tables of cells, in each of which every key has one; see `hvd_compress.methods.homomorphic`.

Cells are numbered through all tables. Sums are of integers, so that they are exact in any order.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, TypeAlias

import numpy as np
import numpy.typing as npt
from numba import types

from hvd_compress.ops import second_key
from hvd_compress.ops.kernels.cpu.compiled import (
    BYTES,
    INDICES,
    INDICES_OUT,
    INT,
    NOTHING,
    WORD,
    filled,
    given,
    loop,
    part,
)
from hvd_compress.ops.kernels.cpu.noise import scrambled

Indices: TypeAlias = npt.NDArray[np.int64]

_RUN = 16
"""Coordinates that are skipped together if none of them is there."""

_CELLS, _CELLS_OUT = given(types.int64, 2), filled(types.int64, 2)


def found(union: npt.NDArray[np.uint8], most: int) -> Indices:
    """The coordinates at which a bitmap is not zero; of more than ``most``, the first ones, but more than ``most``."""
    indices = np.empty(min(most, union.size) + _RUN, np.int64)
    return indices[: _found(union, most, indices)]


def places(keys: Indices, seeds: Sequence[int], table: int) -> Indices:
    """The cell of each key in each table, by a hash for each: shape (tables, keys)."""
    cells = np.empty((len(seeds), keys.size), np.int64)
    for number, seed in enumerate(seeds):
        _place(keys, np.uint32(seed), np.uint32(second_key(seed)), table, number * table, cells[number])
    return cells


def crowd(cells: Indices, number: int) -> int:
    """The largest number of keys in one of ``number`` cells."""
    return int(_crowd(cells, np.zeros(number, np.int64)))


def peel(cells: Indices, number: int) -> tuple[Indices, Indices]:
    """In which order keys can be read, and from which of ``number`` cells, each when those before are taken away.

    Keys that stay in each other's way are left out.
    """
    order, where = np.empty(cells.shape[1], np.int64), np.empty(cells.shape[1], np.int64)
    count = _peel(cells, np.zeros((number, 2), np.int64), np.empty(number + 1, np.int64), order, where)
    return order[:count], where[:count]


def write(cells: Indices, values: Indices, number: int) -> Indices:
    """Add the value of each key to its cells: the ``number`` sums."""
    sums = np.zeros(number, np.int64)
    _write(cells, values, sums)
    return sums


def read(cells: Indices, order: Indices, where: Indices, sums: Indices) -> Indices:
    """Undo `write`, given what `peel` says; keys that it leaves out get 0."""
    values = np.zeros(cells.shape[1], np.int64)
    _read(cells, order, where, sums.copy(), values)
    return values


@part
def _nothing(run: Any) -> Any:
    """Return whether a whole run is zero."""
    bits = np.uint8(0)
    for i in range(_RUN):
        bits |= run[i]
    return bits == 0


@loop(INT, BYTES, INT, INDICES_OUT)
def _found(union: Any, most: Any, indices: Any) -> Any:
    count = 0
    for start in range(0, union.size, _RUN):
        run = union[start : start + _RUN]
        if run.size == _RUN and _nothing(run):
            continue
        for i in range(run.size):
            indices[count] = start + i  # without a branch: it is written over unless it counts
            count += run[i] != 0
        if count > most:
            break
    return count


@loop(NOTHING, INDICES, WORD, WORD, INT, INT, INDICES_OUT)
def _place(keys: Any, seed: Any, key: Any, table: Any, first: Any, cells: Any) -> None:
    for i in range(keys.size):
        cells[i] = first + (np.int64(scrambled(np.uint32(keys[i]), seed, key)) * table >> 32)


@loop(INT, _CELLS, INDICES_OUT)
def _crowd(cells: Any, counts: Any) -> Any:
    largest = 0
    for row in range(cells.shape[0]):
        for i in range(cells.shape[1]):
            counts[cells[row, i]] += 1
            largest = max(largest, counts[cells[row, i]])
    return largest


@loop(INT, _CELLS, _CELLS_OUT, INDICES_OUT, INDICES_OUT, INDICES_OUT)
def _peel(cells: Any, left: Any, waiting: Any, order: Any, where: Any) -> Any:
    """``left`` has the number and the sum of the keys that are left in a cell, ``waiting`` the cells with one.

    What waits longest comes next, so that the processor can fetch several cells at the same time.
    """
    for row in range(cells.shape[0]):
        for i in range(cells.shape[1]):
            left[cells[row, i], 0] += 1
            left[cells[row, i], 1] += i
    known, done, count = 0, 0, 0
    for cell in range(left.shape[0]):
        waiting[known] = cell  # without a branch, as below: it is written over unless it counts
        known += left[cell, 0] == 1
    while done < known:
        cell = waiting[done]
        done += 1
        if left[cell, 0] != 1:  # its key was found in another cell
            continue
        name = left[cell, 1]
        order[count], where[count] = name, cell
        count += 1
        for row in range(cells.shape[0]):
            other = cells[row, name]
            left[other, 0] -= 1
            left[other, 1] -= name
            waiting[known] = other
            known += left[other, 0] == 1
    return count


@loop(NOTHING, _CELLS, INDICES, INDICES_OUT)
def _write(cells: Any, values: Any, sums: Any) -> None:
    for row in range(cells.shape[0]):
        for i in range(cells.shape[1]):
            sums[cells[row, i]] += values[i]


@loop(NOTHING, _CELLS, INDICES, INDICES, INDICES_OUT, INDICES_OUT)
def _read(cells: Any, order: Any, where: Any, sums: Any, values: Any) -> None:
    for i in range(order.size):
        value = sums[where[i]]
        values[order[i]] = value
        for row in range(cells.shape[0]):
            sums[cells[row, order[i]]] -= value
