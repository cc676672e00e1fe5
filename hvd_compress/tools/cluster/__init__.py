"""Emulated hosts on one Linux machine: network namespaces with a real bandwidth limit between them."""

from hvd_compress.tools.cluster.cluster import Cluster
from hvd_compress.tools.cluster.job import Finished

__all__ = ["Cluster", "Finished"]
