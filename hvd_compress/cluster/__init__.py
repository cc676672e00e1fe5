"""Emulated hosts on one Linux machine: network namespaces with a real bandwidth limit between them."""

from hvd_compress.cluster.cluster import Cluster
from hvd_compress.cluster.job import Finished

__all__ = ["Cluster", "Finished"]
