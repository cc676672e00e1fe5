"""What workers are to measure, and what they report: the file formats between them and the command."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any, NamedTuple

from hvd_compress.errors import SpecError
from hvd_compress.merging import DEFAULT_MERGE, Merge, check_merge
from hvd_compress.spec import parse

ALONE = "compute alone"
"""The label of steps in which nothing is reduced."""

SEARCH_STEPS = 100
"""Within so many steps a search for the best partition has ended."""

TURN = 4
"""Steps of one entry before the next one has its turn."""


class Entry(NamedTuple):
    """A row of the comparison.

    Attributes:
        label: Its name in tables.
        spec: Of the method, or the name of Horovod's own compression; empty for none at all.
        horovod: Whether it is Horovod's own.
        merge: How gradients are merged; None for the default.
    """

    label: str
    spec: str = ""
    horovod: bool = False
    merge: Merge | None = None

    @property
    def warmup(self) -> int:
        """Steps that it needs before it is what it will be."""
        if self.horovod or not self.spec or parse(self.spec).linear:
            return 0
        merge: Merge = DEFAULT_MERGE if self.merge is None else self.merge
        return SEARCH_STEPS if merge == "auto" else 0

    def compression(self, ours: Any, horovods: Any) -> Any:
        """Make it from the ``Compression`` of this package or of Horovod; None for none at all."""
        if self.horovod:
            return getattr(horovods, self.spec)
        return ours.parse(self.spec, **({} if self.merge is None else {"merge": self.merge})) if self.spec else None


class Task(NamedTuple):
    """What a job measures.

    Attributes:
        what: ``"steps"``, ``"exchange"`` or ``"memory"``.
        model: A key of `hvd_compress.tools.bench.distributed.shapes.SHAPES`.
        entries: What is compared.
        steps: Measured steps of each entry.
        warmup: Steps of each before, at least.
        profiled: Steps of each under a profiler, after all is measured.
        reports: The folder for the workers' reports.
    """

    what: str
    model: str
    entries: list[Entry]
    steps: int
    warmup: int
    profiled: int
    reports: str

    @property
    def turns(self) -> int:
        """How often each entry has its turn."""
        return -(-self.steps // TURN)

    @property
    def parts(self) -> int:
        """How many lines the report of a rank will have."""
        if self.what == "memory":
            return len(self.entries) - 1
        return len(self.entries) * (self.turns + 1 + bool(self.profiled))

    def write(self, path: Path) -> None:
        """For the workers."""
        path.write_text(json.dumps(self._asdict() | {"entries": [entry._asdict() for entry in self.entries]}))

    @classmethod
    def read(cls, path: Path) -> Task:
        """In a worker."""
        found = json.loads(path.read_text())
        return cls(**found | {"entries": [Entry(**entry) for entry in found["entries"]]})

    def report(self, rank: int) -> Path:
        """Where a rank writes: one JSON object a line."""
        return Path(self.reports) / f"rank{rank}.jsonl"


class Part(NamedTuple):
    """A line of a report: what one rank has measured in one turn of an entry.

    Attributes:
        entry: Its index.
        seconds: Of each step.
        sent: Bytes that left the network device, None if it is not known.
        received: Bytes that came in there.
        payload: Bytes handed to Horovod.
        encode: Seconds in compress.
        wait: Seconds of waiting in decompress; None if it is not measured.
        decode: Seconds in decompress without waiting.
        called: Seconds in compress and decompress as Horovod sees it, without waiting.
        memory: Peak bytes beyond those of the step alone.
        profile: Rows of a profile.
    """

    entry: int
    seconds: list[float] = []  # noqa: RUF012
    sent: int | None = None
    received: int | None = None
    payload: int = 0
    encode: float | None = None
    wait: float | None = None
    decode: float | None = None
    called: float | None = None
    memory: int | None = None
    profile: list[dict[str, Any]] = []  # noqa: RUF012


def read_report(path: Path) -> list[Part]:
    """What a rank has written so far."""
    lines = path.read_text().split("\n")[:-1] if path.exists() else []
    return [Part(**json.loads(line)) for line in lines]


def entries(specs: list[str], merges: list[Merge | None], against_horovod: bool) -> list[Entry]:
    """What is compared: the step alone, Horovod's own compression if wanted, and each method with each partition.

    Raises:
        SpecError: If a spec or a partition cannot be, or is given twice.
    """
    for merge in merges:
        if merge is not None:
            check_merge(merge)
    found = [Entry(ALONE)]
    if against_horovod:
        found += [Entry(f"Horovod's {name}", name, horovod=True) for name in ("none", "fp16")]
    for spec in specs:
        linear = parse(spec).linear  # whose tensors travel one by one, however gradients are merged
        for merge in [None] if linear else merges:
            found.append(Entry(spec if merge is None else f"{spec} merge={merge}", spec, merge=merge))
    labels = [entry.label for entry in found]
    if twice := {label for label in labels if labels.count(label) > 1}:
        raise SpecError(f"{', '.join(sorted(twice))} is given twice: name each once")
    return found
