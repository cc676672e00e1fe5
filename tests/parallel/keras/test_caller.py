"""How the calling frames are read, whatever Python makes of a frame's variables."""

from __future__ import annotations

import sys
from types import SimpleNamespace
from typing import Any

import horovod.tensorflow as hvd
import pytest

from hvd_compress.tensorflow import caller


class Variables(dict[str, Any]):
    """The variables of a frame as from Python 3.13 on, where their names come as a list."""

    def keys(self) -> Any:
        return list(super().keys())


def frame(function: str, back: Any, **variables: Any) -> Any:
    """A frame of a function of this name."""
    code, module = SimpleNamespace(co_name=function), {"__name__": "horovod.tensorflow"}
    return SimpleNamespace(f_code=code, f_globals=module, f_locals=Variables(variables), f_back=back)


def test_variables_of_a_frame_whose_names_are_a_list(monkeypatch: pytest.MonkeyPatch) -> None:
    gradients, variables = [object(), object()], [object(), object()]
    outer = frame("tf__allreduce_grads", None, grads=gradients, vars=variables, use_generic_names=False)
    factors = {"prescale_factor": 0.5, "postscale_factor": 3.0}
    inner = frame("allreduce", outer, process_set=hvd.global_process_set, op=hvd.Sum, **factors)
    monkeypatch.setattr(sys, "_getframe", lambda depth=0: frame("compress", inner))
    call = caller.find()
    monkeypatch.undo()
    assert call is not None
    assert call.source is gradients and call.parameters == variables and call.factor == 1.5
