"""Emulated hosts on one Linux machine: network namespaces with a real bandwidth limit between them."""

from hvd_compress.tools.cluster.cluster import Cluster
from hvd_compress.tools.cluster.job import Finished
from hvd_compress.tools.cluster.rootless import become_root

__all__ = ["Cluster", "Finished", "become_root"]
