"""Measure the effect of compression between stages on training: the study of Rudakov et al. (2024), in small.

A CNN of the shape of ResNet-18 on Fashion-MNIST and a small GPT on a text, both cut into four stages inside one
process, are trained with compressed boundaries, and tested with compressed activations and without. Run::

    python examples/pytorch/boundary_study.py study.json --text /usr/share/common-licenses/GPL-3
    python examples/pytorch/boundary_study.py study.json --show
"""

from __future__ import annotations

import argparse
import json
import math
import multiprocessing
import sys
from collections.abc import Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from stages import cut, cut_gpt
from torch import Tensor, nn

from hvd_compress.pipeline.torch import CompressedBoundary
from hvd_compress.tools.compare.tasks.data import fashion

STAGES, BATCH, LENGTH = 4, 64, 64

MEMORIES = {
    ("none", "ef"): "error feedback of gradients",
    ("ef", "ef"): "error feedback of both",
    ("ef21", "ef21"): "EF21 of both",
    ("aqsgd", "none"): "AQ-SGD",
}


class Case(NamedTuple):
    """Settings of a training.

    Attributes:
        task: ``"cnn"`` or ``"gpt"``.
        forward: Operator of activations.
        backward: Operator of gradients.
        memory: Of activations, and of gradients.
    """

    task: str
    forward: str = "none"
    backward: str = "none"
    memory: tuple[str, str] = ("none", "none")

    @property
    def column(self) -> str:
        """Key of its results."""
        if self.memory in MEMORIES:
            return MEMORIES[self.memory]
        if self.backward == "none":
            return "activations alone"
        if self.forward == "none":
            return "gradients alone"
        return "both, shared mask" if self.backward == "shared" else "both"


def cases(task: str) -> Iterator[Case]:
    """Return all cases of a task."""
    yield Case(task)
    for percent in (50, 30, 20, 10, 5, 2):
        topk = f"topk:ratio={percent / 100}"
        yield Case(task, topk, topk)
        yield Case(task, topk, "shared")
        if task == "cnn":
            if percent in (30, 10, 5, 2):
                yield Case(task, topk)
                yield Case(task, "none", topk)
            if percent in (10, 5):
                for memory in (("none", "ef"), ("ef", "ef"), ("ef21", "ef21")):
                    yield Case(task, topk, topk, memory)
            if percent >= 10:
                yield Case(task, topk, topk, ("aqsgd", "none"))
    for bits in (8, 6, 4, 2):
        yield Case(task, f"minmax:bits={bits}")
        yield Case(task, "none", f"minmax:bits={bits}")


class Task(NamedTuple):
    """Samples to train on and to test on.

    Attributes:
        stages: Of the model.
        train: Inputs and targets.
        test: Inputs and targets.
        epochs: How often all samples are gone through.
        batch: Of a step.
        lr: Learning rate at first.
    """

    stages: list[nn.Module]
    train: tuple[Tensor, Tensor]
    test: tuple[Tensor, Tensor]
    epochs: int
    batch: int
    lr: float


def cnn(args: argparse.Namespace) -> Task:
    """Images."""
    data = fashion(args.data)

    def images(pixels: Any, labels: Any, count: int) -> tuple[Tensor, Tensor]:
        return torch.from_numpy(data.scaled(pixels[:count])).unsqueeze(1), torch.from_numpy(labels[:count])

    train = images(data.train, data.train_labels, args.images)
    test = images(data.test, data.test_labels, args.images // 2)
    return Task(cut(8, STAGES), train, test, args.epochs, BATCH, args.lr)


def gpt(args: argparse.Namespace) -> Task:
    """Pieces of a text, whose last tenth is for the test."""
    text = np.fromfile(args.text, np.uint8)[: args.bytes]
    pieces = torch.from_numpy(np.lib.stride_tricks.sliding_window_view(text, LENGTH + 1)[:: LENGTH // 2].astype(int))
    split = len(pieces) * 9 // 10
    train, test = ((part[:, :-1], part[:, 1:]) for part in (pieces[: split - 1], pieces[split:]))
    return Task(cut_gpt(64, 4, STAGES, LENGTH, STAGES), train, test, 2 * args.epochs, 16, 2e-3)


def run(args: argparse.Namespace, case: Case, seed: int) -> dict[str, Any]:
    """Train once, and test with compressed activations and without."""
    torch.set_num_threads(1)
    torch.manual_seed(seed)
    task = {"cnn": cnn, "gpt": gpt}[case.task](args)
    x, y = task.train
    first, second = (f"aqsgd:samples={len(x)}" if name == "aqsgd" else name for name in case.memory)
    boundaries = [
        CompressedBoundary(case.forward, case.backward, (first, second), name=f"boundary{place}")
        for place in range(STAGES - 1)
    ]
    model, passes = nn.ModuleList([*task.stages, *boundaries]), len(x) // task.batch
    optimizer: torch.optim.Optimizer = torch.optim.AdamW(model.parameters(), lr=task.lr)
    if case.task == "cnn":
        optimizer = torch.optim.SGD(model.parameters(), lr=task.lr, momentum=0.9, weight_decay=5e-4)
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, task.epochs * passes)

    def output(inputs: Tensor, ids: Tensor | None, compressed: bool = True) -> Tensor:
        for place, stage in enumerate(task.stages):
            inputs = stage(inputs)
            if compressed and place < STAGES - 1:
                inputs = boundaries[place](inputs, ids)
        return inputs

    for _ in range(task.epochs):
        for ids in torch.randperm(len(x))[: passes * task.batch].view(passes, -1):
            optimizer.zero_grad()
            scores = output(x[ids], ids if "aqsgd" in case.memory else None)
            nn.functional.cross_entropy(scores.flatten(0, -2), y[ids].flatten()).backward()
            optimizer.step()
            schedule.step()
    stats = [boundary.stats() for boundary in boundaries]
    sent = sum(way.bytes_sent for one in stats for way in one) / (task.epochs * passes)
    model.eval()
    scored = {}
    with torch.no_grad():
        for name, compressed in (("compressed", True), ("plain", False)):
            parts = zip(*(t.split(task.batch) for t in task.test), strict=True)
            found = [(output(inputs, None, compressed), labels) for inputs, labels in parts]
            scored[name] = metric(case.task, torch.cat([s for s, _ in found]), torch.cat([t for _, t in found]))
    return {**case._asdict(), "seed": seed, "bytes_per_step": round(sent), **scored}


def metric(task: str, scores: Tensor, targets: Tensor) -> float:
    """Accuracy in percent of images, perplexity of a byte of text."""
    if task == "cnn":
        return 100 * float((scores.argmax(1) == targets).float().mean())
    return math.exp(min(50, float(nn.functional.cross_entropy(scores.flatten(0, 1), targets.flatten()))))


def case_of(row: dict[str, Any]) -> Case:
    """Return the label of a result."""
    return Case(row["task"], row["forward"], row["backward"], (row["memory"][0], row["memory"][1]))


def told(values: Sequence[float]) -> str:
    """The mean, and how far the seeds are apart."""
    return f"{np.mean(values):.1f} ± {(max(values) - min(values)) / 2:.1f}"


def cell(rows: Sequence[dict[str, Any]]) -> str:
    """Tested compressed, and without compression where that is not the same."""
    if not rows:
        return "-"
    compressed, plain = (told([row[name] for row in rows]) for name in ("compressed", "plain"))
    return compressed if case_of(rows[0]).forward == "none" else f"{compressed} / {plain}"


def tables(rows: Sequence[dict[str, Any]]) -> Iterator[str]:
    """Lines of Markdown: for each task and operator a table, a line for each of its strengths."""
    for task, what in (("cnn", "Accuracy of the CNN in %"), ("gpt", "Perplexity of a byte with the GPT")):
        mine = [row for row in rows if row["task"] == task]
        for name in ("topk", "minmax") if mine else ():
            found = [row for row in mine if f"{row['forward']} {row['backward']}".count(name)]
            columns = list(dict.fromkeys(case_of(row).column for row in found))
            base = cell([row for row in mine if row["forward"] == row["backward"] == "none"])
            yield f"\n{what}, tested compressed / uncompressed; {base} without compression:\n"
            yield f"| `{name}` | " + " | ".join(columns) + " |"
            yield "| --- |" + " ---: |" * len(columns)
            for setting in dict.fromkeys(_setting(row) for row in found):
                here = [[r for r in found if (_setting(r), case_of(r).column) == (setting, c)] for c in columns]
                yield f"| {setting} | " + " | ".join(map(cell, here)) + " |"


def _setting(row: dict[str, Any]) -> str:
    """Return the strength of an operator."""
    spec: str = row["backward"] if row["forward"] == "none" else row["forward"]
    value = spec.partition("=")[2]
    return f"{100 * float(value):.0f}%" if spec.startswith("topk") else f"{value} bits"


def main() -> None:
    """Do the runs that the file does not have yet, and show all."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("output", type=Path, help="the file with the results; what it has is not done again")
    parser.add_argument("--show", action="store_true", help="only show it, as Markdown")
    parser.add_argument("--text", default="", help="of the GPT; without it there is the CNN alone")
    parser.add_argument("--data", default="", metavar="FOLDER", help="of Fashion-MNIST; default: that of Debian")
    parser.add_argument("--seeds", default=3, type=int, help="default: %(default)s")
    parser.add_argument("--images", default=2048, type=int, help="to train on; default: %(default)s")
    parser.add_argument("--bytes", default=30_000, type=int, help="of the text; default: %(default)s")
    parser.add_argument("--epochs", default=5, type=int, help="of the CNN; default: %(default)s")
    parser.add_argument("--lr", default=0.05, type=float, help="of the CNN; default: %(default)s")
    parser.add_argument("--only", default="", metavar="SPEC", help="only what has this operator; default: all")
    parser.add_argument("--processes", default=2, type=int, help="at the same time; default: %(default)s")
    args = parser.parse_args()
    rows = json.loads(args.output.read_text()) if args.output.exists() else []
    if not args.show:
        done = {(*case_of(row), row["seed"]) for row in rows}
        tasks = ["cnn", "gpt"] if args.text else ["cnn"]
        wanted = [case for task in tasks for case in cases(task) if args.only in ("", case.forward, case.backward)]
        left = [(case, seed) for seed in range(args.seeds) for case in wanted if (*case, seed) not in done]
        with multiprocessing.get_context("spawn").Pool(args.processes) as pool:
            for number, row in enumerate(pool.imap_unordered(partial(_run, args), left), start=1):
                rows.append(row)
                args.output.write_text(json.dumps(sorted(rows, key=str), indent=1) + "\n")
                print(f"{number} of {len(left)}: {row}", file=sys.stderr, flush=True)
    order = [case for task in ("cnn", "gpt") for case in cases(task)]
    rows.sort(key=lambda row: order.index(case_of(row)))
    print("\n".join(tables(rows)))


def _run(args: argparse.Namespace, what: tuple[Case, int]) -> dict[str, Any]:
    return run(args, *what)


if __name__ == "__main__":
    main()
