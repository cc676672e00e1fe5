"""Probe one framework, in a process of its own: one that crashes takes nothing else with it.

``python -m hvd_compress.tools.doctor.probe torch`` prints what it finds as it goes, so that a crash is seen where it
happens.
"""

from __future__ import annotations

import importlib
import json
import sys
from collections.abc import Iterator
from typing import Any

MARK = "hvd-compress found: "
"""Begins the lines that count: frameworks print, too."""

_BUILT = ("gloo", "mpi", "nccl", "cuda", "rocm")


def framework(name: str) -> Iterator[dict[str, Any]]:
    """Look at a framework, at Horovod's side of it, and at ours."""
    yield {"stage": "framework"}
    module = importlib.import_module(name)
    yield {"version": module.__version__}
    yield _torch(module) if name == "torch" else _tensorflow(module)
    yield {"stage": "horovod"}
    hvd = importlib.import_module(f"horovod.{name}")
    if not hasattr(hvd, "init"):  # horovod.torch only prints that it has not been built
        raise ImportError(f"Extension horovod.{name} has not been built")
    yield {"built": [what for what in _BUILT if getattr(hvd, f"{what}_built")()]}
    yield {"stage": "adapter"}
    _ = importlib.import_module(f"hvd_compress.{name}").Compression


def mpi4py() -> Iterator[dict[str, Any]]:
    """Ask mpi4py for its MPI library, without starting MPI."""
    yield {"stage": "framework"}
    package = importlib.import_module("mpi4py")
    yield {"version": package.__version__}
    package.rc.initialize = False
    vendor, version = importlib.import_module("mpi4py.MPI").get_vendor()
    yield {"library": f"{vendor} {'.'.join(map(str, version))}"}


def _torch(torch: Any) -> dict[str, Any]:
    distributed = importlib.import_module("torch.distributed")
    backends = [name for name in ("gloo", "nccl", "mpi") if distributed.is_backend_available(name)]
    return {"gpus": torch.cuda.device_count(), "backends": backends}  # ROCm's devices go by that name, too


def _tensorflow(tf: Any) -> dict[str, Any]:
    return {"gpus": len(tf.config.list_physical_devices("GPU")), "keras": keras_version(tf)}


def keras_version(tf: Any) -> str:
    """Return the version of TensorFlow's Keras: of the package keras or, for Keras 2 beside Keras 3, of tf_keras."""
    package, _, _ = tf.keras.Model.__module__.partition(".")
    return str(importlib.import_module(package).__version__)


def main(name: str) -> int:
    try:
        for found in mpi4py() if name == "mpi4py" else framework(name):
            print(f"\n{MARK}{json.dumps(found)}", flush=True)
    except Exception as error:
        print(f"\n{MARK}{json.dumps({'error': f'{type(error).__name__}: {error}'})}", flush=True)
        return 1
    print(f"\n{MARK}{json.dumps({'stage': 'done'})}", flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
