"""Each example of a pipeline runs on several ranks, learns, and tells what went between its stages."""

from __future__ import annotations

import importlib
import json
import re
import sys
from pathlib import Path

import pytest
import torch
from compare.files import write_images, write_text
from launching import AS_ROOT, horovodrun, run
from torch import Tensor, nn

pytestmark = pytest.mark.jobs

EXAMPLES = Path(__file__).resolve().parents[2] / "examples" / "pytorch"

TRAIN, BATCH, WIDTH, MICROBATCHES = 256, 32, 4, 4
CNN = ["--train", str(TRAIN), "--batch", str(BATCH), "--width", str(WIDTH), "--epochs", "2", "--lr", "0.1"]
GPT = ["--width=16", "--heads=2", "--length=16", "--batch=8", "--steps=60", "--lr=0.01"]

NUMBERS = [WIDTH * 28 * 28, 2 * WIDTH * 14 * 14, 4 * WIDTH * 7 * 7]
"""Of a sample, in what goes over the boundaries between the four stages of the CNN."""

HEADER = 64
"""Bytes of a message besides its payload."""


def mpirun(ranks: int, name: str, *arguments: str) -> str:
    """What an example prints on several ranks of this machine."""
    launcher = ["mpirun", "--bind-to", "none", "--map-by", ":OVERSUBSCRIBE", "-n", str(ranks)]
    found = run([*launcher, sys.executable, "-m", "mpi4py", EXAMPLES / name, *arguments], 300, AS_ROOT)
    assert found.returncode == 0, f"mpirun ended with {found.returncode}:\n{found.stdout}"
    return found.stdout


def last(output: str, name: str) -> float:
    """The value of ``name=`` that was printed last."""
    return float(re.findall(rf"\b{name}=([0-9.]+)", output)[-1])


def ratios(output: str, direction: str) -> list[float]:
    """Of the boundaries, one after the other."""
    return [float(ratio) for ratio in re.findall(rf"direction={direction} bytes=\d+ ratio=([0-9.]+)", output)]


@pytest.fixture(scope="module")
def images(tmp_path_factory: pytest.TempPathFactory) -> str:
    """The option that names a folder with few images."""
    return f"--data={write_images(tmp_path_factory.mktemp('images'), train=TRAIN + 10, test=50)}"


@pytest.fixture(scope="module")
def text(tmp_path_factory: pytest.TempPathFactory) -> str:
    """A file with a little text."""
    return str(write_text(tmp_path_factory.mktemp("text") / "text.txt", lines=200))


@pytest.mark.long
def test_the_cnn_and_what_it_sends_uncompressed(images: str, tmp_path: Path) -> None:
    report = tmp_path / "report"
    printed = mpirun(4, "pipeline_cnn.py", images, *CNN, f"--report={report}")
    assert last(printed, "accuracy") > 0.5
    messages = 2 * MICROBATCHES * len(NUMBERS)
    assert last(printed, "bytes_per_step") == 2 * 4 * BATCH * sum(NUMBERS) + messages * HEADER
    facts = [json.loads(line) for line in report.read_text().splitlines()]
    assert [fact["epoch"] for fact in facts[:2]] == [1, 2] and facts[0]["loss"] > facts[1]["loss"]
    assert facts[-1]["bytes_per_step"] == last(printed, "bytes_per_step") and facts[-1]["steps"] == 2 * TRAIN // BATCH


@pytest.mark.long
def test_the_cnn_compressed_both_ways(images: str) -> None:
    """A tenth of the values with 2 bytes each to tell where it was; a byte for each number."""
    options = ["--forward=topk:ratio=0.1", "--backward=qsgd:bits=8", "--uncompressed-inference"]
    printed = mpirun(4, "pipeline_cnn.py", images, *CNN, *options)
    assert last(printed, "accuracy") > 0.3
    assert ratios(printed, "forward") == pytest.approx([10 * 4 / 6] * 3, rel=0.03)
    assert ratios(printed, "backward") == pytest.approx([4] * 3, rel=0.03)
    predicted = 4 * BATCH * sum(NUMBERS) * (6 / 40 + 1 / 4)
    assert last(printed, "bytes_per_step") == pytest.approx(predicted, rel=0.03)


@pytest.mark.long
def test_two_replicas_of_the_cnn_with_a_memory_of_each_sample(images: str) -> None:
    """In the first of two epochs activations are sent as they are, in the second a byte for each number."""
    options = ["--stages=2", "--compression=topk:ratio=0.1,min_size=0", "--batch=16"]
    memory = [f"--memory=aqsgd:samples={TRAIN}", "--forward=minmax:bits=8"]
    printed = mpirun(4, "pipeline_cnn.py", images, *CNN, *options, *memory)
    assert last(printed, "accuracy") > 0.3
    assert last(printed, "steps") == 2 * TRAIN // BATCH  # each replica has half of the images
    assert last(printed, "gradient_ratio") > 4
    assert ratios(printed, "forward") == pytest.approx([2 / (1 + 1 / 4)], rel=0.03)  # that of the first replica alone
    predicted = 16 * 4 * NUMBERS[1] * ((1 + 1 / 4) / 2 + 1)
    assert last(printed, "bytes_per_step") == pytest.approx(predicted, rel=0.03)


@pytest.mark.long
def test_the_gpt(text: str) -> None:
    """A model that knows nothing has a perplexity of 256."""
    options = ["--stages=2", "--forward=minmax:bits=8", "--backward=qsgd:bits=8"]
    printed = mpirun(2, "pipeline_gpt.py", text, *GPT, *options)
    assert last(printed, "perplexity") < 20
    messages, numbers = 2 * MICROBATCHES, 2 * 16 * 16  # of pieces, bytes and width
    assert last(printed, "bytes_per_step") == pytest.approx(messages * (HEADER + numbers), rel=0.05)


@pytest.mark.long
def test_the_gpt_over_horovod(text: str) -> None:
    arguments = [str(EXAMPLES / "pipeline_gpt.py"), text, *GPT, "--link=horovod", "--stages=2", "--memory=ef"]
    found = horovodrun(2, "gloo", *arguments, "--forward=topk:ratio=0.5", timeout=300)
    assert last(found.stdout, "perplexity") < 20
    assert ratios(found.stdout, "backward") == pytest.approx([1], rel=0.05)
    assert 1.2 < ratios(found.stdout, "forward")[0] < 1.4  # values, and 2 bytes each to tell where it was


@pytest.mark.parametrize("name", ["cut", "cut_gpt"])
def test_the_models_do_not_depend_on_how_they_are_cut(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(EXAMPLES))
    cut = getattr(importlib.import_module("stages"), name)
    sizes, x = {"cut": ((4,), torch.rand(2, 1, 28, 28)), "cut_gpt": ((8, 2, 4, 8), torch.randint(256, (2, 8)))}[name]
    outputs: list[Tensor] = []
    for count in (1, 2, 4):
        torch.manual_seed(0)
        stages = cut(*sizes, count)
        assert len(stages) == count
        outputs.append(nn.Sequential(*stages)(x))
    assert torch.equal(outputs[0], outputs[1]) and torch.equal(outputs[0], outputs[2])
