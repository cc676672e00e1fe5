"""A training of your own for ``hvd-compress compare``: a function takes a `Setting` and returns a `Training`."""

from hvd_compress.tools.compare.training import Setting, Training

__all__ = ["Setting", "Training"]
