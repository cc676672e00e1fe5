"""What a prediction is for: devices, backends, and where the model has been validated."""

from __future__ import annotations

import pytest
from plan.setups import JOB, QUICK, TOPK, rates

from hvd_compress.errors import SpecError
from hvd_compress.tools.plan.constants import BACKENDS, Constants
from hvd_compress.tools.plan.model import Setup, predict
from hvd_compress.tools.plan.target import Backend, Device, Target, read_target
from hvd_compress.tools.plan.validated import beyond

CPUS, GPUS = Target("cpu", "gloo"), Target("gpu", "nccl")


@pytest.mark.parametrize(
    ("device", "backend", "target"),
    [
        (None, None, CPUS),
        ("cpu", None, CPUS),
        (None, "gloo", CPUS),
        (None, "mpi", Target("cpu", "mpi")),
        (None, "nccl", GPUS),
        ("gpu", None, GPUS),
        ("gpu", "nccl", GPUS),
    ],
)
def test_what_was_not_told_is_implied(device: Device | None, backend: Backend | None, target: Target) -> None:
    assert read_target(device, backend) == target


@pytest.mark.parametrize(("device", "backend"), [("cpu", "nccl"), ("gpu", "gloo"), ("gpu", "mpi")])
def test_what_is_not_supported_together(device: Device, backend: Backend) -> None:
    with pytest.raises(SpecError, match=f"backend={backend} is not allowed with device={device}: "):
        read_target(device, backend)


def test_ddp_has_no_mpi() -> None:
    with pytest.raises(SpecError, match=r"backend=mpi is not allowed with framework=ddp: .* take gloo or nccl"):
        read_target(None, "mpi", "ddp")
    assert read_target(None, "nccl", "ddp").constants == GPUS.constants


def test_a_gpu_takes_as_many_passes_at_the_speed_of_its_memory() -> None:
    here = rates(3e-9, 1e-10, copy=1e-9)
    there = GPUS.rates(here, Constants(memory=1e-12))
    assert there.copy == pytest.approx(8e-12), "a copy reads and writes 4 bytes"
    for name in ("encode", "decode", "each"):
        passes = getattr(here.methods[TOPK], name) / here.copy
        assert getattr(there.methods[TOPK], name) / there.copy == pytest.approx(passes)
    assert CPUS.rates(here, Constants()) == here


def test_a_gpu_compresses_and_casts_much_faster() -> None:
    here = rates(3e-9, 1e-10, copy=1e-9)
    setup, constants = JOB._replace(rate=25e9, tree=True), BACKENDS["nccl"]
    cpu = predict(TOPK, setup, here, Constants())
    gpu = predict(TOPK, setup, GPUS.rates(here, constants), constants)
    assert gpu.encode + gpu.decode < (cpu.encode + cpu.decode) / 100
    assert predict("fp16", setup, GPUS.rates(here, constants), constants).host == 0, "float16 is summed in hardware"


def test_constants_and_cores_that_a_device_lacks() -> None:
    with pytest.raises(SpecError, match=r"constant bus is not allowed with device=cpu: .* add --backend nccl"):
        CPUS.check(JOB, Constants(bus=1e-9))
    with pytest.raises(SpecError, match=r"cores-per-rank=0\.5 is not allowed with device=gpu"):
        GPUS.check(JOB._replace(cores_per_rank=0.5), GPUS.constants)
    CPUS.check(JOB, Constants())
    GPUS.check(JOB, GPUS.constants)


INSIDE = JOB._replace(ranks=8, rate=1e9)


@pytest.mark.parametrize(
    ("setup", "target", "outside"),
    [
        (INSIDE, CPUS, []),
        (INSIDE._replace(ranks=2, rate=1e8, cores_per_rank=0.25), CPUS, []),
        (INSIDE._replace(ranks=16), CPUS, ["16 ranks"]),
        (INSIDE._replace(ranks=1), CPUS, ["1 rank"]),
        (INSIDE._replace(rate=1.1e9), CPUS, ["a rate of 1.1 Gbit/s"]),
        (INSIDE._replace(rate=5e7), CPUS, ["a rate of 50 Mbit/s"]),
        (INSIDE._replace(ranks_per_host=2), CPUS, ["2 ranks on each host"]),
        (INSIDE._replace(cores_per_rank=0.1), CPUS, ["0.1 of a core for each rank"]),
        (INSIDE, Target("cpu", "mpi"), ["MPI"]),
        (INSIDE, GPUS, ["GPUs", "NCCL"]),
    ],
)
def test_the_validated_range(setup: Setup, target: Target, outside: list[str]) -> None:
    assert beyond(setup, target) == outside


def test_rates_are_those_of_the_measurement() -> None:
    assert QUICK.at(QUICK.copy) == QUICK
