"""Spec strings: what they mean, that they come back, and what bad ones answer."""

from __future__ import annotations

import dataclasses
import re
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import hvd_compress as hc
from hvd_compress.core.router import Everywhere, Router
from hvd_compress.engine.spec import build
from hvd_compress.errors import CompressionError, SpecError
from hvd_compress.methods import REGISTRY
from hvd_compress.methods.cast import Dense, Half
from hvd_compress.methods.int8 import Int8
from hvd_compress.methods.powersgd import PowerSGD
from hvd_compress.methods.randomk import RandomK
from hvd_compress.methods.topk import TopK
from hvd_compress.methods.wrappers.error_feedback import ErrorFeedback
from hvd_compress.methods.wrappers.router import Selective
from hvd_compress.methods.wrappers.schedule import Schedule, Stage


@pytest.mark.parametrize(
    ("spec", "method"),
    [
        ("none", Everywhere(Dense())),
        ("fp16", Everywhere(Half())),
        ("fp16:feedback=on", Everywhere(ErrorFeedback(Half()))),
        ("topk", Selective(ErrorFeedback(TopK()))),
        ("topk:ratio=0.5", Selective(ErrorFeedback(TopK(ratio=0.5)))),
        (" topk : ratio = 1e-3 , values = fp16 ", Selective(ErrorFeedback(TopK(ratio=0.001, values="fp16")))),
        ("topk:feedback=off", Selective(TopK())),
        ("randomk:unbiased=on", Selective(RandomK(unbiased=True))),
        ("randomk:feedback=no", Selective(RandomK())),
        ("int8:bits=16", Selective(Int8(bits=16))),
        ("powersgd:rank=2", Selective(ErrorFeedback(PowerSGD(rank=2)))),
        ("int8:min_size=5,vectors=on,dense=fp16", Selective(Int8(), Half(), 5, True)),
        ("int8:start=3", Selective(Schedule(Int8(), (Stage(3, Dense()),)))),
    ],
)
def test_meaning(spec: str, method: Router) -> None:
    assert hc.parse(spec) == method
    assert hc.parse(str(hc.parse(spec))) == method


def test_warmup_is_that_of_the_dgc_paper() -> None:
    """Ratios 25%, 6.25%, 1.5625%, 0.4%, then 0.1% (Lin et al., section 3.3)."""
    method = hc.parse("topk:ratio=0.001,start=10,warmup=40,feedback=off").inner  # type: ignore[attr-defined]
    assert [stage.until for stage in method.stages] == [10, 20, 30, 40, 50]
    assert method.stages[0].method == Dense()
    ratios = [stage.method.ratio for stage in method.stages[1:]]
    np.testing.assert_allclose(ratios, [0.25, 0.0625, 0.0156, 0.0040], rtol=0.02)
    assert method.inner == TopK(ratio=0.001)


@pytest.mark.parametrize(
    ("spec", "message"),
    [
        ("topkk", "unknown method 'topkk' (did you mean 'topk'?)"),
        ("", "unknown method ''"),
        (
            "topk(ratio=0.1)",
            "unknown method 'topk(ratio=0.1)'; a spec is one method, with options that follow a colon, as topk:ratio",
        ),
        ("topk,powersgd", "a spec is one method, with options that follow a colon, as topk:ratio=0.01"),
        ("POWERSGD", "did you mean 'powersgd'"),
        ("topk:ration=0.1", "unknown parameter 'ration' of topk (did you mean 'ratio'?)"),
        ("none:ratio=0.1", "unknown parameter 'ratio' of none; it takes: nothing"),
        ("topk:ratio=2", "topk: ratio=2.0 is not allowed"),
        ("topk:ratio=0.1;warmup=4", "cannot read 'ratio=0.1;warmup=4' in the spec"),
        ("topk:ratio=0", "ratio=0.0 is not allowed: ratio must be in (0, 1]"),
        ("topk:ratio=1.5", "ratio=1.5 is not allowed"),
        ("topk:ratio=-0.1", "ratio=-0.1 is not allowed"),
        ("topk:ratio=nan", "ratio=nan is not allowed"),
        ("topk:ratio=much", "ratio='much' is not allowed: ratio must be a number"),
        ("topk:ratio", "cannot read 'ratio' in the spec"),
        ("topk:ratio=", "cannot read 'ratio='"),
        ("topk:", "cannot read ''"),
        ("topk:ratio=0.1,,", "cannot read ''"),
        ("topk:ratio=0.1,ratio=0.2", "ratio is given twice"),
        ("topk:merge=at:12,40", "merge is not part of a spec such as 'topk:merge=at:12,40'"),
        ("topk:name=3", "unknown parameter 'name' of topk"),
        ("topk:values=fp8", "values='fp8' is not allowed: values must be 'fp32' or 'fp16'"),
        ("topk:feedback=maybe", "feedback='maybe' is not allowed: feedback must be 'on' or 'off' or 'ef21'"),
        ("topk:dense=int8", "dense='int8' is not allowed: dense must be 'none' or 'fp16'"),
        ("topk:min_size=-1", "min_size=-1 is not allowed"),
        ("topk:min_size=1.5", "min_size='1.5' is not allowed: min_size must be a whole number"),
        ("topk:start=-1", "start=-1 is not allowed"),
        ("topk:warmup=10", "warmup=10 is not allowed: warmup must be a multiple of 4"),
        ("powersgd:warmup=8", "which has no ratio: take start= instead"),
        ("powersgd:rank=0", "rank=0 is not allowed"),
        ("powersgd:rank=2.5", "rank='2.5' is not allowed: rank must be a whole number"),
        ("int8:bits=4", "bits=4 is not allowed: bits must be 8 or 16"),
        ("int8:block=6", "block=6 is not allowed: block must be a multiple of 4"),
        ("randomk:seed=-1", "seed=-1 is not allowed"),
        ("randomk:unbiased=on,feedback=on", "feedback=on is not supported"),
        ("none:feedback=on", "unknown parameter 'feedback' of none"),
    ],
)
def test_bad_specs(spec: str, message: str) -> None:
    with pytest.raises(SpecError) as error:
        hc.parse(spec)
    assert message in str(error.value)
    assert isinstance(error.value, CompressionError) and isinstance(error.value, ValueError)


@pytest.mark.parametrize(
    ("params", "message"),
    [
        ({"ratio": None}, "ratio=None is not allowed"),
        ({"ratio": True}, "ratio=True is not allowed"),
        ({"ratio": [1]}, "ratio=[1] is not allowed"),
        ({"feedback": 1}, "feedback=1 is not allowed"),
        ({"min_size": 2.5}, "min_size=2.5 is not allowed"),
        ({"dense": None}, "dense=None is not allowed"),
        ({"min_size": float("inf")}, "min_size=inf is not allowed"),
    ],
)
def test_bad_python_values(params: dict[str, object], message: str) -> None:
    with pytest.raises(SpecError, match=message.replace("[", r"\[")):
        build("topk", **params)


def test_python_values() -> None:
    assert build("topk", ratio=np.float64(0.25), feedback=False) == Selective(TopK(ratio=0.25))
    assert build("topk", ratio=1, min_size=8.0) == Selective(ErrorFeedback(TopK(ratio=1.0)), min_size=8)


def test_not_a_string() -> None:
    with pytest.raises(SpecError, match="a spec is a string"):
        hc.parse(0.01)  # type: ignore[arg-type]


def test_composed_by_hand_is_described_by_its_repr() -> None:
    router = Everywhere(Schedule(Dense(), (Stage(3, Half()), Stage(5, Dense()))))
    assert str(router) == repr(router)


@given(
    st.sampled_from(["topk", "randomk"]),
    st.floats(0, 1, exclude_min=True),
    st.booleans(),
    st.integers(0, 9999),
    st.booleans(),
    st.sampled_from(["none", "fp16"]),
    st.integers(0, 50),
    st.integers(0, 50).map(lambda n: 4 * n),
)
def test_specs_come_back(
    name: str, ratio: float, feedback: bool, min_size: int, vectors: bool, dense: str, start: int, warmup: int
) -> None:
    method = build(
        name,
        ratio=ratio,
        feedback=feedback,
        min_size=min_size,
        vectors=vectors,
        dense=dense,
        start=start,
        warmup=warmup,
    )
    assert str(method).startswith(name)
    assert hc.parse(str(method)) == method


@given(
    st.sampled_from([name for name, cls in REGISTRY.items() if not cls.linear]),
    st.fixed_dictionaries(
        {},
        optional={
            "feedback": st.sampled_from(["on", "off", "ef21"]),
            "decay": st.sampled_from([0.5, 1.0]),
            "lowpass": st.sampled_from([0.1, 1.0]),
            "momentum": st.sampled_from([0.0, 0.9]),
            "nesterov": st.booleans(),
            "clip_norm": st.sampled_from([0.0, 2.0]),
            "start": st.integers(0, 9),
            "every": st.sampled_from([0, 5]),
            "delay": st.sampled_from([0, 4]),
            "measure": st.booleans(),
        },
    ),
)
def test_any_options_come_back_or_are_refused(name: str, options: dict[str, Any]) -> None:
    try:
        method = build(name, **options)
    except SpecError as error:
        assert any(option in str(error) for option in options)
    else:
        assert str(method).startswith(name)
        assert hc.parse(str(method)) == method
        assert str(build(name, **dict(reversed(options.items())))) == str(method)


def test_options_are_in_the_order_of_saved_states() -> None:
    spec = "topk:ratio=0.1,momentum=0.9,nesterov=on,min_size=3,dense=fp16,every=4,feedback=off"
    name, _, options = spec.partition(":")
    assert str(hc.parse(f"{name}:{','.join(reversed(options.split(',')))}")) == spec


@given(st.text(alphabet="topkrandmin8eswg:=,.-0123456789 \n", max_size=40))
def test_any_text_parses_or_says_why(text: str) -> None:
    try:
        method = hc.parse(text)
    except SpecError as error:
        assert str(error)
    else:
        assert hc.parse(str(method)) == method


def test_catalogue_lists_every_method_with_its_defaults() -> None:
    infos = {info.name: info for info in hc.methods()}
    assert infos.keys() == REGISTRY.keys()
    assert infos["topk"].hyper_parameters == {"ratio": 0.01, "values": "fp32"}
    assert infos["topk"].feedback and not infos["none"].feedback
    for name, info in infos.items():
        assert info.paper and info.collective and info.state
        assert dataclasses.is_dataclass(REGISTRY[name])


@pytest.mark.parametrize(
    ("spec", "allowed"),
    [
        ("powersgd:iterations=1000", "1 .. 100"),
        ("powersgd:rank=100000", "1 .. 65536"),
        (f"sidco:stages={2**28}", "1 .. 100, or 0"),
        *((f"{name}:block={2**25}", str(2**24)) for name in ("int8", "thc", "fp8", "block8", "qsgd", "onebit", "loco")),
        (f"topkc:chunk={2**25}", str(2**24)),
        *((f"topk:{name}={2**31}", str(2**31 - 1)) for name in ("start", "warmup", "every", "delay")),
    ],
)
def test_whole_numbers_have_an_upper_bound(spec: str, allowed: str) -> None:
    with pytest.raises(SpecError, match=f"is not allowed: .* must be .*{re.escape(allowed)}"):
        hc.parse(spec)


@pytest.mark.parametrize(
    "text", ["{}", "topk:{}", "topk:ratio={}", "topk:{}=1", "topk:feedback={}", "topk:ratio=1,{0}=1,{0}=1"]
)
def test_long_values_are_cut_in_messages(text: str) -> None:
    with pytest.raises(SpecError) as caught:
        hc.parse(text.format("x" * 5000))
    assert "x" * 40 in str(caught.value) and "x" * 61 not in str(caught.value)


def test_options_follow_a_colon() -> None:
    with pytest.raises(SpecError, match=r"options that follow a colon, as topk:ratio=0\.01"):
        hc.parse("topk,ratio=0.01")


def test_a_method_is_shown_as_it_is_written() -> None:
    assert str(PowerSGD(rank=2, min_gain=0)) == "powersgd:rank=2,min_gain=0"
    assert str(ErrorFeedback(TopK(values="fp16"))) == "topk:values=fp16"
    with pytest.raises(SpecError, match="warmup is not supported with efsignsgd, which"):
        hc.parse("efsignsgd:warmup=4")
