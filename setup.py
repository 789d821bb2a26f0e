"""Builds the custom-op libraries against the TensorFlow of this environment.

Everything else about the package is in pyproject.toml. TensorFlow must be
visible to the build, so pip is called with `--no-build-isolation`:

    pip install 'tensorflow-cpu==2.21.*'
    pip install --no-build-isolation .

Environment variables:
    TPU_EMBEDDING_BUILD_OPS  0 leaves the libraries out: a pure-Python package, which
        runs on the portable engine.
    CXX  the C++ compiler, `g++` if not set.
"""

from __future__ import annotations

import concurrent.futures
import contextlib
import dataclasses
import functools
import hashlib
import json
import os
import pathlib
import re
import shlex
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator

import setuptools
from setuptools.command import build_ext

SOURCES = pathlib.Path("tpu_embedding", "ops", "cc")
SOFTWARE_TPU = "tpu_embedding.testing._software_tpu"
# By module name, the folders and files of each library. Both hold the core and say
# which TensorFlow they were compiled for.
LIBRARIES = {
    "tpu_embedding.ops._tpu_embedding_ops": ("core/**/*.cc", "kernels/**/*.cc"),
    SOFTWARE_TPU: (*("core/**/*.cc", "kernels/version.cc", "software_tpu/**/*.cc"),),
}

# -ffp-contract=off: the clones for each CPU (core/simd.h) differ in speed, never in
# bits. -fno-math-errno: sqrt becomes one instruction. -fno-trapping-math: a division
# may be done for nothing, without which loops that choose are not vectorised for AVX2;
# nobody asks for the flags that it raises. Never -march=native: a wheel must run on
# every machine of its platform.
FLAGS = (
    *("-O3", "-fPIC", "-fno-math-errno", "-fno-trapping-math", "-ffp-contract=off"),
    *("-Wall", "-Wextra", "-Werror", "-pthread"),
)
# Nothing outside the library calls the core. The kernels keep the default: the
# headers of TensorFlow hold statics that must be one in the whole process.
CORE_FLAGS = ("-fvisibility=hidden",)
# Most of the time that an op takes to compile goes into these.
HEADERS = "".join(
    f'#include "tensorflow/core/framework/{name}.h"\n'
    for name in ("op", "op_kernel", "resource_mgr", "resource_var", "shape_inference")
)
FEW_SOURCES = 4  # So many compile sooner than the headers do.
# A symbol that TensorFlow's libraries lack is an error here, not at load time.
LINK_FLAGS = ("-shared", "-pthread", "-Wl,-z,defs", "-Wl,--as-needed")

# Runs in a process of its own: an import of TensorFlow can abort (a wrong libtpu).
_ASK_TENSORFLOW = """
import json, tensorflow as tf
print(json.dumps({
    "version": tf.__version__,
    "compile_flags": tf.sysconfig.get_compile_flags(),
    "link_flags": tf.sysconfig.get_link_flags(),
}))
"""


class BuildError(SystemExit):
    """Ends the build with a message for the user and no traceback."""

    def __init__(self, problem: str):
        """Adds the way out that is open to everybody."""
        super().__init__(
            f"\nerror: tpu_embedding: {problem}\n"
            "To install without the custom-op library, which leaves the slower "
            "portable engine, set TPU_EMBEDDING_BUILD_OPS=0.\n"
        )


@dataclasses.dataclass(frozen=True)
class TensorFlow:
    """What a compiler has to know of the installed TensorFlow."""

    version: str
    compile_flags: list[str]
    link_flags: list[str]

    @classmethod
    @functools.cache
    def of_environment(cls) -> TensorFlow:
        """Asks the TensorFlow that this Python imports."""
        answer = subprocess.run(
            [sys.executable, "-c", _ASK_TENSORFLOW],
            env={**os.environ, "TF_CPP_MIN_LOG_LEVEL": "3"},
            capture_output=True,
            text=True,
            check=False,
        )
        if answer.returncode:
            last_lines = "\n".join(answer.stderr.strip().splitlines()[-3:])
            raise BuildError(
                f"cannot import TensorFlow with {sys.executable}, and the custom-op "
                f"library is compiled against it:\n{last_lines}\n"
                "pip hides installed packages from a build unless told otherwise. "
                "Install TensorFlow first, for example\n"
                "    pip install 'tensorflow-cpu==2.21.*'\n"
                "then run\n"
                "    pip install --no-build-isolation ."
            )
        return cls(**json.loads(answer.stdout.splitlines()[-1]))


@dataclasses.dataclass(frozen=True)
class Compiler:
    """A C++ compiler, its flags, and the folder for its object files."""

    command: tuple[str, ...]
    flags: tuple[str, ...]
    objects: pathlib.Path
    # What all but the core reads before the source.
    first_include: tuple[str, ...] = ()

    @classmethod
    def for_tensorflow(cls, tensorflow: TensorFlow, folder: pathlib.Path) -> Compiler:
        """Returns the compiler of this machine, set up for `tensorflow`."""
        command = tuple(shlex.split(os.environ.get("CXX", "g++")))
        if not command or shutil.which(command[0]) is None:
            raise BuildError(
                f"no C++ compiler: {shlex.join(command)!r} is not on the PATH. "
                "Install g++ (Debian: apt-get install g++), or name a compiler in CXX."
            )
        flags = (
            *FLAGS,
            # As system headers they do not trip over -Wall -Wextra -Werror.
            *(re.sub("^-I", "-isystem", flag) for flag in tensorflow.compile_flags),
            f"-I{SOURCES}",
            f'-DTPU_EMBEDDING_TF_VERSION="{tensorflow.version}"',
        )
        # Object files of other flags, so of another TensorFlow, lie elsewhere.
        key = hashlib.sha256(repr((command, flags)).encode()).hexdigest()[:16]
        return cls(command, flags, folder / key)

    def object_of(self, source: pathlib.Path) -> pathlib.Path:
        """Returns the path of the object file of `source`."""
        return self.objects / source.relative_to(SOURCES).with_suffix(".o")

    def is_current(self, source: pathlib.Path) -> bool:
        """Whether the object file of `source` came from the same content."""
        target = self.object_of(source)
        depfile, record = target.with_suffix(".d"), target.with_suffix(".sha256")
        return record.exists() and record.read_text() == _digest(_files_read(depfile))

    @contextlib.contextmanager
    def precompiled(self, headers: str) -> Iterator[Compiler]:
        """Reads `headers` once, for all that the yielded compiler compiles.

        They would not go into the digests, so that none of ours may be among them.
        """
        self.objects.mkdir(parents=True, exist_ok=True)
        # They have hundreds of megabytes. What a killed build leaves behind is never
        # taken for whole: each build has a folder of its own.
        with tempfile.TemporaryDirectory(prefix="headers", dir=self.objects) as folder:
            header = pathlib.Path(folder, "tensorflow.h")
            header.write_text(headers)
            print("compiling the headers of TensorFlow", flush=True)
            output = ("-x", "c++-header", str(header), "-o", f"{header}.gch")
            _run([*self.command, *self.flags, *output])
            yield dataclasses.replace(self, first_include=("-include", str(header)))

    def compile(self, source: pathlib.Path) -> None:
        """Compiles `source`, unless its object file is current."""
        if self.is_current(source):
            return
        target = self.object_of(source)
        depfile, record = target.with_suffix(".d"), target.with_suffix(".sha256")
        target.parent.mkdir(parents=True, exist_ok=True)
        print(f"compiling {source}", flush=True)
        folder = source.relative_to(SOURCES).parts[0]
        extra = CORE_FLAGS if folder == "core" else self.first_include
        started = time.time_ns()
        record.unlink(missing_ok=True)
        _run(
            [
                *(*self.command, *self.flags, *extra, "-MMD"),
                *("-c", str(source), "-o", str(target)),
            ]
        )
        # What was edited meanwhile may not be what the compiler read: no record then.
        files = _files_read(depfile)
        if all(path.stat().st_mtime_ns < started for path in files):
            record.write_text(_digest(files))

    def link(
        self, objects: list[pathlib.Path], flags: list[str], target: pathlib.Path
    ) -> None:
        """Links `objects` into the shared library `target`."""
        target.parent.mkdir(parents=True, exist_ok=True)
        print(f"linking {target}", flush=True)
        # Linked beside and moved: a process may have the old library open.
        beside = target.with_suffix(".tmp")
        _run(
            [
                *(*self.command, *LINK_FLAGS, "-o", str(beside)),
                *(str(path) for path in objects),
                *flags,
            ]
        )
        beside.replace(target)


class BuildOps(build_ext.build_ext):
    """Compiles `ops/cc` into libraries, in parallel and incrementally."""

    def build_extensions(self) -> None:
        """Builds all libraries."""
        sources = {
            pathlib.Path(name) for ext in self.extensions for name in ext.sources
        }
        compiler = Compiler.for_tensorflow(
            TensorFlow.of_environment(), pathlib.Path(self.build_temp)
        )
        new = [source for source in sources if not compiler.is_current(source)]
        many = len(new) > FEW_SOURCES
        ready = compiler.precompiled(HEADERS) if many else None
        with ready or contextlib.nullcontext(compiler) as self.compiler_of_ops:
            super().build_extensions()

    def build_extension(self, ext: setuptools.Extension) -> None:
        """Builds one library."""
        tensorflow = TensorFlow.of_environment()
        compiler = self.compiler_of_ops
        target = pathlib.Path(self.get_ext_fullpath(ext.name))
        sources = [pathlib.Path(source) for source in ext.sources]
        with concurrent.futures.ThreadPoolExecutor(_jobs(self.parallel)) as pool:
            list(pool.map(compiler.compile, sources))
        compiler.link(
            [compiler.object_of(source) for source in sources],
            [*tensorflow.link_flags, *_extra_link_flags(ext.name, tensorflow)],
            target,
        )

    def get_ext_filename(self, fullname: str) -> str:
        """Returns a name without Python's ABI tag: the library does not use it."""
        return os.path.join(*fullname.split(".")) + ".so"


def _extra_link_flags(name: str, tensorflow: TensorFlow) -> list[str]:
    """Returns what a library links beside the one that tf.sysconfig names.

    The software TPU reads configurations of TPUs. Their protocol buffers are in
    TensorFlow's other library, which every TensorFlow process has open.
    """
    if name != SOFTWARE_TPU:
        return []
    return [
        flag.replace("tensorflow_framework", "tensorflow_cc")
        for flag in tensorflow.link_flags
        if "tensorflow_framework" in flag
    ]


def _run(command: list[str]) -> None:
    result = subprocess.run(command, check=False)
    if result.returncode:
        raise BuildError(f"this command failed:\n    {shlex.join(command)}")


def _files_read(depfile: pathlib.Path) -> list[pathlib.Path]:
    """Returns what the compiler read for an object file, without system headers."""
    rule = depfile.read_text().replace("\\\n", " ")
    return [pathlib.Path(name) for name in shlex.split(rule.partition(":")[2])]


def _digest(paths: list[pathlib.Path]) -> str:
    # Not times: those of a copied or unpacked tree can be older than object files.
    contents = [path.read_bytes() if path.exists() else None for path in paths]
    return hashlib.sha256(repr(contents).encode()).hexdigest()


def _jobs(parallel: int | bool | None) -> int:
    # setuptools passes True for an empty --parallel.
    return parallel if type(parallel) is int else os.cpu_count() or 1


def _extensions() -> list[setuptools.Extension]:
    if os.environ.get("TPU_EMBEDDING_BUILD_OPS", "1") == "0":
        return []
    return [
        setuptools.Extension(
            name,
            [
                str(path)
                for pattern in patterns
                for path in sorted(SOURCES.glob(pattern))
            ],
        )
        for name, patterns in LIBRARIES.items()
    ]


if __name__ == "__main__":
    setuptools.setup(
        # Here and not in pyproject.toml: setuptools before 77 and since refuse each
        # other's way to write it there, and both are in use.
        license="Apache-2.0",
        ext_modules=_extensions(),
        cmdclass={"build_ext": BuildOps},
    )
