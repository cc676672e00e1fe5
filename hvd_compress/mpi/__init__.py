"""Gradient compression over `mpi4py`: numpy arrays in, their means out. Neither Horovod nor a framework is needed.

Use::

    from mpi4py import MPI
    from hvd_compress.mpi import Aggregator

    aggregator = Aggregator("topk:ratio=0.01", comm=MPI.COMM_WORLD)
    means = aggregator.step({"w": grad_w, "b": grad_b})
"""

from __future__ import annotations

from hvd_compress.errors import required

with required("hvd_compress.mpi", "mpi4py and an MPI library", "mpi"):
    import mpi4py.MPI

from hvd_compress.local.settings import Outer
from hvd_compress.mpi.aggregator import Aggregator
from hvd_compress.mpi.gossip import Gossip
from hvd_compress.mpi.local_steps import LocalSteps

__all__ = ["Aggregator", "Gossip", "LocalSteps", "Outer"]

del mpi4py
