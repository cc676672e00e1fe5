"""Save and load the state of a compressor, in the same way for each framework."""

from __future__ import annotations

import logging
import os
from pathlib import Path

from hvd_compress.checkpoint import state_files
from hvd_compress.checkpoint.state_dict import Saved
from hvd_compress.core.collectives import World

_LOG = logging.getLogger("hvd_compress")


class SaveLoadMixin:
    """Mixin for compressors that save their state to files, one per rank."""

    _last: state_files.Written | None = None
    """The last save."""
    _told = False
    """Whether the warning about ranks that do not save has been logged."""

    def save(self, folder: str | os.PathLike[str], step: int | None = None) -> Path:
        """Save the state of this rank to a file in a folder that all ranks share.

        Call it on all ranks after the same step. Each save writes new files; files older than the last complete save
        are removed. So use one folder per compressor, within the checkpoint that it belongs to.

        Args:
            folder: The folder.
            step: Step of the training, for `load`.

        Returns:
            Path of the file, a ``.npz`` archive without pickle.

        Raises:
            StateError: If another compressor saves to the folder, too.
        """
        saved = self._saved()._replace(step=step)
        if self._last is not None and not self._told and (missing := self._last.missing(saved)):
            self._told = True
            _LOG.warning(
                "the ranks %s have not saved to %s, and it cannot be loaded without their files: call compression.save"
                " on all ranks, after the same step, and not inside 'if rank == 0:'; if each host has a disk of its"
                " own, copy the files of all hosts into each folder before you load it",
                missing,
                self._last.path.parent,
            )
        path = state_files.save(folder, saved)
        self._last = state_files.Written.of(path, saved)
        return path

    def load(self, folder: str | os.PathLike[str], step: int | None = None) -> None:
        """Load the newest complete save in a folder, before or after the first step.

        Incomplete saves are skipped with a warning. If the world size has changed, residuals are resharded and their
        sum is preserved.

        Args:
            folder: The folder.
            step: Load the save of this ``step`` instead of the newest one.

        Raises:
            StateError: If no save is complete or of this step, a file is damaged, or a state does not match. Nothing
                is changed.
        """
        world = self._world()
        self._load(state_files.load(folder, world.rank, world.size, step))

    def _world(self) -> World:
        """Return all ranks of the job."""
        raise NotImplementedError

    def _saved(self) -> Saved:
        """Return the state of this rank."""
        raise NotImplementedError

    def _load(self, saved: list[Saved]) -> None:
        """Load the saved states of one or all ranks.

        Raises:
            StateError: If they do not match. Nothing is changed.
        """
        raise NotImplementedError
