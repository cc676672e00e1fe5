"""Meetings of ranks that need not all come, in the store of a process group."""

from __future__ import annotations

import time

from torch._C._distributed_c10d import Store  # as torch.distributed exports it, but with a type

from hvd_compress.errors import StateError
from hvd_compress.local.stepper import Meeting, Stage
from hvd_compress.torch.waiting import nap


class Meetings:
    """The meetings of a job, which all ranks count alike.

    A rank tells the store that it is there. As soon as all are, or a quorum has waited for its patience, one of them
    writes down who takes part, and what is written first holds for all. A rank that comes too late asks to be admitted
    to the next meeting.

    Args:
        store: The store, whose keys no other job has.
        rank: This rank.
        size: Number of ranks.
        quorum: Least number of ranks that meet.
        patience: Seconds for which a quorum waits for the others.
        limit: Seconds after which it is an error that there is no quorum.
    """

    def __init__(self, store: Store, rank: int, size: int, quorum: int, patience: float, limit: float) -> None:
        self._store, self._rank, self._size = store, rank, size
        self._quorum, self._patience, self._limit = quorum, patience, limit
        self._number = 0

    def meet(self, stage: Stage, step: int) -> Meeting:
        """Take part in the next meeting, or in a later one as a newcomer.

        Those that have ended go before those that have not, and those that have made fewer steps before others: the
        others are newcomers.

        Args:
            stage: Where this rank is.
            step: Its number of steps.

        Returns:
            The ranks that have met.

        Raises:
            StateError: If no quorum comes within the time limit.
        """
        found = self._held(stage, step)
        while self._rank not in found.everyone:
            found = self._held(Stage.LATE, step)
        return found

    def _held(self, stage: Stage, step: int) -> Meeting:
        """Wait until a meeting is held, and go on to the next number."""
        begin, decision = time.monotonic(), self._key("ranks")
        self._store.set(self._key(self._rank), f"{min(stage, Stage.END):d} {-step}")
        patience = self._limit if stage is Stage.CLOSE else self._patience
        limit = self._limit * (2 if stage is Stage.LATE else 1)  # others may be waiting for all, up to theirs
        while not self._store.check([decision]):
            seconds, present = time.monotonic() - begin, self._present()
            here = [rank for rank, one in present.items() if one == max(present.values())]
            enough = len(present) == self._size or (len(here) >= self._quorum and seconds >= patience)
            if self._rank in here and stage is not Stage.LATE and enough:
                newcomers = [rank for rank in present if rank not in here and stage is not Stage.END]
                self._store.compare_set(decision, "", f"{_words(here)};{_words(newcomers)}")
            elif seconds > limit:
                raise StateError(
                    f"only the ranks {here} have come within {seconds:.0f} s, the time limit of their process group,"
                    f" and quorum={self._quorum}: the others have ended or are slower; resume all from a save"
                )
            else:
                nap(begin)
        here, newcomers = map(_ranks, self._store.get(decision).decode().split(";"))
        self._number += 1
        return Meeting(here, newcomers)

    def _present(self) -> dict[int, tuple[int, int]]:
        """Return the ranks that are there, with their stage and their steps."""
        there = [rank for rank in range(self._size) if self._store.check([self._key(rank)])]
        told = {rank: self._store.get(self._key(rank)).decode().split() for rank in there}
        return {rank: (int(stage), int(step)) for rank, (stage, step) in told.items()}

    def _key(self, what: str | int) -> str:
        return f"{self._number}.{what}"


def _words(ranks: list[int]) -> str:
    return ",".join(map(str, ranks))


def _ranks(words: str) -> list[int]:
    return [int(word) for word in words.split(",") if word]
