"""How fast gossip lets random matrices agree, by what a rank has sent: all ranks in one process, without a launcher.

Each rank begins with a matrix of its own, and all should end with the mean of them. It prints how far they are from it,
and draws the picture with ``--plot``::

    python examples/consensus.py --plot consensus.png
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
from rich.console import Console
from rich.table import Table

from hvd_compress import LocalWorld
from hvd_compress.local.gossip import GossipSettings
from hvd_compress.local.graph import edges_of
from hvd_compress.tools.drawing import COLOURS, blank

Arr = npt.NDArray[Any]

CHOCO = "topk:ratio=0.01,min_size=0,feedback=ef21"
"""As many bytes as PowerGossip of rank 1 sends for a matrix of 100 x 100: 100 values, and their indices."""

METHODS = [
    ("plain", GossipSettings(compression="none")),
    ("PowerGossip, rank 1", GossipSettings(rank=1)),
    ("PowerGossip, rank 4", GossipSettings(rank=4)),
    *(
        (f"CHOCO, top 1%, step size {one:g}", GossipSettings(compression=CHOCO, step_size=one))
        for one in (1, 0.1, 0.02)
    ),
]


class Course(NamedTuple):
    """Bytes that a rank has sent, and the distance from the mean after each exchange, as a share of the first one."""

    sent: list[float]
    distances: list[float]


def gossip(settings: GossipSettings, models: Arr, limit: float) -> Course:
    """Let models of shape ``(ranks, rows, columns)`` gossip until a rank has sent as many bytes, or all is lost."""
    edges = edges_of(settings.graph, len(models))
    pairs = [LocalWorld(settings.method, 2) for _ in edges]
    models, mean = models.copy(), models.mean(0)
    first = np.linalg.norm(models - mean)
    course = Course([0.0], [1.0])
    while course.sent[-1] < limit and 1e-6 < course.distances[-1] < 1e3:
        after = models.copy()
        for edge, pair in zip(edges, pairs, strict=True):
            difference = 2 * pair.step({"w": [-models[edge.low], models[edge.high]]})["w"][0]
            after[edge.high] -= settings.step_size * edge.weight * difference
            after[edge.low] += settings.step_size * edge.weight * difference
        models = after
        course.sent.append(2 * sum(pair.bytes_sent for pair in pairs) / len(models))
        course.distances.append(float(np.linalg.norm(models - mean) / first))
    return course


def draw(courses: Sequence[tuple[str, Course]], path: str, title: str) -> None:
    """Draw the distances by what has been sent."""
    figure, (axes,) = blank(8, 5, title)
    for (name, course), colour in zip(courses, COLOURS, strict=True):
        axes.plot(np.array(course.sent) / 1e6, course.distances, label=name, color=colour)
    axes.set(yscale="log", ylim=(1e-6, 10), xlabel="MB that a rank has sent", ylabel="distance from the mean")
    axes.legend(frameon=False)
    figure.savefig(path)


def main() -> None:
    """Run all methods, print a table and draw the picture."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--ranks", type=int, default=8)
    parser.add_argument("--size", type=int, default=100, help="rows and columns")
    parser.add_argument("--megabytes", type=float, default=2.0, help="that a rank sends")
    parser.add_argument("--plot", default="", help="file of the picture")
    options = parser.parse_args()
    rng = np.random.default_rng(0)
    models = rng.standard_normal((options.ranks, options.size, options.size)).astype(np.float32)
    title = f"Gossip of {options.ranks} ranks in a ring, random {options.size} x {options.size} matrices"
    courses = [(name, gossip(settings, models, 1e6 * options.megabytes)) for name, settings in METHODS]
    table = Table("method", "exchanges", "kB each", "MB to a tenth", "MB to a hundredth", "at the end", title=title)
    for name, course in courses:
        found = [
            next((f"{s / 1e6:.2f}" for s, d in zip(*course, strict=True) if d < goal), "-") for goal in (0.1, 0.01)
        ]
        exchanges = len(course.sent) - 1
        table.add_row(
            name, f"{exchanges}", f"{course.sent[-1] / exchanges / 1e3:.2f}", *found, f"{course.distances[-1]:.1e}"
        )
    Console().print(table)
    if options.plot:
        draw(courses, options.plot, title)


if __name__ == "__main__":
    main()
