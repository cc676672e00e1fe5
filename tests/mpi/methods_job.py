"""One rank: every method gives over MPI what it gives in the simulator."""

from __future__ import annotations

import numpy as np
from mpi.common import RANK, SIZE, assert_ranks_agree, assert_same, done, gradients, mine

from hvd_compress import LocalWorld, parse
from hvd_compress.methods import REGISTRY
from hvd_compress.mpi import Aggregator
from hvd_compress.mpi.operators import saturating_sum
from hvd_compress.ops.numpy_compiled import NumpyCompiledOps

SPECS = [
    *REGISTRY,
    "topk:ratio=0.05,values=fp16,start=1",
    "int8:measure=on,dense=fp16",
    "qsgd:twoway=on",
    # With three ranks MPI clips at other places than the simulator, if there is anything to clip.
    "thc:overflow=saturate" if SIZE == 2 else "thc:overflow=saturate,headroom=1",
]


def check(spec: str) -> None:
    used = saturating_sum.cache_info()
    aggregator, world = Aggregator(spec), LocalWorld(spec, SIZE, ops=NumpyCompiledOps())
    sums_floats = "allreduce" in REGISTRY[spec.partition(":")[0]].card.collective or "start" in spec
    for step in range(3):
        grads = gradients(step)
        got = aggregator.step(mine(grads))
        wanted = {name: arrays[RANK] for name, arrays in world.step(grads).items()}
        assert_ranks_agree(got, spec)
        if SIZE == 2 or not sums_floats:
            assert_same(got, wanted, spec)
            assert_same(aggregator.residual(), world.residual(RANK), spec)
        for name, array in wanted.items():
            # Sums of three numbers depend on their order; those of 16-bit numbers by a unit in their last place.
            rtol = 2e-3 if "16" in f"{spec} {array.dtype}" else 1e-5
            np.testing.assert_allclose(got[name], array, rtol=rtol, atol=rtol, err_msg=f"{spec}: {name}")
    stats = aggregator.stats()
    assert stats.steps == world.steps == 3
    assert stats.gradient_bytes == 3 * sum(array.nbytes for array in mine(grads).values())
    if saturating_sum.cache_info() != used:  # once to MPI, where the simulator like Horovod takes two rounds
        assert 1 < (world.bytes_sent + 3) / stats.bytes_sent < 2, spec
    elif RANK == 0:  # whose bytes the simulator counts; with some methods each rank sends as much as it likes
        assert stats.bytes_sent - 3 == world.bytes_sent, f"{spec}: {stats.bytes_sent}, not {world.bytes_sent} + 3"
    assert (stats.vnmse is not None) == ("measure" in spec)
    assert parse(spec) == aggregator.method


if __name__ == "__main__":
    for spec in SPECS:
        check(spec)
    done()
