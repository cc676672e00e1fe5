"""The judgement of ``hvd-compress doctor``, on machines that could be."""

from __future__ import annotations

import pytest
from doctor.machines import HEALTHY, NO_TENSORFLOW, NO_TORCH, TENSORFLOW, TORCH, machine

from hvd_compress.tools.doctor.cures import number
from hvd_compress.tools.doctor.facts import Facts, Framework
from hvd_compress.tools.doctor.rules import Finding, first_line, judge, usable

BOTH, ONLY_TORCH, ONLY_TENSORFLOW, NEITHER = ["torch", "tensorflow"], ["torch"], ["tensorflow"], list[str]()
DDP = TORCH._replace(backends=("gloo", "nccl"))
UNBUILT = "ImportError: Extension horovod.torch has not been built: /env/mpi_lib.so not found\nIf this is not expected"
SYMBOL = "HorovodVersionMismatchError: Framework pytorch installed with version 2.12.0 but found version 2.13.0+cpu."
CUDA = ("gloo", "mpi", "cuda")


def failed(framework: Framework, stage: str, error: str) -> Framework:
    return framework._replace(stage=stage, error=error, built=())


def against(version: str | None) -> Framework:
    return TORCH._replace(against=version)


CASES: list[tuple[Facts, str, str, str, str, list[str]]] = [
    # Python
    (machine(python="3.12.1"), "warning", "Python", "tested with Python 3.11", "--run", BOTH),
    # Horovod
    (machine(horovod=None), "fault", "Horovod", "not installed", "HOROVOD_WITH_PYTORCH=1", NEITHER),
    (machine(DDP, horovod=None), "note", "Horovod", "there are hvd_compress.distributed", "", ["ddp"]),
    (machine(DDP), "ok", "torch.distributed", "Gloo, NCCL; for DistributedDataParallel", "", [*BOTH, "ddp"]),
    (machine(horovod="0.28.0"), "ok", "Horovod", "0.28.0", "", BOTH),
    (machine(horovod="0.27.0"), "warning", "Horovod", "calling frames are read", "horovod==0.28.1", BOTH),
    (machine(horovod="0.29.0"), "warning", "Horovod", "calling frames are read", "horovod==0.28.1", BOTH),
    # Frameworks
    (machine(NO_TORCH), "note", "PyTorch", "not installed", "", ONLY_TENSORFLOW),
    (machine(NO_TORCH, NO_TENSORFLOW), "fault", "Frameworks", "neither", "pip install torch==2.13.0", NEITHER),
    (machine(TORCH._replace(version="2.14.0")), "warning", "PyTorch", "newer than 2.13", "install PyTorch 2.13", BOTH),
    (machine(TORCH._replace(version="1.13.1")), "warning", "PyTorch", "older than 2.13", "--run", BOTH),
    (
        machine(failed(TORCH, "framework", "OSError: libtorch.so: bad")),
        *("fault", "PyTorch", "2.13.0+cpu cannot be imported: OSError: libtorch.so: bad"),
        *("pip install --force-reinstall torch", ONLY_TENSORFLOW),
    ),
    (machine(None, TENSORFLOW._replace(version="2.21.0")), "warning", "TensorFlow", "newer than 2.15.1", "--run", BOTH),
    (
        machine(None, TENSORFLOW._replace(version="2.21.0", keras="3.12.0")),
        *("warning", "Keras", "never reduces", "hvd_compress.keras.DistributedOptimizer", BOTH),
    ),
    (machine(numpy="2.1.0"), "fault", "TensorFlow", "with numpy 2.1.0", "pip install 'numpy<2'", BOTH),
    (
        machine(None, failed(TENSORFLOW, "framework", "AttributeError: _ARRAY_API not found"), numpy="2.1.0"),
        *("fault", "TensorFlow", "_ARRAY_API", "pip install 'numpy<2'", ONLY_TORCH),
    ),
    (machine(None, TENSORFLOW._replace(version="2.18.0"), numpy="2.1.0"), "warning", "TensorFlow", "newer", "", BOTH),
    # Horovod's side of a framework
    (
        machine(failed(against(None), "horovod", UNBUILT)),
        *("fault", "Horovod for PyTorch", "installed without PyTorch or before it"),
        *("HOROVOD_WITH_PYTORCH=1 HOROVOD_WITH_TENSORFLOW=1", ONLY_TENSORFLOW),
    ),
    (
        machine(failed(against("2.12.0"), "horovod", SYMBOL)),
        *("fault", "Horovod for PyTorch", "built against PyTorch 2.12.0, not 2.13.0"),
        *("--no-cache-dir --no-build-isolation --force-reinstall", ONLY_TENSORFLOW),
    ),
    (
        machine(against("2.12.0")),
        *("warning", "Horovod for PyTorch", "against PyTorch 2.12.0", "HOROVOD_WITH_PYTORCH=1", BOTH),
    ),
    (
        machine(failed(TORCH, "horovod", "ImportError: libmpi.so.40: cannot open shared object file: No such file")),
        *("fault", "Horovod for PyTorch", "libmpi.so.40", "LD_LIBRARY_PATH", ONLY_TENSORFLOW),
    ),
    (
        machine(failed(TORCH, "horovod", "ModuleNotFoundError: No module named 'cloudpickle'")),
        *("fault", "Horovod for PyTorch", "cloudpickle", "pip install cloudpickle", ONLY_TENSORFLOW),
    ),
    (
        machine(failed(TORCH, "adapter", "ImportError: cannot import name 'x'")),
        *("fault", "Horovod for PyTorch", "hvd_compress.torch cannot be imported", "--no-deps .", ONLY_TENSORFLOW),
    ),
    (
        machine(failed(TORCH, "adapter", "ModuleNotFoundError: No module named 'numba'")),
        *("fault", "Horovod for PyTorch", "numba", "pip install numba", ONLY_TENSORFLOW),
    ),
    (
        machine(failed(TORCH, "adapter", "did not answer within 600 s")),
        *("fault", "Horovod for PyTorch", "the import of hvd_compress.torch did not", "run doctor again"),
        ONLY_TENSORFLOW,
    ),
    (machine(TORCH._replace(built=())), "fault", "Horovod for PyTorch", "nothing", "WITH_GLOO=1", ONLY_TENSORFLOW),
    (
        machine(TORCH._replace(gpus=2, built=CUDA)),
        "warning",
        "Horovod for PyTorch",
        "NCCL",
        "GPU_OPERATIONS=NCCL",
        BOTH,
    ),
    (
        machine(TORCH._replace(gpus=2, built=(*CUDA, "nccl"))),
        "ok",
        "Horovod for PyTorch",
        "NCCL, CUDA; without ROCm",
        "",
        BOTH,
    ),
    (machine(TORCH._replace(gpus=1)), "ok", "PyTorch", "sees 1 GPU", "", BOTH),
    (machine(TORCH._replace(gpus=8)), "note", "Nodes", "hvd-compress plan --ranks-per-host 8", "", BOTH),
    (
        machine(TORCH._replace(unknown=("ps in _grouped_allreduce_grad_async()",))),
        *("fault", "Calls from PyTorch", "ps in _grouped_allreduce_grad_async()", "install Horovod 0.28.1"),
        ONLY_TENSORFLOW,
    ),
    # Commands
    (machine(horovodrun=None, on_path=False), "warning", "horovodrun", "not found", "mpirun", BOTH),
    (machine(on_path=False), "warning", "horovodrun", "not on PATH", 'export PATH="/env/bin:$PATH"', BOTH),
    (machine(launches="/usr/bin/python3"), "warning", "horovodrun", "of another Python", "activate", BOTH),
    (machine(mpirun=None), "warning", "mpirun", "not found", "horovodrun --gloo", BOTH),
    (
        machine(NO_TORCH, TENSORFLOW._replace(built=("gloo",)), mpirun=None),
        *("note", "mpirun", "not found", "", ONLY_TENSORFLOW),
    ),
    (
        machine(mpirun="Open MPI 5.0.11"),
        *("warning", "mpirun", "refuses", '--mpi "--binding-args=--bind-to none --map-by slot"', BOTH),
    ),
    (machine(mpirun="HYDRA build details: 5.1"), "ok", "mpirun", "HYDRA", "", BOTH),
    (machine(mpi4py=None, library=None), "note", "mpi4py", "only hvd_compress.mpi needs it", "", BOTH),
    (machine(library="!RuntimeError: cannot load MPI"), "warning", "mpi4py", "cannot load MPI", "mpi4py", BOTH),
    (machine(library="MPICH 4.2.0"), "warning", "mpi4py", "loads MPICH 4.2.0", "build mpi4py", BOTH),
]


def about(facts: Facts, subject: str) -> Finding:
    [finding] = [finding for finding in judge(facts) if finding.subject == subject]
    return finding


@pytest.mark.parametrize(("facts", "status", "subject", "found", "cure", "works"), CASES)
def test_each_fault_is_told_with_its_cure(
    facts: Facts, status: str, subject: str, found: str, cure: str, works: list[str]
) -> None:
    finding = about(facts, subject)
    assert finding.status == status
    assert found in finding.found
    assert cure in (" ".join(finding.cure) if finding.cure else "")
    assert bool(cure) or status in ("ok", "note") or finding.cure
    assert usable(facts) == works


def test_a_healthy_machine_needs_no_cure() -> None:
    assert {finding.status for finding in judge(HEALTHY)} == {"ok"}
    assert not [finding for finding in judge(HEALTHY) if finding.cure]


@pytest.mark.parametrize("facts", [case[0] for case in CASES])
def test_warnings_and_faults_have_cures(facts: Facts) -> None:
    for finding in judge(facts):
        assert (finding.cure is not None) == (finding.status in ("warning", "fault")), finding


def test_the_build_is_for_what_is_there() -> None:
    finding = about(machine(NO_TORCH, horovod=None, mpirun=None), "Horovod")
    assert finding.cure and "HOROVOD_WITHOUT_PYTORCH=1 HOROVOD_WITH_TENSORFLOW=1" in finding.cure.command
    assert "HOROVOD_WITHOUT_MPI=1" in finding.cure.command and "NCCL" not in finding.cure.command
    assert "CXX_STANDARD" not in finding.cure.command and "--force-reinstall" not in finding.cure.command


def test_new_frameworks_need_changed_sources() -> None:
    cpp = (
        " && sed -i 's/CMAKE_CXX_STANDARD 14/CMAKE_CXX_STANDARD 17/' ./horovod-0.28.1/horovod/torch/CMakeLists.txt && "
    )
    xla = " && sed -i '/xla_mpi_ops.cc/d' ./horovod-0.28.1/horovod/tensorflow/CMakeLists.txt && "
    for torch, tensorflow, expected in [
        ("2.1.0", "2.15.1", {cpp}),
        ("2.0.1", "2.16.1", {xla}),
        ("2.0.1", "2.15.1", set()),
    ]:
        facts = machine(TORCH._replace(version=torch), TENSORFLOW._replace(version=tensorflow), horovod=None)
        finding = about(facts, "Horovod")
        assert finding.cure and {change for change in (cpp, xla) if change in finding.cure.command} == expected
        assert finding.cure.command.endswith("./horovod-0.28.1" if expected else "horovod==0.28.1")


@pytest.mark.parametrize(
    ("version", "expected"), [("2.13.0+cpu", (2, 13)), ("Open MPI 5.0.11", (5, 0)), ("3", (3,)), ("", ()), (None, ())]
)
def test_versions_are_read(version: str | None, expected: tuple[int, ...]) -> None:
    assert number(version) == expected


def test_long_errors_are_cut() -> None:
    assert first_line("\n\n  first  \nsecond") == "first"
    assert len(first_line("x" * 1000)) < 310 and first_line(" \n") == "no message"
