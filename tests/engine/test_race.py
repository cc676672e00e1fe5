"""The race of ``auto``, on simulated step times: what it chooses, what it costs, and when it changes."""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Sequence

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from hvd_compress.core.bucket import Bucket
from hvd_compress.core.collectives import World
from hvd_compress.core.method import ReduceScattered
from hvd_compress.engine import survey
from hvd_compress.engine.race import LOOK, MAX_ERROR, WARM_UP, WATCH, Race, Stage, Trial
from hvd_compress.engine.race_report import rows
from hvd_compress.engine.spec import auto, parse
from hvd_compress.engine.survey import Facts
from hvd_compress.errors import SpecError
from hvd_compress.methods.cast import Dense
from hvd_compress.methods.int8 import Int8
from hvd_compress.methods.topk import TopK
from hvd_compress.methods.wrappers.alternatives import Choice
from hvd_compress.methods.wrappers.router import Auto
from hvd_compress.ops.numpy import NumpyOps
from hvd_compress.transport.lowering import LACKS

SPECS = ["none", "fp16:feedback=on", "qsgd", "qsgd:bits=2", "powersgd:rank=4", "topk:ratio=0.01"]
CANDIDATES = auto(SPECS)

Seconds = Callable[[int, int], float]
"""The time of a step, by the number of its candidate and of the step."""


def facts(errors: Sequence[float] = (), size: int = len(SPECS)) -> list[Facts]:
    """Facts by which a candidate is expected to be the faster, the later it stands."""
    return [Facts(0.001, 1e6 / 2**i, 1, errors[i] if errors else 0.0) for i in range(size)]


class Simulation:
    """Steps of a job, whose ranks pass on what rank 0 has measured."""

    def __init__(
        self,
        seconds: Seconds,
        router: Auto = CANDIDATES,
        adam: bool = True,
        errors: Sequence[float] = (),
        saved: Sequence[Sequence[float]] = (),
    ) -> None:
        self.race = Race(router, adam, 4, saved)
        self.other = Race(router, adam, 4, saved)
        self.chosen: list[int] = []
        self.spent = 0.0
        self.known: list[Facts] = []
        self.link = [0.0001, 0.001]
        self._seconds, self._errors = seconds, errors

    def run(self, steps: int) -> Simulation:
        for _ in range(steps):
            self._step()
        return self

    def _step(self) -> None:
        if self.race.asks is Stage.SURVEY:
            known = self.known or facts(self._errors, len(self.race.candidates))
            self.race.facts = [known[number] for number in self.race.surveyed]
        seconds = self._seconds(self.race.choice, len(self.chosen))
        self.chosen.append(self.race.choice)
        self.spent += seconds
        told, ignored = self.race.record(seconds), self.other.record(1.0)
        assert (told is None) == (ignored is None), "the ranks must agree on the same steps"
        for values in [] if told is None else [told]:
            self.race.decide(values)
            self.other.decide(values)
        if self.race.asks is Stage.PROBE:
            self.race.decide(self.link)
            self.other.decide(self.link)
        assert self.race.choice == self.other.choice, "all ranks choose by what rank 0 tells"

    @property
    def changes(self) -> int:
        """How often the choice changed since the first comparison."""
        (first, *others) = (one.chosen for one in self.race.comparisons if one.steps)
        return sum(a != b for a, b in zip([first, *others], others, strict=False))


def steady(times: Sequence[float], noise: float = 0.01, seed: int = 0) -> Seconds:
    draw = random.Random(seed)
    return lambda number, step: times[number] * (1 + noise * draw.random())


TIMES = st.lists(st.floats(0.01, 1.0), min_size=len(SPECS), max_size=len(SPECS))


@given(TIMES, st.integers(0, 100))
def test_it_ends_within_a_few_percent_of_the_best(times: list[float], seed: int) -> None:
    """Without a wrong expectation of the link, nothing is slower than the best but by the smallest gain and noise."""
    job = Simulation(steady(times, seed=seed)).run(100)
    (comparison,) = job.race.comparisons
    assert comparison.chosen == job.race.choice
    assert times[job.race.choice] <= 1.035 * min(times)


@given(TIMES, st.integers(20, 80))
def test_its_steps_are_bounded(times: list[float], probe: int) -> None:
    job = Simulation(steady(times), auto(SPECS, probe=probe)).run(100)
    (comparison,) = job.race.comparisons
    least = 1 + WARM_UP + 2 * LOOK + 1  # a survey, and a look at no compression and at 16 bits
    assert comparison.steps <= max(probe, least)
    assert all(job.race.comparisons[0].runners[number].times for number in (0, 1)), "these are always tried"


@given(TIMES, st.integers(20, 80), st.integers(0, 100))
def test_timing_again_is_bounded_too(times: list[float], probe: int, seed: int) -> None:
    """Also if all are close, and few steps are allowed."""
    near = [0.1 + 0.05 * value for value in times]
    job = Simulation(steady(near, noise=0.2, seed=seed), auto(SPECS, probe=probe)).run(700)
    for one in job.race.comparisons[1:]:
        assert one.steps <= probe and one.runners[one.chosen].times
    assert near[job.race.choice] <= 1.3 * min(near)


def test_a_slow_candidate_is_given_up_early() -> None:
    times = [0.5, 0.4, 0.1, 1.0, 1.0, 1.0]
    job = Simulation(steady(times)).run(100)
    runners = job.race.comparisons[0].runners
    assert job.race.choice == 2
    assert all(len(runners[number].times) == LOOK for number in (0, 1, 3, 4, 5))
    assert "given up after 2 steps" in runners[3].verdict


def test_a_candidate_whose_exchange_alone_would_take_too_long_is_not_tried() -> None:
    job = Simulation(steady([9.0, 0.5, 0.1, 0.1, 0.1, 0.1]))
    job.link = [0.001, 0.5]  # a megabyte takes a second and a half
    job.run(100)
    none = job.race.comparisons[0].runners[0]
    assert none.times == [] and "its exchange would take" in none.verdict and 0 not in job.chosen[2:]


def test_it_ends_without_compression_if_nothing_is_faster() -> None:
    job = Simulation(steady([0.1, 0.12, 0.11, 0.11, 0.15, 0.11])).run(100)
    assert job.race.choice == 0
    said = job.race.news()
    assert "auto chose 'none'" in said and "as nothing is faster" in said


def test_what_is_not_faster_by_more_than_the_noise_is_seldom_taken() -> None:
    """All take as long, but for the noise; a candidate is excluded if it is slower in its first steps."""
    chosen = []
    for seed in range(60):
        rng = random.Random(seed)
        chosen.append(Simulation(lambda number, step, rng=rng: rng.uniform(0.9, 1.2)).run(70).race.choice)  # type: ignore[misc]
    assert sum(number < 2 for number in chosen) > 45


def test_what_it_says_names_the_method_to_pin() -> None:
    """Once for each comparison, also for one that changes nothing."""
    times, said = [0.5, 0.3, 0.1, 0.4, 0.4, 0.4], []
    job = Simulation(lambda number, step: times[number] * (9 if step > 150 else 1))
    for _ in range(400):
        said.append(job.run(1).race.news())
    first, second = filter(None, said)
    assert "auto chose 'qsgd'" in first and "Compression.parse('qsgd')" in first and "fp16:feedback=on 300 ms" in first
    assert "from step 1 on" in first and "qsgd 900 ms" in second and "after 0 steps" not in second


@pytest.mark.parametrize("stalled", range(1, 40))
def test_a_stalled_step_does_no_harm(stalled: int) -> None:
    times = [0.5, 0.3, 0.1, 0.2, 0.2, 0.2]
    draw = steady(times)
    job = Simulation(lambda number, step: draw(number, step) + 10.0 * (step == stalled)).run(120)
    assert job.race.choice == 2


@pytest.mark.parametrize("seed", range(3))
def test_a_comparison_that_was_disturbed_is_corrected(seed: int) -> None:
    """Another program slows down all but the candidate that is compared first, and ends."""
    alone = steady([0.2, 0.17, 0.12, 0.155, 0.2, 0.3], noise=0.05, seed=seed)
    job = Simulation(lambda number, step: alone(number, step) * (2 if number and step < 40 else 1)).run(300)
    first, again = (one for one in job.race.comparisons if one.steps)
    assert (first.chosen, again.chosen, job.race.choice) == (0, 2, 2)
    assert again.steps < first.steps + 20 and not again.runners[5].times, "only close ones are timed again"


def test_it_follows_the_rate_of_the_link() -> None:
    """A slow link from step 300 to step 700: within 200 steps there is another choice, and again afterwards."""
    fast, slow = [0.1, 0.2, 0.2, 0.2, 0.2, 0.2], [5.0, 2.6, 0.6, 0.3, 0.9, 0.9]
    draw = random.Random(1)
    job = Simulation(lambda n, step: (slow if 300 <= step < 700 else fast)[n] * (1 + 0.05 * draw.random()))
    job.run(300)
    assert job.race.choice == 0
    job.run(200)
    assert job.race.choice == 3
    job.run(200)
    assert job.race.choice == 3
    job.run(200)
    assert job.race.choice == 0


@pytest.mark.parametrize("seed", range(5))
def test_it_does_not_flap(seed: int) -> None:
    """Steps vary by a fifth, one in ten has a pause, and there are stretches of long steps."""
    draw = random.Random(seed)
    times = [0.2, 0.17, 0.15, 0.155, 0.2, 0.3]

    def seconds(number: int, step: int) -> float:
        pause = draw.expovariate(2) if draw.random() < 0.1 else 0.0
        return times[number] * (1 + 0.2 * draw.random()) + pause

    job = Simulation(seconds).run(5000)
    assert job.changes <= 1


def test_comparisons_that_change_nothing_become_rare() -> None:
    """The step time doubles and halves for ever, whatever the choice."""
    job = Simulation(lambda number, step: (0.1, 0.2, 0.2, 0.2, 0.2, 0.2)[number] * (1 + step // 100 % 2)).run(5000)
    assert job.race.choice == 0
    assert len(job.race.comparisons) <= 14


def test_a_candidate_with_a_large_error_is_excluded() -> None:
    times = [0.5, 0.4, 0.1, 0.09, 0.2, 0.2]
    assert Simulation(steady(times), errors=[0, 0, 2 * MAX_ERROR, 0, 0.9, 0.9]).run(100).race.choice == 3
    chosen = Simulation(steady(times), errors=[0, 0, 2 * MAX_ERROR, math.nan, 0.9, 0.9]).run(100).race
    assert chosen.candidates[chosen.choice].spec == "powersgd", "it sends its error later"
    strict = Simulation(steady(times), auto(SPECS, max_error=0.5), errors=[0, 0, 0.6, 0.6, 0.9, 0.9]).run(100)
    assert strict.race.choice == 1


def test_candidates_are_those_that_keep_the_loss_with_the_optimizer() -> None:
    adam, sgd = (Race(parse("auto"), adam, 2).surveyed for adam in (True, False))  # type: ignore[arg-type]
    small = Race(parse("auto:loss=small"), True, 2).surveyed  # type: ignore[arg-type]
    specs = [one.spec for one in parse("auto").candidates]  # type: ignore[attr-defined]
    named = [{specs[number] for number in found} for found in (adam, sgd, small)]
    assert {"none", "fp16:feedback=on", "qsgd"} <= named[0]
    assert named[1] - named[0] == {"powersgd:rank=16", "powersgd:rank=4", "topk:ratio=0.01"}
    assert named[2] - named[0] == {"powersgd:rank=16"}


NODES = auto(["qsgd", "qsgd:hierarchical=on", "topk:hierarchical=on"])


def test_hierarchical_candidates_need_nodes_of_several_ranks() -> None:
    alone, placed = (Simulation(lambda number, step: 1.0 / (1 + number), NODES) for _ in range(2))
    for race in (placed.race, placed.other):
        race.place(True)
    alone.run(90)
    placed.run(90)
    assert alone.race.candidates[alone.race.choice].spec == "qsgd"
    assert set(alone.chosen) == {0, 1, 2}, "no other was tried"
    assert placed.race.candidates[placed.race.choice].spec == "topk:hierarchical=on"
    short, long = (len(rows(one.race.comparisons[0])) for one in (alone, placed))
    assert (short, long) == (3, 5), "the report leaves out what cannot be"


@pytest.mark.parametrize(("flat", "tall"), [(3e8, 1e6), (1e6, 3e8), (1e6, 1e8)])
def test_of_a_method_and_the_same_between_nodes_only_the_better_is_tried(flat: float, tall: float) -> None:
    simulated = Simulation(lambda number, step: 1.0, NODES)
    simulated.known = [Facts(0.001, nbytes, 1, 0.0) for nbytes in (1e6, 1e6, flat, tall, 1e6)]
    for race in (simulated.race, simulated.other):
        race.place(True)
    simulated.run(90)
    tried = {2, 3} & set(simulated.chosen)
    assert tried == ({2, 3} if tall == 1e8 else {3} if tall < flat else {2}), "both, if they are about equal"


def test_a_saved_choice_that_needs_nodes_is_given_up_without_them() -> None:
    first = Simulation(lambda number, step: 1.0 / (1 + number), NODES)
    for race in (first.race, first.other):
        race.place(True)
    first.run(120)
    saved = first.race.saved
    for nodes in (True, False):
        then = Simulation(lambda number, step: 1.0 / (1 + number), NODES, saved=saved)
        for race in (then.race, then.other):
            race.place(nodes)
        then.run(90)
        assert then.chosen[0] == (first.race.choice if nodes else 0)
        assert then.race.candidates[then.race.choice].spec == ("topk:hierarchical=on" if nodes else "qsgd")


def test_a_gradient_that_is_not_finite_delays_the_survey() -> None:
    race = Race(CANDIDATES, True, 2)
    for _ in range(3):
        told = race.record(1.0)
        assert told is not None
        race.decide(told)
        assert race.asks is Stage.SURVEY and race.choice == 0
    race.facts = facts()
    race.decide(race.record(1.0) or ())
    assert race.asks is Stage.PROBE


def test_a_saved_job_goes_on_with_its_choice() -> None:
    times = [0.5, 0.3, 0.1, 0.2, 0.2, 0.2]
    before = Simulation(steady(times)).run(100)
    after = Simulation(steady(times), saved=before.race.saved).run(100)
    assert set(after.chosen) == {2} and after.race.comparisons == []
    elsewhere = Simulation(steady([0.1, 0.3, 0.5, 0.5, 0.5, 0.5]), saved=before.race.saved).run(200)
    assert elsewhere.race.choice == 0, "on another machine, it compares anew"
    assert Race(CANDIDATES, True, 2).saved == []


def test_it_watches_without_another_cost() -> None:
    job = Simulation(steady([0.5, 0.3, 0.1, 0.2, 0.2, 0.2])).run(1000)
    assert isinstance(job.race.asks, Trial) and job.race.asks.timed == WATCH
    assert len(job.race.comparisons) == 1 and set(job.chosen[100:]) == {2}
    (comparison,) = job.race.comparisons
    others = [number for number in job.chosen[: comparison.steps] if number != 2]
    assert comparison.cost <= sum([0.5, 0.3, 0.1, 0.2, 0.2, 0.2][number] for number in others)


@pytest.mark.parametrize(
    ("params", "message"),
    [
        ({"loss": "big"}, "loss='big' is not allowed: loss must be 'none' or 'small'"),
        ({"probe": 3}, "probe=3 is not allowed: probe must be in 20"),
        ({"max_error": -1}, "max_error=-1"),
        ({"bits": 4}, "unknown parameter 'bits' of auto"),
        ({"candidates": "qsgd"}, "pass a list of spec strings"),
        ({"candidates": ["auto"]}, "auto cannot be a candidate"),
        ({"candidates": ["signum"]}, "signum cannot be a candidate"),
        ({"candidates": ["qsgd:start=5"]}, "candidates do not support this form of qsgd"),
    ],
)
def test_a_wrong_option_is_refused(params: dict[str, object], message: str) -> None:
    with pytest.raises(SpecError, match=message.replace("(", r"\(")):
        auto(**params)  # type: ignore[arg-type]


def test_a_reduce_scatter_is_surveyed_by_a_sample_of_each_part(monkeypatch: pytest.MonkeyPatch) -> None:
    """So the number of ranks divides it; a candidate that has none is unable."""
    monkeypatch.setattr(survey, "SAMPLE", 40)
    method = ReduceScattered(Choice((Dense(), Int8(bits=8, block=4), TopK(ratio=0.1))))
    bucket = Bucket("", ((5, 4), (7,)) * 3, "float32")
    random = np.random.default_rng(0)
    gradients = [random.standard_normal(size).astype(np.float32) for size in bucket.sizes]
    part = survey.Part(NumpyOps(), bucket, method, gradients, rows=3)
    found = survey.survey([part], [0, 1, 2], World(0, 3), LACKS)
    assert found is not None
    dense, int8, topk = found
    assert dense.bytes == pytest.approx(4 * bucket.numel * 2 / 3) and dense.error == 0
    assert 0 < int8.error < 1e-3 and int8.bytes < dense.bytes
    assert math.isnan(topk.error) and not math.isnan(topk.coding)


def test_buckets_are_surveyed_together() -> None:
    """Those that have more coordinates count more; rounds follow each other, or overlap."""
    found = [survey.Found(100, [Facts(1, 10, 2, 0.5)]), survey.Found(300, [Facts(2, 20, 1, 0.1)])]
    (one,), (at_once,) = survey.joined(found, 1) or [], survey.joined(found, 1, max) or []
    assert one == pytest.approx((3, 30, 3, 0.2)) and at_once == pytest.approx((3, 30, 2, 0.2))
    assert survey.joined([*found, None], 1) is None
