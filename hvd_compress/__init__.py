"""Gradient compression for Horovod.

This module imports no framework. Import `Compression` from `hvd_compress.torch`, `hvd_compress.tensorflow` or
`hvd_compress.keras`.
"""

from __future__ import annotations

from hvd_compress._version import __version__
from hvd_compress.engine.local_world import LocalWorld
from hvd_compress.engine.spec import parse
from hvd_compress.errors import CompressionError
from hvd_compress.methods import methods
from hvd_compress.transport.groups import node_process_sets

__all__ = ["CompressionError", "LocalWorld", "__version__", "methods", "node_process_sets", "parse"]
