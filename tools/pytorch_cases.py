"""PyTorch's own tests of DistributedDataParallel and FSDP2, prepared for `pytorch_tests.py`.

Ranks are forked: importing PyTorch anew for each test would take most of the time. In a rank, GPUs are CPUs, our hook
takes the place of the test's own, and what happens is noted in a file.
"""

from __future__ import annotations

import contextlib
import faulthandler
import functools
import importlib
import importlib.util
import json
import logging
import multiprocessing
import os
import re
import sys
import time
import types
import unittest
import weakref
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, ClassVar, NamedTuple

import torch
from torch import nn
from torch.distributed.fsdp._fully_shard._fsdp_state import FSDPState
from torch.nn.parallel import DistributedDataParallel
from torch.overrides import TorchFunctionMode

from horovod_worker import describe
from hvd_compress.distributed import Compression, DistributedCompressor
from hvd_compress.distributed import hook as our_hook
from hvd_compress.distributed.sharded import ShardedReducer

GRACE = 5
"""Seconds that a rank has to tell where it hangs."""

GPUS = 8
"""How many there seem to be; tests of FSDP2 take up to eight."""

MEANS = {
    *("allreduce_hook", "allreduce_with_then_hook", "allreduce_hook_gloo"),
    *("fp16_compress_hook", "quantization_pertensor_hook", "quantization_perchannel_hook"),
    *("powerSGD_hook", "batched_powerSGD_hook", "post_localSGD_hook"),
}
"""Hooks of the tests whose result is the mean of the gradients over the ranks, or close to it."""


INAPPLICABLE = {
    "test_ddp_comm_hook_logging": "asserts the names of PyTorch's hooks",
    "test_ddp_grad_div_uneven_inputs": "our hook refuses join(divide_by_initial_world_size=False)",
    "test_ddp_profiling_torch_profiler": "counts the collectives of DistributedDataParallel without a hook",
    "test_skip_all_reduce_unused_parameters": "our hook refuses skip_all_reduce_unused_params=True, except for none",
    "test_manual_reshard_with_reshard_after_forward_false": "counts the collectives of FSDP2 without our own",
    "test_fully_shard_communication_count": "counts the collectives of FSDP2 without our own",
    "test_ddp_sink_noclone": "forbids Tensor.clone in the backward pass",
}
"""Why tests cannot pass with our hook."""

EXACT = {"test_static_graph_multi_forward": "compares zeros with a tolerance of 1e-8"}
"""Why tests cannot pass with a method whose results are rounded products."""

WAITING = {
    "test_train_mixed_requires_grad_per_group": "a rank with other numbers waits for the others before it says so"
}
"""Why tests hang with other numbers."""


class File(NamedTuple):
    """A file of PyTorch's tests.

    Attributes:
        module: Its name.
        path: Its folder in the repository; empty if it is part of the installed package.
        bases: Classes that make up its test case; none for all that test FSDP2 in several processes.
        keyword: A regular expression for the names of the tests that run.
    """

    module: str
    path: str
    bases: tuple[str, ...]
    keyword: str = ""


FILES = {
    "distributed_test": File(
        "torch.testing._internal.distributed.distributed_test",
        "",
        ("TestDistBackend", "DistributedTest._DistTestBase"),
        # The others are of collectives.
        "(?i)ddp|DistributedDataParallel|no_sync|parity|static|uneven|graph|unused|undefined|localsgd|verify_model",
    ),
    "c10d_gloo": File("test_c10d_gloo", "test/distributed", ("DistributedDataParallelTest",)),
    "ddp_hooks": File(
        "test_ddp_hooks", "test/distributed/algorithms/ddp_comm_hooks", ("DistributedDataParallelCommHookTest",)
    ),
    **{
        f"fsdp_{name}": File(f"test_fully_shard_{name}", "test/distributed/_composable/fsdp", ())
        for name in ("training", "autograd", "clip_grad_norm_", "comm", "extensions", "frozen", "state_dict")
    },
}


class Job(NamedTuple):
    """A run of a test.

    Attributes:
        spec: Of the compression; empty for PyTorch without our hook.
        op: What the hook makes of the gradients of all ranks: ``mean`` as the tests expect, or ``sum``.
        folder: Where ranks write.
        limit: Seconds after which the test hangs.
    """

    spec: str
    op: str
    folder: Path
    limit: float


class Record(NamedTuple):
    """Outcome of a test on a rank.

    Attributes:
        time: When it ended, in seconds.
        kind: ``passed``, ``skipped``, ``numbers`` (an assertion of the test fails) or ``error``.
        text: What went wrong and where, in a line.
        models: How many models our hook serves, or could serve.
        calls: How often our hook was called.
    """

    time: float
    kind: str
    text: str
    models: int
    calls: int


def read(folder: Path) -> list[Record]:
    """Return how a test went, on the ranks where it came to an end."""
    return [Record(*json.loads(path.read_text())) for path in sorted(folder.glob("record*"))]


class Hooks:
    """Puts our hook into models of this process.

    Args:
        job: The job.
        all_models: Also into models for which the test registers no hook.
    """

    def __init__(self, job: Job, all_models: bool) -> None:
        self._job, self._all_models = job, all_models
        self._seen: weakref.WeakSet[nn.Module] = weakref.WeakSet()
        self._exact = contextlib.ExitStack()
        self.models = self.calls = 0

    @torch._dynamo.disable  # type: ignore[untyped-decorator]  # a test compiles its models
    def _serve(self, model: DistributedDataParallel) -> bool:
        self._seen.add(model)
        self.models += 1
        if self._job.spec:
            Compression.parse(self._job.spec).register(model, self._job.op)
        return bool(self._job.spec)

    def install(self) -> None:
        """Replace methods of DistributedDataParallel and of FSDP2."""
        self._install_ddp()
        self._install_fsdp()

    def _install_ddp(self) -> None:
        ddp: Any = DistributedDataParallel
        register, forward, join = ddp.register_comm_hook, ddp._pre_forward, ddp.join

        def register_comm_hook(model: DistributedDataParallel, state: object, hook: Any) -> None:
            known = getattr(hook, "__name__", "") in MEANS
            if hook is our_hook or not (known and self._serve(model)):
                register(model, state, hook)
                self._seen.add(model)

        def begin(model: Any) -> None:
            # Not in the constructor: the test may register a hook afterwards.
            if self._all_models and model not in self._seen and not model._comm_hooks and not model.mixed_precision:
                self._serve(model)

        def _pre_forward(model: Any, *arguments: Any, **options: Any) -> Any:
            begin(model)
            return forward(model, *arguments, **options)

        def joined(model: Any, *arguments: Any, **options: Any) -> Any:
            begin(model)  # a rank may join without a step
            return join(model, *arguments, **options)

        ddp.register_comm_hook, ddp._pre_forward, ddp.join = register_comm_hook, _pre_forward, joined
        DistributedCompressor.reduce = self._counted(DistributedCompressor.reduce)  # type: ignore[method-assign]

    def _install_fsdp(self) -> None:
        lazy_init = FSDPState._lazy_init

        def _lazy_init(state: Any) -> None:
            # Called in the first forward pass; not in ``fully_shard``: the test may set gathers of its own afterwards.
            if state._is_root is None and len(state._modules) == 1 and state._modules[0] not in self._seen:
                self._shard(state._modules[0])
            lazy_init(state)

        FSDPState._lazy_init = _lazy_init  # type: ignore[method-assign, assignment]
        ShardedReducer.reduce = self._counted(ShardedReducer.reduce)  # type: ignore[method-assign]

    def _shard(self, model: Any) -> None:
        """Register a sharded model; with a spec that loses nothing, its gathers are ours but exact."""
        self._seen.add(model)
        self.models += 1
        if self._job.spec:
            compression = Compression.parse(self._job.spec)
            compression.register(model, self._job.op, gather="int8")
            if self._job.spec == "none":
                self._exact.enter_context(compression.exact_parameters(model))

    def _counted(self, reduce: Callable[..., Any]) -> Any:
        def counted(*arguments: Any) -> Any:
            self.calls += 1
            return reduce(*arguments)

        return counted


def on_cpu(place: Any, numbers: bool = False) -> Any:
    """Return the CPU for a GPU; numbers are GPUs only where the caller knows that they are devices."""
    if isinstance(place, torch.device) or (isinstance(place, str) and place.startswith("cuda")):
        return torch.device("cpu")
    return torch.device("cpu") if numbers and type(place) is int else place


class GPUsAreCPUs(TorchFunctionMode):
    """Puts the tensors of each GPU on the CPU."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Mapping[str, Any] | None = None) -> Any:
        """Call a function of PyTorch."""
        if func is torch.Tensor.cuda:
            return args[0]
        args = [on_cpu(value, func is torch.Tensor.to) for value in args]
        return func(*args, **{name: on_cpu(value, name == "device") for name, value in (kwargs or {}).items()})


def replace_gpus(size: int) -> None:
    """Let one rank run on CPUs what it runs on GPUs, as far as the tests of DistributedDataParallel need it."""
    module_to, ddp_init = nn.Module.to, DistributedDataParallel.__init__

    def to(module: nn.Module, *args: Any, **kwargs: Any) -> nn.Module:
        kwargs = {name: on_cpu(value, name == "device") for name, value in kwargs.items()}
        return module_to(module, *(on_cpu(value, numbers=True) for value in args), **kwargs)

    def init(model: Any, *args: Any, **kwargs: Any) -> None:
        ddp_init(model, *args, **{**kwargs, "device_ids": None, "output_device": None})

    changes: dict[str, Any] = {
        "device_count": lambda: size,
        "current_device": lambda: torch.device("cpu"),
        "set_device": lambda device: None,
        "synchronize": lambda device=None: None,
        "device": contextlib.nullcontext,
    }
    for name, value in changes.items():
        setattr(torch.cuda, name, value)
    torch.accelerator.device_count = changes["device_count"]
    torch.accelerator.set_device_index = changes["set_device"]
    nn.Module.to, DistributedDataParallel.__init__ = to, init  # type: ignore[method-assign, assignment]


class Case(unittest.TestCase):
    """Changes to PyTorch's test cases: how ranks start, and what they record."""

    job: ClassVar[Job]
    processes: list[Any]
    rank: int
    world_size: Any

    def setUp(self) -> None:
        """Start the ranks, unless the class of the tests has done so."""
        super().setUp()
        if not self.processes:
            self._spawn_processes()

    def _spawn_processes(self) -> None:
        start: Any = self._start_processes  # type: ignore[attr-defined]
        start(multiprocessing.get_context("fork").Process)

    def run_test(self, name: str, pipe: object) -> None:
        """Run a test in a rank."""
        folder, rank = self.job.folder, self.rank
        with Path(folder, f"log{rank}").open("w") as log:
            os.dup2(log.fileno(), 1)
            os.dup2(log.fileno(), 2)
        stack = Path(folder, f"stack{rank}").open("w")  # noqa: SIM115
        faulthandler.enable(stack)
        faulthandler.dump_traceback_later(self.job.limit, file=stack)
        # Tests of hooks compare them with models that have none.
        hooks = Hooks(self.job, all_models=not re.search("comm_hook|hook_parity", name))
        hooks.install()
        replace_gpus(int(self.world_size))
        test = getattr(self, name)

        @functools.wraps(test)
        def noting() -> None:
            kind, text = "passed", ""
            try:
                with GPUsAreCPUs():
                    test()
            except BaseException as error:
                kind, text = reason(error)
                raise
            finally:
                record = Record(time.time(), kind, text, hooks.models, hooks.calls)
                Path(folder, f"record{rank}").write_text(json.dumps(record))

        setattr(self, name, noting)
        super().run_test(name, pipe)  # type: ignore[misc]


def reason(error: BaseException) -> tuple[str, str]:
    """Return how a test went that raised an error, and why."""
    skips = importlib.import_module("torch.testing._internal.common_distributed").TEST_SKIPS
    if isinstance(error, SystemExit):
        texts = [skip.message for skip in skips.values() if skip.exit_code == error.code]
        return ("skipped", texts[0]) if texts else ("error", f"exit code {error.code}")
    return ("skipped", str(error)) if isinstance(error, unittest.SkipTest) else describe(error)


def prepare(ranks: int, limit: float) -> None:
    """Set up this process for PyTorch's tests, before any of them is imported.

    Args:
        ranks: How many; some tests have a number of their own.
        limit: Seconds for a test.
    """
    os.environ |= {"BACKEND": "gloo", "WORLD_SIZE": str(ranks), "INIT_METHOD": "file://", "OMP_NUM_THREADS": "1"}
    torch.set_num_threads(1)
    if importlib.util.find_spec("expecttest") is None:
        # The base of all test cases of PyTorch; these tests need nothing else of it.
        sys.modules["expecttest"] = types.ModuleType("expecttest")
        sys.modules["expecttest"].TestCase = unittest.TestCase  # type: ignore[attr-defined]
    common: Any = importlib.import_module("torch.testing._internal.common_distributed")

    def always(*_: object, **__: object) -> Callable[[Any], Any]:
        return lambda test: test

    common.skip_if_lt_x_gpu = common.requires_accelerator_dist_backend = always
    common.skip_if_no_gpu = lambda test: test
    common.logger.setLevel(logging.ERROR)
    common.get_timeout = lambda test: limit + GRACE
    torch.accelerator.device_count = torch.cpu.device_count = lambda: GPUS


def with_small_images(make: Callable[..., Any]) -> Callable[..., Any]:
    """Return a function that makes a case of uneven inputs whose images take no hours on a CPU."""

    def made(*, inp: Any, **fields: Any) -> Any:
        return make(inp=inp[..., :32, :32] if isinstance(inp, torch.Tensor) and inp.dim() == 4 else inp, **fields)

    return made


def cases_of(file: File, checkout: Path | None) -> list[type[Case]]:
    """Return the test cases of a file."""
    if file.path and checkout:
        sys.path[:0] = [str(checkout / "test" / "distributed"), str(checkout / file.path)]
    module: Any = importlib.import_module(file.module)
    if hasattr(module, "DDPUnevenTestInput"):
        module.DDPUnevenTestInput = with_small_images(module.DDPUnevenTestInput)
    if file.bases:
        bases: list[Any] = [functools.reduce(getattr, name.split("."), module) for name in file.bases]
        return [type("PyTorchCase", (Case, *bases), {"__module__": __name__})]
    common: Any = importlib.import_module("torch.testing._internal.common_fsdp")
    found = [one for one in vars(module).values() if isinstance(one, type) and issubclass(one, common.FSDPTest)]
    return [type(one.__name__, (Case, one), {"__module__": __name__}) for one in found if one is not common.FSDPTest]
