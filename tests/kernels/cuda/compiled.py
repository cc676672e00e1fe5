"""Without a GPU: every kernel compiles for one, in the arithmetic of the oracle, and nothing waits for the device.

Where a kernel would be launched it is only compiled. See test_cuda.py.
"""

from __future__ import annotations

import inspect
import re
import sys
from collections.abc import Callable
from types import ModuleType
from typing import Any

import pytest
import torch
import triton
from torch import Tensor
from torch._subclasses.fake_tensor import DataDependentOutputException, FakeTensorMode
from triton.backends.compiler import GPUTarget
from triton.runtime.jit import JITFunction

from hvd_compress.ops.code import Code
from hvd_compress.ops.kernels import cuda
from hvd_compress.ops.kernels.cuda.preconditioning import _tables
from hvd_compress.ops.moments import Sides

N = 5000
CODES = (
    Code("max", 4, 512),
    Code("max", 7, 512, dither=False),
    Code("max", 3, 100),
    Code("l2", 4, 1024),
    Code("clipped", 2, 512, 2.5),
    Code("mean", 1, 8192),
    Code("means", 1, 512),
    Code("one", 1),
    Code("powers", 8),
    Code("bfloat16", 16),
    Code("e4m3", 8, 512, dither=False),
    Code("e5m2", 8, 100),
    Code("top", 2, 1024, ratio=0.03),
)


class Gpu:
    """What Triton asks its driver when it compiles."""

    def get_current_target(self) -> GPUTarget:
        return GPUTarget("cuda", 80, 32)

    def get_current_device(self) -> int:
        return 0

    def get_current_stream(self, device: int) -> int:
        return 0


def kernel_modules() -> list[ModuleType]:
    """The modules of the kernels."""
    return [module for name, module in sys.modules.items() if name.startswith(cuda.__name__ + ".")]


def code_use(code: Code) -> Callable[[Tensor], object]:
    def use(x: Tensor) -> None:
        data, _ = cuda.quantise(x, code, 3, return_error=True, out=x)
        cuda.dequantise(data[None], code, N)

    return use


def lanes(x: Tensor) -> None:
    cuda.from_lanes(cuda.to_lanes(x.reshape(50, 100), x[:50], 7, 5, 3), x[:50], 7, 5, 50, 100)


def preconditioning(x: Tensor) -> None:
    _tables.cache_clear()  # what is kept from one test is no tensor of another one
    cuda.precondition(x, x[:76], [Sides(50, 20), Sides(4, 1)], 0.9)
    _tables.cache_clear()


USES: dict[str, Callable[[Tensor], object]] = {
    **{"-".join(map(str, code)): code_use(code) for code in CODES},
    "lanes": lanes,
    "rotation": lambda x: cuda.unrotate(cuda.rotate(x, 3, 1024), 3),
    "large rotation": lambda x: cuda.unrotate(cuda.rotate(x, 3, 2**15), 3),
    "norms": lambda x: cuda.norms(x.reshape(50, 100)),
    "top indices": lambda x: cuda.top_indices(x, 50),
    "kth magnitude": lambda x: cuda.kth_magnitude(x, 50),
    "preconditioning": preconditioning,
    "momentum": lambda x: cuda.accelerate(x, x, x, 0.9, False),
    "scatter-add": lambda x: cuda.add_at(x, torch.arange(50), x[:50]),
    "finite": lambda x: cuda.put_finite(x, x.half(), x),
}


@pytest.fixture
def assembly(monkeypatch: pytest.MonkeyPatch) -> dict[str, str]:
    """What has been compiled, by the names of the kernels."""
    made: dict[str, str] = {}
    real = JITFunction.run

    def compile_only(self: Any, *args: Any, grid: Any, warmup: bool, **options: Any) -> None:
        compiled = real(self, *args, grid=grid, warmup=True, **options)
        assert compiled.asm["cubin"]
        made[self.__name__] = compiled.asm["ptx"]

    monkeypatch.setattr(JITFunction, "run", compile_only)
    triton.runtime.driver.set_active(Gpu())
    return made


@pytest.mark.parametrize("name", [*USES, "above"])
def test_compiles_to_the_arithmetic_of_the_oracle(name: str, assembly: dict[str, str]) -> None:
    if name == "above":
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(torch, "empty", torch.zeros)  # so that nothing is above
            cuda.above(torch.ones(N), 0.5)
    else:
        USES[name](torch.ones(N))
    assert assembly
    for kernel, text in assembly.items():
        # sums of products that are rounded once, flushed denormals, and quotients and roots that are only near
        found = re.findall(r"\bfma\.\S+|\S+\.ftz\S*|(?:div|sqrt|rcp)\.(?:full|approx)\S*", text)
        assert not found, f"{kernel}: {found[0]}"


def test_every_number_is_read_once(assembly: dict[str, str]) -> None:
    USES["-".join(map(str, CODES[0]))](torch.ones(N))
    text = assembly["_encode"]
    # 4 groups of 512 for 128 threads, of the array; some more lines store scales and bytes
    assert len(re.findall(r"\bld\.global", text)) == 4 * 512 // 128


@pytest.mark.parametrize("name", USES)
def test_nothing_waits_for_the_device(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    for module in kernel_modules():
        if hasattr(module, "launch"):
            monkeypatch.setattr(module, "launch", lambda *args, **options: None)
    with FakeTensorMode():  # which has no values, and refuses whatever depends on them
        USES[name](torch.ones(N))


def test_what_has_to_wait_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    for module in kernel_modules():
        if hasattr(module, "launch"):
            monkeypatch.setattr(module, "launch", lambda *args, **options: None)
    with FakeTensorMode(), pytest.raises(DataDependentOutputException):
        cuda.above(torch.ones(N), 0.5)


def test_every_kernel_is_tried() -> None:
    uses = "".join(inspect.getsource(use) for use in (code_use, lanes)) + inspect.getsource(sys.modules[__name__])
    assert all(f"cuda.{name}(" in uses for name in cuda.__all__)
