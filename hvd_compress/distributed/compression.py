"""The compressor that DistributedDataParallel calls as its communication hook."""

# No postponed annotations: DistributedDataParallel compares those of a hook.

import logging
import os
import weakref
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from typing import TYPE_CHECKING, Any, Literal, NamedTuple, Self

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch._C._distributed_c10d import GradBucket  # as torch.distributed exports it, but with a type
from torch.futures import Future
from torch.nn.parallel import DistributedDataParallel

from hvd_compress.checkpoint import agreement
from hvd_compress.core.bucketing import Gradient, Merge
from hvd_compress.core.collectives import AllReduce, World
from hvd_compress.core.method import Method
from hvd_compress.core.router import Router
from hvd_compress.distributed.direct import Call, Reduction
from hvd_compress.distributed.half_sums import HalfSums
from hvd_compress.distributed.transport import GroupTransport, Pending
from hvd_compress.distributed.verdict import factor_of, verdict_maker, wishes
from hvd_compress.engine.api import Catalogue
from hvd_compress.errors import SpecError, StateError, UnsupportedError
from hvd_compress.methods.wrappers.router import check_fixed
from hvd_compress.torch.agreement import Agreement
from hvd_compress.torch.buckets import Member, facts_of
from hvd_compress.torch.call_registry import CallRegistry
from hvd_compress.torch.compressor import ReducingCompressor, Session, parse
from hvd_compress.torch.entry import Entry
from hvd_compress.torch.optimizers import Optimizers, as_list, optimizer_facts
from hvd_compress.torch.passthrough import Passthrough
from hvd_compress.torch.reducer import MakeVerdict, Reducer
from hvd_compress.torch.waiting import StepLock

if TYPE_CHECKING:  # loads FSDP, which others do not need
    from hvd_compress.distributed.sharded import ShardedReducer

_LOG = logging.getLogger("hvd_compress")

_CURE = "wrap the model in a new DistributedDataParallel and register the same compression object with it"


class _Waiting(NamedTuple):
    """Bucket of DistributedDataParallel whose gradients are in flight."""

    future: Future[Tensor]
    buffer: Tensor


class Registered:
    """State of a model's communication hook.

    Args:
        compressor: The compressor.
        model: The model.
        op: ``"mean"`` or ``"sum"``.
        optimizers: The model's optimizers, as far as they are known.
    """

    def __init__(
        self,
        compressor: "DistributedCompressor",
        model: DistributedDataParallel,
        op: str,
        optimizers: Sequence[Any],
    ) -> None:
        self.compressor = compressor
        self.optimizers = optimizers
        self.op = op
        self.sparse = _sparse(model.module)
        reduced = _reduced(model)
        self.members = [Member(id(p), name, p) for name, p in reduced if id(p) not in self.sparse]
        self.label = compressor.label_of(self.members)
        self.lock = StepLock()  # of its own: threads may train several models
        self.reducer: Reducer | None = None
        self.alone: Method | None = None  # the linear method of this step, whose sums take no reducer
        self.halves: HalfSums | None = None
        self.taken: list[tuple[Tensor, Entry]] = []
        self.waiting: list[_Waiting] = []
        self.model = weakref.ref(model)
        self.used = _used(model, [p for _, p in reduced]) if model.find_unused_parameters else None
        self.join(model.process_group)

    def join(self, group: dist.ProcessGroup) -> None:
        """Go on with the ranks of a process group."""
        self.transport = GroupTransport.of(group)
        self.factor = factor_of(self.op, group.size())
        self.agreed = False
        if self.reducer is not None:
            self.reducer.follow(self.transport, self.make_verdict())

    def make_verdict(self) -> MakeVerdict:
        """Return a function that creates the verdict on a step."""
        return verdict_maker(self.transport, self.factor, self.compressor._meter.count)

    def forget_used(self) -> None:
        """Forget at the end of a step which parameters its backward passes have used."""
        if self.used is not None:
            self.used.clear()

    def __getstate__(self) -> dict[str, Any]:
        """Keep nothing in a pickled model: PyTorch drops its hooks, so a compressor is registered again."""
        return {}

    def begin_step(self) -> None:
        """Follow the model to another process group, and refuse a mean over the ranks that still have inputs.

        Raises:
            UnsupportedError: If the model is within ``model.join(divide_by_initial_world_size=False)``.
        """
        model: Any = self.model()
        if model is None:
            return
        if model.process_group is not self.transport.group:
            self.join(model.process_group)
        if model._join_config.enable and not model._divide_by_initial_world_size:
            raise UnsupportedError(
                "model.join(divide_by_initial_world_size=False) is not supported: PyTorch does not tell a communication"
                " hook how many ranks have joined; leave divide_by_initial_world_size=True"
            )


def _reduced(model: DistributedDataParallel) -> list[tuple[str, Tensor]]:
    """Return the parameters that DistributedDataParallel reduces: those that were trained when it was made."""
    named = [(name, p) for name, p in model.module.named_parameters() if name not in model.parameters_to_ignore]
    if all(p.requires_grad for _, p in named):
        return named
    buckets: Any = model.reducer._get_zeros_like_grad_buckets()
    known = {id(p) for bucket in buckets for p in bucket.parameters()}
    return [(name, p) for name, p in named if id(p) in known]


def _used(model: DistributedDataParallel, parameters: Sequence[Any]) -> set[int]:
    """Return a set that collects the keys of the parameters that backward passes use, as `model` itself sees it."""
    used: set[int] = set()

    def note(parameter: Tensor) -> None:
        if parameter.grad is not None:  # as of an output that the loss does not depend on
            used.add(id(parameter))

    handles = []
    for parameter in parameters:
        trained = parameter.requires_grad
        parameter.requires_grad_(True)  # a hook needs it; the parameter may be trained later
        handles.append(parameter.register_post_accumulate_grad_hook(note))
        parameter.requires_grad_(trained)
    weakref.finalize(model, lambda: [handle.remove() for handle in handles])
    return used


def _sparse(module: nn.Module) -> set[int]:
    """Return the keys of the parameters whose gradients are sparse, as DistributedDataParallel knows them."""
    embeddings = (one for one in module.modules() if isinstance(one, nn.Embedding | nn.EmbeddingBag) and one.sparse)
    return {id(parameter) for one in embeddings for parameter in one.parameters(recurse=False)}


class DistributedCompressor(ReducingCompressor):
    """Gradient compressor for `torch.nn.parallel.DistributedDataParallel`; `Compression` creates it.

    Args:
        method: The method, as a router.
        merge: Assignment of gradients to buckets; see `hvd_compress.core.bucketing.plan`.
    """

    def __init__(self, method: Router, merge: Merge) -> None:
        self._reducers = CallRegistry(lambda model: False, _CURE, "compression.all_reduce")
        super().__init__(method, merge, self._reducers, _CURE)
        self._passthrough = Passthrough(method.core, self._meter)
        self._models: weakref.WeakSet[DistributedDataParallel] = weakref.WeakSet()
        self._sharded: weakref.WeakValueDictionary[str, ShardedReducer] = weakref.WeakValueDictionary()
        self._warned = False

    def register(
        self,
        model: nn.Module,
        op: str = "mean",
        replicas: dist.ProcessGroup | Literal[False] | None = None,
        optimizer: Optimizers | None = None,
        gather: str = "none",
    ) -> Self:
        """Compress the gradients of a model from its next backward pass on.

        In a job with one process, where Lightning and Accelerate wrap no model, there is nothing to do for a bare one.

        Args:
            model: The model, before its first backward pass: a ``DistributedDataParallel``, or a module that
                ``fully_shard`` (FSDP2) has sharded over a mesh with one dimension, or with two, for replicas and shards
                (HSDP), and which tensor parallelism may divide besides. Its process groups are used. It may be
                compiled, or be what Lightning Fabric or the composable ``replicate`` return.
            op: ``"mean"`` of the gradients over the ranks, as without compression, or ``"sum"``.
            replicas: For a model that is sharded over a mesh with one dimension: process group of the ranks that hold
                the same shards, which a mesh with two dimensions tells by itself. The reduced shards are summed over
                them with compression, by any method, while the reduce-scatter within a replica stays as it is. None to
                compress the reduce-scatter, which only some methods support; False for that, too, if the mesh is a part
                of a larger one whose other ranks hold other parameters.
            optimizer: The optimizer of the model, or all of them. With it, momentum that the method does not support
                is an error, Adam's where it costs loss is warned of, and with ``DistributedDataParallel`` gradients
                that are cleared before it has applied them leave no residual.
            gather: For a sharded model: how its parameters are gathered, ``"int8"`` or ``"fp8"`` in 8.25 bits for each
                number, ``"int4"`` in 5, or ``"none"``.

        Returns:
            This compressor.

        Raises:
            GradientError: If a parameter's dtype cannot be compressed.
            SpecError: If ``op`` or ``gather`` is something else.
            UnsupportedError: If the model is neither, or the method does not support it or its optimizer.
        """
        found = _unwrapped(model)
        if isinstance(found, DistributedDataParallel):
            for name, given in (("replicas", replicas is not None), ("gather", gather != "none")):
                if given:
                    raise UnsupportedError(f"{name}= is for models that fully_shard has sharded: leave it out")
            state = self.registered(found, op, optimizer)
            try:
                found.register_comm_hook(state, hook)
            except RuntimeError as error:
                if "only be called once" not in str(error):
                    raise
                raise UnsupportedError(
                    "this model has a communication hook already, and PyTorch cannot replace it: wrap the module in a"
                    " new DistributedDataParallel to register another compression"
                ) from error
        elif alone() and not (_is_sharded(found) or self.method.needs_plain_sgd):
            check_op(op)
            _LOG.warning(
                "%s is the model of a job with one process, which exchanges no gradients: nothing is compressed",
                type(found).__name__,
            )
        else:
            self._register_sharded(found, op, replicas, optimizer, gather)
        return self

    def all_reduce(
        self,
        tensors: Tensor | Sequence[Tensor],
        name: str,
        op: str = "sum",
        group: dist.ProcessGroup | None = None,
        async_op: bool = False,
    ) -> Reduction | None:
        """Reduce a tensor, or several at once, in place: for programs that reduce their gradients themselves.

        It takes the place of ``torch.distributed.all_reduce(tensor)``. Call it on all ranks of the group, in the same
        order. Pass all gradients of a model in one call: they share buckets, and travel together.

        Args:
            tensors: The tensor, or several.
            name: Name of the call, the same on all ranks and in all steps. What is not sent is kept by it, and by
                the shapes and dtypes of the tensors.
            op: ``"sum"`` over the ranks, as ``torch.distributed.all_reduce``, or ``"mean"``.
            group: The ranks; None for all.
            async_op: Return at once; the tensors are not to be changed before the reduction has been waited for.

        Returns:
            With ``async_op``, the reduction, to be waited for before the next call with this name.

        Raises:
            DisagreementError: If the ranks differ in name, tensors or settings.
            GradientError: If a tensor's dtype cannot be compressed.
            SpecError: If ``op`` is something else.
            UnsupportedError: If a tensor requires a gradient, or is sparse.
        """
        check_op(op)
        check_fixed(self.method, "in compression.all_reduce")
        started = self._start(tensors, name, op, GroupTransport.of(group or self._everyone()))
        if async_op:
            return started
        started.wait()
        return None

    def _start(self, tensors: Tensor | Sequence[Tensor], name: str, op: str, transport: GroupTransport) -> Reduction:
        """Start to reduce tensors over the ranks of a transport; see `all_reduce`."""
        call = Call.of(tensors, name, op, transport)
        with self._lock, torch.no_grad():
            return self._start_each(call) if self._linear else self._start_call(call)

    def _start_each(self, call: Call) -> Reduction:
        """Reduce the tensors of a call by a linear method, whose one payload is a sum."""
        started = []
        self._meter.steps += 1
        for tensor in call.tensors:
            array, drive = self._passthrough.compress(tensor)
            started.append((tensor, drive, call.transport.start(AllReduce(array, donate=True), "")))

        def finish() -> None:
            with self._lock, torch.no_grad():
                for tensor, drive, handle in started:
                    total = self._passthrough.decompress(handle.result(), drive)
                    tensor.copy_(total if call.op == "sum" else total * call.factor)

        return Reduction(call.tensors, lambda: None, finish)

    def _start_call(self, call: Call) -> Reduction:
        reducer = self._reducers.of_call(call.key) or self._begin_call(call)
        if reducer.waiting:  # of a call that an error has broken off
            reducer.abort()
        taken = [reducer.add(number, tensor) for number, tensor in enumerate(call.tensors)]

        def advance() -> None:
            with self._lock:
                reducer.push_on()

        def finish() -> None:
            with self._lock, torch.no_grad():
                for placeholder, entry in taken:
                    reducer.take(placeholder, entry)

        return Reduction(call.tensors, advance, finish)

    def _begin_call(self, call: Call) -> Reducer:
        reducer = Reducer(
            self._common,
            [Member(number, name, tensor) for number, (name, tensor) in enumerate(call.named)],
            call.transport,
            verdict_maker(call.transport, call.factor, self._meter.count),
            call.label,
            replaces=True,
            complete=True,
            direct=True,
        )
        self._reducers.begin_call(call.key, reducer)
        return self._restored(reducer)

    @contextmanager
    def exact_parameters(self, model: nn.Module) -> Iterator[None]:
        """Gather exact parameters within the context, as for evaluation.

        Use::

            with compression.exact_parameters(model), torch.no_grad():
                loss = model(batch)

        Enter and leave it on all ranks, and not between a forward pass and its backward pass.

        Args:
            model: A model that was registered with ``gather=``.

        Raises:
            UnsupportedError: If it was not.
        """
        found = next((one for one in self._sharded.values() if one.model() is _unwrapped(model)), None)
        if found is None and not alone():
            raise UnsupportedError(f"exact_parameters({type(model).__name__}) is for models registered with gather=")
        with nullcontext() if found is None else found.gather.exact_within(model):
            yield

    def _known(self, model: nn.Module, optimizer: Optimizers | None) -> list[Any]:
        """Return the optimizers of a model, after checking that the method supports them."""
        found = as_list(optimizer, model.parameters())
        agreement.check_optimizer(self.method, optimizer_facts(found), dist.get_rank())
        if self.method.preconditioned and not found:
            raise UnsupportedError(
                f"{self.method} delivers updates, which only plain SGD can apply: make the optimizer by"
                " compression.optimizer(model, lr=..., weight_decay=...), and pass register(model, optimizer=optimizer)"
            )
        if self.method.needs_plain_sgd and not found and not self._warned:
            self._warned = True
            _LOG.warning(
                "%s has a momentum of its own, and is not supported with an optimizer that has one: pass"
                " register(model, optimizer=optimizer), which checks that",
                str(self.method),
            )
        return found

    def _register_sharded(
        self,
        model: nn.Module,
        op: str,
        replicas: dist.ProcessGroup | Literal[False] | None,
        optimizer: Optimizers | None,
        gather: str,
    ) -> None:
        check_op(op)
        if not _is_sharded(model):
            raise UnsupportedError(
                f"register({type(model).__name__}) is not supported: wrap the model in"
                " torch.nn.parallel.DistributedDataParallel first, or shard it by torch.distributed.fsdp.fully_shard"
            )
        from hvd_compress.distributed.sharded import Scheme, ShardedReducer, label_of
        from hvd_compress.distributed.sharded_gather import check_gather
        from hvd_compress.distributed.sharded_groups import check_whole, replicas_of

        check_gather(gather)
        if (hybrid := replicas_of(model)) is not None:
            if replicas not in (None, hybrid):
                raise UnsupportedError("replicas= differs from the replicas of the model's own mesh: leave it out")
            replicas = hybrid
        optimizers = self._known(model, optimizer)
        common = self._common._replace(lock=StepLock())
        reducer = ShardedReducer(common, model, Scheme(replicas or None, op), self._give)
        if replicas is None:
            check_whole(model, reducer.groups)
        former = next((one for one in self._sharded.values() if reducer.follows(one)), None)
        if former is None:
            reducer.label = self._registry.label(label_of(model), set())
        else:
            reducer.adopt(former)
        reducer.attach(model, gather, optimizers)
        self._sharded[reducer.label] = reducer

    def _give(self, reducer: "ShardedReducer") -> None:
        """Restore the loaded state of a sharded model in its first step."""
        self._loaded.give({reducer.label: reducer})

    def _sessions(self) -> list[Session]:
        return [*super()._sessions(), *(one for one in self._sharded.values() if one.begun)]

    def registered(
        self, model: DistributedDataParallel, op: str = "mean", optimizer: Optimizers | None = None
    ) -> Registered:
        """Return the state for ``model.register_comm_hook(state, hook)``, for frameworks that call it themselves.

        Args:
            model: See `register`.
            op: See `register`.
            optimizer: See `register`.

        Raises:
            UnsupportedError: See `register`.
            SpecError: See `register`.
        """
        if not isinstance(model, DistributedDataParallel):
            raise UnsupportedError(
                f"registered({type(model).__name__}) is not supported: wrap the model in"
                " torch.nn.parallel.DistributedDataParallel first"
            )
        check_op(op)
        if getattr(model, "skip_all_reduce_unused_params", False) and not self._linear:
            raise UnsupportedError(
                "DistributedDataParallel(skip_all_reduce_unused_params=True) is supported only with methods without a"
                " state, as none and fp16: a step ends with the last bucket, which PyTorch may skip; leave"
                " skip_all_reduce_unused_params=False"
            )
        registered = Registered(self, model, op, self._known(model, optimizer))
        if registered.sparse and self.method.preconditioned:
            agreement.refuse_sparse("an Embedding with sparse=True", "make it with sparse=False")
        self._models.add(model)
        return registered

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Load the state of this rank; see `ReducingCompressor.load_state_dict`.

        Args:
            state: State from `state_dict` on the same rank.

        Raises:
            StateError: Also if it was saved on another rank.
        """
        saved, world = parse(state), self._world()
        if saved.size > 1 and (saved.rank, saved.size) != (world.rank, world.size):
            raise StateError(
                f"this state was saved on rank {saved.rank} of {saved.size} and cannot be loaded on rank {world.rank}"
                f" of {world.size}, as each rank has its own residual: load the state of the same rank; in a checkpoint"
                " that all ranks share, as those of torch.distributed.checkpoint, Lightning and Accelerate, save and"
                " load FullState(compression) instead of the compression"
            )
        self._load([saved])

    def reduce(self, registered: Registered, bucket: GradBucket) -> Future[Tensor]:
        """Compress a bucket of a model's gradients; called by `hook`."""
        with registered.lock:
            if bucket.index() == 0:
                registered.begin_step()
            if self._linear:
                self._meter.steps += bucket.is_last()
                whole = bucket.buffer()
                return _sum_sparse(registered, whole) if whole.is_sparse else self._reduce_alone(registered, whole)
            reducer = registered.reducer or self._begin(registered)
            if bucket.index() == 0:
                self._forget(registered, reducer)
                registered.alone = reducer.alone()
            if registered.alone is not None:
                return self._add_alone(registered, reducer, bucket, registered.alone)
            future = self._add(registered, reducer, bucket)
            if bucket.is_last():
                self._finish(registered, reducer)
            return future

    @staticmethod
    def _add(registered: Registered, reducer: Reducer, bucket: GradBucket) -> Future[Tensor]:
        buffer = bucket.buffer()
        if buffer.is_sparse:
            return _sum_sparse(registered, buffer)
        future: Future[Tensor] = Future(devices=[buffer.device] if buffer.is_cuda else None)
        registered.waiting.append(_Waiting(future, buffer))
        for parameter, grad in zip(bucket.parameters(), bucket.gradients(), strict=True):
            used = registered.used is None or id(parameter) in registered.used
            registered.taken.append(reducer.add(id(parameter), grad, used=used))
        return future

    def _add_alone(
        self, registered: Registered, reducer: Reducer, bucket: GradBucket, method: Method
    ) -> Future[Tensor]:
        """Sum a bucket by the linear method of a step."""
        buffer = bucket.buffer()
        passthrough = Passthrough(method, self._meter)
        if bucket.index() == 0:
            registered.halves = HalfSums(passthrough) if method.retains else None  # the other one is exact
        halves, transport = registered.halves, registered.transport
        if buffer.is_sparse:
            future = _sum_sparse(registered, buffer)
        elif halves is None:
            future = self._sum_bucket(registered, buffer, passthrough)
        else:
            future = halves.add(buffer, transport, registered.factor)
        if bucket.is_last():
            if halves is not None:
                halves.finish(transport, registered.factor)
            registered.forget_used()
            reducer.end_alone()
        return future

    @staticmethod
    def _forget(registered: Registered, reducer: Reducer) -> None:
        """Drop what is left of a step that an error has broken off."""
        registered.taken, registered.waiting = [], []
        if reducer.waiting:
            reducer.abort()

    @staticmethod
    def _finish(registered: Registered, reducer: Reducer) -> None:
        """Finish the step: all gradients have come."""
        taken, registered.taken = registered.taken, []
        for placeholder, entry in taken:
            reducer.take(placeholder, entry)
        registered.forget_used()
        waiting, registered.waiting = registered.waiting, []
        for future, buffer in waiting:
            future.set_result(buffer)

    def label_of(self, members: Sequence[Member]) -> str:
        """Return the label of a model: all ranks register their models in the same order."""
        label = agreement.label([Gradient(member.name, (), "") for member in members])
        with self._lock:
            return self._registry.label(label, {member.key for member in members})

    def _begin(self, registered: Registered) -> Reducer:
        with self._lock:
            reducer = Reducer(
                self._common._replace(lock=registered.lock),
                registered.members,
                registered.transport,
                registered.make_verdict(),
                registered.label,
                replaces=True,
                complete=True,
            )
            reducer.watch(registered.optimizers)
            self._registry.begin(registered.model(), reducer)
            registered.reducer = reducer
            return self._restored(reducer)

    def _reduce_alone(self, registered: Registered, buffer: Tensor) -> Future[Tensor]:
        """Compress with a linear method, whose one payload is a sum."""
        if not registered.agreed:
            self._agree(registered)
        return self._sum_bucket(registered, buffer, self._passthrough)

    @staticmethod
    def _sum_bucket(registered: Registered, buffer: Tensor, passthrough: Passthrough) -> Future[Tensor]:
        array, drive = passthrough.compress(buffer)
        started = registered.transport.start(AllReduce(array, donate=True), "")
        assert isinstance(started, Pending)
        lock, factor = registered.lock, registered.factor

        def finish(done: Future[Any]) -> Tensor:
            """Replace the buffer; without `registered`: Gloo's thread may be the last owner of what is named here."""
            done.value()  # the error of a collective that another rank has not taken part in
            with lock:
                return buffer.copy_(passthrough.decompress(started.read(), drive)).mul_(factor)

        finished: Future[Tensor] = started.work.get_future().then(finish)
        return finished

    def _agree(self, registered: Registered) -> None:
        """Verify that the ranks agree, as `Reducer` does in its first step."""
        asks = AllReduce(wishes(asking=True, undoing=False))
        registered.transport.start(asks, "").result()
        agreed = Agreement(self.method, self.merge, facts_of((m.name, m.tensor) for m in registered.members))
        agreed.begin(registered.transport)
        agreed.wait()
        agreed.verify()
        registered.agreed = True

    def group(self) -> dist.ProcessGroup:
        """Return the process group of all models; that of all ranks if there is none, or if they have several.

        Raises:
            UnsupportedError: If there is no process group yet.
        """
        sharded = list(self._sharded.values())
        transports = (one.transport for one in (*self._registry, *sharded))
        groups = {one.group for one in transports if isinstance(one, GroupTransport)}
        groups |= {model.process_group for model in self._models}
        return groups.pop() if len(groups) == 1 and all(one.begun for one in sharded) else self._everyone()

    def _world(self) -> World:
        return GroupTransport.of(self._everyone()).world if dist.is_initialized() or not alone() else World(0, 1)

    @staticmethod
    def _everyone() -> dist.ProcessGroup:
        group = dist.group.WORLD
        if group is None:
            raise UnsupportedError("there is no process group yet: call torch.distributed.init_process_group() first")
        return group


def _unwrapped(model: nn.Module) -> nn.Module:
    """Return the model within what `torch.compile`, Lightning Fabric and the composable `replicate` return."""
    found: Any = model
    while inner := getattr(found, "_orig_mod", None) or getattr(found, "_forward_module", None):
        found = inner
    if hasattr(found, "register_comm_hook") and not isinstance(found, DistributedDataParallel):
        from torch.distributed._composable.replicate import replicate  # loads FSDP, which others do not need

        state: Any = replicate.state(found)
        if state._init_args:  # otherwise done by the first forward pass
            state.lazy_init()
        found = state._ddp
    return found  # type: ignore[no-any-return]


def alone() -> bool:
    """Return whether this process is the only one of its job, with or without a process group."""
    return (dist.get_world_size() if dist.is_initialized() else int(os.environ.get("WORLD_SIZE", 1))) == 1


def _is_sharded(model: nn.Module) -> bool:
    """Return whether ``fully_shard`` has sharded a model."""
    return hasattr(model, "set_custom_reduce_scatter")


def check_op(op: str) -> None:
    """Validate ``op``.

    Raises:
        SpecError: If it is neither ``"mean"`` nor ``"sum"``.
    """
    if op not in ("mean", "sum"):
        raise SpecError(f"op={op!r} is not known; allowed: 'mean', 'sum'")


def hook(state: Registered, bucket: GradBucket) -> torch.futures.Future[torch.Tensor]:
    """Reduce a bucket of gradients: a communication hook for ``register_comm_hook(state, hook)``.

    Args:
        state: From `DistributedCompressor.registered`.
        bucket: Bucket of DistributedDataParallel.
    """
    if not isinstance(bucket, GradBucket):
        raise UnsupportedError(
            "torch._dynamo.config.optimize_ddp='python_reducer' is not supported: it hands gradients over one by one;"
            " leave optimize_ddp=True"
        )
    if not hasattr(state, "compressor"):
        raise UnsupportedError(
            "this state of a communication hook is not from compression.registered(model), or was pickled, which keeps"
            " nothing: write compression.register(model); save by compression.save(folder) or FullState(compression)"
        )
    return state.compressor.reduce(state, bucket)


def _sum_sparse(registered: Registered, buffer: Tensor) -> Future[Tensor]:
    """Sum a sparse gradient over the ranks without compression."""
    factor, group = registered.factor, registered.transport.group
    work: Any = dist.all_reduce(buffer, group=group, async_op=True)
    reduced: Future[Tensor] = work.get_future().then(lambda done: done.value()[0] * factor)
    return reduced


Compression: Catalogue[DistributedCompressor] = Catalogue(DistributedCompressor)
"""All methods: ``Compression.none``, ``.fp16``, ``.topk(ratio=0.01)``, ``.parse("topk:ratio=0.01")`` and so on."""
