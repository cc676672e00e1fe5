"""Measuring: the normalised error is that of its definition, and training does not notice."""

from __future__ import annotations

import numpy as np
import pytest
from worlds import FRAMEWORKS, bucket_of, normal, ops_of

from hvd_compress import parse
from hvd_compress.core.collectives import World
from hvd_compress.core.method import Method
from hvd_compress.methods.wrappers.measure import Measured, vnmse
from hvd_compress.methods.wrappers.router import Selective
from hvd_compress.transport.lockstep import lockstep


def core(spec: str) -> Method:
    return parse(spec).core


@pytest.mark.parametrize("framework", FRAMEWORKS)
@pytest.mark.parametrize("spec", ["topk:ratio=0.1", "int8", "topk:ratio=0.1,start=1,warmup=4,feedback=off"])
def test_the_error_is_that_of_the_definition(spec: str, framework: str) -> None:
    ops, bucket = ops_of(framework), bucket_of((30, 40))
    plain, measured = core(spec), core(f"{spec}{',' if ':' in spec else ':'}measure=on")
    assert measured == Measured(plain)
    states = [[method.init(ops, bucket, World(0, 2)) for _ in range(2)] for method in (plain, measured)]
    error = norm = 0.0
    for step in range(3):
        xs = normal(bucket, 2, seed=step)
        results = [
            lockstep(ops, method, bucket, [x.copy() for x in xs], before)
            for method, before in zip((plain, measured), states, strict=True)
        ]
        states = [[result.state for result in ranks] for ranks in results]
        total = np.asarray(results[0][0].total)
        np.testing.assert_array_equal(np.asarray(results[1][0].total), total)
        exact = (xs[0] + xs[1]).astype(np.float64)
        error, norm = error + np.sum((total - exact) ** 2), norm + np.sum(exact**2)
    assert error > 0
    np.testing.assert_allclose(vnmse([states[1][0], ()]) or 0, error / norm, rtol=1e-5)


def test_nothing_measured() -> None:
    assert vnmse([]) is None
    assert vnmse([()]) is None


def test_it_is_off_by_default_and_inside_the_policy() -> None:
    assert isinstance(parse("topk:measure=on"), Selective)
    assert parse("topk:measure=on").core == Measured(parse("topk").core)
