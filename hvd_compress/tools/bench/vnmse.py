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

from hvd_compress.core.local_world import LocalWorld
from hvd_compress.errors import GradientError, SpecError
from hvd_compress.methods.base import Method, Wrapper
from hvd_compress.methods.lowrank import LowRank
from hvd_compress.policy import Selective
from hvd_compress.spec import parse
from hvd_compress.tools.bench.inputs import Arr, Sample, sample

BUDGETS: dict[str, tuple[str, ...]] = {
    "16 bits and more": (
        "none",
        "fp16",
        "bf16",
        "int8:bits=16",
        "homomorphic",
    ),
    "8 bits": (
        "int8",
        "thc:bits=8",
        "loco:bits=8",
        "qsgd:bits=8",
        "natural",
        "topk:ratio=0.25,values=fp16",
        "randomk:ratio=0.25",
        "topkc:ratio=0.5",
    ),
    "2 to 6 bits": (
        "thc:bits=4",
        "thc:bits=4,levels=table",
        "thc:bits=4,overflow=saturate",
        "thc:bits=2,overflow=saturate",
        "loco:bits=4",
        "qsgd:bits=4",
        "qsgd:bits=4,norm=l2",
        "qsgd:bits=4,twoway=on",
        "qsgd:bits=2",
        "terngrad",
        "terngrad:clip=0",
        "topk:ratio=0.0625,values=fp16",
        "dgc:ratio=0.0625,values=fp16",
        "sidco:ratio=0.0625,values=fp16",
        "threshold:threshold=0.005",
        "gtopk:ratio=0.0625,values=fp16",
        "scalecom:ratio=0.0313",
        "randomk:ratio=0.0625",
        "blockk:ratio=0.0625",
        "topkc:ratio=0.125",
        "powersgd:rank=32",
        "acpsgd:rank=64",
    ),
    "1 bit and less": (
        "onebit",
        "efsignsgd",
        "efsignsgd:twoway=on",
        "signsgd",
        "signum",
        "topk:ratio=0.0156,values=fp16",
        "dgc:ratio=0.0156,values=fp16",
        "sidco:ratio=0.0156,values=fp16",
        "threshold:threshold=0.01",
        "gtopk:ratio=0.0156,values=fp16",
        "scalecom:ratio=0.0078",
        "randomk:ratio=0.0156",
        "blockk:ratio=0.0156",
        "topkc:ratio=0.0156",
        "powersgd:rank=8",
        "powersgd:rank=2",
        "acpsgd:rank=16",
        "acpsgd:rank=4",
    ),
}
"""The specs of the default table, by about how many bits per coordinate they take."""

WARMED = frozenset({"powersgd", "acpsgd", "sidco"})
"""Methods that learn from the gradients of the steps before: they get some, of the same gradients."""

SIGNS = frozenset({"signsgd", "signum"})
"""Methods whose mean has no scale: it is 1 or -1 everywhere, so only its direction can be judged."""


class Result(NamedTuple):
    """A method's result on one input."""

    spec: str
    input: str
    bits: float  # Payload bits per coordinate
    vnmse: float  # The normalised squared error of the mean
    direction: float  # What is left of it with the mean at its best scale: ``1 - cos^2``


def name_of(spec: str) -> str:
    return spec.partition(":")[0].strip()


def bare(spec: str) -> Method:
    """Return the method of a spec without memory, schedules and measuring; where to compress stays."""
    method = parse(spec)
    inner = _unwrapped(method.core)
    if not isinstance(method, Selective):
        return inner
    return replace(method, inner=inner, dense_method=_unwrapped(method.dense_method))


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

    Low-rank methods get the tensors of a gradient, all others one flat array. Those in `WARMED` get
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
    for _ in range(1 + steps if name_of(spec) in WARMED else 1):
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
    return [spec for specs in BUDGETS.values() for spec in specs]


def _flat(tensors: Mapping[str, Sequence[Arr]]) -> Arr:
    """Return the gradients of rank 0 as one array."""
    return np.concatenate([ranks[0].ravel() for ranks in tensors.values()])
