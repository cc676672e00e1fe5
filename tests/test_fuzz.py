"""Whatever the hyper-parameters and the gradients are, there is a result or a reason."""

from __future__ import annotations

import dataclasses
from typing import Any

import numpy as np
import pytest
from catalogue import COMPOSED, SPECS, one_in
from hypothesis import given, settings
from hypothesis import strategies as st
from worlds import Arr

from hvd_compress import LocalWorld, parse
from hvd_compress.engine.spec import MEMORY, OPTIONS, build
from hvd_compress.errors import SpecError
from hvd_compress.methods import REGISTRY

ANYTHING: st.SearchStrategy[Any] = st.one_of(
    st.integers(),
    st.integers(-3, 70),
    st.floats(),
    st.floats(-2, 2),
    st.booleans(),
    st.none(),
    st.text(max_size=5),
    st.sampled_from(["on", "off", "fp16", "max", "l2", "full", "none", "table", "saturate", "1e400", "0x10", "1_0"]),
    st.lists(st.integers(), max_size=2),
    st.just(np.float32(0.5)),
    st.just(np.int64(4)),
)

FIELDS = [(name, field.name) for name, cls in REGISTRY.items() for field in dataclasses.fields(cls)]  # type: ignore[arg-type]


@pytest.mark.parametrize(("name", "field"), one_in(3, FIELDS))
@settings(max_examples=30)
@given(value=ANYTHING)
def test_any_value_of_a_hyper_parameter_is_taken_or_refused_by_name(name: str, field: str, value: Any) -> None:
    try:
        method = build(name, **{field: value})
    except SpecError as error:
        assert field in str(error)
    else:
        assert parse(str(method)) == method


@pytest.mark.parametrize("option", one_in(3, ["feedback", *MEMORY, *OPTIONS]))
@settings(max_examples=30)
@given(value=ANYTHING)
def test_any_value_of_an_option_is_taken_or_refused_by_name(option: str, value: Any) -> None:
    try:
        method = build("topk", **{option: value})
    except SpecError as error:
        assert option in str(error)
    else:
        assert parse(str(method)) == method


SHAPES = st.one_of(
    st.sampled_from([(), (0,), (1,), (3, 0), (1, 1), (2, 3, 1, 4)]),
    st.integers(1, 2000).map(lambda n: (n,)),
    st.tuples(st.integers(1, 40), st.integers(1, 40)),
)
DTYPES = st.sampled_from(["float16", "float32", "float64"])
RANKS = 3


@st.composite
def values(draw: st.DrawFn, shape: tuple[int, ...], dtype: str) -> Arr:
    """A gradient of one rank: ordinary, constant, sparse, denormal or huge."""
    rng = np.random.default_rng(draw(st.integers(0, 99)))
    top, least = float(np.finfo(dtype).max), float(np.finfo(dtype).smallest_subnormal)
    scale = draw(st.sampled_from([0.0, -0.0, 1.0, -1.0, 1e-3, least, -least * 3, 100 * least, top / 2000, top]))
    kind = draw(st.sampled_from(["constant", "normal", "one hot", "signs", "mixed"]))
    flat = np.ones(int(np.prod(shape)))
    if kind == "normal":
        flat = rng.standard_normal(flat.size) / 5
    elif kind == "one hot":
        flat = flat * (np.arange(flat.size) == rng.integers(max(1, flat.size)))
    elif kind == "signs":
        flat = rng.choice([-1.0, 1.0], flat.size)
    elif kind == "mixed":
        flat = 10.0 ** rng.integers(-30, 1, flat.size) * rng.choice([-1.0, 0.0, 1.0], flat.size)
    with np.errstate(under="ignore"):
        return np.clip(flat * scale, -top, top).astype(dtype).reshape(shape)


@pytest.mark.slow
@pytest.mark.parametrize("spec", [*SPECS, *COMPOSED])
@settings(max_examples=15)
@given(data=st.data())
def test_any_finite_gradients(spec: str, data: st.DataObject) -> None:
    """The means are equal on all ranks, of the shape and dtype of the gradients, and finite, or no state has changed.

    Near the end of the range sums overflow. Where the means show it, the step counts as one with a gradient that is
    not finite; what a rank keeps back may overflow unseen.
    """
    shape, dtype = data.draw(SHAPES), data.draw(DTYPES)
    world = LocalWorld(COMPOSED.get(spec, spec), RANKS)
    for _ in range(2):
        grads = [data.draw(values(shape, dtype)) for _ in range(RANKS)]
        near_the_end = any((np.abs(grad) > np.finfo(dtype).max / 1000).any() for grad in grads) and dtype != "float16"
        steps, before = world.steps, [world.residual(rank) for rank in range(RANKS)] if world.steps else None
        with np.errstate(all="ignore"):
            means = world.step(grads)
        for mean in means:
            assert (mean.shape, mean.dtype) == (shape, np.dtype(dtype))
            if "delay" not in spec:
                np.testing.assert_array_equal(mean, means[0])
        finite = all(np.isfinite(mean).all() for mean in means)
        assert world.steps == steps + finite
        for rank in range(RANKS):
            for name, residual in world.residual(rank).items():
                assert near_the_end or np.isfinite(residual).all()
                if not finite and before is not None:
                    np.testing.assert_array_equal(residual, before[rank][name])
        if near_the_end:
            return
