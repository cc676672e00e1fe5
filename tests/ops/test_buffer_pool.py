"""Memory is used again as soon as nobody refers to it, and never before."""

from __future__ import annotations

import pytest

from hvd_compress.ops.buffer_pool import BufferPool

N = 2**19


def test_memory_that_is_dropped_is_given_out_again() -> None:
    spare = BufferPool()
    first = spare.take(N)
    address = first.ctypes.data
    del first
    assert spare.take(N).ctypes.data == address


def test_memory_in_use_is_not_given_out() -> None:
    spare = BufferPool()
    first = spare.take(N)
    first.fill(1)
    view = first[10:20]
    del first
    second = spare.take(N)
    second.fill(2)
    assert (view == 1).all()


def test_what_a_tensor_holds_is_in_use() -> None:
    torch = pytest.importorskip("torch")
    spare = BufferPool()
    tensor = torch.from_numpy(spare.take(N)).fill_(1)[3:]
    spare.take(N).fill(2)
    assert (tensor == 1).all()


@pytest.mark.parametrize(("kept", "wanted", "fits"), [(N, N - 100, True), (N, N + 1, False), (2 * N, N, False)])
def test_it_is_given_out_where_it_fits_about(kept: int, wanted: int, fits: bool) -> None:
    spare = BufferPool()
    spare.take(kept)
    base = spare.take(wanted).base
    assert base is not None and base.size == (kept if fits else wanted) + 16


def test_small_arrays_are_always_new() -> None:
    spare = BufferPool()
    assert spare.take(10).base is None


def test_several_arrays_take_turns() -> None:
    pool = BufferPool(2)
    held = [pool.take(N) for _ in range(3)]
    assert len({array.ctypes.data for array in held}) == 3
    freed = held.pop().ctypes.data
    assert pool.take(N).ctypes.data == freed
    assert all(array.ctypes.data % 64 == 0 for array in held)
