"""Gradient compression for PyTorch.

Use it with `horovod.torch`::

    from hvd_compress.torch import Compression

    opt = hvd.DistributedOptimizer(opt, named_parameters=model.named_parameters(),
                                   compression=Compression.topk(ratio=0.01))
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from hvd_compress.errors import BUILD_HOROVOD, MissingPackageError, required

if TYPE_CHECKING:
    from hvd_compress.local.settings import Outer
    from hvd_compress.torch.horovod.compression import Compression, TorchCompressor
    from hvd_compress.torch.horovod.gossip import Gossip
    from hvd_compress.torch.horovod.local_steps import LocalSteps

__all__ = ["Compression", "Gossip", "LocalSteps", "Outer", "TorchCompressor"]


with required("hvd_compress.torch", "PyTorch", "torch"):
    import torch
del torch

if not TYPE_CHECKING:  # so that type checkers see the real types

    def __getattr__(name: str) -> Any:
        """Import names lazily, as other modules of this package do not need Horovod."""
        if name not in __all__:
            raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
        try:
            import horovod.torch
        except ImportError as error:
            raise MissingPackageError(
                f"hvd_compress.torch is for Horovod, and there is none for PyTorch here ({error}); for"
                " DistributedDataParallel and FSDP2, which need none, import Compression from hvd_compress.distributed;"
                f" for Horovod, {BUILD_HOROVOD}"
            ) from error
        del horovod
        from hvd_compress.torch.horovod import gossip, local_steps

        return getattr(gossip if name == "Gossip" else local_steps, name)


def __dir__() -> list[str]:
    return __all__
