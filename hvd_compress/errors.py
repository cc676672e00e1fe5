"""Exceptions of this package.

    CompressionError
    ├── SpecError              an invalid spec string, method name or hyper-parameter
    ├── GradientError          a gradient that cannot be compressed (dtype, shape, layout)
    ├── UnknownParameterError  a gradient of an unknown parameter
    ├── UnsupportedError       a Horovod feature that is not supported with compression
    ├── DisagreementError      ranks with different models or settings
    ├── StateError             a saved state that does not match the compressor or the model
    ├── ExchangeError          a failed exchange
    ├── BoundaryError          a message between pipeline stages that cannot be sent or received
    ├── MissingPackageError    a required package that is not installed
    └── ClusterError           emulated hosts or a multi-rank job that failed

Each message names the parameter, its value, the allowed values and the cure.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

BUILD_HOROVOD = "'hvd-compress doctor' prints the command that builds it for the frameworks that are installed"
"""Cure for a Horovod that is missing."""


def short(value: object) -> str:
    """Return the representation of a value for a message, cut after 60 characters."""
    text = repr(value)
    return text if len(text) <= 60 else f"{text[:57]}..."


class CompressionError(Exception):
    """Base class of all exceptions of this package."""

    __init__ = Exception.__init__  # AutoGraph keeps an error's type only if its __init__ is Exception's own


class SpecError(CompressionError, ValueError):
    """Invalid spec string, method name or hyper-parameter."""


class GradientError(CompressionError, TypeError):
    """Gradient that cannot be compressed: wrong dtype, shape or layout."""


class UnknownParameterError(CompressionError, LookupError):
    """Gradient of a parameter that the compressor does not know."""


class UnsupportedError(CompressionError, NotImplementedError):
    """Horovod feature that is not supported with compression."""


class DisagreementError(CompressionError, RuntimeError):
    """Ranks with different models or settings; all ranks raise it with the same message."""


class StateError(CompressionError, ValueError):
    """Saved state that does not match the compressor or the model; the compressor is unchanged."""


class ExchangeError(CompressionError, RuntimeError):
    """Failed exchange: damaged replies, a step used out of order, or a bug in a method."""


class BoundaryError(CompressionError, RuntimeError):
    """Message between pipeline stages that cannot be sent or received; the pipeline cannot continue."""


class MissingPackageError(CompressionError, ImportError):
    """Required package that is not installed."""


@contextmanager
def required(what: str, packages: str, extra: str, more: str = "") -> Iterator[None]:
    """Name the cure where an import in this context fails.

    Args:
        what: What needs the packages, such as ``"hvd_compress.keras"``.
        packages: Their names, for the message.
        extra: The extra of this package that installs them.
        more: Added to the command that does so, or behind it.

    Raises:
        MissingPackageError: If it fails.
    """
    try:
        yield
    except (ImportError, RuntimeError) as error:  # a RuntimeError where mpi4py is there, but no MPI library
        raise MissingPackageError(
            f"{what} needs {packages} ({error}); install it, in the clone of this package, with:"
            f" pip install '.[{extra}]'{more}"
        ) from error


class ClusterError(CompressionError, RuntimeError):
    """Emulated hosts that cannot be created, or a multi-rank job that failed."""
