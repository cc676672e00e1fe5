"""The catalogue: one file per method or family of methods."""

from __future__ import annotations

from dataclasses import fields
from typing import Any, NamedTuple

from hvd_compress.methods.acpsgd import ACPSGD
from hvd_compress.methods.base import Method
from hvd_compress.methods.bf16 import BFloat16
from hvd_compress.methods.blockk import BlockK
from hvd_compress.methods.cast import Dense, Half
from hvd_compress.methods.dgc import DGC
from hvd_compress.methods.gtopk import GTopK
from hvd_compress.methods.homomorphic import Homomorphic
from hvd_compress.methods.int8 import Int8
from hvd_compress.methods.loco import LoCo
from hvd_compress.methods.natural import Natural
from hvd_compress.methods.onebit import EFSignSGD, OneBit
from hvd_compress.methods.powersgd import PowerSGD
from hvd_compress.methods.qsgd import QSGD, TernGrad
from hvd_compress.methods.randomk import RandomK
from hvd_compress.methods.scalecom import ScaleCom
from hvd_compress.methods.sidco import SIDCo
from hvd_compress.methods.sign import SignSGD, Signum
from hvd_compress.methods.thc import THC
from hvd_compress.methods.threshold import Threshold
from hvd_compress.methods.topk import TopK
from hvd_compress.methods.topkc import TopKC

_DENSE = (Dense, Half, BFloat16)
_SPARSE = (TopK, Threshold, DGC, SIDCo, GTopK, RandomK, BlockK, TopKC, ScaleCom)
_QUANTISED = (QSGD, TernGrad, Natural, OneBit, SignSGD, Signum, EFSignSGD, Int8, THC, LoCo)
_LOW_RANK = (PowerSGD, ACPSGD)
_LOSSLESS = (Homomorphic,)

REGISTRY: dict[str, type[Method]] = {cls.name: cls for cls in (*_DENSE, *_SPARSE, *_QUANTISED, *_LOW_RANK, *_LOSSLESS)}


class MethodInfo(NamedTuple):
    """A line of the catalogue.

    Attributes:
        name: As in spec strings.
        collective: What it needs of Horovod in each step.
        state: What it keeps between steps, besides the residual.
        unbiased: ``"yes"``, ``"exact"``, ``"no"``, or with which parameters; error feedback aside.
        feedback: Whether error feedback (a residual of the gradient's size) is on by default.
        hyper_parameters: Names and defaults.
        paper: The source.
    """

    name: str
    collective: str
    state: str
    unbiased: str
    feedback: bool
    hyper_parameters: dict[str, Any]
    paper: str


def methods() -> list[MethodInfo]:
    """List the methods that there are."""
    return [
        MethodInfo(
            cls.name,
            cls.collective,
            cls.keeps,
            cls.unbiasedness,
            cls.feedback,
            {field.name: field.default for field in fields(cls)},  # type: ignore[arg-type]
            cls.paper,
        )
        for cls in REGISTRY.values()
    ]
