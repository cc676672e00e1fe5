"""Run the tests of this folder under horovodrun, in an environment with Keras 3: over Gloo, unless told otherwise.

Use::

    .venv-keras3/bin/python tests/keras3/run.py [controller ... | all]

``all`` means both controllers, and the tests marked long.
"""

from __future__ import annotations

import sys
from pathlib import Path

from hvd_compress.tools.bench.jobs import CONTROLLERS

HERE = Path(__file__).resolve().parent
sys.path.insert(0, str(HERE.parent))

from parallel.run import run  # noqa: E402


def main(*chosen: str) -> int:
    """Run the jobs."""
    everything = "all" in chosen
    jobs = [(controller, ["."]) for controller in (CONTROLLERS if everything else chosen or ["gloo"])]
    jobs += [("gloo", [".", "--long"])] * everything
    results = [run("../keras3", controller, "2", names) for controller, names in jobs]
    return not all(results)


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
