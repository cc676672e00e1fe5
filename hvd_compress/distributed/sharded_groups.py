"""The groups of parameters that `torch.distributed.fsdp.fully_shard` reduces together."""

from __future__ import annotations

import math
import weakref
from collections.abc import Iterable, Iterator, Sequence
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import nn

from hvd_compress.core.bucketing import Gradient, gradient
from hvd_compress.errors import UnsupportedError
from hvd_compress.ops.arrays import Shape


class ShardedParameter(NamedTuple):
    """A parameter of a group.

    Attributes:
        name: Name within the model.
        shape: Shape.
        shard: Shape of the gradient that a rank receives, padded to equal lengths on all ranks.
        dtype: Name of its dtype.
        trains: Whether it required a gradient at registration.
        divided: Whether tensor parallelism divides it. The ranks of the others must compute the same bits.
    """

    name: str
    shape: Shape
    shard: Shape
    dtype: str
    trains: bool
    divided: bool

    @property
    def numel(self) -> int:
        """Number of elements that a rank receives."""
        return math.prod(self.shard)


class FSDPUnit(NamedTuple):
    """Parameters whose gradients FSDP reduces together: those of one call of ``fully_shard``.

    It keeps nothing of the model alive.

    Attributes:
        name: Name of the module within the model; empty for the model itself.
        parameters: The parameters, in FSDP's order.
        fsdp: FSDP's object for the group.
        device: Device of the gradients.
        process_group: Ranks that share the parameters.
        ranks: All ranks of the device meshes of the parameters: those, their replicas, and those of tensor parallelism.
    """

    name: str
    parameters: list[ShardedParameter]
    fsdp: weakref.ref[Any]
    device: torch.device
    process_group: dist.ProcessGroup
    ranks: set[int]

    def modules(self) -> list[Any]:
        """Return the modules of the call of ``fully_shard``; none if the model is gone."""
        group = self.fsdp()
        return [] if group is None else list(group.modules)

    def living(self) -> set[int]:
        """Return the keys of the trainable parameters."""
        group = self.fsdp()
        tensors = [one.sharded_param for one in group.fsdp_params] if group is not None else []
        return {id(tensor) for tensor in tensors if tensor.requires_grad}

    def positions(self, reduced: Sequence[Any]) -> list[int]:
        """Return the positions of some of FSDP's parameters in the group."""
        group = self.fsdp()
        positions = {id(one): position for position, one in enumerate(() if group is None else group.fsdp_params)}
        return [positions[id(one)] for one in reduced]

    def grads(self, positions: Iterable[int]) -> dict[int, torch.Tensor]:
        """Return this rank's shards of the reduced gradients of some parameters, by the keys of the parameters."""
        group = self.fsdp()
        tensors = [group.fsdp_params[position].sharded_param for position in positions] if group is not None else []
        return {id(tensor): tensor.grad.to_local() for tensor in tensors if tensor.grad is not None}

    @property
    def backward(self) -> Any:
        """FSDP's object for the backward passes of the model; it changes once, when FSDP finds the model's root."""
        return next((module._get_fsdp_state()._state_ctx for module in self.modules()), None)

    @property
    def in_backward(self) -> bool:
        """Whether FSDP will finalise the running backward pass, or one that the user says is to follow."""
        backward = self.backward
        return backward is not None and (backward.post_backward_final_callback_queued or not backward.is_last_backward)

    @property
    def divides_all(self) -> bool:
        """Whether ``set_gradient_divide_factor`` was called with an HSDP mesh, where it divides by replicas, too."""
        group = self.fsdp()
        return group is not None and group in _REPLICAS and group.gradient_divide_factor is not None

    def facts(self) -> list[Gradient]:
        """Describe the gradients of the trainable parameters.

        Raises:
            GradientError: If a parameter's dtype cannot be compressed.
        """
        return [gradient(one.name, one.shape, one.dtype) for one in self.parameters if one.trains]


def groups_of(model: nn.Module) -> list[FSDPUnit]:
    """Return the groups of a model.

    Raises:
        UnsupportedError: If its parameters are sharded in a way that is not supported.
    """
    names = {id(module): name for name, module in model.named_modules()}
    return [_group(group, names) for group in _fsdp_groups(model)]


def check_whole(model: nn.Module, groups: Sequence[FSDPUnit]) -> None:
    """Verify that no other ranks hold replicas of a model, as far as its device mesh tells.

    Raises:
        UnsupportedError: If there may be some.
    """
    known = ranks_of(groups)
    for root in (group.mesh_info.mesh._get_root_mesh() for group in _fsdp_groups(model)):
        if root.size() > len(known):
            raise UnsupportedError(
                f"the model is sharded over {len(known)} of the {root.size()} ranks of its device mesh"
                f" {root.mesh_dim_names}, and replicas= is missing: if the others hold replicas, pass"
                " register(model, replicas=mesh['replicate'].get_group()); if they hold other parameters, as the stages"
                " of a pipeline do, replicas=False"
            )


def ranks_of(groups: Sequence[FSDPUnit]) -> list[int]:
    """Return the ranks that hold the model, as far as its device meshes tell."""
    return sorted({rank for group in groups for rank in group.ranks})


def _fsdp_groups(model: nn.Module) -> Iterator[Any]:
    from torch.distributed.fsdp import FSDPModule

    states = [module._get_fsdp_state() for module in model.modules() if isinstance(module, FSDPModule)]
    for state in dict.fromkeys(states):
        groups = getattr(state, "_fsdp_param_groups", None)
        if groups is None:  # before PyTorch 2.13, where a module has one group at most
            groups = [group for group in (state._fsdp_param_group,) if group is not None]
        if len(groups) > 1:
            raise UnsupportedError(
                "shard_placement_fn that shards the parameters of a module over several meshes is not supported:"
                " PyTorch gives no access to their reduce-scatter; call fully_shard on a module for each mesh"
            )
        yield from groups


def _group(group: Any, names: dict[int, str]) -> FSDPUnit:
    return FSDPUnit(
        next(names[id(module)] for module in group.modules if id(module) in names),
        [_parameter(one, names) for one in group.fsdp_params],
        weakref.ref(group),
        group.device,
        group.mesh_info.shard_process_group,
        {rank for one in group.fsdp_params for rank in one.sharded_param.device_mesh.mesh.flatten().tolist()},
    )


def _parameter(one: Any, names: dict[int, str]) -> ShardedParameter:
    tensor, shard = one.sharded_param, tuple(one.padded_sharded_param_size)
    dtype = str(tensor.dtype).removeprefix("torch.")
    divided = any(placement.is_shard() for placement in tensor.placements[one.mesh_info.mesh.ndim :])
    return ShardedParameter(_name(one, names), tuple(tensor.shape), shard, dtype, tensor.requires_grad, divided)


def _name(one: Any, names: dict[int, str]) -> str:
    """Return the name of one of FSDP's parameters within the model."""
    place = one._module_info
    return f"{names[id(place.module)]}.{place.param_name}".removeprefix(".")


_REPLICAS: weakref.WeakKeyDictionary[Any, dist.ProcessGroup] = weakref.WeakKeyDictionary()
"""Replicas of the groups whose allreduce `leave_replicas` has taken from FSDP."""


def _replicas(group: Any) -> dist.ProcessGroup | None:
    known = _REPLICAS.get(group) or (group.mesh_info.replicate_process_group if group._is_hsdp else None)
    return None if known is None or known.size() == 1 else known


def replicas_of(model: nn.Module) -> dist.ProcessGroup | None:
    """Return the ranks that hold the same shards, if ``fully_shard`` was given a mesh for replicas and shards (HSDP).

    Raises:
        UnsupportedError: If the modules have several such groups of ranks.
    """
    found = set(map(_replicas, _fsdp_groups(model)))
    if len(found) > 1:
        raise UnsupportedError(
            "some modules are sharded over a mesh for replicas and shards, and some over another one, which is not"
            " supported: pass the same mesh to each fully_shard"
        )
    return found.pop() if found else None


def leave_replicas(model: nn.Module) -> None:
    """Take the allreduce between replicas from FSDP, whose gradients then are sums over the ranks of the shards."""
    from torch.distributed.fsdp._fully_shard._fsdp_common import FSDPMeshInfo

    for group in _fsdp_groups(model):
        replicas, before = _replicas(group), group.mesh_info
        if replicas is not None and group not in _REPLICAS:
            _REPLICAS[group] = replicas
            group.mesh_info = FSDPMeshInfo(before.mesh, shard_mesh_dim=before.shard_mesh_dim)
            if group.post_forward_mesh_info == before:
                group.post_forward_mesh_info = group.mesh_info
