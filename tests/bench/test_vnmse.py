"""vNMSE: cases whose answer is known."""

from __future__ import annotations

import numpy as np
import pytest

from hvd_compress.core.method import Method
from hvd_compress.engine.local_world import LocalWorld
from hvd_compress.engine.spec import parse
from hvd_compress.errors import GradientError, SpecError
from hvd_compress.methods import REGISTRY
from hvd_compress.methods.wrappers.error_feedback import ErrorFeedback
from methods_page import vnmse
from methods_page.inputs import Sample, gaussian, sample

BY_HAND = Sample("hand", [np.array([1.0, 8.0, 3.0, 0.0]), np.array([-4.0, 0.0, 1.0, 2.0])], {"matrix": (2, 2)})


def test_by_hand() -> None:
    """The ranks send 8 and -4: (-2, 4, 0, 0) stands for (-1.5, 4, 2, 1), which leaves (0.5, 0, -2, -1)."""
    result = vnmse.measure("topk:ratio=0.25", BY_HAND)
    assert result.vnmse == pytest.approx((0.25 + 4 + 1) / (2.25 + 16 + 4 + 1), rel=1e-12)
    assert result.bits == 8 * (8 + 2) / 4  # a float64 and a 16-bit index
    assert result.direction == pytest.approx(1 - 19**2 / (20 * 23.25), rel=1e-12)


def test_what_sends_all_has_no_error() -> None:
    for spec in ("none", "topk:ratio=1", "randomk:ratio=1", "gtopk:ratio=1", "blockk:ratio=1"):
        assert vnmse.measure(spec, gaussian(1000, 3)).vnmse < 1e-14, spec


def test_what_sends_nothing_has_error_one() -> None:
    assert vnmse.measure("threshold:threshold=1e9", BY_HAND).vnmse == 1
    assert vnmse.measure("threshold:threshold=1e9", BY_HAND).direction == 1


def test_rounding_to_half() -> None:
    """Relative errors of up to 2^-11, about uniform: their mean square over one octave is about 2^-22 / 3 / 2."""
    assert 2.0**-25 < vnmse.measure("fp16", gaussian(100_000, 1)).vnmse < 2.0**-22


def test_qsgd_has_the_variance_of_stochastic_rounding() -> None:
    """A coordinate at a share f between two levels has the variance ``f (1 - f) unit^2``."""
    x = gaussian(512 * 200, 1).ranks[0]
    unit = np.repeat(np.abs(x.reshape(-1, 512)).max(axis=1), 512).astype(np.float64) / 7
    f = np.abs(x) / unit % 1
    expected = np.sum(f * (1 - f) * unit**2) / np.sum(x.astype(np.float64) ** 2)
    measured = vnmse.measure("qsgd:bits=4,block=512", Sample("", [x], {})).vnmse
    assert measured == pytest.approx(expected, rel=0.02)


def test_equal_gradients_average_independent_rounding() -> None:
    x = gaussian(100_000, 1).ranks[0]
    one, four = (vnmse.measure("natural", Sample("", [x] * n, {})).vnmse for n in (1, 4))
    assert four == pytest.approx(one / 4, rel=0.03)


def test_low_rank_methods_are_exact_on_what_has_low_rank() -> None:
    rng = np.random.default_rng(0)
    left, right = rng.standard_normal((40, 2)), rng.standard_normal((2, 40))
    grads = Sample("low", [(c * left @ right).ravel() for c in (1.0, 2.0)], {"matrix": (40, 40)})
    assert vnmse.measure("powersgd:rank=2", grads).vnmse < 1e-12
    assert vnmse.measure("powersgd:rank=1", grads).vnmse > 1e-3


def test_steps_warm_up_low_rank_methods_only() -> None:
    grads = sample("blocky", 10_000, 2)
    assert vnmse.measure("powersgd:rank=4", grads, 8).vnmse < vnmse.measure("powersgd:rank=4", grads, 0).vnmse
    assert vnmse.measure("qsgd", grads, 8) == vnmse.measure("qsgd", grads, 0)


def test_shuffling_hurts_chunks_and_nothing_else() -> None:
    blocky, shuffled = (sample(name, 100_000, 4) for name in ("blocky", "shuffled"))
    chunks = [vnmse.measure("topkc:ratio=0.0625", grads).vnmse for grads in (blocky, shuffled)]
    single = [vnmse.measure("topk:ratio=0.0625", grads).vnmse for grads in (blocky, shuffled)]
    assert chunks[1] > 2 * chunks[0]
    assert single[1] == pytest.approx(single[0], rel=1e-3)


def test_default_specs_keep_their_bounds() -> None:
    grads = gaussian(64 * 1024, 4)
    for spec in vnmse.default_specs():
        allowed = vnmse.bare(spec).core.bound
        assert allowed is None or vnmse.measure(spec, grads).vnmse <= allowed * 1.03, spec


def test_bounds() -> None:
    expected = {
        "topk:ratio=0.1": 0.9,
        "gtopk:ratio=0.1": None,
        "randomk:ratio=0.1": 0.9,
        "randomk:ratio=0.1,unbiased=on": 9,
        "natural": 1 / 8,
        "natural:twoway=on": None,
        "qsgd:bits=8,block=256": 256 / 127**2,
        "qsgd:bits=3,block=256": 16 / 3,
        "onebit": None,
    }
    assert {spec: vnmse.bare(spec).core.bound for spec in expected} == pytest.approx(expected)


def test_all_methods_have_a_spec() -> None:
    assert {vnmse.name_of(spec) for spec in vnmse.default_specs()} == set(REGISTRY)
    for spec in vnmse.default_specs():
        parse(spec)
    assert len(set(vnmse.default_specs())) == len(vnmse.default_specs())


def test_bare_methods_keep_nothing() -> None:
    for spec in ("topk", "topk:measure=on,start=2,warmup=4,every=5,delay=2", "dgc", "scalecom:feedback=ef21", "fp16"):
        assert vnmse.bare(spec).core == REGISTRY[vnmse.name_of(spec)]()


def test_bare_methods_keep_what_the_spec_chooses() -> None:
    method = vnmse.bare("powersgd:min_size=7,vectors=on")
    assert (getattr(method, "min_size", 0), getattr(method, "vectors", False)) == (7, True)


def test_the_measurement_can_tell_feedback() -> None:
    """A method with feedback would give another result in the second exchange: `measure` must not have it."""
    grads = gaussian(1000, 2)
    worlds = [LocalWorld(method, 2) for method in (_fed("topk:ratio=0.1"), vnmse.bare("topk:ratio=0.1"))]
    first, second = zip(*([world.step(grads.ranks)[0] for world in worlds] for _ in range(2)), strict=True)
    assert not np.array_equal(*first)
    np.testing.assert_array_equal(*second)


def _fed(spec: str) -> Method:
    return ErrorFeedback(vnmse.bare(spec).core)


def test_all_results_are_json_and_progress_is_told() -> None:
    told: list[str] = []
    given = vnmse.measure_all(["none", "int8"], ["gaussian", "blocky"], size=500, ranks=2, progress=told.append)
    assert given["sizes"] == {"gaussian": 500, "blocky": 500} and given["ranks"] == 2
    assert [(r["spec"], r["input"]) for r in given["results"]] == [
        ("none", "gaussian"),
        ("int8", "gaussian"),
        ("none", "blocky"),
        ("int8", "blocky"),
    ]
    assert len(told) == 2 * 3 + 1


def test_mistakes_show_before_anything_is_measured() -> None:
    told: list[str] = []
    with pytest.raises(SpecError, match="did you mean 'topk'"):
        vnmse.measure_all(["none", "topkk"], ["gaussian"], progress=told.append)
    assert told == []
    with pytest.raises(SpecError, match="steps=-1"):
        vnmse.measure("none", BY_HAND, -1)
    with pytest.raises(GradientError, match="mean of these gradients is 0"):
        vnmse.measure("none", Sample("", [np.zeros(4)], {}))
