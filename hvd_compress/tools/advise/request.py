"""Settings of a comparison that ``hvd-compress advise`` runs on a cluster."""

from __future__ import annotations

from typing import NamedTuple


class Request(NamedTuple):
    """Settings of a comparison.

    Attributes:
        params: Number of parameters; 0 if there is a model.
        side: Rows and columns of their matrices.
        model: Function that makes the model, as ``file.py:function``; "" for one of so many parameters.
        compute: Seconds that a step of a model of so many parameters takes besides its exchange.
        adam: Whether the optimizer is Adam or one of its variants.
        loss: Allowed increase of the loss.
        candidates: Specs to compare; none for those of ``auto``.
    """

    params: int
    side: int
    model: str
    compute: float
    adam: bool
    loss: str
    candidates: list[str]
