"""`Compression`, as users see it: the same names in every framework."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import cached_property
from typing import Any, Generic, NoReturn, TypeVar

from hvd_compress.bucketing import DEFAULT_MERGE, Merge, check_merge
from hvd_compress.errors import SpecError
from hvd_compress.methods import REGISTRY
from hvd_compress.spec import DENSE, as_router, build, meant, nearest
from hvd_compress.wrappers.router import Routable, Router, by_name, phases, routed

C = TypeVar("C")
S = TypeVar("S", bound="Made")


class Factory(Generic[C]):
    """Makes the compressors of one method.

    Args:
        name: Of the method.
        make: Makes a compressor of a router and a ``merge``.
    """

    def __init__(self, name: str, make: Callable[[Router, Merge], C]) -> None:
        self._name = name
        self._make = make
        self.__doc__ = REGISTRY[name].__doc__

    def __call__(self, *values: object, merge: Merge = DEFAULT_MERGE, **params: Any) -> C:
        """Make a compressor.

        Args:
            *values: None: parameters are given by name.
            merge: How gradients are put into buckets: ``"auto"`` for two of about equal bytes, ``"search"``, a number
                of them, ``"layer"``, ``"bytes:64MB"``, or a partition such as ``"at:12,40"``; see
                `hvd_compress.bucketing.plan`.

                With ``"search"``, PyTorch's optimizers begin like ``"auto"`` and tune the partition by measured step
                times, in at most the first 100 steps of the training. The result is logged, by
                ``logging.getLogger("hvd_compress")``, and saved with the state. As times differ between runs, so may
                partitions and results: for the same bits, pin the partition that was logged.

                It is the same as ``"auto"`` in TensorFlow, in direct calls of ``hvd.allreduce``, in elastic jobs, and
                with methods that keep what another bucket cannot take over (``twoway=on`` with feedback, ``loco``).
            **params: Hyper-parameters and options, as in spec strings (see `hvd_compress.parse`).

        Raises:
            SpecError: If a parameter or a value is not known or not allowed.
        """
        if values:
            key = meant(self._name, values[0])
            cure = f"write {self._name}({key}={values[0]!r}); " if key else ""
            raise SpecError(
                f"Compression.{self._name} was given {values[0]!r} without a name: {cure}`hvd-compress methods"
                f" {self._name}` lists the names"
            )
        check_merge(merge)
        return self._make(build(self._name, **params), merge)

    def _not_called(self, *_: Any) -> NoReturn:
        raise SpecError(f"Compression.{self._name} is a factory: pass compression=Compression.{self._name}()")

    compress = decompress = _not_called


class Made:
    """Base of all compressors: each is made of a method and a ``merge``, and is pickled as these two.

    So a program that is sent to other processes (by Ray, or ``horovod.run``) brings new compressors with it, which have
    compressed nothing yet.
    """

    method: Router
    merge: Merge

    def __reduce__(self) -> tuple[Any, ...]:
        return type(self), (self.method, self.merge)

    def __call__(self: S, *values: object, **params: Any) -> S:
        """Let ``Compression.fp16()`` be ``Compression.fp16``, as other methods have to be called.

        Raises:
            SpecError: If it is of another method, or a parameter is not known or not allowed.
        """
        name = next((name for name, method in DENSE.items() if routed(method) == self.method), "")
        if not name:
            raise SpecError(f"{self!r} is a compressor already: pass it as it is")
        return Factory(name, type(self))(*values, **params) if values or params else self


class Catalogue(Generic[C]):
    """All methods as attributes: ``none`` and ``fp16`` are ready, the others are called with their parameters.

    Args:
        make: Makes a compressor of a router and a ``merge``.
    """

    def __init__(self, make: Callable[[Router, Merge], C]) -> None:
        self._make = make

    @cached_property
    def none(self) -> C:
        """No compression."""
        return self.parse("none")

    @cached_property
    def fp16(self) -> C:
        """16 bits on the wire."""
        return self.parse("fp16")

    def parse(self, spec: str | Routable, *, merge: Merge = DEFAULT_MERGE) -> C:
        """Make a compressor of a spec string such as ``"topk:ratio=0.01"``, or of a method.

        Raises:
            SpecError: If a name or a value is not known or not allowed.
        """
        check_merge(merge)
        return self._make(as_router(spec), merge)

    def by_name(self, rules: Mapping[str, str | Routable], *, merge: Merge = DEFAULT_MERGE) -> C:
        """Make a compressor with another method for some parameters.

        Args:
            rules: Patterns of parameter names, as in `fnmatch`, and what to do with them: a spec string or a method.
                The first that fits counts; where none does, gradients are not compressed. For example
                ``{"conv1.*": "none", "embed*": "topk:ratio=0.001", "*": "powersgd"}``.
            merge: See `Factory.__call__`.

        Raises:
            SpecError: If a name or a value is not known or not allowed.
        """
        return self.parse(by_name({name: as_router(spec) for name, spec in rules.items()}), merge=merge)

    def phases(self, methods: Mapping[int, str | Routable], *, merge: Merge = DEFAULT_MERGE) -> C:
        """Make a compressor that changes its method during training, and hands the residual on.

        Args:
            methods: The step (counted from 0) from which on a method is in force: a spec string or a method. For
                example ``{0: "none", 500: "topk:ratio=0.1", 5000: "topk:ratio=0.01"}``.
            merge: See `Factory.__call__`.

        Raises:
            SpecError: If a name or a value is not known or not allowed.
        """
        return self.parse(phases({begin: as_router(spec) for begin, spec in methods.items()}), merge=merge)

    def __getattr__(self, name: str) -> Factory[C]:
        if name in REGISTRY:
            return Factory(name, self._make)
        raise AttributeError(f"there is no method {name!r}{nearest(name, REGISTRY)}; there are: {', '.join(REGISTRY)}")

    def __dir__(self) -> list[str]:
        return [*super().__dir__(), *REGISTRY]
