"""Pictures need matplotlib, which is imported only where one is drawn."""

from __future__ import annotations

import importlib

from hvd_compress.errors import MissingPackageError


def require_matplotlib(what: str) -> None:
    """Refuse to begin without it.

    Args:
        what: What needs it, in the plural, as ``"plots"``.

    Raises:
        MissingPackageError: If it is not installed.
    """
    try:
        importlib.import_module("matplotlib.figure")
    except ImportError as error:
        raise MissingPackageError(
            f"{what} need matplotlib ({error}); install it with: pip install 'hvd-compress[bench]'"
        ) from error
