"""Compiles programs of the plain C++ under `tests/cc`: g++ alone, no TensorFlow.

What many programs link is compiled once for each build, as one file, and kept in
`build/cc`, for all processes of a test run and for the next run.
"""

from __future__ import annotations

import fcntl
import functools
import hashlib
import os
import pathlib
import shlex
import shutil
import subprocess
from collections.abc import Sequence

TESTS = pathlib.Path(__file__).resolve().parent / "cc"
PACKAGE = TESTS.parents[1] / "tpu_embedding"
CC = PACKAGE / "ops" / "cc"
CORE = CC / "core"
SOFTWARE_TPU = PACKAGE / "testing" / "cc"
KEPT = TESTS.parents[1] / "build" / "cc"
COMPILER = shlex.split(os.environ.get("CXX", "g++"))
# What runs programs for another processor: `make test-aarch64`.
EMULATOR = shlex.split(os.environ.get("TPU_EMBEDDING_TEST_EMULATOR", ""))
FLAGS = [
    # -g1: the lines that a sanitizer names, and no more, which takes time to write.
    *("-std=c++17", "-pthread", "-g1", "-fno-math-errno", "-ffp-contract=off"),
    # Checks compare sizes with literals, which are signed.
    *("-Wall", "-Wextra", "-Werror", "-Wno-sign-compare"),
    *(f"-I{CC}", f"-I{SOFTWARE_TPU}", f"-I{TESTS}"),
]
ADDRESS = ("-fsanitize=address,undefined", "-fno-sanitize-recover=all")
BUILDS = {
    "plain": ["-O0"],  # The optimised core is what all other tests run.
    # At -O1 it takes three times as long to compile.
    "address": ["-O0", *ADDRESS],
    # For minutes of fuzzing.
    "fast_address": ["-O1", *ADDRESS],
    "thread": ["-O1", "-fsanitize=thread"],
    # For another processor: as in a library, with its vectors.
    "emulated": ["-O3", "-fno-trapping-math"],
}
# The table of all rules: update_test takes each of them itself, for float32. What
# replaces parts of the C++ library must come before its headers.
NOT_LINKED = ("rules.cc", "older_systems.cc")
TIMEOUT_SECONDS = 300


def run(
    command: Sequence[str], timeout: float = TIMEOUT_SECONDS, text: str | None = None
) -> subprocess.CompletedProcess[str]:
    """Runs a command on a text that it reads; captures what it prints."""
    return subprocess.run(
        command,
        input=text,
        capture_output=True,
        text=True,
        timeout=timeout,
        check=False,
    )


def run_program(
    program: str, *arguments: str, timeout: float = TIMEOUT_SECONDS
) -> subprocess.CompletedProcess[str]:
    """Runs a program of `build_program`."""
    prefix = EMULATOR or _without_randomization()
    return run([*prefix, program, *arguments], timeout=timeout)


def build_program(
    sources: Sequence[pathlib.Path],
    build: str,
    folder: pathlib.Path,
    linked: Sequence[pathlib.Path] = (CORE,),
) -> str:
    """Compiles sources, links them with whole folders; returns the program's path."""
    program = str(folder / f"{sources[0].stem}_{build}")
    objects = [_object(place, build) for place in linked]
    command = [*COMPILER, *FLAGS, *BUILDS[build], *map(str, sources), *objects]
    _check(run([*command, "-o", program]))
    return program


@functools.cache
def _object(folder: pathlib.Path, build: str) -> str:
    """Compiles a folder as one source: most of its time goes into headers."""
    sources = sorted(
        path for path in folder.glob("*.cc") if path.name not in NOT_LINKED
    )
    command = [*COMPILER, *FLAGS, *BUILDS[build], "-c", "-x", "c++", "-"]
    digest = hashlib.sha256(repr((command, sources)).encode())
    for path in [*sources, *sorted(PACKAGE.glob("*/cc/**/*.h"))]:
        digest.update(path.read_bytes())
    name = f"{folder.name}_{build}"
    kept = KEPT / f"{name}_{digest.hexdigest()[:16]}.o"
    KEPT.mkdir(parents=True, exist_ok=True)
    with open(KEPT / f"{name}.lock", "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not kept.exists():
            for old in KEPT.glob(f"{name}_*.o"):
                old.unlink()
            includes = "".join(f'#include "{path}"\n' for path in sources)
            beside = kept.with_suffix(".part")
            _check(run([*command, "-o", str(beside)], text=includes))
            beside.rename(kept)  # A killed run leaves nothing that looks whole.
    return str(kept)


def _check(compiled: subprocess.CompletedProcess[str]) -> None:
    assert compiled.returncode == 0, compiled.stderr


@functools.cache
def _without_randomization() -> list[str]:
    """Returns a prefix that makes memory addresses predictable, if there is one.

    The thread sanitizer of GCC 12 ends at once on kernels that place programs more
    randomly than it knows.
    """
    if shutil.which("setarch") and run(["setarch", "-R", "true"]).returncode == 0:
        return ["setarch", "-R"]
    return []
