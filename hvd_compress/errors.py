"""Everything that can go wrong, as one tree.

    CompressionError
    ├── SpecError              a spec string, a method name or a hyper-parameter that cannot be
    ├── GradientError          a gradient that the method cannot carry (dtype, shape, layout)
    ├── UnknownParameterError  a gradient whose parameter the compressor has not been told of
    ├── UnsupportedError       a Horovod feature that does not go together with compression
    ├── DisagreementError      the ranks were not set up alike
    ├── StateError             a saved state that does not fit here
    ├── ExchangeError          the collectives of a step went wrong: a bug in a method or a driver
    ├── BoundaryError          a message between pipeline stages that cannot be sent, or did not come
    ├── MissingPackageError    a package that this part needs is not installed
    └── ClusterError           emulated hosts that cannot be made, or a job on several ranks that failed

Every message names what was given, what is allowed and what to do about it.
"""

from __future__ import annotations


class CompressionError(Exception):
    """Base of all errors that this package raises on purpose."""

    __init__ = Exception.__init__  # AutoGraph re-raises errors as what they are only if they have this very method


class SpecError(CompressionError, ValueError):
    """A spec string, a method name or a hyper-parameter that cannot be."""


class GradientError(CompressionError, TypeError):
    """A gradient that the method cannot carry."""


class UnknownParameterError(CompressionError, LookupError):
    """A gradient whose parameter the compressor has not been told of."""


class UnsupportedError(CompressionError, NotImplementedError):
    """A Horovod feature that does not go together with compression."""


class DisagreementError(CompressionError, RuntimeError):
    """The ranks were not set up alike; the message is the same on all of them."""


class StateError(CompressionError, ValueError):
    """A saved state that does not fit here; the compressor is left as it was."""


class ExchangeError(CompressionError, RuntimeError):
    """The collectives of a step went wrong: a bug in a method or a driver."""


class BoundaryError(CompressionError, RuntimeError):
    """A message between pipeline stages that cannot be sent, or did not come; the pipeline cannot go on."""


class MissingPackageError(CompressionError, ImportError):
    """A package that this part of the library needs is not installed."""


class ClusterError(CompressionError, RuntimeError):
    """Emulated hosts that cannot be made, or a job on several ranks that failed."""
