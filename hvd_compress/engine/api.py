"""`Compression`: the same names in every framework."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence
from functools import cache, cached_property
from pathlib import Path
from typing import Any, Generic, NoReturn, TypeVar

import numpy as np

from hvd_compress.core.bucketing import DEFAULT_MERGE, Merge, check_merge
from hvd_compress.core.method import Wrapper
from hvd_compress.core.router import Routable, Router, routed
from hvd_compress.engine.local_world import LocalWorld
from hvd_compress.engine.race import Race
from hvd_compress.engine.race_report import write
from hvd_compress.engine.spec import DENSE, as_router, auto, build, meant, unknown
from hvd_compress.errors import SpecError, UnsupportedError, short
from hvd_compress.methods import REGISTRY
from hvd_compress.methods.wrappers.router import Auto, Selective, by_name, check_fixed, phases

_LOG = logging.getLogger("hvd_compress")

C = TypeVar("C")
S = TypeVar("S", bound="CompressorBase")


class Factory(Generic[C]):
    """Factory of the compressors of one method.

    Args:
        name: Name of the method.
        make: Makes a compressor from a router and a ``merge``.
    """

    def __init__(self, name: str, make: Callable[[Router, Merge], C]) -> None:
        self._name = name
        self._make = make
        self.__doc__ = REGISTRY[name].__doc__

    def __call__(self, *values: object, merge: Merge = DEFAULT_MERGE, **params: Any) -> C:
        """Create a compressor.

        Args:
            *values: Not supported: pass parameters by name.
            merge: Assignment of gradients to buckets: ``"auto"`` for two buckets of about equal bytes, ``"search"``, a
                number of buckets, ``"layer"``, ``"bytes:64MB"``, or a partition such as ``"at:12,40"``; see
                `hvd_compress.core.bucketing.plan`.

                ``"search"`` autotunes the bucket boundaries of PyTorch optimizers from measured step times, within the
                first 100 steps. The result is logged by ``logging.getLogger("hvd_compress")`` and saved with the
                state. Step times differ between runs, so partitions and results may differ too: for bitwise
                reproducible training, pass the logged partition.

                ``"search"`` equals ``"auto"`` in TensorFlow, in direct calls of ``hvd.allreduce``, in elastic jobs, and
                with methods whose state cannot move to other buckets (``twoway=on`` with feedback, ``loco``,
                ``fp8``, ``block8``).
            **params: Hyper-parameters and options, as in spec strings (see `hvd_compress.parse`).

        Raises:
            SpecError: If a parameter or a value is unknown or not allowed.
        """
        if values:
            key = meant(self._name, values[0])
            cure = f"write {self._name}({key}={values[0]!r}); " if key else ""
            raise SpecError(
                f"Compression.{self._name}({values[0]!r}) is missing the parameter's name: {cure}`hvd-compress methods"
                f" {self._name}` lists the names"
            )
        check_merge(merge)
        return self._make(_checked(build(self._name, **params)), merge)

    def __repr__(self) -> str:
        return f"<factory: call it as Compression.{self._name}()>"

    def _not_called(self, *_: Any) -> NoReturn:
        raise SpecError(
            f"Compression.{self._name} is a factory; the parentheses are missing: pass Compression.{self._name}()"
        )

    compress = decompress = register = registered = all_reduce = load = _not_called


def _checked(spec: str | Routable) -> Router:
    """Return the router of a spec string or of a method, after a warning if it sends more than no compression."""
    router = as_router(spec)
    _warn_of_growth(router)
    return router


@cache
def _warn_of_growth(router: Router) -> None:
    """Warn once if a ratio is so large that the payload exceeds the gradient, as measured on a small one."""
    if not isinstance(router, Selective):  # others choose among routers, each of which was checked
        return
    method = router.core
    while isinstance(method, Wrapper):
        method = method.inner
    ratio = getattr(method, "ratio", 0.0)
    if not ratio:
        return
    gradient = np.arange(1.0, 4097.0, dtype=np.float32)
    world = LocalWorld(method, 1)
    world.step([gradient])
    factor = world.bytes_sent / gradient.nbytes
    if factor > 1:
        _LOG.warning(
            "%s sends %.2f times the bytes of no compression, as each value travels with its index: take a smaller"
            " ratio than %g, or Compression.none",
            str(router),
            factor,
            ratio,
        )


class CompressorBase:
    """Base class of all compressors.

    A compressor is pickled as its method and its ``merge``, without its state, so Ray and ``horovod.run`` can send it
    to other processes.
    """

    method: Router
    merge: Merge

    def __setattr__(self, name: str, value: Any) -> None:
        """Set a private attribute, one that the class declares, or ``method`` and ``merge`` once.

        Raises:
            SpecError: If it is another one: a compressor does not change.
        """
        declared = any(name in vars(cls).get("__annotations__", ()) for cls in type(self).__mro__)
        if not name.startswith("_") and (
            not declared or (name in CompressorBase.__annotations__ and name in vars(self))
        ):
            raise SpecError(
                f"{name}={short(value)} cannot be set on a compressor, which does not change: make a new one, or let"
                " Compression.phases({0: ..., 1000: ...}) change the method at a step"
            )
        super().__setattr__(name, value)

    def __reduce__(self) -> tuple[Any, ...]:
        return type(self), (self.method, self.merge)

    def __call__(self: S, *values: object, **params: Any) -> S:
        """Return this compressor, so that ``Compression.fp16()`` equals ``Compression.fp16``.

        Raises:
            SpecError: If the method is not ``none`` or ``fp16``, or a parameter is unknown or not allowed.
        """
        name = next((name for name, method in DENSE.items() if routed(method) == self.method), "")
        if not name:
            raise SpecError(f"{self!r} is a compressor, not a factory: pass it without calling it")
        return Factory(name, type(self))(*values, **params) if values or params else self

    def report(self, path: str | Path) -> None:
        """Write what ``auto`` has tried so far, what it cost, and why it chose as it did; call it on one rank.

        Args:
            path: The file, of which one that exists is replaced: Markdown, or HTML if its name ends with ``.html``.

        Raises:
            SpecError: If its name ends with neither ``.md`` nor ``.html``.
            UnsupportedError: If the method is not ``auto``.
        """
        if not isinstance(self.method, Auto):
            raise UnsupportedError(f"compression.report is for auto: {self.method} is the same in each step")
        write(path, self.races())

    def races(self) -> Mapping[str, Race]:
        """Return the race of each model or optimizer, by its label; none unless the method is ``auto``."""
        raise NotImplementedError

    def _chosen(self) -> str:
        """Return the methods that races have chosen."""
        return ", ".join(dict.fromkeys(race.candidates[race.choice].spec for race in self.races().values()))


class Catalogue(Generic[C]):
    """All methods as attributes.

    ``none`` and ``fp16`` are compressors; the other methods are factories, to be called with their hyper-parameters.

    Args:
        make: Makes a compressor from a router and a ``merge``.
    """

    def __init__(self, make: Callable[[Router, Merge], C]) -> None:
        self._make = make

    def __call__(self, *_: object, **__: object) -> NoReturn:
        """Not supported.

        Raises:
            SpecError: Always; it names `parse`.
        """
        raise SpecError(
            'Compression is not called: write Compression.parse("topk:ratio=0.01"), or Compression.topk(ratio=0.01)'
        )

    @cached_property
    def none(self) -> C:
        """No compression."""
        return self.parse("none")

    @cached_property
    def fp16(self) -> C:
        """Half precision on the wire."""
        return self.parse("fp16")

    def parse(self, spec: str | Routable, *, merge: Merge = DEFAULT_MERGE) -> C:
        """Create a compressor from a spec string such as ``"topk:ratio=0.01"``, or from a method.

        Raises:
            SpecError: If a name or a value is unknown or not allowed.
        """
        check_merge(merge)
        router = _checked(spec)
        if merge == "search":
            check_fixed(router, "with merge='search', which times steps, too")
        return self._make(router, merge)

    def auto(self, *, candidates: Sequence[str] = (), merge: Merge = DEFAULT_MERGE, **params: Any) -> C:
        """Create a compressor that chooses its method by the times of real steps; see `hvd_compress.engine.race`.

        It begins without compression, compares the candidates within the first steps, goes on with the fastest, and
        compares anew when the step time has changed for good. It supports DistributedDataParallel, FSDP2, and Horovod's
        optimizers and tapes.

        Args:
            candidates: Spec strings to choose from, besides no compression and 16 bits; by default methods that keep
                the loss with the optimizer.
            merge: See `Factory.__call__`; not ``"search"``.
            **params: ``loss``, ``max_error`` and ``probe``; see `hvd_compress.engine.candidates.AutoOptions`.

        Raises:
            SpecError: If a candidate or a value is unknown or not allowed.
        """
        return self.parse(auto(candidates, **params), merge=merge)

    def by_name(self, rules: Mapping[str, str | Routable], *, merge: Merge = DEFAULT_MERGE) -> C:
        """Create a compressor that chooses the method by the parameter's name.

        Args:
            rules: Patterns of parameter names, as in `fnmatch`, each with a spec string or a method. The first match
                wins; gradients without a match are not compressed. For example
                ``{"conv1.*": "none", "embed*": "topk:ratio=0.001", "*": "powersgd"}``.
            merge: See `Factory.__call__`.

        Raises:
            SpecError: If a name or a value is unknown or not allowed.
        """
        return self.parse(by_name({name: _checked(spec) for name, spec in rules.items()}), merge=merge)

    def phases(self, methods: Mapping[int, str | Routable], *, merge: Merge = DEFAULT_MERGE) -> C:
        """Create a compressor that changes its method during training and passes the residual on.

        Args:
            methods: First step of each phase, counted from 0, with its spec string or method. For example
                ``{0: "none", 500: "topk:ratio=0.1", 5000: "topk:ratio=0.01"}``.
            merge: See `Factory.__call__`.

        Raises:
            SpecError: If a name or a value is unknown or not allowed.
        """
        return self.parse(phases({begin: _checked(spec) for begin, spec in methods.items()}), merge=merge)

    def __getattr__(self, name: str) -> Factory[C]:
        if name in REGISTRY:
            return Factory(name, self._make)
        raise AttributeError(unknown("method", name, REGISTRY))

    def __dir__(self) -> list[str]:
        return [*super().__dir__(), *REGISTRY]
