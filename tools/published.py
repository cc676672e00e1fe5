"""Compare what ``hvd-compress advise`` predicts with gains that others have published.

    python tools/published.py

Each set-up is one whose publication says, or implies, how long a step takes without communication. The methods are the
publishers' own implementations, which the model of this package's methods stands for: their kernels, merging and
overlap differ.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Sequence
from pathlib import Path
from statistics import median
from typing import NamedTuple

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from hvd_compress.tools.advise import rates
from hvd_compress.tools.advise.model import Framework, Setup, predict
from hvd_compress.tools.advise.target import Device, read_target
from hvd_compress.tools.tables import markdown
from hvd_compress.tools.units import times, write_rate

NUMBERS, TURNS = 4_194_304, 5
PCIE = 1 / 12.6e9
"""Seconds per byte between GPUs of a node on PCIe 3.0."""


class Published(NamedTuple):
    """A measured set-up.

    Attributes:
        what: Model, and what the publication used.
        source: Where it was published.
        params: Number of parameters.
        nodes: Number of nodes.
        ranks_per_node: GPUs of a node.
        device: The GPU.
        rate: Bits per second of a node.
        compute: Seconds of a step without communication.
        baseline: Spec of what the gain is relative to.
        method: Spec of the compression.
        gain: Measured throughput, relative to the baseline.
        tensors: Number of gradients; 0 if not said.
        framework: What exchanges gradients.
        bus: Seconds per byte between GPUs of a node, if not that of the device.
    """

    what: str
    source: str
    params: float
    nodes: int
    ranks_per_node: int
    device: Device
    rate: float
    compute: float
    baseline: str
    method: str
    gain: float
    tensors: int = 0
    framework: Framework = "ddp"
    bus: float | None = None


PADDLE = "PaddlePaddle FleetX, communication_frequency.rst"
DEEPSPEED = "DeepSpeed, blog post on 1-bit Adam, figure 3"
BAGUA = "Bagua, tutorials, benchmark"
GRACE = "GRACE, data release"
EGOVERSE = "EgoVerse, pull request 667"

RCNN = "Faster R-CNN, DGC 0.1%"  # its size follows from the step at 1 Gbit/s
BERT = "BERT-Large, 1-bit Adam"
VGG = "VGG-16, 8 bits between nodes"
RESNET = "ResNet-50, batch 128"
ONEBIT, BYTES = "onebit:twoway=on", "block8:hierarchical=on"

PUBLISHED = [
    Published(RCNN, PADDLE, 65e6, 2, 1, "p40", 1e9, 0.3725, "none", "dgc:ratio=0.001", 6.53),
    Published(RCNN, PADDLE, 65e6, 2, 1, "p40", 10e9, 0.3725, "none", "dgc:ratio=0.001", 1.47),
    Published(RCNN, PADDLE, 65e6, 2, 1, "p40", 100e9, 0.3725, "none", "dgc:ratio=0.001", 0.993),
    Published(BERT, DEEPSPEED, 336e6, 8, 4, "v100", 4.1e9, 0.164, "fp16", ONEBIT, 6.6, bus=PCIE),
    Published(BERT, DEEPSPEED, 336e6, 4, 4, "v100", 4.1e9, 0.164, "fp16", ONEBIT, 5.1, bus=PCIE),
    Published(BERT, DEEPSPEED, 336e6, 8, 4, "v100", 32e9, 0.164, "fp16", ONEBIT, 2.0, bus=PCIE),
    Published(VGG, BAGUA, 138e6, 16, 8, "v100", 10e9, 0.140, "none", BYTES, 4.36, 32),
    Published(VGG, BAGUA, 138e6, 16, 8, "v100", 100e9, 0.140, "none", BYTES, 1.77, 32),
    Published(RESNET, GRACE, 25.6e6, 8, 1, "v100", 1e9, 0.313, "none", "powersgd:rank=1", 1.65, 161, "horovod"),
    Published(RESNET, GRACE, 25.6e6, 8, 1, "v100", 1e9, 0.313, "none", "topk:ratio=0.01", 2.12, 161, "horovod"),
    Published(RESNET, GRACE, 25.6e6, 8, 1, "v100", 1e9, 0.313, "none", "efsignsgd", 1.30, 161, "horovod"),
    Published(RESNET, GRACE, 25.6e6, 8, 1, "v100", 10e9, 0.313, "none", "powersgd:rank=1", 0.78, 161, "horovod"),
    Published(RESNET, GRACE, 25.6e6, 8, 1, "v100", 25e9, 0.313, "none", "topk:ratio=0.01", 0.62, 161, "horovod"),
    Published(
        "LSTM, batch 20", GRACE, 19.8e6, 8, 1, "v100", 10e9, 0.060, "none", "powersgd:rank=1", 2.68, 7, "horovod"
    ),
    Published("a policy, PCIe", EGOVERSE, 1.2e9, 1, 8, "a40", math.inf, 1.4, "none", "fp16", 1.78),
]
"""Gains of DeepSpeed and Bagua were read off figures, the batch of ResNet-50 was inferred from its throughput."""


def predicted(one: Published) -> float:
    """Return the gain that the model predicts."""
    target = read_target(one.device, None, one.framework)
    constants = target.constants if one.bus is None else target.constants._replace(bus=one.bus)
    setup = Setup(
        round(one.params),
        one.nodes * one.ranks_per_node,
        one.rate,
        one.compute,
        ranks_per_node=one.ranks_per_node,
        tree=target.tree,
        framework=one.framework,
        tensors=one.tensors,
    )
    unknown = target.unknown([one.method])
    here = rates.measure(unknown, NUMBERS, setup.side, TURNS) if unknown else rates.NO_RATES
    known = target.rates(here, [one.method], constants)
    base, step = (predict(spec, setup, known, constants).step for spec in (one.baseline, one.method))
    return base / step


def table(found: Sequence[tuple[Published, float]]) -> str:
    """Return the table as Markdown."""
    heads = ("set-up", "nodes x GPUs", "link", "method, against", "measured", "predicted")
    rows = [
        (
            f"{one.what} ({one.source})",
            f"{one.nodes} x {one.ranks_per_node} {one.device.upper()}",
            write_rate(one.rate) if math.isfinite(one.rate) else "-",
            f"`{one.method}`, `{one.baseline}`",
            times(one.gain),
            times(gain),
        )
        for one, gain in found
    ]
    return markdown([heads, *rows], "llllrr")


if __name__ == "__main__":
    found = [(one, predicted(one)) for one in PUBLISHED]
    print(table(found))
    factors = [max(gain / one.gain, one.gain / gain) for one, gain in found]
    right = sum((gain >= 1.05) == (one.gain >= 1.05) for one, gain in found)
    worst = max(range(len(found)), key=factors.__getitem__)
    print(
        f"\nOff by a factor of {times(median(factors))} in the median, {times(factors[worst])} at worst"
        f" ({found[worst][0].what}); it says rightly in {right} of {len(found)} whether the method pays."
    )
