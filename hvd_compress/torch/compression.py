"""The compressor that Horovod's PyTorch side calls."""

from __future__ import annotations

import weakref
from collections.abc import Generator, Mapping
from typing import Any

from horovod.torch.compression import Compressor
from torch import Tensor

from hvd_compress import agreement
from hvd_compress.bucket import Bucket
from hvd_compress.collectives import AllReduce, World
from hvd_compress.errors import StateError
from hvd_compress.face import Catalogue
from hvd_compress.group import Group
from hvd_compress.measure import vnmse
from hvd_compress.merging import Merge
from hvd_compress.methods.base import Method
from hvd_compress.ops.torch import TorchOps
from hvd_compress.spec import to_spec
from hvd_compress.stats import Meter, Stats
from hvd_compress.torch import caller
from hvd_compress.torch.session import Session, Ticket

_FORMAT = "hvd_compress.torch/1"


class TorchCompressor(Compressor):  # type: ignore[misc]  # Horovod is not typed
    """Compresses the gradients of `hvd.DistributedOptimizer`; made by `Compression`.

    Args:
        method: What compresses.
        merge: How gradients are put into buckets; see `hvd_compress.merging.plan`.
    """

    def __init__(self, method: Method, merge: Merge) -> None:
        self.method = method
        self.merge = merge
        self._meter = Meter()
        self._sessions: weakref.WeakKeyDictionary[Any, Session] = weakref.WeakKeyDictionary()
        self._saved: dict[str, Mapping[str, Any]] = {}
        self._in_decompress = True

    def __repr__(self) -> str:
        return f"Compression.parse({to_spec(self.method)!r}, merge={self.merge!r})"

    def compress(self, tensor: Tensor) -> tuple[Tensor, Any]:
        """Take in a gradient; called by Horovod.

        Args:
            tensor: The gradient.

        Returns:
            What Horovod is to allreduce, and what it has to give back to `decompress`.
        """
        if self.method.linear:
            return self._compress_alone(tensor)
        call = caller.find(tensor)
        session = self._sessions.get(call.optimizer)
        if session is None:
            session = self._sessions[call.optimizer] = self._begin(call.optimizer)
        return session.add(call.parameter, tensor)

    def decompress(self, tensor: Tensor, ctx: Any) -> Tensor:
        """Give out a result; called by Horovod.

        Args:
            tensor: What Horovod made of the tensor that `compress` returned.
            ctx: What `compress` returned with it; None for a sparse gradient, which is none of ours.

        Returns:
            The reduced gradient.
        """
        if isinstance(ctx, Ticket):
            return ctx.session.take(tensor, ctx)
        if ctx is None:
            return tensor
        return self._decompress_alone(tensor, ctx)

    def _compress_alone(self, tensor: Tensor) -> tuple[Tensor, Any]:
        """Let the one payload of a linear method travel as the gradient's own allreduce: no carrier, no copy."""
        with self._meter.time("encode"):
            bucket = Bucket("", (tuple(tensor.shape),), str(tensor.dtype).removeprefix("torch."))
            exchanging = self.method.exchange(TorchOps(tensor.device), bucket, tensor, (), World(0, 1))
            message = next(exchanging)
            assert isinstance(message, AllReduce)
        self._meter.steps += self._in_decompress  # the first after a decompress begins a step
        self._in_decompress = False
        self._meter.gradient_bytes += tensor.numel() * tensor.element_size()
        self._meter.bytes_sent += message.array.numel() * message.array.element_size()
        return message.array, exchanging

    def _decompress_alone(self, tensor: Tensor, exchanging: Generator[Any, Tensor, Any]) -> Tensor:
        self._in_decompress = True
        with self._meter.time("decode"):
            try:
                exchanging.send(tensor)
            except StopIteration as end:
                total: Tensor = end.value.total
                return total
        raise AssertionError(f"{self.method!r} is linear but has a second round")

    def _begin(self, optimizer: Any) -> Session:
        agreement.refuse_momentum(self.method, lambda: caller.momentum(optimizer))
        group = Group.of(caller.process_set(optimizer))
        session = Session(self.method, self.merge, caller.parameters(optimizer), group, self._meter)
        if session.label in self._saved:
            session.load_state_dict(self._saved[session.label])
            del self._saved[session.label]
        return session

    def stats(self) -> Stats:
        """Bytes and time so far, on this rank, of all optimizers that use this compressor."""
        states = [state for session in self._sessions.values() for state in session.states()]
        return self._meter.read(waits=not self.method.linear)._replace(vnmse=vnmse(states))

    def state_dict(self) -> dict[str, Any]:
        """What this rank would lose: residuals, warm starts, step counts.

        Returns:
            Tensors, numbers and strings in dicts, so that ``torch.load(..., weights_only=True)`` reads it. It belongs
            to this rank: each rank saves a file of its own.
        """
        sessions = {session.label: session.state_dict() for session in self._sessions.values()}
        return {"format": _FORMAT, "method": to_spec(self.method), "sessions": {**self._saved, **sessions}}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on from a saved state; at once where the optimizer has made a step, else in its first step.

        Args:
            state: From `state_dict`, of the same rank.

        Raises:
            StateError: If it is not such a state, or of another method, rank, world size or model. Nothing is changed.
        """
        if not isinstance(state, Mapping) or state.get("format") != _FORMAT:
            raise StateError(f"this is not a state of a compressor: expected a dict with format={_FORMAT!r}")
        if state["method"] != to_spec(self.method):
            raise StateError(f"this state is of {state['method']!r}, but the compressor is {to_spec(self.method)!r}")
        saved = dict(state["sessions"])
        for session in self._sessions.values():
            if session.label in saved:
                session.load_state_dict(saved.pop(session.label))
        self._saved = saved


Compression: Catalogue[TorchCompressor] = Catalogue(TorchCompressor)
"""The methods: ``Compression.none``, ``.fp16``, ``.topk(ratio=0.01)``, ``.parse("topk:ratio=0.01")`` and so on."""
