"""Nodes of two ranks: every way to communicate between them, and within them."""

from __future__ import annotations

import pytest
import torch
from catalogue import BETWEEN_NODES, one_in
from engine.ranks import Job, assert_ranks_equal, leaves_of

pytestmark = [pytest.mark.usefixtures("on_ranks"), pytest.mark.matched("nodes")]


@pytest.mark.parametrize("spec", one_in(6, BETWEEN_NODES))
def test_ranks_stay_equal_and_a_restored_job_goes_on(spec: str) -> None:
    whole = Job(spec).run(3)
    assert_ranks_equal(whole.weights)
    second = Job(spec, whole.model)
    whole.optimizer.close()
    second.compression.load_state_dict(whole.compression.state_dict())
    second.run(range(3, 5))
    straight = Job(spec).run(5)
    assert torch.equal(second.weights, straight.weights)
    for path, leaf in leaves_of(straight.compression).items():
        assert torch.equal(leaf, leaves_of(second.compression)[path]), path


def test_lossless_is_as_without_nodes() -> None:
    plain, tall = (Job(f"topk:ratio=1.0,min_size=0{more}").run(3) for more in ("", ",hierarchical=on"))
    torch.testing.assert_close(tall.weights, plain.weights, rtol=0, atol=1e-6)
    assert tall.compression.stats().bytes_inside > plain.compression.stats().bytes_inside == 0
