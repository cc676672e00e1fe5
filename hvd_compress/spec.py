"""Spec strings: ``"topk:ratio=0.01,feedback=off"`` and back."""

from __future__ import annotations

import difflib
from collections.abc import Iterable
from dataclasses import MISSING, fields
from typing import Any

from hvd_compress.errors import SpecError
from hvd_compress.measure import Measured
from hvd_compress.memory import ErrorFeedback
from hvd_compress.methods import REGISTRY
from hvd_compress.methods.base import Method
from hvd_compress.methods.cast import Dense, Half
from hvd_compress.policy import Schedule, Selective, schedule

DENSE: dict[str, Method] = {"none": Dense(), "fp16": Half()}

OPTIONS: dict[str, Any] = {
    "min_size": 1024,
    "vectors": False,
    "dense": "none",
    "start": 0,
    "warmup": 0,
    "measure": False,
}
"""Options that every method takes, with their defaults; besides them ``feedback``, whose default the method sets."""

_SWITCH = {
    "on": True,
    "true": True,
    "yes": True,
    "1": True,
    "off": False,
    "false": False,
    "no": False,
    "0": False,
}


def parse(spec: str) -> Method:
    """Make a method from a spec string.

    Besides the hyper-parameters of its own, every method but the dense ones takes ``feedback=on|off`` (error feedback),
    ``min_size=n`` and ``vectors=on|off`` (what is left uncompressed: tensors with fewer elements, and vectors),
    ``dense=none|fp16`` (how), ``start=steps`` (dense at first), ``warmup=steps`` (approach the ratio) and
    ``measure=on|off`` (compare each sum with the exact one, which costs an uncompressed allreduce).

    Args:
        spec: ``name`` or ``name:key=value,key=value``.

    Raises:
        SpecError: If the name, a key or a value is not known or not allowed.
    """
    if not isinstance(spec, str):
        raise SpecError(f"a spec is a string such as 'topk:ratio=0.01', not {spec!r}")
    name, colon, rest = spec.partition(":")
    params: dict[str, str] = {}
    for item in rest.split(",") if colon else ():
        key, equals, value = (part.strip() for part in item.partition("="))
        if not (key and equals and value):
            raise SpecError(f"cannot read {item!r} in the spec {spec!r}: write name:key=value,key=value")
        if key in params:
            raise SpecError(f"{key} stands twice in the spec {spec!r}")
        params[key] = value
    return build(name.strip(), **params)


def build(name: str, /, **params: Any) -> Method:
    """Make a method from its name and parameters, as in spec strings; values may be strings.

    Raises:
        SpecError: If the name, a parameter or a value is not known or not allowed.
    """
    cls = REGISTRY.get(name)
    if cls is None:
        raise SpecError(f"unknown method {name!r}{nearest(name, REGISTRY)}; there are: {', '.join(REGISTRY)}")
    own = {field.name: field.default for field in fields(cls)}  # type: ignore[arg-type]
    options: dict[str, Any] = {} if issubclass(cls, Dense) else {"feedback": cls.feedback}
    if not cls.linear:
        options |= OPTIONS
    values = {key: _value(name, key, value, own | options) for key, value in params.items()}

    method = cls(**{key: value for key, value in values.items() if key in own})
    options["feedback"] = options.get("feedback", False) and method.can_retain
    options |= {key: value for key, value in values.items() if key in options}
    if options["feedback"]:
        method = ErrorFeedback(method)
    if cls.linear:
        return method
    method = schedule(method, options["start"], options["warmup"])
    if options["measure"]:
        method = Measured(method)
    return Selective(method, DENSE[options["dense"]], options["min_size"], options["vectors"])


def to_spec(method: Method) -> str:
    """Give the spec string that `parse` makes this method from; its repr where the method was composed by hand."""
    params: dict[str, Any] = {}
    inner = method
    if isinstance(inner, Selective):
        dense = next((name for name, dense in DENSE.items() if dense == inner.dense), "")
        params |= {"dense": dense, "min_size": inner.min_size, "vectors": inner.vectors}
        inner = inner.inner
    params["measure"] = isinstance(inner, Measured)
    if isinstance(inner, Measured):
        inner = inner.inner
    if isinstance(inner, Schedule):
        dense_until = [stage.until for stage in inner.stages if isinstance(stage.method, Dense)]
        params["start"] = dense_until[-1] if dense_until else 0
        params["warmup"] = inner.stages[-1].until - params["start"]
        inner = inner.inner
    params["feedback"] = isinstance(inner, ErrorFeedback)
    if isinstance(inner, ErrorFeedback):
        inner = inner.inner
    own = {field.name: getattr(inner, field.name) for field in fields(inner)}  # type: ignore[arg-type]
    defaults = {field.name: field.default for field in fields(inner)} | OPTIONS  # type: ignore[arg-type]
    defaults["feedback"] = type(inner).feedback and inner.can_retain
    changed = {key: value for key, value in (own | params).items() if value != defaults[key]}
    spec = ":".join(filter(None, [inner.name, ",".join(f"{k}={_written(v)}" for k, v in changed.items())]))
    try:
        return spec if parse(spec) == method else repr(method)
    except SpecError:
        return repr(method)


def nearest(word: str, known: Iterable[str]) -> str:
    """A hint at the known word that looks most like a misspelt one, or nothing."""
    close = difflib.get_close_matches(word.lower(), known, n=1)
    return f" (did you mean {close[0]!r}?)" if close else ""


def _written(value: Any) -> str:
    return {True: "on", False: "off"}[value] if isinstance(value, bool) else str(value)


def _value(method: str, key: str, value: Any, known: dict[str, Any]) -> Any:
    """Read a value as the type that the default of its key has."""
    if key not in known:
        allowed = ", ".join(known) or "nothing"
        raise SpecError(f"unknown parameter {key!r} of {method}{nearest(key, known)}; it takes: {allowed}")
    kind = type(known[key])
    assert known[key] is not MISSING
    if key == "dense" and value not in DENSE:
        raise SpecError(f"dense={value!r} is not allowed: dense must be {' or '.join(map(repr, DENSE))}")
    if isinstance(value, str) and kind is bool:
        value = _SWITCH.get(value.lower(), value)
    try:
        if kind is bool and not isinstance(value, bool):
            raise ValueError
        if kind is not bool and isinstance(value, bool):
            raise ValueError
        if kind is int and not isinstance(value, str) and value != int(value):
            raise ValueError
        return kind(value)
    except (TypeError, ValueError, OverflowError):
        wanted = {bool: "on or off", int: "a whole number", float: "a number", str: "a word"}[kind]
        raise SpecError(f"{key}={value!r} is not allowed: {key} must be {wanted}") from None
