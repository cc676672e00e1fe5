"""FSDP2 with ``gather=``: all ranks compute with the same decoded parameters, and nothing else changes."""

from __future__ import annotations

from collections.abc import Callable
from itertools import chain
from typing import Any

import horovod.torch as hvd
import numpy as np
import pytest
import torch
from parallel.pytorch.test_fsdp import MODES, Job, each_layer, mesh
from parallel.pytorch.training import SIZE, assert_ranks_equal, batch, make_model
from torch import Tensor, nn
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

from hvd_compress.distributed import Compression
from hvd_compress.distributed.sharded_gather import CODES
from hvd_compress.errors import DisagreementError, SpecError, UnsupportedError
from hvd_compress.ops.numpy import NumpyOps

pytestmark = pytest.mark.usefixtures("process_group")


def seen_by(model: nn.Module) -> list[dict[str, Tensor]]:
    """Return a list that receives the parameters with which each pass of a layer computes, by name."""
    seen: list[dict[str, Tensor]] = []

    def note(layer: nn.Module, *_: Any) -> None:
        seen.append({name: p.detach().clone() for name, p in layer.named_parameters(recurse=False)})

    def note_in_backward(layer: nn.Module, _: Any, output: Any) -> None:
        if output.requires_grad:
            output.register_hook(lambda _: note(layer))

    for layer in model.children():
        if isinstance(layer, nn.Linear):  # FSDP's hooks come first: those before both passes gather
            layer.register_forward_pre_hook(note)
            layer.register_forward_hook(note_in_backward)
    return seen


def decoded(exact: Tensor, gather: str) -> Tensor:
    """Return what ranks compute with: each block of a shard decoded by itself."""
    ops, code, shards = NumpyOps(), CODES[gather], []
    for shard in exact.chunk(SIZE):
        flat = shard.flatten().numpy()
        blocks = np.pad(flat, (0, -flat.size % code.block)).reshape(-1, code.block)
        coded = [ops.quantise(block, code)[0] for block in blocks]
        found = [np.asarray(ops.dequantise(data[None], code, code.block, "float32")) for data in coded]
        shards.append(np.concatenate(found)[: flat.size].reshape(shard.shape))
    return torch.from_numpy(np.concatenate(shards))


@pytest.mark.parametrize("gather", CODES)
def test_all_ranks_compute_with_the_decoded_values(gather: str) -> None:
    """In both passes; what has one dimension is exact, and so are the shards, which the optimizer updates."""
    job = Job("none", gather=gather)
    exact = {name: p.full_tensor().detach() for name, p in job.model.named_parameters()}
    seen = seen_by(job.model)
    job.backward(0)
    layers = [layer for layer in job.model.children() if isinstance(layer, nn.Linear)]
    assert len(seen) == 2 * len(layers)
    for layer, forward, backward in zip(layers, seen, reversed(seen), strict=False):
        weight, bias = (p.full_tensor() for p in layer.parameters())  # type: ignore[attr-defined]
        assert torch.equal(forward["weight"], decoded(weight.detach(), gather))
        assert torch.equal(forward["bias"], bias)
        assert all(torch.equal(forward[name], backward[name]) for name in forward)
        assert_ranks_equal(forward["weight"])
    for name, p in job.model.named_parameters():
        assert torch.equal(p.full_tensor(), exact[name])


@pytest.mark.parametrize("columns", [31, 128])
@pytest.mark.parametrize("gather", CODES)
def test_a_group_without_biases(gather: str, columns: int) -> None:
    """As embeddings are; nothing in it is exact, whatever the length of its codes."""
    model: Any = nn.Linear(columns, 4 * SIZE - 1, bias=False)
    fully_shard(model, mesh=mesh())
    weight = model.weight.full_tensor().detach()
    Compression.none.register(model, gather=gather)
    assert torch.equal(model(torch.eye(columns)).T, decoded(weight, gather))


@pytest.mark.parametrize("shard", MODES)
def test_eight_bits_train_as_plain_fsdp_does(shard: Callable[[nn.Sequential], None]) -> None:
    ours, plain = Job("none", shard, gather="int8").run(range(20)), Job(None, shard).run(range(20))
    assert_ranks_equal(ours.weights())
    moved = (plain.weights() - Job(None, shard).weights()).norm()
    assert 0 < (ours.weights() - plain.weights()).norm() < 0.1 * moved


def test_exact_parameters_for_evaluation() -> None:
    """Within the context a model computes as one without compression; after it, with decoded values again."""
    job, plain = Job("none", gather="int4"), Job(None)
    x, _ = batch(0)
    with torch.no_grad():
        expected = plain.model(x)
        with job.compression.exact_parameters(job.model):  # type: ignore[union-attr]
            assert torch.equal(job.model(x), expected)
        rounded = job.model(x)
        assert not torch.equal(rounded, expected)
        with job.compression.exact_parameters(job.model):  # type: ignore[union-attr]
            assert torch.equal(job.model(x), expected)
        assert torch.equal(job.model(x), rounded)


def test_a_resumed_job_goes_on_bit_for_bit() -> None:
    first, second, whole = (Job("qsgd:bits=8,vectors=on,min_size=0", gather="int8") for _ in range(3))
    first.run(range(3))
    second.compression.load_state_dict(first.compression.state_dict())  # type: ignore[union-attr]
    second.model.load_state_dict(first.model.state_dict())
    second.optimizer.load_state_dict(first.optimizer.state_dict())
    assert torch.equal(second.run(range(3, 6)).weights(), whole.run(range(6)).weights())


@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
def test_a_weight_that_is_not_finite_is_seen_by_all(bad: float) -> None:
    job = Job("none", gather="int8")
    seen = seen_by(job.model)
    with torch.no_grad():
        if hvd.rank() == SIZE - 1:
            job.model[0].weight.to_local()[0, 0] = bad
        job.model(batch(0)[0])
    whole, (first, *_) = seen[0]["weight"], seen[0]["weight"].chunk(SIZE)
    assert first.isfinite().all() and whole.chunk(SIZE)[-1].isnan().all()


def test_other_gathers_on_one_rank_are_the_same_error_on_all() -> None:
    job = Job("none", gather="int8" if hvd.rank() == 0 else "none")
    with pytest.raises(DisagreementError, match="gather=: rank 0 has 'int8', and rank 1 has 'none'"):
        job.backward(0)


def test_statistics_count_the_codes() -> None:
    """A group is gathered in both passes; each rank sends its shard."""
    job = Job("none", gather="int8").run(range(2))
    shards = list(chain.from_iterable(g.parameters for g in job.compression._sessions()[0].groups))  # type: ignore[union-attr]
    exact = sum(4 * one.numel for one in shards)
    code = CODES["int8"]
    codes = (code.size(-(-one.numel // code.block) * code.block, "float32") + 1 for one in shards if len(one.shape) > 1)
    coded = sum(codes) + sum(4 * one.numel for one in shards if len(one.shape) == 1)
    stats = job.compression.stats()  # type: ignore[union-attr]
    assert (stats.parameter_bytes, stats.parameter_bytes_sent) == (2 * 2 * exact, 2 * 2 * coded)
    assert f"{2 * coded:,} of {2 * exact:,} bytes of parameters" in str(stats)


def test_what_is_not_supported_says_so() -> None:
    with pytest.raises(SpecError, match=r"gather='int3' .* 'none', 'int8', 'fp8', 'int4'"):
        Job("none", gather="int3")
    with pytest.raises(UnsupportedError, match="gather= is for models"):
        Compression.none.register(DistributedDataParallel(make_model()), gather="int8")
    model: Any = make_model()
    fully_shard(model, mesh=mesh())

    class OwnGather:
        """Any other gather."""

    model.set_custom_all_gather(OwnGather())
    with pytest.raises(UnsupportedError, match="gathers by OwnGather"):
        Compression.none.register(model, gather="int8")
    with (
        pytest.raises(UnsupportedError, match="registered with gather="),
        Compression.none.exact_parameters(make_model()),
    ):
        pass


def test_registered_again_it_gathers_as_the_last_one_says() -> None:
    job = Job("none", each_layer, gather="int8")
    job.compression.register(job.model)  # type: ignore[union-attr]
    plain = Job(None)
    job.run(range(2))
    assert torch.equal(job.weights(), plain.run(range(2)).weights())
