"""Check the package on a GPU: kernels, whole steps, launches, memory, races.

Use, from a clone, with PyTorch, Triton, numba and pytest installed; nothing else is needed::

    python tools/gpu_check --json gpu.json

It takes less than eight minutes. Checks can be named, to run only these: ``oracle`` compares kernels with the oracle,
``methods`` compares every method with the CPU, ``kernels`` and ``steps`` measure them, ``streams`` looks for races, and
``sanitizer`` for wrong memory accesses. Without a GPU, ``--cpu`` runs the same on tiny arrays, the kernels in Triton's
interpreter: that shows that the program works, and gives no figure.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import time
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
sys.path[:0] = [str(ROOT), str(ROOT / "tools"), str(ROOT / "tests")]

parser = argparse.ArgumentParser(description="Check hvd_compress on a GPU.")
parser.add_argument("checks", nargs="*", metavar="check", help="those to run; default: all")
parser.add_argument("--json", type=Path, help="file for the results; default: none")
parser.add_argument("--cpu", action="store_true", help="without a GPU: tiny arrays, kernels in Triton's interpreter")


def main() -> int:
    """Run all checks, print a table, and return 1 if a check failed."""
    args = parser.parse_args()
    if args.cpu:
        os.environ["TRITON_INTERPRET"] = "1"  # before Triton is imported
        os.environ["CUDA_VISIBLE_DEVICES"] = ""
    import torch

    from gpu_check import checks

    if unknown := set(args.checks) - set(checks.CHECKS):
        parser.error(f"unknown checks {sorted(unknown)}; allowed: {', '.join(checks.CHECKS)}")
    if not args.cpu and not torch.cuda.is_available():
        parser.error("PyTorch finds no GPU: pass --cpu to see whether this program works")
    machine = "CPU, kernels interpreted" if args.cpu else torch.cuda.get_device_name()
    print(f"{machine}; torch {torch.__version__}, Python {sys.version.split()[0]}\n", flush=True)
    results = []
    for name, check in checks.CHECKS.items():
        if args.checks and name not in args.checks:
            continue
        begin = time.perf_counter()
        found = check(args.cpu)
        results.append({"check": name, "seconds": round(time.perf_counter() - begin, 1), **found._asdict()})
        print(f"{name}: {found.state} ({results[-1]['seconds']} s)", flush=True)
        for row in found.rows:
            print("  " + "  ".join(f"{key}={value}" for key, value in row.items() if value is not None), flush=True)
        if args.json:
            written = {"machine": machine, "torch": torch.__version__, "results": results}
            args.json.write_text(json.dumps(written, indent=1))
    return int(any(result["state"].startswith("failed") for result in results))


if __name__ == "__main__":
    sys.exit(main())
