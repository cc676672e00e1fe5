"""Activations and gradients between the stages of a model that is split, compressed.

The framework-neutral part; use `hvd_compress.pipeline.torch` or `hvd_compress.pipeline.tensorflow`.
"""

from hvd_compress.pipeline.operators import OPERATORS, operator
from hvd_compress.pipeline.samples import AQSGD

__all__ = ["AQSGD", "OPERATORS", "operator"]
