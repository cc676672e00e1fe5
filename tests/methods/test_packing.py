"""Codes of a few bits: packed as documented, unpacked again, and summed with saturation."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
from catalogue import one_in
from hypothesis import given
from hypothesis import strategies as st
from worlds import FRAMEWORKS, Arr, bucket_of, ops_of

from hvd_compress.core.bucket import Bucket
from hvd_compress.core.collectives import (
    AllGather,
    AllToAll,
    Drive,
    Exchange,
    Exchanging,
    SaturatingSum,
    World,
)
from hvd_compress.core.method import Method
from hvd_compress.ops import Ops
from hvd_compress.ops.arrays import Array
from hvd_compress.ops.packing import packed_size
from hvd_compress.transport.lockstep import lockstep
from hvd_compress.transport.lowering import LACKS, lower

NUMPY = ops_of("numpy")


def codes_of(bits: int, n: int, seed: int = 0) -> Arr:
    """Random codes; with the largest among them."""
    codes = np.random.default_rng([seed, bits, n]).integers(0, 2**bits, n).astype(np.uint8)
    codes[n // 2 : n // 2 + 1] = 2**bits - 1
    return codes


@given(st.integers(1, 8), st.data())
def test_any_codes_come_back(bits: int, data: st.DataObject) -> None:
    codes = np.array(data.draw(st.lists(st.integers(0, 2**bits - 1), min_size=1, max_size=70)), np.uint8)
    packed = NUMPY.pack(codes.copy(), bits)
    assert packed.dtype == np.uint8 and packed.shape == (packed_size(codes.size, bits),)
    np.testing.assert_array_equal(NUMPY.unpack(packed, bits, codes.size), codes)


@pytest.mark.parametrize("framework", FRAMEWORKS)
@pytest.mark.parametrize("bits", range(1, 9))
def test_frameworks_pack_alike(framework: str, bits: int) -> None:
    """The same bytes as numpy, at every length about the ends of bytes."""
    ops = ops_of(framework)
    for n in [*range(1, 20), 63, 64, 65, 511, 512, 513, 1000, 1024]:
        codes = codes_of(bits, n)
        packed = ops.pack(ops.constant(codes), bits)
        assert ops.dtype(packed) == "uint8"
        np.testing.assert_array_equal(np.asarray(packed), NUMPY.pack(codes, bits))
        again = ops.unpack(packed, bits, n)
        assert ops.dtype(again) == "uint8"
        np.testing.assert_array_equal(np.asarray(again), codes)


@pytest.mark.parametrize(
    ("bits", "codes", "packed"),
    [
        (1, [1, 0, 1, 1, 0, 0, 0, 1], [0b10001101]),
        (1, [1, 0, 1, 1, 0, 0, 0, 1, 1], [0b00010011, 0b00001010]),  # runs 10 11 00 01 1.
        (2, [3, 0, 1, 2, 0, 3], [0b00_00_01_11, 0b00_11_10_00]),  # runs 30 12 03, and one of padding
        (4, [1, 2, 3, 15, 9], [0xF1, 0x92, 0x03]),  # runs 1 2 3 and 15 9 .
        (8, [255, 0, 7], [255, 0, 7]),
        (3, [1, 6, 7, 4], [0b00_11_10_01, 0b1110]),  # low bits 1 2 3 0, high bits 0 1 1 1
        (5, [17, 14], [0xE1, 0b01]),
        (6, [0x31, 0x0F], [0xF1, 0b0011]),
        (7, [0b101_0110, 0b010_1001], [0x96, 0b10_01, 0b01]),  # 4 bits, then 2, then 1
    ],
)
def test_layout(bits: int, codes: list[int], packed: list[int]) -> None:
    """Byte by byte, as the module describes it: a format that other ranks read."""
    assert NUMPY.pack(np.array(codes, np.uint8), bits).tolist() == packed


def test_groups() -> None:
    """More than 512 codes are packed group by group, so that byte 256 begins the second group of 4-bit codes."""
    codes = codes_of(4, 700)
    packed = NUMPY.pack(codes, 4)
    np.testing.assert_array_equal(packed[:256], codes[:256] + 16 * codes[256:512])
    np.testing.assert_array_equal(packed[256:], codes[512:606] + 16 * codes[606:])


@given(st.integers(1, 8), st.integers(1, 10_000))
def test_size(bits: int, n: int) -> None:
    """The bits that there are, and less than a byte to fill up each of the runs that a width is made of."""
    parts = bin(bits).count("1")
    assert n * bits <= 8 * packed_size(n, bits) <= n * bits + 7 * parts
    assert packed_size(8 * n, bits) == n * bits


class Summing(Method):
    """Sends the codes that the gradient holds."""

    def __init__(self, bits: int, zero: int) -> None:
        self.bits, self.zero = bits, zero

    def exchange(
        self, ops: Ops, bucket: Bucket, x: Array, state: object, world: World, return_error: bool = False
    ) -> Exchanging:
        codes = ops.pack(ops.cast(x, "uint8"), self.bits)
        summed = yield SaturatingSum(codes, self.bits, self.zero)
        return Exchange(ops.unpack(summed, self.bits, bucket.numel), ())


def saturated(codes: list[Arr], bits: int, zero: int) -> Arr:
    """The code of the sum of what the codes stand for, clipped to what codes can stand for."""
    total = sum(code.astype(int) - zero for code in codes)
    return np.clip(total, -zero, 2**bits - 1 - zero) + zero


@pytest.mark.parametrize("framework", FRAMEWORKS)
@pytest.mark.parametrize(("ranks", "bits"), one_in(3, itertools.product(range(1, 8), [1, 2, 4, 8])))
def test_saturating_sum(framework: str, ranks: int, bits: int) -> None:
    """Against plain integers, with zero at the bottom, in the middle and at the top, and at lengths that do not fit."""
    ops = ops_of(framework)
    for zero in sorted({0, 2 ** (bits - 1), 2**bits - 1}):
        for n in (1, 8, 37, 203):
            codes = [codes_of(bits, n, seed) for seed in range(ranks)]
            xs = [code.astype(np.float32) for code in codes]
            results = lockstep(ops, Summing(bits, zero), bucket_of((n,)), xs, [()] * ranks)
            for result in results:
                np.testing.assert_array_equal(np.asarray(result.total), saturated(codes, bits, zero))


@pytest.mark.parametrize("extreme", ["low", "high"])
@pytest.mark.parametrize("bits", [1, 2, 4, 8])
def test_sums_stop_at_the_ends(bits: int, extreme: str) -> None:
    """Seven ranks at one end: the sum is that end, where wrapping round would give something else."""
    top, zero = 2**bits - 1, 2 ** (bits - 1)
    code = np.full(50, 0 if extreme == "low" else top, np.float32)
    (first, *_) = lockstep(NUMPY, Summing(bits, zero), bucket_of((50,)), [code] * 7, [()] * 7)
    # With 1 bit and zero at 1, the codes stand for -1 and 0: nothing is above zero.
    np.testing.assert_array_equal(first.total, code)


@pytest.mark.parametrize("ranks", [1, 2, 3, 7])
def test_each_rank_serves_its_part(ranks: int) -> None:
    """The traffic of a ring: a part from everyone to each server, and a part from each to everyone."""
    world, n, part = World(0, ranks), 100, -(-100 // ranks)
    exchanging = lower(Summing(8, 0).exchange(NUMPY, bucket_of((n,)), np.zeros(n), (), world), NUMPY, world, LACKS)
    there = next(exchanging)
    assert isinstance(there, AllToAll) and there.array.shape == (ranks, part) and there.array.dtype == np.uint8
    back = exchanging.send(np.zeros((ranks, part), np.uint8))
    assert isinstance(back, AllGather) and back.array.shape == (part,) and back.array.dtype == np.uint8
    assert not back.ragged


def test_other_messages_pass_unchanged() -> None:
    asked = AllGather(np.zeros(3, np.uint8))

    def exchange() -> Exchanging:
        reply = yield asked
        return Exchange(reply, ())

    drive = Drive(lower(exchange(), NUMPY, World(0, 2), LACKS))
    assert drive.message is asked
    drive.resume("reply")
    assert drive.ended.total == "reply"
