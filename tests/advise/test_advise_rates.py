"""How fast methods are: what is made of measurements, and what is refused."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from typer.testing import CliRunner
from worlds import leaves

from hvd_compress.core.bucket import Bucket
from hvd_compress.core.collectives import State, World
from hvd_compress.engine.spec import parse
from hvd_compress.errors import SpecError
from hvd_compress.methods import REGISTRY
from hvd_compress.tools.advise import rates
from hvd_compress.tools.advise.rates import RANKS, Rate, Rates, measure, read, time_method
from hvd_compress.tools.bench.local.command import bench
from hvd_compress.tools.bench.local.methods import timed_steps
from hvd_compress.transport.lockstep import lockstep

SIZE = 1000


def written(folder: Path, ranks: int, **decode: float) -> Path:
    """A file of ``bench methods``: encoding takes 2 ms, which is two copies."""
    lines = [{"spec": spec, "encode_ms": 2.0, "encode": 2.0, "decode_ms": ms} for spec, ms in decode.items()]
    path = folder / f"{ranks}.json"
    path.write_text(json.dumps({"settings": {"size": SIZE, "ranks": ranks}, "results": lines}))
    return path


def test_decoding_grows_along_a_line_for_what_is_gathered_alone(tmp_path: Path) -> None:
    paths = [written(tmp_path, 2, topk=5.0, topkc=3.0), written(tmp_path, 4, topk=7.0, topkc=4.0)]
    found = read(paths, ["topk", "topkc", "fp16"])
    assert found.copy == pytest.approx(1e-6)
    topk, topkc = found.methods["topk"], found.methods["topkc"]
    assert topk.encode == pytest.approx(2e-6)
    assert [topk.decoding(n) for n in (0, 2, 4, 64)] == pytest.approx([3e-6, 5e-6, 7e-6, 67e-6])
    assert [topkc.decoding(n) for n in (2, 64)] == pytest.approx([3e-6, 3e-6]), "the better one, as it cannot grow"


@pytest.mark.parametrize(("decode", "line"), [((7.0, 5.0), [5e-6, 5e-6]), ((1.0, 9.0), [0.0, 1e-6])])
def test_noise_makes_no_negative_times(tmp_path: Path, decode: tuple[float, float], line: list[float]) -> None:
    paths = [written(tmp_path, ranks, topk=ms) for ranks, ms in zip((2, 4), decode, strict=True)]
    topk = read(paths, ["topk"]).methods["topk"]
    assert [topk.decoding(0), topk.decoding(2)] == pytest.approx(line)


def test_measured_here() -> None:
    heard: list[str] = []
    found = measure(["fp16", "topk", "topkc", "topk"], 4096, 64, 1, heard.append)
    assert heard == [f"{spec}, {ranks} ranks" for spec in ("none", "topk", "topkc") for ranks in RANKS]
    assert set(found.methods) == {"topk", "topkc"}
    assert found.copy > 0 and found.methods["topkc"].each == 0
    assert all(rate.encode > 0 and rate.decode >= 0 for rate in found.methods.values())
    assert Rates.from_json(json.loads(json.dumps(found.as_json()))) == found


def test_rates_of_a_plan_are_read(tmp_path: Path) -> None:
    known, path = Rates(1e-9, {"topk": Rate(3e-9, 2e-9, 1e-9)}), tmp_path / "plan.json"
    path.write_text(json.dumps({"rates": known.as_json()}))
    assert read([path], ["topk", "fp16"]) == known
    with pytest.raises(SpecError, match=r"plan.json' is not allowed: it lacks topkc, dgc; write it anew"):
        read([path], ["topk", "topkc", "dgc"])


@pytest.mark.parametrize("spec", ["topk", "powersgd", "loco", "qsgd:twoway=on"])
def test_all_ranks_do_what_they_do_in_training(spec: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """What they keep from step to step is the same as when all go in lockstep."""
    kept: list[list[State]] = []

    def watched(*arguments: Any, **options: Any) -> Any:
        for done in timed_steps(*arguments, **options):
            kept.append(done.states)
            yield done

    monkeypatch.setattr(rates, "timed_steps", watched)
    time_method(spec, 64**2, 64, 3, 2)
    method, bucket, ops = parse(spec).core, Bucket("b0", ((64, 64),), "float32"), rates._ops()
    rng = np.random.default_rng(0)
    grads = [rng.standard_normal(64**2, dtype=np.float32) for _ in range(3)]
    states = [method.init(ops, bucket, World(0, 3)) for _ in grads]
    assert len(kept) == 3
    for found in kept:
        states = [end.state for end in lockstep(ops, method, bucket, [x.copy() for x in grads], states)]
        for state, own in zip(states, found, strict=True):
            for path, leaf in leaves(state).items():
                np.testing.assert_array_equal(leaves(own)[path], leaf)


def test_any_method_is_timed() -> None:
    for name in REGISTRY:
        if name != "none":
            timed = time_method(name, 1024, 32, 3, 1)
            assert timed.ranks == 3
            assert timed.encode > 0 and timed.decode > 0 and timed.copy > 0, name


def test_files_of_the_bench_are_read(tmp_path: Path) -> None:
    paths = [tmp_path / f"{ranks}.json" for ranks in RANKS]
    for path, ranks in zip(paths, RANKS, strict=True):
        options = ["--size", "4096", "--turns", "1", "--ranks", str(ranks), "--json", str(path)]
        assert CliRunner().invoke(bench, ["methods", "qsgd", *options]).exit_code == 0
    lines: Any = [json.loads(path.read_text())["results"][0] for path in paths]
    rate = read(paths, ["qsgd"]).methods["qsgd"]
    assert rate.encode == pytest.approx(min(line["encode_ms"] for line in lines) / 1000 / 4096)


def test_files_that_are_something_else(tmp_path: Path) -> None:
    path = tmp_path / "rates.json"
    for text in ("", "[]", "{}", '{"settings": {"size": 0, "ranks": 2}, "results": [{}]}'):
        path.write_text(text)
        with pytest.raises(SpecError):
            read([path], ["topk"])


def test_one_number_of_ranks_is_not_enough(tmp_path: Path) -> None:
    path = written(tmp_path, 2, topk=5.0)
    with pytest.raises(SpecError, match=r"topk must have been measured with two numbers of ranks.* --ranks 8"):
        read([path, path], ["topk"])
