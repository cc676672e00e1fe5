"""One spec or more of every method, as users write them, for the tests on real Horovod."""

from __future__ import annotations

import numpy as np
from worlds import Arr

from hvd_compress import parse
from hvd_compress.methods.base import Method
from hvd_compress.policy import by_name, phases

SPECS = [
    "none",
    "fp16",
    "fp16:feedback=on",
    "bf16",
    "topk:ratio=0.05",
    "topk:ratio=0.05,values=fp16,feedback=ef21",
    "topk:ratio=0.05,every=2",
    "topk:ratio=0.05,delay=2",
    "topk:ratio=0.05,momentum=0.5,nesterov=on",
    "threshold:threshold=2",
    "dgc:ratio=0.05",
    "sidco:ratio=0.05",
    "gtopk:ratio=0.05",
    "randomk:ratio=0.05",
    "blockk:ratio=0.05",
    "topkc:ratio=0.05,chunk=16",
    "scalecom:ratio=0.05",
    "qsgd",
    "qsgd:bits=3,twoway=on",
    "terngrad",
    "natural",
    "onebit",
    "onebit:twoway=on",
    "signsgd",
    "signum",
    "efsignsgd",
    "efsignsgd:twoway=on",
    "int8",
    "thc",
    "thc:rotation=full,overflow=saturate",
    "loco",
    "powersgd:rank=2",
    "acpsgd:rank=2",
    "homomorphic",
]

EACH_KIND = [
    "bf16",
    "topk:ratio=0.05",
    "dgc:ratio=0.05",
    "scalecom:ratio=0.05",
    "efsignsgd:twoway=on",
    "thc:rotation=full,overflow=saturate",
    "acpsgd:rank=2",
    "homomorphic",
]
"""Some that cover all ways to communicate, and all that a graph may have to choose while it runs."""

WARMING_UP = [
    "topk:ratio=0.05,start=1",
    "dgc:ratio=0.05,momentum=0.5,warmup=4",
    "signum:start=1",
    "topk:ratio=0.05,momentum=0.5,feedback=off",
]
"""Some that are in another stage in each of the first steps, and momentum of other kinds."""

COMPOSED: dict[str, Method] = {
    "phases": phases({0: parse("topk:ratio=0.05"), 1: parse("powersgd:rank=2"), 2: parse("int8")}),
    "by_name": by_name({"first*": parse("none"), "*": parse("topk:ratio=0.05")}),
}
"""Methods that no spec string has words for."""


def agree(spec: str, mean: Arr, expected: Arr) -> bool:
    """Whether two means are the same up to the order in which numbers were added.

    Where one is about to be rounded, another order may push it to the other side; a rotation spreads that.
    """
    in_16_bits = spec.startswith(("fp16", "topkc"))
    wrong = ~np.isclose(mean, expected, rtol=1e-3, atol=5e-3 if in_16_bits else 1e-4)
    return bool(wrong.mean() <= (0.05 if spec.startswith("thc") else 0.002))
