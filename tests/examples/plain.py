"""Run an example of `hvd_compress.distributed` without compression: its arguments are the program and those of it."""

from __future__ import annotations

import runpy
import sys

from hvd_compress.distributed import DistributedCompressor

setattr(DistributedCompressor, "register", lambda self, model, **_: self)  # noqa: B010
del sys.argv[0]
runpy.run_path(sys.argv[0], run_name="__main__")
