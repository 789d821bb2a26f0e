"""Tests of `tpu_embedding.ops.library`: what is loaded, and what is refused and how."""

from __future__ import annotations

import ctypes
import pathlib
import platform
import re

import pytest
import tensorflow as tf

from tpu_embedding.ops import library

MEND = "pip install --no-build-isolation --force-reinstall --no-deps ."


def write_library(path: pathlib.Path, version: str) -> pathlib.Path:
    marker = f"tpu_embedding built for TensorFlow {version}".encode()
    path.write_bytes(b"\x7fELF\0" + marker + b"\0\1\2\3")
    return path


@pytest.fixture
def fresh_attempt():
    """Makes the next call try again, and lets no fake leave the test."""
    library._attempt.cache_clear()
    yield
    library._attempt.cache_clear()


def test_the_library_of_this_environment_loads():
    assert library.unavailable_reason() is None
    assert callable(library.load().tpu_embedding_prepare)


def test_it_is_loaded_once():
    assert library.load() is library.load()


def test_the_file_names_the_version_that_it_was_compiled_for():
    version = library.built_for(library.PATH)
    assert version == tf.__version__.replace("-", "")  # As pip writes 2.22.0-rc0.
    compiled = ctypes.CDLL(str(library.PATH)).TpuEmbeddingTensorFlowVersion
    compiled.restype = ctypes.c_char_p
    assert compiled().decode() == version


def test_the_library_lies_beside_the_loader():
    assert library.PATH.parent == pathlib.Path(library.__file__).parent


@pytest.mark.parametrize("version", ["2.21.0", "2.21.3", "2.21.0-rc1", "2.21.1+cpu"])
def test_patch_versions_share_a_library(version: str, tmp_path: pathlib.Path):
    path = write_library(tmp_path / "ops.so", "2.21.0")
    assert library.problem_with(path, version) is None


@pytest.mark.parametrize("version", ["2.20.0", "2.22.0", "3.21.0", "2.2.0"])
def test_another_minor_version_is_refused(version: str, tmp_path: pathlib.Path):
    path = write_library(tmp_path / "ops.so", "2.21.0")
    problem = library.problem_with(path, version)
    assert problem is not None
    assert problem.startswith(
        "The custom-op library was built for TensorFlow 2.21.0, but this is "
        f"TensorFlow {version}. To fix it, "
    )
    assert MEND in problem


def test_a_missing_library_is_named(tmp_path: pathlib.Path):
    path = tmp_path / "ops.so"
    problem = library.problem_with(path, tf.__version__)
    assert problem is not None
    assert f"is not installed: there is no {path}. " in problem
    assert MEND in problem


@pytest.mark.parametrize(
    ("system", "machine"),
    [("Darwin", "arm64"), ("Windows", "AMD64"), ("Linux", "ppc64le")],
)
def test_where_no_wheel_has_a_library_nobody_is_sent_to_a_compiler(
    system: str, machine: str, tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(platform, "system", lambda: system)
    monkeypatch.setattr(platform, "machine", lambda: machine)
    problem = library.problem_with(tmp_path / "ops.so", tf.__version__)
    assert problem is not None
    assert problem.startswith(
        f"There is no custom-op library for {system} on {machine}"
    )
    assert "only for Linux on x86_64 and Linux on aarch64. The portable" in problem
    assert "pip" not in problem


def test_a_source_tree_that_is_not_built_is_named(tmp_path: pathlib.Path):
    """As in a checkout after `make install`, which builds an installed copy."""
    (tmp_path / "setup.py").touch()
    path = tmp_path / "tpu_embedding" / "ops" / "ops.so"
    problem = library.problem_with(path, tf.__version__)
    assert problem is not None
    assert f"not built: there is no {path}. To fix it, run `make ops` in " in problem
    assert f"{tmp_path}; or, if tpu_embedding is installed, start Python in" in problem


@pytest.mark.parametrize("version", ["2.19.0", "2.19.1-rc0", "2.20.3", "2.9.1"])
def test_the_running_tensorflow_chooses_among_the_libraries_of_a_wheel(
    version: str, tmp_path: pathlib.Path
):
    minors = ("2.9", "2.19", "2.20")
    for minor in minors:
        write_library(tmp_path / f"ops.tf{minor}.so", f"{minor}.0")
    chosen = library.choose(tmp_path / "ops.so", version)
    (minor,) = (m for m in minors if version.startswith(f"{m}."))
    assert chosen == tmp_path / f"ops.tf{minor}.so"
    assert library.problem_with(chosen, version) is None


def test_a_wheel_without_a_fitting_library_says_which_it_has_and_how_to_build_one(
    tmp_path: pathlib.Path,
):
    for minor in ("2.20", "2.19"):
        write_library(tmp_path / f"ops.tf{minor}.so", f"{minor}.0")
    chosen = library.choose(tmp_path / "ops.so", "2.22.0")
    problem = library.problem_with(chosen, "2.22.0")
    assert problem is not None
    assert problem.startswith(
        "The installed wheel has custom-op libraries for TensorFlow 2.19, 2.20, but "
        "this is TensorFlow 2.22.0. To fix it, "
    )
    assert MEND in problem
    assert problem.endswith("or install one of these versions of TensorFlow.")


def test_a_library_under_the_name_of_another_version_is_refused(tmp_path: pathlib.Path):
    write_library(tmp_path / "ops.tf2.20.so", "2.19.0")
    chosen = library.choose(tmp_path / "ops.so", "2.20.0")
    problem = library.problem_with(chosen, "2.20.0")
    assert problem is not None
    assert "was built for TensorFlow 2.19.0, but this is TensorFlow 2.20.0" in problem


def test_a_build_from_source_needs_no_version_in_its_name(tmp_path: pathlib.Path):
    path = write_library(tmp_path / "ops.so", "2.21.0")
    assert library.choose(path, "2.21.1") == path


@pytest.mark.parametrize("content", [b"", b"\x7fELF without a marker"])
def test_a_file_without_a_version_is_refused(content: bytes, tmp_path: pathlib.Path):
    path = tmp_path / "ops.so"
    path.write_bytes(content)
    assert library.built_for(path) is None
    problem = library.problem_with(path, tf.__version__)
    assert problem is not None
    assert f"{path} does not contain the TensorFlow version" in problem


@pytest.mark.usefixtures("fresh_attempt")
def test_a_library_that_tensorflow_cannot_load_gives_a_reason_and_no_crash(
    tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch
):
    path = write_library(tmp_path / "ops.so", tf.__version__)
    monkeypatch.setattr(library, "PATH", path)
    reason = library.unavailable_reason()
    assert reason is not None
    assert reason.startswith(f"TensorFlow could not load {path}: ")
    assert MEND in reason
    with pytest.raises(RuntimeError, match=re.escape(reason)):
        library.load()


@pytest.mark.usefixtures("fresh_attempt")
def test_a_library_of_another_tensorflow_is_not_even_opened_by_it(
    tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch
):
    path = write_library(tmp_path / "ops.so", "1.15.0")
    monkeypatch.setattr(library, "PATH", path)
    monkeypatch.setattr(tf, "load_op_library", lambda _: pytest.fail("was loaded"))
    with pytest.raises(RuntimeError, match=r"was built for TensorFlow 1\.15\.0"):
        library.load()
