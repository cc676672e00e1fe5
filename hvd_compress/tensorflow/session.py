"""Per-optimizer buckets and state, and the graph of a step."""

from __future__ import annotations

import re
import zlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, TypeAlias

import horovod.tensorflow as hvd
import numpy as np
import tensorflow as tf

from hvd_compress.checkpoint import agreement
from hvd_compress.checkpoint.elastic import Membership
from hvd_compress.checkpoint.resharding import BucketSnapshot
from hvd_compress.checkpoint.state_dict import SavedSession, fingerprint, refuse_other_parameters, same_parameters
from hvd_compress.core.bucketing import PRECISION, Gradient, Merge, Planned, advise, gradient, plan
from hvd_compress.core.collectives import State, World
from hvd_compress.core.method import compensate
from hvd_compress.core.router import Router
from hvd_compress.core.state_tree import Kind, flatten, kinds, unflatten
from hvd_compress.errors import DisagreementError, GradientError, StateError
from hvd_compress.ops.numpy import NumpyOps
from hvd_compress.ops.tensorflow import tensorflow_ops
from hvd_compress.tensorflow import pulse
from hvd_compress.tensorflow.handshake import Question
from hvd_compress.tensorflow.tally import Tally
from hvd_compress.tensorflow.transport import GraphTransport, drive, outside_of_graphs
from hvd_compress.transport.lowering import lower

Tensor: TypeAlias = Any
Leaves: TypeAlias = "dict[str, np.ndarray[Any, Any] | int]"
Change: TypeAlias = "tuple[tf.Variable, Tensor]"


_ENDS = "_hvd_compress_ends"
"""Name of the collection of a graph that holds the ends of its exchanges."""

_RELEASED = -1
"""Number of steps of a session whose state has been released."""

_GONE = (
    "the variables that this step trains have been deleted, and with them what was kept for them: keep the model for as"
    " long as its step is called"
)

_NOWHERE = [-1, -1, -1]
"""The origin of a state that no checkpoint has filled in."""


class Ready(NamedTuple):
    """The exchange as built in one graph.

    Attributes:
        totals: The sums over the ranks, one for each gradient; None for those without elements.
        carrier: Number that Horovod allreduces instead of each gradient: 1, or nan if a gradient is not finite.
        parts: Divisor that makes the totals means.
    """

    totals: list[Tensor | None]
    carrier: Tensor
    parts: int


@dataclass(frozen=True)
class _Fixed:
    """Arguments of a session; a plain object, as checkpoints track the lists and modules of a module.

    Attributes:
        gradients: The parameters.
        plan: The buckets.
        question: Whether all ranks compress these gradients alike; None in elastic jobs.
        membership: The ranks of an elastic job.
        tally: Counts steps and bytes.
    """

    gradients: list[Gradient]
    plan: list[Planned]
    question: Question | None
    membership: Membership
    tally: Tally


def _digest(method: Router, world: World) -> int:
    """Return a checksum of a method, and of the nodes if its state depends on them."""
    nodes = f" {world.local_size}" if method.hierarchical else ""
    return zlib.crc32(f"{method}{nodes}".encode())


class Session(tf.Module):  # type: ignore[misc]  # TensorFlow is not typed
    """The exchange of the gradients of a list of variables.

    Args:
        method: The method, as a router.
        merge: Assignment of gradients to buckets.
        gradients: Name, shape and dtype of each.
        first: The smallest name of their variables, as these are numbered in this process.
        transport: The ranks that take part.
        tally: Counts steps and bytes.

    Attributes:
        transport: The ranks that take part.
        slots: The state: bucket, then leaf, then variable. Tracked by checkpoints.
        steps: Number of steps so far, a variable.
        job: Number of what the ranks do together, drawn by one of them in the first step: a variable.
        reused: Whether Horovod may run its graph for other variables, so that its state stays.

    Raises:
        DisagreementError: If the ranks differ in method, options or model.
    """

    def __init__(
        self,
        method: Router,
        merge: Merge,
        gradients: list[Gradient],
        first: str,
        transport: GraphTransport,
        tally: Tally,
    ) -> None:
        super().__init__(name="hvd_compress_session")
        self._count = len(gradients)
        self._facts = agreement.describe(method, merge, gradients, transport.world)
        advise(gradients, method, transport.world)
        question = None if agreement.elastic() else Question(self._facts, first, transport)
        if question is not None:
            question.expect()
            if method.hierarchical:
                question.meanwhile(transport.connect)
        membership = Membership(zlib.crc32(agreement.label(gradients).encode()))
        self._fixed = _Fixed(gradients, plan(gradients, method, merge), question, membership, tally)
        self.transport = transport
        # The same on ranks whose models differ in part, so that they meet and are told.
        self._key = min(("/".join(g.name.split("/")[-2:]) for g in gradients), default="")
        self._prefix = f"hvd_compress.{agreement.label(gradients)}"
        self._drawn = pulse.draw()
        self._origin = [transport.world.rank, transport.world.size, _digest(method, transport.world)]
        self._number = hvd.rank()
        self.reused = False
        self.slots: dict[str, dict[str, tf.Variable]] = {}

    @property
    def world(self) -> World:
        """The ranks that take part."""
        return self.transport.world

    @property
    def gradients(self) -> Sequence[Gradient]:
        """The parameters; none for direct calls."""
        return self._fixed.gradients

    def create(self) -> bool:
        """Make the variables. Whoever tracks the session must do so before, so that a checkpoint can restore them.

        Returns:
            Whether the state is a new one, not that of a checkpoint.

        Raises:
            StateError: If a checkpoint restores them that was saved by another rank, world size or method.
        """
        return outside_of_graphs(self._create)

    def _create(self) -> bool:
        self.origin = tf.Variable(_NOWHERE, dtype=tf.int64, trainable=False, name="origin")
        found = self.origin.numpy().tolist()
        if found != _NOWHERE:
            self._check_origin(*found)
        self.origin.assign(self._origin)
        self.steps = tf.Variable(0, dtype=tf.int64, trainable=False, name="steps")
        self.job = tf.Variable(0, dtype=tf.int64, trainable=False, name="job")
        for planned in self._fixed.plan:
            self.slots[planned.bucket.key] = {
                path: _variable(leaf, path) for path, leaf in flatten(self._initial(planned)).items()
            }
        return bool(found == _NOWHERE)

    def _check_origin(self, rank: int, size: int, method: int) -> None:
        if [rank, size, method] != self._origin:
            here = self.transport.world
            by = "" if method == self._origin[2] else " by another method"
            raise StateError(
                f"the checkpoint was saved on rank {rank} of {size}{by} and cannot be restored on rank {here.rank} of"
                f" {here.size}: each rank and method has residuals of its own; restore with the same number of ranks,"
                " each from its own checkpoint"
            )

    def _initial(self, planned: Planned) -> State:
        return planned.method.init(NumpyOps(), planned.bucket, self.transport.world)

    def states(self) -> list[State]:
        """The states of all buckets, as they are now; their leaves are variables."""
        return [unflatten(self._initial(planned), self.slots[planned.bucket.key]) for planned in self._fixed.plan]

    def fresh(self) -> dict[str, Leaves]:
        """A new state, in the form of `read`."""
        return {planned.bucket.key: flatten(self._initial(planned)) for planned in self._fixed.plan}

    def kinds(self) -> dict[str, dict[str, Kind]]:
        """Return the kinds of the state's leaves, in the form of `read`."""
        return {planned.bucket.key: kinds(self._initial(planned)) for planned in self._fixed.plan}

    def kept(self, names: Sequence[Any]) -> list[BucketSnapshot]:
        """Return the state, for `hvd_compress.checkpoint.resharding`.

        Args:
            names: Identities of the gradients, in the order of the session.
        """
        leaves = self.read()
        return [
            BucketSnapshot([names[i] for i in p.members], p.bucket, p.method, leaves[p.bucket.key])
            for p in self._fixed.plan
        ]

    def read(self) -> dict[str, Leaves]:
        """The state, as it is now: bucket, then leaf; counters as ints."""

        def read() -> dict[str, Leaves]:
            return {
                key: {path: _read(self.slots[key][path], leaf) for path, leaf in leaves.items()}
                for key, leaves in self.fresh().items()
            }

        return outside_of_graphs(read)

    def write(self, state: Mapping[str, Mapping[str, Any]]) -> None:
        """Take over a state, of the form that `read` gives."""

        def write() -> None:
            for key, slot in self.slots.items():
                for path, variable in slot.items():
                    variable.assign(state[key][path])

        outside_of_graphs(write)

    def saved(self) -> SavedSession:
        """The state, in the form that is written to files."""
        buckets = self.read()
        steps, job = outside_of_graphs(lambda: (int(self.steps.numpy()), int(self.job.numpy())))
        shared = fingerprint(buckets, self.kinds())
        world = self.world
        return SavedSession(
            world.rank,
            world.size,
            steps,
            buckets,
            job=job,
            shared=shared,
            local_size=world.local_size,
            gradients=self.gradients,
            process_set=self.transport.members,
        )

    def restore(self, saved: SavedSession) -> None:
        """Take over a state that has been checked."""
        outside_of_graphs(lambda: (self.steps.assign(saved.steps), self.job.assign(saved.job)))
        self.write(saved.buckets)

    def by_bucket(self, saved: SavedSession | None = None) -> dict[str, BucketSnapshot]:
        """Return the state by the keys of the buckets, of which there is only one partition.

        Raises:
            StateError: If the saved state is of other parameters.
        """
        if saved is not None and not same_parameters(saved, self.gradients):
            refuse_other_parameters(saved.gradients, self.gradients)
        return {kept.bucket.key: kept for kept in self.kept(range(self._count))}

    def meet(self) -> None:
        """In an elastic job, find out at the beginning of a step whether the ranks are still the same.

        Raises:
            DisagreementError: If a newcomer is not set up as the others are.
        """
        transport = GraphTransport.of(self.transport.process_set)
        meeting = self._fixed.membership.meet(
            transport.world,
            int(self.steps.numpy()),
            lambda data, name: transport.gather_bytes(data, f"{name}.{self._key}"),
            self._facts,
            self.by_bucket,
        )
        self.transport, self._number = transport, hvd.rank()
        if meeting is not None:
            self.job.assign(meeting.job)
            if meeting.leaves:
                self.restore(
                    SavedSession(self.world.rank, self.world.size, meeting.steps, meeting.leaves, job=meeting.job)
                )

    def build(self, gradients: list[Tensor], scale: Tensor | None = None, factor: float = 1.0) -> Ready:
        """Build the exchange of one step into the current graph.

        Args:
            gradients: One tensor for each gradient of the session.
            scale: Loss scale of the gradients; the state is in unscaled units. None for no scale.
            factor: Factor by which Horovod will multiply the sums.
        """
        ops = tensorflow_ops()
        gates = [] if self._fixed.question is None else self._fixed.question.gate()
        with tf.control_dependencies([*gates, *self._earlier(), *self._checks()]):
            gradients = [tf.identity(gradient) for gradient in gradients]
        true = [_true(gradient, scale) for gradient in gradients]
        # A gradient that is not finite must not reach the method: it would spoil scales and its neighbours.
        merged = [ops.merge([true[i] for i in planned.members]) for planned in self._fixed.plan]
        bad = tf.add_n([tf.constant(0), *(count for _, count in merged)])
        steps, job = self.steps.read_value(), self.job.read_value()
        all_finite, job = pulse.feel(
            bad, steps, job, self._drawn, f"{self._prefix}.finite", self.transport, self._number
        )
        carrier = tf.where(all_finite, tf.constant([1.0], tf.float64), np.nan)

        totals: list[Tensor | None] = [None] * len(gradients)
        changes: list[Change] = []
        sent = tf.constant([pulse.BYTES + carrier.dtype.size * len(gradients), 0], tf.int64)
        for planned, (x, _) in zip(self._fixed.plan, merged, strict=True):
            pieces, more_changes, more_sent = self._exchange(planned, x, all_finite)
            for i, piece in zip(planned.members, pieces, strict=True):
                totals[i] = piece if scale is None else piece * tf.cast(scale, piece.dtype)
            changes += more_changes
            sent += more_sent

        # What is refused in one bucket must not leave the others half-way: nothing counts before all totals are there.
        with tf.control_dependencies([total for total in totals if total is not None]):
            totals = [None if total is None else tf.identity(total) for total in totals]
            # All ranks reduce the carrier: no rank may finish and exit earlier, as that shuts down Horovod everywhere.
            if self._nodes_end_apart:
                carrier = tf.identity(carrier)
        good = tf.logical_and(all_finite, _fit(totals, gradients, scale, factor))
        with tf.control_dependencies([total for total in totals if total is not None]):
            tf.cond(good, lambda: tf.group(*[v.assign(value) for v, value in changes]), tf.no_op)
        size = sum(part.dtype.size * part.shape.num_elements() for part in totals if part is not None)
        with tf.control_dependencies([all_finite]):
            self._fixed.tally.add(1, size, sent)
            self.job.assign(job)
            self.steps.assign_add(1)
        self._note_end(totals)
        return Ready(totals, carrier, self.transport.world.size)

    def release(self) -> None:
        """Free the memory of the state: graphs that nobody calls any more keep its variables.

        Called while garbage is collected, in whatever graph is being traced.
        """
        with tf.init_scope():
            self.steps.assign(_RELEASED)
            for variable in (variable for slot in self.slots.values() for variable in slot.values()):
                nothing = tf.zeros([0], variable.dtype)
                tf.raw_ops.AssignVariableOp(resource=variable.handle, value=nothing, validate_shape=False)

    def _checks(self) -> list[tf.Operation]:
        """Check in each step, before any collective, that the state and the number of ranks are those of the graph."""
        size, own = hvd.size_op(self.transport.process_set.process_set_id), self.world.size
        there = tf.not_equal(self.steps.read_value(), _RELEASED)
        if tf.executing_eagerly():
            if int(size) != own:
                raise DisagreementError(pulse.RESTARTED)
            return []
        return [
            tf.debugging.Assert(there, [f"StateError: {_GONE}"]),
            tf.debugging.Assert(tf.equal(size, own), [f"DisagreementError: {pulse.RESTARTED}"]),
        ]

    @property
    def _nodes_end_apart(self) -> bool:
        """Whether a node can finish its exchanges before other nodes do."""
        several = 1 < self.world.local_size < self.world.size
        return several and any(planned.method.hierarchical for planned in self._fixed.plan)

    def _earlier(self) -> list[tf.Operation]:
        """The ends of other exchanges in this graph by the same names: two models may have variables of equal names."""
        ends = {} if tf.executing_eagerly() else getattr(tf.compat.v1.get_default_graph(), _ENDS, {})
        return [ends[self._prefix]] if self._prefix in ends else []

    def _note_end(self, totals: list[Tensor | None]) -> None:
        if not tf.executing_eagerly():
            graph = tf.compat.v1.get_default_graph()
            setattr(
                graph,
                _ENDS,
                {**getattr(graph, _ENDS, {}), self._prefix: tf.group(*(t for t in totals if t is not None))},
            )

    def _exchange(self, planned: Planned, x: Tensor, after: Tensor) -> tuple[list[Tensor], list[Change], Tensor]:
        """Build the exchange of one bucket; gives the totals, the changes of state, and the payload bytes."""
        bucket, ops, variables = planned.bucket, tensorflow_ops(), self.slots[planned.bucket.key]
        state = unflatten(self._initial(planned), {path: variable.read_value() for path, variable in variables.items()})
        x = compensate(ops, planned.method, x, state)
        exchanging = planned.method.exchange(ops, bucket, x, state, self.world)
        exchanging = lower(exchanging, ops, self.world, self.transport.missing)
        exchange, sent = drive(exchanging, f"{self._prefix}.{bucket.key}", self.transport, after)
        pieces = zip(ops.split(exchange.total, bucket.sizes), bucket.shapes, strict=True)
        changes = [(variables[path], leaf) for path, leaf in flatten(exchange.state).items()]
        return [tf.reshape(piece, shape) for piece, shape in pieces], changes, sent


class CallSession(Session):
    """The exchange of a direct call, whose state belongs to its name."""

    gradients = ()


def precision(gradient: Tensor) -> str:
    """Return the dtype in which a gradient is compressed."""
    return PRECISION[gradient.dtype.name]


def _true(gradient: Tensor, scale: Tensor | None) -> Tensor:
    """A gradient in the precision that it is computed in, without the loss scale."""
    gradient = tf.cast(gradient, precision(gradient))
    return gradient if scale is None else gradient / tf.cast(scale, gradient.dtype)


def _fit(totals: list[Tensor | None], gradients: list[Tensor], scale: Tensor | None, factor: float) -> Tensor:
    """Return whether the results, which are the same on all ranks, are finite in their dtypes."""
    results = [
        total
        if scale is None and total.dtype == gradient.dtype
        # Only a scale or a narrower dtype can make something else of a finite sum.
        else tf.cast(total * tf.cast(factor, total.dtype), gradient.dtype)
        for total, gradient in zip(totals, gradients, strict=True)
        if total is not None
    ]
    return tf.reduce_all([True, *[tf.reduce_all(tf.math.is_finite(result)) for result in results]])


def describe(tensor: Any, parameter: Any) -> Gradient:
    """Name, shape and dtype of a gradient of a variable, or of a tensor in a direct call.

    Raises:
        GradientError: If the dtype cannot be compressed, or the shape is not known.
    """
    name = parameter if isinstance(parameter, str) else name_of(parameter)
    if not tensor.shape.is_fully_defined():
        raise GradientError(
            f"the tensor {name!r} has shape {tensor.shape}, but state is kept for a shape that is known while the"
            " graph is traced; set it with tf.ensure_shape, or use Compression.none or .fp16"
        )
    return gradient(name, tuple(tensor.shape), tensor.dtype.name)


def name_of(variable: Any) -> str:
    """A name for a variable that all ranks and restarted jobs share.

    Keras numbers the names of layers by how many there were before in the process, so numbers are left out.
    """
    return re.sub(r"_\d+(?=[/:]|$)", "", variable.name)


def _read(variable: tf.Variable, fresh: Any) -> Any:
    return int(variable.numpy()) if isinstance(fresh, int) else variable.numpy()


def _variable(leaf: Any, name: str) -> tf.Variable:
    dtype = tf.int64 if isinstance(leaf, int) else leaf.dtype
    # What a rank keeps as a server has another length when the number of ranks changes.
    shape = tf.TensorShape([None] * np.ndim(leaf)) if agreement.elastic() else None
    return tf.Variable(leaf, trainable=False, name=name, dtype=dtype, shape=shape)
