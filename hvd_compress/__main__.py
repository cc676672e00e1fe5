"""Run the ``hvd-compress`` command as ``python -m hvd_compress``."""

from __future__ import annotations

from hvd_compress.tools.cli import main

if __name__ == "__main__":
    main()
