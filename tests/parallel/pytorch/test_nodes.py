"""Nodes with several ranks: `hierarchical=on` under Horovod and DistributedDataParallel."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import horovod.torch as hvd
import pytest
import torch
import torch.distributed as dist
from parallel.pytorch.ddp_training import assert_same_states, loss_of, train, weights
from parallel.pytorch.race_clock import ENOUGH, Clock, race_of
from parallel.pytorch.training import EVEN, LOSSLESS, NODES, SIZE, Job, assert_ranks_equal, everyone, make_model
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.nn.parallel import DistributedDataParallel

import hvd_compress.distributed
from hvd_compress.core.bucketing import _warn as advice
from hvd_compress.distributed import DistributedCompressor, FullState
from hvd_compress.errors import CompressionError, DisagreementError, StateError, UnsupportedError
from hvd_compress.torch import Compression

EXACT = [f"{spec},hierarchical=on" for spec in LOSSLESS[::2]]
LOSSY = "topk:ratio=0.05,min_size=0,vectors=on,hierarchical=on"
RESIDUAL = "qsgd:bits=4,feedback=on,vectors=on,min_size=0"
VIEWS = pytest.mark.filterwarnings("ignore:FSDP2-wrapped module")  # PyTorch's tensor parallelism gives it views


def test_the_job_has_several_nodes() -> None:
    assert hvd.cross_size() == NODES > 1 and hvd.local_size() == SIZE // NODES == 2


@pytest.mark.parametrize("spec", EXACT)
def test_lossless_equals_horovod_without_compression(spec: str) -> None:
    ours, stock = Job(spec).run(6), Job("none").run(6)
    torch.testing.assert_close(ours.weights, stock.weights, rtol=1e-4, atol=1e-5)
    assert_ranks_equal(ours.weights)


def test_less_is_sent_between_nodes() -> None:
    flat, tall = Job(LOSSY.replace(",hierarchical=on", "")).run(3), Job(LOSSY).run(3)
    assert tall.compression.stats().bytes_sent < 0.6 * flat.compression.stats().bytes_sent
    assert tall.compression.stats().bytes_inside > flat.compression.stats().bytes_inside == 0


def test_a_restored_job_goes_on_bit_for_bit(tmp_path: Path) -> None:
    whole, second = Job(LOSSY).run(4), Job(LOSSY)
    folder = Path(hvd.broadcast_object(str(tmp_path)))
    whole.compression.save(folder)
    hvd.barrier()
    second.model.load_state_dict(whole.model.state_dict())
    second.optimizer.load_state_dict(copy.deepcopy(whole.optimizer.state_dict()))
    second.compression.load(folder)
    whole.run(range(4, 8))
    assert torch.equal(second.run(range(4, 8)).weights, whole.weights)


@pytest.mark.parametrize("spec", ["topk:ratio=0.05,min_size=0", "powersgd:rank=2,min_size=0"])
def test_residuals_go_on_without_hierarchy_and_back(spec: str, tmp_path: Path) -> None:
    folder = Path(hvd.broadcast_object(str(tmp_path)))
    Job(spec).run(3).compression.save(folder)
    hvd.barrier()
    job = Job(f"{spec},hierarchical=on")
    with pytest.raises(StateError, match="hierarchical=on"):
        job.compression.load(folder)
        job.run(1)


def test_auto_may_choose_it(clock: Clock) -> None:
    compression = timed(clock, Compression)
    assert_ranks_equal(Job(compression).run(ENOUGH).weights)
    check_choice(compression)


def test_a_process_set_with_one_rank_per_node_is_flat() -> None:
    if hvd.rank() % 2 == 0:
        tall = Job(LOSSY, process_set=EVEN).run(4)
        flat = Job(LOSSY.replace(",hierarchical=on", ""), process_set=EVEN).run(4)
        assert torch.equal(tall.weights, flat.weights)


@pytest.mark.parametrize("ranks", [[0, 1, 2], *([[0, 1, 2, 3]] if NODES > 2 else [])])
def test_other_process_sets_are_refused(ranks: list[int]) -> None:
    some = hvd.add_process_set(ranks)
    message = "same number of ranks on each node" if len(ranks) == 3 else "other process sets"
    said = ""
    if hvd.rank() in ranks:
        with pytest.raises(CompressionError, match=message) as caught:
            Job(LOSSY, process_set=some).run(1)
        said = str(caught.value)
    assert len(set(everyone(said)) - {""}) == 1


@pytest.mark.usefixtures("process_group")
class TestDDP:
    @pytest.mark.parametrize("spec", EXACT)
    def test_lossless_equals_plain_ddp(self, spec: str) -> None:
        ours = train(spec)
        torch.testing.assert_close(weights(ours), weights(train(None)), rtol=1e-4, atol=1e-5)
        assert_ranks_equal(weights(ours))

    def test_ranks_stay_equal(self) -> None:
        assert_ranks_equal(weights(train(LOSSY, range(10))))

    @pytest.mark.parametrize("most", [0, 256])
    def test_connections_of_each_bucket_or_turns(self, most: int, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr("hvd_compress.distributed.transport._MOST_CONNECTIONS", most)
        made = hvd_compress.distributed.Compression.parse(EXACT[0], merge="layer")
        torch.testing.assert_close(weights(train(made)), weights(train(None)), rtol=1e-4, atol=1e-5)

    def test_a_group_of_one_rank_per_node(self) -> None:
        ranks = [rank for rank in range(SIZE) if rank % 2 == hvd.rank() % 2]
        group = dist.new_group(ranks, use_local_synchronization=True)
        flat = train(LOSSY.replace(",hierarchical=on", ""), process_group=group)
        assert torch.equal(weights(train(LOSSY, process_group=group)), weights(flat))

    @pytest.mark.parametrize("most", [0, 256])
    def test_auto_may_choose_it(self, most: int, clock: Clock, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr("hvd_compress.distributed.transport._MOST_CONNECTIONS", most)
        compression = timed(clock, hvd_compress.distributed.Compression)
        model = DistributedDataParallel(make_model())
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        compression.register(model, optimizer=optimizer)
        for step in range(ENOUGH):
            loss_of(model, step).backward()  # type: ignore[no-untyped-call]
            optimizer.step()
            optimizer.zero_grad()
        check_choice(compression)
        assert_ranks_equal(weights(model))

    def test_a_state_of_horovod_goes_on(self, tmp_path: Path) -> None:
        job, folder = Job(LOSSY).run(3), Path(hvd.broadcast_object(str(tmp_path)))
        job.compression.save(folder)
        hvd.barrier()
        model = nn.Sequential(*make_model())
        wrapped = DistributedDataParallel(model)
        compression = hvd_compress.distributed.Compression.parse(LOSSY, merge=2).register(wrapped)
        compression.load(folder)
        assert_same_states(job.compression.state_dict(), compression.state_dict())


@pytest.mark.usefixtures("process_group")
class TestFSDP:
    @pytest.mark.parametrize("shards", [2, 1])
    def test_replicas_equal_plain_hsdp(self, shards: int) -> None:
        """Each node holds the model once, or twice: then both ranks of a node are replicas."""
        plain = train_sharded(shards)
        for spec in (LOSSLESS[0], *EXACT):
            torch.testing.assert_close(train_sharded(shards, spec), plain, rtol=1e-4, atol=1e-5)
            assert torch.equal(train_sharded(shards, spec, named=True), train_sharded(shards, spec))
        for spec in ("topk:ratio=0.05", "topk:ratio=0.05,hierarchical=on"):
            assert_ranks_equal(train_sharded(shards, spec))

    def test_registered_again_with_the_mesh_of_both_it_goes_on(self) -> None:
        job, twice = Sharded(2, "topk:ratio=0.05").run(range(3)), Sharded(2, "topk:ratio=0.05").run(range(2))
        twice.compression.register(twice.model)
        assert torch.equal(twice.run(range(2, 3)).weights(), job.weights())

    @pytest.mark.parametrize("after", [True, False, 2])
    def test_gathers_of_codes(self, after: bool | int) -> None:
        """They are decoded in forward and backward, also where backward gathers within a node."""
        seen: list[Tensor] = []
        model: Any = nn.Sequential(nn.Linear(32, 49), nn.Linear(49, 10))
        for module in (model[0], model):
            fully_shard(module, mesh=init_device_mesh("cpu", (SIZE,)), reshard_after_forward=after)
        hvd_compress.distributed.Compression.none.register(model, gather="int8")

        def note(*_: Any) -> None:
            seen.append(model[0].weight.detach().clone())

        model[0].register_forward_pre_hook(note)
        model[0].register_forward_hook(lambda layer, _, output: output.register_hook(note) and None)
        loss_of(model, 0).backward()  # type: ignore[no-untyped-call]
        assert len(seen) == 2 and torch.equal(*seen)
        assert_ranks_equal(seen[0])
        exact = model[0].weight.full_tensor()
        assert 0 < (seen[0] - exact).abs().max() <= exact.abs().max() / 254 * 1.001

    @pytest.mark.parametrize("full", [False, True])
    def test_replicas_resume_bit_for_bit(self, full: bool, tmp_path: Path) -> None:
        folder, spec = hvd.broadcast_object(str(tmp_path)), "topk:ratio=0.05"
        first, second = Sharded(2, spec).run(range(3)), Sharded(2, spec)
        if full:
            FullState(second.compression).load_state_dict(FullState(first.compression).state_dict())
        else:
            first.compression.save(folder)
            hvd.barrier()
            second.compression.load(folder)
        second.model.load_state_dict(first.model.state_dict())
        second.optimizer.load_state_dict(first.optimizer.state_dict())
        assert torch.equal(second.run(range(3, 5)).weights(), Sharded(2, spec).run(range(5)).weights())

    @pytest.mark.parametrize("inside", ["none", "fp16", "int8"])
    def test_two_levels(self, inside: str) -> None:
        """Shards over all ranks: a node sends the sum of its ranks."""
        spec = f"{RESIDUAL},hierarchical=on,inside={inside}"
        flat, tall = Sharded(SIZE, RESIDUAL).run(range(6)), Sharded(SIZE, spec).run(range(6))
        start, plain = Sharded(SIZE).weights(), Sharded(SIZE).run(range(6)).weights()
        assert (tall.weights() - plain).norm() < 0.2 * (plain - start).norm()
        assert_ranks_equal(tall.weights())
        sent, inner = tall.compression.stats().bytes_sent, tall.compression.stats().bytes_inside
        assert sent < 0.51 * flat.compression.stats().bytes_sent and inner > 0

    def test_auto_may_choose_two_levels(self, clock: Clock) -> None:
        compression = timed(clock, hvd_compress.distributed.Compression)
        assert_ranks_equal(Sharded(SIZE, compression).run(range(ENOUGH)).weights())
        check_choice(compression)

    def test_auto_within_nodes_and_between_replicas(self, clock: Clock) -> None:
        """A node sums without compression; no other group of ranks has several nodes with several ranks."""
        compression = timed(clock, hvd_compress.distributed.Compression)
        assert_ranks_equal(Sharded(2, compression).run(range(ENOUGH)).weights())
        assert race_of(compression).choice < 3 and not race_of(compression).nodes

    def test_two_levels_resume_bit_for_bit(self, tmp_path: Path) -> None:
        folder, spec = hvd.broadcast_object(str(tmp_path)), f"{RESIDUAL},hierarchical=on"
        first, second = Sharded(SIZE, spec).run(range(3)), Sharded(SIZE, spec)
        first.compression.save(folder)
        hvd.barrier()
        second.compression.load(folder)
        second.model.load_state_dict(first.model.state_dict())
        second.optimizer.load_state_dict(first.optimizer.state_dict())
        assert torch.equal(second.run(range(3, 5)).weights(), Sharded(SIZE, spec).run(range(5)).weights())

    def test_one_level_says_what_two_would_save(self, caplog: pytest.LogCaptureFixture) -> None:
        for spec, told in ((RESIDUAL, hvd.rank() == 0), ("none", False), (f"{RESIDUAL},hierarchical=on", False)):
            advice.cache_clear()
            caplog.clear()
            Sharded(SIZE, spec).run(range(1))
            assert ("with hierarchical=on" in caplog.text) is told

    def test_a_gradient_that_is_not_finite_in_one_shard_is_seen_by_all(self) -> None:
        job = Sharded(2, "topk:ratio=0.25,min_size=0,vectors=on").run(range(3))
        before = job.compression.state_dict()
        outputs = torch.ones(10)
        outputs[0] = float("nan") if hvd.rank() == 0 else 1  # the first shard alone has it
        (job.model(torch.ones(4, 32)) * outputs).sum().backward()
        assert job.model[2].weight.grad.to_local().isnan().all()
        assert_same_states(job.compression.state_dict(), before)

    def test_the_sum_over_replicas(self) -> None:
        mean, total = Sharded(2, "none"), Sharded(2, "none", op="sum")
        for job in (mean, total):
            loss_of(job.model, 0).backward()  # type: ignore[no-untyped-call]
        for one, other in zip(mean.model.parameters(), total.model.parameters(), strict=True):
            torch.testing.assert_close(one.grad.full_tensor() * SIZE, other.grad.full_tensor())

    @pytest.mark.parametrize("later", [False, True])
    @pytest.mark.parametrize("shards", [2, SIZE])
    def test_the_users_factor_divides_the_sum_over_all_ranks(self, shards: int, later: bool) -> None:
        """As with FSDP itself; torchtitan sets one, because it divides the loss by the tokens of all ranks."""

        plain = Sharded(shards).divided(3.0).run(range(3))
        job = Sharded(shards, None if later else "none").divided(3.0)
        if later:
            job.compression.register(job.model)
        torch.testing.assert_close(job.run(range(3)).weights(), plain.weights())

    def test_the_users_factor_divides_within_a_replica_if_replicas_are_named(self) -> None:
        plain = Sharded(2).divided(3.0 * SIZE / 2).run(range(3))
        named = Sharded(2, "none", named=True).divided(3.0).run(range(3))
        torch.testing.assert_close(named.weights(), plain.weights())

    def test_other_meshes_say_so(self) -> None:
        mesh = init_device_mesh("cpu", (2, SIZE // 2), mesh_dim_names=("across", "within"))
        model: Any = nn.Sequential(nn.Linear(32, 32))
        fully_shard(model, mesh=mesh["within"])
        compression = hvd_compress.distributed.Compression.parse("qsgd")
        with pytest.raises(UnsupportedError, match="replicas= is missing"):
            compression.register(model)
        compression.register(model, replicas=False)

    @VIEWS
    @pytest.mark.parametrize("gather", ["none", "int8"])
    def test_beside_tensor_parallelism(self, gather: str) -> None:
        """Gradients are compressed between the ranks that have the same part of the tensors; others stay equal."""
        plain = TensorParallel().run(range(6)).weights()
        exact = TensorParallel("none", gather=gather).run(range(6)).weights()
        assert_ranks_equal(exact)
        distance = 1e-6 if gather == "none" else 0.02
        assert (exact - plain).norm() <= distance * plain.norm()
        assert_ranks_equal(TensorParallel(RESIDUAL, gather=gather).run(range(6)).weights())

    @VIEWS
    def test_a_gradient_that_is_not_finite_beside_tensor_parallelism_is_seen_by_all(self) -> None:
        job = TensorParallel(RESIDUAL).run(range(3))
        before = job.compression.state_dict()
        factor = float("nan") if hvd.rank() == 0 else 1.0  # only its part of the first layer has it
        handle = job.model[1].register_forward_hook(
            lambda _, given, hidden: hidden.register_hook(lambda grad: grad * factor) and None
        )
        job.backward(3)
        handle.remove()
        assert job.model[0].weight.grad.to_local().isnan().all()
        assert_same_states(job.compression.state_dict(), before)

    @VIEWS
    def test_resumes_bit_for_bit_beside_tensor_parallelism(self, tmp_path: Path) -> None:
        folder = hvd.broadcast_object(str(tmp_path))
        first, second = TensorParallel(RESIDUAL).run(range(3)), TensorParallel(RESIDUAL)
        first.compression.save(folder)
        hvd.barrier()
        second.compression.load(folder)
        second.model.load_state_dict(first.model.state_dict())
        second.optimizer.load_state_dict(first.optimizer.state_dict())
        assert torch.equal(second.run(range(3, 5)).weights(), TensorParallel(RESIDUAL).run(range(5)).weights())


class Sharded:
    """A model in training with FSDP2 on several shards; with PyTorch's own HSDP without a spec.

    Its mesh has both dimensions, or, if its replicas are named, that of the shards only.
    """

    def __init__(
        self, shards: int, spec: str | DistributedCompressor | None = None, named: bool = False, **options: Any
    ) -> None:
        mesh = init_device_mesh("cpu", (SIZE // shards, shards), mesh_dim_names=("replicate", "shard"))
        with torch.random.fork_rng():
            torch.manual_seed(0)
            self.model: Any = nn.Sequential(nn.Linear(32, 49), nn.ReLU(), nn.Linear(49, 10))  # cannot be halved
        for module in (self.model[0], self.model):
            fully_shard(module, mesh=mesh["shard"] if named else mesh)
        parse = hvd_compress.distributed.Compression.parse
        self.compression = spec if isinstance(spec, DistributedCompressor) else parse(spec or "none")
        if named:
            options["replicas"] = mesh["replicate"].get_group()
        if spec:
            self.compression.register(self.model, **options)
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=0.1, momentum=0.9)

    def divided(self, factor: float) -> Sharded:
        """Have FSDP divide by a factor."""
        for module in (self.model[0], self.model):
            module.set_gradient_divide_factor(factor)
            module.set_force_sum_reduction_for_comms(True)  # Gloo has no other reductions
        return self

    def backward(self, step: int) -> None:
        loss_of(self.model, step).backward()  # type: ignore[no-untyped-call]

    def run(self, steps: range) -> Sharded:
        for step in steps:
            self.backward(step)
            self.optimizer.step()
            self.optimizer.zero_grad()
        return self

    def weights(self) -> Tensor:
        return torch.cat([p.full_tensor().flatten() for p in self.model.parameters()]).detach()


class TensorParallel(Sharded):
    """A model that the ranks of a node have in parts, in training with FSDP2 between nodes."""

    def __init__(self, spec: str | None = None, **options: Any) -> None:
        mesh = init_device_mesh("cpu", (SIZE // 2, 2), mesh_dim_names=("data", "tensor"))
        with torch.random.fork_rng():
            torch.manual_seed(0)
            self.model = nn.Sequential(nn.Linear(32, 50), nn.ReLU(), nn.Linear(50, 20), nn.Linear(20, 10))
        parallelize_module(self.model, mesh["tensor"], {"0": ColwiseParallel(), "2": RowwiseParallel()})
        for module in (self.model[0], self.model):
            fully_shard(module, mesh=mesh["data"])
        self.compression = hvd_compress.distributed.Compression.parse(spec or "none")
        if spec:
            self.compression.register(self.model, **options)
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=0.1, momentum=0.9)
        self._data = mesh["data"].get_local_rank()

    def backward(self, step: int) -> None:
        """The ranks of a node have the same batch."""
        x = torch.randn(16, 32, generator=torch.Generator().manual_seed(1000 * step + self._data))
        nn.functional.cross_entropy(self.model(x), x[:, :10].argmax(1)).backward()  # type: ignore[no-untyped-call]


def train_sharded(shards: int, spec: str | None = None, named: bool = False) -> Tensor:
    """Train; return all weights."""
    job = Sharded(shards, spec, named).run(range(6))
    if spec:
        assert (job.compression.stats().bytes_inside > 0) == ("hierarchical" in spec and shards == 1)
    return job.weights()


def timed(clock: Clock, compressions: Any) -> Any:
    """Return ``auto``, whose fastest candidate is hierarchical."""
    clock.compression = compressions.auto(candidates=[RESIDUAL, f"{RESIDUAL},hierarchical=on"], merge=2)
    clock.fastest = 3
    return clock.compression


def check_choice(compression: Any) -> None:
    """The hierarchical candidate was chosen, and used nodes."""
    race = race_of(compression)
    assert race.choice == 3 and race.candidates[3].router.hierarchical, race.comparisons[0].runners
    assert compression.stats().bytes_inside > 0
    assert len(set(everyone(race.steps))) == 1


def test_other_settings_on_one_rank_are_the_same_error_on_all() -> None:
    inside = "fp16" if hvd.rank() == SIZE - 1 else "none"
    with pytest.raises(DisagreementError, match="method") as caught:
        Job(Compression.topk(ratio=0.1, hierarchical=True, inside=inside)).run(1)
    assert len(set(everyone(str(caught.value)))) == 1
