"""Gossip of two ranks or more, over `torch.distributed` and over Horovod; `tests/local` has the algorithms."""

from __future__ import annotations

import random
from copy import deepcopy
from pathlib import Path
from typing import Any

import horovod.torch as hvd
import pytest
import torch
from parallel.pytorch import test_local_steps
from parallel.pytorch.test_local_steps import adamw, batch, close, sgd
from parallel.pytorch.training import SIZE, assert_ranks_equal, everyone, make_model
from torch import Tensor, nn

import hvd_compress.torch
from hvd_compress.distributed import Compression, FullState, Gossip
from hvd_compress.errors import DisagreementError, SpecError, StateError, UnsupportedError

pytestmark = [
    pytest.mark.usefixtures("process_group"),
    pytest.mark.skipif(SIZE > 2, reason="Horovod was started with process sets of its own; tests/local has 8 ranks"),
]

KINDS: dict[str, Any] = {"group": Gossip, "horovod": hvd_compress.torch.Gossip}
both = pytest.mark.parametrize("kind", KINDS)

METHODS = ["powergossip@ring", "powergossip:rank=2@ring", "none@exponential"]
METHODS += ["topk:ratio=0.2,min_size=0,feedback=ef21@ring", "qsgd:bits=4,min_size=0,feedback=ef21@ring"]


class Training(test_local_steps.Training):
    """A model of this rank that gossips with those of the others."""

    def __init__(self, kind: str, graph: Any, make: Any = sgd, **options: Any) -> None:
        self.model = make_model()
        self.optimizer = make(list(self.model.parameters()))
        self.gossip = KINDS[kind](self.optimizer, graph, **options)
        self.steps = 0


def mean(tensor: Tensor) -> Tensor:
    return torch.stack(everyone(tensor)).mean(0)


@both
@pytest.mark.parametrize("spec", METHODS)
def test_the_mean_is_kept_and_models_approach_it(kind: str, spec: str) -> None:
    job = Training(kind, spec, step_size=0.5 if "ef21" in spec else 1.0).run(5)
    kept, apart = mean(job.weights), torch.stack(everyone(job.weights)).std(0).norm()
    for group in job.optimizer.param_groups:
        group["lr"] = 0.0
    job.run(80)
    close(mean(job.weights), kept)
    assert torch.stack(everyone(job.weights)).std(0).norm() < 0.1 * apart


@both
def test_gradients_are_of_the_models_before_they_gossip(kind: str) -> None:
    """As in the authors' code: the gradient, then gossip, then the step of the optimizer."""
    job = Training(kind, "none@ring").run(1)
    first = job.weights
    assert not torch.equal(*everyone(first)[:2]), "nothing has been exchanged in the first step"
    x, y = batch(1, hvd.rank())
    job.optimizer.zero_grad()
    nn.functional.cross_entropy(job.model(x), y).backward()  # type: ignore[no-untyped-call]
    gradient = torch.cat([p.grad.flatten() for p in job.model.parameters() if p.grad is not None])
    others = [other for rank, other in enumerate(everyone(first)) if rank != hvd.rank()]
    close(job.run(1).weights, first + (2 / 3) * (others[0] - first) - 0.1 * gradient)


@both
def test_the_end_and_the_evaluation(kind: str) -> None:
    job = Training(kind, "ring", adamw).run(4)
    own, expected = job.weights, mean(job.weights)
    with job.gossip.averaged():
        close(job.weights, expected)
    assert torch.equal(job.weights, own)
    job.gossip.finish()
    close(job.weights, expected)
    assert_ranks_equal(job.weights)
    job.gossip.remove()
    alone = job.weights
    sent = job.gossip.stats().bytes_sent
    job.run(2)
    assert job.gossip.stats().bytes_sent == sent and not torch.equal(job.weights, alone)


@both
def test_bytes_are_one_vector_for_each_matrix(kind: str) -> None:
    """In turns by rows and columns; vectors go as they are."""
    job = Training(kind, "ring").run(1)
    assert job.gossip.stats().bytes_sent == 0
    job.run(2)
    shapes = [p.shape for p in job.model.parameters()]
    vectors = sum(4 * shape.numel() for shape in shapes if len(shape) == 1)
    matrices = sum(4 * sum(shape) for shape in shapes if len(shape) == 2)
    payload = job.gossip.stats().bytes_sent - 2 * vectors - matrices
    assert 0 <= payload <= 128, "what ranks agree on besides"


@pytest.mark.parametrize("seed", range(30))
def test_a_job_goes_on_from_any_step_bit_for_bit(seed: int, tmp_path: Path) -> None:
    generator = random.Random(seed)
    kind, spec, make = generator.choice(list(KINDS)), generator.choice(METHODS), generator.choice([sgd, adamw])
    options = {"iterations": generator.randint(1, 3), "step_size": generator.choice([0.5, 1.0])}
    first, more = generator.randint(0, 6), generator.randint(1, 6)
    folder = hvd.broadcast_object(str(tmp_path)) if seed % 2 else ""
    job = Training(kind, spec, make, **options).run(first)
    state = deepcopy((job.gossip.state_dict(), job.model.state_dict(), job.optimizer.state_dict()))
    if folder:
        job.gossip.save(folder)
    job.run(more)

    other = Training(kind, spec, make, **options)
    other.steps = first
    if folder:
        other.gossip.load(folder)
    else:
        other.gossip.load_state_dict(state[0])
    other.model.load_state_dict(state[1])
    other.optimizer.load_state_dict(state[2])
    assert torch.equal(other.run(more).weights, job.weights), (kind, spec, options, first, more)


def test_a_checkpoint_that_all_ranks_share() -> None:
    job = Training("group", "ring").run(3)
    state = deepcopy((FullState(job.gossip).state_dict(), job.model.state_dict()))
    other = Training("group", "ring")
    FullState(other.gossip).load_state_dict(state[0])
    other.model.load_state_dict(state[1])
    other.steps = 3
    assert torch.equal(other.run(3).weights, job.run(3).weights)


def test_wrong_states_change_nothing() -> None:
    job = Training("group", "ring").run(3)
    state, before = job.gossip.state_dict(), job.weights
    other_graph, other_size = deepcopy(state), deepcopy(state)
    other_graph["sessions"]["gossip"]["buckets"][""]["edges"] += 1
    other_size["sessions"]["gossip"]["size"] = 5
    wrong: list[tuple[Any, str]] = [
        ({}, "not a compressor's state"),
        (Compression.parse("topk:ratio=0.1").state_dict(), "none of Gossip"),
        (Training("group", "powergossip:rank=2@ring").run(2).gossip.state_dict(), "rank=2"),
        (other_graph, "another graph than 'ring'"),
        (other_size, "one of 5 ranks"),
    ]
    for given, message in wrong:
        with pytest.raises(StateError, match=message):
            job.gossip.load_state_dict(given)
    assert torch.equal(job.weights, before)
    assert torch.equal(job.run(3).weights, Training("group", "ring").run(6).weights)


@both
def test_a_rank_that_is_not_finite_stays_alone(kind: str, caplog: pytest.LogCaptureFixture) -> None:
    job = Training(kind, "ring").run(3)
    if hvd.rank() == SIZE - 1:
        with torch.no_grad():
            next(job.model.parameters())[0, 0] = torch.nan
    job.run(3)
    assert bool(job.weights.isfinite().all()) == (hvd.rank() != SIZE - 1)
    assert caplog.text.count("not finite in step 4") == 1


@both
def test_a_layer_that_has_stood_still_is_heard_again(kind: str) -> None:
    """A difference of zero leaves no factor from which to go on, so the next one begins anew."""
    job = Training(kind, "ring")
    for _ in range(4):  # no gradients at all
        job.optimizer.step()
    with torch.no_grad():
        for p in job.model.parameters():
            p.add_(hvd.rank())
    for _ in range(30):
        job.optimizer.step()
    first, *others = everyone(job.weights)
    close(first, others[0])


def test_all_begin_with_the_parameters_of_the_first_rank() -> None:
    parameter = nn.Parameter(torch.full((3,), float(hvd.rank())))
    Gossip(torch.optim.SGD([parameter], lr=1.0))
    assert not parameter.any()


@both
def test_two_optimizers_share_a_compression(kind: str) -> None:
    spec = "topk:ratio=0.1,min_size=0,feedback=ef21"
    kinds: dict[str, Any] = {"group": Compression, "horovod": hvd_compress.torch.Compression}
    shared = kinds[kind].parse(spec)
    pair = [Training(kind, "ring", compression=shared) for _ in range(2)]
    apart = [Training(kind, "ring", compression=spec) for _ in range(2)]
    for part in (0, 1, 1, 0, 1, 0, 0, 1):
        pair[part].run(1)
        apart[part].run(1)
    assert all(torch.equal(a.weights, b.weights) for a, b in zip(pair, apart, strict=True))


def test_what_is_not_allowed() -> None:
    for error, message, graph, options in (
        (SpecError, "graph='star' is not known", "star", {}),
        (SpecError, "ranks are 0 to 1", [(0, 2)], {}),
        (SpecError, "add feedback=ef21", "ring", {"compression": "topk"}),
        (SpecError, "hvd_compress.distributed", "ring", {"compression": hvd_compress.torch.Compression.none}),
        (UnsupportedError, "Gossip is not supported with .*preconditioned", "ring", {"compression": UPDATES}),
    ):
        with pytest.raises(error, match=message):
            Training("group", graph, **options)
    with pytest.raises(DisagreementError, match=r"settings: rank 0 has .*step_size=0.5.* rank 1 has .*step_size=1"):
        Training("group", "ring", step_size=0.5 + 0.5 * (hvd.rank() > 0))


UPDATES = "topk:ratio=0.1,feedback=ef21,preconditioned=on"
