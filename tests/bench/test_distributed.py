"""The speed benches without ranks: what is measured, and what becomes of it."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from hvd_compress.errors import SpecError
from hvd_compress.tools.bench.distributed import command
from hvd_compress.tools.bench.distributed.results import Result, as_json, over_layers, overhead, results, speedup
from hvd_compress.tools.bench.distributed.shapes import SHAPES, count
from hvd_compress.tools.bench.distributed.task import ALONE, SEARCH_STEPS, Entry, Part, Task, entries, read_report
from hvd_compress.tools.bench.machine import Machine


def test_shapes() -> None:
    models = ("linear", "mlp", "resnet50", "many")
    assert [(len(shapes), count(shapes)) for shapes in (SHAPES[model]() for model in models)] == [
        (18, 8_407_050), (240, 5_283_840), (161, 25_557_032), (500, 1_024_000),
    ]  # fmt: skip


def test_resnet50_is_in_the_order_of_its_modules() -> None:
    shapes = SHAPES["resnet50"]()
    assert shapes[:3] == [(64, 3, 7, 7), (64,), (64,)]
    assert shapes[3:15:3] == [(64, 64, 1, 1), (64, 64, 3, 3), (256, 64, 1, 1), (256, 64, 1, 1)]
    assert shapes[-5:] == [(2048, 512, 1, 1), (2048,), (2048,), (1000, 2048), (1000,)]
    assert sum(len(shape) == 4 for shape in shapes) == 53


def test_entries() -> None:
    found = entries(["none", "topk:ratio=0.01"], ["layer", "search", None], ["horovod"])
    assert [entry.label for entry in found] == [
        ALONE,
        "Horovod's none",
        "Horovod's fp16",
        "none",
        "topk:ratio=0.01 merge=layer",
        "topk:ratio=0.01 merge=search",
        "topk:ratio=0.01",
    ]
    assert [entry.warmup for entry in found] == [0, 0, 0, 0, 0, SEARCH_STEPS, 0]


def test_entries_of_two_drivers() -> None:
    found = entries(["topk"], [None], ["ddp", "horovod"], "ddp")
    own = ["DDP's none", "DDP's fp16", "DDP's PowerSGD, rank 4", "Horovod's none", "Horovod's fp16"]
    assert [entry.label for entry in found] == [ALONE, *own, "topk by ddp", "topk by horovod"]
    assert [entry.driver for entry in found[1:]] == ["ddp"] * 3 + ["horovod"] * 2 + ["ddp", "horovod"]
    with pytest.raises(SpecError, match=r"--against ddp .* needs --framework ddp"):
        entries(["topk"], [None], ["ddp"])
    with pytest.raises(SpecError, match="topk merge=2 is given twice"):
        entries(["topk"], [2, 2], [])


def test_entries_of_a_sharded_model() -> None:
    found = entries(["qsgd"], [None], ["fsdp"], "fsdp")
    assert [entry.label for entry in found] == [ALONE, "FSDP's none", "FSDP's bf16", "qsgd"]
    assert [entry.driver for entry in found[1:]] == ["fsdp"] * 3
    found = entries(["qsgd", "fp8"], [None], [], "fsdp", ["none", "int8"])
    assert [entry.label for entry in found[1:]] == [
        f"{spec} gather={one}" for spec in ("qsgd", "fp8") for one in ("none", "int8")
    ]
    assert [entry.gather for entry in found[1:]] == ["none", "int8"] * 2
    with pytest.raises(SpecError, match=r"--gather int8 .* needs --framework fsdp"):
        entries(["qsgd"], [None], [], "ddp", ["int8"])
    assert all(entry.replicas for entry in entries(["topk"], [None], ["fsdp"], "fsdp", replicas=True))
    with pytest.raises(SpecError, match=r"--replicas .* needs --framework fsdp"):
        entries(["topk"], [None], [], "ddp", replicas=True)


def test_tasks_travel_as_text_and_reports_as_files(tmp_path: Path) -> None:
    task = Task("steps", "many", entries(["topk"], ["layer", 2], ["horovod"]), 9, 3, 0, str(tmp_path))
    assert Task.from_json(task.to_json()) == task
    assert (task.turns, task.parts) == (3, 4 * len(task.entries) - 4 + 4)
    part = Part(1, [0.5, 0.25], sent=3, encode=0.125)
    task.report(1).write_text(json.dumps(part._asdict()) + "\n" + '{"entry": 2, "seco')  # a line that is being written
    assert read_report(task.report(1)) == [part]
    assert read_report(task.report(0)) == []


def task_of(what: str, *compared: Entry) -> Task:
    return Task(what, "linear", [Entry(ALONE), *compared], 3, 1, 0, "")


FP16, TOPK = Entry("Horovod's fp16", "fp16", own=True), Entry("topk", "topk")
NONE = Entry("Horovod's none", "none", own=True)


def test_results_are_medians_of_the_slowest_rank() -> None:
    fast = [Part(0, [0.01, 0.01, 0.01]), Part(1, [0.1, 0.2]), Part(1, [0.3]), Part(2, [0.04, 0.02, 0.03])]
    slow = [Part(0, [0.02, 0.03, 0.01]), Part(1, [0.2, 0.1]), Part(1, [0.5]), Part(2, [0.01, 0.05, 0.02])]
    found = results(task_of("steps", FP16, TOPK), [fast, slow], None)
    assert [one.ms for one in found] == pytest.approx([20, 200, 40])
    assert found[2].spread == pytest.approx((30, 50))
    assert [one.floor for one in found] == pytest.approx([20, 20, 20])
    assert found[2].beyond == pytest.approx(2)
    assert speedup(found, found[2]) is None, "none was not measured, and may have been faster"
    assert overhead(found, found[2]) is None


@pytest.mark.parametrize(("none", "fp16", "better"), [(50, 100, "none"), (100, 50, "fp16"), (50, 50, "fp16")])
@pytest.mark.parametrize("own", ["Horovod's ", ""])
def test_the_baseline_is_the_faster_of_horovods_own(none: float, fp16: float, better: str, own: str) -> None:
    found = [Result(ALONE, 10), Result(f"{own}none", none), Result(f"{own}fp16", fp16), Result("topk", 25)]
    assert speedup(found, found[3]) == pytest.approx(2)
    assert {one["baseline"] for one in as_json(found)} == {better}
    for missing in (1, 2):
        some = [one for place, one in enumerate(found) if place != missing]
        assert speedup(some, found[3]) is None


def test_the_floor_is_computing_or_the_link() -> None:
    ranks = [
        [Part(0, [0.02]), Part(1, [0.5], sent=1_000_000, received=900_000), Part(2, [0.1], sent=1000, received=1000)],
        [Part(0, [0.02]), Part(1, [0.5], sent=800_000, received=1_250_000), Part(2, [0.1], sent=1000, received=1000)],
    ]
    found = results(task_of("steps", NONE, TOPK), ranks, 100_000_000)
    assert [one.device for one in found[1:]] == [1_250_000, 1000]
    assert [one.floor for one in found[1:]] == pytest.approx([100, 20])
    assert overhead(found, found[2]) == pytest.approx(-400)


def test_of_exchanges_the_pass_alone_is_taken_off() -> None:
    layer, merged = Entry("topk merge=layer", "topk", merge="layer"), Entry("topk merge=2", "topk", merge=2)
    rank = [Part(0, [0.002]), Part(1, [0.302]), Part(2, [0.102])]
    found = results(task_of("exchange", layer, merged), [rank, rank], None)
    assert [one.ms for one in found[1:]] == pytest.approx([300, 100])
    assert over_layers(found, found[2]) == as_json(found)[2]["over_layers"] == pytest.approx(3)
    assert over_layers(found, found[1]) is None
    assert found[2].floor is None or found[2].beyond is None


def test_phases_are_means_over_ranks_and_steps() -> None:
    ranks = [
        [Part(0), Part(1, [1, 1], encode=0.1, wait=0.02, decode=0.2, called=0.5, payload=10)],
        [Part(0), Part(1, [1, 1], encode=0.3, wait=0.06, decode=0.2, called=0.7, payload=30)],
    ]
    one = results(task_of("steps", TOPK), ranks, None)[1]
    assert (one.encode, one.wait, one.decode) == pytest.approx((100, 20, 100))
    assert one.python == pytest.approx(300)
    assert one.payload == 15


def test_memory_is_that_of_the_rank_with_most() -> None:
    found = results(task_of("memory", TOPK), [[Part(1, memory=5)], [Part(1, memory=7)]], None)
    assert found[1].memory == 7


def test_the_machine_is_named() -> None:
    machine = Machine.here()
    assert machine.cores >= 1 and machine.memory_bytes > 2**30
    assert {"numpy", "hvd-compress"} <= machine.packages.keys()
    assert f"Linux {machine.kernel}" in str(machine)


@pytest.mark.parametrize(
    ("given", "merges"),
    [
        ([], [None]),
        (["layer,2,search"], ["layer", 2, "search"]),
        (["layer", "at:12,40", "bytes:1MB"], ["layer", "at:12,40", "bytes:1MB"]),
    ],
)
def test_merges_are_read(given: list[str], merges: list[Any]) -> None:
    assert command.read_merges(given) == merges
