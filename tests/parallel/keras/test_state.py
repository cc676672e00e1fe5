"""Files of all ranks: restored by as many, bit for bit, and by any other number, with the sum of the residuals."""

from __future__ import annotations

from pathlib import Path

import horovod.tensorflow as hvd
import numpy as np
import pytest
import tensorflow as tf
from parallel.keras.training import Tape, assert_ranks_equal, everyone, small_model
from worlds import Arr

from hvd_compress.checkpoint import state_files
from hvd_compress.checkpoint.state_dict import Saved, restored
from hvd_compress.core.collectives import World
from hvd_compress.core.state_tree import flatten
from hvd_compress.errors import StateError
from hvd_compress.ops.numpy import NumpyOps
from hvd_compress.tensorflow import Compression


def test_files_of_all_ranks_are_enough_for_any_number(tmp_path_factory: pytest.TempPathFactory) -> None:
    """And a job whose first rank alone has saved a later step goes on from that of all ranks, bit for bit."""
    folder = everyone(str(tmp_path_factory.mktemp("saved")))[0]
    whole, second = (Tape("onebit:twoway=on", model=small_model()) for _ in range(2))
    whole.run(3).compression.save(folder)
    everyone("all have saved")
    saved = [state_files.read(path) for path in sorted(Path(folder).iterdir())]
    before = np.sum([residuals(s) for s in saved], axis=0)
    assert np.abs(before).max() > 1e-3
    ((name, session),) = whole.compression.sessions.items()
    for size in (1, 2, 8):
        fresh = {
            key: kept._replace(leaves=flatten(kept.method.init(NumpyOps(), kept.bucket, World(0, size))))
            for key, kept in session.by_bucket().items()
        }
        dealt = [restored(saved, name, fresh, World(rank, size)) for rank in range(size)]
        sums = np.sum([residuals(Saved("", 0, size, {"": one})) for one in dealt], axis=0)
        np.testing.assert_allclose(sums, before, rtol=0, atol=1e-5)

    pairs = [(second.model, whole.model), (second.optimizer, whole.optimizer)]
    for job, other in pairs:
        for variable, value in zip(job.variables, other.variables, strict=True):
            variable.assign(value)
    whole.run(range(3, 5))
    if hvd.rank() == 0:
        whole.compression.save(folder)
    everyone("rank 0 has saved again")
    second.compression.load(folder)
    np.testing.assert_array_equal(second.run(range(3, 5)).weights, whole.weights)
    assert_ranks_equal(second.weights)


def residuals(saved: Saved) -> Arr:
    """All residuals in a file."""
    buckets = [leaves for session in saved.sessions.values() for leaves in session.buckets.values()]
    return np.concatenate([leaves["residual"] for leaves in buckets if "residual" in leaves])


def test_a_damaged_file_changes_nothing(tmp_path_factory: pytest.TempPathFactory) -> None:
    folder = everyone(str(tmp_path_factory.mktemp("damaged")))[0]
    job = Tape("topk:ratio=0.02", lambda f: f, small_model()).run(2)
    path = job.compression.save(folder)
    everyone("all have saved")
    (session,) = job.compression.sessions.values()
    before = session.saved().buckets
    whole = path.read_bytes()
    path.write_bytes(whole[:-40])
    everyone("all are damaged")
    with pytest.raises(StateError, match="is damaged"):
        job.compression.load(folder)
    everyone("all have tried")
    path.write_bytes(whole)
    everyone("all are whole")
    with pytest.raises(StateError, match=r"this state belongs to 'topk:ratio=0\.02', but the compressor is 'int8'"):
        Compression.int8().load(folder)
    tf.nest.map_structure(np.testing.assert_array_equal, before, session.saved().buckets)
    job.run(range(2, 3))


def test_a_state_of_another_model_is_an_error_that_names_both(tmp_path_factory: pytest.TempPathFactory) -> None:
    folder = everyone(str(tmp_path_factory.mktemp("other")))[0]
    small = Tape("topk:ratio=0.02", lambda f: f, small_model()).run(1)
    small.compression.save(folder)
    everyone("all have saved")
    other = Tape("topk:ratio=0.02", lambda f: f, small_model(8, 40))
    other.compression.load(folder)
    with pytest.raises(StateError, match=r"the loaded state is of \d parameters .*, but the model has \d parameters"):
        other.run(1)
