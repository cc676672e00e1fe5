"""Parse and write spec strings such as ``"topk:ratio=0.01,feedback=off"``."""

from __future__ import annotations

import difflib
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import MISSING, fields, replace
from typing import Any, TypeVar

from hvd_compress.core.method import Method, Wrapper, check_range, written
from hvd_compress.core.router import Everywhere, Routable, Router, routed
from hvd_compress.engine.candidates import BASELINES, STANDARD, AutoOptions
from hvd_compress.errors import SpecError, short
from hvd_compress.methods import REGISTRY
from hvd_compress.methods.cast import Dense
from hvd_compress.methods.wrappers.error_feedback import EF21, ErrorFeedback
from hvd_compress.methods.wrappers.hierarchy import Hierarchical
from hvd_compress.methods.wrappers.measure import Measured
from hvd_compress.methods.wrappers.momentum import Momentum, MomentumCorrection
from hvd_compress.methods.wrappers.precondition import Precondition
from hvd_compress.methods.wrappers.router import Auto, Candidate, Selective
from hvd_compress.methods.wrappers.schedule import Delayed, schedule

Made = TypeVar("Made")

AUTO = "auto"
"""Spec of the choice among candidates, which is none of the methods."""

DENSE: dict[str, Method] = {name: cls() for name, cls in REGISTRY.items() if cls.linear}

MEMORY: dict[str, Any] = {
    "decay": 1.0,
    "lowpass": 1.0,
    "momentum": 0.0,
    "nesterov": False,
    "clip_norm": 0.0,
}
"""Options of error feedback and momentum besides ``feedback``, with defaults that a method may override."""

OPTIONS: dict[str, Any] = {
    "min_size": 1024,
    "vectors": False,
    "dense": "none",
    "hierarchical": False,
    "inside": "none",
    "start": 0,
    "warmup": 0,
    "every": 0,
    "delay": 0,
    "measure": False,
    "preconditioned": False,
    "beta2": 0.95,
}
"""Options that choose where and when to compress, with their defaults."""

_WORDS = {"dense": [*DENSE], "inside": ["none", "fp16", "int8"], "feedback": ["on", "off", "ef21"]}
"""Allowed words of enumerated options."""

MINOR = ("values", "twoway", "block", "seed")
"""Parameters that many methods share; none is a method's main hyper-parameter."""

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


def parse(spec: str) -> Router:
    """Parse a spec string into a router: a method, and the gradients that it compresses.

    Besides its own hyper-parameters, every method except ``none`` and ``fp16`` takes these options:

    * error feedback and momentum: ``feedback=on|off|ef21``; with ``feedback=on`` also ``decay`` and ``lowpass`` (see
      `hvd_compress.methods.wrappers.error_feedback.ErrorFeedback`), or ``momentum``, ``nesterov`` and ``clip_norm``
      (see `hvd_compress.methods.wrappers.momentum.MomentumCorrection`);
    * uncompressed gradients: ``min_size=n`` skips tensors with fewer elements, ``vectors=on|off`` includes or skips
      vectors, and ``dense=none|fp16`` is the method of skipped gradients;
    * schedule: ``start=steps`` (dense steps first), ``warmup=steps`` (lower the ratio in stages), ``every=n`` (a dense
      step every n steps) and ``delay=k`` (see `hvd_compress.methods.wrappers.schedule.Delayed`);
    * nodes with several ranks: ``hierarchical=on`` sums without compression within a node, in fewer bits with
      ``inside=fp16|int8``, and compresses between nodes (see `hvd_compress.methods.wrappers.hierarchy.Hierarchical`);
    * ``preconditioned=on|off``: divide by the root of the second moment before compression, as Adam does, so that SGD
      without momentum applies the result; with ``beta2`` and ``clip_norm`` (see
      `hvd_compress.methods.wrappers.precondition.Precondition`);
    * ``measure=on|off``: compare each sum with the exact one, at the cost of an uncompressed allreduce.

    ``auto`` is none of the methods but a choice among some, with the options of
    `hvd_compress.engine.candidates.AutoOptions`; see `auto`.

    Args:
        spec: ``name`` or ``name:key=value,key=value``.

    Raises:
        SpecError: If the name, a key or a value is unknown or not allowed.
    """
    name, params = read(spec)
    return auto(**params) if name == AUTO else build(name, **params)


def auto(candidates: Sequence[str] = (), **params: Any) -> Auto:
    """Make the router that chooses among candidates; values may be strings.

    Args:
        candidates: Spec strings, for any optimizer; by default those that keep the loss with the one that there is.
            ``none`` and 16 bits are candidates besides.
        **params: See `hvd_compress.engine.candidates.AutoOptions`.

    Raises:
        SpecError: If a candidate or an option is unknown or not allowed.
    """
    options = make(AutoOptions, AUTO, params)
    if isinstance(candidates, str):
        raise SpecError(f"candidates={short(candidates)} is not allowed: pass a list of spec strings")
    kept = {one.spec: [one.keeps(options.loss, adam) for adam in (True, False)] for one in STANDARD}
    standard = [Candidate(spec, parse(spec), *keeps) for spec, keeps in kept.items()]
    routers = {str(router): router for router in map(parse, (*BASELINES, *candidates))}
    routers.pop("fp16", None)  # one of the baselines, which an overflow cannot harm
    found = tuple(Candidate(*one) for one in routers.items()) if candidates else tuple(standard)
    defaults = AutoOptions()
    changed = [f"{key}={value}" for key, value in vars(options).items() if value != getattr(defaults, key)]
    spec = "" if candidates else ":".join(filter(None, [AUTO, ",".join(changed)]))
    return Auto(found, options.max_error or None, options.probe, spec)


def read(spec: str) -> tuple[str, dict[str, str]]:
    """Split a spec string into its name and its parameters.

    Raises:
        SpecError: If it does not have the form ``name:key=value,key=value``.
    """
    if not isinstance(spec, str):
        raise SpecError(f"a spec is a string such as 'topk:ratio=0.01', not {short(spec)}")
    name, colon, rest = spec.partition(":")
    params: dict[str, str] = {}
    for item in rest.split(",") if colon else ():
        key, equals, value = (part.strip() for part in item.partition("="))
        if not (key and equals and value) or "=" in value:
            raise SpecError(f"cannot read {short(item)} in the spec {short(spec)}: write name:key=value,key=value")
        if key == "merge":
            raise SpecError(
                f"merge is not part of a spec such as {short(spec)}: write Compression.parse(spec, merge=...)"
            )
        if key in params:
            raise SpecError(f"{key:.60} is given twice in the spec {short(spec)}: give it once")
        params[key] = value
    return name.strip(), params


def as_router(method: str | Routable) -> Router:
    """Return the router of a spec string or of a method; return a router unchanged.

    Raises:
        SpecError: If it is none of these, or an invalid spec string.
    """
    return routed(method) if isinstance(method, Method | Router) else parse(method)


def build(name: str, /, **params: Any) -> Router:
    """Make the router of a method from its name and parameters, as in spec strings; values may be strings.

    Raises:
        SpecError: If the name, a parameter or a value is unknown or not allowed.
    """
    cls = REGISTRY.get(name)
    if cls is None:
        form = "a spec is one method, with options that follow a colon, as topk:ratio=0.01; "
        raise SpecError(unknown("method", name, REGISTRY, form if re.search(r"[^\w-]", name) else ""))
    own, options = _own_defaults(cls), _option_defaults(cls)
    values = {key: _value(name, key, value, own | options) for key, value in params.items()}
    method: Method = make(cls, name, {key: value for key, value in values.items() if key in own})
    if not method.supports_feedback:
        options |= {"feedback": "off"} | {key: value for key, value in MEMORY.items() if key in options}
    known = own | options
    order = sorted(known, key="feedback".__eq__)  # feedback comes last, as in the states that were saved
    changed = {key: values[key] for key in order if values.get(key, known[key]) != known[key]}
    options |= {key: value for key, value in values.items() if key in options}
    _check_memory(name, _remember(method, options), options, changed)
    spec = ":".join(filter(None, [name, ",".join(f"{key}={written(value)}" for key, value in changed.items())]))
    return replace(_compose(method, options), spec=spec)


def meant(name: str, value: object) -> str:
    """Guess which parameter of a method a positional value is meant for; return "" if none accepts it.

    Args:
        name: Name of the method.
        value: The value.
    """
    for key in sorted(_own_defaults(REGISTRY[name]), key=lambda key: key in MINOR):
        try:
            build(name, **{key: value})
        except SpecError:
            continue
        return key
    return ""


def make(cls: type[Made], name: str, params: Mapping[str, Any]) -> Made:
    """Make an instance of a dataclass from its parameters, as in spec strings; values may be strings.

    Raises:
        SpecError: If a parameter or a value is unknown or not allowed; the message starts with the name.
    """
    own = _own_defaults(cls)
    values = {key: _value(name, key, value, own) for key, value in params.items()}
    try:
        return cls(**values)
    except SpecError as error:
        raise SpecError(f"{name}: {error}") from None


def _own_defaults(cls: type[Any]) -> dict[str, Any]:
    """Return the fields of a dataclass and their defaults."""
    return {field.name: field.default for field in fields(cls)}


def _option_defaults(cls: type[Method]) -> dict[str, Any]:
    """Return the options that a method takes, with their defaults for it."""
    if issubclass(cls, Dense):
        return {}
    feedback = {"feedback": "on" if cls.feedback else "off"}
    return feedback if cls.linear else feedback | MEMORY | dict(cls.memory) | OPTIONS


def _compose(method: Method, o: Mapping[str, Any]) -> Everywhere | Selective:
    """Wrap a method as its options say."""
    if o.get("inside", "none") != "none" and not o["hierarchical"]:
        raise SpecError(f"inside={o['inside']} has no effect without hierarchical=on: add it, or leave out inside")
    if o.get("beta2", OPTIONS["beta2"]) != OPTIONS["beta2"] and not o["preconditioned"]:
        raise SpecError(f"beta2={o['beta2']} has no effect without preconditioned=on: add it, or leave out beta2")
    if o.get("hierarchical"):
        masks = bool(o["momentum"]) and o["feedback"] == "on"
        method = Hierarchical(method, o["inside"], masks)
    remembering = _remember(method, o)
    if method.linear:
        return Everywhere(remembering)
    result = schedule(remembering, o["start"], o["warmup"], o["every"])
    if o["measure"]:
        result = Measured(result)
    if o["delay"]:
        result = Delayed(result, o["delay"])
    dense = DENSE[o["dense"]]
    if o["momentum"]:
        dense = Momentum(dense, o["momentum"], o["nesterov"])
    if o["preconditioned"]:
        result, dense = (Precondition(method, o["beta2"], o["clip_norm"]) for method in (result, dense))
    return Selective(result, dense, o["min_size"], o["vectors"])


def _remember(method: Method, o: Mapping[str, Any]) -> Method:
    """Wrap a method in error feedback or momentum as its options say."""
    if o.get("momentum"):
        if o["feedback"] == "on":
            clip_norm = 0.0 if o["preconditioned"] else o["clip_norm"]  # of gradients, not of updates
            return MomentumCorrection(method, o["momentum"], o["nesterov"], clip_norm)
        if o["feedback"] == "off":
            return Momentum(method, o["momentum"], o["nesterov"])
        raise SpecError("momentum is not supported with feedback=ef21: take feedback=on or feedback=off")
    if o.get("feedback") == "on":
        return ErrorFeedback(method, o.get("decay", 1.0), o.get("lowpass", 1.0))
    return EF21(method) if o.get("feedback") == "ef21" else method


def _check_memory(name: str, memory: Method, o: Mapping[str, Any], changed: Mapping[str, Any]) -> None:
    """Reject options that the chosen feedback or momentum does not have."""
    for key, default in MEMORY.items():
        clips = key == "clip_norm" and o.get("preconditioned", False)
        known = clips or (isinstance(memory, Wrapper) and hasattr(memory, key))
        if changed.get(key, default) != default and not known:
            raise SpecError(
                f"{key}={written(changed[key])} has no effect for {name} with this feedback: decay and lowpass need"
                " feedback=on, nesterov needs momentum, clip_norm needs both or preconditioned=on"
            )


def nearest(word: str, known: Iterable[str]) -> str:
    """Return a hint at the known word closest to a misspelt one, or ""."""
    close = difflib.get_close_matches(word.lower(), known, n=1)
    return f" (did you mean {close[0]!r}?)" if close else ""


def unknown(kind: str, word: str, known: Iterable[str], hint: str = "") -> str:
    """Return the refusal of a word that is none of the known ones: ``"unknown method 'topkk'; there are: ..."``."""
    return f"unknown {kind} {short(word)}{nearest(word, known)}; {hint}there are: {', '.join(known)}"


def _word(key: str, value: Any) -> str:
    """Read the value of an enumerated option; on and off may be written as switches are."""
    if isinstance(value, str) and "on" in _WORDS[key]:
        value = _SWITCH.get(value.lower(), value)
    if isinstance(value, bool):
        value = written(value)
    check_range(key, value, " or ".join(map(repr, _WORDS[key])), value in _WORDS[key])
    return str(value)


def _value(method: str, key: str, value: Any, known: dict[str, Any]) -> Any:
    """Convert a value to the type of its key's default."""
    if key not in known:
        allowed = ", ".join(known) or "nothing"
        raise SpecError(f"unknown parameter {short(key)} of {method}{nearest(key, known)}; it takes: {allowed}")
    kind = type(known[key])
    assert known[key] is not MISSING
    if key in _WORDS:
        return _word(key, value)
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
        raise SpecError(f"{key}={short(value)} is not allowed: {key} must be {wanted}") from None
