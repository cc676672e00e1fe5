"""Ranks that go on from states that do not belong together: all are told so, in that step, and nothing is changed."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

import horovod.tensorflow as hvd
import numpy as np
import pytest
import tensorflow as tf
from parallel.keras.training import Tape, everyone, small_model

from hvd_compress.errors import DisagreementError

Put = Callable[[Tape, str], Any]

GRAPH, EAGER = tf.function, lambda f: f
CURE = "give all ranks the checkpoint of the same step"


def write(job: Tape, folder: str) -> None:
    tf.train.Checkpoint(compression=job.compression).write(f"{folder}/rank{hvd.rank()}")


def read(job: Tape, folder: str) -> None:
    tf.train.Checkpoint(compression=job.compression).restore(f"{folder}/rank{hvd.rank()}").expect_partial()


WAYS: dict[str, tuple[Put, Put]] = {
    "checkpoint": (write, read),
    "files": (lambda job, folder: job.compression.save(folder), lambda job, folder: job.compression.load(folder)),
}


def refused(job: Tape) -> str:
    """What the ranks are told in the next step: the same, and before anything has changed."""
    with pytest.raises((DisagreementError, tf.errors.InvalidArgumentError)) as error:
        job.gradients(0)
    said = re.search(rf"the ranks disagree on the restored state: .*?{CURE}", str(error.value))
    assert said is not None
    message, *others = everyone(said[0])
    assert others == [message] * (hvd.size() - 1)
    return str(message)


@pytest.mark.parametrize(
    ("way", "spec", "function"),
    [
        ("checkpoint", "randomk:ratio=0.05,start=3", GRAPH),  # with other collectives in one of these steps
        ("files", "topk:ratio=0.05,start=3", EAGER),
    ],
)
def test_ranks_that_restore_other_steps(
    way: str, spec: str, function: Any, tmp_path_factory: pytest.TempPathFactory
) -> None:
    save, restore = WAYS[way]
    folders = everyone([str(tmp_path_factory.mktemp("saved")) for _ in range(2)])[0]
    job = Tape(spec, function, small_model())
    for folder in folders:
        save(job.run(2), folder)
    everyone("all have saved")

    second = Tape(spec, function, small_model()).run(1)
    restore(second, folders[hvd.rank() == 1])
    (session,) = second.compression.sessions.values()
    before, steps, counted = session.saved().buckets, session.steps, second.compression.stats()
    assert "they have done 2 to 4 steps" in refused(second)
    assert (session.steps, second.compression.stats().steps) == (steps, counted.steps)
    tf.nest.map_structure(np.testing.assert_array_equal, session.saved().buckets, before)

    restore(second, folders[0])
    second.run(1)


def eager() -> Tape:
    """A job whose steps need no tracing."""
    return Tape("topk:ratio=0.05", EAGER, small_model())


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    """The state after two steps, written in both ways; and that of another job."""
    places: list[str] = everyone([str(tmp_path_factory.mktemp("saved")) for _ in range(3)])[0]
    job = eager().run(2)
    for (save, _), folder in zip(WAYS.values(), places[:2], strict=True):
        save(job, folder)
    write(eager().run(2), places[2])
    everyone("all have saved")
    return places


@pytest.mark.parametrize("way", WAYS)
def test_one_rank_begins_anew(way: str, folders: list[str]) -> None:
    job = eager()
    if hvd.rank() != 1:
        WAYS[way][1](job, folders[list(WAYS).index(way)])
    assert "they have done 0 to 2 steps" in refused(job)


def test_ranks_that_restore_the_same_step_of_other_jobs(folders: list[str]) -> None:
    job = eager()
    read(job, folders[2 * (hvd.rank() == 1)])
    assert re.search(r"they have done 2 to 2 steps, of the jobs (\d+) to (?!\1 )\d+", refused(job))
