"""Comparisons of methods by what counts: the time until a model is as good as it shall be."""

from hvd_compress.lab.training import Setting, Training

__all__ = ["Setting", "Training"]
