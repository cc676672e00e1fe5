"""Set-up of all tests."""

from __future__ import annotations

import os
import signal

from hypothesis import settings

# Small arrays: threads would wait for each other more than they work. Before any framework is loaded.
for variable in ("OMP_NUM_THREADS", "TF_NUM_INTRAOP_THREADS"):
    os.environ.setdefault(variable, "1")

# How long an example takes depends on the machine and on what else it does.
settings.register_profile("patient", deadline=None)
settings.load_profile("patient")

# A shell starts jobs in the background with Ctrl-C ignored, and all that these start would ignore it, too.
signal.signal(signal.SIGINT, signal.default_int_handler)
