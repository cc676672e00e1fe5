"""One small allreduce, by which ranks agree that they are set up alike and that all gradients are finite."""

from __future__ import annotations

import json
import secrets
import zlib
from typing import Any, NamedTuple

import horovod.tensorflow as hvd
import numpy as np

from hvd_compress.checkpoint import agreement
from hvd_compress.core.collectives import AllReduce
from hvd_compress.errors import DisagreementError
from hvd_compress.tensorflow.transport import EagerTransport

BYTES = 80
"""Bytes that a rank sends."""

_NAME = "hvd_compress.verdict"

_DIFFERENT = (
    "the ranks disagree on the restored state: they have done {} to {} steps, of the jobs {} to {} (0 for a new one);"
    " give all ranks the checkpoint of the same step of the same job, and make a new compression object if Horovod was"
    " started again with other ranks"
)

RESTARTED = (
    "Horovod was shut down and started again with other ranks, but what is kept between steps belongs to the former"
    " ones: call compression.save(folder) before hvd.shutdown(); after hvd.init(), make a new compression object, a new"
    " optimizer or tape and a new tf.function with it, and load the folder (without it, residuals begin at zero)"
)


class Facts(NamedTuple):
    """Facts that must be equal on all ranks.

    Attributes:
        line: From `agreement.describe`.
        checksum: Of what is compared.
        nodes: What may differ; None for nothing.
    """

    line: bytes
    checksum: int
    nodes: Any

    @classmethod
    def of(cls, line: bytes) -> Facts:
        """Return the facts of a line of `agreement.describe`."""
        facts = agreement.compared(line)
        nodes = facts.pop(agreement.MAY_DIFFER, None)
        return cls(line, zlib.crc32(json.dumps(facts).encode()), nodes)


class Vote(NamedTuple):
    """Announcement of a rank at the beginning of a step.

    Attributes:
        facts: What must be equal on all ranks.
        nonfinite: Number of its gradients that are not finite.
        steps: Number of its steps so far.
        job: Number of the job that its state is of; 0 for a new one.
        rank: Its number among all ranks when the state was made; None without a state.
    """

    facts: Facts
    nonfinite: int = 0
    steps: int = 0
    job: int = 0
    rank: int | None = None


class StepVerdict(NamedTuple):
    """Result of the votes, the same on all ranks.

    Attributes:
        finite: Whether all gradients are finite.
        job: Number of what the ranks do together.
        nodes: Whether all nodes have as many ranks, if that was asked for.
    """

    finite: bool
    job: int
    nodes: bool


def decide(vote: Vote, transport: EagerTransport) -> StepVerdict:
    """Add up the votes of all ranks. A sum tells, as a rank that has called ``hvd.join()`` adds nothing to it.

    Raises:
        DisagreementError: If the ranks differ in method, options or model, have done other numbers of steps, go on
            with other jobs, or have other numbers among the ranks since Horovod was started again.
    """
    moved = vote.rank is not None and vote.rank != hvd.rank()
    drawn = 1 + secrets.randbits(40)  # leaves the user's random generators untouched
    ranks, *others = agreement.digests([vote.facts.checksum, (vote.steps, vote.job), vote.facts.nodes])
    mine = np.array([vote.nonfinite, moved, drawn, ranks, *others], np.int64)
    sums = transport.start(AllReduce(mine), _NAME).result()
    nonfinite, moves, drawn, *digests = sums.tolist()
    alike, same_state, nodes = agreement.equal(digests)
    if not alike:
        agreement.check(transport.gather_bytes(vote.facts.line, f"{_NAME}.facts"))
    if moves:
        raise DisagreementError(RESTARTED)
    if not same_state:
        ends = np.array([-vote.steps, vote.steps, -vote.job, vote.job], np.int64)
        least, most, first, last = transport.start(AllReduce(ends, "max"), f"{_NAME}.state").result().tolist()
        raise DisagreementError(_DIFFERENT.format(-least, most, -first, last))
    return StepVerdict(nonfinite == 0, vote.job or drawn, nodes)
