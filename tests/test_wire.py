"""What the library says it sends is what the network device counts."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from functools import cache
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np
import pytest
from catalogue import EXAMPLES, each_way
from launching import ENVIRONMENT
from wire.gradients import LARGE, STEPS, gradient

from hvd_compress import LocalWorld
from hvd_compress.tools.bench.jobs import CONTROLLERS, LAUNCHER
from hvd_compress.transport.mirror import share

pytestmark = [pytest.mark.jobs, pytest.mark.long]

# Payloads well above what Horovod's coordination takes.
ALL = [spec.replace("threshold=1", "threshold=2").replace("rank=2", "rank=16") for spec in EXAMPLES]
BOTH_FORMS = ["topk:ratio=0.1,values=fp16", "bf16:twoway=off", "terngrad:twoway=on", "natural:twoway=on"]
SPECS = {2: [*each_way(ALL), *BOTH_FORMS], 3: each_way(ALL, by_method=False)}
"""With 3 ranks, a size that divides nothing, one spec for each way to communicate."""

CASES = [(ranks, spec) for ranks, specs in SPECS.items() for spec in specs]

PLACEHOLDER = 8
"""Bytes of the scalar that travels as the gradient's own allreduce, unless the payload itself does."""

CYCLE = 10
"""Milliseconds between two rounds of Horovod's coordination: rarer than by default, as they are counted too."""

HEADERS = 0.03
"""At most, of the payload. TCP's headers and acknowledgements were 0.1 to 0.3 % on a quiet machine, 1 % on a busy."""

NOISE = {"own": 4096, "shared": 2**17}
"""Bytes for each rank: how far the coordination of two equal runs may differ, some segments that TCP sends twice when
the machine is busy (1500 bytes in a network of the job's own, else 64 KiB), and on a shared device others' traffic."""


def wire_bytes(kind: str, payloads: list[int]) -> float:
    """What all ranks together send, given what each hands over."""
    return share(kind, len(payloads)) * sum(payloads)


@cache
def own_network() -> list[str]:
    """A command's prefix that runs it where nobody else uses the loopback device; empty where that is not allowed."""
    prefix = ["unshare", "--map-root-user", "--net", "sh", "-c", 'ip link set lo mtu 1500 up && exec "$@"', "sh"]
    try:
        return [] if subprocess.run([*prefix, "true"], capture_output=True).returncode else prefix
    except FileNotFoundError:
        return []


@cache
def outcome(ranks: int, *specs: str) -> tuple[str, str]:
    """What a job of so many ranks measured for some specs, and its output; made once, be it a failure."""
    job = Path(__file__).resolve().parent / "wire" / "job.py"
    command: list[object] = ["timeout", "300", *LAUNCHER, *CONTROLLERS["gloo"], "--network-interface", "lo"]
    with TemporaryDirectory() as folder:
        out = Path(folder, "report.json")
        command += ["-np", ranks, "-H", f"localhost:{ranks}", sys.executable, job, out, *specs]
        result = subprocess.run(
            [*own_network(), *map(str, command)],
            env={**os.environ, **ENVIRONMENT, "HOROVOD_CYCLE_TIME": str(CYCLE)},
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        return "" if result.returncode else out.read_text(), result.stdout


def report(ranks: int, *specs: str) -> dict[str, Any]:
    """What a job of so many ranks measured."""
    measured, output = outcome(ranks, *specs)
    assert measured, output
    found: dict[str, Any] = json.loads(measured)
    return found


def payload(measured: dict[str, Any]) -> float:
    """The bytes of the payloads on the wire, of all messages and ranks."""
    rounds = zip(*measured["messages"], strict=True)
    return sum(wire_bytes(messages[0][0], [size for _, size in messages]) for messages in rounds)


def bounds(ranks: int, found: dict[str, Any], spec: str) -> tuple[float, float, float]:
    """The least that the device may have counted, what it has counted, and the most.

    The large gradient against the small one, so that what collectives cost besides their payload cancels out. What is
    left of it is the coordination in the time by which one takes longer than the other. A machine that was busier or
    less so when that rate was measured may have it wrong by half.
    """
    small, large = found["specs"][spec]["small"], found["specs"][spec]["large"]
    expected, counted = payload(large) - payload(small), large["device"] - small["device"]
    besides = 2 * found["idle"] * abs(large["seconds"] - small["seconds"])
    besides += NOISE["own" if own_network() else "shared"] * ranks
    return 0.99 * expected - besides, counted, (1 + HEADERS) * expected + besides


@pytest.mark.parametrize(("ranks", "spec"), CASES)
def test_the_device_counts_the_payload(ranks: int, spec: str) -> None:
    """On a machine that is very busy TCP sends more twice than it should: then a job of this spec alone tells."""
    least, counted, most = bounds(ranks, report(ranks, *SPECS[ranks]), spec)
    if not least <= counted <= most:
        least, counted, most = bounds(ranks, report(ranks, spec), spec)
    assert least <= counted <= most


@pytest.mark.parametrize(("ranks", "spec"), CASES)
def test_stats_and_local_world_say_what_is_handed_over(ranks: int, spec: str) -> None:
    large, world = report(ranks, *SPECS[ranks])["specs"][spec]["large"], LocalWorld(spec, size=ranks)
    for step in range(STEPS):
        world.step({"weight": [gradient(LARGE, rank, step) for rank in range(world.size)]})
    handed = sum(size for _, size in large["messages"][0])
    assert handed == world.bytes_sent > 0
    assert large["said"] == handed + (0 if large["linear"] else PLACEHOLDER * STEPS)


@pytest.mark.parametrize(
    ("spec", "bits"),
    [
        ("efsignsgd", 1.01),
        ("onebit", 1.01),
        ("terngrad", 2.01),
        ("qsgd:bits=4", 4.1),
        ("topk:ratio=0.01,values=fp16", 0.48),
        ("topkc:ratio=0.01", 0.45),
    ],
)
def test_bits_per_coordinate_of_a_large_gradient(spec: str, bits: float) -> None:
    """Scales, counts and indices included, of the 25 million coordinates of a ResNet-50."""
    world = LocalWorld(spec, size=1)
    world.step([np.zeros(25_000_000, np.float32)])
    assert 0.9 * int(bits) < 8 * world.bytes_sent / 25e6 <= bits
