"""What a compressor is to one list of variables: their buckets, the state in variables, and the graph of a step."""

from __future__ import annotations

import re
import zlib
from typing import Any, NamedTuple, TypeAlias

import numpy as np
import tensorflow as tf

from hvd_compress import agreement
from hvd_compress.collectives import AllReduce, State
from hvd_compress.errors import StateError
from hvd_compress.group import Group
from hvd_compress.lowering import lower
from hvd_compress.merging import Gradient, Merge, Planned, gradient, plan
from hvd_compress.methods.base import Method
from hvd_compress.ops.numpy import NumpyOps
from hvd_compress.ops.tensorflow import TensorFlowOps
from hvd_compress.spec import to_spec
from hvd_compress.state import flatten, unflatten
from hvd_compress.tensorflow.driver import drive, gather_bytes, outside_of_graphs, perform
from hvd_compress.tensorflow.tally import Tally, Untracked

Tensor: TypeAlias = Any
Change: TypeAlias = "tuple[tf.Variable, Tensor]"


class Ready(NamedTuple):
    """The exchange as built in one graph.

    Attributes:
        totals: The sums over the ranks, one for each gradient; None for those without elements.
        carrier: What Horovod is to allreduce in the place of each gradient: 1, or nan if some gradient is not finite.
    """

    totals: list[Tensor | None]
    carrier: Tensor


class Session(tf.Module):  # type: ignore[misc]  # TensorFlow is not typed
    """The exchange of the gradients of a list of variables.

    Args:
        method: What compresses.
        merge: How gradients are put into buckets.
        gradients: Name, shape and dtype of each.
        group: The ranks that take part.
        tally: Counts steps and bytes.

    Attributes:
        slots: The state: bucket, then leaf, then variable. Tracked by checkpoints.

    Raises:
        DisagreementError: If the ranks are not set up alike.
        UnsupportedError: If the job is elastic.
    """

    def __init__(self, method: Method, merge: Merge, gradients: list[Gradient], group: Group, tally: Tally) -> None:
        super().__init__(name="hvd_compress_session")
        agreement.refuse_elastic()
        agreement.check(gather_bytes(agreement.describe(method, merge, gradients), "hvd_compress.agreement", group))
        self._group = group
        self._prefix = f"hvd_compress.{agreement.label(gradients)}"
        self._plan = Untracked(plan(gradients, method, merge))
        self._tally = Untracked(tally)
        self._origin = [*group.world, zlib.crc32(to_spec(method).encode())]
        self.slots: dict[str, dict[str, tf.Variable]] = {}

    def create(self) -> None:
        """Make the variables. Whoever tracks the session must do so before, so that a checkpoint can restore them.

        Raises:
            StateError: If a checkpoint restores them that was saved by another rank, world size or method.
        """
        outside_of_graphs(self._create)

    def _create(self) -> None:
        self.origin = tf.Variable(self._origin, dtype=tf.int64, trainable=False, name="origin")
        rank, size, method = map(int, self.origin.numpy())
        if [rank, size, method] != self._origin:
            here = self._group.world
            by = "" if method == self._origin[2] else " by another method"
            raise StateError(
                f"the checkpoint was saved on rank {rank} of {size}{by} and cannot be restored on rank {here.rank} of"
                f" {here.size}: residuals belong to their rank and method; restore with as many ranks as were saved,"
                " each from its own checkpoint"
            )
        for planned in self._plan.value:
            self.slots[planned.bucket.key] = {
                path: tf.Variable(leaf, trainable=False, name=path, dtype=_variable_dtype(leaf))
                for path, leaf in flatten(self._initial(planned)).items()
            }

    def _initial(self, planned: Planned) -> State:
        return planned.method.init(NumpyOps(), planned.bucket, self._group.world.size)

    def states(self) -> list[State]:
        """The states of all buckets, as they are now; their leaves are variables."""
        return [unflatten(self._initial(planned), self.slots[planned.bucket.key]) for planned in self._plan.value]

    def build(self, gradients: list[Tensor]) -> Ready:
        """Build the exchange of one step into the current graph.

        Args:
            gradients: One tensor for each gradient of the session.
        """
        finite = [tf.reduce_all(tf.math.is_finite(gradient)) for gradient in gradients]
        bad = tf.add_n([tf.cast(~ok, tf.int32) for ok in finite])
        all_finite = tf.equal(perform(AllReduce(bad), f"{self._prefix}.finite", self._group), 0)
        carrier = tf.where(all_finite, tf.constant([1.0], tf.float64), np.nan)

        totals: list[Tensor | None] = [None] * len(gradients)
        changes: list[Change] = []
        sent = tf.constant(bad.dtype.size + carrier.dtype.size * len(gradients), tf.int64)
        for planned in self._plan.value:
            # A gradient that is not finite must not reach the method: it would spoil scales and its neighbours.
            parts = [tf.where(finite[i], gradients[i], tf.zeros_like(gradients[i])) for i in planned.members]
            pieces, more_changes, more_sent = self._exchange(planned, parts)
            for i, piece in zip(planned.members, pieces, strict=True):
                totals[i] = piece
            changes += more_changes
            sent += more_sent

        tf.cond(all_finite, lambda: tf.group(*[v.assign(value) for v, value in changes]), tf.no_op)
        size = sum(part.dtype.size * part.shape.num_elements() for part in totals if part is not None)
        self._tally.value.add(1, size, sent)
        return Ready(totals, carrier)

    def _exchange(self, planned: Planned, parts: list[Tensor]) -> tuple[list[Tensor], list[Change], Tensor]:
        """Build the exchange of one bucket; gives the totals, the changes of state, and the payload bytes."""
        bucket, ops, variables = planned.bucket, TensorFlowOps(), self.slots[planned.bucket.key]
        x = tf.concat([tf.reshape(tf.cast(part, bucket.dtype), [-1]) for part in parts], 0)
        state = unflatten(self._initial(planned), {path: variable.read_value() for path, variable in variables.items()})
        exchanging = planned.method.exchange(ops, bucket, tf.ensure_shape(x, [bucket.numel]), state, self._group.world)
        exchanging = lower(exchanging, ops, self._group.world)
        exchange, sent = drive(exchanging, f"{self._prefix}.{bucket.key}", self._group)
        pieces = zip(ops.split(exchange.total, bucket.sizes), bucket.shapes, strict=True)
        changes = [(variables[path], leaf) for path, leaf in flatten(exchange.state).items()]
        return [tf.reshape(piece, shape) for piece, shape in pieces], changes, sent


def describe(tensor: Any, variable: Any) -> Gradient:
    """Name, shape and dtype of a gradient, read off its variable.

    The variable knows the shape even where the gradient does not, as after a conversion of IndexedSlices. Keras numbers
    the names of layers by how many there were before in the process, which ranks and restarted jobs need not share, so
    numbers are left out.

    Raises:
        GradientError: If the dtype cannot be compressed.
    """
    name = re.sub(r"_\d+(?=[/:]|$)", "", variable.name)
    return gradient(name, tuple(variable.shape), tensor.dtype.name)


def _variable_dtype(leaf: Any) -> Any:
    return tf.int64 if isinstance(leaf, int) else leaf.dtype
