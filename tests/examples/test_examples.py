"""Each example runs under horovodrun, learns, and tells what compression did."""

from __future__ import annotations

import json
import re
import stat
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from compare.files import write_images, write_text
from launching import AS_ROOT, horovodrun, run, torchrun
from PIL import Image

pytestmark = pytest.mark.jobs


def example(name: str) -> str:
    """The path of an example's program."""
    return str(Path(__file__).resolve().parents[2] / "examples" / name)


def figures(output: str, name: str) -> list[float]:
    """All values of ``name=`` that were printed."""
    return [float(value) for value in re.findall(rf"\b{name}=([0-9.]+)", output)]


def images(folder: Path) -> Path:
    """Two classes that a model can tell apart at a glance: light ones and dark ones."""
    rng = np.random.default_rng(0)
    for part, count in (("train", 16), ("val", 8)):
        for name, light in (("dark", 40), ("light", 200)):
            (folder / part / name).mkdir(parents=True)
            for number in range(count):
                pixels = rng.integers(light - 40, light + 40, (48, 56, 3), dtype=np.uint8)
                Image.fromarray(pixels).save(folder / part / name / f"{number}.png")
    return folder


def test_ddp_digits() -> None:
    """Without Horovod: under torchrun."""
    found = torchrun(2, example("pytorch/ddp_digits.py"), "--epochs", "3")
    assert figures(found.stdout, "accuracy")[-1] > 0.8
    assert figures(found.stdout, "ratio")[-1] > 5


def test_gan() -> None:
    found = torchrun(2, example("pytorch/gan.py"), "--steps", "150")
    assert 0.7 < figures(found.stdout, "radius")[-1] < 1.3
    assert figures(found.stdout, "ratio")[-1] > 5


def test_ddp_gpt(tmp_path: Path) -> None:
    text = tmp_path / "text.txt"
    text.write_text("the quick brown fox jumps over the lazy dog; " * 400)
    small = ("--steps", "100", "--width", "32", "--length", "16", "--layers", "1", "--lr", "0.01")
    found = torchrun(2, example("pytorch/ddp_gpt.py"), text, *small)
    assert figures(found.stdout, "loss")[-1] < 1.6
    assert figures(found.stdout, "ratio")[-1] > 80


def test_local_gpt(tmp_path: Path) -> None:
    text = tmp_path / "text.txt"
    text.write_text("the quick brown fox jumps over the lazy dog; " * 400)
    small = ("--steps", "100", "--width", "32", "--length", "16", "--layers", "1", "--lr", "0.01", "--every", "10")
    found = torchrun(2, example("pytorch/local_gpt.py"), text, *small, "--compression", "qsgd:bits=4,min_size=0")
    assert figures(found.stdout, "loss")[-1] < 1.6
    assert figures(found.stdout, "ratio")[-1] > 4
    assert figures(found.stdout, "averaged")[0] == figures(found.stdout, "averaged")[1]


def test_consensus(tmp_path: Path) -> None:
    """Without a launcher. PowerGossip needs no step size; CHOCO diverges with that of plain gossip."""
    picture = tmp_path / "consensus.png"
    small = ("--ranks", "4", "--size", "20", "--megabytes", "0.1", "--plot", picture)
    found = run([sys.executable, example("consensus.py"), *small], 60, {"COLUMNS": "140"})
    lines = [line.split("│") for line in found.stdout.splitlines() if line.startswith("│")]
    ends = {line[1].strip(): float(line[-2]) for line in lines}
    assert ends["plain"] < 0.01 and ends["PowerGossip, rank 1"] < 0.01, found.stdout
    assert ends["CHOCO, top 1%, step size 1"] > 100
    assert picture.read_bytes().startswith(b"\x89PNG")


def test_the_study_of_adamw(tmp_path: Path) -> None:
    """It makes the runs that are missing."""
    program, results = Path(example("../tools/adam_study.py")), tmp_path / "study.jsonl"
    small = [f"--set={option}" for option in ("steps=2", "layers=1", "width=16", "context=8", "test=400")]
    options = dict(option.removeprefix("--set=").split("=") for option in small)
    made = {"task": "transformer", "spec": "none", "beta1": 0.5, "lr": 0.002, "seed": 0, "ranks": 2, "options": options}
    results.write_text(json.dumps(made) + "\n")
    specs = "none@0.5,bf16:preconditioned=on@0.9,ctk:ratio=0.1,chunk=64,preconditioned=on,onebit-adam,demo,dion"
    torchrun(2, program, results, f"--specs={specs}", "--lr=0.002", *small)
    first, *runs = [json.loads(line) for line in results.read_text().splitlines()]
    assert first == made
    assert [run["spec"].partition(":")[0] for run in runs] == ["bf16", "ctk", "onebit-adam", "demo", "dion"]
    assert [run["beta1"] for run in runs] == [0.9, 0.0, 0.9, 0.9, 0.9]
    assert all(2 < run["curve"][-1][1] < 7 for run in runs)


@pytest.mark.parametrize(("spec", "gather"), [("qsgd:bits=8", "int8"), ("ctk:preconditioned=on", "none")])
def test_fsdp_gpt(spec: str, gather: str, tmp_path: Path) -> None:
    """Letters that come as often as they do here have an entropy of 3.4."""
    text = tmp_path / "text.txt"
    text.write_text("the quick brown fox jumps over the lazy dog; " * 400)
    small = ("--steps", "60", "--width", "32", "--length", "16", "--layers", "1", "--lr", "0.01")
    found = torchrun(2, example("pytorch/fsdp_gpt.py"), text, *small, "--compression", spec, "--gather", gather)
    assert figures(found.stdout, "loss")[-1] < 1.6


RECIPES = ["lightning", "accelerate"]
PLAIN, SHARDING = (str(Path(__file__).with_name(name)) for name in ("plain.py", "sharding_cpus.py"))


def losses(*arguments: str | Path) -> list[float]:
    """Return the loss that a job of two ranks prints at its end."""
    return figures(torchrun(2, *arguments, "--epochs", "2").stdout, "loss")


@pytest.mark.long
@pytest.mark.parametrize("settings", [("lightning",), ("accelerate", "--mixed-precision=bf16")], ids=RECIPES)
def test_recipes_train_as_without_compression(settings: list[str]) -> None:
    """With a method that loses nothing, and two batches a step."""
    framework, *others = settings
    program = [example(f"pytorch/{framework}_digits.py"), "--accumulate=2", *others]
    (plain,) = losses(PLAIN, *program)
    for spec in ("none", "topk:ratio=1"):
        assert losses(*program, f"--compression={spec}") == pytest.approx([plain], abs=1e-4)


@pytest.mark.long
@pytest.mark.parametrize("framework", RECIPES)
def test_recipes_go_on_where_they_ended(framework: str, tmp_path: Path) -> None:
    """With the same loss, so with the residuals of each rank."""
    program = [example(f"pytorch/{framework}_digits.py"), "--compression=topk:ratio=0.01"]
    checkpoints = ["--checkpoints", str(tmp_path)]
    torchrun(2, *program, *checkpoints, "--epochs", "1")
    assert losses(*program, *checkpoints) == losses(*program)


@pytest.mark.long
@pytest.mark.parametrize("framework", RECIPES)
def test_recipes_shard_the_model_and_go_on_where_they_ended(framework: str, tmp_path: Path) -> None:
    """With FSDP2 as the framework sets it up, gradients and parameters in few bits."""
    program = [example(f"pytorch/{framework}_digits.py"), "--fsdp"]
    if framework == "accelerate":
        program.insert(0, SHARDING)
    (plain,) = losses(PLAIN, *program, "--compression=none")
    assert losses(*program, "--compression=none") == pytest.approx([plain], abs=1e-4)
    program += ["--compression=qsgd:bits=4,feedback=on", "--gather=int8"]
    whole = losses(*program)
    assert whole == pytest.approx([plain], abs=0.05) and whole != [plain]
    checkpoints = ["--checkpoints", str(tmp_path)]
    torchrun(2, *program, *checkpoints, "--epochs", "1")
    assert losses(*program, *checkpoints) == whole


@pytest.mark.long
@pytest.mark.parametrize("sharded", [False, True])
def test_huggingface_gpt(sharded: bool, tmp_path: Path) -> None:
    text = tmp_path / "text.txt"
    text.write_text("the quick brown fox jumps over the lazy dog; " * 200)
    program = [*(sharded * [SHARDING]), example("pytorch/huggingface_gpt.py"), str(text), *(sharded * ["--fsdp"])]
    program += ["--layers=1", "--width=32", "--length=16", "--lr=0.01"]
    (plain,) = losses(PLAIN, *program)
    assert plain < 2
    assert losses(*program, "--compression=none") == pytest.approx([plain], abs=1e-4)
    compressed = losses(*program, "--compression=qsgd:bits=8", *(sharded * ["--gather=int8"]))
    assert compressed == pytest.approx([plain], abs=0.05) and compressed != [plain]


@pytest.mark.long
def test_resnet50_goes_on_where_it_ended(tmp_path: Path) -> None:
    """Bit for bit: a job that was interrupted gets the weights that it would have got."""
    program = [example("pytorch/imagenet_resnet50.py"), str(images(tmp_path / "images")), "--size=32", "--batch=4"]
    program += ["--workers=0", "--lr-warm-up=1", "--amp=bf16", "--compression=powersgd:rank=4"]

    def weights(job: str, *epochs: str) -> dict[str, torch.Tensor]:
        """After jobs that end after some epochs."""
        for epoch in epochs:
            found = horovodrun(2, "gloo", *program, "--checkpoints", str(tmp_path / job), "--epochs", epoch)
            assert figures(found.stdout, "epoch")[-1] == float(epoch)
        model: dict[str, torch.Tensor] = torch.load(tmp_path / job / "epoch-0002" / "model.pt")["model"]
        return {name: tensor for name, tensor in model.items() if "running" not in name}

    interrupted, whole = weights("interrupted", "1", "2"), weights("whole", "2")
    assert all(torch.equal(interrupted[name], whole[name]) for name in whole)


@pytest.mark.long
def test_language_model(tmp_path: Path) -> None:
    """A model that knows only how frequent words are has a perplexity above 30."""
    program = [example("pytorch/language_model.py"), str(write_text(tmp_path / "text.txt")), "--vocabulary=60"]
    settings = ["--hidden=32", "--epochs=2", "--batch=4", "--length=10", "--lr=5"]
    found = horovodrun(2, "gloo", *program, *settings, "--compression=topk:ratio=0.1,min_size=0")
    reached = figures(found.stdout, "perplexity")
    assert reached[1] < reached[0] < 25


@pytest.mark.long
def test_elastic(tmp_path: Path) -> None:
    """Whom an elastic job loses and wins is tested elsewhere."""
    hosts = tmp_path / "hosts.sh"
    hosts.write_text("#!/bin/sh\necho localhost:2\n")
    hosts.chmod(hosts.stat().st_mode | stat.S_IXUSR)
    options = ["--min-np", "2", "--network-interfaces", "lo", "--host-discovery-script", str(hosts)]
    found = horovodrun(2, "gloo", example("pytorch/elastic.py"), "--epochs", "4", options=options)
    assert figures(found.stdout, "accuracy")[-1] > 0.8


@pytest.mark.long
def test_mpi_numpy() -> None:
    program = [sys.executable, "-m", "mpi4py", example("pytorch/mpi_numpy.py")]
    found = run(["mpirun", "-n", "2", "--bind-to", "none", *program], 300, AS_ROOT)
    assert found.returncode == 0, found.stdout
    assert figures(found.stdout, "accuracy")[-1] > 0.9


@pytest.mark.long
def test_fashion_mnist_in_mixed_precision(tmp_path: Path) -> None:
    data = write_images(tmp_path, train=1024, test=200)
    settings = ["--epochs", "3", "--mixed", "--checkpoint", str(tmp_path / "model.keras")]
    found = horovodrun(2, "gloo", example("keras/fashion_mnist.py"), "--data", data, *settings)
    assert figures(found.stdout, "accuracy")[-1] > 0.5
    assert (tmp_path / "model.keras").exists()


@pytest.mark.long
def test_custom_loop() -> None:
    found = horovodrun(2, "gloo", example("keras/custom_loop.py"), "--epochs", "3")
    assert figures(found.stdout, "accuracy")[-1] > 0.8
