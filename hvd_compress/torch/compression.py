"""The compressor that Horovod's PyTorch side calls."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from horovod.torch.compression import Compressor
from torch import Tensor

from hvd_compress import agreement, checkpoint
from hvd_compress.face import Catalogue
from hvd_compress.group import Group
from hvd_compress.measure import vnmse
from hvd_compress.merging import Gradient, Merge
from hvd_compress.methods.base import Method
from hvd_compress.saved import Loaded, Saved, from_dict, to_dict
from hvd_compress.spec import to_spec
from hvd_compress.stats import Meter, Stats
from hvd_compress.torch import caller
from hvd_compress.torch.alone import Alone
from hvd_compress.torch.driver import gather_bytes
from hvd_compress.torch.scaling import LossScale
from hvd_compress.torch.session import Member, Session, Ticket
from hvd_compress.torch.sessions import Sessions


class TorchCompressor(Compressor):  # type: ignore[misc]  # Horovod is not typed
    """Compresses the gradients of `hvd.DistributedOptimizer`; made by `Compression`.

    Direct calls, ``hvd.allreduce(tensor, name="x", compression=...)`` and ``hvd.grouped_allreduce``, keep a state of
    their own for each name.

    Args:
        method: What compresses.
        merge: How gradients are put into buckets; see `hvd_compress.merging.plan`.
    """

    def __init__(self, method: Method, merge: Merge) -> None:
        self.method = method
        self.merge = merge
        self._meter = Meter()
        self._alone = Alone(method, self._meter)
        self._sessions = Sessions()
        self._loaded = Loaded()
        self._scale = LossScale()

    def __repr__(self) -> str:
        return f"Compression.parse({to_spec(self.method)!r}, merge={self.merge!r})"

    def follow(self, scaler: Any) -> None:
        """Keep residuals in true units while a loss scaler changes its scale.

        Without it, they are kept in the units of the gradients that Horovod gets: scaled ones. Call it once, before
        training, and reduce gradients before they are unscaled: ``optimizer.synchronize()``, then
        ``scaler.unscale_(optimizer)`` where gradients are clipped, then ``scaler.step(optimizer)`` within
        ``optimizer.skip_synchronize()``. Methods that keep nothing need it not, and are as without it.

        Args:
            scaler: A ``torch.amp.GradScaler`` or another object with ``get_scale()``, or a function that gives the
                scale. It is asked once in each step, when the first gradient has come.

        Raises:
            SpecError: If it is something else.
        """
        self._scale.follow(scaler)

    def compress(self, tensor: Tensor) -> tuple[Tensor, Any]:
        """Take in a gradient; called by Horovod.

        Args:
            tensor: The gradient.

        Returns:
            What Horovod is to allreduce, and what it has to give back to `decompress`.
        """
        call = caller.find(tensor)
        if self.method.linear:
            if isinstance(call, caller.Call) and not self._sessions.agreed(call.optimizer):
                self._agree(caller.parameters(call.optimizer), Group.of(caller.process_set(call.optimizer)))
                self._sessions.note_agreement(call.optimizer)
            return self._alone.compress(tensor)
        if isinstance(call, caller.Call) and (session := self._sessions.of(call.optimizer)) is not None:
            return self._compress_of(call, session, tensor)
        caller.check(call, tensor)
        if isinstance(call, caller.Direct):
            return self._compress_direct(call, tensor)
        assert call is not None
        return self._compress_of(call, self._begin(call.optimizer), tensor)

    def _compress_of(self, call: caller.Call, session: Session, grad: Tensor) -> tuple[Tensor, Any]:
        """Compress a gradient of an optimizer."""
        parameter = call.parameter(grad)
        if session.waiting and call.begins_step(parameter):
            session.abort()
        if not session.waiting:
            caller.check_all_reduced(call.optimizer)
            if agreement.elastic():
                facts = self._facts(caller.parameters(call.optimizer))
                session.meet(caller.process_set(call.optimizer), facts)
        return session.add(id(parameter), grad, frozen=not parameter.requires_grad)

    def _compress_direct(self, call: caller.Direct, tensor: Tensor) -> tuple[Tensor, Any]:
        """Compress a tensor of ``hvd.allreduce`` or ``hvd.grouped_allreduce``."""
        session = self._sessions.of_call(call.key)
        if session is None:
            session = self._begin_direct(call)
        position = session.waiting  # Horovod adds them in order, then takes them all
        if position and (position == len(call.tensors) or call.tensors[position] is not tensor):
            session.abort()
            position = 0
        return session.add(position, tensor)

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
        return tensor if ctx is None else self._alone.decompress(tensor, ctx)

    def _begin(self, optimizer: Any) -> Session:
        members, group = caller.parameters(optimizer), Group.of(caller.process_set(optimizer))
        if not agreement.elastic():
            self._agree(members, group)
        elif caller.process_set(optimizer) is not caller.EVERYONE:
            agreement.refuse_elastic("process sets")
        agreement.refuse_momentum(self.method, lambda: caller.momentum(optimizer))
        label = agreement.label([Gradient(name, (), "") for name, _ in members])
        session = self._make(
            [Member(id(p), name, p) for name, p in members],
            group,
            self._sessions.label(label, {id(p) for _, p in members}),
            caller.full_carrier(optimizer),
            replaces=True,
        )
        session.search()
        self._sessions.begin(optimizer, session)
        return self._restored(session)

    def _begin_direct(self, call: caller.Direct) -> Session:
        if agreement.elastic():
            agreement.refuse_elastic("direct calls of hvd.allreduce")
        group = Group.of(call.process_set)
        names = [call.name] if len(call.tensors) == 1 else [f"{call.name}.{i}" for i in range(len(call.tensors))]
        self._agree(list(zip(names, call.tensors, strict=True)), group)
        members = [Member(i, str(name), t) for i, (name, t) in enumerate(zip(names, call.tensors, strict=True))]
        session = self._make(members, group, call.label, call.full_carrier)
        self._sessions.begin_call(call.key, session)
        return self._restored(session)

    def _agree(self, members: Sequence[tuple[str | None, Tensor]], group: Group) -> None:
        """Make sure that the ranks are set up alike, which would wait for each other otherwise."""
        agreement.check(gather_bytes(self._facts(members), "hvd_compress.agreement", group))

    def _facts(self, members: Sequence[tuple[str | None, Tensor]]) -> bytes:
        facts = [Gradient(str(name), tuple(t.shape), str(t.dtype).removeprefix("torch.")) for name, t in members]
        return agreement.describe(self.method, self.merge, facts)

    def _make(
        self,
        members: Sequence[Member],
        group: Group,
        label: str,
        full: Callable[[int], float],
        replaces: bool = False,
    ) -> Session:
        return Session(self.method, self.merge, members, group, self._meter, label, self._scale, full, replaces)

    def _restored(self, session: Session) -> Session:
        """Take over what was loaded before the session began."""
        self._loaded.give({session.label: session})
        return session

    def stats(self) -> Stats:
        """Bytes and time so far, on this rank, of all optimizers that use this compressor."""
        states = [state for session in self._sessions for state in session.states()]
        return self._meter.read(waits=not self.method.linear)._replace(vnmse=vnmse(states))

    def state_dict(self) -> dict[str, Any]:
        """What this rank would lose: residuals, warm starts, step counts.

        Returns:
            Tensors, numbers and strings in dicts, so that ``torch.load(..., weights_only=True)`` reads it. It belongs
            to this rank: each rank saves a file of its own.
        """
        return to_dict(self._saved(), lambda leaf: torch.as_tensor(leaf) if isinstance(leaf, np.ndarray) else leaf)

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on from a saved state; at once where the optimizer has made a step, else in its first step.

        Args:
            state: From `state_dict`, of the same rank.

        Raises:
            StateError: If it is not such a state, or of another method, rank, world size or model. Nothing is changed.
        """
        self._load([from_dict(state, lambda leaf: leaf.cpu().numpy() if isinstance(leaf, Tensor) else leaf)])

    def save(self, folder: str | os.PathLike[str]) -> Path:
        """Write the state of this rank to a file in a folder; all ranks save after the same step.

        Returns:
            The file: a ``.npz`` archive without pickle.
        """
        return checkpoint.save(folder, self._saved())

    def load(self, folder: str | os.PathLike[str]) -> None:
        """Go on from files that `save` has written, with any number of ranks; as `load_state_dict` else.

        With as many ranks as have saved, each needs its own file alone; otherwise each needs those of all, and the sum
        of the residuals stays the same.

        Raises:
            StateError: If a file is missing, damaged, or does not fit. Nothing is changed.
        """
        self._load(checkpoint.load(folder, *Group.of(caller.EVERYONE).world))

    def _saved(self) -> Saved:
        sessions = {session.label: session.saved() for session in self._sessions}
        return Saved(to_spec(self.method), *Group.of(caller.EVERYONE).world, {**self._loaded.rest(), **sessions})

    def _load(self, saved: list[Saved]) -> None:
        loaded = Loaded()
        loaded.put(saved, to_spec(self.method))
        loaded.give({session.label: session for session in self._sessions})
        self._loaded = loaded


Compression: Catalogue[TorchCompressor] = Catalogue(TorchCompressor)
"""The methods: ``Compression.none``, ``.fp16``, ``.topk(ratio=0.01)``, ``.parse("topk:ratio=0.01")`` and so on."""
