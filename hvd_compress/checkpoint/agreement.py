"""Verify that ranks agree on model and compression, once, before the first exchange.

A mismatch would deadlock the job, or sum unrelated gradients.
"""

from __future__ import annotations

import functools
import json
import logging
import os
import secrets
import socket
import zlib
from collections.abc import Callable, Iterable, Sequence
from typing import Any, NamedTuple, NoReturn

from hvd_compress._version import __version__
from hvd_compress.core.bucketing import Gradient, Merge
from hvd_compress.core.collectives import World
from hvd_compress.core.router import Routable, Router
from hvd_compress.errors import DisagreementError, UnsupportedError

_LOG = logging.getLogger("hvd_compress")

_MOST_BETA = 0.5
"""Largest first beta of Adam with which methods that lag keep the loss."""

_JOB, _HOST, _NODES = "job", "host", "ranks per node"

MAY_DIFFER = "ranks per node, if equal"
"""A fact of routers that try nodes; see `Router.tries_nodes`."""

_WRAPPERS = {"_orig_mod", "_checkpoint_wrapped_module", "_fsdp_wrapped_module", "_forward_module"}
"""Parts of parameter names that wrappers add: `torch.compile`, checkpointing, FSDP and Lightning Fabric."""

_BITS = 24
"""Bits of a digest, so that sums of squares over many ranks fit int64."""


def describe(
    method: Routable, merge: Merge, gradients: Sequence[Gradient], world: World, restored: str = "", **more: Any
) -> bytes:
    """Return everything that ranks must agree on, as a line of JSON.

    Args:
        method: The method.
        merge: Assignment of gradients to buckets.
        gradients: The compressed gradients.
        world: The ranks.
        restored: Identifier of the saved state that this rank resumes from; empty for a new one.
        **more: Other facts.

    Raises:
        UnsupportedError: If the job is elastic and the method hierarchical.
    """
    names = unwrapped(g.name for g in gradients)
    nodes: dict[str, Any] = {}
    if method.hierarchical and elastic():
        refuse_elastic("nodes with several ranks (hierarchical=on)")
    tries = isinstance(method, Router) and method.tries_nodes
    if method.hierarchical or tries:
        each = world.local_size if world.even else f"unlike that of rank {world.rank}"
        nodes = {MAY_DIFFER if tries else _NODES: each}
    facts = {
        "hvd_compress version": __version__,
        # A bare method has no spec: its string leaves out the options of wrappers, which ranks must agree on as well.
        "method": str(method) if isinstance(method, Router) else repr(method),
        "merge": merge,
        **more,
        "restored state": restored,
        "parameters": [[name, list(g.shape), g.dtype] for name, g in zip(names, gradients, strict=True)],
        **nodes,
        _HOST: os.environ.get("HOROVOD_HOSTNAME") or socket.gethostname(),
        _JOB: secrets.randbits(40),  # leaves the user's random generators untouched
    }
    return json.dumps(facts).encode() + b"\n"


def compared(line: bytes) -> dict[str, Any]:
    """Return the facts in a line of `describe` that must be equal on all ranks."""
    facts: dict[str, Any] = json.loads(line)
    del facts[_JOB], facts[_HOST]
    return facts


def job_of(line: bytes) -> int:
    """Return the random job number in a line of `describe`."""
    return int(json.loads(line)[_JOB])


def digests(facts: Iterable[Any]) -> list[int]:
    """Return integers whose sums over the ranks show which facts are equal on all ranks; see `equal`.

    Sums are the only collective that Horovod supports after a rank has called ``hvd.join()``.
    """
    found = [zlib.crc32(json.dumps(fact).encode()) % 2**_BITS for fact in facts]
    return [1, *(part for digest in found for part in (digest, digest**2))]


def equal(sums: Sequence[int]) -> list[bool]:
    """Return which facts are equal on all ranks, given the sums of their `digests`.

    For digests d_i of n ranks, n sum(d_i^2) = sum(d_i)^2 holds if and only if all are equal (Cauchy-Schwarz).
    """
    ranks, *rest = sums
    return [ranks * second == first**2 for first, second in zip(rest[::2], rest[1::2], strict=True)]


def elastic() -> bool:
    """Return whether this is an elastic job."""
    return os.environ.get("HOROVOD_ELASTIC") == "1"


def refuse_elastic(what: str) -> None:
    """Reject a feature that is not supported in elastic jobs.

    Raises:
        UnsupportedError: Always.
    """
    raise UnsupportedError(
        f"{what} are not supported with this compression in an elastic job, as Horovod does not say which ranks are"
        " new: start the job without --min-np/--max-np, or use Compression.none or Compression.fp16"
    )


class OptimizerFacts(NamedTuple):
    """Properties of optimizers that methods restrict; each is computed when it is needed.

    Attributes:
        momentum: Returns the largest momentum that sums gradients, as SGD's does, which makes larger steps.
        first_beta: Returns the largest momentum that averages gradients: the first beta of Adam and its variants, or
            the momentum of SGD with as much dampening.
        not_sgd: Returns the name of one that is not SGD; "" if there is none.
    """

    momentum: Callable[[], float]
    first_beta: Callable[[], float]
    not_sgd: Callable[[], str]


def check_optimizer(method: Routable, optimizer: OptimizerFacts, rank: int = 0) -> None:
    """Refuse an optimizer that the method does not support, and warn once, on rank 0, of one that costs loss.

    Raises:
        UnsupportedError: If the method delivers updates, and the optimizer would change them; or if both have momentum,
            which would make far larger steps.
    """
    if method.preconditioned and (name := optimizer.not_sgd()):
        raise UnsupportedError(
            f"{name} is not supported with {method}, which delivers what {name} would make of a gradient: take"
            " SGD, with the learning rate and the weight decay of AdamW; in PyTorch,"
            " compression.optimizer(model, lr=..., weight_decay=...) returns it"
        )
    if method.preconditioned:
        momentum = optimizer.momentum()
        cure = (
            "make it without, or as a running mean, with as much dampening: in PyTorch,"
            " compression.optimizer(model, lr=..., weight_decay=..., beta1=...) returns it"
        )
    elif method.needs_plain_sgd:
        momentum = max(optimizer.momentum(), optimizer.first_beta())
        cure = (
            "switch it off in the optimizer (SGD with momentum=0; Adam's momentum is its first beta), or in the method"
            " (momentum=0; for signum, beta=0; delay=0)"
        )
    else:
        momentum = 0.0
    if momentum:
        raise UnsupportedError(
            f"the optimizer has a momentum of {momentum:g}, which is not supported with {method}: {cure}"
        )
    if rank == 0 and method.adds_momentum and (beta := optimizer.first_beta()) > _MOST_BETA:
        _warn_of_momentum(method, optimizer, beta)


def _warn_of_momentum(method: Routable, optimizer: OptimizerFacts, beta: float) -> None:
    """Warn of a momentum on top of what error feedback sends late."""
    if method.preconditioned:
        _warn_once(
            f"{method} sends most of an update in later steps, which acts as a momentum: with beta1={beta:g}"
            " on top, training loses much; take beta1=0 ('AdamW' in docs/guide.md)"
        )
    elif optimizer.not_sgd():
        _warn_once(
            f"{method} sends most of a gradient in later steps, which acts as a momentum: with that of Adam on"
            f" top, whose first beta is {beta:g}, training loses much; give the optimizer betas=(0.0, b2), in Keras"
            " beta_1=0 (measured: 'With AdamW' in docs/methods.md), or better compress updates, by preconditioned=on"
            " ('AdamW' in docs/guide.md)"
        )


@functools.cache
def _warn_once(text: str) -> None:
    _LOG.warning("%s", text)


def refuse_sparse(which: str, cure: str) -> NoReturn:
    """Reject sparse gradients beside updates, as they would be reduced as they are.

    Raises:
        UnsupportedError: Always.
    """
    raise UnsupportedError(
        f"the sparse gradient of {which} is not supported with preconditioned=on, as it travels without: {cure}"
    )


def unwrapped(names: Iterable[str]) -> list[str]:
    """Return the parameter names of a model without what wrappers add to them.

    So a job resumes, and agrees with others, whether or not its model is compiled, checkpointed or within a module
    that keeps it as ``module``.
    """
    bare = [".".join(part for part in name.split(".") if part not in _WRAPPERS) for name in names]
    while bare and all(name.startswith("module.") for name in bare):
        bare = [name.removeprefix("module.") for name in bare]
    return bare


def label(gradients: Sequence[Gradient]) -> str:
    """Return a short name for a list of parameters, the same on all ranks; part of the names of its collectives.

    Only the last two parts of a name count: Keras 3 prepends the model's name, but not for a loaded model.
    """
    names = ["/".join(name.split("/")[-2:]) for name in unwrapped(g.name for g in gradients)]
    return f"{zlib.crc32(json.dumps(names).encode()):08x}"


def check(lines: bytes) -> int:
    """Compare the facts of all ranks.

    Args:
        lines: Lines of `describe` of all ranks, in the order of ranks.

    Returns:
        The job number of rank 0, which saved states of these ranks carry.

    Raises:
        DisagreementError: If they differ; the message names the first rank that differs from rank 0, and both values.
    """
    first, *others = map(compared, lines.splitlines())
    for rank, other in enumerate(others, start=1):
        for fact in first:
            if first[fact] != other.get(fact) and fact != MAY_DIFFER:
                if fact == _NODES:
                    _refuse_nodes(lines)
                a, b = _shortened(first[fact], other.get(fact))
                raise DisagreementError(
                    f"the ranks disagree on the {fact}: rank 0 has {a}, rank {rank} has {b};"
                    " use the same model and the same compression on all ranks"
                )
    return job_of(lines.splitlines()[0])


def _refuse_nodes(lines: bytes) -> NoReturn:
    """Reject nodes with different numbers of ranks."""
    hosts: dict[str, list[str]] = {}
    for rank, line in enumerate(lines.splitlines()):
        facts = json.loads(line)
        hosts.setdefault(facts[_HOST], []).append(str(rank))
    found = "; ".join(f"{host} has rank {', '.join(ranks)}" for host, ranks in hosts.items())
    raise DisagreementError(
        "hierarchical=on needs the same number of ranks on each node, numbered node by node, as horovodrun, torchrun"
        f" and mpirun --map-by slot do: {found}; start as many on each, or leave out hierarchical=on"
    )


def _shortened(a: Any, b: Any) -> tuple[str, str]:
    """Reduce two lists to their first difference."""
    if not (isinstance(a, list) and isinstance(b, list)):
        return repr(a), repr(b)
    i = next((i for i, (x, y) in enumerate(zip(a, b, strict=False)) if x != y), min(len(a), len(b)))
    return _entry(a, i), _entry(b, i)


def _entry(parameters: list[Any], i: int) -> str:
    if i >= len(parameters):
        return f"only {len(parameters)} of them"
    name, shape, dtype = parameters[i]
    return f"{name!r} with shape {tuple(shape)} and {dtype} at position {i}"
