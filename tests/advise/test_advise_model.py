"""Laws that hold whatever the constants are."""

from __future__ import annotations

import math
from itertools import pairwise
from typing import Any

import numpy as np
import pytest
from advise.setups import FREE, GATHERED, JOB, QUICK, REDUCED, SIDE, SLOW, SPECS, TOPK, TOPKC, made, rates

from hvd_compress import LocalWorld
from hvd_compress.errors import SpecError, UnsupportedError
from hvd_compress.tools.advise.constants import BACKENDS, Constants, read_constants
from hvd_compress.tools.advise.model import Prediction, baseline, predict

MANY = (1, 2, 3, 4, 8, 16, 64, 256)


@pytest.mark.parametrize("spec", SPECS)
def test_the_parts_make_up_the_step(spec: str) -> None:
    one = made(spec)
    assert one.step == one.compute + one.encode + one.decode + one.exchange - one.hidden
    assert 0 <= one.hidden <= one.exchange == one.link + one.host + one.rounds


@pytest.mark.parametrize("spec", SPECS)
def test_more_of_what_costs_never_costs_less(spec: str) -> None:
    growing: dict[str, tuple[Any, ...]] = {
        "ranks": MANY,
        "params": (10**6, 10**7, 10**8),
        "latency": (0.0, 1e-5, 1e-3),
        "compute": (0.01, 0.1, 1.0),
    }
    for name, values in growing.items():
        steps = [made(spec, JOB._replace(**{name: value})).step for value in values]
        assert all(before < after for before, after in pairwise(steps)), name
    rate = [made(spec, rate=bits).step for bits in (math.inf, 1e11, 1e9, 1e8, 1e6)]
    assert all(before <= after for before, after in pairwise(rate)) and rate[0] < rate[-1]
    cores = [made(spec, cores_per_rank=cores).step for cores in (16, 1, 0.5, 0.25)]
    assert cores[0] == cores[1] < cores[2] < cores[3]


@pytest.mark.parametrize("name", ["byte", "half", "hop", "cycle"])
def test_constants_cost(name: str) -> None:
    value = getattr(Constants(), name)
    less, more = (made("fp16", constants=Constants()._replace(**{name: by * value})) for by in (0.5, 1))
    assert less.step < more.step


def test_compressing_takes_longer_in_training() -> None:
    alone, training = (made(TOPK, constants=Constants(coding=by)) for by in (1.0, 3.0))
    assert (training.encode, training.decode) == (3 * alone.encode, 3 * alone.decode)
    assert made("fp16", constants=Constants(coding=1.0)) == made("fp16", constants=Constants(coding=3.0))


@pytest.mark.parametrize("spec", SPECS)
def test_a_single_rank_communicates_nothing(spec: str) -> None:
    one = made(spec, ranks=1)
    assert one.link == one.host == one.rounds == one.exchange == one.hidden == one.wire == 0
    assert one.step == one.compute + one.encode + one.decode


@pytest.mark.parametrize("spec", SPECS)
def test_a_perfect_network_takes_nothing(spec: str) -> None:
    one = predict(spec, JOB._replace(rate=math.inf, latency=0.0), QUICK, FREE)
    assert one.exchange == 0 < one.wire


@pytest.mark.parametrize("spec", SPECS)
def test_a_single_host_has_no_link(spec: str) -> None:
    one = made(spec, ranks_per_node=8)
    assert one.wire == one.link == 0 < one.host
    assert one.rounds == made(spec, latency=0.0).rounds


def test_the_link_takes_its_bytes_at_its_rate() -> None:
    one = predict("none", JOB, QUICK, FREE._replace(efficiency=0.5))
    assert one.wire == 4 * JOB.params * 2 * 7 / 8
    assert one.link == pytest.approx(8 * one.wire / 0.5e9)
    assert made("fp16").wire == one.wire / 2


@pytest.mark.parametrize("spec", GATHERED)
def test_what_is_gathered_grows_in_proportion(spec: str) -> None:
    dense = 4 * 0.001 * JOB.params * 2
    few, many = (made(spec, ranks=n).wire - dense * (n - 1) / n for n in (2, 256))
    assert many == pytest.approx(255 * few)
    few, many = (predict(spec, JOB._replace(ranks=n), SLOW, FREE).decode for n in (2, 256))
    assert many - few == pytest.approx(254 * SLOW.methods[spec].each * 0.999 * JOB.params)


@pytest.mark.parametrize("spec", REDUCED)
def test_what_is_reduced_is_bounded(spec: str) -> None:
    assert made(spec, ranks=1024).wire < 2 * made(spec, ranks=2).wire
    assert made(spec, ranks=1024).link < 2 * made(spec, ranks=2).link
    assert made(spec, ranks=1024).decode == made(spec, ranks=2).decode


@pytest.mark.parametrize("spec", [TOPK, TOPKC, "qsgd", "powersgd"])
def test_the_bytes_are_those_of_a_model_of_two_matrices(spec: str) -> None:
    """Of two ranks: then a rank sends what it hands to collectives, no more and no less."""
    world, rng = LocalWorld(spec, size=2, merge=2), np.random.default_rng(0)
    world.step({name: [rng.standard_normal((SIDE, SIDE)).astype(np.float32) for _ in range(2)] for name in "ab"})
    known = QUICK._replace(methods={spec: QUICK.methods[TOPK]})
    job = JOB._replace(params=2 * SIDE**2, ranks=2, vectors=0.0)
    assert predict(spec, job, known, FREE).wire == world.bytes_sent


@pytest.mark.parametrize("spec", ["none", TOPKC])
def test_local_steps_exchange_once_in_a_while(spec: str) -> None:
    """Nothing of it overlaps with the backward pass: it begins after a step."""
    each, once = made(spec), made(f"{spec}@30")
    assert once.step - once.compute == pytest.approx((each.encode + each.decode + each.exchange) / 30)
    assert once.wire == pytest.approx(each.wire / 30) and once.hidden == 0


def test_local_steps_overlap_with_those_of_their_delay() -> None:
    known = QUICK._replace(methods={"qsgd:bits=4": QUICK.methods["qsgd"]})
    long, short = (predict("streaming@96", JOB._replace(compute=seconds), known, FREE) for seconds in (1000.0, 1e-3))
    assert long.hidden == long.exchange
    assert short.hidden == pytest.approx(8 * 5 * 1e-3 / 96)


def test_vectors_are_sent_as_they_are() -> None:
    with_them, without = made(TOPKC, vectors=0.25), made(TOPKC, vectors=0.0)
    assert with_them.wire == pytest.approx(0.75 * without.wire + 0.25 * made("none").wire)
    assert with_them.encode == pytest.approx(0.75 * without.encode)
    assert made("none", vectors=0.25) == made("none", vectors=0.0)


def test_backward_hides_what_is_ready_before_its_end() -> None:
    """All of it: the first half of two buckets; of Horovod's own messages, as much as there is time for."""
    constants = FREE._replace(overlap=1.0, backward=0.5)
    job = JOB._replace(compute=100.0, latency=0.0)
    assert [predict(TOPK, job._replace(merge=m), QUICK, constants).hidden for m in (1, 2, 4)] == [
        pytest.approx(share * predict(TOPK, job, QUICK, constants).exchange) for share in (0, 0.5, 0.75)
    ]
    short = predict("none", JOB._replace(compute=0.2), QUICK, constants)
    assert short.hidden == pytest.approx(0.5 * 0.2)
    assert short.hidden < short.exchange
    assert predict("none", job, QUICK, constants).hidden == predict("none", job, QUICK, constants).exchange


def test_shared_cores_slow_down_what_processors_do() -> None:
    alone, shared = made(TOPK), made(TOPK, cores_per_rank=0.25)
    assert shared.encode == 4 * alone.encode and shared.decode == 4 * alone.decode
    assert shared.host == 4 * alone.host and shared.link == alone.link
    assert shared.compute == alone.compute, "it was measured so"
    assert made("none", cores_per_rank=0.25).host == 7 * made("none").host, "threads that wait take their share, too"


def test_casting_takes_as_long_as_memory_does() -> None:
    one = predict("fp16", JOB, rates(0.0, copy=1e-9), FREE)
    assert one.encode == one.decode == pytest.approx(0.75e-9 * JOB.params)
    assert predict("none", JOB, rates(0.0, copy=1e-9), FREE).encode == 0


def test_trees_have_fewer_hops() -> None:
    """An allreduce of bits, and the collective: 2 * 7 messages round a ring of 8, 2 * 3 along trees.

    What is gathered goes round a ring in either case: 7 messages.
    """
    constants = FREE._replace(hop=1.0)
    for spec, messages in ((TOPK, [14 + 7, 6 + 7]), ("none", [14 + 14, 6 + 6])):
        job = JOB._replace(merge=1, vectors=0.0, latency=0.0)
        assert [predict(spec, job._replace(tree=tree), QUICK, constants).rounds for tree in (False, True)] == messages
    job = JOB._replace(ranks_per_node=4, latency=1.0, tree=True)
    assert predict("none", job, QUICK, FREE).rounds == 2 * 2, "of the 3 levels of a tree, one is between hosts"


def test_ddp_agrees_on_nothing_and_has_buckets_of_its_own() -> None:
    """No allreduce of bits goes before a collective, and without compression, the last bucket is not hidden either."""
    job = JOB._replace(merge=1, vectors=0.0, latency=0.0, framework="ddp")
    for spec, messages in ((TOPK, 7), ("none", 14)):
        assert predict(spec, job, QUICK, FREE._replace(hop=1.0)).rounds == messages
    hides = FREE._replace(overlap=1.0)
    assert job.ddp_buckets == 3, "of 1, 25 and 5 MB"
    window = hides.backward * job.compute
    assert predict("none", job, QUICK, hides).hidden == pytest.approx((1 - 1 / 3) * window)
    assert predict(TOPK, job, QUICK, hides).hidden == 0 < predict(TOPK, job._replace(merge=2), QUICK, hides).hidden
    assert made("none", cores_per_rank=0.25, framework="ddp").host == 4 * made("none", framework="ddp").host


def test_inside_a_host_the_bus_may_be_slower_than_the_link() -> None:
    """In a ring, each rank sends what its host sends, so that the slower one of both counts."""
    job = JOB._replace(ranks=8, ranks_per_node=4, rate=8e9, latency=0.0)
    sent = 4 * job.params * 2 * 7 / 8
    for bus, seconds in ((0.5e-9, sent / 1e9), (4e-9, sent * 4e-9)):
        assert predict("none", job, QUICK, FREE._replace(bus=bus)).link == pytest.approx(seconds)
    alone = job._replace(ranks_per_node=8)
    assert predict("none", alone, QUICK, FREE._replace(bus=4e-9)).link == pytest.approx(sent * 4e-9), "no link at all"
    assert predict("none", alone, QUICK, FREE._replace(bus=4e-9)).wire == 0


def test_the_baseline_is_the_better_of_none_and_fp16() -> None:
    zeros = dict.fromkeys(("encode", "decode", "link", "host", "rounds", "hidden", "wire"), 0.0)
    fast, slow, best = (
        Prediction(spec, compute=0.1, exchange=seconds, **zeros)
        for spec, seconds in (("none", 0.1), ("fp16", 0.2), (TOPK, 0.05))
    )
    assert baseline([fast, slow, best]).spec == "none"
    assert baseline([slow, best, fast._replace(exchange=0.3)]).spec == "fp16"


def test_only_hops_between_hosts_have_latency() -> None:
    job = JOB._replace(merge=1, vectors=0.0, latency=1.0)
    assert predict(TOPK, job, QUICK, FREE).rounds == 21
    assert predict(TOPK, job._replace(ranks_per_node=4), QUICK, FREE).rounds == 21 * 2 / 8


def test_methods_that_cannot_be_used_with_so_many() -> None:
    known = QUICK._replace(methods={"int8": QUICK.methods[TOPK]})
    with pytest.raises(UnsupportedError, match="1000 ranks"):
        predict("int8", JOB._replace(ranks=1000), known, Constants())


def test_jobs_that_cannot_be() -> None:
    given: list[dict[str, Any]] = [
        *({"ranks": 0}, {"merge": 0}, {"ranks_per_node": 0}),
        *({"cores_per_rank": 0.0}, {"side": 4}, {"vectors": 1.0}, {"compute": math.inf}, {"latency": -1.0}),
        *({"rate": 0.0}, {"params": 0}),
    ]
    for changes in given:
        with pytest.raises(SpecError):
            JOB._replace(**changes).check()
    JOB.check()


def test_constants_are_read() -> None:
    found = read_constants(["byte=1e-9", " overlap = 0.25 "], BACKENDS["nccl"])
    assert found == BACKENDS["nccl"]._replace(byte=1e-9, overlap=0.25)
    assert read_constants([]) == Constants()
    for text in ("bite=1", "byte", "byte=-1", "hop=nan", "overlap=1.5", "efficiency=0"):
        with pytest.raises(SpecError):
            read_constants([text])
