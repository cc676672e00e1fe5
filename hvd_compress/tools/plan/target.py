"""The kind of machine that a prediction is for, and what is assumed of it."""

from __future__ import annotations

from typing import Literal, NamedTuple

from hvd_compress.errors import SpecError
from hvd_compress.tools.plan.constants import BACKENDS, DDP_GLOO, GPU_ONLY, Constants
from hvd_compress.tools.plan.model import Framework, Setup
from hvd_compress.tools.plan.rates import Rates
from hvd_compress.tools.units import counted, write_rate

_FLOAT = 4
"""Bytes."""


Device = Literal["cpu", "gpu"]
"""The device that trains and compresses."""

Backend = Literal["gloo", "mpi", "nccl"]
"""The communication backend."""

FRAMEWORKS: dict[Framework, str] = {"horovod": "Horovod", "ddp": "DistributedDataParallel"}
BACKEND_NAMES: dict[Backend, str] = {"gloo": "Gloo", "mpi": "MPI", "nccl": "NCCL"}
"""Names in sentences."""


class Target(NamedTuple):
    """The machines of a cluster.

    Attributes:
        device: The device that trains and compresses.
        backend: The communication backend.
        framework: What exchanges gradients.
    """

    device: Device
    backend: Backend
    framework: Framework = "horovod"

    @property
    def constants(self) -> Constants:
        return DDP_GLOO if (self.framework, self.backend) == ("ddp", "gloo") else BACKENDS[self.backend]

    @property
    def tree(self) -> bool:
        """Whether small messages use trees instead of rings."""
        return self.backend == "nccl"

    def check(self, setup: Setup, constants: Constants) -> None:
        """Refuse what this device does not have.

        Raises:
            SpecError: If there is anything.
        """
        if self.device == "gpu" and setup.cores_per_rank < 1:
            raise SpecError(
                f"cores-per-rank={setup.cores_per_rank} is not allowed with device=gpu: there is a GPU for each rank;"
                " leave it out"
            )
        for name in GPU_ONLY:
            if self.device == "cpu" and getattr(constants, name):
                raise SpecError(f"constant {name} is not allowed with device=cpu: it is of GPUs; add --backend nccl")

    def rates(self, here: Rates, constants: Constants) -> Rates:
        """Return how fast methods are there.

        A GPU is taken to need as many passes over its memory as this machine's processor needs over its own, which is
        what compressing takes here, in units of a copy of the gradient.
        """
        if self.device == "cpu":
            return here
        return here.at(2 * _FLOAT * constants.memory)  # a copy reads and writes each number

    def assumptions(self, setup: Setup, constants: Constants) -> str:
        """Return one line with what a reader must know before the figures."""
        hosts = f"{counted(setup.ranks_per_host, 'rank')} on each host"
        by = f"{FRAMEWORKS[self.framework]} with {BACKEND_NAMES[self.backend]}"
        if self.device == "gpu":
            return (
                f"Assumed, NOT MEASURED: GPUs with {_bytes(constants.memory)} of memory bandwidth, which compress in as"
                f" many passes over memory as this processor; {by}, {hosts}, {_bytes(constants.bus)} between GPUs"
                f" of a host and {write_rate(setup.rate)} between hosts."
            )
        sums = f"float16 summed at {1e9 * constants.half:.3g} ns a number"
        if self.backend == "mpi":
            return (
                f"Assumed: CPUs, one thread for each rank, {hosts}; {by}, NOT MEASURED, with the constants of Gloo but"
                f" {sums}."
            )
        return f"Assumed: CPUs, one thread for each rank, {hosts}; {by}, {sums}; not for GPUs (--backend nccl)."


def _bytes(seconds: float) -> str:
    """Return a bandwidth in bytes, from the seconds for each byte."""
    return f"{1e-9 / seconds:,.0f} GB/s" if seconds else "unlimited"


def read_target(device: Device | None, backend: Backend | None, framework: Framework = "horovod") -> Target:
    """Complete what was asked for: NCCL implies GPUs, GPUs imply NCCL, and without both it is CPUs with Gloo.

    Raises:
        SpecError: If they are not supported together.
    """
    implied: Device = "gpu" if backend == "nccl" else "cpu" if backend else device or "cpu"
    target = Target(device or implied, backend or ("nccl" if implied == "gpu" else "gloo"), framework)
    if (framework, target.backend) == ("ddp", "mpi"):
        raise SpecError(
            "backend=mpi is not allowed with framework=ddp: the usual builds of PyTorch have no MPI; take gloo or nccl"
        )
    if (target.device == "gpu") != (target.backend == "nccl"):
        why = {
            "cpu": "NCCL exchanges what is on GPUs; take gloo or mpi, or --device gpu",
            "gpu": "without NCCL, gradients would go through the hosts' memory, which the model lacks; take nccl",
        }[target.device]
        raise SpecError(f"backend={target.backend} is not allowed with device={target.device}: {why}")
    return target
