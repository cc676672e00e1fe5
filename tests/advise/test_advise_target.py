"""What a prediction is for: devices, backends, and where the model has been validated."""

from __future__ import annotations

import pytest
from advise.setups import GATHERED, JOB, QUICK, REDUCED, SPECS, TOPK, TOPKC, rates

from hvd_compress.errors import SpecError
from hvd_compress.tools.advise.constants import Constants
from hvd_compress.tools.advise.gpus import FILL, HOST, KERNELS
from hvd_compress.tools.advise.model import Setup, predict
from hvd_compress.tools.advise.rates import NO_RATES
from hvd_compress.tools.advise.target import Backend, Device, Target, read_target
from hvd_compress.tools.advise.validated import beyond

CPUS, GPUS = Target("cpu", "gloo"), Target("h100", "nccl")


@pytest.mark.parametrize(
    ("device", "backend", "target"),
    [
        ("cpu", None, CPUS),
        ("cpu", "gloo", CPUS),
        ("h100", None, GPUS),
        ("h100", "nccl", GPUS),
    ],
)
def test_what_was_not_told_is_implied(device: Device, backend: Backend | None, target: Target) -> None:
    assert read_target(device, backend) == target


@pytest.mark.parametrize(("device", "backend"), [("cpu", "nccl"), ("a100", "gloo")])
def test_what_is_not_supported_together(device: Device, backend: Backend) -> None:
    with pytest.raises(SpecError, match=f"backend={backend} is not allowed with device={device}: "):
        read_target(device, backend)
    with pytest.raises(SpecError, match="backend=mpi is not allowed with device=a100: "):
        read_target("a100", "mpi", "horovod")


def test_ddp_has_no_mpi() -> None:
    with pytest.raises(SpecError, match=r"backend=mpi is not allowed with framework=ddp: .* take gloo or nccl"):
        read_target("cpu", "mpi", "ddp")
    assert read_target("cpu", "mpi", "horovod").backend == "mpi"


def test_a_gpu_takes_as_many_passes_at_the_speed_of_its_memory() -> None:
    """Where its kernels were not measured, as many as this processor."""
    here, constants = rates(3e-9, 1e-10, copy=1e-9), Constants(memory=1e-12)
    there = GPUS.rates(here, [TOPKC], constants)
    assert there.copy == pytest.approx(8e-12), "a copy reads and writes 4 bytes"
    for name in ("encode", "decode", "each"):
        passes = getattr(here.methods[TOPKC], name) / here.copy
        assert getattr(there.methods[TOPKC], name) / there.copy == pytest.approx(passes)
    assert CPUS.rates(here, [TOPKC], Constants()) == here
    assert GPUS.unknown(SPECS) == [TOPKC] and CPUS.unknown(SPECS) == [*GATHERED, *REDUCED]


def test_a_gpu_whose_kernels_were_measured_takes_as_many_copies() -> None:
    found = GPUS.rates(NO_RATES, ["qsgd", "qsgd:twoway=on"], Constants(memory=1e-12))
    one, both = (found.methods[spec] for spec in ("qsgd", "qsgd:twoway=on"))
    assert one.encode == both.encode == pytest.approx((FILL + KERNELS["qsgd"].encode) * 8e-12)
    assert one.decoding(5) == pytest.approx(5 * KERNELS["qsgd"].each * 8e-12), "each payload is of a whole gradient"
    assert both.decoding(5) == pytest.approx(2 * KERNELS["qsgd"].each * 8e-12), "all parts, and then the sum"


def test_launches_take_as_long_as_there_are_gradients() -> None:
    setup = JOB._replace(rate=25e9, tree=True, tensors=161)
    constants = GPUS.constants
    known = GPUS.rates(NO_RATES, ["qsgd"], constants)
    without = predict("qsgd", setup, known, constants._replace(launch=0.0)).step
    assert predict("qsgd", setup, known, constants).step - without == pytest.approx(HOST["qsgd"] / 1000)
    assert predict("qsgd", setup._replace(tensors=322), known, constants).step - without == pytest.approx(
        2 * HOST["qsgd"] / 1000
    )


def test_a_gpu_compresses_and_casts_much_faster() -> None:
    here = rates(3e-9, 1e-10, copy=1e-9)
    setup, constants = JOB._replace(rate=25e9, tree=True), GPUS.constants._replace(launch=0.0)
    there = GPUS.rates(here, SPECS, constants)
    cpu, gpu = predict(TOPK, setup, here, Constants()), predict(TOPK, setup, there, constants)
    assert gpu.encode + gpu.decode < (cpu.encode + cpu.decode) / 100
    assert predict("fp16", setup, there, constants).host == 0, "float16 is summed in hardware"


def test_constants_and_cores_that_a_device_lacks() -> None:
    with pytest.raises(SpecError, match=r"constant bus is not allowed with device=cpu: .* add --device h100"):
        CPUS.check(JOB, Constants(bus=1e-9))
    with pytest.raises(SpecError, match=r"cores-per-rank=0\.5 is not allowed with device=h100"):
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
        (INSIDE._replace(ranks_per_node=2), CPUS, ["2 ranks on each node"]),
        (INSIDE._replace(cores_per_rank=0.1), CPUS, ["0.1 of a core for each rank"]),
        (INSIDE, Target("cpu", "mpi"), ["MPI"]),
        (INSIDE, GPUS, ["GPUs", "NCCL"]),
    ],
)
def test_the_validated_range(setup: Setup, target: Target, outside: list[str]) -> None:
    assert beyond(setup, target) == outside


def test_rates_are_those_of_the_measurement() -> None:
    assert QUICK.at(QUICK.copy) == QUICK
