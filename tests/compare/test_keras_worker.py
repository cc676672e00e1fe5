"""The worker of Keras on real ranks: it trains as one process would, and compresses all that is trained."""

from __future__ import annotations

import json
from itertools import islice
from pathlib import Path
from typing import Any

import pytest
import tensorflow as tf
from compare import tiny_keras

from hvd_compress.errors import ClusterError
from hvd_compress.lab import Setting
from hvd_compress.tools.bench.jobs import LaunchSpec, execute
from hvd_compress.tools.compare.job import Job

pytestmark = pytest.mark.tensorflow

HERE = Path(__file__).parent


@pytest.fixture(name="log")
def _log(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(HERE)
    path = tmp_path / "log"
    path.touch()
    return path


def run(job: Job, ranks: int = 2) -> dict[str, Any]:
    """The outcome."""
    program = ["-m", "hvd_compress.tools.compare.keras_worker", job.to_json()]
    execute(program, LaunchSpec(0, "unlimited", ranks, "mpi"), lambda: None, 200)
    found: dict[str, Any] = json.loads(Path(job.log).read_text().splitlines()[-1])["outcome"]
    return found


def alone(seed: int) -> list[float]:
    """The losses of one process that has the minibatches of all ranks, every 4 steps."""
    tf.keras.utils.set_random_seed(seed)
    training = tiny_keras.build(Setting(seed=seed))
    model, variables = training.model, training.model.trainable_variables
    found = [training.evaluate(model)]
    steps = 0
    batches = iter([batch for epoch in range(training.epochs) for batch in training.batches(epoch)])
    assert training.schedule is not None
    while some := list(islice(batches, training.every)):
        for batch in some:
            training.optimizer.learning_rate = 2.0 * training.schedule(steps / 16)
            steps += 1
            with tf.GradientTape() as tape:
                loss = training.loss(model, batch)
            gradients = [tf.convert_to_tensor(gradient) for gradient in tape.gradient(loss, variables)]
            clipped, norm = tf.clip_by_global_norm(gradients, training.clip)
            training.optimizer.apply_gradients(zip(clipped, variables, strict=True))
            assert norm > training.clip  # or else there is nothing to see of it
        found.append(training.evaluate(model))
    return found


@pytest.mark.long
def test_uncompressed_it_trains_as_one_process_does(log: Path) -> None:
    found = run(Job("tiny_keras:build", "none", seed=3, log=str(log)))
    expected = alone(3)
    assert [step for step, _, _ in found["curve"]] == [0, 4, 8, 12, 16]
    assert [metric for _, _, metric in found["curve"]] == pytest.approx(expected, rel=1e-4)
    assert expected[-1] < 0.9 * expected[0]
    assert found["ranks_equal"] and not found["diverged"]
    assert found["payload"] == found["gradient_bytes"] == 4 * tiny_keras.PARAMETERS


@pytest.mark.long
def test_compressed_it_sends_less_and_learns(log: Path) -> None:
    found = run(Job("tiny_keras:build", "topk:ratio=0.05,min_size=0", seed=3, log=str(log)))
    assert found["goal"]["parameters"] == tiny_keras.PARAMETERS
    assert found["gradient_bytes"] == 4 * tiny_keras.PARAMETERS  # the embedding among them
    assert 0 < found["payload"] < 0.15 * found["gradient_bytes"]
    first, *_, last = (metric for _, _, metric in found["curve"])
    assert first == pytest.approx(alone(3)[0], rel=1e-4) and last < 0.95 * first
    assert found["ranks_equal"] and found["alone"] > 0
    assert (found["encode"], found["wait"], found["decode"]) == (None, None, None)


@pytest.mark.long
@pytest.mark.parametrize(
    ("task", "ranks", "message"),
    [
        ("tiny_keras:stubborn", 2, "the optimizer has a momentum of 0.9"),
        ("tiny_keras:build", 1, "one rank exchanges and compresses nothing in Keras"),
    ],
)
def test_what_cannot_be_is_refused(log: Path, task: str, ranks: int, message: str) -> None:
    with pytest.raises(ClusterError, match=message):
        run(Job(task, "dgc:min_size=0", log=str(log)), ranks)
