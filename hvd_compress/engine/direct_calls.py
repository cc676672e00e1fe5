"""Direct calls, as of ``hvd.allreduce``: warn of what loses the states of their names, and bound their number."""

from __future__ import annotations

import logging
from collections.abc import Hashable

MANY = 1000
"""Number of names at which a warning is logged."""

MOST = 10_000
"""Number of names whose states are kept."""

RENEWED = 10
"""Number of compressors in a row with one step each at which a warning is logged."""

_LOG = logging.getLogger("hvd_compress")
_NEW: dict[Hashable, int] = {}
"""Number of compressors in a row that have made no second step with a key."""


class Names:
    """Keys of the direct calls of a compressor, those that were used last at the end.

    Args:
        function: The function that is called, for messages.
    """

    def __init__(self, function: str = "hvd.allreduce") -> None:
        self._function = function
        self._keys: dict[Hashable, None] = {}

    def use(self, key: Hashable, rank: int) -> Hashable | None:
        """Note a call, and return a key whose state is to be dropped, if there are too many.

        Names that contain the number of the step never repeat and fill the memory, so many names cause a warning.

        Args:
            key: Key of the call.
            rank: This rank; rank 0 warns.
        """
        new = key not in self._keys
        self._keys.pop(key, None)
        self._keys[key] = None
        if new and len(self._keys) == MANY and rank == 0:
            _LOG.warning(
                "direct calls of %s have used %d names or shapes so far, and a residual is kept for each, at"
                " most for the last %d: use one name per tensor, without the number of the step in it",
                self._function,
                MANY,
                MOST,
            )
        if len(self._keys) <= MOST:
            return None
        oldest = next(iter(self._keys))
        del self._keys[oldest]
        return oldest


def begin(key: Hashable, what: str, rank: int) -> None:
    """Note that a compressor makes its first step with a key; warn if others before it have made no second one.

    Args:
        key: The names of a call, or the variables of a tape.
        what: Description of the call, for the warning.
        rank: This rank; rank 0 warns.
    """
    if len(_NEW) >= MOST:
        _NEW.clear()
    _NEW[key] = _NEW.get(key, 0) + 1
    if _NEW[key] == RENEWED and rank == 0:
        _LOG.warning(
            "%s was given %d Compression objects that have made one step each: what is not sent in a step is kept in"
            " the object, so it is lost; make the object once, outside of the step",
            what,
            RENEWED,
        )


def go_on(key: Hashable) -> None:
    """Note that a compressor makes a further step with a key."""
    _NEW.pop(key, None)
