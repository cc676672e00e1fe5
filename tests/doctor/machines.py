"""Machines that could be: the facts that `hvd-compress doctor` would find there."""

from __future__ import annotations

from typing import Any

from hvd_compress.tools.doctor.facts import Facts, Framework

TORCH = Framework("torch", "2.13.0+cpu", "2.13.0+cpu", built=("gloo", "mpi"))
TENSORFLOW = Framework("tensorflow", "2.15.1", "2.15.1", keras="2.15.0", built=("gloo", "mpi"))
NO_TORCH, NO_TENSORFLOW = Framework("torch"), Framework("tensorflow")

HEALTHY = Facts(
    package="0.1.0",
    python="3.11.7",
    numpy="1.26.4",
    horovod="0.28.1",
    horovodrun="/env/bin/horovodrun",
    on_path=True,
    launches=None,
    mpirun="Open MPI 4.1.4",
    mpi4py="4.1.2",
    library="Open MPI 4.1.4",
    frameworks=(TORCH, TENSORFLOW),
)


def machine(torch: Framework | None = None, tensorflow: Framework | None = None, **facts: Any) -> Facts:
    """A healthy machine but for what is said."""
    return HEALTHY._replace(frameworks=(torch or TORCH, tensorflow or TENSORFLOW), **facts)
