"""What happens in an elastic job, and what its workers write down."""

from __future__ import annotations

import json
import os
import signal
import time
from pathlib import Path
from typing import Any

import numpy as np

from hvd_compress.checkpoint import elastic

HERE, VICTIM = "localhost", "127.0.0.1"
"""Names of this machine, which Horovod takes for different hosts."""


class Scene:
    """Three workers. The one on the host `VICTIM` is killed; then this machine has a third name, and a worker joins.

    Args:
        folder: Where the list of hosts is, and what the workers write.

    Attributes:
        steps: How many there are.
        commit_every: Steps between two commits.
    """

    steps = 60
    commit_every = 5
    fatal = 23

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def before(self, step: int) -> None:
        """Called before each step."""
        if step == self.fatal and os.environ["HOROVOD_HOSTNAME"] == VICTIM:
            (self.folder / "hosts").write_text(f"{HERE}:2\n{os.uname().nodename}:1\n")
            os.kill(os.getpid(), signal.SIGKILL)


class Diary:
    """One file for each worker: when it entered the training loop, and what it kept when the ranks had changed.

    Args:
        scene: What happens.
    """

    def __init__(self, scene: Scene) -> None:
        self._path = scene.folder / f"worker{os.getpid()}.json"
        self._entries: list[dict[str, Any]] = []
        self._watch()

    def _write(self, **entry: Any) -> None:
        self._entries.append(entry)
        self._path.write_text(json.dumps(self._entries))

    def enter(self, rank: int, size: int, step: int) -> None:
        """The training function was called."""
        self._write(event="enter", host=os.environ["HOROVOD_HOSTNAME"], rank=rank, size=size, step=step)

    def end(self, rank: int, equal: bool) -> None:
        """Training is over."""
        self._write(event="end", rank=rank, equal=equal)

    def _watch(self) -> None:
        """Take down residuals before and after they are dealt out."""
        module: Any = elastic
        deal_out = module._dealt_out

        def watched(kept: Any, *arguments: Any) -> Any:
            dealt = deal_out(kept, *arguments)
            before, after = (
                [np.asarray(leaves["residual"]) for leaves in buckets if "residual" in leaves]
                for buckets in ([k.leaves for k in kept.values()], dealt.values())
            )
            same = all(np.array_equal(a, b) for a, b in zip(before, after, strict=True))
            norm = float(sum(np.abs(residual).sum() for residual in after))
            self._write(event="regroup", kept=same, residual=norm, seconds=time.time())
            return dealt

        module._dealt_out = watched
