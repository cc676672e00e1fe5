"""``auto`` with Horovod's tapes and optimizers: in eager mode, in functions and in fit; ranks stay equal."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import horovod.tensorflow as hvd
import horovod.tensorflow.keras as hvd_keras
import numpy as np
import pytest
import tensorflow as tf
from parallel.keras.training import (
    LOSS,
    SIZE,
    Arr,
    Tape,
    assert_ranks_equal,
    assert_same_state,
    batches,
    everyone,
    fit,
    small_model,
    weights,
)

from hvd_compress.engine import autotune
from hvd_compress.engine.race import Race, Stage
from hvd_compress.tensorflow import Compression, TensorFlowCompressor

NONE, FP16, BLOCKK, TOPK, POWERSGD, EFSIGNSGD = range(6)
CANDIDATES = [
    "blockk:ratio=0.1,min_size=0",
    "topk:ratio=0.1,min_size=0",
    "powersgd:rank=2,min_size=0,min_gain=0",
    "efsignsgd:min_size=0",
]

ENOUGH, SETTLED = 24, 46
"""Steps in which a comparison ends, and after which the choice is saved."""

EAGER, GRAPH = (lambda function: function), tf.function


class Clock:
    """In the place of `time`: a step of the fastest candidate takes a second on rank 0, one of another two.

    Other ranks take the same time for all.
    """

    def __init__(self) -> None:
        self.compressions: Sequence[TensorFlowCompressor] = []
        self.fastest = NONE
        self._now = 0.0
        self._steps: dict[int, int] = {}

    def perf_counter(self) -> float:
        """As that of `time`."""
        for compression in self.compressions:
            for session in compression.sessions.values():
                steps = self._steps.get(id(session), 0)
                if session.steps != steps and session.race is not None:
                    fast = session.states[0].last == self.fastest or hvd.rank() > 0
                    self._now += (session.steps - steps) * (1.0 if fast else 2.0)
                self._steps[id(session)] = session.steps
        return self._now


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    made = Clock()
    monkeypatch.setattr(autotune, "time", made)
    return made


def made(clock: Clock, fastest: int = NONE) -> TensorFlowCompressor:
    """A compressor whose steps are timed by the clock."""
    compression = Compression.auto(candidates=CANDIDATES, merge=2)
    clock.compressions = [*clock.compressions, compression]
    clock.fastest = fastest
    return compression


def race_of(compression: TensorFlowCompressor) -> Race:
    (session,) = compression.sessions.values()
    assert session.race is not None
    return session.race


def by_tape(compression: Any, function: Callable[[Any], Any]) -> Any:
    return Tape(compression, function, small_model(24, 10)).run(ENOUGH).model


def by_fit(compression: Any, eager: bool) -> Any:
    return fit(compression, ENOUGH, eager, small_model(24, 10))


WAYS: dict[str, Callable[[Any], Any]] = {
    "eager tape": lambda compression: by_tape(compression, EAGER),
    "tape in a function": lambda compression: by_tape(compression, GRAPH),
    "eager fit": lambda compression: by_fit(compression, eager=True),
    "fit": lambda compression: by_fit(compression, eager=False),
}


@pytest.mark.parametrize(
    ("way", "fastest"),
    [
        ("eager tape", TOPK),
        ("tape in a function", POWERSGD),
        ("eager fit", EFSIGNSGD),
        *(("fit", fastest) for fastest in (NONE, FP16, BLOCKK)),
    ],
)
def test_the_fastest_is_chosen(way: str, fastest: int, clock: Clock, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, "hvd_compress")
    compression = made(clock, fastest)
    model = WAYS[way](compression)
    race = race_of(compression)
    assert race.choice == fastest and race.steps == ENOUGH
    assert all(one.times for one in race.comparisons[0].runners), "each had its steps"
    assert race.adam == ("tape" in way), "nothing tells the optimizer of a tape"
    assert_ranks_equal(weights(model))
    assert len(set(everyone(race.choice))) == 1
    assert compression.stats().chosen == race.candidates[fastest].spec
    told = [record.getMessage() for record in caplog.records if "auto chose" in record.getMessage()]
    assert len(told) == (hvd.rank() == 0)
    assert all(("nothing is faster" in one) == (fastest in (NONE, FP16)) for one in told)
    assert all(f"Compression.parse({race.candidates[fastest].spec.partition(':feedback')[0]!r}" in one for one in told)


@pytest.mark.parametrize("kind", [tf.keras.optimizers.Adam, tf.keras.optimizers.legacy.Adam])
def test_adam_is_known(kind: Any) -> None:
    compression = Compression.parse("auto")
    model = small_model()
    model.compile(optimizer=hvd_keras.DistributedOptimizer(kind(1e-3), compression=compression), loss=LOSS)
    model.fit(*batches(2), batch_size=16, verbose=0, shuffle=False)
    race = race_of(compression)
    left = {one.spec for one in race.comparisons[0].runners if one.verdict == "costs loss with Adam"}
    assert {"topk:ratio=0.01", "powersgd:rank=4"} <= left and race.adam


class Given:
    """A tape of given gradients, and the account of what of them was delivered.

    Args:
        compression: The compressor.
        function: What a step is wrapped in, `tf.function` or nothing.
        **options: Of the tape.
    """

    def __init__(self, compression: TensorFlowCompressor, function: Callable[[Any], Any], **options: Any) -> None:
        self.compression = compression
        self.variables = [
            tf.Variable(tf.zeros(shape), name=f"given{i}") for i, shape in enumerate([(32, 40), (24, 30), (40,)])
        ]
        self.missing = [np.zeros(v.shape) for v in self.variables]
        self._rng = np.random.default_rng(hvd.rank())
        self._options = options
        self._steps: dict[int, Any] = {}
        self._function = function

    def _sum(self, gradients: list[Any], variables: list[Any]) -> Any:
        with tf.GradientTape() as tape:
            loss = tf.add_n([tf.reduce_sum(v * g) for v, g in zip(variables, gradients, strict=True)])
        tape = hvd.DistributedGradientTape(tape, compression=self.compression, op=hvd.Sum, **self._options)
        return tape.gradient(loss, variables)

    def step(self, count: int = 3, spoil: float | None = None) -> list[Arr]:
        """Sum gradients of the first variables; return the sums.

        Args:
            count: Number of variables.
            spoil: What an element of the first gradient is, on rank 1 only if it is not finite; None for its own value.
        """
        variables = self.variables[:count]
        gradients = [self._rng.standard_normal(v.shape).astype(np.float32) for v in variables]
        if spoil is not None and (hvd.rank() == 1 or np.isfinite(spoil)):
            gradients[0][0, 0] = spoil
        if count not in self._steps:
            self._steps[count] = self._function(lambda *given: self._sum(list(given), variables))
        totals = [total.numpy() for total in self._steps[count](*map(tf.constant, gradients))]
        if spoil is None:
            for missing, gradient, total in zip(self.missing, gradients, totals, strict=False):
                missing += hvd.allreduce(tf.constant(gradient.astype(float)), op=hvd.Sum).numpy() - total
        return totals

    def check(self, atol: float) -> None:
        """All that has not been delivered is in the residuals."""
        kept = [np.zeros(missing.shape) for missing in self.missing]
        for session in self.compression.sessions.values():
            for name, residual in session.residual().items():
                kept[int(name[5])] += hvd.allreduce(tf.constant(residual.astype(float)), op=hvd.Sum).numpy()
        for missing, residual in zip(self.missing, kept, strict=True):
            np.testing.assert_allclose(residual, missing, atol=atol)


@pytest.mark.parametrize("function", [EAGER, GRAPH])
def test_nothing_is_lost_while_candidates_take_turns(function: Callable[[Any], Any], clock: Clock) -> None:
    compression = made(clock, POWERSGD)
    job, choices = Given(compression, function), []
    for _ in range(ENOUGH):
        assert_ranks_equal(np.concatenate([total.ravel() for total in job.step()]))
        job.check(2e-3 * SIZE)  # sums in half precision are rounded
        choices.append(race_of(compression).choice)
    assert len(set(choices)) == len(CANDIDATES) + 2 and choices[-1] == POWERSGD


def test_a_longer_list_of_variables_goes_on_with_the_choice(clock: Clock) -> None:
    """As when a layer is unfrozen: with what was kept, too."""
    compression = made(clock, TOPK)
    job = Given(compression, GRAPH)
    for _ in range(SETTLED):
        job.step(2)
    for _ in range(3):
        job.step(3)
    first, second = compression.sessions.values()
    assert first.race is not None and first.race.choice == TOPK
    assert second.race is not None and second.race.choice == TOPK and second.race.comparisons == []
    job.check(2e-3 * SIZE)


@pytest.mark.parametrize("before", [8, 14])
def test_nothing_is_lost_if_the_list_changes_during_the_comparison(before: int, clock: Clock) -> None:
    job = Given(made(clock, POWERSGD), EAGER)
    for count in [2] * before + [3] * 4 + [2] * 2 + [3] * 2:
        job.step(count)
    job.check(2e-3 * SIZE)


def test_steps_that_are_not_finite_count_for_nothing(clock: Clock) -> None:
    """One with a gradient that is not finite, and one with a sum that is not; also of the time of the next one."""
    compression = made(clock, BLOCKK)
    job = Given(compression, GRAPH)
    for _ in range(2):
        assert all(np.isnan(total).all() for total in job.step(spoil=np.nan))
        job.step(spoil=3e38)
    race = race_of(compression)
    assert race.asks is Stage.SURVEY and race.steps == 0
    for step in range(ENOUGH):
        job.step()
        if step % 5 == 0:
            before = race.choice, race.asks, race.steps
            job.step(spoil=np.nan)
            assert (race.choice, race.asks, race.steps) == before
    assert race.choice == BLOCKK
    slow = 2.0 if hvd.rank() == 0 else 1.0
    assert {t for one in race.comparisons[0].runners for t in one.times} <= {1.0, 2.0}
    assert race.comparisons[0].seconds <= slow * race.comparisons[0].steps
    job.check(2e-3 * SIZE)


def test_half_precision_is_judged_in_true_units() -> None:
    """Scaled by 2**40, these gradients are beyond float16."""
    compression = Compression.auto(candidates=CANDIDATES)
    job, scale = Tape(compression, model=small_model()), tf.Variable(2.0**40)
    compression.follow(scale)
    job.gradients(0, factor=float(scale))
    facts = [one.facts for one in race_of(compression).comparisons[0].runners]
    assert 0 < facts[FP16].error < 1e-3 < facts[TOPK].error


def test_models_of_one_compressor_have_races_of_their_own(clock: Clock, tmp_path: Path) -> None:
    compression, models = made(clock), dict[int, Any]()  # what is kept goes with its model
    for units, fastest in ((24, TOPK), (40, BLOCKK)):
        clock.fastest = fastest
        Tape(compression, GRAPH, models.setdefault(units, small_model(units))).run(ENOUGH)
    choices = [session.race.choice for session in compression.sessions.values() if session.race is not None]
    assert choices == [TOPK, BLOCKK]
    assert compression.stats().chosen == ", ".join(map(spec_of, choices))
    compression.report(tmp_path / "auto.md")
    text = (tmp_path / "auto.md").read_text()
    assert all(f"## {name}" in text for name in compression.sessions)
    assert all(f"chose {spec_of(choice)}, whose steps took" in text for choice in choices)


def spec_of(number: int) -> str:
    return Compression.auto(candidates=CANDIDATES).method.candidates[number].spec  # type: ignore[attr-defined, no-any-return]


def test_a_saved_job_goes_on_with_its_choice(clock: Clock, tmp_path_factory: pytest.TempPathFactory) -> None:
    """Saved in a folder, and in a checkpoint of TensorFlow."""
    folder = everyone(str(tmp_path_factory.mktemp("saved")))[0]
    job, *others = (Tape(made(clock, POWERSGD), GRAPH, small_model(24, 10)) for _ in range(3))
    job.run(SETTLED).compression.save(folder)
    path = tf.train.Checkpoint(compression=job.compression).write(f"{folder}/rank{hvd.rank()}")
    everyone("all have saved")
    others[0].compression.load(folder)
    tf.train.Checkpoint(compression=others[1].compression).restore(path)
    for other in others:
        for new, old in ((other.model, job.model), (other.optimizer, job.optimizer)):
            for variable, value in zip(new.variables, old.variables, strict=True):
                variable.assign(value)
    for one in (job, *others):
        one.run(range(300, 304))
    for other in others:
        race = race_of(other.compression)
        assert race.choice == POWERSGD and race.comparisons == [] and race.steps == 4
        np.testing.assert_array_equal(other.weights, job.weights)
        assert_same_state(other.compression, job.compression)


def test_by_the_real_clock_ranks_stay_equal() -> None:
    compression = Compression.parse("auto:probe=30", merge=2)
    job = Tape(compression, GRAPH, small_model(24, 10)).run(60)
    assert_ranks_equal(job.weights)
    race = race_of(compression)
    assert race.comparisons[0].steps <= 30 and not race.compares
    assert (
        everyone([one.times for one in race.comparisons[0].runners]).count(
            [one.times for one in race.comparisons[0].runners]
        )
        == hvd.size()
    )
