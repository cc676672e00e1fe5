"""What users have written down stays: import paths, names, spec strings, options of the command."""

from __future__ import annotations

import ast
import json
from dataclasses import fields
from functools import cache
from pathlib import Path
from typing import Any

import click
import pytest
from typer.main import get_command

import hvd_compress
from hvd_compress.engine import spec
from hvd_compress.methods import REGISTRY
from hvd_compress.tools import cli

RECORDED = Path(__file__).with_name("public_face.json")
"""Add to it what is new. What it has may go only where users are told what to write instead."""

ROOT = Path(hvd_compress.__file__).parent
MODULES = [
    "",
    "torch",
    "distributed",
    "tensorflow",
    "keras",
    "mpi",
    "lab",
    "pipeline",
    "pipeline.torch",
    "pipeline.tensorflow",
]
CLASSES = (
    "LocalWorld",
    "TorchCompressor",
    "DistributedCompressor",
    "TensorFlowCompressor",
    "Aggregator",
    "Gossip",
    "LocalSteps",
    "Catalogue",
    "CompressedBoundary",
    "Pipeline",
    "Stats",
)


def exported(module: str) -> list[str]:
    """Return the ``__all__`` of a module, without importing it and its framework."""
    tree = ast.parse((ROOT.joinpath(*filter(None, module.split("."))) / "__init__.py").read_text())
    lists = [n.value for n in tree.body if isinstance(n, ast.Assign) and ast.unparse(n.targets[0]) == "__all__"]
    return sorted(ast.literal_eval(lists[0]))


@cache
def classes() -> dict[str, list[ast.ClassDef]]:
    """Return the classes of the package by name, without importing their frameworks, which may share a name."""
    found: dict[str, list[ast.ClassDef]] = {}
    for path in ROOT.rglob("*.py"):
        for node in ast.parse(path.read_text()).body:
            if isinstance(node, ast.ClassDef):
                found.setdefault(node.name, []).append(node)
    return found


def members(name: str) -> list[str]:
    """Return the public names of a class and of its bases in the package."""
    named: list[str] = []
    for node in classes()[name]:
        named += [n.name for n in node.body if isinstance(n, ast.FunctionDef)]
        named += [n.target.id for n in node.body if isinstance(n, ast.AnnAssign) and hasattr(n.target, "id")]
        for base in node.bases:
            if isinstance(base, ast.Name) and base.id in classes():
                named += members(base.id)
    return sorted({one for one in named if not one.startswith("_")})


def options(command: Any, path: str = "") -> dict[str, list[str]]:
    """Return the options and arguments of a command and of all below it."""
    if isinstance(command, click.Group) or hasattr(command, "commands"):
        found: dict[str, list[str]] = {}
        for name, below in command.commands.items():
            found |= options(below, f"{path} {name}".strip())
        return found
    return {path: sorted(word for parameter in command.params for word in (*parameter.opts, *parameter.secondary_opts))}


def present() -> dict[str, Any]:
    """Return all that users may have written down, as it is now."""
    return {
        "modules": {f"hvd_compress.{module}".rstrip("."): exported(module) for module in MODULES},
        "classes": {name: members(name) for name in CLASSES},
        "methods": {name: [field.name for field in fields(cls)] for name, cls in REGISTRY.items()},  # type: ignore[arg-type]
        "options": sorted({*spec.OPTIONS, *spec.MEMORY}),
        "command": options(get_command(cli.complete().app)),
    }


def missing(old: Any, new: Any, path: str = "") -> list[str]:
    """Return what is in the old one and not in the new one."""
    if isinstance(old, dict):
        gone = [f"{path}/{key}" for key in old if key not in new]
        return gone + [one for key in old if key in new for one in missing(old[key], new[key], f"{path}/{key}")]
    return [f"{path}/{one}" for one in old if one not in new]


@pytest.mark.slow
def test_nothing_of_the_public_face_is_lost() -> None:
    assert missing(json.loads(RECORDED.read_text()), present()) == []


if __name__ == "__main__":
    RECORDED.write_text(json.dumps(present(), indent=1) + "\n")
