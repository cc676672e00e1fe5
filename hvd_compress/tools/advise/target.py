"""The machines that a prediction is for, and what is assumed of them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal, NamedTuple

from hvd_compress.engine.spec import parse
from hvd_compress.errors import SpecError
from hvd_compress.tools.advise.constants import BACKENDS, DDP_GLOO, GPU_ONLY, Constants
from hvd_compress.tools.advise.gpus import GPUS, KERNELS, REACHED, gpu_rate
from hvd_compress.tools.advise.model import Framework, Setup
from hvd_compress.tools.advise.rates import Rates
from hvd_compress.tools.bench.traffic import grows, sent
from hvd_compress.tools.units import counted, write_rate

_FLOAT = 4
"""Bytes."""

Device = Literal["cpu", "p40", "p100", "t4", "v100", "rtx2080ti", "a40", "a100", "h100", "h200"]
"""The device that trains and compresses: a processor, or one of `GPUS`."""

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
    framework: Framework = "ddp"

    @property
    def constants(self) -> Constants:
        gpu = GPUS.get(self.device)
        if gpu is not None:
            return BACKENDS[self.backend]._replace(memory=1 / (REACHED * gpu.memory), bus=1 / (REACHED * gpu.bus))
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
        if self.device != "cpu" and setup.cores_per_rank < 1:
            raise SpecError(
                f"cores-per-rank={setup.cores_per_rank} is not allowed with device={self.device}: each rank has a GPU;"
                " leave it out"
            )
        for name in GPU_ONLY:
            if self.device == "cpu" and getattr(constants, name):
                raise SpecError(f"constant {name} is not allowed with device=cpu: it is of GPUs; add --device h100")

    def unknown(self, specs: Sequence[str]) -> list[str]:
        """Return the methods whose speed has to be measured on this machine's processor."""
        coded = [spec for spec in specs if not parse(spec).linear]
        return [spec for spec in coded if self.device == "cpu" or _name(spec) not in KERNELS]

    def rates(self, here: Rates, specs: Sequence[str], constants: Constants) -> Rates:
        """Return how fast methods are there.

        A GPU whose kernels for a method were not measured is taken to need as many passes over its memory as this
        machine's processor needs over its own: the time that it takes here, in units of a copy of the gradient.

        Args:
            here: The speeds of the `unknown` ones on this machine.
            specs: The methods.
            constants: The constants of the machines.
        """
        if self.device == "cpu":
            return here
        copy = 2 * _FLOAT * constants.memory  # it reads and writes each number
        known = [spec for spec in specs if not parse(spec).linear and _name(spec) in KERNELS]
        rates = {spec: gpu_rate(_name(spec), grows(sent(spec, 2)), copy) for spec in known}
        return Rates(copy, {**here.at(copy).methods, **rates})

    def assumptions(self, setup: Setup, constants: Constants) -> str:
        """Return one line with what a reader must know before the figures."""
        nodes = f"{counted(setup.ranks_per_node, 'rank')} on each node"
        by = f"{FRAMEWORKS[self.framework]} with {BACKEND_NAMES[self.backend]}"
        if self.device != "cpu":
            return (
                f"Assumed: {self.device.upper()} GPUs with {_bytes(constants.memory)} of memory bandwidth and"
                f" {_bytes(constants.bus)} between those of a node ({REACHED:g} of the data sheet); kernels as timed on"
                f" an H200, and their launches hidden by nothing; {by}, {nodes}, {write_rate(setup.rate)} and"
                f" {1e6 * setup.latency:g} us between nodes; {constants.overlap:g} of the backward pass overlaps."
            )
        sums = f"float16 summed at {1e9 * constants.half:.3g} ns a number"
        if self.backend == "mpi":
            return (
                f"Assumed: CPUs, one thread for each rank, {nodes}; {by}, NOT MEASURED, with the constants of Gloo but"
                f" {sums}."
            )
        return f"Assumed: CPUs, one thread for each rank, {nodes}; {by}, {sums}; GPUs: --device h100."


def _name(spec: str) -> str:
    return spec.partition(":")[0]


def _bytes(seconds: float) -> str:
    """Return a bandwidth in bytes, from the seconds for each byte."""
    return f"{1e-9 / seconds:,.0f} GB/s" if seconds else "unlimited"


def read_target(device: Device, backend: Backend | None, framework: Framework = "ddp") -> Target:
    """Complete what was asked for: GPUs exchange by NCCL, and CPUs by Gloo.

    Raises:
        SpecError: If they are not supported together.
    """
    target = Target(device, backend or ("gloo" if device == "cpu" else "nccl"), framework)
    if (framework, target.backend) == ("ddp", "mpi"):
        raise SpecError(
            "backend=mpi is not allowed with framework=ddp: the usual builds of PyTorch have no MPI; take gloo or nccl"
        )
    if (target.device == "cpu") != (target.backend != "nccl"):
        why = (
            "NCCL exchanges what is on GPUs; take gloo or mpi, or --device h100"
            if target.device == "cpu"
            else "without NCCL, gradients would go through the memory of the hosts, which the model lacks; take nccl"
        )
        raise SpecError(f"backend={target.backend} is not allowed with device={target.device}: {why}")
    return target
