"""Run the tests of this folder under horovodrun, over Gloo unless told otherwise; in an environment with Keras 3.

Use::

    .venv-keras3/bin/python tests/keras3/run.py [controller ...]
"""

from __future__ import annotations

import sys
from pathlib import Path

HERE = Path(__file__).resolve().parent
sys.path.insert(0, str(HERE.parent))

from parallel.run import run  # noqa: E402


def main(*chosen: str) -> int:
    """Run the jobs."""
    results = [run("../keras3", controller, "2") for controller in chosen or ["gloo"]]
    return not all(results)


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
