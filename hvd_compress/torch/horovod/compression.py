"""Compressor for `horovod.torch`."""

from __future__ import annotations

import logging
import warnings
import weakref
from collections.abc import Callable, Iterable, Sequence
from typing import Any, NamedTuple

import torch
from horovod.torch.compression import Compressor
from torch import Tensor, nn
from torch.optim import Optimizer

from hvd_compress.checkpoint import agreement
from hvd_compress.core.bucketing import Gradient, Merge
from hvd_compress.core.collectives import World
from hvd_compress.core.router import Router
from hvd_compress.engine.api import Catalogue
from hvd_compress.errors import UnsupportedError
from hvd_compress.methods.wrappers.precondition import Precondition
from hvd_compress.methods.wrappers.router import check_fixed
from hvd_compress.torch.agreement import PATIENCE, Agreement
from hvd_compress.torch.backward import at_end_of_backward
from hvd_compress.torch.buckets import Member, facts_of
from hvd_compress.torch.call_registry import CallRegistry
from hvd_compress.torch.compressor import ReducingCompressor
from hvd_compress.torch.entry import Entry
from hvd_compress.torch.horovod import caller
from hvd_compress.torch.horovod.lone_step import LoneStep, LoneTicket
from hvd_compress.torch.horovod.placeholders import PlaceholderPool, Placeholders
from hvd_compress.torch.horovod.transport import HorovodTransport
from hvd_compress.torch.optimizers import optimizer_facts
from hvd_compress.torch.passthrough import Passthrough
from hvd_compress.torch.reducer import Reducer

_LOG = logging.getLogger("hvd_compress")


class Ticket(NamedTuple):
    """Context from ``compress`` to ``decompress``.

    Attributes:
        reducer: Reducer of the gradient.
        entry: The gradient.
    """

    reducer: Reducer
    entry: Entry


class TorchCompressor(ReducingCompressor, Compressor):  # type: ignore[misc]  # Horovod is not typed
    """Gradient compressor for `hvd.DistributedOptimizer`; `Compression` creates it.

    Direct calls, ``hvd.allreduce(tensor, name="x", compression=...)`` and ``hvd.grouped_allreduce``, have a separate
    state for each name.

    Args:
        method: The method, as a router.
        merge: Assignment of gradients to buckets; see `hvd_compress.core.bucketing.plan`.
    """

    def __init__(self, method: Router, merge: Merge) -> None:
        self._reducers = CallRegistry(caller.has_begun, caller.CURE, "hvd.allreduce")
        super().__init__(method, merge, self._reducers, caller.CURE)
        self._passthrough = Passthrough(method.core, self._meter)
        self._agreements: weakref.WeakKeyDictionary[Any, Agreement] = weakref.WeakKeyDictionary()
        self._incarnation = caller.incarnation()
        self._lone: weakref.WeakKeyDictionary[Reducer, LoneStep] = weakref.WeakKeyDictionary()
        self._warned = self._met_sparse = False
        self._taking = True

    def compress(self, tensor: Tensor) -> tuple[Tensor, Any]:
        """Compress a gradient; called by Horovod.

        Args:
            tensor: The gradient.

        Returns:
            The tensor that Horovod is to allreduce, and the context for `decompress`.
        """
        call = caller.find(tensor)
        with self._lock:
            if self._linear:
                return self._compress_alone(call, tensor)
            reducer = self._reducers.of(call.optimizer) if isinstance(call, caller.Call) else None
            if reducer is None:
                caller.check(call, tensor)
            if isinstance(call, caller.Direct):
                return self._compress_direct(call, tensor)
            assert call is not None
            return self._compress_of(call, reducer or self._begin(call.optimizer), tensor)

    def _compress_alone(self, call: caller.Call | caller.Direct | None, tensor: Tensor) -> tuple[Tensor, Any]:
        """Compress with a linear method, without waiting for other ranks."""
        if self._incarnation != caller.incarnation():
            self._agreements.clear()
            self._incarnation = caller.incarnation()
        if isinstance(call, caller.Call) and call.optimizer not in self._agreements:
            agreed = Agreement(self.method, self.merge, facts_of(caller.parameters(call.optimizer)))
            agreed.begin(HorovodTransport.of(caller.process_set(call.optimizer)))
            at_end_of_backward(self._verify_soon)
            self._agreements[call.optimizer] = agreed
        self._meter.steps += self._taking  # the first call after a `decompress` begins a step
        self._taking = False
        return self._passthrough.compress(tensor)

    def _verify_soon(self) -> None:
        with self._lock:
            self._verify(PATIENCE)

    def _verify(self, patience: float = 0.0) -> None:
        """Verify the optimizers for which all ranks have arrived after ``patience`` seconds."""
        for agreed in list(self._agreements.values()):
            if agreed.wait(patience, self._lock.sleep):
                agreed.verify()

    def _compress_of(self, call: caller.Call, reducer: Reducer, grad: Tensor) -> tuple[Tensor, Any]:
        """Compress a gradient of an optimizer."""
        parameter = call.parameter(grad)
        if call.begins_step(parameter):
            self._lone.pop(reducer, None)
            if reducer.broken_off():
                reducer.abort()
        if not (reducer.waiting or reducer in self._lone):
            caller.check_all_reduced(call.optimizer)
            linear = reducer.alone()
            if linear is not None:
                self._lone[reducer] = LoneStep(linear, self._meter, caller.full_placeholder(call.optimizer))
        if reducer in self._lone:
            return self._lone[reducer].compress(reducer, id(parameter), grad)
        placeholder, entry = reducer.add(id(parameter), grad, id(call.members[0]), parameter)
        return placeholder, Ticket(reducer, entry)

    def _compress_direct(self, call: caller.Direct, tensor: Tensor) -> tuple[Tensor, Any]:
        """Compress a tensor of ``hvd.allreduce`` or ``hvd.grouped_allreduce``."""
        reducer = self._reducers.of_call(call.key)
        if reducer is None:
            reducer = self._begin_direct(call)
        position = reducer.waiting  # Horovod compresses all tensors in order before it decompresses any
        if position and (position == len(call.tensors) or call.tensors[position] is not tensor):
            reducer.abort()
            position = 0
        placeholder, entry = reducer.add(position, tensor)
        if position == len(call.tensors) - 1:
            reducer.verify_soon()
        return placeholder, Ticket(reducer, entry)

    def decompress(self, tensor: Tensor, ctx: Any) -> Tensor:
        """Return a reduced gradient; called by Horovod.

        Args:
            tensor: The tensor from `compress`, reduced by Horovod.
            ctx: The context from `compress`; None for a sparse gradient, which Horovod reduces itself.

        Returns:
            The reduced gradient.
        """
        with self._lock:
            if isinstance(ctx, Ticket):
                return self._take(tensor, ctx)
            if isinstance(ctx, LoneTicket):
                return ctx.step.decompress(tensor, ctx)
            if ctx is None:
                return self._count_sparse(tensor)
            self._taking = True
            self._verify()
            return self._passthrough.decompress(tensor, ctx)

    def _count_sparse(self, gathered: Tensor) -> Tensor:
        """Count a sparse gradient, by its mean over the ranks, and log once that Horovod sends it uncompressed."""
        if self.method.preconditioned:
            agreement.refuse_sparse("shape " + str(tuple(gathered.shape)), "make the Embedding with sparse=False")
        reducers = (reducer.world.size for reducer in self._reducers)
        nbytes = (gathered._indices().nbytes + gathered._values().nbytes) // next(reducers, self._world().size)
        self._meter.gradient_bytes += nbytes
        self._meter.bytes_sent += nbytes
        if not (self._met_sparse or self._linear) and self._world().rank == 0:
            _LOG.warning(
                "a sparse gradient of shape %s is not compressed, as Horovod gathers sparse gradients itself (%d bytes"
                " per rank in this step): to compress it, pass sparse_as_dense=True to hvd.DistributedOptimizer, or"
                " make the Embedding with sparse=False",
                tuple(gathered.shape),
                nbytes,
            )
        self._met_sparse = True
        return gathered

    def _take(self, placeholder: Tensor, ticket: Ticket) -> Tensor:
        """Return the result of a gradient."""
        reducer, entry = ticket
        if reducer.step is None or not reducer.step.completed:
            try:
                caller.check_not_in_scaler()
            except UnsupportedError:
                reducer.abort()
                raise
        result = reducer.take(placeholder, entry)
        self._warn_of_changes(reducer)
        return result

    def _warn_of_changes(self, reducer: Reducer) -> None:
        """Warn once if gradients were changed between backward and their reduction."""
        if reducer.changed and not self._warned:
            self._warned = True
            warnings.warn(
                "gradients were changed between backward() and synchronize(), before they were reduced, so the change"
                " is lost: call optimizer.synchronize() first, then change them (clip, unscale), then"
                " 'with optimizer.skip_synchronize(): optimizer.step()'",
                stacklevel=2,
            )

    def _begin(self, optimizer: Any) -> Reducer:
        members, transport = caller.parameters(optimizer), HorovodTransport.of(caller.process_set(optimizer))
        if agreement.elastic() and caller.process_set(optimizer) is not caller.EVERYONE:
            agreement.refuse_elastic("process sets")
        if agreement.elastic():
            check_fixed(self.method, "in an elastic job")
        agreement.check_optimizer(self.method, optimizer_facts([optimizer]), self._world().rank)
        label = agreement.label([Gradient(name, (), "") for name, _ in members])
        reducer = self._make(
            [Member(id(p), name, p) for name, p in members],
            transport,
            self._reducers.label(label, {id(p) for _, p in members}),
            caller.full_placeholder(optimizer),
            replaces=True,
        )
        reducer.watch([optimizer])
        self._reducers.begin(optimizer, reducer)
        return self._restored(reducer)

    def _begin_direct(self, call: caller.Direct) -> Reducer:
        check_fixed(self.method, "in direct calls of hvd.allreduce")
        if agreement.elastic():
            agreement.refuse_elastic("direct calls of hvd.allreduce")
        names = [call.name] if len(call.tensors) == 1 else [f"{call.name}.{i}" for i in range(len(call.tensors))]
        members = [Member(i, str(name), t) for i, (name, t) in enumerate(zip(names, call.tensors, strict=True))]
        reducer = self._make(members, HorovodTransport.of(call.process_set), call.label, call.full_placeholder)
        self._reducers.begin_call(call.key, reducer)
        return self._restored(reducer)

    def _make(
        self,
        members: Sequence[Member],
        transport: HorovodTransport,
        label: str,
        full: Callable[[int], float],
        replaces: bool = False,
    ) -> Reducer:
        pool = PlaceholderPool(len(members))

        def make_verdict(world: World, asking: bool, undoing: bool) -> Placeholders:
            return Placeholders(pool, full(world.size), world.size, asking, undoing)

        return Reducer(self._common, members, transport, make_verdict, label, replaces)

    def optimizer(
        self, model: nn.Module | Iterable[Any], lr: float, weight_decay: float = 0.01, beta1: float = 0.0
    ) -> Optimizer:
        """Return the optimizer for ``preconditioned=on``; see `ReducingCompressor.optimizer`.

        In a job of one rank, where Horovod does not call its compression, it is AdamW itself.
        """
        sgd, core = super().optimizer(model, lr, weight_decay, beta1), self.method.core
        if self._world().size > 1 or agreement.elastic() or not isinstance(core, Precondition):
            return sgd
        groups = [{key: group[key] for key in ("params", "lr", "weight_decay")} for group in sgd.param_groups]
        return torch.optim.AdamW(groups, betas=(float(beta1), core.beta2))

    def _world(self) -> World:
        return HorovodTransport.of(caller.EVERYONE).world


Compression: Catalogue[TorchCompressor] = Catalogue(TorchCompressor)
"""All methods: ``Compression.none``, ``.fp16``, ``.topk(ratio=0.01)``, ``.parse("topk:ratio=0.01")`` and so on."""
