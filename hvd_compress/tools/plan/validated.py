"""Where the model has been held against measurements: a verdict is given there, and nowhere else."""

from __future__ import annotations

from hvd_compress.tools.plan.model import Setup
from hvd_compress.tools.plan.target import Backend, Device, Target
from hvd_compress.tools.plan.validation import CORES, HOSTS, LINKS
from hvd_compress.tools.units import read_rate, write_rate

RANKS = (min(HOSTS), max(HOSTS))
RATES = tuple(read_rate("rate", link) for link in LINKS)

RANGE = (
    f"CPUs with Gloo, {RANKS[0]} to {RANKS[1]} ranks, one on each host, {write_rate(min(RATES))} to"
    f" {write_rate(max(RATES))}, at least {CORES / RANKS[1]:g} of a core for each rank"
)
"""In words."""


def beyond(setup: Setup, target: Target) -> list[str]:
    """Return in what a job lies outside the validated range; empty if it does not."""
    outside = {
        "GPUs": target.device is Device.gpu,
        {Backend.nccl: "NCCL"}.get(target.backend, "MPI"): target.backend is not Backend.gloo,
        f"{setup.ranks:,} rank{'s' if setup.ranks > 1 else ''}": not RANKS[0] <= setup.ranks <= RANKS[1],
        f"{setup.ranks_per_host} ranks on each host": setup.ranks_per_host > 1,
        f"a rate of {write_rate(setup.rate)}": not min(RATES) <= setup.rate <= max(RATES),
        f"{setup.cores_per_rank:g} of a core for each rank": setup.cores_per_rank < CORES / RANKS[1],
    }
    return [what for what, so in outside.items() if so]
