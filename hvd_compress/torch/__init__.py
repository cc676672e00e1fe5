"""Gradient compression for PyTorch.

Use it with `horovod.torch`::

    from hvd_compress.torch import Compression

    opt = hvd.DistributedOptimizer(opt, named_parameters=model.named_parameters(),
                                   compression=Compression.topk(ratio=0.01))
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from hvd_compress.errors import MissingPackageError

if TYPE_CHECKING:
    from hvd_compress.torch.horovod.compression import Compression, TorchCompressor

__all__ = ["Compression", "TorchCompressor"]


def _missing(error: ImportError) -> str:
    return (
        f"hvd_compress.torch needs PyTorch and a Horovod built for it ({error});"
        " install them, in the clone of this package, with: pip install '.[torch]'"
    )


try:
    import torch
except ImportError as error:
    raise MissingPackageError(_missing(error)) from error
del torch

if not TYPE_CHECKING:  # so that type checkers see the real types

    def __getattr__(name: str) -> Any:
        """Import `Compression` lazily, as other modules of this package do not need Horovod."""
        if name not in __all__:
            raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
        try:
            import horovod.torch
        except ImportError as error:
            raise MissingPackageError(_missing(error)) from error
        del horovod
        from hvd_compress.torch.horovod import compression

        return getattr(compression, name)


def __dir__() -> list[str]:
    return __all__
