"""Each test of this folder runs on ranks as threads, for each way to match collectives."""

from __future__ import annotations

import gc
import inspect
import zlib
from collections.abc import Iterator
from typing import NamedTuple

import pytest
import torch
import torch._dynamo  # loaded by the first optimizer otherwise
from catalogue import one_in
from engine.ranks import enter

from hvd_compress.ops.torch_devices import torch_ops
from hvd_compress.torch import step
from hvd_compress.transport.rank_threads import Matching, RankThreads, ThreadTransport

torch.set_num_threads(1)


@pytest.fixture(scope="session", autouse=True)
def _frozen() -> Iterator[None]:
    gc.collect()
    gc.freeze()  # tests that collect garbage need not look at what was imported
    yield
    gc.unfreeze()


@pytest.fixture(autouse=True)
def _impatient(monkeypatch: pytest.MonkeyPatch) -> None:
    """Who may stop waiting for others does so soon."""
    monkeypatch.setattr(step, "_PATIENCE", 0.1)


class Setting(NamedTuple):
    """How many ranks, and how their collectives are matched."""

    size: int
    matching: Matching
    local_size: int = 1


SETTINGS = {
    "names": Setting(2, "names"),
    "channels": Setting(3, "channels"),
    "turns": Setting(2, "turns"),
    "nodes": Setting(4, "channels", 2),
    "nodes by name": Setting(4, "names", 2),
    "nodes in turns": Setting(4, "turns", 2),
}


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    """Repeat tests for each setting, unless they make their own ranks."""
    if "on_ranks" in metafunc.fixturenames:
        only = metafunc.definition.get_closest_marker("matched")
        names = only.args if only else ("names", "channels")
        settings = one_in(len(names), [(SETTINGS[name],) for name in names])
        metafunc.parametrize("on_ranks", settings, ids=names, indirect=True)


@pytest.fixture
def on_ranks(request: pytest.FixtureRequest) -> Setting:
    """The ranks that a test runs on."""
    setting: Setting = request.param
    return setting


@pytest.hookimpl(tryfirst=True)
def pytest_pyfunc_call(pyfuncitem: pytest.Function) -> bool | None:
    """Run a test on all ranks; its seed is that of its name."""
    setting = pyfuncitem.funcargs.get("on_ranks")
    if not isinstance(setting, Setting):
        return None
    names = inspect.signature(pyfuncitem.obj).parameters
    arguments = {name: value for name, value in pyfuncitem.funcargs.items() if name in names}

    def program(transport: ThreadTransport) -> None:
        enter(transport)
        pyfuncitem.obj(**arguments)

    seed = zlib.crc32(pyfuncitem.nodeid.encode())
    RankThreads(setting.size, torch_ops("cpu"), setting.local_size, seed, setting.matching).run(program)
    return True
