"""What is published: a wheel and an sdist that can be installed beside any framework, or none."""

from __future__ import annotations

import email
import os
import re
import shutil
import subprocess
import sys
import venv
import zipfile
from pathlib import Path

import pytest

import hvd_compress

ROOT = Path(__file__).resolve().parents[2]
INSTALLED = Path(sys.prefix, "lib", f"python{sys.version_info[0]}.{sys.version_info[1]}", "site-packages")
TENSORFLOW = ("tensorflow", "tensorflow_estimator", "keras")


@pytest.fixture(scope="module")
def built(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with wheel and sdist; building them gives no warning."""
    source, made = tmp_path_factory.mktemp("source"), tmp_path_factory.mktemp("built")
    for name in ("pyproject.toml", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, source)
    shutil.copytree(ROOT / "hvd_compress", source / "hvd_compress", ignore=shutil.ignore_patterns("__pycache__"))
    said = build(source, made)
    assert "warning" not in said.lower(), said
    return made


def build(source: Path, made: Path, *options: str) -> str:
    """What building prints."""
    command = [sys.executable, "-m", "build", "--no-isolation", "--outdir", str(made), *options, str(source)]
    variables = {name: value for name, value in os.environ.items() if name != "PYTHONDONTWRITEBYTECODE"}
    found = subprocess.run(command, capture_output=True, text=True, env=variables)
    assert found.returncode == 0, found.stdout + found.stderr
    return found.stdout + found.stderr


def contents(wheel: Path) -> dict[str, int]:
    """The check sum of each file."""
    with zipfile.ZipFile(wheel) as opened:
        return {file.filename: file.CRC for file in opened.filelist}


class Environment:
    """An environment of its own in which the wheel is installed, by pip, beside some packages of this one."""

    def __init__(self, folder: Path, wheel: Path) -> None:
        venv.create(folder, with_pip=False, symlinks=True)
        self.python = folder / "bin" / "python"
        self.site = folder / INSTALLED.relative_to(sys.prefix)
        pip = [sys.executable, "-m", "pip", "--python", str(self.python)]
        subprocess.run([*pip, "install", "--quiet", "--no-deps", "--no-index", str(wheel)], check=True)

    def add(self, *names: str) -> Environment:
        """Packages and the libraries that lie beside them."""
        for name in names:
            for path in INSTALLED.glob(f"{name}*"):
                if path.name in (name, f"{name}.libs"):
                    (self.site / path.name).symlink_to(path)
        return self

    def add_all_but(self, *names: str) -> Environment:
        """All packages but some, and but what this package itself has put there."""
        for path in INSTALLED.iterdir():
            if path.name not in names and "hvd_compress" not in path.name and not (self.site / path.name).exists():
                (self.site / path.name).symlink_to(path)
        return self

    def run(self, *command: str) -> tuple[int, str]:
        """A program of the environment: its exit code, and the last line that it printed, or else of its error."""
        words = [str(self.python.with_name(command[0])), *command[1:]]
        found = subprocess.run(words, capture_output=True, text=True, cwd=self.site.parents[2])
        return found.returncode, (found.stdout or found.stderr).strip().splitlines()[-1]


def test_the_version_stands_in_one_place() -> None:
    stated = [path for path in (ROOT / "hvd_compress").rglob("*.py") if hvd_compress.__version__ in path.read_text()]
    assert [path.name for path in stated] == ["_version.py"]
    assert f"version: {hvd_compress.__version__}\n" in (ROOT / "CITATION.cff").read_text()


@pytest.mark.jobs
def test_the_wheel(built: Path, tmp_path: Path) -> None:
    """It has the package and nothing else, says so, and works beside what it depends on, without any framework."""
    (wheel,) = built.glob("*.whl")
    names = set(contents(wheel))
    package = {str(path.relative_to(ROOT)) for path in (ROOT / "hvd_compress").rglob("*.py")}
    assert {name for name in names if ".dist-info/" not in name} == package | {"hvd_compress/py.typed"}
    with zipfile.ZipFile(wheel) as opened:
        folder = f"hvd_compress-{hvd_compress.__version__}.dist-info"
        metadata = email.message_from_bytes(opened.read(f"{folder}/METADATA"))
        assert opened.read(f"{folder}/licenses/LICENSE") == (ROOT / "LICENSE").read_bytes()
    assert metadata["Version"] == hvd_compress.__version__
    needed = [name for name in metadata.get_all("Requires-Dist", []) if "extra ==" not in name]
    assert {re.split(r"\W", name)[0] for name in needed} == {"numpy", "numba", "rich", "typer"}
    assert not any(name.startswith("horovod") for name in metadata.get_all("Requires-Dist", []))
    assert {"torch", "tensorflow", "mpi", "cuda", "bench"} <= set(metadata.get_all("Provides-Extra", []))
    environment = Environment(tmp_path / "environment", wheel).add("numpy", "numba", "llvmlite")
    script = "import hvd_compress; print(hvd_compress.LocalWorld('topk', size=2).bytes_sent)"
    assert environment.run("python", "-c", script) == (0, "0")
    lacks = ("torch", *TENSORFLOW, "horovod", "matplotlib", "sklearn")
    environment = Environment(tmp_path / "command", wheel).add_all_but(*lacks)
    code, said = environment.run("hvd-compress", "methods")
    assert code == 0, said
    assert "Compression cannot work here yet" in environment.run("hvd-compress", "doctor")[1]
    code, said = environment.run("hvd-compress", "compare", "--output", str(tmp_path))
    assert code == 1 and "pip install" in said


@pytest.mark.long
def test_the_sdist_gives_the_same_wheel(built: Path, tmp_path: Path) -> None:
    shutil.unpack_archive(next(built.glob("*.tar.gz")), tmp_path)
    (source,) = tmp_path.iterdir()
    build(source, tmp_path / "again", "--wheel")
    assert contents(next(tmp_path.glob("again/*.whl"))) == contents(next(built.glob("*.whl")))


@pytest.mark.long
@pytest.mark.parametrize(
    ("there", "missing", "without"), [("torch", "tensorflow", TENSORFLOW), ("tensorflow", "torch", ("torch",))]
)
def test_with_one_framework(built: Path, tmp_path: Path, there: str, missing: str, without: tuple[str, ...]) -> None:
    environment = Environment(tmp_path / "environment", next(built.glob("*.whl"))).add_all_but(*without)
    script = f"from hvd_compress.{there} import Compression; print(Compression.topk(ratio=0.5).stats().steps)"
    assert environment.run("python", "-c", script) == (0, "0")
    code, said = environment.run("python", "-c", f"import hvd_compress.{missing}")
    assert code == 1 and f"pip install '.[{missing}]'" in said
