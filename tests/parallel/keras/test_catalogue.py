"""Methods, called by a graph on real Horovod, give what the simulator gives.

Tracing takes a second for each, so `make test` has one of each kind, and `make soak` the others.
"""

from __future__ import annotations

from typing import Any

import horovod.tensorflow as hvd
import numpy as np
import pytest
import tensorflow as tf
from catalogue import BETWEEN_NODES, COMPOSED, EACH_KIND, SPECS, WARMING_UP, agree
from parallel.keras.training import NODES, SIZE, assert_ranks_equal, everyone
from worlds import Arr

from hvd_compress import LocalWorld
from hvd_compress.checkpoint.state_dict import SavedSession
from hvd_compress.tensorflow import Compression

SHAPES = {"first": (48, 40), "second": (5, 5, 6, 8), "bias": (10,)}
if NODES > 1:
    EVERY = BETWEEN_NODES
    FIRST = ["powersgd:rank=2,start=1,hierarchical=on", "thc:block=64,overflow=saturate,hierarchical=on"]
elif SIZE > 2:  # lengths that differ, a leader, and codes that each rank adds
    EVERY = EACH_KIND
    FIRST = ["dgc:ratio=0.05", "scalecom:ratio=0.05", "thc:rotation=full,overflow=saturate"]
else:  # without a state, with each kind of memory, and with what a graph has to choose
    EVERY = [*SPECS, *COMPOSED, *WARMING_UP]
    FIRST = [
        "fp16",
        "loco:block=64",
        "efsignsgd:block=64,twoway=on",
        "ctk:ratio=0.1,chunk=64,preconditioned=on",
        "acpsgd:rank=2",
        "topk:ratio=0.05,delay=2",
        "phases",
    ]
CHOSEN = [*FIRST, *(pytest.param(spec, marks=pytest.mark.long) for spec in EVERY if spec not in FIRST)]


def gradients(step: int) -> dict[str, list[Arr]]:
    """One gradient per rank for each variable."""
    rng = np.random.default_rng(step)
    ranks = range(hvd.size())
    return {name: [rng.standard_normal(shape).astype(np.float32) for _ in ranks] for name, shape in SHAPES.items()}


class Reduction:
    """A graph that reduces gradients which are what we want them to be.

    Args:
        spec: Of its compression.
    """

    def __init__(self, spec: str) -> None:
        self.compression = Compression.parse(COMPOSED.get(spec, spec))
        self.variables = [tf.Variable(tf.zeros(shape), name=name) for name, shape in SHAPES.items()]
        signature = [[tf.TensorSpec(shape) for shape in SHAPES.values()]]
        self._run: Any = tf.function(self._reduced, input_signature=signature).get_concrete_function()

    def _reduced(self, mine: list[tf.Tensor]) -> list[tf.Tensor]:
        with tf.GradientTape() as tape:
            loss = tf.add_n([tf.reduce_sum(v * g) for v, g in zip(self.variables, mine, strict=True)])
        tape = hvd.DistributedGradientTape(tape, compression=self.compression)
        gradients: list[tf.Tensor] = tape.gradient(loss, self.variables)
        return gradients

    def step(self, grads: dict[str, list[Arr]]) -> dict[str, Arr]:
        """The means of the gradients of all ranks."""
        means = self._run(*[tf.constant(grads[name][hvd.rank()]) for name in SHAPES])
        return {name: mean.numpy() for name, mean in zip(SHAPES, means, strict=True)}

    def saved(self) -> dict[str, SavedSession]:
        """The state, as copies."""
        return {name: session.saved() for name, session in self.compression.sessions.items()}

    def restore(self, saved: dict[str, SavedSession]) -> None:
        """Go on from a state."""
        for name, session in self.compression.sessions.items():
            session.restore(saved[name])

    def leaves(self) -> list[Any]:
        """The state, without what counts steps."""
        return [saved.buckets for saved in self.saved().values()]


def spoilt(step: int) -> dict[str, list[Arr]]:
    """Gradients of which one rank has one bad coordinate, each time another one."""
    grads = gradients(100 + step)
    name, bad = [("first", np.inf), ("bias", np.nan), ("second", -np.inf)][step % 3]
    grads[name][1].flat[7] = bad
    return grads


@pytest.mark.parametrize("spec", CHOSEN)
def test_horovod_gives_what_the_simulator_gives(spec: str) -> None:
    """Also after steps with gradients that are not finite: all ranks see that, and nothing else comes of it.

    Three steps with a bad one before each give the same bits as three steps without, from the same start. All of them
    run in one trace.
    """
    world, graph = LocalWorld(COMPOSED.get(spec, spec), SIZE, local_size=SIZE // NODES), Reduction(spec)
    start, calm = graph.saved(), []
    for step in range(3):
        grads = gradients(step)
        expected, means = world.step(grads), graph.step(grads)
        for name, mean in means.items():
            if "delay" not in spec:
                assert_ranks_equal(mean)
            assert agree(spec, mean, expected[name][hvd.rank()]), name
        calm.append(means)

    graph.restore(start)
    for step in range(3):
        before, bad = graph.leaves(), spoilt(step)
        seen = {name: bool(np.isfinite(mean).all()) for name, mean in graph.step(bad).items()}
        assert everyone(seen) == [seen] * hvd.size()
        assert not any(seen[name] and not np.isfinite(bad[name]).all() for name in SHAPES)
        tf.nest.map_structure(np.testing.assert_array_equal, graph.leaves(), before)
        for name, mean in graph.step(gradients(step)).items():
            np.testing.assert_array_equal(mean, calm[step][name], err_msg=name)
