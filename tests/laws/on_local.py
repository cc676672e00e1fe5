"""Programs on `LocalWorld`."""

from __future__ import annotations

import numpy as np
from laws.law import violation
from laws.program import ALL, Able, Arr, Program, conserving

from hvd_compress import LocalWorld

ABLE = Able(
    list(conserving()),
    settings=((1, 1, "names"), (2, 1, "names"), (3, 1, "names"), (4, 2, "names")),
    events=ALL - {"optimizers", "passes", "tied", "shuffled", "turned", "scale", "frozen"} | {"joint"},
    idle=True,
    chooses=True,
)


def start() -> bool:
    """Prepare; return whether this process speaks for all ranks."""
    return True


def run(program: Program) -> str:
    """Run a program; return how it breaks the law."""
    ranks = program.ranks
    worlds = [LocalWorld(program.method, ranks, program.merge, None, program.local_size) for _ in program.models]
    delivered: list[dict[tuple[int, int], Arr]] = []
    for number, step in enumerate(program.ended):
        delivered.append({})
        for use in step.uses:
            zeros = [np.zeros(shape, np.float32) for shape in program.models[use.model].shapes]
            grads = {str(p): [zero.copy() for _ in range(program.ranks)] for p, zero in enumerate(zeros)}
            for rank in range(program.ranks):
                for p in program.used(number, use, 0, rank):
                    grads[str(p)][rank] = program.gradient(number, use, 0, rank, p)
            for name, means in worlds[use.model].step(grads).items():
                delivered[-1][use.model, int(name)] = np.stack(means).astype(float) * program.ranks
    return violation(program, *([{key: own[r] for key, own in one.items()} for one in delivered] for r in range(ranks)))
