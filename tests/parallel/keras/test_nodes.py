"""Nodes with several ranks: `hierarchical=on` under Horovod, in Keras and in graphs."""

from __future__ import annotations

from pathlib import Path

import horovod.tensorflow as hvd
import numpy as np
import pytest
from parallel.keras.training import LOSSLESS, NODES, SIZE, Tape, assert_ranks_equal, everyone, fit, weights

from hvd_compress.errors import DisagreementError
from hvd_compress.tensorflow import Compression

LOSSY = [
    f"{spec},min_size=0,vectors=on,hierarchical=on" for spec in ("topk:ratio=0.05", "powersgd:rank=2", "qsgd:bits=4")
]


def test_the_job_has_several_nodes() -> None:
    assert hvd.cross_size() == NODES > 1 and hvd.local_size() == SIZE // NODES == 2


@pytest.mark.parametrize("spec", LOSSLESS)
def test_lossless_equals_horovod_without_compression(spec: str) -> None:
    ours = weights(fit(f"{spec},hierarchical=on", 6))
    np.testing.assert_allclose(ours, weights(fit("none", 6)), rtol=1e-4, atol=1e-5)
    assert_ranks_equal(ours)


@pytest.mark.parametrize("spec", LOSSY)
def test_ranks_stay_equal_over_fifty_steps(spec: str) -> None:
    assert_ranks_equal(weights(fit(spec, 50)))


def test_less_is_sent_between_nodes() -> None:
    flat, tall = (Compression.parse(spec) for spec in (LOSSY[0].replace(",hierarchical=on", ""), LOSSY[0]))
    for compression in (flat, tall):
        Tape(compression).run(3)
    assert tall.stats().bytes_sent < 0.6 * flat.stats().bytes_sent
    assert tall.stats().bytes_inside > flat.stats().bytes_inside == 0


@pytest.mark.parametrize("spec", LOSSY)
def test_a_restored_job_goes_on_bit_for_bit(spec: str, tmp_path: Path) -> None:
    whole, second = Tape(spec).run(4), Tape(spec)
    folder = Path(hvd.broadcast_object(str(tmp_path)))
    whole.compression.save(folder)
    everyone(None)
    second.run(1)
    second.model.set_weights(whole.model.get_weights())
    for mine, theirs in zip(second.optimizer.variables, whole.optimizer.variables, strict=True):
        mine.assign(theirs)
    second.compression.load(folder)
    whole.run(range(4, 8))
    np.testing.assert_array_equal(second.run(range(4, 8)).weights, whole.weights)


def test_other_settings_on_one_rank_are_the_same_error_on_all() -> None:
    inside = "fp16" if hvd.rank() == SIZE - 1 else "none"
    with pytest.raises(DisagreementError, match="method") as caught:
        Tape(Compression.topk(ratio=0.1, hierarchical=True, inside=inside)).run(1)
    assert len(set(everyone(str(caught.value)))) == 1
