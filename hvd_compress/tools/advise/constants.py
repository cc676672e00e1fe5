"""The constants of the cost model: speeds and overheads of Horovod, DistributedDataParallel, and machines."""

from __future__ import annotations

import math
from collections.abc import Iterable
from typing import NamedTuple

from hvd_compress.engine.spec import unknown
from hvd_compress.errors import SpecError


class Constants(NamedTuple):
    """Constants of a framework, its backend and the machines, in SI units; the same for all methods.

    The defaults, of Horovod with Gloo, were fitted to whole steps on emulated hosts, see docs/advise.md. None of them
    belongs to a method.

    Attributes:
        efficiency: The share of a link's bandwidth that payload gets; headers, acknowledgements and the
            framework's own messages take the rest. In (0, 1].
        byte: Seconds of a core for each byte that a rank sends: through the socket, out of it on the other side, and
            adding it up. 0 for networks that do it by themselves.
        half: Seconds of a core for each float16 that is summed. 0 on GPUs.
        hop: Seconds of a core for each message of a collective, however small: waking up threads.
        cycle: Seconds of each round of a method, besides its messages: until the framework has seen what is ready, and
            the rank that is last has come.
        coding: How many times longer compressing and decompressing take in training than alone: caches hold something
            else, and each tensor has calls of its own.
        backward: The share of computing that is the backward pass.
        overlap: The share of the backward pass in which communication gets on.
        memory: Seconds for each byte that a GPU reads from its memory or writes there; 0 without GPUs.
        bus: Seconds for each byte that a GPU sends to another one on its host; 0 without GPUs.
        launch: Time to launch the kernels of a method, relative to that on the host of an H200; 0 without GPUs.
    """

    efficiency: float = 0.944
    byte: float = 0.55e-9
    half: float = 21e-9
    hop: float = 100e-6
    cycle: float = 2e-3
    coding: float = 1.9
    backward: float = 2 / 3
    overlap: float = 0.5
    memory: float = 0.0
    bus: float = 0.0
    launch: float = 0.0


BACKENDS = {
    "gloo": Constants(),
    # Horovod sums float16 for MPI by vector instructions. Assumed, not measured.
    "mpi": Constants(half=1e-9),
    # Adapters and GPUs do the work, there is a float16 in hardware, and kernels compute while others communicate.
    # Assumed, not measured.
    "nccl": Constants(byte=0.0, half=0.0, hop=10e-6, cycle=2e-3, coding=1.0, overlap=0.9, launch=1.0),
}
"""The constants of Horovod's communication backends; those of NCCL are taken for DistributedDataParallel, too."""

DDP_GLOO = Constants(byte=0.3e-9, half=1.3e-9, cycle=5e-3)
"""The constants of DistributedDataParallel with Gloo, which sums float16 by vector instructions."""

GPU_ONLY = ("memory", "bus", "launch")
"""Constants that only machines with GPUs have."""

SHARES = ("efficiency", "backward", "overlap")
"""Constants that are at most 1."""


def read_constants(given: Iterable[str], base: Constants | None = None) -> Constants:
    """Replace constants that the user names.

    Args:
        given: Each as ``name=value``.
        base: The others; the defaults if not told.

    Raises:
        SpecError: If there is no such constant, or it cannot have that value.
    """
    found = Constants() if base is None else base
    for text in given:
        name, _, value = (part.strip() for part in text.partition("="))
        if name not in Constants._fields:
            raise SpecError(unknown("constant", name, Constants._fields))
        found = found._replace(**{name: _value(name, value, getattr(found, name))})
    return found


def _value(name: str, text: str, usual: float) -> float:
    try:
        value = float(text)
    except ValueError:
        value = math.nan
    most = 1.0 if name in SHARES else math.inf
    if not (0 <= value <= most and math.isfinite(value)) or (name == "efficiency" and not value):
        allowed = "in (0, 1]" if name == "efficiency" else "in 0 .. 1" if name in SHARES else "in seconds, at least 0"
        raise SpecError(
            f"constant {name}={text!r} is not allowed: it must be a number {allowed}, such as {name}={usual:.2g}"
        )
    return value
