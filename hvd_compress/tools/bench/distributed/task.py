"""Run the workers: their task, their reports, and the file formats of both."""

from __future__ import annotations

import json
import tempfile
from collections.abc import Callable, Collection, Sequence
from pathlib import Path
from typing import Any, Literal, NamedTuple

from hvd_compress.core.bucketing import DEFAULT_MERGE, Merge, check_merge
from hvd_compress.engine.spec import parse
from hvd_compress.errors import SpecError
from hvd_compress.methods.wrappers.router import Auto
from hvd_compress.tools.bench.jobs import LaunchSpec, execute
from hvd_compress.tools.ranks.process import Device

Driver = Literal["horovod", "ddp", "fsdp"]
"""The library that reduces gradients."""

Measured = Literal["torch", "keras", "ddp", "fsdp"]
"""The framework of steps; ``ddp`` is PyTorch's DistributedDataParallel, ``fsdp`` FSDP2."""

WORKERS: dict[Measured, str] = {
    "torch": "torch_worker",
    "keras": "keras_worker",
    "ddp": "ddp_worker",
    "fsdp": "fsdp_worker",
}

DRIVERS: dict[Measured, list[Driver]] = {"ddp": ["ddp", "horovod"], "fsdp": ["fsdp"]}
"""The drivers that a framework can compare, if not Horovod alone: the first always, the others if asked for."""

ALONE = "compute alone"
"""The label of steps in which nothing is reduced."""

SEARCH_STEPS = 100
"""Within so many steps a search for the best partition has ended."""

TURN = 4
"""Steps of one entry before the next one has its turn."""


class Entry(NamedTuple):
    """A row of the comparison."""

    label: str  # The name in tables
    spec: str = ""  # A spec, or the name of Horovod's own compression; empty for no exchange at all
    own: bool = False  # Whether the compression is the driver's own
    driver: Driver = "horovod"
    merge: Merge | None = None  # The merge policy; None for the default
    gather: str = "none"  # How FSDP2 gathers parameters
    replicas: bool = False  # Whether each node has a replica of the model (HSDP)

    @property
    def warmup(self) -> int:
        """Steps until it is as fast as it will be."""
        if self.own or not self.spec or parse(self.spec).linear:
            return 0
        if isinstance(router := parse(self.spec), Auto):
            return 2 * router.probe
        merge: Merge = DEFAULT_MERGE if self.merge is None else self.merge
        return SEARCH_STEPS if merge == "search" else 0

    def compression(self, ours: Any, horovods: Any) -> Any:
        """Make it from the ``Compression`` of this package or of Horovod; None for no exchange at all."""
        if self.own:
            return getattr(horovods, self.spec)
        return ours.parse(self.spec, **({} if self.merge is None else {"merge": self.merge})) if self.spec else None


class Task(NamedTuple):
    """The task of a job."""

    what: str  # ``"steps"``, ``"exchange"`` or ``"memory"``
    model: str  # A key of `SHAPES`
    entries: list[Entry]  # What is compared
    steps: int  # Measured steps of each entry
    warmup: int  # Steps of each before, at least
    profiled: int  # Steps of each under a profiler, after all is measured
    reports: str  # The folder for the workers' reports
    device: Device = "cpu"

    @property
    def specs(self) -> list[str]:
        """The methods, without computing alone."""
        return [entry.spec for entry in self.entries if entry.spec]

    @property
    def needs_horovod(self) -> bool:
        return any(entry.spec and entry.driver == "horovod" for entry in self.entries)

    @property
    def turns(self) -> int:
        return -(-self.steps // TURN)

    @property
    def parts(self) -> int:
        """The lines that the report of a rank will have."""
        if self.what == "memory":
            return len(self.entries) - 1
        return len(self.entries) * (self.turns + 1 + bool(self.profiled))

    def to_json(self) -> str:
        return json.dumps(self._asdict() | {"entries": [entry._asdict() for entry in self.entries]})

    @classmethod
    def from_json(cls, text: str) -> Task:
        found = json.loads(text)
        return cls(**found | {"entries": [Entry(**entry) for entry in found["entries"]]})

    def report(self, rank: int) -> Path:
        """Return the report of a rank: one JSON object per line."""
        return Path(self.reports) / f"rank{rank}.jsonl"


class Part(NamedTuple):
    """A line of a report: the measurements of one rank in one turn of an entry."""

    entry: int  # The index of the entry
    # One for each step
    seconds: list[float] = []  # noqa: RUF012
    sent: int | None = None  # Bytes that left the network device; None if unknown
    received: int | None = None  # Bytes that it received
    payload: int = 0  # Bytes handed to Horovod
    encode: float | None = None  # Seconds in compress
    wait: float | None = None  # Seconds of waiting in decompress; None if unknown
    decode: float | None = None  # Seconds in decompress without waiting
    called: float | None = None  # Seconds in compress and decompress as Horovod sees it, without waiting
    memory: int | None = None  # Peak bytes beyond those of the step alone
    # The rows of a profile
    profile: list[dict[str, Any]] = []  # noqa: RUF012


def read_report(path: Path) -> list[Part]:
    """Return what a rank has written so far."""
    lines = path.read_text().split("\n")[:-1] if path.exists() else []
    return [Part(**json.loads(line)) for line in lines]


OWN: dict[Driver, dict[str, str]] = {
    "ddp": {"DDP's none": "none", "DDP's fp16": "fp16", "DDP's PowerSGD, rank 4": "powersgd"},
    "fsdp": {"FSDP's none": "none", "FSDP's bf16": "bf16"},
    "horovod": {"Horovod's none": "none", "Horovod's fp16": "fp16"},
}
"""The drivers' own methods, by their labels."""


def entries(
    specs: list[str],
    merges: list[Merge | None],
    against: Collection[str],
    framework: Measured = "torch",
    gathers: Sequence[str] = (),
    replicas: bool = False,
) -> list[Entry]:
    """Return what is compared: the step alone, own methods of drivers, and each method with each partition and gather.

    Raises:
        SpecError: If a spec or a partition cannot be, or is given twice.
    """
    for merge in merges:
        if merge is not None:
            check_merge(merge)
    if gathers and framework != "fsdp":
        raise SpecError(f"--gather {gathers[0]} is not possible here: it needs --framework fsdp")
    if replicas and framework != "fsdp":
        raise SpecError("--replicas is not possible here: it needs --framework fsdp")
    found = [Entry(ALONE)]
    drivers: list[Driver] = DRIVERS.get(framework, ["horovod"])
    for one in set(against) - {*drivers}:
        cure = (
            f"it needs --framework {one if one in DRIVERS else 'torch'}"
            if one in OWN
            else f"allowed: {', '.join(drivers)}"
        )
        raise SpecError(f"--against {one} is not possible here: {cure}")
    found += [Entry(label, spec, True, one) for one in drivers if one in against for label, spec in OWN[one].items()]
    drivers = [one for one in drivers if one == drivers[0] or one in against]
    for spec in specs:
        linear = parse(spec).linear  # whose tensors travel one by one, however gradients are merged
        for merge in [None] if linear else merges:
            label = spec if merge is None else f"{spec} merge={merge}"
            found += [
                Entry(f"{label} by {driver}" if len(drivers) > 1 else label, spec, False, driver, merge)
                for driver in drivers
                if not gathers
            ]
            found += [Entry(f"{label} gather={one}", spec, False, drivers[0], merge, one) for one in gathers]
    labels = [entry.label for entry in found]
    if twice := {label for label in labels if labels.count(label) > 1}:
        raise SpecError(f"{', '.join(sorted(twice))} is given twice: name each once")
    return [entry._replace(replicas=replicas) for entry in found]


def run(task: Task, framework: Measured, where: LaunchSpec, watch: Callable[[int], None]) -> list[list[Part]]:
    """Run a task, and return the report of each rank; call ``watch`` again and again with how many parts are done.

    Raises:
        ClusterError: If the hosts cannot be made, or the job fails.
    """
    with tempfile.TemporaryDirectory(prefix="hvd-compress-bench-") as folder:
        task = task._replace(reports=folder)
        module = f"hvd_compress.tools.bench.distributed.{WORKERS[framework]}"
        execute(["-m", module, task.to_json()], where, lambda: watch(len(read_report(task.report(0)))))
        return [read_report(task.report(rank)) for rank in range(where.size)]
