"""The ends of a boundary between ranks, with a link inside this process."""

from __future__ import annotations

from contextlib import nullcontext
from typing import Any

import pytest
import torch

from hvd_compress.pipeline.settings import Settings
from hvd_compress.pipeline.torch.end import End
from hvd_compress.pipeline.wire import Bytes


class Loop:
    """Gives the messages of one end to the other."""

    peer = "the other stage"

    def __init__(self) -> None:
        self._under_way: list[Bytes] = []

    def send(self, data: Bytes) -> None:
        self._under_way.append(data)

    def expect(self, count: int) -> None:
        pass

    def receive(self, timeout: float) -> Bytes:
        return self._under_way.pop(0)

    def flush(self, timeout: float) -> None:
        pass


def sent(spec: str, *contexts: Any) -> torch.Tensor:
    """What arrives in two steps, each end within a context of its own."""
    link, settings = Loop(), Settings.of(spec, "none", "ef")
    ends = [End(settings, "boundary0", link, ahead, torch.device("cpu"), 1.0) for ahead in (True, False)]
    arrived = []
    for step in range(2):
        x = torch.randn(6, 4, 5, generator=torch.Generator().manual_seed(step))
        with contexts[0]:
            ends[0].send(x, 0, training=True)
        with contexts[1]:
            arrived.append(ends[1].receive(0, training=True)[0])
    return torch.stack(arrived)


@pytest.mark.parametrize("spec", ["powersgd:rank=2", "topk:ratio=0.3", "qsgd"])
def test_autocast_at_one_end_changes_nothing(spec: str) -> None:
    expected = sent(spec, nullcontext(), nullcontext())
    cast = torch.autocast("cpu", torch.bfloat16)
    for contexts in ((cast, nullcontext()), (nullcontext(), cast), (cast, cast)):
        assert torch.equal(sent(spec, *contexts), expected)
