"""What is kept of a bucket of PyTorch's."""

from __future__ import annotations

import torch
from worlds import bucket_of

from hvd_compress import parse
from hvd_compress.core.bucketing import Planned
from hvd_compress.core.collectives import World
from hvd_compress.core.state_tree import residual_of
from hvd_compress.torch.bucket_state import BucketState


def test_what_is_forgotten_of_a_gradient_is_what_is_kept_of_its_coordinates() -> None:
    """Factors stay, also where they are as many numbers as there are coordinates."""
    planned = Planned(bucket_of((2, 30), (2, 20)), parse("powersgd:rank=2,min_gain=0").core, (0, 1))
    kept = BucketState(planned, torch.device("cpu"), World(0, 2))
    residual_of(kept.state)[:] = 1
    factors = kept.state.inner.q.clone()
    assert factors.shape == residual_of(kept.state).shape
    kept.forget([1])
    assert residual_of(kept.state).tolist() == [1.0] * 60 + [0.0] * 40
    assert torch.equal(kept.state.inner.q, factors)
