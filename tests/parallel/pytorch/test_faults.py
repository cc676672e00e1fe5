"""One rank sends what cannot be: all refuse it in that step, in the same words, and can go on as if it had not."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import horovod.torch as hvd
import pytest
import torch
from parallel.pytorch.training import SIZE, Job, assert_ranks_equal, everyone, leaves_of
from torch import Tensor, nn

from hvd_compress.core.collectives import AllGather, Collective
from hvd_compress.errors import ExchangeError
from hvd_compress.torch.horovod.transport import HorovodTransport

Damage = Callable[[Tensor], Tensor]


LAST = SIZE - 1  # behind its payload nothing follows that could be taken for a part of it
LENGTH = "a payload has the wrong length"
INDEX = f"rank {LAST} sent indices that do not ascend within 0 .. 2047"

FAULTS: dict[str, list[tuple[Damage, str]]] = {
    "topk:ratio=0.05": [
        (lambda payload: payload[:-1], LENGTH),
        (lambda payload: torch.cat([payload, payload[:6]]), LENGTH),
        (lambda payload: torch.cat([payload[:-2], payload.new_tensor([255, 255])]), INDEX),
    ],
    "threshold:threshold=0.01": [(lambda payload: payload[:-6], LENGTH.removeprefix("a payload "))],
}
"""More are tried on ranks as threads; other lengths only here, where Horovod lets ranks send them."""


def train(job: Job, steps: range) -> None:
    """With a loss for a model of one matrix."""
    job.run(steps, lambda model, x, y: model(x).square().mean())


@pytest.mark.parametrize("spec", FAULTS)
def test_a_damaged_payload_is_refused_by_all_and_leaves_no_trace(spec: str, monkeypatch: pytest.MonkeyPatch) -> None:
    def model() -> nn.Module:
        with torch.random.fork_rng():
            torch.manual_seed(0)
            return nn.Linear(32, 64, bias=False)

    job, calm = Job(spec, model()), Job(spec, model())
    train(job, range(2))
    train(calm, range(2))
    original = HorovodTransport.start
    for step, (damage, message) in enumerate(FAULTS[spec], start=2):
        before = leaves_of(job.compression)

        def start(self: HorovodTransport, message: Collective, name: str, damage: Damage = damage) -> Any:
            if isinstance(message, AllGather) and hvd.rank() == LAST:
                message = message._replace(array=damage(message.array))
            return original(self, message, name)

        monkeypatch.setattr(HorovodTransport, "start", start)
        said = ""
        try:
            train(job, range(99, 100))
        except ExchangeError as error:
            said = str(error)
        assert everyone(said) == [said] * hvd.size()
        assert message in said and "compare" in said

        monkeypatch.setattr(HorovodTransport, "start", original)
        job.optimizer.load_state_dict(job.optimizer.state_dict())  # Horovod forgets the step that has failed
        for path, leaf in leaves_of(job.compression).items():
            assert torch.equal(leaf, before[path]), path
        job.optimizer.zero_grad()
        train(job, range(step, step + 1))
        train(calm, range(step, step + 1))
        assert torch.equal(job.weights, calm.weights)
        assert_ranks_equal(job.weights)
