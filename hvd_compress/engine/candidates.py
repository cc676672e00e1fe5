"""Candidates of ``auto``, by the optimizer that applies the gradients, and its options."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

from hvd_compress.core.method import check_range

LOSSES = ("none", "small")
"""Allowed increase of the loss: none beyond the spread of seeds, or a small one."""


class Standard(NamedTuple):
    """A candidate.

    Attributes:
        spec: Its spec string.
        adam: Increase of the loss with Adam and its variants, one of `LOSSES`; "" if it is larger.
        sgd: The same with SGD.
    """

    spec: str
    adam: str
    sgd: str

    def keeps(self, loss: str, adam: bool) -> bool:
        """Return whether it increases the loss by no more than one of `LOSSES`, with Adam or with SGD."""
        return (self.adam if adam else self.sgd) in LOSSES[: LOSSES.index(loss) + 1]


BASELINES = ("none", "fp16:feedback=on")
"""Candidates whatever the user names: no compression, and 16 bits, safe from overflow."""


def between_nodes(spec: str) -> str:
    """Return a spec with ``hierarchical=on``."""
    return f"{spec}{',' if ':' in spec else ':'}hierarchical=on"


_COMPRESSED = (
    Standard("qsgd:bits=8,twoway=on", "none", "none"),
    Standard("qsgd", "none", "none"),
    Standard("qsgd:twoway=on", "none", "none"),
    Standard("powersgd:rank=16", "small", "none"),
    Standard("powersgd:rank=4", "", "none"),
    Standard("topk:ratio=0.01", "", "none"),
    Standard("efsignsgd:twoway=on", "", "small"),
)

STANDARD: Sequence[Standard] = (
    *(Standard(spec, "none", "none") for spec in (*BASELINES, "bf16")),
    *_COMPRESSED,
    *(one._replace(spec=between_nodes(one.spec)) for one in _COMPRESSED),
)
"""Verdicts as measured: docs/methods.md, With AdamW, and docs/results.md."""


@dataclass(frozen=True)
class AutoOptions:
    """Options of ``auto``, as in spec strings.

    Args:
        loss: Allowed increase of the loss, one of `LOSSES`.
        max_error: Largest relative squared error of a step; 0 for the default of `Auto`.
        probe: Maximum number of steps in which candidates are compared.
    """

    loss: str = "none"
    max_error: float = 0.0
    probe: int = 60

    def __post_init__(self) -> None:
        check_range("loss", self.loss, " or ".join(map(repr, LOSSES)), self.loss in LOSSES)
        check_range("max_error", self.max_error, "at least 0; 0 for the default", self.max_error >= 0)
