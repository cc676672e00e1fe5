"""Messages as bytes."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from hvd_compress.errors import BoundaryError
from hvd_compress.pipeline import wire
from hvd_compress.pipeline.streams import DTYPES, Call, Kind

PAYLOAD = np.arange(9, dtype=np.uint8)


def message(**changes: Any) -> wire.Message:
    return wire.Message(Kind.CODED, Call((4, 3), "float32", True, None), 2, PAYLOAD)._replace(**changes)


def unpack(data: wire.Bytes, **changes: Any) -> wire.Message:
    return wire.unpack(data, **{"microbatch": 2, "fingerprint": 7, "training": True, "sender": "stage 0", **changes})


@given(
    st.lists(st.integers(1, 2**32 - 1), min_size=1, max_size=8),
    st.sampled_from(list(DTYPES)),
    st.booleans(),
    st.one_of(st.none(), st.lists(st.integers(-(2**63), 2**63 - 1), min_size=1)),
    st.sampled_from(list(Kind)),
    st.binary(max_size=30),
)
def test_there_and_back(
    shape: list[int], dtype: str, training: bool, ids: list[int] | None, kind: Kind, data: bytes
) -> None:
    payload = np.frombuffer(data, np.uint8)
    call = Call(tuple(shape), dtype, training, None if ids is None else np.array(ids))
    packed = wire.pack(wire.Message(kind, call, 2, payload), 7)
    assert packed.size == wire.size(payload.size, ids) == 64 + 8 * len(ids or []) + len(data)
    found = unpack(packed, training=training)
    assert (found.kind, found.call[:3], found.microbatch) == (kind, call[:3], 2)
    assert found.payload.tobytes() == data
    assert (found.call.ids is None) == (ids is None) and (ids is None or found.call.ids.tolist() == ids)


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"fingerprint": 8}, "stage 0 was made with another boundary than this stage"),
        ({"microbatch": 3}, "stage 0 trains with microbatch 2, this stage trains with microbatch 3"),
        ({"training": False}, "stage 0 trains with microbatch 2, this stage evaluates"),
    ],
)
def test_another_message_than_the_one_that_must_come(changes: dict[str, Any], words: str) -> None:
    with pytest.raises(BoundaryError, match=words):
        unpack(wire.pack(message(), 7), **changes)


def test_a_stage_that_stopped() -> None:
    with pytest.raises(BoundaryError, match="stage 0 stopped: ValueError: ein Fehler, überall"):
        unpack(wire.stop("ValueError: ein Fehler, überall"))


def test_damaged_messages() -> None:
    packed = wire.pack(message(), 7)
    for data in (packed[:63], packed[1:], np.zeros(100, np.uint8), packed[:0]):
        with pytest.raises(BoundaryError, match="are no message of a boundary"):
            unpack(data)
    longer, kind, axes = np.append(packed, packed[:1]), packed.copy(), packed.copy()
    kind[4], axes[7] = 9, 99
    for data in (packed[:-1], longer, kind, axes):
        with pytest.raises(BoundaryError, match="do not fit its header"):
            unpack(data)


def test_too_many_axes() -> None:
    with pytest.raises(BoundaryError, match="at most 8 axes"):
        wire.pack(message(call=Call((1,) * 9, "float32")), 7)
