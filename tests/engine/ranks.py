"""What a test on ranks as threads may ask for: who it is, what the others have, and what it trains."""

from __future__ import annotations

import contextlib
import pickle
import threading
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator
from dataclasses import replace
from itertools import count
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from hvd_compress.checkpoint import agreement
from hvd_compress.core.bucketing import Gradient, Merge
from hvd_compress.core.collectives import AllGather, World
from hvd_compress.core.router import Router
from hvd_compress.distributed.verdict import GroupVerdict
from hvd_compress.engine.api import Catalogue
from hvd_compress.torch.buckets import Member
from hvd_compress.torch.compressor import ReducingCompressor
from hvd_compress.torch.entry import Entry
from hvd_compress.torch.reducer import Reducer
from hvd_compress.torch.registry import Registry
from hvd_compress.transport.rank_threads import ThreadTransport


class _Here(threading.local):
    """The transport of this thread's rank, and another one for questions of the test itself."""

    transport: ThreadTransport
    questions: ThreadTransport
    asked: Iterator[int]
    made = 0


_HERE = _Here()


def enter(transport: ThreadTransport) -> None:
    """Make this thread a rank."""
    _HERE.transport = transport
    _HERE.questions = replace(transport, channel="test", _counts=Counter())
    _HERE.asked = count()
    _HERE.made = 0


def transport() -> ThreadTransport:
    """The transport of this rank."""
    return _HERE.transport.renewed()


def restart(members: list[int], epoch: int) -> None:
    """Go on with some of the ranks of the beginning, as an elastic job does."""
    ranks, thread = _HERE.transport.ranks, _HERE.transport.thread
    ranks.restart(thread, members, epoch)
    enter(ranks.current(thread))


def rank() -> int:
    """The number of this rank."""
    return transport().world.rank


def size() -> int:
    """The number of ranks."""
    return transport().world.size


def everyone(value: object) -> list[Any]:
    """The values of all ranks."""
    data = np.frombuffer(pickle.dumps(value), np.uint8)
    lengths = np.frombuffer(np.int64(len(data)).tobytes(), np.uint8)
    number = next(_HERE.asked)
    start = _HERE.questions.start
    ends = np.cumsum(np.asarray(start(AllGather(lengths), f"test.{number}.n").result()).view(np.int64).ravel())
    whole = np.asarray(start(AllGather(data, ragged=True), f"test.{number}").result())
    return [pickle.loads(part.tobytes()) for part in np.split(whole, ends[:-1])]


def assert_ranks_equal(tensor: Tensor) -> None:
    """All ranks hold the same bits."""
    for other in everyone(tensor):
        assert torch.equal(other, tensor)


class _Named:
    """A transport that gives names to collectives without one."""

    def __init__(self, transport: ThreadTransport, name: str) -> None:
        self._transport = transport
        self._names = (f"{name}.{number}" for number in count())

    def start(self, message: Any, name: str) -> Any:
        return self._transport.start(message, name or next(self._names))


CURE = "make a new optimizer with the same compression object"


class Compressor(ReducingCompressor):
    """A compressor whose ranks are threads."""

    def __init__(self, method: Router, merge: Merge) -> None:
        super().__init__(method, merge, Registry(lambda optimizer: bool(optimizer.taken), CURE), CURE)
        _HERE.made += 1
        self._number = _HERE.made
        self._steps: defaultdict[tuple[str, int], Iterator[int]] = defaultdict(count)

    def _world(self) -> World:
        return transport().world

    def begin(self, optimizer: Optimizer, named: list[tuple[str, Tensor]], mean: bool) -> Reducer:
        """Return the reducer of an optimizer."""
        label = self._registry.label(
            agreement.label([Gradient(name, (), "") for name, _ in named]), {id(p) for _, p in named}
        )
        here = transport().apart()

        def make_verdict(world: World, asking: bool, undoing: bool) -> GroupVerdict:
            named = _Named(transport(), f"votes.{self._number}.{label}.{next(self._steps[label, transport().number])}")
            return GroupVerdict(named, 1 / world.size if mean else 1.0, asking, undoing, self._meter.count)  # type: ignore[arg-type]

        members = [Member(id(p), name, p) for name, p in named]
        reducer = Reducer(self._common, members, here, make_verdict, label, replaces=True)
        reducer.watch([optimizer.local])
        self._registry.begin(optimizer, reducer)
        return self._restored(reducer)


Compression: Catalogue[Compressor] = Catalogue(Compressor)


class Optimizer:
    """SGD that reduces gradients during the backward pass, as Horovod's does.

    Args:
        model: The model; its parameters that are trained now are reduced.
        compression: The compressor.
        lr: Learning rate.
        momentum: Of SGD.
        passes: Backward passes per step.
        mean: Whether gradients are averaged, or summed.
    """

    def __init__(
        self,
        model: nn.Module,
        compression: Compressor,
        lr: float = 0.1,
        momentum: float = 0.0,
        passes: int = 1,
        mean: bool = True,
    ) -> None:
        self.local = torch.optim.SGD(model.parameters(), lr=lr, momentum=momentum)
        self._compression = compression
        self._named: list[tuple[str, Tensor]] = [(name, p) for name, p in model.named_parameters() if p.requires_grad]
        self._mean = mean
        self._passes = passes
        self._left: dict[Tensor, int] = {}
        self._skips = False
        self._reducer: Reducer | None = None
        self.taken: dict[Tensor, tuple[Tensor, Entry]] = {}
        self._hooks = [p.register_post_accumulate_grad_hook(self._hook) for _, p in self._named]  # type: ignore[no-untyped-call]

    def close(self) -> None:
        """Remove the hooks."""
        for hook in self._hooks:
            hook.remove()

    def _hook(self, parameter: Tensor) -> None:
        left = self._left[parameter] = self._left.get(parameter, self._passes) - 1
        if not left:
            self._add(parameter)

    def _add(self, parameter: Tensor) -> None:
        with self._compression._lock:
            if self._reducer is None:
                self._reducer = self._compression.begin(self, self._named, self._mean)
            if not self.taken and self._reducer.broken_off():
                self._reducer.abort()
            assert parameter.grad is not None
            self.taken[parameter] = self._reducer.add(id(parameter), parameter.grad, None, parameter)

    def synchronize(self) -> None:
        """Reduce what has no gradient yet, and wait for all results."""
        for _, parameter in self._named:
            if parameter not in self.taken:
                parameter.grad = torch.zeros_like(parameter) if parameter.grad is None else parameter.grad
                self._add(parameter)
        taken, self.taken, self._left = self.taken, {}, {}
        assert self._reducer is not None
        with self._compression._lock:
            for placeholder, entry in taken.values():
                self._reducer.take(placeholder, entry)

    @contextlib.contextmanager
    def skip_synchronize(self) -> Iterator[None]:
        """Step without a reduction."""
        self._skips = True
        yield
        self._skips = False

    def step(self) -> None:
        """Reduce the gradients, and apply them."""
        if not self._skips:
            self.synchronize()
        self.local.step()

    def zero_grad(self) -> None:
        """Forget the gradients."""
        self.local.zero_grad()

    def state_dict(self) -> dict[str, Any]:
        """The state of SGD."""
        return self.local.state_dict()

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Load it, and forget a step that has begun."""
        self.taken, self._left = {}, {}
        self.local.load_state_dict(state)


def make_model() -> nn.Sequential:
    """The same weights on all ranks."""
    with torch.random.fork_rng():
        torch.manual_seed(0)
        return nn.Sequential(nn.Linear(32, 48), nn.ReLU(), nn.Linear(48, 64), nn.ReLU(), nn.Linear(64, 10))


def batch(step: int) -> tuple[Tensor, Tensor]:
    """Another batch for each rank and step."""
    generator = torch.Generator().manual_seed(1000 * step + rank())
    x = torch.randn(16, 32, generator=generator)
    return x, x[:, :10].argmax(1)


Loss = Callable[..., Tensor]


class Job:
    """A model with its optimizer.

    Args:
        compression: A compressor, or its spec: then with two buckets, as a search for better ones goes by the clock.
        model: The model.
        **options: Of `Optimizer`.
    """

    def __init__(self, compression: str | Compressor, model: nn.Module | None = None, **options: Any) -> None:
        self.model = make_model() if model is None else model
        made = Compression.parse(compression, merge=2) if isinstance(compression, str) else compression
        self.compression: Compressor = made
        self.optimizer = Optimizer(self.model, made, **options)
        self.passes = options.get("passes", 1)

    def backward(self, step: int, loss: Loss | None = None) -> None:
        """Compute the gradients of a step."""
        for part in range(self.passes):
            x, y = batch(step * self.passes + part)
            value = loss(self.model, x, y) if loss else nn.functional.cross_entropy(self.model(x), y)
            value.backward()  # type: ignore[no-untyped-call]

    def run(self, steps: range | int, loss: Loss | None = None) -> Job:
        """Train."""
        for step in range(steps) if isinstance(steps, int) else steps:
            self.backward(step, loss)
            self.optimizer.step()
            self.optimizer.zero_grad()
        return self

    @property
    def weights(self) -> Tensor:
        """All parameters, flat, as float64."""
        return torch.cat([p.detach().flatten().double() for p in self.model.parameters()])

    @property
    def reducer(self) -> Reducer:
        """The only reducer of the compressor."""
        (reducer,) = self.compression._registry
        return reducer


def leaves_of(compression: Compressor) -> dict[str, Tensor]:
    """The state of a compressor as flat leaves; empty for methods without any."""
    sessions = compression.state_dict()["sessions"].items()
    slots = [(f"{label}.{key}", leaves) for label, session in sessions for key, leaves in session["buckets"].items()]
    return {f"{key}.{path}": torch.as_tensor(leaf) for key, leaves in slots for path, leaf in leaves.items()}
