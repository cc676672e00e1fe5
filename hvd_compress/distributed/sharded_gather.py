"""FSDP2: gather parameters in 8 or 4 bits, so that all ranks compute with the same decoded values."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch._compile import _disable_dynamo
from torch.nn.functional import pad

from hvd_compress.distributed.meeting import compare
from hvd_compress.distributed.sharded_groups import FSDPUnit
from hvd_compress.engine.stats import Meter
from hvd_compress.errors import SpecError, UnsupportedError
from hvd_compress.ops.code import Code
from hvd_compress.ops.torch_devices import exactly, torch_ops

CODES = {
    "int8": Code("max", 8, 128, dither=False),
    "fp8": Code("e4m3", 8, 128, dither=False),
    "int4": Code("max", 4, 32, dither=False),
}
"""Codes of gathered parameters; each block has a scale, and values are rounded to nearest."""

_all_gather = getattr(dist, "all_gather_single", dist.all_gather_into_tensor)  # new name since PyTorch 2.13
_FLOATS = (torch.float32, torch.bfloat16, torch.float16)

_DECODED = 2**24
"""Number of coordinates that are decoded at a time, or one shard: they take four bytes each for a moment."""


def check_gather(gather: str) -> None:
    """Validate ``gather``.

    Raises:
        SpecError: If it is not known.
        UnsupportedError: If this version of PyTorch cannot compress gathers.
    """
    if gather not in ("none", *CODES):
        allowed = ", ".join(map(repr, ("none", *CODES)))
        raise SpecError(f"gather={gather!r} is not known; allowed: {allowed}")
    if gather != "none":
        from torch.distributed.fsdp import FSDPModule

        if not hasattr(FSDPModule, "set_custom_all_gather"):
            raise UnsupportedError(
                f"gather={gather!r} needs FSDPModule.set_custom_all_gather, which PyTorch {torch.__version__} does not"
                " have: use a newer version (docs/compatibility.md), or leave gather='none'"
            )


class Columns(NamedTuple):
    """Where the parameters of a group are within the shard that a rank gathers.

    Attributes:
        coded: Those that travel as codes: matrices and tensors with more dimensions.
        exact: The others: biases, the weights of norms, and empty ones.
        numel: Elements of all of them.
    """

    coded: list[slice]
    exact: list[slice]
    numel: int

    @classmethod
    def of(cls, group: FSDPUnit) -> Columns:
        """Return those of a group."""
        coded: list[slice] = []
        exact: list[slice] = []
        begin = 0
        for one in group.parameters:
            (coded if len(one.shape) > 1 and one.numel else exact).append(slice(begin, begin + one.numel))
            begin += one.numel
        return cls(coded, exact, begin)


class ParameterGather:
    """How the parameters of a model are gathered.

    As in qwZ of ZeRO++ (Wang et al., 2023), each rank sends codes of its shard, with a scale for each block. All ranks,
    the owner too, compute with the decoded values, in the forward and in the backward pass. The optimizer updates the
    exact ones, which stay sharded.

    Args:
        spec: Key of `CODES`, or ``"none"``.
        meter: Counters of bytes.
        label: Name of the model that is the same on all ranks.

    Attributes:
        spec: See above.
        exact: Whether gathers are exact for the moment.
    """

    def __init__(self, spec: str, meter: Meter, label: str) -> None:
        self.spec = spec
        self.exact = False
        self._meter = meter
        self._label = label
        self._groups: list[dist.ProcessGroup] = []

    def attach(self, model: nn.Module, groups: Sequence[FSDPUnit]) -> None:
        """Set the gathers of all modules of a model, and have the ranks compare them before the first one.

        Raises:
            UnsupportedError: If a module gathers in a way of its own.
        """
        before = [getattr(group.fsdp(), "_all_gather_comm", None) for group in groups]
        plain = [one.plain if isinstance(one, CompressedAllGather) else one for one in before]
        if self.spec != "none":
            _check_plain(plain, self.spec)
        for group, old, own in zip(groups, before, plain, strict=True):
            new = own if self.spec == "none" else CompressedAllGather(self, Columns.of(group), own)
            for module in group.modules() if new is not old else ():
                module.set_custom_all_gather(new)
        self._groups = list(dict.fromkeys(group.process_group for group in groups))
        model.register_forward_pre_hook(_before_forward(self), prepend=True)  # before that of FSDP, which gathers

    @contextmanager
    def exact_within(self, model: nn.Module) -> Iterator[None]:
        """Gather exact parameters within the context; what is gathered at its ends is dropped."""
        before, self.exact = self.exact, True
        _reshard(model)
        try:
            yield
        finally:
            self.exact = before
            _reshard(model)

    def compare(self) -> None:
        """Verify once that all ranks gather in the same way, whose collectives would not match otherwise.

        Raises:
            DisagreementError: If they do not.
        """
        for group in self._groups:
            compare(group, f"gather.{self._label}", "gather=", self.spec)
        self._groups = []

    def gather(self, columns: Columns, mine: Tensor, everyone: Tensor, group: dist.ProcessGroup) -> None:
        """Gather the shards of a group.

        Args:
            columns: Places of its parameters.
            mine: This rank's shard, flat; may be a part of ``everyone``.
            everyone: Receives the decoded shards of all ranks, in their order.
            group: The ranks.
        """
        self.compare()
        self._meter.parameter_bytes += mine.nbytes
        # Of other sizes are gathers within a node, of what another gather has decoded (reshard_after_forward=N); of
        # other dtypes are those of tensors with an encoding of their own (fsdp_pre_all_gather).
        if self.exact or not columns.coded or mine.numel() != columns.numel or mine.dtype not in _FLOATS:
            self._meter.parameter_bytes_sent += mine.nbytes
            _all_gather(everyone, mine, group)
            return
        with exactly(mine.device):
            payload = _encoded(CODES[self.spec], columns, mine)
            self._meter.parameter_bytes_sent += payload.nbytes
            rows = payload.new_empty(group.size() * payload.numel())
            _all_gather(rows, payload, group)
            _decode(CODES[self.spec], columns, rows.view(group.size(), -1), everyone.view(group.size(), -1))


def _encoded(code: Code, columns: Columns, shard: Tensor) -> Tensor:
    """Return the bytes of a shard: the exact part, whether the other part is finite (0 or 1), and its codes."""
    exact = torch.cat([shard[:0], *(shard[column] for column in columns.exact)])
    padded = [pad(piece := shard[one], (0, -len(piece) % code.block)) for one in columns.coded]
    values = torch.cat(padded).float()
    finite = torch.stack(values.aminmax()).isfinite().all()  # one pass; of nan, both ends are nan
    codes, _ = torch_ops(shard.device).quantise(values.nan_to_num(0.0, 0.0, 0.0), code)
    return torch.cat([exact.view(torch.uint8), finite.to(torch.uint8).view(1), codes])


def _decode(code: Code, columns: Columns, rows: Tensor, shards: Tensor) -> None:
    """Write the shards of all ranks, given the bytes of each; a coded part that is not finite becomes nan."""
    begin = shards.element_size() * sum(one.stop - one.start for one in columns.exact)
    exact = rows[:, :begin].flatten().view(shards.dtype)  # flat first: the distance of rows is odd
    _put(shards, columns.exact, exact.view(len(rows), begin // shards.element_size()))
    numel = sum(_padded(one, code.block) for one in columns.coded)
    ops, some = torch_ops(rows.device), max(1, _DECODED // numel)
    for part, into in zip(torch.split(rows, some), torch.split(shards, some), strict=True):
        codes, finite = part[:, begin + 1 :].contiguous(), part[:, begin : begin + 1] == 1
        values = ops.dequantise(codes, code, numel, "float32", join=True).view(len(part), -1)
        _put(into, columns.coded, values.mul_(torch.where(finite, 1.0, torch.nan)), code.block)


def _put(shards: Tensor, columns: Sequence[slice], values: Tensor, block: int = 1) -> None:
    """Write values to columns of shards; those of each column are padded to whole blocks."""
    begin = 0
    for column in columns:
        shards[:, column] = values[:, begin : begin + column.stop - column.start]
        begin += _padded(column, block)


def _padded(column: slice, block: int) -> int:
    """Return the length of a column that is padded to whole blocks, so that no block is of two parameters."""
    return int(-(-(column.stop - column.start) // block) * block)


class CompressedAllGather(NamedTuple):
    """Gather of a group, for ``FSDPModule.set_custom_all_gather``.

    Attributes:
        parent: How the parameters of the model are gathered.
        columns: Places of the group's parameters.
        plain: FSDP's own gather, in whose place it is.
    """

    parent: ParameterGather
    columns: Columns
    plain: Any

    def allocate(self, size: Sequence[int], *, dtype: torch.dtype, device: torch.device) -> Tensor:
        """Return memory for the parameters."""
        return torch.empty(*size, dtype=dtype, device=device)

    def __call__(
        self, output_tensor: Tensor, input_tensor: Tensor, group: dist.ProcessGroup, async_op: bool = False
    ) -> None:
        """Gather the parameters; on a GPU, in the order of the stream, so that there is nothing to wait for."""
        self.parent.gather(self.columns, input_tensor, output_tensor, group)


def _before_forward(gather: ParameterGather) -> Callable[..., None]:
    """Return a hook that compares the ranks before a forward pass, as long as there is something to gather for."""
    known = weakref.ref(gather)

    @_disable_dynamo
    def compare_first(module: nn.Module, args: Any) -> None:
        one = known()
        if one is not None:
            one.compare()

    return compare_first


def _reshard(model: nn.Module) -> None:
    from torch.distributed.fsdp import FSDPModule

    for module in model.modules():
        if isinstance(module, FSDPModule):
            module.reshard()


def _check_plain(gathers: Sequence[Any], spec: str) -> None:
    for gather in gathers:
        if type(gather).__name__ != "DefaultAllGather":
            raise UnsupportedError(
                f"gather={spec!r} is not supported for a module that gathers by {type(gather).__name__}: leave out"
                " set_custom_all_gather, set_symm_mem_for_comm and set_allocate_memory_from_process_group_for_comm"
            )
