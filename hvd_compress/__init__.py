"""Gradient compression for Horovod.

This module imports no framework. Import `Compression` from `hvd_compress.torch`, `hvd_compress.tensorflow` or
`hvd_compress.keras`.
"""

from __future__ import annotations

from hvd_compress._version import __version__
from hvd_compress.core.local_world import LocalWorld
from hvd_compress.errors import CompressionError
from hvd_compress.group import node_process_sets
from hvd_compress.methods import methods
from hvd_compress.spec import parse

__all__ = ["CompressionError", "LocalWorld", "__version__", "methods", "node_process_sets", "parse"]
