"""FSDP2: compress the gradients of modules that `torch.distributed.fsdp.fully_shard` has sharded."""

from __future__ import annotations

import math
import weakref
from collections import ChainMap
from collections.abc import Callable, Iterable, Sequence
from itertools import product
from typing import Any, NamedTuple
from weakref import WeakKeyDictionary

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from hvd_compress.checkpoint import agreement
from hvd_compress.checkpoint.resharding import BucketSnapshot
from hvd_compress.checkpoint.state_dict import SavedSession, fingerprint, refuse_other_parameters, same_parameters
from hvd_compress.core.bucketing import Gradient, advise_nodes
from hvd_compress.core.collectives import AllGather, AllReduce, State, World
from hvd_compress.core.method import Method, ReduceScattered
from hvd_compress.core.state_tree import Per, kinds
from hvd_compress.distributed.sharded_buckets import GroupBuckets, Part
from hvd_compress.distributed.sharded_gather import ParameterGather
from hvd_compress.distributed.sharded_groups import FSDPUnit, groups_of, leave_replicas, ranks_of
from hvd_compress.distributed.sharded_hooks import CompressedAllReduce, CompressedReduceScatter, watch
from hvd_compress.distributed.sharded_race import ShardedRace
from hvd_compress.distributed.sharded_step import Step
from hvd_compress.distributed.transport import GroupTransport
from hvd_compress.distributed.verdict import factor_of
from hvd_compress.engine.race import Race
from hvd_compress.errors import StateError, UnsupportedError
from hvd_compress.methods.wrappers.alternatives import unable, uncompressed
from hvd_compress.methods.wrappers.router import Auto
from hvd_compress.ops.numpy import NumpyOps
from hvd_compress.ops.torch_devices import exactly
from hvd_compress.torch.agreement import Agreement
from hvd_compress.torch.backward import at_end_of_backward
from hvd_compress.torch.bucket_state import BucketState
from hvd_compress.torch.optimizers import is_adam
from hvd_compress.torch.reducer import EngineSettings
from hvd_compress.torch.updates import UpdateWatch
from hvd_compress.transport.protocol import InFlight

_GROUPS: WeakKeyDictionary[dist.ProcessGroup, dict[tuple[int, ...], dist.ProcessGroup]] = WeakKeyDictionary()
"""Process groups that were made for ranks of models, by the default group."""


class Scheme(NamedTuple):
    """How the gradients of a model are summed.

    Attributes:
        replicas: Ranks that hold the same shards, to sum over; None to reduce-scatter over the ranks of each group.
        op: ``"mean"`` or ``"sum"``.
    """

    replicas: dist.ProcessGroup | None
    op: str

    def ranks(self, group: FSDPUnit) -> dist.ProcessGroup:
        """Return the ranks over which the gradients of a group are summed with compression."""
        return group.process_group if self.replicas is None else self.replicas

    @property
    def factor(self) -> float:
        """Factor of sums; FSDP itself divides by the number of ranks that share the parameters, or as it is told."""
        return 1.0 if self.replicas is None else factor_of(self.op, self.replicas.size())


class ShardedReducer:
    """Reducer of the gradients of a sharded model, which owns it.

    FSDP reduces each group as soon as backward has its gradients, and uses the result at once. So whether all gradients
    of a step were finite is known only when FSDP finalises the backward pass. Then all ranks that hold the model decide
    together: if a gradient was not finite, those of its group become nan on all ranks, and all states return to their
    values before the step.

    Args:
        common: Settings of all reducers of the compressor.
        model: The model.
        scheme: How gradients are summed.
        begins: Called in the first step, when all ranks of the model are known.

    Attributes:
        label: Name that is the same on all ranks; set by the compressor.
        gather: How parameters are gathered; set by `attach`.
        model: The model.
        scheme: How gradients are summed.
        groups: Groups of parameters.
        transport: All ranks that hold the model; None until they are known.
        steps: Number of steps so far.

    Raises:
        GradientError: If a parameter's dtype cannot be compressed.
        UnsupportedError: If a method does not support it, or the model is sharded in a way that is not supported.
    """

    label: str
    gather: ParameterGather
    _watch: RemovableHandle

    def __init__(
        self, common: EngineSettings, model: nn.Module, scheme: Scheme, begins: Callable[[ShardedReducer], object]
    ) -> None:
        self.steps = 0
        self.model = weakref.ref(model)
        self.scheme = scheme
        self._common, self._begins = common, begins
        self.groups = groups_of(model)
        facts = [fact for group in self.groups for fact in group.facts()]
        self._agreement = Agreement(common.method, common.merge, facts)
        self._transports = {ranks: GroupTransport.of(ranks) for ranks in map(scheme.ranks, self.groups)}
        self._buckets = [self._made(group) for group in self.groups]
        self.transport: GroupTransport | None = None
        self._step: Step | None = None
        self._updates: UpdateWatch | None = None
        self._race: ShardedRace | None = None
        self._adam = True
        self._connected = False

    def _made(self, group: FSDPUnit) -> GroupBuckets:
        """Return the buckets of a group; its largest trainable parameter decides on the method."""
        trained = [one for one in group.parameters if one.trains] or group.parameters
        largest = max(trained, key=lambda one: math.prod(one.shape))
        method: Method = self._common.method.route(largest.name, largest.shape)
        world = self._transports[self.scheme.ranks(group)].world
        if self.scheme.replicas is None:
            return GroupBuckets(group, ReduceScattered(method), world, world.size)
        return GroupBuckets(group, method, world, 1)

    def attach(self, model: nn.Module, gather: str, optimizers: Sequence[Any]) -> None:
        """Set the communication of all modules of the model.

        Args:
            model: The model.
            gather: How parameters are gathered.
            optimizers: Its optimizers, as far as they are known; with ``preconditioned=on``, their steps raise an error
                if updates were changed after their reduction. With ``auto``, the candidates depend on them.
        """
        self.gather = ParameterGather(gather, self._common.meter, self.label)
        self.gather.attach(model, self.groups)
        leave_replicas(model)
        self._watch = watch(model, self)
        self._updates = UpdateWatch(optimizers) if self._common.method.preconditioned else None
        self._adam = is_adam(optimizers)
        if self._race is not None:
            self._race.expect(self._adam)
        for number, group in enumerate(self.groups):
            for module in group.modules():
                if self.scheme.replicas is None:
                    module.set_custom_reduce_scatter(CompressedReduceScatter(self, number))
                else:
                    module.set_all_reduce_hook(CompressedAllReduce(self, number))
                if self.scheme.replicas is None or self.scheme.op == "sum":
                    module.set_force_sum_reduction_for_comms(True)
                if self.scheme.op == "sum":
                    module.set_gradient_divide_factor(1.0)

    def follows(self, other: ShardedReducer) -> bool:
        """Return whether another reducer reduces some of these parameters."""
        theirs = [group.fsdp() for group in other.groups]
        return any(group.fsdp() in theirs for group in self.groups)

    def adopt(self, former: ShardedReducer) -> None:
        """Take over the states of the former reducer of these parameters.

        Raises:
            UnsupportedError: If it sums gradients in another way.
        """
        if former.scheme != self.scheme:
            raise UnsupportedError(
                f"this model is registered already, with op={former.scheme.op!r} and replicas={former.scheme.replicas}:"
                " register it again with the same, or shard a new model"
            )
        self.label, self.steps, self._step, self._race = former.label, former.steps, former._step, former._race
        self._agreement.job = former._agreement.job
        former._watch.remove()
        self.transport, self._connected = former.transport, former._connected
        self._transports |= former._transports
        for mine, theirs in product(self._buckets, former._buckets):
            if mine.group.fsdp() is theirs.group.fsdp():
                mine.adopt(theirs)

    def reduce(self, number: int, grad: Tensor, out: Tensor, reduced: Sequence[Any]) -> None:
        """Sum the gradients of a group over the ranks.

        Args:
            number: Index of the group.
            grad: The gradients, flat and padded.
            out: Receives this rank's part of the sum, or with replicas the mean; may be ``grad``.
            reduced: FSDP's objects for the parameters that have these gradients.

        Raises:
            DisagreementError: If the ranks have different models or settings.
        """
        with self._common.lock, exactly(grad.device), torch.no_grad():
            step, buckets = self._running(), self._buckets[number]
            step.ends_with(buckets.group, self._end)
            self._common.meter.gradient_bytes += grad.nbytes
            members = buckets.group.positions(reduced)
            step.reduced.setdefault(number, set()).update(members)
            parts = buckets.covering(members)
            if len(parts) == 1:
                step.give(number, *self._exchange(step, buckets, parts[0], grad, out))
                return
            for part in parts:
                columns = buckets.columns(members, part)
                mine = buckets.take(grad, columns)
                total = mine.new_empty(buckets.numel(part.members) // buckets.rows)
                step.give(number, *self._exchange(step, buckets, part, mine, total))
                buckets.put(out, columns, total)

    def _running(self) -> Step:
        """Return the running step; begin one if there is none."""
        if self._step is None or self._step.bad is not None:
            self._settle()
            if self.transport is None:
                self.transport = self._meet()
                self._start_race()
                self._begins(self)
            if self._agreement.due:
                self._agree(self.transport)
            if self._race is not None:
                self._race.begin_step(self._step, self.transport, self._common.lock.sleep)
            self._step = Step(self._common.loss_scale.read())
            self.steps += 1
            self._common.meter.steps += 1
        return self._step

    def _exchange(
        self, step: Step, buckets: GroupBuckets, part: Part, grad: Tensor, out: Tensor
    ) -> Sequence[float | Tensor]:
        """Sum the gradients of a part; return numbers that are inf or nan if they, or the sum, are not finite."""
        bucket, meter, more = part.bucket, self._common.meter, part.bucket in step.changed
        transport = self._transports[self.scheme.ranks(buckets.group)]
        factor = 1.0 if buckets.group.divides_all else self.scheme.factor
        if self._race is not None and not more:
            with meter.time("encode"):
                self._race.begin_exchange(buckets, bucket, grad, step.loss_scale, transport)
        if bucket.plain:
            return self._sum(transport, bucket, grad, out, factor, more)
        step.changed.add(bucket)
        with meter.time("encode"):
            buffer, residual, whole = bucket.buffer(more), bucket.residual, slice(0, grad.numel())
            if residual is None:
                peak = bucket.ops.fill(buffer, whole, grad, step.loss_scale)
            else:
                peak = bucket.ops.absorb(buffer, residual, whole, grad, step.loss_scale)
            flight = self._start(transport, bucket, buffer)
        with meter.time("wait"):
            while flight.result is None:
                flight.go_on()
        with meter.time("decode"):
            bucket.ops.deliver(flight.ended.total, buckets.pieces(bucket, out), factor * step.loss_scale)
        bucket.commit(flight.ended.state, more)
        if residual is not None and not more:
            bucket.recycle(buffer, residual)
        return peak, torch.linalg.vector_norm(out, ord=torch.inf)

    def _start(self, transport: GroupTransport, bucket: BucketState, buffer: Tensor) -> InFlight:
        return InFlight(
            bucket.method,
            bucket.ops,
            bucket.bucket,
            buffer,
            bucket.state,
            transport,
            "",
            count=self._common.meter.count,
            compensated=True,
        )

    def _sum(
        self, transport: GroupTransport, bucket: BucketState, grad: Tensor, out: Tensor, factor: float, more: bool
    ) -> tuple[float | Tensor]:
        """Sum gradients in their own dtype, as FSDP itself does; otherwise like `_exchange`."""
        if not more:
            bucket.rest()
        method, meter = uncompressed(bucket.method), self._common.meter
        with meter.time("wait"):
            flight = InFlight(method, bucket.ops, bucket.bucket, grad, (), transport, "", count=meter.count)
            while flight.result is None:
                flight.go_on()
        torch.mul(flight.ended.total, factor, out=out)
        return (torch.linalg.vector_norm(out, ord=torch.inf),)

    def await_end(self, grad: Tensor) -> None:
        """Decide at the end of the backward pass that begins with this gradient."""
        at_end_of_backward(self._end)

    def _end(self) -> None:
        """Decide on the step, once FSDP has finalised the backward pass."""
        step = self._step
        if step is None or step.bad is not None or any(group.in_backward for group in self.groups):
            return
        assert self.transport is not None
        with self._common.lock, torch.no_grad():
            flags = step.flags(len(self.groups), self.groups[0].device)
            step.bad = self.transport.start(AllReduce(flags, "max", donate=True), "").result()
            if self._updates is not None and self._updates.looks:
                shards = ChainMap(*(self.groups[number].grads(members) for number, members in step.reduced.items()))
                self._updates.reduced(shards, step.loss_scale)
            if not step.bad.is_cuda and not step.bad.any():
                return
            factors = torch.where(step.bad > 0, math.nan, 1.0)  # without a device synchronisation
            for number, members in step.reduced.items():
                for grad in self.groups[number].grads(members).values():
                    grad.mul_(factors[number].to(grad.device))

    def _settle(self) -> None:
        """Undo the last step if one of its gradients was not finite."""
        step = self._step
        if step is not None and step.bad is not None and step.changed and not step.finite:
            step.undo()

    def _start_race(self, saved: Sequence[Sequence[float]] = ()) -> None:
        """Start to choose the method, if it is chosen by step times.

        Args:
            saved: What a saved job knows of it.
        """
        if isinstance(self._common.method, Auto):
            race = Race(self._common.method, self._adam, self.world.size, saved)
            cannot = {number for buckets in self._buckets for number in unable(buckets.method)}
            self._race = ShardedRace(race, self.label, self.groups[0].device, cannot)

    @property
    def race(self) -> Race | None:
        """The race that chooses the method, if it is chosen by one."""
        return self._race.race if self._race is not None else None

    def _meet(self) -> GroupTransport:
        """Return all ranks that hold the model: those that share its parameters, and their replicas."""
        ranks = ranks_of(self.groups)
        if self.scheme.replicas is not None:
            mine = torch.tensor(dist.get_process_group_ranks(self.scheme.replicas), device="cpu")
            rows = self._between(ranks).start(AllGather(mine), "").result()
            ranks = sorted(set(rows.flatten().tolist()))
        return self._between(ranks)

    def _between(self, ranks: Sequence[int]) -> GroupTransport:
        known = [*(group.process_group for group in self.groups), *self._transports, dist.group.WORLD]
        found = next((one for one in known if one is not None and dist.get_process_group_ranks(one) == ranks), None)
        return GroupTransport.of(_group_of(ranks) if found is None else found)

    def _agree(self, everyone: GroupTransport) -> None:
        """Verify that all ranks of the model agree, before the first exchange."""
        self._agreement.begin(everyone, self.steps, next(iter(self._transports.values())).world)
        self._agreement.wait()
        self._agreement.verify()
        if not self._connected:
            for one in self._transports.values() if self.scheme.replicas is None else ():
                advise_nodes(self._common.method, one.world, scatters=True)
            self._transports = {ranks: self._lane(one) for ranks, one in self._transports.items()}
        self._connected = True
        if self.race is not None:
            self.race.place(self._agreement.nodes and any(one.world.multilevel for one in self._transports.values()))

    def _lane(self, transport: GroupTransport) -> GroupTransport:
        """Return connections of the ranks of a process group for all groups that they reduce."""
        if self._common.method.hierarchical or self._agreement.nodes:
            transport.connect()
        channels = transport.channels([""])
        return channels[""] if channels else transport

    def discard(self) -> None:
        """Undo the last step, as its results were discarded."""
        with self._common.lock:
            if self._step is not None:
                self._step.undo()
                self._step = None
                self.steps -= 1

    def living(self) -> set[int]:
        """Return the keys of its parameters."""
        return {key for group in self.groups for key in group.living()}

    @property
    def begun(self) -> bool:
        """Whether all ranks of the model are known."""
        return self.transport is not None

    @property
    def world(self) -> World:
        """All ranks of the model, as each has its own shards; only once it has begun."""
        assert self.transport is not None
        return self.transport.world

    def _states(self) -> dict[str, BucketState]:
        self._settle()
        return {buckets.key(part.members): part.bucket for buckets in self._buckets for part in buckets}

    def states(self) -> list[State]:
        """Return the states of all buckets."""
        return [bucket.state for bucket in self._states().values()]

    @property
    def gradients(self) -> Sequence[Gradient]:
        """The parameters, also those that are frozen."""
        parameters = [one for group in self.groups for one in group.parameters]
        return [Gradient(one.name, one.shape, one.dtype) for one in parameters]

    def saved(self) -> SavedSession:
        """Return copies of the states of all buckets."""
        assert self.transport is not None
        states, world = self._states(), self.transport.world
        leaves = {key: bucket.read() for key, bucket in states.items()}
        shared = fingerprint(leaves, {key: kinds(bucket.state) for key, bucket in states.items()})
        if any(one.world.size < world.size for one in self._transports.values()):
            shared = 0  # ranks that sum other shards have other states
        return SavedSession(
            world.rank,
            world.size,
            self.steps,
            leaves,
            search=None if self.race is None else self.race.saved,
            job=self._agreement.job,
            shared=shared,
            local_size=world.local_size,
            gradients=self.gradients,
            process_set=self.transport.members,
        )

    def by_bucket(self, saved: SavedSession | None = None) -> dict[str, BucketSnapshot]:
        """Return the states of all buckets, or initial states for the buckets of a saved state.

        Raises:
            StateError: If the saved state is of other parameters, or of another number of ranks and its parts cannot be
                resharded.
        """
        if saved is None:
            states = self._states()
            return {key: kept._replace(leaves=states[key].read()) for key, kept in self._fresh(states).items()}
        if not same_parameters(saved, self.gradients):
            refuse_other_parameters(saved.gradients, self.gradients)
        found = self._fresh(saved.buckets)
        if saved.size != self.world.size and not all(map(_stateless, found.values())):
            raise StateError(
                f"this state of a sharded model was saved on {saved.size} ranks, and cannot be restored on"
                f" {self.world.size}, as their shards differ: resume on {saved.size} ranks, or start without loading"
                " (residuals begin at zero)"
            )
        return found

    def _fresh(self, keys: Iterable[str]) -> dict[str, BucketSnapshot]:
        """Return initial states of those buckets that may be of this model."""
        return {key: fresh for key in keys for buckets in self._buckets if (fresh := buckets.fresh(key)) is not None}

    def restore(self, saved: SavedSession) -> None:
        """Restore checked states."""
        for buckets in self._buckets:
            buckets.restore(saved.buckets)
        self._start_race(saved.search or ())
        self.steps, self._agreement.job = saved.steps, saved.job
        self._step = None
        self._agreement.expire()


def _stateless(kept: BucketSnapshot) -> bool:
    """Return whether a state has nothing but numbers, which do not depend on the number of ranks."""
    state = kept.method.init(NumpyOps(), kept.bucket, World(0, 1))
    return all(kind.per is Per.BUCKET for kind in kinds(state).values())


def _group_of(ranks: Sequence[int]) -> dist.ProcessGroup:
    """Return a process group of some ranks; there is one for all models of these ranks."""
    assert dist.group.WORLD is not None
    made, key = _GROUPS.setdefault(dist.group.WORLD, {}), tuple(ranks)
    if key not in made:
        made[key] = dist.new_group(list(ranks), use_local_synchronization=True)
    return made[key]


def label_of(model: nn.Module) -> str:
    """Return a short name of a model, the same on all ranks."""
    return agreement.label([Gradient(name, (), "") for name, _ in model.named_parameters()])
