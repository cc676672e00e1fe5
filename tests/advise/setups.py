"""A job, and how fast methods are, in round numbers."""

from __future__ import annotations

from typing import Any

from hvd_compress.tools.advise.constants import Constants
from hvd_compress.tools.advise.model import Prediction, Setup, predict
from hvd_compress.tools.advise.rates import Rate, Rates

TOPK, TOPKC, QSGD, POWERSGD = "topk:ratio=0.01", "topkc:ratio=0.01", "qsgd", "powersgd:rank=4"
GATHERED, REDUCED = (TOPK, QSGD), (TOPKC, POWERSGD)
SPECS = ("none", "fp16", *GATHERED, *REDUCED)

SIDE = 256
"""Of matrices; small, so that exchanges are quick to count."""

JOB = Setup(params=8_000_000, ranks=8, rate=1e9, compute=0.1, side=SIDE, framework="horovod")

FREE = Constants(efficiency=1.0, byte=0.0, half=0.0, hop=0.0, cycle=0.0, coding=1.0, overlap=0.0)
"""Horovod costs nothing, and hides nothing."""


def rates(encode: float, each: float = 0.0, copy: float = 0.0) -> Rates:
    """All methods alike, but for ``each``, which is for those that gather; seconds for each parameter."""
    gathered, reduced = Rate(encode, encode / 2, each), Rate(encode, encode / 2, 0.0)
    return Rates(copy, {**dict.fromkeys(GATHERED, gathered), **dict.fromkeys(REDUCED, reduced)})


QUICK, SLOW = rates(1e-9, 1e-12, 1e-10), rates(1e-6, 1e-8, 1e-10)


def made(spec: str, setup: Setup = JOB, constants: Constants | None = None, **changes: Any) -> Prediction:
    """A prediction, with something changed in the job."""
    return predict(spec, setup._replace(**changes), QUICK, constants or Constants())
