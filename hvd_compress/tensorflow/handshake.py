"""Do all ranks compress the same gradients in the same way? Asked in the background, while graphs are traced.

Horovod lets ranks trace their models in any order, as long as all of them run what one of them runs. A rank that waited
for the others wherever it traces would wait for ever if they came to that model later.

So ranks speak in rounds. A round happens when all have something to say: that they have traced another list of
gradients, or that they have come to run one and still have no answer. A list is agreed on when all have named it. The
ranks disagree if they have named other lists of what seems to be the same model, or if all of them wait.
"""

from __future__ import annotations

import json
import threading
from collections import Counter
from collections.abc import Callable, Sequence
from functools import reduce
from operator import and_
from typing import Any, NamedTuple

import horovod.tensorflow as hvd
import numpy as np
import tensorflow as tf

from hvd_compress.checkpoint import agreement
from hvd_compress.core.collectives import World
from hvd_compress.tensorflow.transport import GraphTransport

PATIENCE = 30.0
"""Seconds that a rank which traces waits for what the others trace at that time: to be told of a mistake before a graph
runs, where TensorFlow makes errors its own."""

_GLANCE = 0.05
"""Seconds between looks at whether the ranks agree."""

_NAME = "hvd_compress.agreement"


class Said(NamedTuple):
    """Message of a rank in a round.

    Attributes:
        facts: From `agreement.describe`, without what differs between ranks.
        first: Name of the model: the smallest name of its variables, numbers included.
        waiting: Whether the list has been named in an earlier round, and the rank cannot go on without an answer.
        host: Name of the host.
    """

    facts: str
    first: str
    waiting: bool
    host: str


class Question:
    """Agreement of all ranks on the compression of a list of gradients, verified at creation.

    Args:
        facts: From `agreement.describe`.
        first: The smallest name of the variables.
        transport: The ranks.
    """

    def __init__(self, facts: bytes, first: str, transport: GraphTransport) -> None:
        table = json.loads(facts)
        self.said = Said(json.dumps({**table, "job": 0, "host": ""}), first, waiting=False, host=table["host"])
        self.settled = False
        self.error: BaseException | None = None
        self._talk = _talk(transport)
        self._turn = self._talk.join(self)

    def expect(self) -> None:
        """Wait for the round in which it is asked, but not long.

        Raises:
            DisagreementError: If the ranks are known to disagree.
        """
        self._turn.join(PATIENCE)
        if self.error is not None:
            raise self.error

    def meanwhile(self, action: Callable[[], None]) -> None:
        """Perform what waits for all ranks that compress alike.

        Raises:
            DisagreementError: If the ranks disagree, so that some of them never come.
        """
        errors: list[BaseException] = []

        def perform() -> None:
            try:
                action()
            except BaseException as error:
                errors.append(error)

        thread = threading.Thread(target=perform, daemon=True)
        thread.start()
        while thread.is_alive() and self.error is None:
            thread.join(_GLANCE)
        for error in (self.error, *errors):
            if error is not None:
                raise error

    def insist(self) -> None:
        """Wait for the answer, as long as it takes.

        Raises:
            DisagreementError: If the ranks disagree.
        """
        while not self.settled and self.error is None:
            self._talk.join(self, waiting=True).join()
        if self.error is not None:
            raise self.error

    def gate(self) -> list[Any]:
        """Return the dependencies of the first collectives: none, or an op that waits for the answer."""
        if self.settled:
            return []
        if tf.executing_eagerly():
            self.insist()
            return []

        def wait() -> Any:
            self.insist()
            return np.int32(0)

        return [tf.numpy_function(wait, [], tf.int32)]


class _Talk:
    """The rounds of a set of ranks, of which each begins when the one before has ended."""

    def __init__(self, transport: GraphTransport) -> None:
        self._transport = transport
        self._lock = threading.Lock()
        self._last: threading.Thread | None = None
        self._open: list[Question] = []  # asked, and without an answer
        self._named: list[Counter[str]] = []  # by each rank, but not by all
        self._forget()

    def join(self, question: Question, waiting: bool = False) -> threading.Thread:
        """Say something in a round; gives the thread that does it."""
        with self._lock:
            thread = threading.Thread(target=self._run, args=(self._last, question, waiting), daemon=True)
            self._last = thread
            thread.start()
        return thread

    def _run(self, earlier: threading.Thread | None, question: Question, waiting: bool) -> None:
        if earlier is not None:
            earlier.join()
        if not waiting:
            self._open.append(question)
        elif question not in self._open:
            return  # the round before had the answer
        try:
            self._hear(_exchange(question.said._replace(waiting=waiting), self._transport))
        except BaseException as error:  # handed on to those who wait
            self._forget(error)

    def _hear(self, said: Sequence[Said]) -> None:
        for named, one in zip(self._named, said, strict=True):
            named.update([] if one.waiting else [one.facts])
        agreed = reduce(and_, self._named)
        for named in self._named:
            named.subtract(agreed)
        for question in list(self._open):
            if agreed[question.said.facts] > 0:
                agreed[question.said.facts] -= 1
                question.settled = True
                self._open.remove(question)
        alike = len({one.first for one in said}) == 1
        if all(one.waiting for one in said) or alike:
            lines = [json.dumps({**json.loads(one.facts), "host": one.host}) for one in said]
            agreement.check("\n".join(lines).encode())

    def _forget(self, error: BaseException | None = None) -> None:
        """Abandon all open handshakes."""
        for question in self._open:
            question.error = error
        self._open = []
        self._named = [Counter() for _ in range(self._transport.world.size)]


_talks: dict[tuple[int, World], _Talk] = {}


def _talk(transport: GraphTransport) -> _Talk:
    return _talks.setdefault((transport.process_set.process_set_id, transport.world), _Talk(transport))


def _exchange(mine: Said, transport: GraphTransport) -> list[Said]:
    """Messages of all ranks in a round.

    Where all say the same, an allreduce tells: in that a rank that has joined may be missing.
    """
    digests = tf.constant(agreement.digests([mine._replace(host="")]), tf.int64)
    sums = hvd.mpi_ops._allreduce(digests, name=_NAME, op=hvd.Sum, process_set=transport.process_set)
    if all(agreement.equal(sums.numpy().tolist())):
        return [mine] * transport.world.size
    lines = transport.gather_bytes(json.dumps(mine).encode() + b"\n", f"{_NAME}.said").splitlines()
    return [Said(*json.loads(line)) for line in lines]
