"""Gradient compression for `horovod.torch`.

Use::

    from hvd_compress.torch import Compression

    opt = hvd.DistributedOptimizer(opt, named_parameters=model.named_parameters(),
                                   compression=Compression.topk(ratio=0.01))
"""

from __future__ import annotations

from hvd_compress.errors import MissingPackageError

try:
    import horovod.torch
except ImportError as error:
    raise MissingPackageError(
        f"hvd_compress.torch needs PyTorch and a Horovod built for it ({error});"
        " install them with: pip install 'hvd-compress[torch]'"
    ) from error

from hvd_compress.torch.compression import Compression, TorchCompressor

__all__ = ["Compression", "TorchCompressor"]

del horovod
