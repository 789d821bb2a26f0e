"""`make wheels`: a library for each TensorFlow in one wheel, and where it runs."""

from __future__ import annotations

import importlib.util
import os
import pathlib
import re
import shutil
import subprocess
import sys
import types
import zipfile

import build_wheel
import pytest
import tensorflow as tf
from lint_report import sources
from new_process import printed_by

from tpu_embedding.ops import library
from tpu_embedding.testing import library as software_tpu

MINOR = ".".join(tf.__version__.split(".")[:2])
OTHER = "2.9"
LOAD = """
import tpu_embedding
from tpu_embedding.ops import library
from tpu_embedding.testing import library as software_tpu
library.load(), software_tpu.load()
print(tpu_embedding.__file__, library.PATH.name, software_tpu.PATH.name)
"""


@pytest.mark.second_tier
def test_a_wheel_of_several_libraries_loads_the_fitting_one(tmp_path: pathlib.Path):
    built = {minor: tmp_path / f"lib{minor}" for minor in (MINOR, OTHER)}
    for folder in built.values():
        for name, path in zip(
            build_wheel.LIBRARIES, (library.PATH, software_tpu.PATH), strict=True
        ):
            (folder / name).parent.mkdir(parents=True)
            shutil.copy(path, folder / name)
    python = pathlib.Path(sys.executable)
    pure = build_wheel.pack_pure(python, tmp_path / "wheels")
    assert pure.name.endswith("-py3-none-any.whl")
    assert not _libraries_in(pure)
    wheel = build_wheel.add_libraries(python, pure, built, "x86_64")
    assert wheel.name.endswith("-py3-none-linux_x86_64.whl")
    assert _libraries_in(wheel) == sorted(
        name.replace(".so", f".tf{minor}.so")
        for name in build_wheel.LIBRARIES
        for minor in built
    )
    # pip would do no more than this with a wheel of files alone.
    with zipfile.ZipFile(wheel) as archive:
        archive.extractall(tmp_path / "installed")
    printed = subprocess.check_output(
        [sys.executable, "-P", "-c", LOAD],
        env={**os.environ, "PYTHONPATH": str(tmp_path / "installed")},
        cwd=tmp_path,
        text=True,
        timeout=120,
    )
    file, *loaded = printed.split()
    assert pathlib.Path(file).is_relative_to(tmp_path)
    assert loaded == [f"_tpu_embedding_ops.tf{MINOR}.so", f"_software_tpu.tf{MINOR}.so"]


def test_the_loader_knows_what_wheels_are_built_for():
    systems = [f"Linux on {machine}" for machine in build_wheel.MACHINES]
    assert list(library.SYSTEMS) == systems


WITHOUT_FCNTL = """
import sys
sys.modules["fcntl"] = None  # As on Windows: to import it raises ImportError.
import tensorflow as tf
import tpu_embedding as te
from tpu_embedding import checkpoint

films = te.TableConfig(vocabulary_size=4, dim=2)
features = {"seen": te.FeatureConfig(films)}
embedding, restored = (te.TPUEmbedding(features, te.SGD(1.0)) for _ in range(2))
embedding.enqueue({"seen": tf.constant([1])})
before = embedding.dequeue()["seen"].numpy()
embedding.apply_gradients({"seen": tf.ones([1, 2])})
checkpoint.save(embedding, "saved")
checkpoint.restore(restored, "saved")
table = restored.embedding_tables[films]
tf.debugging.assert_equal(table[1:2], before - 1)
"""


@pytest.mark.second_tier
def test_windows_trains_and_saves_with_the_portable_engine(tmp_path: pathlib.Path):
    portable = {"TPU_EMBEDDING_ENGINE": "portable"}
    printed_by("-c", WITHOUT_FCNTL, env=portable, cwd=tmp_path, timeout=120)


@pytest.fixture(scope="module")
def setup_py() -> types.ModuleType:
    spec = importlib.util.spec_from_file_location(
        "setup_py", build_wheel.ROOT / "setup.py"
    )
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.mark.parametrize(
    ("installed", "named"),
    [
        (["keras"], ""),
        (["tensorflow-cpu", "tensorflow"], ""),
        (["tensorflow"], "tensorflow"),
        (["tensorflow-rocm", "numpy"], "tensorflow_rocm"),
    ],
)
def test_a_build_beside_another_tensorflow_warns_of_the_extra_cpu(
    setup_py: types.ModuleType,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    installed: list[str],
    named: str,
):
    monkeypatch.setattr(
        setup_py.importlib.metadata,
        "distributions",
        lambda: [types.SimpleNamespace(name=name) for name in installed],
    )
    setup_py.warn_of_another_tensorflow()
    warning = capsys.readouterr().err
    assert f"tpu_embedding: {named} is installed" in warning if named else not warning


def test_an_unpacked_tensorflow_has_the_flags_of_an_installed_one(
    setup_py: types.ModuleType,
):
    folder = pathlib.Path(tf.__file__).parent
    assert list(setup_py.read_tensorflow(folder)) == setup_py.ask_tensorflow()


def test_a_folder_that_is_no_tensorflow_is_refused(
    setup_py: types.ModuleType, tmp_path: pathlib.Path
):
    with pytest.raises(SystemExit, match=r"metadata of one version.*Found: 0"):
        setup_py.read_tensorflow(tmp_path / "tensorflow")


def _libraries_in(wheel: pathlib.Path) -> list[str]:
    with zipfile.ZipFile(wheel) as archive:
        return sorted(name for name in archive.namelist() if name.endswith(".so"))


@pytest.mark.parametrize("path", [library.PATH, software_tpu.PATH])
def test_a_library_needs_no_newer_system_than_tensorflow_s_wheels(path: pathlib.Path):
    """The highest versions of symbols that libtensorflow_framework itself needs."""
    highest = {"GLIBC": (2, 27), "GLIBCXX": (3, 4, 22), "CXXABI": (1, 3, 9)}
    symbols = subprocess.check_output(["objdump", "-T", path], text=True, timeout=60)
    needed = re.findall(r"\*UND\*.*\((\w+)_([\d.]+)\) +(\S+)", symbols)
    assert {kind for kind, _, _ in needed} > highest.keys()
    newer = [
        f"{symbol} of {kind}_{version}"
        for kind, version, symbol in needed
        if tuple(map(int, version.split("."))) > highest.get(kind, (99,))
    ]
    assert not newer, "core/older_systems.cc says how such symbols are avoided"


@pytest.fixture(scope="module")
def source_distribution(tmp_path_factory: pytest.TempPathFactory) -> pathlib.Path:
    """Returns the folder of an unpacked one."""
    folder = tmp_path_factory.mktemp("sdist")
    subprocess.run(
        [
            *(sys.executable, "setup.py", "--quiet", "egg_info", "--egg-base", folder),
            *("sdist", "--dist-dir", folder),
        ],
        cwd=build_wheel.ROOT,
        check=True,
        timeout=120,
    )
    (archive,) = folder.glob("*.tar.gz")
    shutil.unpack_archive(archive, folder, filter="data")
    return folder / archive.name.removesuffix(".tar.gz")


@pytest.mark.second_tier
def test_the_source_distribution_has_the_package_and_nothing_else(
    source_distribution: pathlib.Path,
):
    files = {
        str(path.relative_to(source_distribution))
        for path in source_distribution.rglob("*.*")
        if path.suffix in (".py", ".cc", ".h")
    }
    package = {
        file
        for file in sources(".py", ".cc", ".h")
        if file.startswith("tpu_embedding/")
    }
    assert files == {*package, "setup.py"}


@pytest.mark.second_tier
@pytest.mark.parametrize("into_checkout", [True, False])
def test_a_build_into_the_checkout_compiles_each_op_by_itself(
    into_checkout: bool, source_distribution: pathlib.Path, tmp_path: pathlib.Path
):
    """By a compiler that writes only what it is asked to."""
    shutil.copytree(source_distribution, tmp_path, dirs_exist_ok=True)
    compiler, log = tmp_path / "compiler", tmp_path / "log"
    compiler.write_text(
        f'#!/bin/sh\necho "$@" >> {log}\n'
        'while [ "$1" != -o ]; do shift; done\ntouch "$2"\n'
    )
    compiler.chmod(0o755)
    subprocess.run(
        [
            *(sys.executable, "setup.py", "--quiet", "build_ext"),
            *(["--inplace"] if into_checkout else []),
        ],
        cwd=tmp_path,
        env={**os.environ, "CXX": str(compiler)},
        capture_output=True,
        check=True,
        timeout=300,
    )
    compiled = re.findall(r" -c (\S+)", log.read_text())
    ops = [source for source in compiled if "/cc/core/" not in source]
    assert (len(ops) > 20) == into_checkout
    assert into_checkout or len(ops) == 2
