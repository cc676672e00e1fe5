"""Find the files of a save, and check that they are complete and belong together.

Ranks save and load without communication. The job number that they agreed on before the first exchange
(`hvd_compress.checkpoint.agreement.check`) and their number of steps identify a save.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import NamedTuple, TypeAlias

from hvd_compress.checkpoint.state_dict import Saved, SavedSession

_NAME = re.compile(r"hvd_compress-(\d{6,})-(\d{5,})-of-(\d{5,})\.npz")

Moment: TypeAlias = tuple[int, int]
"""Job and steps."""


class File(NamedTuple):
    """File of a rank.

    Attributes:
        number: Number of the save, counted up in the folder.
        rank: The rank.
        size: World size.
    """

    number: int
    rank: int
    size: int

    def path(self, folder: Path) -> Path:
        """Return the path of the file."""
        return folder / f"hvd_compress-{self.number:06d}-{self.rank:05d}-of-{self.size:05d}.npz"

    def partial(self, folder: Path) -> Path:
        """Return the temporary path of the file while it is written."""
        return self.path(folder).with_suffix(".partial")


def files_in(folder: Path) -> list[File]:
    """List the files of all saves and ranks, the newest save first."""
    if not folder.is_dir():
        return []
    matches = (_NAME.fullmatch(path.name) for path in folder.iterdir())
    return sorted((File(*map(int, match.groups())) for match in matches if match), key=lambda f: (-f.number, f))


def number_of(older: Saved | None, mine: Saved, highest: int) -> int:
    """Return the number of the save that a rank's file belongs to.

    Args:
        older: File with the highest number in the folder: that of this rank, or else of any other; None if there is no
            readable one.
        mine: State to save.
        highest: Highest number in the folder, or 0.
    """
    if older is None or older.size != mine.size:
        return highest + 1
    if older.rank == mine.rank:
        again = identity(mine) and identity(older) == identity(mine)
    else:
        again = _may_belong_together(older, mine)
    return highest if again else highest + 1


def identity(saved: Saved) -> set[tuple[str, int, int, int, int]]:
    """Return the identifiers of the sessions in a file; empty if it holds no state."""
    return {
        (name, session.job, session.steps, session.rank, session.size)
        for part in (saved, *saved.carried)
        for name, session in part.sessions.items()
    }


def follows(mine: Saved, older: Saved) -> bool:
    """Return whether a rank's state is a later one of the same job, so that its ranks have exchanged since then."""
    both = mine.sessions.keys() & older.sessions.keys()
    pairs = [(mine.sessions[name], older.sessions[name]) for name in both]
    return any(now.job == then.job and now.steps > then.steps for now, then in pairs)


def _may_belong_together(a: Saved, b: Saved) -> bool:
    """Return whether the files of two ranks may be of the same save."""
    ours = {name: _moment(session) for name, session in a.sessions.items() if b.rank in session.members}
    theirs = {name: _moment(session) for name, session in b.sessions.items() if a.rank in session.members}
    both = ours.keys() & theirs.keys()
    if (ours or theirs) and not both:
        return False
    # Ranks that never meet have different job numbers.
    names = a.sessions.keys() & b.sessions.keys() - both
    return all(ours[name] == theirs[name] for name in both) and all(
        a.sessions[name].steps == b.sessions[name].steps for name in names
    )


def _moment(session: SavedSession) -> Moment:
    return session.job, session.steps


def flaw(found: Sequence[Saved], size: int) -> str:
    """Return why the files of a save cannot be loaded; empty if they can.

    It needs the files of the ranks that trained together: others have nothing to save.

    Args:
        found: The files, without their arrays.
        size: World size when they were saved.
    """
    names = {name for one in found for name in one.sessions}
    ranks = {rank for one in found for session in one.sessions.values() for rank in session.members} or set(range(size))
    missing = sorted(ranks - {one.rank for one in found})
    if missing:
        few = ", ".join(map(str, missing[:5])) + (", ..." if len(missing) > 5 else "")
        return f"the files of {len(missing)} of {len(ranks)} ranks are missing ({few})"
    known = common(found)
    if names and not names & known:
        return "its files are of different saves"
    return next((reason for name in sorted(known) for reason in _flaws(name, found)), "")


def common(every: Sequence[Saved]) -> set[str]:
    """Return the names of the sessions that can be restored.

    A session that is missing in the file of one of its ranks belongs to a deleted model, which some ranks noticed
    earlier.
    """
    names = {name for one in every for part in (one, *one.carried) for name in part.sessions}
    has = {one.rank: one.sessions.keys() for one in every}
    held = [(name, rank) for one in every for name, session in one.sessions.items() for rank in session.members]
    return names - {name for name, rank in held if name not in has.get(rank, ())}


def needed(found: Sequence[Saved], rank: int, size: int) -> list[Saved]:
    """Return the states of a complete save that a rank needs, limited to the sessions that it restores.

    Args:
        found: The states of all ranks that saved.
        rank: This rank.
        size: Current world size.
    """
    names = common(found)
    chosen = []
    for one in found:
        own = one.rank == rank or one.size != size
        if own or one.carried:
            chosen.append(one._replace(sessions={n: s for n, s in one.sessions.items() if own and n in names}))
    return chosen


def _flaws(name: str, every: Sequence[Saved]) -> Iterator[str]:
    """Yield the faults of a session's states."""
    groups: dict[int, list[SavedSession]] = {}
    for one in every:
        for part in (one, *one.carried):
            if name in part.sessions:
                groups.setdefault(part.sessions[name].job, []).append(part.sessions[name])
    for sessions in groups.values():
        steps = sorted({session.steps for session in sessions})
        if len(steps) > 1:
            yield f"its files are of different saves (steps {', '.join(map(str, steps))})"
        elif sorted(session.rank for session in sessions) != list(range(sessions[0].size)):
            yield "its files are of different jobs"
        elif len({(session.shared, repr(session.merge)) for session in sessions}) > 1:
            yield "the ranks had diverged when they saved it: state that must be equal on all ranks is not"
