"""The speed benches without ranks: what is measured, what becomes of it, how it is shown, and what is refused."""

from __future__ import annotations

import io
import json
from pathlib import Path
from typing import Any

import pytest
from matplotlib.artist import Artist
from rich.console import Console
from typer.testing import CliRunner

from hvd_compress.errors import SpecError
from hvd_compress.tools.bench import bars
from hvd_compress.tools.bench.bars import Bar
from hvd_compress.tools.bench.distributed import command, table
from hvd_compress.tools.bench.distributed.results import Result, as_json, over_layers, overhead, results, speedup
from hvd_compress.tools.bench.distributed.shapes import SHAPES, count
from hvd_compress.tools.bench.distributed.task import ALONE, SEARCH_STEPS, Entry, Part, Task, entries, read_report
from hvd_compress.tools.bench.machine import Machine
from hvd_compress.tools.units import size

RUNNER = CliRunner(env={"COLUMNS": "160", "NO_COLOR": "1"})


@pytest.mark.parametrize(
    ("model", "tensors", "numbers"),
    [("linear", 18, 8_407_050), ("mlp", 240, 5_283_840), ("resnet50", 161, 25_557_032), ("many", 500, 1_024_000)],
)
def test_shapes(model: str, tensors: int, numbers: int) -> None:
    shapes = SHAPES[model]()
    assert (len(shapes), count(shapes)) == (tensors, numbers)


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
    with pytest.raises(SpecError, match=r"--against horovod .* needs --framework torch"):
        entries(["qsgd"], [None], ["horovod"], "fsdp")


def test_entries_of_a_sharded_model() -> None:
    found = entries(["qsgd"], [None], ["fsdp"], "fsdp")
    assert [entry.label for entry in found] == [ALONE, "FSDP's none", "FSDP's bf16", "qsgd"]
    assert [entry.driver for entry in found[1:]] == ["fsdp"] * 3


@pytest.mark.parametrize(
    ("specs", "merges", "message"),
    [
        (["none", "none"], [None], "none is given twice"),
        (["topk"], [2, 2], "topk merge=2 is given twice"),
        (["nonesuch"], [None], "unknown method 'nonesuch'"),
        (["topk"], ["half"], "merge='half' is not allowed"),
    ],
)
def test_entries_that_cannot_be(specs: list[str], merges: list[Any], message: str) -> None:
    with pytest.raises(SpecError, match=message):
        entries(specs, merges, [])


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
    for show in (table.steps_table, table.exchange_table):
        assert f"Faster\nthan {better}" in show(found, "").heads
    for missing in (1, 2):
        some = [one for place, one in enumerate(found) if place != missing]
        assert speedup(some, found[3]) is None
        assert "Faster\nthan" not in text_of(table.steps_table(some, ""))


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
    assert over_layers(found, found[2]) == pytest.approx(3)
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


RESULTS = [
    Result(ALONE, 20, (19, 21), floor=20),
    Result("Horovod's none", 4000, (3900, 4100), device=53_000_000, floor=4240),
    Result("Horovod's fp16", 2260.4, (2200, 2300), device=26_500_000, floor=2120),
    Result("topk:ratio=0.01", 241.25, (230, 250), 537_000, 1_200_000, 96, 10.5, 20.25, 3.125, 14),
]


def text_of(drawn: Any, width: int = 160) -> str:
    console = Console(width=width, file=io.StringIO(), record=True)
    console.print(drawn)
    return console.export_text()


def test_the_table_of_steps() -> None:
    text = text_of(table.steps_table(RESULTS, "Steps"))
    line = next(line for line in text.splitlines() if line.startswith("topk"))
    assert (
        " ".join(line.split()) == "topk:ratio=0.01 241 230 250 0.08 9.37x -3,759 537 kB 1.2 MB 96.0 2.51 10.5 20.2 3.1"
    )
    assert "layer" not in text, "nothing to compare with, so no column"
    assert max(map(len, text.splitlines())) <= 121 and " more" not in text


def test_a_narrow_terminal_gets_whole_columns() -> None:
    lines = text_of(table.steps_table(RESULTS, "Steps"), 60).splitlines()
    assert lines[-2].split() == ["topk:ratio=0.01", "241", "230", "250", "0.08", "9.37x"]
    assert lines[-1] == "8 more in a terminal with 121 columns, or by --json."


def test_what_merging_gains() -> None:
    merged = [Result(ALONE, 20), Result("topk merge=layer", 80), Result("topk merge=2", 40)]
    rows = [" ".join(line.split()) for line in text_of(table.steps_table(merged, "Steps")).splitlines()[-3:]]
    assert rows[1:] == ["topk merge=layer 80.0 0.0 0.0 0.25 -", "topk merge=2 40.0 0.0 0.0 0.50 2.00x"]
    assert as_json(merged)[2]["over_layers"] == 2


def test_the_table_of_exchanges_and_memory() -> None:
    assert "14.0" in text_of(table.exchange_table(RESULTS, "Exchange"))
    text = text_of(table.memory_table([Result("topk", memory=50_000_000)], "Memory", 25_000_000))
    assert text.splitlines()[-1].split() == ["topk", "50", "MB", "2.00"]


def test_the_table_of_a_profile() -> None:
    row = {"function": "slot.py:3 put", "calls": 18.0, "own": 0.0125, "with_callees": 0.02}
    text = text_of(table.profile_table(Result("topk", profile=[row])))
    assert text.splitlines()[-1].split() == ["slot.py:3", "put", "18.0", "12.50", "20.00"]


@pytest.mark.parametrize(
    ("value", "text"), [(0, "0 B"), (999, "999 B"), (1000, "1 kB"), (33.6e6, "33.6 MB"), (2e9, "2 GB")]
)
def test_sizes(value: float, text: str) -> None:
    assert size(value) == text


def test_results_as_json() -> None:
    facts = json.loads(json.dumps(as_json(RESULTS)))
    assert facts[3]["speedup"] == pytest.approx(2260.4 / 241.25)
    assert facts[3]["beyond_floor"] == pytest.approx(241.25 / 96)


def test_bars() -> None:
    alone, _, fp16, topk = table.bars(RESULTS)
    assert (alone.mark, alone.strong, alone.note) == (None, False, "20.0 ms")
    assert (fp16.mark, fp16.strong) == (2120, False)
    assert topk == Bar("topk:ratio=0.01", 241.25, "241 ms  (9.37x)", 96, True)


@pytest.mark.parametrize("lines", [1, 3, 20])
def test_no_words_of_a_chart_overlap(lines: int) -> None:
    drawn = [Bar(f"method {i}: {'x' * i}", 10.0 * i, f"{10 * i} ms  (1.00x)", 5.0 if i else None) for i in range(lines)]
    figure = bars.figure(drawn, title="Two lines\nof a title", axis="ms", mark="the floor")
    figure.draw_without_rendering()
    (axes,) = figure.axes
    ticks = [tick for tick in axes.get_xticklabels() if tick.get_position()[0] <= axes.get_xlim()[1]]
    words: list[Artist] = [*axes.texts, *axes.get_yticklabels(), *ticks, axes.xaxis.label]
    boxes = [word.get_window_extent() for word in (*words, *figure.texts, *figure.legends)]
    for i, box in enumerate(boxes):
        assert figure.bbox.x0 <= box.x0 and box.x1 <= figure.bbox.x1, "cut off"
        assert not any(box.overlaps(other) for other in boxes[:i])


def test_a_chart_is_written(tmp_path: Path) -> None:
    bars.draw(tmp_path / "chart.png", [Bar("a", 1.0, "1 ms")], title="A chart", axis="ms")
    assert (tmp_path / "chart.png").read_bytes().startswith(b"\x89PNG")


def test_the_machine_is_named() -> None:
    machine = Machine.here()
    assert machine.cores >= 1 and machine.memory_bytes > 2**30
    assert {"numpy", "hvd-compress"} <= machine.packages.keys()
    assert f"Linux {machine.kernel}" in str(machine)


def run(*arguments: str) -> Any:
    return RUNNER.invoke(command.bench, arguments)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["steps", "topkk"], "unknown method 'topkk'"),
        (["exchange", "topk", "--merge", "layer,half"], "merge='half' is not allowed"),
        (["steps", "topk", "--hosts", "2", "--rate", "fast"], "rate='fast' is not allowed"),
        (["steps", "topk", "--rate", "fast"], "rate='fast' is not allowed"),
        (["steps", "topk", "--rate", "1gbit"], "rate='1gbit' is not allowed without hosts"),
        (["exchange", "topk", "--rate", "fast"], "rate='fast' is not allowed"),
        (["exchange", "topk", "--rate", "1gbit"], "rate='1gbit' is not allowed without hosts"),
    ],
)
def test_refusals(tmp_path: Path, arguments: list[str], message: str) -> None:
    written = tmp_path / "results.json"
    result = run(*arguments, "--json", str(written))
    assert result.exit_code == 2
    assert message in result.output and result.output.count("\n") == 1
    assert not written.exists()


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
