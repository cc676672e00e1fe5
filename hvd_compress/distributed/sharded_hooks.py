"""What FSDP calls: the reduce-scatter of a group, the sum of a group over its replicas, a backward pass that begins."""

from __future__ import annotations

import sys
import weakref
from collections.abc import Sequence
from typing import Any, NamedTuple, Protocol

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch._compile import _disable_dynamo
from torch.utils._pytree import tree_leaves
from torch.utils.hooks import RemovableHandle

from hvd_compress.errors import UnsupportedError

try:
    from torch.distributed.fsdp._common_utils import collect_grad_tensors
except ImportError:  # before PyTorch 2.13, which looks into dataclasses, too

    def collect_grad_tensors(output: Any) -> tuple[Tensor, ...]:
        """Return the tensors of an output that require gradients, as FSDP finds them."""
        return tuple(leaf for leaf in tree_leaves(output) if isinstance(leaf, Tensor) and leaf.requires_grad)


class Reduces(Protocol):
    """The reducer of a model, as far as FSDP's hooks call it."""

    def reduce(self, number: int, grad: Tensor, out: Tensor, reduced: Sequence[Any]) -> None:
        """Sum the gradients of a group over the ranks."""


def watch(model: nn.Module, reducer: Reduces) -> RemovableHandle:
    """Tell the reducer when a backward pass through the model begins, as FSDP itself is told.

    A group is not always reduced by that pass: reentrant checkpoints have backward passes of their own.
    """
    known = weakref.ref(reducer)

    @_disable_dynamo
    def watched(module: nn.Module, args: Any, output: Any) -> None:
        one: Any = known()
        tensors: Sequence[Any] = collect_grad_tensors(output) if torch.is_grad_enabled() else ()
        for tensor in tensors if one is not None else ():
            tensor.register_hook(one.await_end)

    return model.register_forward_hook(watched)


def _reduced() -> Sequence[Any]:
    """Return the parameters that FSDP reduces at this moment: it tells its communication their gradients only.

    Raises:
        UnsupportedError: If this version of PyTorch does not have them where they are looked for.
    """
    found = sys._getframe(2).f_locals.get("fsdp_params")
    if found is None:
        raise UnsupportedError(
            f"FSDP2 of PyTorch {torch.__version__} is not supported: it does not show which parameters it reduces; use"
            " a version that docs/compatibility.md names"
        )
    return found  # type: ignore[no-any-return]


class CompressedReduceScatter(NamedTuple):
    """Reduce-scatter of a group, for ``FSDPModule.set_custom_reduce_scatter``.

    Attributes:
        reducer: Reducer of the model.
        number: Index of the group.
    """

    reducer: Reduces
    number: int

    def allocate(self, size: Sequence[int], *, dtype: torch.dtype, device: torch.device) -> Tensor:
        """Return memory for the gradients."""
        return torch.empty(*size, dtype=dtype, device=device)

    def __call__(
        self, output_tensor: Tensor, input_tensor: Tensor, group: dist.ProcessGroup, op: Any, async_op: bool = False
    ) -> None:
        """Reduce-scatter the gradients.

        Raises:
            UnsupportedError: If FSDP was told not to divide by the number of ranks itself.
        """
        if op != dist.ReduceOp.SUM:
            raise UnsupportedError(
                "set_force_sum_reduction_for_comms(False) is not supported with compression: leave it as"
                " register(model) has set it"
            )
        self.reducer.reduce(self.number, input_tensor, output_tensor, _reduced())


class CompressedAllReduce(NamedTuple):
    """Sum of a group over its replicas, for ``FSDPModule.set_all_reduce_hook``."""

    reducer: Reduces
    number: int

    def __call__(self, grad: Tensor) -> None:
        """Sum the gradients, in place."""
        if grad.is_cuda:  # memory of the stream of the reduce-scatter, which FSDP may release before this one is done
            grad.record_stream(torch.cuda.current_stream(grad.device))
        self.reducer.reduce(self.number, grad, grad, _reduced())
