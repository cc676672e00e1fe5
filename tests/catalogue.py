"""The examples of every method, and the specs that tests make of them, as users write them."""

from __future__ import annotations

from collections.abc import Iterable
from functools import cache
from typing import Any

import numpy as np
import pytest
from worlds import Arr, bucket_of, normal

from hvd_compress import parse
from hvd_compress.core.collectives import Collective, World
from hvd_compress.core.method import Example, Method, Wrapper
from hvd_compress.core.router import Router
from hvd_compress.methods import REGISTRY
from hvd_compress.methods.wrappers.router import by_name, phases
from hvd_compress.ops.numpy import NumpyOps
from hvd_compress.transport.lockstep import lockstep

EXAMPLES = {
    example.spec: example for name, cls in REGISTRY.items() for example in cls.card.examples or (Example(name),)
}
"""What methods say of themselves, by spec."""


COMPOSED: dict[str, Router] = {
    "phases": phases({0: parse("topk:ratio=0.05"), 1: parse("powersgd:rank=2"), 2: parse("int8")}),
    "by_name": by_name({"first*": parse("none"), "*": parse("topk:ratio=0.05")}),
}
"""Methods that no spec string has words for."""


def bare(spec: str) -> Method:
    """Return the method of a spec without what is kept between steps."""
    method = (COMPOSED.get(spec) or parse(spec)).core
    return method.inner if isinstance(method, Wrapper) else method


def one_in(n: int, cases: Iterable[Any]) -> list[Any]:
    """Return all cases of a test, of which ``make quick`` runs one in ``n``. A tuple is a case of several arguments."""
    values = [case if isinstance(case, tuple) else (case,) for case in cases]
    return [pytest.param(*value, marks=[pytest.mark.slow] if number % n else []) for number, value in enumerate(values)]


@cache
def way(spec: str) -> tuple[tuple[str, str, bool], ...]:
    """Return how a method communicates: each kind of message, its dtype, and whether ranks send different lengths."""
    method, ops, bucket = bare(spec), NumpyOps(), bucket_of((20, 30), (7,))
    sent: dict[tuple[str, str, bool], None] = {}

    def note(message: Collective) -> None:
        ragged = getattr(message, "ragged", False)
        sent[type(message).__name__, str(np.asarray(message.array).dtype), ragged] = None

    lockstep(ops, method, bucket, normal(bucket, 2), [method.init(ops, bucket, World(0, 2)) for _ in range(2)], note)
    return tuple(sent)


def each_way(chosen: Iterable[str], by_method: bool = True) -> list[str]:
    """Return the first spec for each way to communicate, of each method or of all."""
    first: dict[object, str] = {}
    for spec in chosen:
        first.setdefault((spec.partition(":")[0] if by_method else "", way(spec)), spec)
    return list(first.values())


SPECS = [
    *each_way(EXAMPLES),
    "fp16:feedback=on",
    "topk:ratio=0.05,values=fp16,feedback=ef21",
    "topk:ratio=0.05,every=2",
    "topk:ratio=0.05,delay=2",
    "topk:ratio=0.05,momentum=0.5,nesterov=on",
    "qsgd:bits=3,twoway=on",
    "thc:rotation=full,overflow=saturate",
    "ctk:ratio=0.1,chunk=64,preconditioned=on",
]
"""For tests on real Horovod: every way to communicate of every method, and every kind of memory."""

EACH_KIND = [
    "bf16",
    "topk:ratio=0.05",
    "dgc:ratio=0.05",
    "scalecom:ratio=0.05",
    "oktopk:ratio=0.05",
    "efsignsgd:twoway=on",
    "thc:rotation=full,overflow=saturate",
    "acpsgd:rank=2",
    "homomorphic",
]
"""Some that cover all ways to communicate, and all that a graph may have to choose while it runs."""

BETWEEN_NODES = [
    f"{spec}{',' if ':' in spec else ':'}hierarchical=on"
    for spec in (
        *(spec for spec in each_way(EXAMPLES, by_method=False) if not bare(spec).linear),
        "ctk:ratio=0.1,chunk=64,preconditioned=on",
        "dgc:ratio=0.05,momentum=0.5,warmup=4,inside=fp16",
        "powersgd:rank=2,start=1",
        "qsgd:twoway=on",
    )
]
"""Every way to communicate, between nodes."""

WARMING_UP = [
    "topk:ratio=0.05,start=1",
    "dgc:ratio=0.05,momentum=0.5,warmup=4",
    "signum:start=1",
    "topk:ratio=0.05,momentum=0.5,feedback=off",
]
"""Some that are in another stage in each of the first steps, and momentum of other kinds."""


def agree(spec: str, mean: Arr, expected: Arr) -> bool:
    """Whether two means are the same up to the order in which numbers were added.

    Where one is about to be rounded, another order may push it to the other side; a rotation spreads that.
    """
    in_16_bits = ("AllReduce", "float16", False) in way(spec)
    wrong = ~np.isclose(mean, expected, rtol=1e-3, atol=5e-3 if in_16_bits else 1e-4)
    return bool(wrong.mean() <= (0.05 if bare(spec).card.rotates else 0.002))
