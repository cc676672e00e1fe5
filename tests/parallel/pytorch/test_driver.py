"""The transport: every collective gives what the simulator gives, and every byte is counted."""

from __future__ import annotations

import re
import time
from dataclasses import dataclass
from typing import Any

import horovod.torch as hvd
import horovod.torch.optimizer
import numpy as np
import pytest
import torch
from parallel.pytorch.training import Job, assert_ranks_equal, everyone
from torch import Tensor

from hvd_compress.core.bucket import Bucket
from hvd_compress.core.collectives import (
    AllGather,
    AllReduce,
    AllToAll,
    Broadcast,
    Exchange,
    Exchanging,
    ReduceScatter,
    State,
    World,
)
from hvd_compress.core.method import Method
from hvd_compress.ops import Ops
from hvd_compress.ops.arrays import Array
from hvd_compress.torch import Compression
from hvd_compress.torch.horovod.transport import HorovodTransport
from hvd_compress.transport.lockstep import perform


def array_of(rank: int, dtype: str) -> Any:
    return (np.arange(hvd.size() * 3).reshape(hvd.size(), 3) * (rank + 1) % 50).astype(dtype)


MESSAGES: dict[str, Any] = {
    **{f"sum {d}": (lambda a: AllReduce(a), d) for d in ("float16", "float32", "float64", "int32", "int64")},
    **{f"max {d}": (lambda a: AllReduce(a, "max"), d) for d in ("float32", "float64")},
    "sum in place": (lambda a: AllReduce(a, donate=True), "float32"),
    "sum of a row": (lambda a: ReduceScatter(a), "float32"),
    "gather": (lambda a: AllGather(a.reshape(-1)), "uint8"),
    "ragged gather": (lambda a: AllGather(a[0, :2] if a[0, 1] % 2 else a[0], ragged=True), "uint8"),
    "all to all": (lambda a: AllToAll(a), "uint8"),
    **{f"broadcast {root}": (lambda a, root=root: Broadcast(a, root), "float32") for root in range(2)},
}


@pytest.mark.parametrize("name", MESSAGES)
def test_collectives_do_what_the_simulator_does(name: str) -> None:
    make, dtype = MESSAGES[name]
    expected = perform([make(array_of(rank, dtype)) for rank in range(hvd.size())], hvd.size())[hvd.rank()]
    transport = HorovodTransport.of(hvd.global_process_set)
    reply = transport.start(make(torch.tensor(array_of(hvd.rank(), dtype))), f"test.{name}").result()
    np.testing.assert_array_equal(reply.numpy(), expected)


@dataclass(frozen=True)
class Roundabout(Method):
    """Sums by every collective there is: scatter the parts, sum them, gather; then add nothing from a broadcast."""

    name = "roundabout"

    def exchange(
        self, ops: Ops, bucket: Bucket, x: Array, state: State, world: World, return_error: bool = False
    ) -> Exchanging:
        part = -(-bucket.numel // world.size)
        rows = ops.reshape(ops.pad(x, part * world.size), (world.size, -1))
        data = [ops.to_bytes(rows[rank]) for rank in range(world.size)]
        received = yield AllToAll(ops.reshape(ops.concat(data), (world.size, -1)))
        mine = sum(ops.from_bytes(received[rank], ("float32", part))[0] for rank in range(world.size))
        gathered = yield AllGather(ops.to_bytes(mine))
        total = ops.concat([ops.from_bytes(gathered[rank], ("float32", part))[0] for rank in range(world.size)])
        zeros = yield Broadcast(ops.zeros((1,), "float32") + world.rank, world.size - 1)
        return Exchange(total[: bucket.numel] + zeros * 0 + zeros - (world.size - 1), state)


def test_a_method_with_many_rounds_trains() -> None:
    job, plain = Job(Compression.parse(Roundabout(), merge=3)).run(5), Job(hvd.Compression.none).run(5)
    torch.testing.assert_close(job.weights, plain.weights, rtol=0, atol=1e-5)


@pytest.mark.parametrize("spec", ["none", "fp16", "topk:ratio=0.05", "powersgd:rank=2", "topk:start=2,warmup=4"])
def test_bytes_counted_are_bytes_sent(spec: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """All that is handed to Horovod in six steps, weighed at its own functions, but for what is said once at first."""
    sent: list[int] = []

    def weigh(module: Any, name: str) -> None:
        original = getattr(module, name)

        def weighed(tensor: Tensor, *args: Any, **kwargs: Any) -> Any:
            if not re.match(r"hvd_compress\.(agreement|.*came$)", kwargs.get("name") or ""):
                sent.append(tensor.numel() * tensor.element_size())
            return original(tensor, *args, **kwargs)

        monkeypatch.setattr(module, name, weighed)

    for name in ("allreduce_async", "allreduce_async_", "allgather_async"):
        weigh(hvd, name)
    weigh(horovod.torch.optimizer, "allreduce_async_")

    job = Job(spec).run(6)
    stats = job.compression.stats()
    assert stats.bytes_sent == sum(sent)
    assert stats.steps == 6
    assert stats.gradient_bytes == 6 * 4 * job.weights.numel()
    assert stats.ratio == stats.gradient_bytes / stats.bytes_sent
    assert everyone(stats.bytes_sent) == [stats.bytes_sent] * hvd.size()


def test_the_first_bucket_leaves_while_backward_goes_on() -> None:
    """When the gradient of the first layer is computed, the bucket of the last ones is on its way."""
    job = Job(Compression.topk(ratio=0.1, merge="layer")).run(1)
    (reducer,) = job.compression._reducers
    begun: list[int] = []

    def wait(_: Tensor) -> None:
        """Until the first placeholder is back, which tells that all ranks are there."""
        deadline = time.monotonic() + 60
        assert reducer.step is not None
        while not reducer.step.verdict.admits(AllGather(None)) and time.monotonic() < deadline:
            time.sleep(1e-3)

    def watch(_: Tensor) -> None:
        assert reducer.step is not None
        begun.append(sum(exchange.begun for exchange in reducer.step.exchanges))

    job.model.get_parameter("2.weight").register_hook(wait)  # type: ignore[no-untyped-call]
    job.model.get_parameter("0.weight").register_hook(watch)  # type: ignore[no-untyped-call]
    job.run(1)
    assert begun == [2]  # the weights of the other two layers; biases share a bucket that is not full yet


def test_backward_inside_autocast() -> None:
    """Autocast would turn PowerSGD's products into bfloat16, which Horovod cannot sum."""
    job = Job("powersgd:rank=2").run(1)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        job.run(range(1, 3))
    assert_ranks_equal(job.weights)


def test_stats_before_the_first_step() -> None:
    stats = Compression.topk().stats()
    assert (stats.steps, stats.bytes_sent, stats.ratio) == (0, 0, 1.0)


def test_times_add_up_to_less_than_the_whole() -> None:
    stats = Job("powersgd:rank=2").run(5).compression.stats()
    assert stats.encode_seconds and stats.wait_seconds and stats.decode_seconds
    assert Job("none").run(2).compression.stats().wait_seconds is None
