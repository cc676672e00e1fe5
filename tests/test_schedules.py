"""Random schedules of faults: how they are drawn and judged, and a few of them; `make soak` runs hundreds."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pytest
from launching import run
from soak.schedules.diary import End, Entry, Loaded, Mass, Part, Saved, Saving, State, Stepped
from soak.schedules.judge import Process, judge
from soak.schedules.schedule import DAMAGE, INCIDENTS, STARTS, Event, Framework, Segment, draw

RUN = Path(__file__).resolve().parent / "soak" / "schedules" / "run.py"

NOTHING = Mass(0.0, 0.0)
PLAIN = Segment(2, "topk:ratio=0.1,min_size=0", 1, 0, False, (), ((), ()))


def stepped(step: int, weights: str = "w", counts: bool = True, came: float = 1.0, kept: float = 0.0) -> Stepped:
    part = Part("r", counts, Mass(came, 1.0) if counts else NOTHING, Mass(2.0, 2.0) if counts else NOTHING)
    return Stepped(step, weights, {"first": part}, State({"s/b/residual": str(kept)}, Mass(kept, abs(kept))))


def kinds(segment: Segment, *ranks: Sequence[Entry], codes: tuple[int | None, ...] = (0, 0, 0)) -> list[str]:
    """Kinds of the findings in what ranks wrote down."""
    processes = [Process(code, entries, "") for code, entries in zip(codes, ranks, strict=False)]
    return [finding.kind for finding in judge(segment, processes, [Mass(3.0, 3.0)]).findings]


@pytest.mark.parametrize("framework", ["torch", "keras"])
def test_a_seed_gives_the_same_schedule_always_and_seeds_give_different_ones(framework: Framework) -> None:
    drawn = [draw(framework, seed) for seed in range(50)]
    assert drawn == [draw(framework, seed) for seed in range(50)]
    assert len({str(schedule.segments) for schedule in drawn}) == 50


def test_a_known_seed_gives_a_known_schedule() -> None:
    assert str(draw("torch", 4)) == KNOWN


def test_all_kinds_of_events_are_drawn() -> None:
    drawn = {event.kind for seed in range(200) for one in draw("torch", seed).segments for event in one.events()}
    assert drawn == {*DAMAGE, *STARTS, *INCIDENTS}


def test_whoever_is_killed_leaves_a_step_in_which_others_notice() -> None:
    for seed in range(200):
        for segment in draw("torch", seed).segments:
            assert not any(event.kind.startswith("kill") for event in segment.steps[-1])


def test_equal_ranks_are_right() -> None:
    assert not kinds(PLAIN, [stepped(0), End()], [stepped(0), End()])


def test_different_weights_are_a_divergence() -> None:
    assert kinds(PLAIN, [stepped(0, "a"), End()], [stepped(0, "b"), End()]) == ["divergence"]


def test_a_rank_that_had_to_be_ended_is_a_hang() -> None:
    assert kinds(PLAIN, [stepped(0), End()], [stepped(0)], codes=(0, None)) == ["hang"]


def test_a_rank_that_is_stuck_within_horovod_is_told_apart() -> None:
    killed = PLAIN._replace(steps=((Event("kill", 1, "before"),), ()))
    output = """Thread 0x00007f381587a6c0 (most recent call first):
  <no Python frame>

Thread 0x00007f385ea47b80 (most recent call first):
  File "/lib/python3.11/site-packages/horovod/torch/mpi_ops.py", line 148 in _allreduce_async
"""
    processes = [Process(None, [], output), Process(-9, [], "")]
    assert judge(killed, processes, []).stuck == 1 and not judge(killed, processes, []).findings
    assert [finding.kind for finding in judge(PLAIN, processes, []).findings] == ["hang"]


def test_an_error_of_one_rank_alone_is_a_divergence() -> None:
    error = End("StateError", True, False, "no")
    assert kinds(PLAIN, [stepped(0), error], [stepped(0), End()]) == ["divergence"]


def test_an_error_needs_a_reason_and_a_reason_an_error() -> None:
    error = End("StateError", True, False, "no")
    odd = PLAIN._replace(before=(Event("another spec on one rank", 0, "fp16", 1),))
    assert kinds(PLAIN, [error], [error]) == ["refusal"]
    assert not kinds(odd, [error], [error])
    assert kinds(odd, [End()], [End()]) == ["silence"]


def test_a_rank_whose_own_spec_does_not_fit_the_state_may_refuse_alone() -> None:
    odd = PLAIN._replace(before=(Event("another spec on one rank", 0, "fp16"),))
    error, lost = End("StateError", True, False, "no"), End("HorovodInternalError", False, True)
    assert not kinds(odd, [error], [lost])
    assert kinds(odd, [error], [End()]) == ["untyped"]


def test_an_error_that_is_not_typed_is_right_only_for_a_lost_rank_after_a_kill() -> None:
    lost, other = End("HorovodInternalError", False, True), End("KeyError", False, False)
    assert kinds(PLAIN, [lost], [lost]) == ["untyped", "untyped"]
    assert not kinds(PLAIN, [lost], [], codes=(0, -9))
    assert kinds(PLAIN, [other], [], codes=(0, -9)) == ["untyped"]


def test_a_step_that_does_not_count_must_not_change_what_is_kept() -> None:
    rank: list[Entry] = [stepped(0), stepped(1, counts=False, kept=1.0), End()]
    assert kinds(PLAIN, rank, rank) == ["trace"]


def test_what_came_in_is_sent_or_kept() -> None:
    lost: list[Entry] = [stepped(0, came=2.0), End()]
    assert not kinds(PLAIN, [stepped(0, came=2.0, kept=1.0), End()], [stepped(0, came=2.0, kept=1.0), End()])
    assert kinds(PLAIN, lost, lost) == ["mass"]


def test_what_fills_up_the_last_part_of_a_bucket_is_of_no_gradient() -> None:
    leaves = {"s/b0/residual": np.ones(4), "s/b0/inner.served": np.ones(2), "s/b1/residual": np.zeros(9)}
    assert [State.of(leaves, rank).kept.total for rank in range(3)] == [6.0, 6.0, 4.0]


def test_a_job_goes_on_from_what_a_save_had_kept() -> None:
    def rank(kept: float) -> list[Entry]:
        return [Loaded(), stepped(0, kept=kept), Saving(0, NOTHING), Saved(0), End()]

    assert not kinds(PLAIN, rank(1.5), rank(1.5))
    assert kinds(PLAIN, rank(1.0), rank(1.0)) == ["mass"]


@pytest.mark.long
@pytest.mark.jobs
@pytest.mark.parametrize(("framework", "seeds"), [("torch", "0:7"), ("keras", "4:7")])
def test_a_few_schedules(framework: Framework, seeds: str) -> None:
    job = run([sys.executable, RUN, framework, "--seeds", seeds], timeout=900)
    assert job.returncode == 0, job.stdout


@pytest.mark.jobs
@pytest.mark.long
@pytest.mark.parametrize(("plant", "seed"), [("residual", 1), ("manifest", 1), ("agreement", 7)])
def test_a_planted_bug_is_found(plant: str, seed: int) -> None:
    job = run([sys.executable, RUN, "torch", "--seed", str(seed), "--plant", plant], timeout=900)
    assert job.returncode == 1, job.stdout
    assert "BROKEN RULES" in job.stdout


KNOWN = """\
torch seed 4
  job 0: 3 ranks, topk:ratio=0.1,min_size=100,start=3, merge=1, second optimizer
    step 0: save
    step 1: kill while saving on rank 0 (4)
  job 1: 3 ranks, topk:ratio=0.1,min_size=100,start=3, merge=1, second optimizer
    step 5: save
    step 6: not finite inf on rank 1 (426)
    step 6: save"""
