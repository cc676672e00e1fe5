"""Saving and loading of a compressor's state, the same in each framework."""

from __future__ import annotations

import os
from pathlib import Path

from hvd_compress.checkpoint import state_files
from hvd_compress.checkpoint.state_dict import Saved
from hvd_compress.core.collectives import World


class Saving:
    """A compressor whose state is saved in files, one for each rank."""

    def save(self, folder: str | os.PathLike[str]) -> Path:
        """Write the state of this rank to a file in a folder that all ranks share; all save after the same step.

        Each save has files of its own. Those of saves before the last complete one are removed.

        Returns:
            The file: a ``.npz`` archive without pickle.
        """
        return state_files.save(folder, self._saved())

    def load(self, folder: str | os.PathLike[str]) -> None:
        """Go on from the newest complete save in a folder, of any number of ranks; before the first step, or after it.

        Saves that are not complete are skipped with a warning. With another number of ranks than has saved, the
        residuals are dealt out, and their sum stays the same.

        Raises:
            StateError: If no save is complete, a file is damaged, or the states do not fit. Nothing is changed.
        """
        world = self._world()
        self._load(state_files.load(folder, world.rank, world.size))

    def _world(self) -> World:
        """Return all ranks of the job."""
        raise NotImplementedError

    def _saved(self) -> Saved:
        """Return the state of this rank."""
        raise NotImplementedError

    def _load(self, saved: list[Saved]) -> None:
        """Go on from states that ranks have saved.

        Raises:
            StateError: If they do not fit. Nothing is changed.
        """
        raise NotImplementedError
