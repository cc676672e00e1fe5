"""Several methods of which one is in use at a time: they share the residual."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from hvd_compress.core.bucket import Bucket
from hvd_compress.core.collectives import Exchange, Exchanging, State, World
from hvd_compress.core.method import Method, ReduceScattered, Wrapper
from hvd_compress.core.state_tree import Residual, Role, kinds
from hvd_compress.errors import SpecError
from hvd_compress.methods.cast import Dense
from hvd_compress.methods.wrappers.error_feedback import ErrorFeedback, ErrorFeedbackState
from hvd_compress.methods.wrappers.hierarchy import Hierarchical
from hvd_compress.ops import Ops
from hvd_compress.ops.arrays import Array


class Alternatives(Method):
    """Base class of methods that use one of several others at a time.

    They share the residual: a method with error feedback continues it, another one sends it in its first step, together
    with what the servers of the method before have kept.
    """

    @property
    @abstractmethod
    def methods(self) -> Sequence[Method]:
        """The methods."""

    @abstractmethod
    def turn(self, state: Any) -> tuple[int, int]:
        """Return the numbers of the methods of the last exchange and of the next one."""

    @abstractmethod
    def after(self, state: Any, residual: Array, inner: tuple[State, ...]) -> State:
        """Return the state after an exchange."""

    def active(self, last: int, now: int) -> Method:
        """Return the method of an exchange, given its number and that of the last one."""
        del last
        return self.methods[now]

    def check_no_other_state(self, what: str) -> None:
        """Refuse wrappers whose state would be lost.

        Args:
            what: What they are, as in "phases".

        Raises:
            SpecError: If there is one.
        """
        for method in self.methods:
            if isinstance(method, Wrapper) and not isinstance(method, ErrorFeedback | Hierarchical):
                raise SpecError(
                    f"{what} do not support this form of {method}, whose state would be lost when another one takes its"
                    " turn: take feedback=on or off, without momentum, start, warmup, every, delay, measure and"
                    " preconditioned"
                )

    @property
    def needs_plain_sgd(self) -> bool:
        return any(method.needs_plain_sgd for method in self.methods)

    @property
    def adds_momentum(self) -> bool:
        return any(method.adds_momentum for method in self.methods)

    @property
    def hierarchical(self) -> bool:
        return any(method.hierarchical for method in self.methods)

    def inner(self, ops: Ops, bucket: Bucket, world: World) -> tuple[State, ...]:
        """Return the initial states of the methods, without error feedback: the residual is kept once."""
        return tuple(bare(method).init(ops, bucket, world) for method in self.methods)

    def residual(self, state: Any) -> Array:
        residual: Array = state.residual
        return residual

    def exchange(
        self, ops: Ops, bucket: Bucket, x: Array, state: Any, world: World, return_error: bool = False
    ) -> Exchanging:
        return self._sum(ops, bucket, x, state, world, scatters=False)

    @property
    def supports_reduce_scatter(self) -> bool:
        return all(method.supports_reduce_scatter for method in self.methods)

    def reduce_scatter(
        self, ops: Ops, bucket: Bucket, x: Array, state: Any, world: World, return_error: bool = False
    ) -> Exchanging:
        return self._sum(ops, bucket, x, state, world, scatters=True)

    def _sum(self, ops: Ops, bucket: Bucket, x: Array, state: Any, world: World, scatters: bool) -> Exchanging:
        """Sum by the active method, in full or by its reduce-scatter."""
        last, now = self.turn(state)
        active, inners = self.active(last, now), list(state.inner)
        method = ReduceScattered(active) if scatters else active
        if now != last and _may_hold(inners[last]):
            x, inners[last] = bare(self.methods[last]).flush(ops, bucket, x, inners[last], world)
        if isinstance(active, ErrorFeedback):
            before = ErrorFeedbackState(state.residual, inners[now])
            exchange = yield from method.exchange(ops, bucket, x, before, world)
            residual, inners[now] = exchange.state
        else:
            exchange = yield from method.exchange(ops, bucket, x, inners[now], world)
            residual, inners[now] = ops.zeros((bucket.numel,), bucket.dtype), exchange.state
        return Exchange(exchange.total, self.after(state, residual, tuple(inners)))


def bare(method: Method) -> Method:
    """Return a method without error feedback."""
    return method.inner if isinstance(method, ErrorFeedback) else method


def _may_hold(state: State) -> bool:
    """Return whether `Method.flush` may find something in a state."""
    return any(kind.role in (Role.SERVED, Role.PASSING) for kind in kinds(state).values())


class PhasesState(NamedTuple):
    """State of phases.

    Attributes:
        step: Number of exchanges so far.
        residual: Residual of this rank, which phases share.
        inner: States of the methods of all phases.
    """

    step: int
    residual: Residual
    inner: tuple[State, ...]


@dataclass(frozen=True)
class Phases(Alternatives):
    """Change the method during training.

    Phases share the residual: a method with error feedback continues it, another one sends it in its first step. A
    phase also sends what the servers of the phase before have kept.

    Args:
        phases: First step of each phase, counted from 0, with its method; the first phase starts at step 0.
    """

    phases: tuple[tuple[int, Method], ...]

    def __post_init__(self) -> None:
        self.check_no_other_state("phases")

    @property
    def methods(self) -> Sequence[Method]:
        return [method for _, method in self.phases]

    def turn(self, state: PhasesState) -> tuple[int, int]:
        now = self._number(state.step)
        return self._number(state.step - 1) if state.step else now, now

    def _number(self, step: int) -> int:
        return max(number for number, (begin, _) in enumerate(self.phases) if step >= begin)

    def init(self, ops: Ops, bucket: Bucket, world: World) -> PhasesState:
        return PhasesState(0, ops.zeros((bucket.numel,), bucket.dtype), self.inner(ops, bucket, world))

    def after(self, state: PhasesState, residual: Array, inner: tuple[State, ...]) -> PhasesState:
        return PhasesState(state.step + 1, residual, inner)


class ChoiceState(NamedTuple):
    """State of a choice.

    Attributes:
        chosen: Number of the candidate of the next exchange.
        last: Number of the candidate of the last exchange.
        residual: Residual of this rank, which the candidates share.
        inner: States of all candidates.
    """

    chosen: int
    last: int
    residual: Residual
    inner: tuple[State, ...]


@dataclass(frozen=True)
class Choice(Alternatives):
    """Use one of several candidates, which can be changed between steps; see `hvd_compress.engine.race`.

    The first step of a linear candidate after one that keeps a residual is uncompressed. So no residual is left after
    it, and later sums need no exchange of this class.

    Args:
        candidates: The candidates; the first one is chosen at first.
    """

    candidates: tuple[Method, ...]

    def __post_init__(self) -> None:
        self.check_no_other_state("candidates")

    @property
    def methods(self) -> Sequence[Method]:
        return self.candidates

    @property
    def merges(self) -> bool:
        return any(self.linear_method(number) is None for number in range(len(self.candidates)))

    @property
    def supports_reduce_scatter(self) -> bool:
        return any(method.supports_reduce_scatter for method in self.methods)  # a race leaves out the others

    def turn(self, state: ChoiceState) -> tuple[int, int]:
        return state.last, state.chosen

    def init(self, ops: Ops, bucket: Bucket, world: World) -> ChoiceState:
        return ChoiceState(0, 0, ops.zeros((bucket.numel,), bucket.dtype), self.inner(ops, bucket, world))

    def after(self, state: ChoiceState, residual: Array, inner: tuple[State, ...]) -> ChoiceState:
        return ChoiceState(state.chosen, state.chosen, residual, inner)

    def active(self, last: int, now: int) -> Method:
        sends_all = now != last and self.linear_method(now) is not None and self.keeps(last)
        return Dense() if sends_all else self.candidates[now]

    def keeps(self, number: int) -> bool:
        """Return whether a candidate may keep something back."""
        return not isinstance(self.candidates[number], Dense)

    def is_clean(self, state: ChoiceState) -> bool:
        """Return whether no residual is left, if the chosen candidate is linear."""
        return state.chosen == state.last or not self.keeps(state.last)

    def is_plain(self, state: ChoiceState) -> bool:
        """Return whether the next exchange sums gradients as they are: nothing is compressed, and no residual left."""
        return state.chosen == state.last and not self.keeps(state.last)

    def choose(self, state: ChoiceState, number: int) -> ChoiceState:
        """Return the state with another candidate chosen."""
        return state._replace(chosen=number)

    def linear_method(self, number: int) -> Method | None:
        """Return a candidate without its error feedback, if it is linear."""
        method = bare(self.candidates[number])
        return method if method.linear else None


def choice_of(method: Method) -> Choice | None:
    """Return the choice that a method is, or whose reduce-scatter it is: the state is that of the choice."""
    inner = method.inner if isinstance(method, ReduceScattered) else method
    return inner if isinstance(inner, Choice) else None


def uncompressed(method: Method) -> Method:
    """Return the sum of gradients as they are, as a reduce-scatter if a method is one."""
    return ReduceScattered(Dense()) if isinstance(method, ReduceScattered) else Dense()


def unable(method: Method) -> set[int]:
    """Return the numbers of the candidates that cannot take part, if the method is the reduce-scatter of a choice."""
    choice = choice_of(method)
    candidates = () if choice is None or choice is method else choice.candidates
    return {number for number, one in enumerate(candidates) if not one.supports_reduce_scatter}
