"""The judgement of ``hvd-compress doctor``, on machines that could be."""

from __future__ import annotations

from doctor.machines import HEALTHY, NO_TENSORFLOW, NO_TORCH, TENSORFLOW, TORCH, machine

from hvd_compress.tools.doctor.cures import number
from hvd_compress.tools.doctor.facts import Facts, Framework
from hvd_compress.tools.doctor.rules import Finding, judge, usable

BOTH, ONLY_TORCH, ONLY_TENSORFLOW, NEITHER = ["torch", "tensorflow"], ["torch"], ["tensorflow"], list[str]()
DDP = TORCH._replace(backends=("gloo", "nccl"))
UNBUILT = "ImportError: Extension horovod.torch has not been built: /env/mpi_lib.so not found\nIf this is not expected"
SYMBOL = "HorovodVersionMismatchError: Framework pytorch installed with version 2.12.0 but found version 2.13.0+cpu."
CUDA = ("gloo", "mpi", "cuda")


def failed(framework: Framework, stage: str, error: str) -> Framework:
    return framework._replace(stage=stage, error=error, built=())


def against(version: str | None) -> Framework:
    return TORCH._replace(against=version)


CASES: list[tuple[Facts, str, str, str, list[str]]] = [
    (machine(python="3.12.1"), "warning", "Python", "--run", BOTH),
    (machine(horovod=None), "fault", "Horovod", "HOROVOD_WITH_PYTORCH=1", NEITHER),
    (machine(DDP, horovod=None), "note", "Horovod", "", ["ddp"]),
    (machine(DDP), "ok", "torch.distributed", "", [*BOTH, "ddp"]),
    (
        machine(DDP._replace(stage="horovod", error="ImportError: not built", against=None)),
        "warning",
        "Horovod for PyTorch",
        "HOROVOD_WITH_PYTORCH=1",
        ["tensorflow", "ddp"],
    ),
    (machine(horovod="0.28.0"), "ok", "Horovod", "", BOTH),
    (machine(horovod="0.27.0"), "warning", "Horovod", "horovod==0.28.1", BOTH),
    (machine(horovod="0.29.0"), "warning", "Horovod", "horovod==0.28.1", BOTH),
    (machine(NO_TORCH), "note", "PyTorch", "", ONLY_TENSORFLOW),
    (machine(NO_TORCH, NO_TENSORFLOW), "fault", "Frameworks", "pip install torch==2.13.0", NEITHER),
    (machine(TORCH._replace(version="2.14.0")), "warning", "PyTorch", "install PyTorch 2.13", BOTH),
    (machine(TORCH._replace(version="1.13.1")), "warning", "PyTorch", "--run", BOTH),
    (
        machine(failed(TORCH, "framework", "OSError: libtorch.so: bad")),
        "fault",
        "PyTorch",
        "pip install --force-reinstall torch",
        ONLY_TENSORFLOW,
    ),
    (machine(None, TENSORFLOW._replace(version="2.21.0")), "warning", "TensorFlow", "--run", BOTH),
    (
        machine(None, TENSORFLOW._replace(version="2.21.0", keras="3.12.0")),
        "warning",
        "Keras",
        "hvd_compress.keras.DistributedOptimizer",
        BOTH,
    ),
    (machine(numpy="2.1.0"), "fault", "TensorFlow", "pip install 'numpy<2'", BOTH),
    (
        machine(None, failed(TENSORFLOW, "framework", "AttributeError: _ARRAY_API not found"), numpy="2.1.0"),
        "fault",
        "TensorFlow",
        "pip install 'numpy<2'",
        ONLY_TORCH,
    ),
    (machine(None, TENSORFLOW._replace(version="2.18.0"), numpy="2.1.0"), "warning", "TensorFlow", "", BOTH),
    (
        machine(failed(against(None), "horovod", UNBUILT)),
        "fault",
        "Horovod for PyTorch",
        "HOROVOD_WITH_PYTORCH=1 HOROVOD_WITH_TENSORFLOW=1",
        ONLY_TENSORFLOW,
    ),
    (
        machine(failed(against("2.12.0"), "horovod", SYMBOL)),
        "fault",
        "Horovod for PyTorch",
        "--no-cache-dir --no-build-isolation --force-reinstall",
        ONLY_TENSORFLOW,
    ),
    (machine(against("2.12.0")), "warning", "Horovod for PyTorch", "HOROVOD_WITH_PYTORCH=1", BOTH),
    (
        machine(failed(TORCH, "horovod", "ImportError: libmpi.so.40: cannot open shared object file: No such file")),
        "fault",
        "Horovod for PyTorch",
        "LD_LIBRARY_PATH",
        ONLY_TENSORFLOW,
    ),
    (
        machine(failed(TORCH, "horovod", "ModuleNotFoundError: No module named 'cloudpickle'")),
        "fault",
        "Horovod for PyTorch",
        "pip install cloudpickle",
        ONLY_TENSORFLOW,
    ),
    (
        machine(failed(TORCH, "adapter", "ImportError: cannot import name 'x'")),
        "fault",
        "Horovod for PyTorch",
        "--no-deps .",
        ONLY_TENSORFLOW,
    ),
    (
        machine(failed(TORCH, "adapter", "ModuleNotFoundError: No module named 'numba'")),
        "fault",
        "Horovod for PyTorch",
        "pip install numba",
        ONLY_TENSORFLOW,
    ),
    (
        machine(failed(TORCH, "adapter", "did not answer within 600 s")),
        "fault",
        "Horovod for PyTorch",
        "run doctor again",
        ONLY_TENSORFLOW,
    ),
    (machine(TORCH._replace(built=())), "fault", "Horovod for PyTorch", "WITH_GLOO=1", ONLY_TENSORFLOW),
    (machine(TORCH._replace(gpus=2, built=CUDA)), "warning", "Horovod for PyTorch", "GPU_OPERATIONS=NCCL", BOTH),
    (machine(TORCH._replace(gpus=2, built=(*CUDA, "nccl"))), "ok", "Horovod for PyTorch", "", BOTH),
    (machine(TORCH._replace(gpus=1)), "ok", "PyTorch", "", BOTH),
    (machine(TORCH._replace(gpus=8)), "note", "Nodes", "", BOTH),
    (
        machine(TORCH._replace(unknown=("ps in _grouped_allreduce_grad_async()",))),
        "fault",
        "Calls from PyTorch",
        "install Horovod 0.28.1",
        ONLY_TENSORFLOW,
    ),
    (machine(horovodrun=None, on_path=False), "warning", "horovodrun", "mpirun", BOTH),
    (machine(on_path=False), "warning", "horovodrun", 'export PATH="/env/bin:$PATH"', BOTH),
    (machine(launches="/usr/bin/python3"), "warning", "horovodrun", "activate", BOTH),
    (machine(mpirun=None), "warning", "mpirun", "horovodrun --gloo", BOTH),
    (machine(NO_TORCH, TENSORFLOW._replace(built=("gloo",)), mpirun=None), "note", "mpirun", "", ONLY_TENSORFLOW),
    (
        machine(mpirun="Open MPI 5.0.11"),
        "warning",
        "mpirun",
        '--mpi "--binding-args=--bind-to none --map-by slot"',
        BOTH,
    ),
    (machine(mpirun="HYDRA build details: 5.1"), "ok", "mpirun", "", BOTH),
    (machine(mpi4py=None, library=None), "note", "mpi4py", "", BOTH),
    (machine(library="!RuntimeError: cannot load MPI"), "warning", "mpi4py", "mpi4py", BOTH),
    (machine(library="MPICH 4.2.0"), "warning", "mpi4py", "build mpi4py", BOTH),
]
"""Machines, the finding about one subject, a part of its cure, and what can be used."""


def about(facts: Facts, subject: str) -> Finding:
    [finding] = [finding for finding in judge(facts) if finding.subject == subject]
    return finding


def test_each_fault_is_found_with_its_cure() -> None:
    for facts, status, subject, cure, works in CASES:
        finding = about(facts, subject)
        assert finding.status == status, finding
        assert cure in (" ".join(finding.cure) if finding.cure else ""), finding
        assert usable(facts) == works, finding
        for one in judge(facts):
            assert (one.cure is not None) == (one.status in ("warning", "fault")), one


def test_a_healthy_machine_needs_no_cure() -> None:
    assert {finding.status for finding in judge(HEALTHY)} == {"ok"}
    assert not [finding for finding in judge(HEALTHY) if finding.cure]


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


def test_versions_are_read() -> None:
    versions = {"2.13.0+cpu": (2, 13), "Open MPI 5.0.11": (5, 0), "3": (3,), "": (), None: ()}
    assert {version: number(version) for version in versions} == versions
