"""One rank sends what cannot be: all refuse it in that step, in the same words, and can go on as if it had not."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator

import pytest
import torch
from engine.ranks import Job, assert_ranks_equal, everyone, leaves_of, rank, size
from torch import Tensor, nn

from hvd_compress.core.collectives import AllGather, AllReduce, Collective
from hvd_compress.errors import ExchangeError
from hvd_compress.transport.rank_threads import ThreadHandle, ThreadTransport

pytestmark = pytest.mark.usefixtures("on_ranks")

Damage = Callable[[Tensor], Tensor]


def ends_in(value: int) -> Damage:
    """Other last two bytes: the last index."""
    return lambda payload: torch.cat([payload[:-2], payload.new_tensor([value, value])])


LENGTH = "a payload has the wrong length"
INDEX = "sent indices that do not ascend within 0 .. 2047"

FAULTS: dict[str, list[tuple[Damage, str]]] = {
    "topk:ratio=0.05": [(ends_in(255), INDEX), (ends_in(0), INDEX)],
    "threshold:threshold=0.01": [
        (lambda payload: payload[:-6], "has the wrong length"),
        (lambda payload: torch.cat([torch.full((4,), 255, dtype=torch.uint8), payload[4:]]), "a negative number"),
    ],
    "scalecom:ratio=0.05": [(lambda indices: indices - 5000, "the leader sent indices")],
}
"""Lengths of arrays that are not ragged are told apart by the transport itself."""


class _Fault(threading.local):
    """What the last rank does to its payloads."""

    damage: Damage | None = None


@pytest.fixture
def fault(monkeypatch: pytest.MonkeyPatch) -> Iterator[_Fault]:
    """A rank may damage what it sends."""
    fault, original = _Fault(), ThreadTransport.start

    def start(self: ThreadTransport, message: Collective, name: str) -> ThreadHandle:
        # ScaleCom's leader sends indices as a sum; a vote of two integers is none of them.
        sums = isinstance(message, AllReduce) and message.array.dtype == torch.int32 and message.op == "sum"
        indices = sums and message.array.numel() > 2
        if fault.damage is not None and (isinstance(message, AllGather) or indices) and "test" not in self.channel:
            message = message._replace(array=fault.damage(message.array))
        return original(self, message, name)

    monkeypatch.setattr(ThreadTransport, "start", start)
    yield fault


def train(job: Job, steps: range) -> None:
    """With a loss for a model of one matrix."""
    job.run(steps, lambda model, x, y: model(x).square().mean())


@pytest.mark.parametrize("spec", FAULTS)
def test_a_damaged_payload_is_refused_by_all_and_leaves_no_trace(spec: str, fault: _Fault) -> None:
    def model() -> nn.Module:
        layer = nn.Linear(32, 64, bias=False)
        with torch.no_grad():
            layer.weight.copy_(torch.randn(64, 32, generator=torch.Generator().manual_seed(0)) / 6)
        return layer

    job, calm = Job(spec, model()), Job(spec, model())
    train(job, range(2))
    train(calm, range(2))
    for step, (damage, message) in enumerate(FAULTS[spec], start=2):
        before = leaves_of(job.compression)
        fault.damage = damage if rank() == size() - 1 else None
        with pytest.raises(ExchangeError, match=message) as error:
            train(job, range(99, 100))
        fault.damage = None
        said = str(error.value)
        assert everyone(said) == [said] * size() and "compare" in said
        job.optimizer.load_state_dict(job.optimizer.state_dict())  # forgets the step that has failed
        for path, leaf in leaves_of(job.compression).items():
            assert torch.equal(leaf, before[path]), path
        job.optimizer.zero_grad()
        train(job, range(step, step + 1))
        train(calm, range(step, step + 1))
        assert torch.equal(job.weights, calm.weights)
        assert_ranks_equal(job.weights)
