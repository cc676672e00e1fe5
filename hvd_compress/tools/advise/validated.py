"""The range of jobs in which predictions were compared with measurements."""

from __future__ import annotations

from collections.abc import Sequence

from hvd_compress.tools.advise.model import Setup
from hvd_compress.tools.advise.target import BACKEND_NAMES, Target
from hvd_compress.tools.units import counted, read_rate, write_rate

HOSTS, LINKS = (2, 4, 8), ("100mbit", "300mbit", "1gbit")
"""Emulated hosts, of a rank each, and the bandwidths of each."""

CORES = 2
"""The cores of the machine that the constants come from, which all its emulated hosts share."""

RANKS = (min(HOSTS), max(HOSTS))
RATES = tuple(read_rate("rate", link) for link in LINKS)

RANGE = (
    f"CPUs with Gloo, {RANKS[0]} to {RANKS[1]} ranks, one on each host, {write_rate(min(RATES))} to"
    f" {write_rate(max(RATES))}, at least {CORES / RANKS[1]:g} of a core for each rank"
)
"""The validated range in words."""


def beyond(setup: Setup, target: Target, specs: Sequence[str] = ()) -> list[str]:
    """Return in what a job lies outside the validated range; empty if it does not."""
    outside = {
        "GPUs": target.device != "cpu",
        BACKEND_NAMES[target.backend]: target.backend != "gloo",
        counted(setup.ranks, "rank"): not RANKS[0] <= setup.ranks <= RANKS[1],
        f"{setup.ranks_per_node} ranks on each node": setup.ranks_per_node > 1,
        f"a rate of {write_rate(setup.rate)}": not min(RATES) <= setup.rate <= max(RATES),
        f"{setup.cores_per_rank:g} of a core for each rank": setup.cores_per_rank < CORES / RANKS[1],
        "local steps": any("@" in spec for spec in specs),
    }
    return [what for what, so in outside.items() if so]
