"""`Compression`: the same names everywhere, and a hint where one is misspelt or not called."""

from __future__ import annotations

import importlib
import pickle
from collections.abc import Callable
from typing import Any

import pytest
from catalogue import COMPOSED, SPECS

from hvd_compress import LocalWorld, parse
from hvd_compress.core.bucketing import Merge
from hvd_compress.core.router import Router
from hvd_compress.engine.api import Catalogue, CompressorBase
from hvd_compress.errors import SpecError
from hvd_compress.methods import REGISTRY

COMPRESSION: Catalogue[tuple[Router, Merge]] = Catalogue(lambda method, merge: (method, merge))


def test_names() -> None:
    assert COMPRESSION.none == (parse("none"), "auto")
    assert COMPRESSION.fp16 is COMPRESSION.fp16
    assert COMPRESSION.topk(ratio=0.1, feedback=False, merge=3) == (parse("topk:ratio=0.1,feedback=off"), 3)
    assert COMPRESSION.parse("int8", merge="layer") == (parse("int8"), "layer")
    assert COMPRESSION.parse(parse("int8")) == (parse("int8"), "auto")
    assert set(REGISTRY) <= set(dir(COMPRESSION))


def test_documentation_is_that_of_the_method() -> None:
    assert "Exact top-k" in (COMPRESSION.topk.__doc__ or "")


def test_misspelt() -> None:
    with pytest.raises(AttributeError, match="did you mean 'powersgd'"):
        COMPRESSION.powrsgd  # noqa: B018
    with pytest.raises(SpecError, match="did you mean 'ratio'"):
        COMPRESSION.topk(ratoi=0.1)
    with pytest.raises(SpecError, match="merge='no' is not allowed"):
        COMPRESSION.topk(merge="no")


@pytest.mark.parametrize(
    ("name", "value", "key"),
    [
        ("topk", 0.1, "ratio"),
        ("topk", "fp16", "values"),
        ("powersgd", 2, "rank"),
        ("qsgd", 4, "bits"),
        ("bf16", True, "twoway"),
    ],
)
def test_a_value_without_a_name_is_told_the_name_it_needs(name: str, value: object, key: str) -> None:
    cure = rf"Compression.{name}\({value!r}\) is missing the parameter's name: write {name}\({key}={value!r}\)"
    with pytest.raises(SpecError, match=cure):
        getattr(COMPRESSION, name)(value)
    assert getattr(COMPRESSION, name)(**{key: value})


@pytest.mark.parametrize(
    ("spec", "factor"),
    [("topk:ratio=0.999", "1.50"), ("topk:ratio=0.7,every=4", "1.05"), ("gtopk:ratio=0.999", "1.50")],
)
def test_a_ratio_that_sends_more_than_no_compression_is_warned_of_once(
    spec: str, factor: str, caplog: pytest.LogCaptureFixture
) -> None:
    for _ in range(2):
        COMPRESSION.by_name({"embed*": spec})
        COMPRESSION.parse(spec)
    (said,) = caplog.messages
    assert f"{spec} sends {factor} times the bytes of no compression" in said


@pytest.mark.parametrize("spec", [*SPECS, "topk:ratio=0.66", "randomk:ratio=1"])
def test_other_methods_are_not_warned_of(spec: str, caplog: pytest.LogCaptureFixture) -> None:
    COMPRESSION.parse(spec)
    assert not caplog.messages


def test_a_value_that_no_parameter_may_have() -> None:
    with pytest.raises(SpecError, match="is missing the parameter's name: `hvd-compress methods topk` lists the names"):
        COMPRESSION.topk(None)


@pytest.mark.parametrize("method", [None, 7, COMPRESSION.topk])
def test_what_is_no_method(method: Any) -> None:
    uses: list[Callable[[], object]] = [
        lambda: COMPRESSION.parse(method),
        lambda: COMPRESSION.by_name({"*": method}),
        lambda: COMPRESSION.phases({0: method}),
        lambda: LocalWorld(method, 2),
    ]
    for use in uses:
        with pytest.raises(SpecError, match=r"a spec is a string such as 'topk:ratio=0\.01', not "):
            use()


class Compressor(CompressorBase):
    """One without a framework."""

    def __init__(self, method: Router, merge: Merge) -> None:
        self.method, self.merge, self._steps = method, merge, 0


READY = Catalogue(Compressor)


def test_what_is_ready_may_be_called() -> None:
    assert READY.fp16() is READY.fp16 and READY.none() is READY.none
    assert READY.fp16(feedback=True, merge=2).method == parse("fp16:feedback=on")
    with pytest.raises(SpecError, match=r"fp16\(0\.1\) is missing the parameter's name"):
        READY.fp16(0.1)
    with pytest.raises(SpecError, match="is a compressor, not a factory: pass it without calling it"):
        READY.topk()()


@pytest.mark.parametrize("method", [*SPECS, *COMPOSED.values()], ids=[*SPECS, *COMPOSED])
def test_a_compressor_is_pickled_as_a_new_one(method: str | Router) -> None:
    old = READY.parse(method, merge="layer")
    old._steps = 5
    new = pickle.loads(pickle.dumps(old))
    assert (new.method, new.merge, new._steps) == (old.method, "layer", 0)


@pytest.mark.parametrize(("wanted", "other"), [("register", "torch"), ("compress", "distributed")])
def test_a_compressor_of_the_other_adapter_says_where_to_import_from(wanted: str, other: str) -> None:
    compressor = importlib.import_module(f"hvd_compress.{other}").Compression.topk()
    cure = "distributed" if wanted == "register" else "torch"
    with pytest.raises(AttributeError, match=f"{wanted}.*import Compression from hvd_compress.{cure} for"):
        getattr(compressor, wanted)
    with pytest.raises(AttributeError, match="no attribute 'stat'"):
        compressor.stat  # noqa: B018


@pytest.mark.parametrize("framework", ["torch", pytest.param("tensorflow", marks=pytest.mark.tensorflow)])
@pytest.mark.parametrize("name", ["pickle", "cloudpickle"])
def test_programs_may_take_compressors_with_them(framework: str, name: str) -> None:
    """To other processes, by Ray or ``horovod.run``."""
    compression, pickler = (
        importlib.import_module(f"hvd_compress.{framework}").Compression,
        importlib.import_module(name),
    )
    for old in (compression.topk(ratio=0.1, merge=3), compression.parse(COMPOSED["by_name"]), compression.fp16):
        new = pickler.loads(pickler.dumps(old))
        assert repr(new) == repr(old) and new is not old and new.stats().steps == 0
    assert repr(pickler.loads(pickler.dumps(compression)).int8()) == repr(compression.int8())


def test_a_factory_that_was_not_called_says_so() -> None:
    for name in ("compress", "decompress", "register", "registered", "all_reduce", "load"):
        use = getattr(COMPRESSION.topk, name)
        with pytest.raises(SpecError, match=r"parentheses are missing: pass Compression.topk\(\)"):
            use(None)


@pytest.mark.parametrize("values", [("topk",), ()])
def test_the_catalogue_is_not_called(values: tuple[str, ...]) -> None:
    with pytest.raises(SpecError, match=r'write Compression\.parse\("topk:ratio=0\.01"\), or Compression\.topk'):
        COMPRESSION(*values)


@pytest.mark.parametrize(
    "framework", ["torch", "distributed", pytest.param("tensorflow", marks=pytest.mark.tensorflow)]
)
def test_a_compressor_does_not_change(framework: str) -> None:
    compressor = importlib.import_module(f"hvd_compress.{framework}").Compression.topk()
    for name, value in (("ratio", 0.01), ("ratoi", 5), ("method", parse("int8")), ("merge", 2)):
        with pytest.raises(SpecError, match=f"{name}=.*cannot be set on a compressor.*Compression.phases"):
            setattr(compressor, name, value)
    assert repr(compressor.method) == repr(parse("topk"))
