"""Files of all ranks: restored by as many, bit for bit, and by any other number, with the sum of the residuals."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import tensorflow as tf
from parallel.keras.training import Tape, everyone
from worlds import Arr

from hvd_compress.checkpoint import state_files
from hvd_compress.checkpoint.state_dict import Saved, restored
from hvd_compress.core.collectives import World
from hvd_compress.core.state_tree import flatten
from hvd_compress.errors import StateError
from hvd_compress.ops.numpy import NumpyOps
from hvd_compress.tensorflow import Compression


@pytest.mark.parametrize("spec", ["topk:ratio=0.02", "onebit:twoway=on"])
def test_files_of_all_ranks_are_enough_for_any_number(spec: str, tmp_path_factory: pytest.TempPathFactory) -> None:
    folder = everyone(str(tmp_path_factory.mktemp("saved")))[0]
    whole, second = Tape(spec).run(3), Tape(spec)
    whole.compression.save(folder)
    everyone("all have saved")
    for job, other in ((second.model, whole.model), (second.optimizer, whole.optimizer)):
        for variable, value in zip(job.variables, other.variables, strict=True):
            variable.assign(value)
    second.compression.load(folder)
    np.testing.assert_array_equal(second.run(range(3, 5)).weights, whole.run(range(3, 5)).weights)

    saved = [state_files.read(path) for path in sorted(Path(folder).iterdir())]
    before = np.sum([residuals(s) for s in saved], axis=0)
    assert np.abs(before).max() > 1e-3
    ((name, session),) = second.compression.sessions.items()
    for size in (1, 2, 8):
        fresh = {
            key: kept._replace(leaves=flatten(kept.method.init(NumpyOps(), kept.bucket, World(0, size))))
            for key, kept in session.by_bucket().items()
        }
        dealt = [restored(saved, name, fresh, World(rank, size)) for rank in range(size)]
        sums = np.sum([residuals(Saved("", 0, size, {"": one})) for one in dealt], axis=0)
        np.testing.assert_allclose(sums, before, rtol=0, atol=1e-5)


def residuals(saved: Saved) -> Arr:
    """All residuals in a file."""
    buckets = [leaves for session in saved.sessions.values() for leaves in session.buckets.values()]
    return np.concatenate([leaves["residual"] for leaves in buckets if "residual" in leaves])


def test_a_damaged_file_changes_nothing(tmp_path_factory: pytest.TempPathFactory) -> None:
    folder = everyone(str(tmp_path_factory.mktemp("damaged")))[0]
    job = Tape("topk:ratio=0.02").run(2)
    path = job.compression.save(folder)
    everyone("all have saved")
    (session,) = job.compression.sessions.values()
    before = session.read()
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
    tf.nest.map_structure(np.testing.assert_array_equal, before, session.read())
    job.run(range(2, 3))
