"""Rules that judge a machine: each is a pure function of the facts."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Literal, NamedTuple

from hvd_compress.tools.doctor.cures import OPEN_MPI_5, TESTED, Cure, build, number, numpy_too_new, of_error
from hvd_compress.tools.doctor.facts import LATE, Facts, Framework

PARTS = {"gloo": "Gloo", "mpi": "MPI", "nccl": "NCCL", "cuda": "CUDA", "rocm": "ROCm"}

Status = Literal["ok", "note", "warning", "fault"]


class Finding(NamedTuple):
    """The result of a rule."""

    # ``"ok"``; ``"note"``: is not there and need not be; ``"warning"``: works, but; ``"fault"``: does not
    status: Status
    subject: str
    found: str
    cure: Cure | None = None


def judge(facts: Facts) -> list[Finding]:
    return [finding for rule in RULES for finding in rule(facts)]


def usable(facts: Facts) -> list[str]:
    """Return the frameworks with which compression can work here; ``"ddp"`` is PyTorch without Horovod."""
    by_horovod = [framework.name for framework in facts.frameworks if facts.horovod and _usable(framework)]
    return [*by_horovod, *(["ddp"] if _backends(facts) else [])]


def _backends(facts: Facts) -> list[str]:
    """Return the backends of `torch.distributed`."""
    return [name for one in facts.frameworks if one.stage != "framework" for name in one.backends]


def _usable(framework: Framework) -> bool:
    ready = bool(framework.version) and framework.stage == "done" and not framework.unknown
    return ready and bool({"gloo", "mpi"} & {*framework.built})


def python(facts: Facts) -> Iterator[Finding]:
    found = f"hvd_compress {facts.package}, Python {facts.python}, numpy {facts.numpy}"
    if number(facts.python) == number(TESTED["python"]):
        yield Finding("ok", "Python", found)
    else:
        cure = Cure(f"try it with --run; if that fails, make an environment with Python {TESTED['python']}")
        yield Finding("warning", "Python", f"{found}; tested with Python {TESTED['python']}", cure)


def horovod(facts: Facts) -> Iterator[Finding]:
    if facts.horovod is None:
        others = "LocalWorld and hvd_compress.mpi"
        if _backends(facts):
            yield Finding("note", "Horovod", f"not installed; without it there are hvd_compress.distributed, {others}")
        else:
            yield Finding("fault", "Horovod", f"not installed; without it there are {others}", build(facts))
    elif number(facts.horovod) == number(TESTED["horovod"]):
        yield Finding("ok", "Horovod", facts.horovod)
    else:
        found = (
            f"{facts.horovod}; tested with {TESTED['horovod']}, whose calling frames are read to tell parameters apart"
        )
        cure = Cure(f"try it with --run; if that fails, install Horovod {TESTED['horovod']}: {build(facts).text}")
        yield Finding("warning", "Horovod", found, cure._replace(command=build(facts).command))


def distributed(facts: Facts) -> Iterator[Finding]:
    if found := _backends(facts):
        names = ", ".join(PARTS[name] for name in found)
        yield Finding("ok", "torch.distributed", f"{names}; for DistributedDataParallel and FSDP2")


def frameworks(facts: Facts) -> Iterator[Finding]:
    if all(framework.version is None for framework in facts.frameworks):
        cure = Cure("install one of them, then build Horovod", f"pip install torch=={TESTED['torch']}.0")
        yield Finding("fault", "Frameworks", "neither PyTorch nor TensorFlow is installed", cure)
        return
    for framework in facts.frameworks:
        if framework.version is None:
            yield Finding("note", framework.title, "not installed")
            continue
        yield _framework(facts, framework)
        if framework.keras:
            yield _keras(framework)
        if facts.horovod and framework.stage != "framework":
            yield from _horovod_for(facts, framework)


def _framework(facts: Facts, framework: Framework) -> Finding:
    if framework.stage == "framework":
        found = f"{framework.version or ''} cannot be imported: {first_line(framework.error)}".strip()
        return Finding("fault", framework.title, found, of_error(facts, framework))
    gpus = f", sees {framework.gpus} GPU{'s' * (framework.gpus > 1)}" if framework.gpus else ""
    found, tested = f"{framework.version}{gpus}", TESTED[framework.name]
    if numpy_too_new(facts, framework):
        return Finding("fault", framework.title, f"{found} with numpy {facts.numpy}", of_error(facts, framework))
    if number(framework.version) == number(tested):
        return Finding("ok", framework.title, found)
    age = "newer" if number(framework.version) > number(tested) else "older"
    cure = Cure(f"try it with --run; if that fails, install {framework.title} {tested} and build Horovod again")
    return Finding("warning", framework.title, f"{found}: {age} than {tested}, which is tested", cure)


def _keras(framework: Framework) -> Finding:
    if number(framework.keras) < (3,):
        return Finding("ok", "Keras", str(framework.keras))
    found = f"{framework.keras}: with Keras 3, hvd.keras.DistributedOptimizer never reduces, without a word"
    cure = "use hvd_compress.keras.DistributedOptimizer in its place (hvd.DistributedGradientTape is not concerned)"
    return Finding("warning", "Keras", found, Cure(cure))


def _horovod_for(facts: Facts, framework: Framework) -> Iterator[Finding]:
    subject = f"Horovod for {framework.title}"
    if framework.stage != "done" and framework.backends:
        found = f"{_no_horovod(framework)}; hvd_compress.distributed needs none"
        yield Finding("warning", subject, found, of_error(facts, framework))
        return
    if framework.stage != "done":
        yield Finding("fault", subject, _no_horovod(framework), of_error(facts, framework))
        return
    found = _parts(framework)
    if not {"gloo", "mpi"} & {*framework.built}:
        yield Finding("fault", subject, f"{found}; it needs Gloo or MPI", build(facts))
    elif framework.gpus and "nccl" not in framework.built:
        slow = f"{found}; without NCCL, gradients on the GPU travel through the host, which is slow"
        yield Finding("warning", subject, slow, build(facts))
    elif framework.against not in (None, framework.version):
        stale = f"{found}; but against {framework.title} {framework.against}"
        yield Finding("warning", subject, stale, build(facts))
    else:
        yield Finding("ok", subject, found)
    yield _frames(facts, framework)


def _parts(framework: Framework) -> str:
    there = [title for what, title in PARTS.items() if what in framework.built]
    absent = [title for what, title in PARTS.items() if what not in framework.built]
    return f"built with {', '.join(there) or 'nothing'}" + (f"; without {', '.join(absent)}" if absent else "")


def _no_horovod(framework: Framework) -> str:
    error = first_line(framework.error)
    if framework.error.startswith(LATE):
        what = f"hvd_compress.{framework.name}" if framework.stage == "adapter" else f"horovod.{framework.name}"
        return f"the import of {what} {error}"
    if framework.stage == "adapter":
        return f"hvd_compress.{framework.name} cannot be imported: {error}"
    if framework.against in (None, "n/a", "none"):
        return f"not built: Horovod was installed without {framework.title} or before it ({error})"
    if framework.against != framework.version:
        return f"built against {framework.title} {framework.against}, not {framework.version} ({error})"
    return f"cannot be imported: {error}"


def _frames(facts: Facts, framework: Framework) -> Finding:
    subject = f"Calls from {framework.title}"
    if not framework.unknown:
        return Finding("ok", subject, "Horovod's calling frames are as expected")
    found = f"this Horovod is not understood; not found: {', '.join(framework.unknown)}"
    cure = Cure(f"install Horovod {TESTED['horovod']}: {build(facts).text}", build(facts).command)
    return Finding("fault", subject, found, cure)


def launcher(facts: Facts) -> Iterator[Finding]:
    if facts.horovod is None:
        return
    if facts.horovodrun is None:
        again = f"pip install --force-reinstall --no-deps horovod=={facts.horovod}"
        cure = Cure("use mpirun, or look why Horovod's scripts are not installed", again)
        yield Finding("warning", "horovodrun", "not found, neither on PATH nor in the folder of this Python", cure)
    elif not facts.on_path:
        folder = facts.horovodrun.rpartition("/")[0]
        cure = Cure("put it there", f'export PATH="{folder}:$PATH"')
        yield Finding("warning", "horovodrun", f"{facts.horovodrun}, but not on PATH", cure)
    elif facts.launches:
        cure = Cure("activate the environment of this Python, or call its own horovodrun")
        yield Finding("warning", "horovodrun", f"{facts.horovodrun} is of another Python, {facts.launches}", cure)
    else:
        yield Finding("ok", "horovodrun", facts.horovodrun)


def mpi(facts: Facts) -> Iterator[Finding]:
    built = [framework for framework in facts.frameworks if "mpi" in framework.built]
    if facts.mpirun is None:
        cure = Cure("use horovodrun --gloo, or install Open MPI", "apt-get install openmpi-bin")
        status: Status = "warning" if built else "note"
        yield Finding(status, "mpirun", "not found on PATH", cure if built else None)
    elif built and needs_binding(facts):
        found = f"{facts.mpirun}, which refuses the options that horovodrun --mpi gives it"
        command = f'horovodrun --mpi "{OPEN_MPI_5}" -np 2 python train.py'
        cure = Cure("use horovodrun --gloo, or give horovodrun --mpi the options of Open MPI 5", command)
        yield Finding("warning", "mpirun", found, cure)
    else:
        unused = "" if built or facts.horovod is None else "; Horovod is built without MPI"
        yield Finding("ok", "mpirun", facts.mpirun + unused)
    yield _mpi4py(facts)


def _mpi4py(facts: Facts) -> Finding:
    if facts.mpi4py is None:
        return Finding("note", "mpi4py", "not installed; only hvd_compress.mpi needs it")
    library = facts.library or ""
    if library.startswith("!"):
        cure = Cure(
            "only hvd_compress.mpi needs it; build it for the MPI that is here",
            "pip install --no-cache-dir --force-reinstall --no-binary=mpi4py mpi4py",
        )
        return Finding("warning", "mpi4py", f"{facts.mpi4py} does not load: {first_line(library[1:])}", cure)
    if facts.mpirun and number(library) != number(facts.mpirun):
        cure = Cure(
            "start programs with the mpirun of that library, or build mpi4py for this one",
            "pip install --no-cache-dir --force-reinstall --no-binary=mpi4py mpi4py",
        )
        return Finding("warning", "mpi4py", f"{facts.mpi4py} loads {library}, but mpirun is {facts.mpirun}", cure)
    return Finding("ok", "mpi4py", f"{facts.mpi4py} with {library}")


def needs_binding(facts: Facts) -> bool:
    return bool(facts.mpirun) and "Open MPI" in str(facts.mpirun) and number(facts.mpirun) >= (5,)


def first_line(text: str) -> str:
    """Return the first line that is not empty, cut to a length that can be read."""
    line = next((line.strip() for line in text.splitlines() if line.strip()), "no message")
    return line if len(line) <= 300 else f"{line[:300]} ..."


def nodes(facts: Facts) -> Iterator[Finding]:
    gpus = max((framework.gpus for framework in facts.frameworks), default=0)
    if gpus > 1:
        found = (
            f"{gpus} GPUs on this one; if a slower network joins several such nodes, hierarchical=on sums within a node"
            f" and compresses between them: hvd-compress advise --ranks-per-node {gpus} predicts whether it pays"
        )
        yield Finding("note", "Nodes", found)


RULES: tuple[Callable[[Facts], Iterator[Finding]], ...] = (
    python,
    horovod,
    distributed,
    frameworks,
    launcher,
    mpi,
    nodes,
)
