"""Settings of ``hvd-compress advise``: the shapes of a model, and what to compare for it."""

from __future__ import annotations

from typing import NamedTuple


class Shapes(NamedTuple):
    """Shapes of the gradients of a model.

    Attributes:
        params: Number of parameters.
        tensors: Number of gradients; 0 for that of matrices of that side.
        side: Rows and columns of square matrices as large as the others, on average.
        vectors: Share of the parameters in vectors.
    """

    params: int
    tensors: int
    side: int
    vectors: float


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
