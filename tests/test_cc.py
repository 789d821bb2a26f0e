"""Compiles and runs each `tests/cc/*_test.cc`, plain and under the sanitizers.

The core is plain C++17, so g++ alone builds it: no TensorFlow, no test framework.
A test is a program that checks with `check.h` and returns 0.
"""

from __future__ import annotations

import functools
import os
import pathlib
import shlex
import shutil
import subprocess
import tempfile

import pytest

TESTS = pathlib.Path(__file__).with_name("cc")
CC = TESTS.parents[1] / "tpu_embedding" / "ops" / "cc"
COMPILER = shlex.split(os.environ.get("CXX", "g++"))
FLAGS = [
    *("-std=c++17", "-pthread", "-g", "-fno-math-errno", "-ffp-contract=off"),
    # Checks compare sizes with literals, which are signed.
    *("-Wall", "-Wextra", "-Werror", "-Wno-sign-compare"),
    *(f"-I{CC}", f"-I{TESTS}"),
]
# Sources beyond the core, by the name of a test: folders of plain C++ as well.
MORE_SOURCES = {"engine_test": "software_tpu/engine"}
BUILDS = {
    "plain": ["-O0"],  # The optimised core is what all other tests run.
    "address": ["-O1", "-fsanitize=address,undefined", "-fno-sanitize-recover=all"],
    "thread": ["-O1", "-fsanitize=thread"],
}
TIMEOUT_SECONDS = 300


_OBJECTS = tempfile.TemporaryDirectory(prefix="tpu_embedding_cc_")


def _run(
    command: list[str], folder: pathlib.Path | None = None
) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        command,
        cwd=folder,
        capture_output=True,
        text=True,
        timeout=TIMEOUT_SECONDS,
        check=False,
    )


@functools.cache
def _without_randomization() -> list[str]:
    """Returns a prefix that makes memory addresses predictable, if there is one.

    The thread sanitizer of GCC 12 ends at once on kernels that place programs more
    randomly than it knows.
    """
    if shutil.which("setarch") and _run(["setarch", "-R", "true"]).returncode == 0:
        return ["setarch", "-R"]
    return []


@functools.cache
def _objects(folder: str, build: str) -> list[str]:
    """The object files of a folder of sources, compiled once for all programs."""
    place = pathlib.Path(tempfile.mkdtemp(prefix=f"{build}_", dir=_OBJECTS.name))
    sources = sorted((CC / folder).glob("*.cc"))
    command = [*COMPILER, *FLAGS, *BUILDS[build], "-c", *map(str, sources)]
    compiled = _run(command, place)
    assert compiled.returncode == 0, compiled.stderr
    return [str(path) for path in sorted(place.glob("*.o"))]


@pytest.mark.parametrize("build", BUILDS)
@pytest.mark.parametrize(
    "source", sorted(TESTS.glob("*_test.cc")), ids=lambda p: p.stem
)
def test_program(source: pathlib.Path, build: str, tmp_path: pathlib.Path) -> None:
    program = str(tmp_path / source.stem)
    folders = ["core", *filter(None, [MORE_SOURCES.get(source.stem)])]
    objects = [name for folder in folders for name in _objects(folder, build)]
    command = [*COMPILER, *FLAGS, *BUILDS[build], str(source), *objects]
    compiled = _run([*command, "-o", program])
    assert compiled.returncode == 0, compiled.stderr
    ran = _run([*_without_randomization(), program])
    assert ran.returncode == 0, ran.stdout + ran.stderr
