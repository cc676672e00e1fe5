"""What a rank of a soak job tells, and what must hold of it."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

ALLOWED_GROWTH = 0.05
"""Of the resident memory, between the end of the first half of a job and its end."""


@dataclass
class Report:
    """Figures of a job.

    Attributes:
        steps: Training steps.
        faults: How many were injected.
        memory: Resident memory in MB, after each round, the first of which warms up.
        left: What was counted at the end that must not grow.
        ok: Ranks equal, nothing left open.
    """

    steps: int
    faults: int
    memory: Sequence[float]
    left: str
    ok: bool

    @property
    def steady(self) -> bool:
        """Whether memory has stopped growing."""
        middle = self.memory[len(self.memory) // 2 - 1]
        return self.memory[-1] <= middle * (1 + ALLOWED_GROWTH)

    @classmethod
    def together(cls, reports: Sequence[Report]) -> Report:
        """One report of all ranks: the memory of the rank that has grown most."""
        worst = max(reports, key=lambda report: report.memory[-1] - report.memory[0])
        return cls(worst.steps, worst.faults, worst.memory, worst.left, all(r.ok and r.steady for r in reports))

    def write(self, path: str) -> None:
        """Leave it to the process that has started the job."""
        Path(path).write_text(json.dumps(asdict(self)))

    @classmethod
    def read(cls, path: Path) -> Report:
        """Undo `write`."""
        return cls(**json.loads(path.read_text()))


def resident_mb() -> float:
    """Resident memory of this process."""
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    return pages * 4096 / 1e6
