"""Check that the installed Horovod calls ``compress`` as the adapters expect, from its sources; nothing is imported."""

from __future__ import annotations

import importlib.util
from collections.abc import Iterator, Mapping
from pathlib import Path
from types import CodeType
from typing import NamedTuple


class Callers(NamedTuple):
    """Horovod's internals that an adapter reads."""

    # By file: functions that call ``compress``, and the variables read in their frames
    functions: Mapping[str, Mapping[str, set[str]]]
    names: set[str]  # Other names that are read, of Horovod's modules and optimizers


_DIRECT = {"name", "op", "prescale_factor", "postscale_factor", "process_set"}

CALLERS = {
    "torch": Callers(
        {
            "torch/optimizer.py": {
                "_allreduce_grad_async": {"self", "p"},
                "_grouped_allreduce_grad_async": {"self", "ps"},
            },
            "torch/mpi_ops.py": {
                "allreduce": {*_DIRECT, "average"},
                "grouped_allreduce": {*_DIRECT, "average", "tensors"},
            },
        },
        {"_handles", "_parameter_names", "_requires_update", "_starting_models", "process_set", "_handle_map"},
    ),
    "tensorflow": Callers(
        {
            "tensorflow/__init__.py": {
                "allreduce": {*_DIRECT, "tensor"},
                "grouped_allreduce": {*_DIRECT, "tensors"},
                "allreduce_grads": {"grads", "vars", "use_generic_names"},
                "_make_allreduce_grads_fn": {"compression"},
            },
        },
        set(),
    ),
}


def horovod_folder() -> Path | None:
    """Return where Horovod is installed; None if it is not."""
    spec = importlib.util.find_spec("horovod")
    return Path(spec.origin).parent if spec and spec.origin else None


def unknown(framework: str, folder: Path) -> tuple[str, ...]:
    """Return what an adapter looks for and this Horovod does not have."""
    missing: list[str] = []
    read: set[str] = set()
    for path, functions in CALLERS[framework].functions.items():
        try:
            codes = list(_codes(compile((folder / path).read_text(), path, "exec")))
        except (OSError, SyntaxError) as error:
            return (f"{path} ({type(error).__name__})",)
        read.update(name for code in codes for name in code.co_names)
        missing += [what for name, variables in functions.items() for what in _lacks(codes, name, variables)]
    return (*missing, *sorted(CALLERS[framework].names - read))


def _lacks(codes: list[CodeType], name: str, variables: set[str]) -> Iterator[str]:
    found = [code for code in codes if code.co_name == name]
    if not found:
        yield f"{name}()"
    for code in found:
        for variable in sorted(variables - {*code.co_varnames, *code.co_cellvars, *code.co_freevars}):
            yield f"{variable} in {name}()"


def _codes(code: CodeType) -> Iterator[CodeType]:
    yield code
    for constant in code.co_consts:
        if isinstance(constant, CodeType):
            yield from _codes(constant)
