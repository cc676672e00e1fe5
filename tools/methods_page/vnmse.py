"""The error of the mean that a method gives, and the bits that it takes.

Han et al., Beyond Throughput and Compression Ratios, 2024, compare methods by the normalised squared error of the
mean, at the bits per coordinate that it took with all metadata::

    vNMSE = ||mean_hat - mean||^2 / ||mean||^2
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any, NamedTuple

import numpy as np

from hvd_compress.core.method import Method, Wrapper
from hvd_compress.core.router import Everywhere, Router
from hvd_compress.engine.local_world import LocalWorld
from hvd_compress.engine.spec import parse
from hvd_compress.errors import GradientError, SpecError
from hvd_compress.methods import REGISTRY
from hvd_compress.methods.lowrank import LowRank
from hvd_compress.methods.wrappers.router import Selective
from methods_page.inputs import Arr, Sample, sample

BUDGETS = {"16 bits and more": 15, "8 bits": 7, "2 to 6 bits": 1.5, "1 bit and less": 0}
"""Parts of the table, each with the fewest bits per coordinate of the specs in it."""


class Result(NamedTuple):
    """A method's result on one input."""

    spec: str
    input: str
    bits: float  # Payload bits per coordinate
    vnmse: float  # The normalised squared error of the mean
    direction: float  # What is left of it with the mean at its best scale: ``1 - cos^2``


def name_of(spec: str) -> str:
    """Return the method of a spec."""
    return spec.partition(":")[0].strip()


def bare(spec: str) -> Router:
    """Return the method of a spec without memory, schedules and measuring; where to compress stays."""
    router = parse(spec)
    inner = _unwrapped(router.core)
    if not isinstance(router, Selective):
        return Everywhere(inner)
    return replace(router, inner=inner, dense_method=_unwrapped(router.dense_method), spec="")


def _unwrapped(method: Method) -> Method:
    while isinstance(method, Wrapper):
        method = method.inner
    return method


def error(estimate: Arr, exact: Arr) -> tuple[float, float]:
    """Return the vNMSE and ``1 - cos^2`` of an estimate; computed in float64."""
    estimate, exact = estimate.astype(np.float64).ravel(), exact.astype(np.float64).ravel()
    norm, own = float(exact @ exact), float(estimate @ estimate)
    if norm == 0:
        raise GradientError("the mean of these gradients is 0, so no error can be related to it")
    left = 1 - float(estimate @ exact) ** 2 / (own * norm) if own else 1.0
    return float(np.sum((estimate - exact) ** 2)) / norm, max(left, 0.0)


def measure(spec: str, grads: Sample, steps: int = 8) -> Result:
    """Exchange once, without error feedback, and measure the error of the mean on rank 0.

    Low-rank methods get the tensors of a gradient, all others one flat array. Those that learn get
    ``steps`` exchanges of the same gradients first, and the mean of their last two counts: some alternate.

    Raises:
        SpecError: If the spec is not one, or ``steps`` is negative.
    """
    if steps < 0:
        raise SpecError(f"steps={steps} is not allowed: steps must be at least 0")
    method = bare(spec)
    by_shape = isinstance(method.core, LowRank)
    given: dict[str, list[Arr]] = grads.tensors if by_shape else {"": grads.ranks}
    exact = _flat({name: [np.mean(np.stack(ranks), axis=0, dtype=np.float64)] for name, ranks in given.items()})
    world = LocalWorld(method, len(grads.ranks))

    trials: list[tuple[float, float, float]] = []
    for _ in range(1 + steps if REGISTRY[name_of(spec)].card.learns else 1):
        before = world.bytes_sent
        means = world.step(given if by_shape else grads.ranks)
        bits = 8 * (world.bytes_sent - before) / exact.size
        trials.append((bits, *error(_flat(means if by_shape else {"": means}), exact)))
    return Result(spec, grads.name, *(float(value) for value in np.mean(trials[-2:], axis=0)))


def measure_all(
    specs: Sequence[str],
    inputs: Sequence[str],
    *,
    size: int = 1_000_000,
    ranks: int = 4,
    steps: int = 8,
    progress: Callable[[str], None] = lambda done: None,
) -> dict[str, Any]:
    """Measure all specs on all inputs.

    Args:
        specs: The methods.
        inputs: Names of the inputs.
        size: Coordinates of the synthetic inputs.
        ranks: How many gradients there are in the mean.
        steps: See `measure`.
        progress: Called with the name of each measurement before it, and once at the end.

    Returns:
        The settings and the results, ready for JSON.

    Raises:
        SpecError: If a spec or an input is unknown.
        MissingPackageError: If an input needs a package that is not there.
    """
    for spec in specs:
        parse(spec)  # a mistake shows before anything is computed
    results, sizes = [], {}
    for name in inputs:
        progress(f"{name}: the gradients")
        grads = sample(name, size, ranks)
        sizes[name] = int(grads.ranks[0].size)
        for spec in specs:
            progress(f"{name}: {spec}")
            results.append(measure(spec, grads, steps)._asdict())
    progress("")
    return {"ranks": ranks, "steps": steps, "sizes": sizes, "results": results}


def default_specs() -> list[str]:
    """Return the specs that methods name for the table."""
    return [spec for name, cls in REGISTRY.items() for spec in cls.card.compared or (name,)]


def _flat(tensors: Mapping[str, Sequence[Arr]]) -> Arr:
    """Return the gradients of rank 0 as one array."""
    return np.concatenate([ranks[0].ravel() for ranks in tensors.values()])
