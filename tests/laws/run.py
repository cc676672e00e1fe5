"""Check the law with programs drawn at random.

Use::

    python tests/laws/run.py [adapter ...] [--draws 200] [--seed 0] [--plant NAME]

A program that breaks it is printed, without what can be left out of it, and the exit status is 1.
"""

from __future__ import annotations

import argparse
import faulthandler
import os
import sys
import time
import traceback
from importlib import import_module
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parent
sys.path.insert(0, str(HERE.parent))

from launching import horovodrun, torchrun  # noqa: E402
from laws.plants import PLANTS  # noqa: E402
from laws.program import Program, draw_programs, reduced  # noqa: E402

HANG = 120
"""Seconds until a program is said to hang."""

ADAPTERS = {"local": 0, "threads": 0, "ddp": 2, "fsdp": 4, "horovod": 2, "keras": 2}
"""Number of processes of each adapter; 0 if it makes its ranks itself."""


def check(name: str, draws: int, seed: int = 0, plant: str = "") -> str:
    """Run programs, in each process of an adapter; return how the first that breaks the law does."""
    if plant:
        PLANTS[plant].sow()
    adapter: Any = import_module(f"laws.on_{name}")
    speaks = adapter.start()
    for number, program in enumerate(draw_programs(adapter.ABLE, draws, seed)):
        broken = attempt(adapter, program)
        if broken and speaks:
            print(f"{name}, seed {seed}, program {number}: {broken}\n{program}", flush=True)
        if broken and plant:
            return f"program {number} finds it"
        if broken:
            least = reduced(program, lambda one: bool(attempt(adapter, one)))
            return f"{name}, seed {seed}, program {number}: {broken}\nreduced to {least}"
    return ""


def attempt(adapter: Any, program: Program) -> str:
    """Run a program; return how it breaks the law: also by an error, of all ranks."""
    faulthandler.dump_traceback_later(HANG, exit=True)
    try:
        broken: str = adapter.run(program)
    except Exception:
        broken = traceback.format_exc(limit=-4, chain=False)
    faulthandler.cancel_dump_traceback_later()
    return broken


def launch(name: str, draws: int, seed: int = 0, plant: str = "") -> str:
    """Run programs in the processes that an adapter needs; return what they print of one that breaks the law."""
    if not ADAPTERS[name]:
        return check(name, draws, seed, plant)
    arguments = [str(HERE / "run.py"), name, "--draws", str(draws), "--seed", str(seed), "--plant", plant, "--rank"]
    try:
        if name in ("ddp", "fsdp"):
            torchrun(ADAPTERS[name], *arguments, timeout=60 + 10 * draws)
        else:
            horovodrun(ADAPTERS[name], "gloo", *arguments, timeout=60 + 10 * draws)
    except AssertionError as error:
        return str(error)
    return ""


def main() -> int:
    """Run what the command line names; return the exit status."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("adapters", nargs="*", default=list(ADAPTERS), choices=list(ADAPTERS))
    parser.add_argument("--draws", type=int, default=200)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--plant", default="", choices=["", *PLANTS], help="fault to plant")
    parser.add_argument("--rank", action="store_true", help="this process is one of the ranks")
    chosen = parser.parse_args()
    if chosen.rank:
        broken = check(chosen.adapters[0], chosen.draws, chosen.seed, chosen.plant)
        print(broken, flush=True)
        os._exit(bool(broken))  # without waiting for ranks that wait themselves
    failed = False
    for name in chosen.adapters:
        begin = time.monotonic()
        broken = launch(name, chosen.draws, chosen.seed, chosen.plant)
        failed = failed or bool(broken)
        verdict = broken or f"{name}, seed {chosen.seed}: {chosen.draws} programs obeyed"
        print(f"{verdict} ({time.monotonic() - begin:.0f} s)", flush=True)
    return int(failed)


if __name__ == "__main__":
    sys.exit(main())
