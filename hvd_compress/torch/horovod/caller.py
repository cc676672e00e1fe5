"""Identify the caller of ``compress`` from Horovod's stack frames.

`horovod.torch` passes a bare tensor. Only its calling functions know the parameter and the optimizer, or the name of a
direct call; there is no public interface. All knowledge of Horovod's internals is in this file.
"""

from __future__ import annotations

import contextlib
import sys
import time
import zlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from types import FrameType
from typing import Any, NamedTuple

import horovod.torch as hvd
import torch
from horovod.common.exceptions import HorovodInternalError
from horovod.torch import mpi_ops
from torch import Tensor
from torch.amp import grad_scaler

from hvd_compress.errors import UnknownParameterError, UnsupportedError

_DEPTH = 4
"""Number of frames to search: compress, a comprehension, and Horovod's function."""

_LOOK = 1e-3
"""Polling interval of a tensor in flight, in seconds."""

_STEP_DEPTH = 20
"""Maximum number of frames from ``decompress`` up to the step of a loss scaler, including wrappers of
``optimizer.step``."""

CURE = (
    "delete the optimizer, call gc.collect(), as its hooks stay on the parameters until then, and make a new"
    " hvd.DistributedOptimizer with the same compression object, which takes over what has been kept"
)
"""Advice on how to change the parameters of a distributed optimizer."""

_NOT_SUMS = {getattr(hvd, name): name for name in ("Adasum", "Min", "Max", "Product")}


class Call(NamedTuple):
    """Call of ``compress`` by Horovod's optimizer.

    Attributes:
        optimizer: The distributed optimizer.
        members: The parameters whose gradients it reduces together.
    """

    optimizer: Any
    members: Sequence[Tensor]

    def parameter(self, grad: Tensor) -> Tensor:
        """Return the parameter of a gradient."""
        return self.members[0] if len(self.members) == 1 else next(p for p in self.members if p.grad is grad)

    def begins_step(self, parameter: Tensor) -> bool:
        """Return whether Horovod has no gradient of this optimizer; it records a group after its last member."""
        return parameter is self.members[0] and not has_begun(self.optimizer)


class Direct(NamedTuple):
    """Call of ``compress`` by ``hvd.allreduce`` or ``hvd.grouped_allreduce``.

    Attributes:
        name: The ``name`` argument.
        tensors: All tensors of the call.
        op: Reduction op.
        factor: Product of prescale and postscale factor.
        process_set: The ranks that take part.
    """

    name: str | None
    tensors: Sequence[Tensor]
    op: Any
    factor: float
    process_set: Any

    @property
    def key(self) -> tuple[Any, ...]:
        """Key of the state that calls share."""
        return (
            self.name,
            tuple((tuple(t.shape), str(t.dtype), str(t.device)) for t in self.tensors),
            self.process_set.process_set_id,
        )

    @property
    def label(self) -> str:
        """Short name of the key, the same on all ranks."""
        return f"call.{zlib.crc32(repr(self.key).encode()):08x}"

    @property
    def full_placeholder(self) -> Callable[[int], float]:
        """Function that returns the call's result for a 1 on each rank, given the world size."""
        return _full_placeholder(self.op, self.factor)


def find(grad: Tensor) -> Call | Direct | None:
    """Find the caller of ``compress``; return None if it is neither an optimizer nor a direct call."""
    frame: FrameType | None = sys._getframe(1)
    for _ in range(_DEPTH + 1):
        if frame is None:
            break
        name = frame.f_code.co_name
        if name == "_allreduce_grad_async":
            variables = frame.f_locals
            return Call(variables["self"], (variables["p"],))
        if name == "_grouped_allreduce_grad_async":
            return Call(frame.f_locals["self"], frame.f_locals["ps"])
        if name in ("allreduce", "grouped_allreduce") and frame.f_globals is vars(mpi_ops):
            return _direct(frame.f_locals, frame.f_locals.get("tensors", (grad,)))
        frame = frame.f_back
    return None


def _direct(variables: Mapping[str, Any], tensors: Sequence[Tensor]) -> Direct:
    op = mpi_ops.handle_average_backwards_compatibility(variables["op"], variables["average"])
    factor = variables["prescale_factor"] * variables["postscale_factor"]
    return Direct(variables["name"], tensors, op, factor, variables["process_set"])


def _frames(depth: int) -> Iterator[FrameType]:
    """Yield the calling frames, the nearest first."""
    frame = sys._getframe(2).f_back
    for _ in range(depth):
        if frame is None:
            return
        yield frame
        frame = frame.f_back


def check(call: Call | Direct | None, grad: Tensor) -> None:
    """Reject calls in which a compressed sum cannot replace the tensor's own reduction.

    Raises:
        UnknownParameterError: If the state has no owner: no optimizer, or a direct call without a name.
        UnsupportedError: If the call needs another op than a sum, or a gradient.
    """
    if call is None:
        raise UnknownParameterError(
            f"a tensor of shape {tuple(grad.shape)} was compressed outside of hvd.DistributedOptimizer, hvd.allreduce"
            " and hvd.grouped_allreduce, so there is nothing to keep state for; use Compression.none or"
            " Compression.fp16 there"
        )
    _refuse_other_ops(call.op if isinstance(call, Direct) else _op(call.optimizer))
    if isinstance(call, Direct):
        _check_direct(call, grad)


def _op(optimizer: Any) -> Any:
    return hvd.Adasum if hasattr(optimizer, "_starting_models") else optimizer.op


def _refuse_other_ops(op: Any) -> None:
    if op == hvd.Adasum:
        raise UnsupportedError(
            "op=hvd.Adasum is not supported with this compression: Adasum weighs the gradients of pairs of ranks by"
            " their angle, which a compressed sum does not show; use op=hvd.Average, or Compression.fp16 with Adasum"
        )
    if op in _NOT_SUMS:
        raise UnsupportedError(
            f"op=hvd.{_NOT_SUMS[op]} is not supported with this compression, which computes sums: use op=hvd.Average or"
            " op=hvd.Sum, or Compression.none"
        )


def _check_direct(call: Direct, grad: Tensor) -> None:
    if not isinstance(call.tensors, Sequence):
        raise UnsupportedError(
            f"hvd.grouped_allreduce(name={call.name!r}) was given a {type(call.tensors).__name__}: this compression"
            " has to see all tensors at once, so pass a list"
        )
    if call.name is None:
        raise UnknownParameterError(
            f"a tensor of shape {tuple(grad.shape)} was passed to hvd.allreduce or hvd.grouped_allreduce without a"
            " name, so there is nothing to keep state for: give name=, the same on all ranks and in all steps"
        )
    if torch.is_grad_enabled() and any(t.requires_grad for t in call.tensors):
        raise UnsupportedError(
            f"hvd.allreduce(name={call.name!r}) was given a tensor that requires a gradient, but a compressed"
            " sum has none: pass tensor.detach(), or call it under torch.no_grad()"
        )


def has_begun(optimizer: Any) -> bool:
    """Return whether Horovod is reducing gradients of the optimizer."""
    try:
        for handle, _ in optimizer._handles.values():  # the first one tells, in most steps
            if handle is not None:
                return True
    except RuntimeError:  # another thread adds one now
        return True
    return False


def parameters(optimizer: Any) -> list[tuple[str, Tensor]]:
    """Return the names and parameters that the optimizer compresses in each step, in its order."""
    names = optimizer._parameter_names
    members = (p for group in optimizer.param_groups for p in group["params"])
    return [(names[p], p) for p in members if p in optimizer._requires_update]


def check_all_reduced(optimizer: Any) -> None:
    """Reject trained parameters that Horovod does not know.

    Raises:
        UnsupportedError: If there are any; the message names them.
    """
    names, known = optimizer._parameter_names, optimizer._requires_update
    strangers = [
        repr(names.get(p, f"number {i} of parameter group {g}"))
        for g, group in enumerate(optimizer.param_groups)
        for i, p in enumerate(group["params"])
        if p.requires_grad and p not in known
    ]
    if strangers:
        raise UnsupportedError(
            f"these parameters were frozen or not there when hvd.DistributedOptimizer was made: {', '.join(strangers)};"
            f" Horovod would not reduce their gradients, and the ranks would drift apart: {CURE}"
        )


def check_not_in_scaler() -> None:
    """Reject a step of a loss scaler that leaves the reduction to the optimizer, as it has unscaled gradients before.

    Raises:
        UnsupportedError: If a ``torch.amp.GradScaler`` is the caller.
    """
    for frame in _frames(_STEP_DEPTH):
        if frame.f_code.co_name == "_maybe_opt_step" and frame.f_globals is vars(grad_scaler):
            raise UnsupportedError(
                "scaler.step(optimizer) has unscaled the gradients, and looked for overflow, before they were reduced:"
                " call optimizer.synchronize() first, then"
                " 'with optimizer.skip_synchronize(): scaler.step(optimizer)'"
            )


EVERYONE = hvd.global_process_set


def process_set(optimizer: Any) -> Any:
    """Return the process set of the optimizer."""
    return getattr(optimizer, "process_set", hvd.global_process_set)


def full_placeholder(optimizer: Any) -> Callable[[int], float]:
    """Return a function from world size to the optimizer's result for a 1 on each rank; it holds no reference to it."""
    return _full_placeholder(optimizer.op, 1.0)


def _full_placeholder(op: Any, factor: float) -> Callable[[int], float]:
    return lambda size: factor if op == hvd.Average else factor * size


class _Started:
    """Counter of Horovod's starts, each of which creates another table of handles."""

    table: object = None
    times = 0


def incarnation() -> int:
    """Return a number that changes whenever Horovod is started, which loses all collectives in flight."""
    if _Started.table is not mpi_ops._handle_map:
        _Started.table = mpi_ops._handle_map
        _Started.times += 1
    return _Started.times


def is_done(handle: int | None) -> bool:
    """Return whether the collective of a handle is done."""
    return handle is not None and bool(hvd.poll(handle))


def settle(placeholders: Sequence[Tensor], patience: float | None = None) -> None:
    """Wait until Horovod has reduced abandoned tensors, as their names are in use until then.

    Args:
        placeholders: The tensors.
        patience: Maximum seconds to wait, if other ranks may have aborted; None to wait for all.
    """
    begin = time.monotonic()
    for handle in set(handles_of(placeholders).values()):
        while patience is not None and not hvd.poll(handle) and time.monotonic() - begin < patience:
            time.sleep(_LOOK)
        if patience is None:
            hvd.synchronize(handle)
        elif hvd.poll(handle):
            with contextlib.suppress(HorovodInternalError):
                hvd.synchronize(handle)


def handles_of(placeholders: Sequence[Tensor]) -> dict[int, int]:
    """Return Horovod's handles of the tensors that it reduces in place, by the tensors' ids."""
    wanted, handles = {id(placeholder) for placeholder in placeholders}, {}
    for handle, (given, *_) in list(mpi_ops._handle_map.items()):  # a copy: other threads may call Horovod
        for member in given if isinstance(given, list | tuple) else [given]:
            if id(member) in wanted:
                handles[id(member)] = handle
    return handles
