"""The compressor that Horovod's TensorFlow and Keras sides call."""

from __future__ import annotations

import contextlib
from typing import Any, NamedTuple, TypeAlias

import tensorflow as tf
from horovod.tensorflow.compression import Compressor

from hvd_compress import agreement
from hvd_compress.bucket import Bucket
from hvd_compress.collectives import AllReduce, Exchanging, World
from hvd_compress.errors import ExchangeError
from hvd_compress.face import Catalogue
from hvd_compress.group import Group
from hvd_compress.measure import vnmse
from hvd_compress.merging import Merge
from hvd_compress.methods.base import Method
from hvd_compress.ops.tensorflow import TensorFlowOps
from hvd_compress.spec import to_spec
from hvd_compress.stats import Stats
from hvd_compress.tensorflow import caller
from hvd_compress.tensorflow.caller import Call
from hvd_compress.tensorflow.session import Ready, Session, describe
from hvd_compress.tensorflow.tally import Tally, Untracked

Tensor: TypeAlias = Any


class Ticket(NamedTuple):
    """What ``compress`` leaves with Horovod for ``decompress``.

    Attributes:
        total: The sum of the gradient over the ranks.
        size: How many ranks there are.
        like: The gradient itself, for its dtype.
    """

    total: Tensor
    size: int
    like: Tensor


class TensorFlowCompressor(Compressor, tf.Module):  # type: ignore[misc]  # neither is typed
    """Compresses the gradients of Horovod's optimizers and tapes; made by `Compression`.

    It is trackable: ``tf.train.Checkpoint(model=model, compression=compression)`` saves and restores its state, which
    belongs to this rank, so each rank needs a checkpoint of its own.

    Args:
        method: What compresses.
        merge: How gradients are put into buckets; see `hvd_compress.merging.plan`.

    Attributes:
        sessions: One for each list of variables.
        tally: Counts steps and bytes.
    """

    def __init__(self, method: Method, merge: Merge) -> None:
        tf.Module.__init__(self, name="hvd_compress")
        self.method = method
        self.merge = merge
        self.sessions: dict[str, Session] = {}
        self.tally = Tally()
        self._names: Untracked = Untracked({})  # of sessions, by the references to their variables
        self._built: Untracked = Untracked(None)  # the gradients of the latest call, and its exchange

    def __repr__(self) -> str:
        return f"Compression.parse({to_spec(self.method)!r}, merge={self.merge!r})"

    @tf.autograph.experimental.do_not_convert  # type: ignore[untyped-decorator]
    def compress(self, tensor: Tensor) -> tuple[Tensor, Any]:
        """Take in a gradient; called by Horovod while a graph is traced.

        Args:
            tensor: The gradient.

        Returns:
            What Horovod is to allreduce, and what it has to give back to `decompress`.
        """
        call = caller.find()
        if self.method.linear:
            return self._compress_alone(tensor, call)
        call = caller.checked(call)
        if not call.process_set.included() or call.process_set.size() == 1:
            return tensor, None  # traced, but never run
        ready, index = self._ready(call), _position(tensor, call.gradients)
        total = ready.totals[index]
        if total is None:
            return tensor, None
        return ready.carrier, Ticket(total, call.process_set.size(), tensor)

    @tf.autograph.experimental.do_not_convert  # type: ignore[untyped-decorator]
    def decompress(self, tensor: Tensor, ctx: Any) -> Tensor:
        """Give out a result; called by Horovod while a graph is traced.

        Args:
            tensor: What Horovod made of the tensor that `compress` returned.
            ctx: What `compress` returned with it.

        Returns:
            The reduced gradient.
        """
        if isinstance(ctx, Ticket):
            scale = tf.cast(tensor[0] / ctx.size, ctx.total.dtype)
            return tf.cast(ctx.total * scale, ctx.like.dtype)
        if ctx is None:
            return tensor
        try:
            ctx.send(tensor)
        except StopIteration as end:
            return end.value.total
        raise AssertionError(f"{self.method!r} is linear but has a second round")

    def _compress_alone(self, tensor: Tensor, call: Call | None) -> tuple[Tensor, Exchanging]:
        """Let the one payload of a linear method travel as the gradient's own allreduce: no carrier, no copy."""
        bucket = Bucket("", (), tensor.dtype.name)
        exchanging = self.method.exchange(TensorFlowOps(), bucket, tensor, (), World(0, 1))
        message = next(exchanging)
        assert isinstance(message, AllReduce)
        first = call is None or tensor is next(g for g in call.gradients if isinstance(g, tf.Tensor))
        count = tf.size(tensor, out_type=tf.int64)
        self.tally.add(int(first), count * tensor.dtype.size, count * message.array.dtype.size)
        return message.array, exchanging

    def _ready(self, call: Call) -> Ready:
        """The exchange of all gradients of a call, built once, when the first of them is compressed.

        Horovod reduces each gradient in a branch of its own. The exchange belongs to the graph around these branches,
        so that gradients can be merged and one that is not finite is known to all.
        """
        if self._built.value is not None and self._built.value[0] is call.source:
            earlier: Ready = self._built.value[1]
            return earlier
        present = [i for i, gradient in enumerate(call.gradients) if isinstance(gradient, tf.Tensor)]
        assert call.variables is not None
        variables = [call.variables[i] for i in present]
        agreement.refuse_momentum(self.method, lambda: caller.momentum(call.optimizer))
        with call.graph.as_default() if call.graph is not None else contextlib.nullcontext():
            session = self._session([call.gradients[i] for i in present], variables, Group.of(call.process_set))
            built = session.build([call.gradients[i] for i in present])
        totals: list[Tensor | None] = [None] * len(call.gradients)
        for i, total in zip(present, built.totals, strict=True):
            totals[i] = total
        ready = Ready(totals, built.carrier)
        self._built.value = (call.source, ready)
        return ready

    def _session(self, gradients: list[Tensor], variables: list[Any], group: Group) -> Session:
        refs = tuple(variable.ref() for variable in variables)
        if refs in self._names.value:
            return self.sessions[self._names.value[refs]]
        facts = [describe(g, v) for g, v in zip(gradients, variables, strict=True)]
        label = agreement.label(facts)
        name = f"{label}_{sum(known.startswith(label) for known in self.sessions)}"
        session = Session(self.method, self.merge, facts, group, self.tally)
        self.sessions[name] = session
        session.create()
        self._names.value[refs] = name
        return session

    def stats(self) -> Stats:
        """Bytes so far, on this rank, of all models that use this compressor."""
        states = [state for session in self.sessions.values() for state in session.states()]
        return self.tally.read()._replace(vnmse=vnmse(states))


def _position(tensor: Tensor, gradients: list[Any]) -> int:
    for i, gradient in enumerate(gradients):
        if gradient is tensor:
            return i
    raise ExchangeError(f"{tensor} is not among the gradients that Horovod is reducing; is this a new Horovod?")


Compression: Catalogue[TensorFlowCompressor] = Catalogue(TensorFlowCompressor)
"""The methods: ``Compression.none``, ``.fp16``, ``.topk(ratio=0.01)``, ``.parse("topk:ratio=0.01")`` and so on."""
