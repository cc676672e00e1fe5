"""Bugs to plant in the package, in the processes of a job: schedules that find nothing must find these."""

from __future__ import annotations

from collections.abc import Callable
from importlib import import_module
from typing import Any

from soak.schedules.schedule import Framework


def residual(framework: Framework) -> None:
    """A step that does not count is not taken back: the new state stays."""
    if framework == "torch":
        exchange = import_module("hvd_compress.torch.bucket_exchange").BucketExchange
        settle = exchange.settle
        _replace(exchange, "settle", lambda self, commit: settle(self, commit or self._result is not None))
    else:
        session, verdict = (import_module(f"hvd_compress.tensorflow.{name}") for name in ("session", "verdict"))
        decide = verdict.decide
        _replace(session.Session, "_fits", lambda *_: True)
        _replace(verdict, "decide", lambda *votes: decide(*votes)._replace(finite=True))


def manifest(framework: Framework) -> None:
    """The newest files are taken, whatever saves they are of, and nobody asks whether all ranks have the same."""
    state_files = import_module("hvd_compress.checkpoint.state_files")
    _replace(state_files, "flaw", lambda found, size: "")
    agreement = import_module("hvd_compress.checkpoint.agreement")
    describe = agreement.describe
    _replace(agreement, "describe", lambda method, merge, gradients, restored="": describe(method, merge, gradients))


def agreement(framework: Framework) -> None:
    """Ranks do not compare how they are set up."""
    if framework == "torch":
        comparison = import_module("hvd_compress.torch.agreement")._Comparison
        _replace(comparison, "_refuse", lambda self, title: None)
    else:
        _replace(import_module("hvd_compress.checkpoint.agreement"), "check", lambda lines: 1)


PLANTS: dict[str, Callable[[Framework], None]] = {"residual": residual, "manifest": manifest, "agreement": agreement}


def plant(name: str, framework: Framework) -> None:
    """Plant a bug in this process, before the first step."""
    PLANTS[name](framework)


def _replace(owner: Any, name: str, new: Any) -> None:
    """Replace something that is there."""
    getattr(owner, name)
    setattr(owner, name, new)
