"""The commands in the documents: each parses, the jobs run, and the files that they name exist."""

from __future__ import annotations

import itertools
import re
import shlex
from fnmatch import fnmatch
from pathlib import Path
from typing import Any

import pytest
import tomllib
import typer
from compare.files import write_images
from docs.documents import ROOT, commands
from launching import AS_ROOT, run

import hvd_compress
from hvd_compress.local.settings import method_of
from hvd_compress.tools.cli import complete
from hvd_compress.tools.terminal import split_specs

COMMANDS = sorted({command for command, _ in commands()})
OURS = re.compile(r"^(?:sudo )?(?:\.venv/bin/)?hvd-compress ")
MINE = [shlex.split(command) for command in sorted({OURS.sub("", one) for one in COMMANDS if OURS.match(one)})]

BY_TORCHRUN = re.compile(r"^torchrun .* -m hvd_compress ")
ON_RANKS = [shlex.split(BY_TORCHRUN.sub("", one)) for one in COMMANDS if BY_TORCHRUN.match(one)]

STAND_INS = {
    "SPEC...": "topk:ratio=0.01",
    "FILE": "out.json",
    "file.py:function": "mine.py:build",
    "server1:4,server2:4": "localhost:4,127.0.0.1:4",
    "server1:8,server2:8": "localhost:2,127.0.0.1:2",
}
"""Replacements for placeholders in commands; horovodrun takes two names of this machine for two nodes."""


def name_of(words: list[str]) -> tuple[str, ...]:
    """Return the subcommand."""
    return tuple(words[: 2 if words[0] == "bench" else 1])


def test_commands_parse() -> None:
    """Parse all options and their values. ``make commands`` runs the commands, which takes longer."""
    app: Any = typer.main.get_command(complete().app)
    for words in [*MINE, *ON_RANKS]:
        command = app
        rest = [STAND_INS.get(word, word) for word in words]
        while hasattr(command, "commands") and rest and not rest[0].startswith("-"):
            command = command.commands[rest.pop(0)]
        if len(words) > len(name_of(words)):
            command.make_context(" ".join(words), rest)


def specs_of(words: list[str]) -> list[str]:
    """Return the methods that a command names."""
    if words[0] == "bench":
        return list(itertools.takewhile(lambda word: not word.startswith("-"), words[2:]))
    return [spec for name, value in itertools.pairwise(words) if name == "--methods" for spec in split_specs(value)]


def test_all_methods_in_commands_are_known() -> None:
    specs = {spec for words in MINE for spec in specs_of(words)} - STAND_INS.keys()
    assert len(specs) > 20
    for spec in specs:
        hvd_compress.parse(method_of(spec))


def test_targets_of_make_exist() -> None:
    targets = set(re.findall(r"^([a-z0-9-]+):", (ROOT / "Makefile").read_text(), re.MULTILINE))
    assert {target for command in COMMANDS if command.startswith("make ") for target in command.split()[1:]} <= targets


def test_extras_exist() -> None:
    extras = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]
    named = [match[1] for command in COMMANDS if (match := re.search(r"pip install .*\[(.*)\]", command))]
    assert {extra for names in named for extra in names.split(",")} <= set(extras)


JOBS = [one for one in COMMANDS if re.match(r"(?:horovodrun|mpirun) .*python ", one)]
LAUNCHED = [one for one in JOBS if not any({*one.split()} < {*other.split()} for other in JOBS)]
"""All jobs, except those whose options are all in another."""

ON_THIS_MACHINE = {
    r"-(np?) \d+": r"-\1 2",
    r"--(min|max)-np \d+": r"--\1-np 2",
    r"-H \S+": "-H localhost:2",
    # With one host, an elastic job waits for a second one.
    r"--host-discovery": "--network-interfaces lo --host-discovery",
}
"""Patterns and replacements that turn a job for many machines into one for this machine."""


FEW = ["--stages", "2", "--width", "8", "--batch", "8"]
SMALL = {
    "pipeline_cnn.py": [*FEW, "--epochs", "1", "--train", "32", "--test", "16", "--data", "."],
    "pipeline_gpt.py": [*FEW, "--steps", "2", "--layers", "2"],
}
"""Options that make a job short; others run one epoch."""


@pytest.mark.long
@pytest.mark.parametrize("command", LAUNCHED)
def test_jobs_run(command: str, tmp_path: Path) -> None:
    """Run with two ranks for one epoch; ``train.py`` is the shortest example."""
    write_images(tmp_path)
    (tmp_path / "text.txt").write_text("A text. " * 1000)
    (tmp_path / "examples").symlink_to(ROOT / "examples")
    (tmp_path / "train.py").symlink_to(ROOT / "examples" / "pytorch" / "digits.py")
    (tmp_path / "hosts.sh").write_text("#!/bin/sh\necho localhost:2\n")
    (tmp_path / "hosts.sh").chmod(0o755)
    for pattern, here in ON_THIS_MACHINE.items():
        command = re.sub(pattern, here, command)
    small = next((options for name, options in SMALL.items() if name in command), ["--epochs", "1"])
    found = run([*shlex.split(command), *small], 300, AS_ROOT, tmp_path)
    assert found.returncode == 0 and re.search("accuracy=|perplexity=", found.stdout), found.stdout


OTHERS = re.compile(
    r"(?:sudo |\.venv/bin/)?(?:hvd-compress|make|pip install) .*|(?:horovodrun|mpirun) .*|docker .*|export .*"
)


def test_there_are_no_other_commands_but_programs_of_the_project() -> None:
    for command in COMMANDS:
        if not (OTHERS.fullmatch(command) or BY_TORCHRUN.match(command)):
            python, program, *rest = shlex.split(command.removeprefix("sudo "))
            if python == "torchrun":
                python, program = "python", next(word for word in rest if word.endswith(".py"))
            file = rest[0].replace(".", "/") if program == "-m" else program
            assert python in (".venv/bin/python", "python") and (ROOT / file).exists(), command


def test_commands_for_containers_name_existing_files() -> None:
    """Check the files only: running the commands needs a container engine."""
    named = [word for one in COMMANDS if one.startswith("docker ") for word in shlex.split(one) if "/" in word]
    files = {word.removeprefix("/opt/hvd_compress").lstrip("/") for word in named}
    assert {"docker/cpu.Dockerfile", "docker/gpu.Dockerfile", "docker/compose.yaml"} < files
    assert all((ROOT / file).exists() for file in files)


def test_images_copy_existing_files() -> None:
    carried = [line.lstrip("!") for line in (ROOT / ".dockerignore").read_text().splitlines() if line.startswith("!")]
    for name in ("cpu", "gpu"):
        lines = (ROOT / "docker" / f"{name}.Dockerfile").read_text().splitlines()
        sources = [word for line in lines if re.match("COPY (?!--from)", line) for word in line.split()[1:-1]]
        assert len(sources) > 8
        for source in sources:
            assert (ROOT / source).exists() and any(fnmatch(source.split("/")[0], one) for one in carried), source


def test_images_run_existing_modules() -> None:
    for name in ("cpu", "gpu"):
        found = re.findall(r"python -m (hvd_compress[\w.]*)", (ROOT / "docker" / f"{name}.Dockerfile").read_text())
        assert found and all((ROOT / one.replace(".", "/")).exists() for one in found), found
