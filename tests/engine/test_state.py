"""State: saved, restored, and refused where it does not fit. That it survives new processes is tested elsewhere."""

from __future__ import annotations

import io
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from catalogue import one_in
from engine.ranks import Compression, Job, assert_ranks_equal, everyone
from worlds import Arr

from hvd_compress.checkpoint import state_files
from hvd_compress.checkpoint.state_dict import Saved, restored
from hvd_compress.core.collectives import World
from hvd_compress.errors import StateError

pytestmark = [pytest.mark.usefixtures("on_ranks"), pytest.mark.matched("names")]

STATEFUL = ["topk:ratio=0.02", "randomk:ratio=0.1", "int8", "powersgd:rank=2", "topk:ratio=0.01,start=3,warmup=8"]


def reloaded(state: dict[str, Any]) -> dict[str, Any]:
    """Through a file, without pickle's power to run code."""
    file = io.BytesIO()
    torch.save(state, file)
    file.seek(0)
    loaded: dict[str, Any] = torch.load(file, weights_only=True)
    return loaded


def take_over(job: Job, other: Job, compression: bool = True) -> None:
    job.model.load_state_dict(reloaded(other.model.state_dict()))
    job.optimizer.load_state_dict(reloaded(other.optimizer.state_dict()))
    if compression:
        job.compression.load_state_dict(reloaded(other.compression.state_dict()))


@pytest.mark.parametrize(("spec", "late"), one_in(3, [*((spec, False) for spec in STATEFUL), (STATEFUL[0], True)]))
def test_a_restored_job_goes_on_bit_for_bit(spec: str, late: bool) -> None:
    """Restored before the first step, or after it."""
    whole, second = Job(spec).run(4), Job(spec)
    if late:
        second.run(1)
    take_over(second, whole)
    whole.run(range(4, 8))
    assert torch.equal(second.run(range(4, 8)).weights, whole.weights)
    assert_ranks_equal(second.weights)


def test_the_state_does_matter() -> None:
    whole, second = Job("topk:ratio=0.02").run(4), Job("topk:ratio=0.02")
    take_over(second, whole, compression=False)
    assert not torch.equal(second.run(range(4, 8)).weights, whole.run(range(4, 8)).weights)


def test_a_saved_state_is_a_copy() -> None:
    job = Job("topk:ratio=0.02").run(3)
    state = job.compression.state_dict()
    before = reloaded(state)
    job.run(range(3, 6))
    (a,), (b,) = (s["sessions"].values() for s in (state, before))
    assert a["steps"] == 3
    assert torch.equal(a["buckets"]["b1"]["residual"], b["buckets"]["b1"]["residual"])


def test_a_state_that_was_loaded_but_not_used_is_not_lost() -> None:
    state = Job("topk").run(2).compression.state_dict()
    compression = Compression.topk()
    compression.load_state_dict(state)
    assert compression.state_dict()["sessions"].keys() == state["sessions"].keys()


def broken(state: dict[str, Any], how: str) -> Any:
    """Damage a state."""
    (session,) = state["sessions"].values()
    if how == "foreign":
        return {"model": 1}
    if how == "not a dict":
        return [state]
    if how == "other method":
        return {**state, "method": "topk:ratio=0.5"}
    if how == "other rank":
        session["rank"] += 1
    if how == "other size":
        session["size"] += 1
    if how == "bucket gone":
        del session["buckets"]["b1"]
    if how == "leaf gone":
        del session["buckets"]["b1"]["residual"]
    if how == "other shape":
        session["buckets"]["b1"]["residual"] = torch.zeros(3)
    if how == "other kind":
        session["buckets"]["b1"]["residual"] = "zeros"
    return state


@pytest.mark.parametrize(
    ("how", "message"),
    [
        ("foreign", "this is not a compressor's state"),
        ("not a dict", "this is not a compressor's state"),
        ("other method", "this state belongs to 'topk:ratio=0.5', but the compressor is 'topk:ratio=0.02'"),
        ("other rank", "each rank has its own residual"),
        ("other size", r"the folder with the files of all ranks to compression\.load"),
        ("bucket gone", "resume with the model and merge= that were saved"),
        ("leaf gone", r"'residual' of bucket 'b1' does not match: expected shape \(\d+,\) and float32, got shape \(\)"),
        ("other shape", r"got shape \(3,\) and float32"),
        ("other kind", r"got shape \(\) and <U5"),
    ],
)
def test_a_state_that_does_not_fit_is_refused_and_changes_nothing(how: str, message: str) -> None:
    job = Job("topk:ratio=0.02").run(3)
    before = job.compression.state_dict()
    with pytest.raises(StateError, match=message):
        job.compression.load_state_dict(broken(reloaded(before), how))
    after = job.compression.state_dict()
    for label, session in before["sessions"].items():
        for key, leaves in session["buckets"].items():
            for path, leaf in leaves.items():
                assert torch.equal(leaf, after["sessions"][label]["buckets"][key][path])
    job.run(range(3, 5))


def test_a_misfit_that_only_the_model_can_tell_is_found_in_the_first_step() -> None:
    state = broken(reloaded(Job("topk:ratio=0.02").run(2).compression.state_dict()), "other shape")
    job = Job("topk:ratio=0.02")
    job.compression.load_state_dict(state)
    with pytest.raises(StateError, match="does not match"):
        job.run(1)


@pytest.mark.parametrize("spec", ["topk:ratio=0.02", "onebit:twoway=on"])
def test_files_of_all_ranks_are_enough_for_any_number(spec: str, tmp_path: Path) -> None:
    """Saved by all, restored by all, bit for bit; and by each pair of ranks, with the sum of the residuals."""
    whole, second = Job(spec).run(4), Job(spec)
    whole.compression.save(tmp_path)
    everyone("all have saved")
    take_over(second, whole, compression=False)
    second.compression.load(tmp_path)
    assert torch.equal(second.run(range(4, 7)).weights, whole.run(range(4, 7)).weights)

    saved = [state_files.read(path) for path in sorted(tmp_path.iterdir())]
    before = np.sum([residuals(s) for s in saved], axis=0)
    assert np.abs(before).max() > 1e-3
    for count in (1, 2, 8):
        dealt = [restored_alone(spec, saved, World(one, count)) for one in range(count)]
        np.testing.assert_allclose(np.sum(dealt, axis=0), before, rtol=0, atol=1e-5)


def residuals(saved: Saved) -> Arr:
    """All residuals in a file."""
    buckets = [leaves for session in saved.sessions.values() for leaves in session.buckets.values()]
    return np.concatenate([leaves["residual"] for leaves in buckets if "residual" in leaves])


def restored_alone(spec: str, saved: list[Saved], world: World) -> Arr:
    """The residuals that a rank of another world would go on with."""
    job = Job(spec).run(1)
    reducer = job.reducer
    for bucket in reducer.buckets:  # as if the job had as many ranks
        bucket.state = bucket.method.init(bucket.ops, bucket.bucket, world)
    loaded = restored(saved, reducer.label, reducer.by_bucket(), world)
    reducer.restore(loaded)
    return residuals(Saved("", world.rank, world.size, {"": reducer.saved()}))
