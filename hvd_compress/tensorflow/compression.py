"""The compressor that Horovod's TensorFlow and Keras sides call."""

from __future__ import annotations

import contextlib
import logging
import weakref
from collections.abc import Callable, Hashable, Iterator, Mapping
from dataclasses import dataclass, field
from itertools import count
from typing import Any, NamedTuple, TypeAlias

import horovod.tensorflow as hvd
import numpy as np
import tensorflow as tf
from horovod.tensorflow.compression import Compressor

from hvd_compress.checkpoint import agreement
from hvd_compress.checkpoint.saving import SaveLoadMixin
from hvd_compress.checkpoint.state_dict import PendingStates, Saved
from hvd_compress.core.bucket import Bucket
from hvd_compress.core.bucketing import Gradient, Merge
from hvd_compress.core.collectives import AllReduce, Drive, World
from hvd_compress.core.router import Router
from hvd_compress.engine import direct_calls
from hvd_compress.engine.api import Catalogue, CompressorBase
from hvd_compress.engine.race import Race
from hvd_compress.engine.stats import Meter, Stats
from hvd_compress.errors import ExchangeError, SpecError
from hvd_compress.methods.wrappers.measure import vnmse
from hvd_compress.methods.wrappers.router import check_fixed
from hvd_compress.ops.numpy import NumpyOps
from hvd_compress.tensorflow import caller, verdict
from hvd_compress.tensorflow.caller import Call
from hvd_compress.tensorflow.host import call_on_host
from hvd_compress.tensorflow.lineage import Lineage
from hvd_compress.tensorflow.session import CallSession, Ready, Session, describe, name_of
from hvd_compress.tensorflow.transport import EagerTransport
from hvd_compress.tensorflow.verdict import Facts, Vote

Tensor: TypeAlias = Any

_LOG = logging.getLogger("hvd_compress")
_serial = count(1)
_MARK = "_hvd_compress_number"
_FORMER: dict[Hashable, weakref.ref[Session]] = {}
"""The latest session of each list of variables, of any compressor."""


class Ticket(NamedTuple):
    """Context from ``compress`` to ``decompress``.

    Attributes:
        total: The sum of the gradient over the ranks.
        parts: Divisor that makes it a mean.
        like: The gradient itself, for its dtype.
    """

    total: Tensor
    parts: Tensor
    like: Tensor


@dataclass
class _Memo:
    """Facts of the calls so far; a plain object, as checkpoints track the lists and dicts of a module.

    Attributes:
        names: Names of sessions, by ranks and variables.
        ordinals: The next one, by label.
        lineage: Which sessions go on with what others kept.
        agreed: The lists of variables of a method without a state, for which all ranks are known to compress alike.
        begun: The gradients of the latest call of such a method, and the tensor that waits for the agreement.
        told: Names of sparse gradients that have been logged.
        scale: Reads the loss scale, if `TensorFlowCompressor.follow` said how.
        loaded: The states that were loaded.
        built: The gradients of the latest call, and its exchange.
        calls: The names of direct calls.
        owners: Identities of the variables and optimizers of each session that are still there.
    """

    names: dict[Hashable, str] = field(default_factory=dict)
    ordinals: dict[str, Iterator[int]] = field(default_factory=dict)
    lineage: Lineage = field(default_factory=Lineage)
    agreed: set[tuple[Any, ...]] = field(default_factory=set)
    begun: tuple[Any, Tensor] | None = None
    told: set[str] = field(default_factory=set)
    scale: Callable[[], Tensor] | None = None
    loaded: PendingStates = field(default_factory=PendingStates)
    built: tuple[Any, Ready] | None = None
    calls: direct_calls.Names = field(default_factory=direct_calls.Names)
    owners: dict[Hashable, set[int]] = field(default_factory=dict)


class TensorFlowCompressor(SaveLoadMixin, CompressorBase, Compressor, tf.Module):  # type: ignore[misc]  # neither is typed
    """Gradient compressor for Horovod's optimizers and tapes; `Compression` creates it.

    State belongs to variables: it is kept when a layer is unfrozen and the list of gradients changes. In direct calls
    such as ``hvd.allreduce(tensor, name="x", compression=...)`` it belongs to the name and shape. Several models may
    share a compressor. Without ``tf.function``, two lists of variables of the same shapes share a state if one tape
    records both, or if the tape is given to Horovod before it records: use a compressor for each.

    It is trackable: ``tf.train.Checkpoint(model=model, compression=compression)`` saves and restores its state. Each
    rank has its own state, so save one checkpoint per rank.

    Args:
        method: The method, as a router.
        merge: Assignment of gradients to buckets; see `hvd_compress.core.bucketing.plan`.

    Attributes:
        sessions: One session per list of variables.
    """

    sessions: dict[str, Session]

    def __init__(self, method: Router, merge: Merge) -> None:
        tf.Module.__init__(self, name="hvd_compress")
        self.method = method
        self.merge = merge
        self.sessions = {}
        self._memo = _Memo()
        self._meter = Meter()

    def __hash__(self) -> int:
        """Return the identity, but another value for each optimizer and each model: see `caller.reduced_for`."""
        apart = [] if self.method.linear else caller.reduced_for()
        return hash((id(self), *sorted(map(_number, apart))))

    def __repr__(self) -> str:
        return f"Compression.parse({str(self.method)!r}, merge={self.merge!r})"

    def follow(self, scaler: Any) -> None:
        """Keep residuals in unscaled units while a loss scaler changes its scale.

        Call it in custom training loops with a tape. In ``fit``, Keras's LossScaleOptimizer is found by itself.
        Stateless methods, such as ``none`` and ``fp16``, do not need it.

        Args:
            scaler: A ``tf.keras.mixed_precision.LossScaleOptimizer``, a variable or a tensor with the loss scale, or a
                function that returns it. The function is called while the step is traced, so it must read a variable.

        Raises:
            SpecError: If it is none of these, or the first step has been made.
        """
        if self.sessions:
            raise SpecError("follow() was called after the first step, whose graph has no loss scale: call it before")
        self._memo.scale = caller.scale_reader(scaler)

    @tf.autograph.experimental.do_not_convert  # type: ignore[untyped-decorator]
    def compress(self, tensor: Tensor) -> tuple[Tensor, Any]:
        """Compress a gradient; called by Horovod while a graph is traced.

        Args:
            tensor: The gradient.

        Returns:
            The tensor that Horovod is to allreduce, and the context for `decompress`.
        """
        call = caller.find()
        if self.method.linear:
            return self._compress_alone(tensor, call)
        call = caller.checked(call)
        if not _shared(call):
            return tensor, None  # traced, but never run
        ready, index = self._ready(call), _position(tensor, call.gradients)
        total = ready.totals[index]
        if total is None:
            return tensor, None
        return ready.placeholder, Ticket(total, ready.parts, tensor)

    @tf.autograph.experimental.do_not_convert  # type: ignore[untyped-decorator]
    def decompress(self, tensor: Tensor, ctx: Any) -> Tensor:
        """Return a result; called by Horovod while a graph is traced.

        Args:
            tensor: The tensor from `compress`, reduced by Horovod.
            ctx: The context from `compress`.

        Returns:
            The reduced gradient.
        """
        if isinstance(ctx, Ticket):
            scale = tf.cast(tensor[0] / ctx.parts, ctx.total.dtype)
            return tf.cast(ctx.total * scale, ctx.like.dtype)
        return tensor if ctx is None else tf.cast(tensor, ctx)

    def _compress_alone(self, tensor: Tensor, call: Call | None) -> tuple[Tensor, Any]:
        """Let the one payload of a linear method travel as the gradient's own allreduce: no placeholder, no copy.

        Returns:
            The payload, and the dtype of the gradient.
        """
        tensor = tf.convert_to_tensor(tensor)
        if call is None:
            self._count(1, [tensor], [])
        elif (_shared(call) or call.direct) and not caller.in_session():
            begun = self._begun(call)
            if begun is not None:
                with tf.control_dependencies([tf.identity(begun)]):  # of this branch
                    tensor = tf.identity(tensor)
        return tf.cast(tensor, self._payload(tensor.dtype)), tensor.dtype

    def _begun(self, call: Call) -> Tensor | None:
        """Count the gradients of a call, once; return a tensor that is there when all ranks are known to agree."""
        if self._memo.begun is not None and self._memo.begun[0] is call.source:
            return self._memo.begun[1]
        with call.graph.as_default() if call.graph is not None else contextlib.nullcontext():
            begun = self._agreement(call)
            self._count(1, [tf.convert_to_tensor(call.gradients[i]) for i in _dense(call)], [], call)
            self._count_slices(call)
        self._memo.begun = (call.source, begun)
        return begun

    def _agreement(self, call: Call) -> Tensor | None:
        """See to it that no other rank has a method with a state, whose collectives would not fit.

        Returns:
            A tensor that is there when all ranks are known to agree; None if nobody asks them.

        Raises:
            DisagreementError: In eager mode, if the ranks differ.
        """
        if call.direct or call.parameters is None or agreement.elastic():
            return None  # a rank that joins an elastic job would ask those who have made their first step long ago
        pairs = [(call.gradients[i], call.parameters[i]) for i in _dense(call)]
        key, agreed = _key(call, pairs), self._memo.agreed
        described = [Gradient(name_of(v), tuple(v.shape), g.dtype.name) for g, v in pairs]
        transport = EagerTransport.of(call.process_set)
        facts = Facts.of(agreement.describe(self.method, self.merge, described, transport.world))

        def agree() -> list[Any]:
            if key not in agreed:
                verdict.decide(Vote(facts), transport)
                agreed.add(key)
            return [np.float32(0)]

        (begun,) = call_on_host(agree, [], [tf.float32])
        begun.set_shape([])
        return begun

    def _payload(self, dtype: Any) -> str:
        """Return the dtype in which a linear method sends a gradient."""
        like = np.zeros(1, dtype.as_numpy_dtype)
        message = Drive(
            self.method.core.exchange(NumpyOps(), Bucket("", (), dtype.name), like, (), World(0, 1))
        ).message
        assert isinstance(message, AllReduce)
        return str(message.array.dtype.name)

    def _count(self, steps: int, tensors: list[Tensor], slices: list[Tensor], call: Call | None = None) -> None:
        """Count steps, gradients of a linear method, and what Horovod gathers of others, whenever the step is made."""
        meter, process_set = self._meter, None if call is None or call.direct else call.process_set
        widths = [(one.dtype.size, tf.as_dtype(self._payload(one.dtype)).size) for one in tensors]
        widths += [(one.dtype.size, one.dtype.size) for one in slices]

        def count(*numbers: Any) -> list[Any]:
            if process_set is not None and process_set.size() == 1:
                return []  # of an elastic job one rank is left, which sends nothing
            meter.steps += steps
            for number, (given, sent) in zip(numbers, widths, strict=True):
                meter.gradient_bytes += int(number) * given
                meter.bytes_sent += int(number) * sent
            return []

        every = [*tensors, *slices]
        known = [one.shape.num_elements() for one in every]
        if None in known:
            call_on_host(lambda numbers: count(*numbers), [tf.stack([tf.size(one, tf.int64) for one in every])], [])
        else:
            call_on_host(lambda: count(*known), [], [])

    def _ready(self, call: Call) -> Ready:
        """The exchange of all gradients of a call, built once, when the first of them is compressed.

        Horovod reduces each gradient in a branch of its own. The exchange belongs to the graph around these branches,
        so that gradients can be merged and one that is not finite is known to all.
        """
        if self._memo.built is not None and self._memo.built[0] is call.source:
            return self._memo.built[1]
        if call.direct:
            check_fixed(self.method, "in direct calls of hvd.allreduce")
        if agreement.elastic():
            check_fixed(self.method, "in an elastic job")
            _check_elastic(call)
        present = _dense(call)
        assert call.parameters is not None
        optimizer = caller.optimizer_facts(call.optimizer)
        agreement.check_optimizer(self.method, optimizer, self._world().rank)
        with call.graph.as_default() if call.graph is not None else contextlib.nullcontext():
            gradients = [_shaped(call.gradients[i], call.parameters[i]) for i in present]
            session = self._session(call, [(g, call.parameters[i]) for i, g in zip(present, gradients, strict=True)])
            session.reused = session.reused or call.watched is None
            if session.race is not None:
                session.race.adam = call.optimizer is None or bool(optimizer.not_sgd())
            built = session.build(gradients, self._scale_of(call), call.factor)
            self._count_slices(call)
        totals: list[Tensor | None] = [None] * len(call.gradients)
        for i, total in zip(present, built.totals, strict=True):
            totals[i] = total
        ready = Ready(totals, built.placeholder, built.parts)
        self._memo.built = (call.source, ready)
        return ready

    def _count_slices(self, call: Call) -> None:
        """Count the gradients that are IndexedSlices, which Horovod gathers itself, and say so, once."""
        names = {_name(call.parameters[i]) for i in _sparse(call)} if call.parameters else set()
        parts = [part for i in _sparse(call) for part in (call.gradients[i].values, call.gradients[i].indices)]
        if not parts:
            return
        if self.method.preconditioned:
            agreement.refuse_sparse(
                ", ".join(sorted(names)), "pass sparse_as_dense=True to Horovod's optimizer or tape"
            )
        self._count(0, [], parts, call)
        new = names - self._memo.told
        if new and not self.method.linear:
            self._memo.told |= new
            _LOG.warning(
                "the sparse gradients of %s travel uncompressed, as IndexedSlices; sparse_as_dense=True, an option of"
                " Horovod's optimizers and tapes, makes them dense, and compresses them",
                ", ".join(sorted(new)),
            )

    def _session(self, call: Call, pairs: list[tuple[Tensor, Any]]) -> Session:
        """The session of gradients and their variables (or names)."""
        key, eager = _key(call, pairs), call.graph is None and tf.executing_eagerly()
        if eager and call.direct:
            self._drop(self._memo.calls.use(key, hvd.rank()))
        if key in self._memo.names:
            direct_calls.go_on(key)
            self._watch(key, [call.optimizer, *(call.watched or ())])
            return self.sessions[self._memo.names[key]]
        facts = [describe(gradient, parameter) for gradient, parameter in pairs]
        label = agreement.label(facts)
        name = f"{label}_{next(self._memo.ordinals.setdefault(label, count()))}"
        kind = CallSession if call.direct else Session
        session = kind(self.method, self.merge, facts, EagerTransport.of(call.process_set), self._meter)
        with tf.init_scope():
            self.sessions[name] = session  # a checkpoint that waits for it is restored now
        if session.refused is not None:
            self.sessions = {other: one for other, one in self.sessions.items() if one is not session}
            raise session.refused
        loaded, lineage = self._memo.loaded, self._memo.lineage
        follows = lineage.has_any(key[1:]) and name not in loaded.names()
        restored = not follows and loaded.give({name: session})
        lineage.add(session, key[1:], fresh=not (session.from_checkpoint or restored))
        self._memo.names[key] = name
        _note_new(session, key, f"Horovod (for {_first(pairs)!r}, ...)")
        self._watch(key, [call.optimizer, *(call.watched or ()), *(parameter for _, parameter in pairs)])
        return session

    def _watch(self, key: tuple[Any, ...], owners: list[Any]) -> None:
        """Note who uses a session: it goes with the last of them."""
        left = self._memo.owners.setdefault(key, set())
        for owner in owners:
            if owner is None or isinstance(owner, str) or id(owner) in left:
                continue
            left.add(id(owner))
            gone = weakref.finalize(owner, _dismiss, weakref.ref(self), key, left, id(owner))
            gone.atexit = False

    def _drop(self, key: Hashable | None) -> Session | None:
        """Let go of the session of some variables or of a direct call, if there is one, and return it."""
        self._memo.owners.pop(key, None)
        name = self._memo.names.pop(key, None)
        if name is None:
            return None
        dropped = self.sessions[name]
        self._memo.lineage.drop(dropped)
        self.sessions = {other: session for other, session in self.sessions.items() if other != name}
        return dropped

    def _scale_of(self, call: Call) -> Tensor | None:
        """Return the loss scale; None if there is none."""
        if self._memo.scale is not None:
            return self._memo.scale()
        return None if call.scaler is None else caller.scale_reader(call.scaler)()

    def _world(self) -> World:
        return EagerTransport.of(hvd.global_process_set).world

    def _saved(self) -> Saved:
        sessions = {name: session.saved() for name, session in self.sessions.items()}
        return self._memo.loaded.join(str(self.method), self._world(), sessions)

    def _load(self, saved: list[Saved]) -> None:
        loaded = PendingStates()
        loaded.put(saved, str(self.method))
        loaded.give(self.sessions)
        self._memo.loaded = loaded

    def stats(self) -> Stats:
        """Return the bytes of this rank so far, over all models that use this compressor."""
        states = [state for session in self.sessions.values() for state in session.states]
        stats = self._meter.read(waits=False)
        return stats._replace(encode_seconds=None, decode_seconds=None, vnmse=vnmse(states), chosen=self._chosen())

    def races(self) -> Mapping[str, Race]:
        """Return the race of each list of variables, by the name of its session; none unless the method is ``auto``."""
        return {name: session.race for name, session in self.sessions.items() if session.race is not None}


def _shared(call: Call) -> bool:
    """Return whether this rank reduces gradients with others."""
    return bool(call.process_set.included() and (call.process_set.size() > 1 or agreement.elastic()))


def _check_elastic(call: Call) -> None:
    """Refuse what an elastic job has no way for."""
    if call.direct:
        agreement.refuse_elastic("direct calls of hvd.allreduce")
    if call.process_set is not hvd.global_process_set:
        agreement.refuse_elastic("process sets")


def _dense(call: Call) -> list[int]:
    """Return the gradients that are compressed."""
    return [i for i, g in enumerate(call.gradients) if g is not None and not isinstance(g, tf.IndexedSlices)]


def _shaped(gradient: Tensor, parameter: Any) -> Tensor:
    """A gradient with its static shape: one that was made dense of IndexedSlices has only that of its variable."""
    gradient = tf.convert_to_tensor(gradient)
    return gradient if isinstance(parameter, str) else tf.ensure_shape(gradient, parameter.shape)


def _sparse(call: Call) -> list[int]:
    """Return the gradients that are gathered uncompressed."""
    return [i for i, g in enumerate(call.gradients) if isinstance(g, tf.IndexedSlices)]


def _key(call: Call, pairs: list[tuple[Tensor, Any]]) -> tuple[Any, ...]:
    """Key of a session: the ranks, and the variables or, in direct calls, names, shapes and dtypes."""
    names = [(p, str(g.shape), g.dtype) if isinstance(p, str) else _number(p) for g, p in pairs]
    return (call.process_set.process_set_id, *names)


def _first(pairs: list[tuple[Tensor, Any]]) -> str:
    """The smallest of the names of variables (or of direct calls)."""
    return min((_name(parameter) for _, parameter in pairs), default="")


def _name(parameter: Any) -> str:
    """The name of a variable, as it is numbered in this process, or of a direct call."""
    return parameter if isinstance(parameter, str) else str(parameter.name)


def _number(variable: Any) -> int:
    """Return a number that identifies a variable in this process, without a reference that would keep it alive."""
    if not hasattr(variable, _MARK):
        setattr(variable, _MARK, next(_serial))
    return int(getattr(variable, _MARK))


def _dismiss(reference: weakref.ref[TensorFlowCompressor], key: tuple[Any, ...], left: set[int], owner: int) -> None:
    """Let go of a session, and of the memory of its state, when its variables and optimizers are no more.

    Horovod keeps the compressor for good, and TensorFlow the graphs of Keras.
    """
    left.discard(owner)
    compressor = reference()
    if compressor is None or left:
        return
    session = compressor._drop(key)
    if session is not None and not session.reused:
        session.release()


def _note_new(session: Session, key: Hashable, what: str) -> None:
    """Note that there is a session; warn if compressors before this one have made one step each with its variables.

    Horovod traces the reduction of a tape once for each compressor, so a further step is seen in the state alone.
    """
    former = _FORMER[key]() if key in _FORMER else None
    if former is not None and former.steps > 1:
        direct_calls.go_on(key)
    if len(_FORMER) >= direct_calls.MOST:
        _FORMER.clear()
    _FORMER[key] = weakref.ref(session)
    direct_calls.begin(key, what, session.world.rank)


def _position(tensor: Tensor, gradients: list[Any]) -> int:
    for i, gradient in enumerate(gradients):
        if gradient is tensor:
            return i
    raise ExchangeError(f"{tensor} is not among the gradients that Horovod is reducing; is this a new Horovod?")


Compression: Catalogue[TensorFlowCompressor] = Catalogue(TensorFlowCompressor)
"""The methods: ``Compression.none``, ``.fp16``, ``.topk(ratio=0.01)``, ``.parse("topk:ratio=0.01")`` and so on."""
