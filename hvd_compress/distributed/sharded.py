"""FSDP2: compress the gradients of modules that `torch.distributed.fsdp.fully_shard` has sharded."""

from __future__ import annotations

import math
import weakref
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from hvd_compress.bucketing import Gradient, Planned, gradient
from hvd_compress.checkpoint import agreement
from hvd_compress.checkpoint.resharding import Kept
from hvd_compress.checkpoint.state_dict import SavedSession, fingerprint, refuse_other_parameters, same_parameters
from hvd_compress.core.bucket import Bucket, Shape
from hvd_compress.core.collectives import AllReduce, State, World
from hvd_compress.core.state_tree import flatten, kinds
from hvd_compress.core.transport import InFlight
from hvd_compress.distributed.transport import GroupTransport
from hvd_compress.errors import StateError, UnsupportedError
from hvd_compress.methods.base import Method, ReduceScattered
from hvd_compress.ops.torch_devices import exactly
from hvd_compress.torch.bucket_state import BucketState
from hvd_compress.torch.handshake import Handshake, place_of
from hvd_compress.torch.reducer import Common


class Group(NamedTuple):
    """Parameters whose gradients FSDP reduces together: those of one call of ``fully_shard``.

    Attributes:
        name: Name of the module within the model; empty for the model itself.
        modules: The modules of the call.
        names: Names of the parameters.
        parameters: The trainable parameters.
    """

    name: str
    modules: list[Any]
    names: list[str]
    parameters: list[DTensor]

    @property
    def size(self) -> int:
        """Number of ranks that share the parameters."""
        return self.parameters[0].device_mesh.size()

    def shards(self) -> list[Shape]:
        """Return the shape of each gradient that a rank receives, padded to equal lengths on all ranks."""
        return [_padded_shard(parameter) for parameter in self.parameters]

    def largest(self) -> tuple[str, Shape]:
        """Return name and shape of the largest parameter, by which the method of the group is chosen."""
        name, parameter = max(zip(self.names, self.parameters, strict=True), key=lambda item: item[1].numel())
        return name, tuple(parameter.shape)


def _padded_shard(parameter: DTensor) -> Shape:
    shape = list(parameter.shape)
    dim: int = parameter.placements[0].dim  # type: ignore[attr-defined]
    shape[dim] = -(-shape[dim] // parameter.device_mesh.size())
    return tuple(shape)


def groups_of(model: nn.Module) -> list[Group]:
    """Return the groups of a model's trainable parameters.

    Raises:
        UnsupportedError: If a parameter is sharded over a mesh with several dimensions.
    """
    from torch.distributed.fsdp import FSDPModule

    groups: dict[Any, Group] = {}
    owners: dict[str, Any] = {}
    for name, module in model.named_modules():
        owner: Any
        if isinstance(module, FSDPModule):
            owner = module._get_fsdp_state()
            groups.setdefault(owner, Group(name, [], [], [])).modules.append(module)
        else:
            owner = owners.get(name.rpartition(".")[0])
        owners[name] = owner
    for name, parameter in model.named_parameters():
        if isinstance(parameter, DTensor) and parameter.requires_grad:
            _check_mesh(name, parameter)
            group = groups[owners[name.rpartition(".")[0]]]
            group.names.append(name)
            group.parameters.append(parameter)
    return [group for group in groups.values() if group.parameters]


def _check_mesh(name: str, parameter: DTensor) -> None:
    mesh = parameter.device_mesh
    if mesh.ndim != 1:
        raise UnsupportedError(
            f"{name!r} is sharded over a mesh with {mesh.ndim} dimensions, which is not supported: PyTorch gives no"
            " access to the allreduce between replicas; call fully_shard(module, mesh=mesh['shard']) and"
            " register(model, replicas=mesh['replicate'].get_group())"
        )


class _Unit(NamedTuple):
    """Group with its bucket and the ranks that sum it.

    Attributes:
        bucket: The bucket, its method and its state.
        transport: The ranks.
        factor: Factor of sums over these ranks.
        scatters: Whether each rank receives its part of the sum only.
    """

    bucket: BucketState
    transport: GroupTransport
    factor: float
    scatters: bool

    def pieces(self, out: Tensor) -> list[tuple[slice, Tensor]]:
        """Return the slices of the total with the tensors that they are written to."""
        out = out.view(-1)
        return [(slice(0, out.numel()), out)] if self.scatters else [(span, out[span]) for span in self.bucket.spans]


class ShardedReducer:
    """Reducer of the gradients of a sharded model.

    FSDP reduces each group as soon as backward has its gradients, and uses the result at once. So whether all gradients
    of a step were finite is known only after its last group: states are undone then, before the next step.

    Args:
        common: Settings of all reducers of the compressor.
        model: The model.
        label: Name that is the same on all ranks.
        replicas: Ranks that hold the same shards, to sum over; None to reduce-scatter over the ranks of each group.
        op: ``"mean"`` or ``"sum"``.

    Attributes:
        label: Name that is the same on all ranks.
        steps: Number of steps so far.

    Raises:
        GradientError: If a parameter's dtype cannot be compressed.
        UnsupportedError: If a method does not support it.
    """

    begun = True

    def __init__(
        self, common: Common, model: nn.Module, label: str, replicas: dist.ProcessGroup | None, op: str
    ) -> None:
        self.label = label
        self.steps = self.job = 0
        self.model = weakref.ref(model)
        self._common = common
        self._groups = groups_of(model)
        self._facts = [gradient(*fact) for group in self._groups for fact in _facts(group)]
        self._units = {group.name: self._unit(group, replicas, op) for group in self._groups}
        self._reduced: set[str] = set()
        self._spoilt: list[Tensor] = []
        self._agreed = False
        self._loss_scale = 1.0

    def _unit(self, group: Group, replicas: dist.ProcessGroup | None, op: str) -> _Unit:
        method = self._common.method.route(*group.largest())
        shapes = group.shards()
        if replicas is None:
            process_group = group.parameters[0].device_mesh.get_group()
            method, factor = ReduceScattered(method), 1.0  # FSDP itself divides by the number of ranks
            shapes = [(group.size * sum(map(math.prod, shapes)),)]
        else:
            process_group, factor = replicas, 1.0 if op == "sum" else 1.0 / replicas.size()
        transport = GroupTransport.of(process_group)
        return _Unit(self._bucket(group, method, shapes, transport.world), transport, factor, replicas is None)

    @staticmethod
    def _bucket(group: Group, method: Method, shapes: Sequence[Shape], world: World) -> BucketState:
        first = group.parameters[0]
        dtype = gradient(group.names[0], (), _dtype(first)).dtype
        planned = Planned(Bucket(group.name, tuple(shapes), dtype), method, ())
        return BucketState(planned, first.to_local().device, world)

    def attach(self, op: str) -> None:
        """Set the communication of all modules of the model."""
        for group in self._groups:
            for module in group.modules:
                if self._units[group.name].scatters:
                    module.set_custom_reduce_scatter(CompressedReduceScatter(self, group.name))
                    module.set_force_sum_reduction_for_comms(True)
                else:
                    module.set_all_reduce_hook(_Hook(self, group.name))
                if op == "sum":
                    module.set_gradient_divide_factor(1.0)
                if self._units[group.name].bucket.residual is not None:
                    module.set_reduce_scatter_unused_params(True)  # their residuals are sent, on all ranks

    def reduce(self, name: str, grad: Tensor, out: Tensor) -> None:
        """Sum the gradients of a group over the ranks.

        Args:
            name: The group.
            grad: The gradients, flat and padded.
            out: Receives this rank's part of the sum, or with replicas the mean; may be ``grad``.

        Raises:
            DisagreementError: If the ranks have different models or settings.
            UnsupportedError: If the group has another number of gradients than at registration.
        """
        with self._common.lock, exactly(grad.device), torch.no_grad():
            self._begin(name)
            unit = self._units[name]
            bucket = unit.bucket
            self._check_size(name, grad.numel(), bucket.bucket.numel)
            meter = self._common.meter
            meter.gradient_bytes += grad.nbytes
            with meter.time("encode"):
                buffer, residual, whole = bucket.buffer(), bucket.residual, slice(0, grad.numel())
                if residual is None:
                    peak = bucket.ops.fill(buffer, whole, grad, self._loss_scale)
                else:
                    peak = bucket.ops.absorb(buffer, residual, whole, grad, self._loss_scale)
                bad = (~torch.as_tensor(peak, device=grad.device).isfinite()).int().reshape(1)
                vote = unit.transport.start(AllReduce(bad, "max", donate=True), "")
                flight = self._start(unit, buffer)
            with meter.time("wait"):
                while flight.result is None:
                    flight.go_on()
                spoilt = vote.result()
            with meter.time("decode"):
                bucket.ops.deliver(flight.ended.total, unit.pieces(out), unit.factor * self._loss_scale)
                out.masked_fill_(spoilt > 0, math.nan)
            bucket.commit(flight.ended.state)
            if residual is not None:
                bucket.recycle(buffer, residual)
            self._spoilt.append(spoilt)

    def _begin(self, name: str) -> None:
        """Begin a step if this is its first group."""
        if name in self._reduced:
            self._settle()
            self._reduced.clear()
        if not self._reduced:
            self._loss_scale = self._common.loss_scale.read()
            self.steps += 1
            self._common.meter.steps += 1
        self._reduced.add(name)
        if not self._agreed:
            self._agree(self._units[name].transport)

    def _check_size(self, name: str, numel: int, expected: int) -> None:
        if numel != expected:
            raise UnsupportedError(
                f"the gradients of {name or 'the model'!r} have {numel} elements with padding, but {expected} when the"
                " model was registered: register the model again after its trainable parameters have changed; for"
                " parameters that some steps do not use, call set_reduce_scatter_unused_params(True)"
            )

    def _start(self, unit: _Unit, buffer: Tensor) -> InFlight:
        bucket = unit.bucket
        return InFlight(
            bucket.method,
            bucket.ops,
            bucket.bucket,
            buffer,
            bucket.state,
            unit.transport,
            "",
            count=self._common.meter.count,
            compensated=True,
        )

    def _agree(self, transport: GroupTransport) -> None:
        """Verify that the ranks agree, before the first exchange."""
        restored = f"step {self.steps - 1} of job {self.job:x}" if self.job else ""
        facts = agreement.describe(self._common.method, self._common.merge, self._facts, transport.world, restored)
        handshake = Handshake(facts, place_of(fact.name for fact in self._facts), transport)
        handshake.wait()
        self.job = handshake.verify()
        for name, unit in self._units.items():
            if self._common.method.hierarchical:
                unit.transport.connect()
            lanes = unit.transport.lanes([""])
            self._units[name] = unit._replace(transport=lanes[""] if lanes else unit.transport)
        self._agreed = True

    def _settle(self) -> None:
        """Undo the last step if one of its gradients was not finite."""
        spoilt, self._spoilt = self._spoilt, []
        if spoilt and self._keeps_tensors() and torch.cat(spoilt).any():
            self._undo()

    def _keeps_tensors(self) -> bool:
        return any(isinstance(leaf, Tensor) for state in self._states() for leaf in flatten(state).values())

    def _undo(self) -> None:
        for name in self._reduced:
            self._units[name].bucket.undo()

    def discard(self) -> None:
        """Undo the last step, as its results were discarded."""
        self._spoilt = []
        if self._reduced:
            self._undo()
            self._reduced.clear()
            self.steps -= 1

    def living(self) -> set[int]:
        """Return the keys of its parameters."""
        return {id(parameter) for group in self._groups for parameter in group.parameters}

    @property
    def world(self) -> World:
        """All ranks of the job, as each has its own shards."""
        return World(dist.get_rank(), dist.get_world_size())

    def _states(self) -> Iterator[State]:
        return (unit.bucket.state for unit in self._units.values())

    def states(self) -> list[State]:
        """Return the states of all buckets."""
        self._settle()
        return list(self._states())

    @property
    def gradients(self) -> Sequence[Gradient]:
        """The parameters."""
        return self._facts

    def saved(self) -> SavedSession:
        """Return copies of the states of all buckets."""
        self._settle()
        buckets = {name: unit.bucket.read() for name, unit in self._units.items()}
        shared = fingerprint(buckets, {name: kinds(unit.bucket.state) for name, unit in self._units.items()})
        world = self.world
        return SavedSession(
            world.rank,
            world.size,
            self.steps,
            buckets,
            job=self.job,
            shared=shared,
            local_size=world.local_size,
            gradients=self.gradients,
        )

    def by_bucket(self, saved: SavedSession | None = None) -> dict[str, Kept]:
        """Return the states of all buckets.

        Raises:
            StateError: If the saved state is of other parameters, or of another number of ranks.
        """
        if saved is not None and not same_parameters(saved, self.gradients):
            refuse_other_parameters(saved.gradients, self.gradients)
        if saved is not None and saved.size != self.world.size:
            raise StateError(
                f"this state of a sharded model was saved on {saved.size} ranks, and cannot be restored on"
                f" {self.world.size}, as their shards differ: resume on {saved.size} ranks, or start without loading"
                " (residuals begin at zero)"
            )
        return {
            name: Kept([], unit.bucket.bucket, unit.bucket.method, unit.bucket.read())
            for name, unit in self._units.items()
        }

    def restore(self, saved: SavedSession) -> None:
        """Restore checked states."""
        for name, unit in self._units.items():
            unit.bucket.write(saved.buckets[name])
        self.steps, self.job = saved.steps, saved.job
        self._reduced, self._spoilt, self._agreed = set(), [], False


def _facts(group: Group) -> Iterator[tuple[str, Shape, str]]:
    for name, parameter in zip(group.names, group.parameters, strict=True):
        yield name, tuple(parameter.shape), _dtype(parameter)


def _dtype(tensor: Tensor) -> str:
    return str(tensor.dtype).removeprefix("torch.")


def label_of(model: nn.Module) -> str:
    """Return a short name of a model, the same on all ranks."""
    return agreement.label([Gradient(name, (), "") for name, _ in model.named_parameters()])


class CompressedReduceScatter(NamedTuple):
    """Reduce-scatter of a group, for ``FSDPModule.set_custom_reduce_scatter``.

    Attributes:
        reducer: Reducer of the model.
        name: The group.
    """

    reducer: ShardedReducer
    name: str

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
        self.reducer.reduce(self.name, input_tensor, output_tensor)


class _Hook(NamedTuple):
    """Sum of a group over its replicas, for ``FSDPModule.set_all_reduce_hook``."""

    reducer: ShardedReducer
    name: str

    def __call__(self, grad: Tensor) -> None:
        self.reducer.reduce(self.name, grad, grad)
