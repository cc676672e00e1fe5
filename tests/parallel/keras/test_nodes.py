"""Nodes with several ranks: `hierarchical=on` under Horovod, in Keras and in graphs."""

from __future__ import annotations

from pathlib import Path

import horovod.tensorflow as hvd
import numpy as np
import pytest
import tensorflow as tf
from parallel.keras.training import (
    LOSSLESS,
    NODES,
    SIZE,
    Tape,
    assert_ranks_equal,
    everyone,
    fit,
    make,
    small_model,
    weights,
)

from hvd_compress.tensorflow import Compression

LOSSY = [
    f"{spec},min_size=0,vectors=on,hierarchical=on" for spec in ("topk:ratio=0.05", "powersgd:rank=2", "qsgd:bits=4")
]


def test_the_job_has_several_nodes() -> None:
    assert hvd.cross_size() == NODES > 1 and hvd.local_size() == SIZE // NODES == 2


@pytest.mark.parametrize("spec", [LOSSLESS[0], *(pytest.param(s, marks=pytest.mark.long) for s in LOSSLESS[1:])])
def test_lossless_equals_horovod_without_compression(spec: str) -> None:
    ours = weights(fit(f"{spec},hierarchical=on", 6, model=small_model()))
    np.testing.assert_allclose(ours, weights(fit("none", 6, model=small_model())), rtol=1e-4, atol=1e-5)
    assert_ranks_equal(ours)


@pytest.mark.long
@pytest.mark.parametrize("spec", LOSSY)
def test_ranks_stay_equal_over_fifty_steps(spec: str) -> None:
    assert_ranks_equal(weights(fit(spec, 50)))


@pytest.mark.parametrize("spec", [f"{LOSSY[0]},inside=int8", *(pytest.param(s, marks=pytest.mark.long) for s in LOSSY)])
def test_a_restored_job_goes_on_bit_for_bit(spec: str, tmp_path: Path) -> None:
    """And it sends less between nodes than one that knows no nodes."""
    whole, second = (Tape(spec, model=small_model()) for _ in range(2))
    whole.run(4)
    folder = Path(hvd.broadcast_object(str(tmp_path)))
    whole.compression.save(folder)
    everyone(None)
    second.run(1)
    second.model.set_weights(whole.model.get_weights())
    for mine, theirs in zip(second.optimizer.variables, whole.optimizer.variables, strict=True):
        mine.assign(theirs)
    second.compression.load(folder)
    tall = whole.compression.stats()
    whole.run(range(4, 8))
    np.testing.assert_array_equal(second.run(range(4, 8)).weights, whole.weights)
    assert_ranks_equal(whole.weights)

    if "topk" in spec:
        flat = Tape(make(spec.partition(",hierarchical=on")[0]), model=small_model()).run(4).compression.stats()
        assert tall.bytes_sent < 0.6 * flat.bytes_sent
        assert tall.bytes_inside > flat.bytes_inside == 0


def test_auto_may_choose_it(tmp_path: Path) -> None:
    """Also after loading a state, once steps have been made."""
    compression = Compression.auto(candidates=[LOSSY[0]], merge=2)
    job = Tape(compression, model=small_model()).run(60)
    (session,) = compression.sessions.values()
    assert session.race is not None and session.race.nodes and session.race.comparisons[0].runners[2].times
    assert compression.stats().bytes_inside > 0, "it had its steps"
    assert_ranks_equal(job.weights)
    folder = Path(hvd.broadcast_object(str(tmp_path)))
    compression.save(folder)
    everyone(None)
    second = Compression.auto(candidates=[LOSSY[0]], merge=2)
    other = Tape(second, model=small_model()).run(1)
    second.load(folder)
    other.run(range(60, 62))
    (session,) = second.sessions.values()
    assert session.race is not None and session.race.nodes


def test_other_settings_on_one_rank_are_the_same_error_on_all() -> None:
    inside = "fp16" if hvd.rank() == SIZE - 1 else "none"
    with pytest.raises(tf.errors.InvalidArgumentError, match=r"DisagreementError: .* on the method") as err:
        Tape(Compression.topk(ratio=0.1, hierarchical=True, inside=inside), model=small_model()).run(1)
    assert len(set(everyone(str(err.value).partition("Traceback")[0]))) == 1
