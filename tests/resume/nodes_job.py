"""One rank of a job on nodes with several ranks. Arguments: the framework, a part or a fault, a folder, and specs."""

from __future__ import annotations

import os
import signal
import sys
import time
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import numpy as np

from hvd_compress import CompressionError, node_process_sets

framework, part, folder, *specs = sys.argv[1:]
SPEC = "topk:ratio=0.05,hierarchical=on"


def train(hvd: Any, spec: str) -> Any:
    """Return a training."""
    if framework == "keras":
        from parallel.keras.training import Tape

        return Tape(spec)
    from parallel.pytorch.training import Job

    return Job(spec)


def residual(job: Any) -> Any:
    """Return the sum of the residuals of all ranks."""
    from parallel.pytorch.training import everyone

    (session,) = job.compression.state_dict()["sessions"].values()
    leaves = [bucket["residual"] for bucket in session["buckets"].values() if "residual" in bucket]
    mine = np.concatenate([np.asarray(leaf) for leaf in leaves])
    return np.sum(everyone(mine), axis=0, dtype=np.float64)


def save(hvd: Any, spec: str, place: Path) -> None:
    """Train to step 5 and save."""
    job = train(hvd, spec).run(5)
    job.compression.save(place)
    total = residual(job)
    if hvd.rank() == 0:
        np.save(place / "residual.npy", total)


def load(hvd: Any, spec: str, place: Path) -> None:
    """Go on, compare the residuals' sum, and check that the ranks stay equal."""
    from parallel.pytorch.training import assert_ranks_equal

    job = train(hvd, spec).run(1)
    job.compression.load(place)
    np.testing.assert_allclose(residual(job), np.load(place / "residual.npy"), rtol=1e-4, atol=1e-6)
    assert_ranks_equal(job.run(range(5, 8)).weights)


def delay_gathers() -> None:
    """Start allgathers of process sets late."""
    if framework == "keras":
        import horovod.tensorflow as library
        import tensorflow as tf

        def late(array: Any) -> Any:
            return tf.ensure_shape(tf.numpy_function(pause, [array], array.dtype), array.shape)
    else:
        import horovod.torch as library

        late = pause
    name = "allgather" if framework == "keras" else "allgather_async"
    gather = getattr(library, name)

    def delayed(array: Any, *, process_set: Any = library.global_process_set, **options: Any) -> Any:
        array = late(array) if process_set.process_set_id else array
        return gather(array, process_set=process_set, **options)

    setattr(library, name, delayed)


def pause(array: Any) -> Any:
    """Return an array after half a second."""
    time.sleep(0.5)
    return array


def main() -> None:
    """Run the part, and print how it ends."""
    if framework == "keras":
        import horovod.tensorflow as hvd
    else:
        import horovod.torch as hvd
    hvd.init(process_sets=[] if part == "without sets" else node_process_sets())
    try:
        if part in ("save", "load"):
            for spec in specs:
                place = Path(folder, spec.replace(":", "_"))
                place.mkdir(exist_ok=True)
                {"save": save, "load": load}[part](hvd, spec, place)
            print(f"{part} done on rank {hvd.rank()}", flush=True)
            return
        if part == "late" and hvd.rank() == hvd.size() - 1:
            delay_gathers()
        job = train(hvd, *(specs or [SPEC])).run(2)
        if part == "killed" and hvd.rank() == hvd.size() - 1:
            os.kill(os.getpid(), signal.SIGKILL)
        job.run(2)
        hvd.shutdown()
        print("went on", flush=True)
    except CompressionError as error:
        print(f"error: {error}".replace("\n", " "), flush=True)
        hvd.allgather_object(None)  # a rank that ends earlier would take the others along
        sys.exit(1)


if __name__ == "__main__":
    main()
