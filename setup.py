"""Builds the two custom-op libraries against the TensorFlow of this environment.

pyproject.toml has the metadata of the package. TensorFlow must be visible to the
build, so pip needs `--no-build-isolation`; the first line is for a new environment:

    pip install 'tensorflow-cpu==2.21.*'
    pip install --no-build-isolation .

Environment variables:
    TPU_EMBEDDING_BUILD_OPS  0: build no library. The package then runs on the portable
        engine, which needs none.
    TPU_EMBEDDING_BUILD_SOFTWARE_TPU  0: leave out the library of SoftwareTPUStrategy,
        a test double that takes about half of the build time.
    TPU_EMBEDDING_TENSORFLOW  The folder `tensorflow` of an unpacked wheel, to compile
        for another kind of machine; CXX must then name a compiler for it.
    CXX  The C++ compiler, `g++` by default.
"""

from __future__ import annotations

import concurrent.futures
import contextlib
import hashlib
import importlib.metadata
import json
import os
import pathlib
import shlex
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator

import setuptools
from setuptools.command import build_ext

CC = "tpu_embedding/ops/cc"
SOFTWARE_TPU_CC = "tpu_embedding/testing/cc"
OPS = "tpu_embedding.ops._tpu_embedding_ops"
SOFTWARE_TPU = "tpu_embedding.testing._software_tpu"
# version.cc, in both libraries, says which TensorFlow they were compiled for.
SOURCES = {
    OPS: (f"{CC}/core/**/*.cc", f"{CC}/kernels/**/*.cc"),
    SOFTWARE_TPU: (
        *(f"{CC}/core/**/*.cc", f"{CC}/kernels/version.cc"),
        f"{SOFTWARE_TPU_CC}/**/*.cc",
    ),
}

# -ffp-contract=off: the code for each level of CPU (core/simd.h) differs in speed, not
# in bits. -fno-math-errno: sqrt becomes one instruction. -fno-trapping-math: lets
# the compiler divide and discard the result, as it must to vectorize loops with a
# condition for AVX2. Never -march=native: a wheel must run on every machine.
FLAGS = (
    *("-fPIC", "-fno-math-errno", "-fno-trapping-math", "-ffp-contract=off"),
    *("-Wall", "-Wextra", "-Werror", "-pthread", f"-I{CC}", f"-I{SOFTWARE_TPU_CC}"),
)
# The core has all loops over rows and columns. It hides its symbols, which nothing
# outside of a library calls. The other files share statics with TensorFlow's headers,
# which must be the same objects in the whole process.
CORE_FLAGS = ("-O3", "-fvisibility=hidden")
OP_FLAGS = ("-O2",)
# -z defs: a symbol that TensorFlow lacks is an error here, not when loading. The linker
# of macOS has neither option, and its default is that of -z defs.
LINK_FLAGS = ("-shared", "-pthread")
if sys.platform == "linux":
    LINK_FLAGS += ("-Wl,-z,defs", "-Wl,--as-needed")
# Most of the time of compiling an op goes into TensorFlow's headers. So an installation
# compiles all ops of a library as one file. A build into the checkout compiles each by
# itself, and an edit only one; it precompiles the headers where that pays.
PRECOMPILED = "".join(
    f'#include "tensorflow/core/framework/{name}.h"\n'
    for name in ("op", "op_kernel", "resource_mgr", "resource_var", "shape_inference")
)
FEW_OPS = 4

# Runs in a process of its own: importing a TensorFlow with a wrong libtpu can abort.
# It executes only two modules of TensorFlow, because importing all of it takes seconds.
ASK_TENSORFLOW = """
import json, sys
from importlib import util
spec = util.find_spec("tensorflow") or sys.exit("No module named 'tensorflow'")
sys.modules["tensorflow"] = util.module_from_spec(spec)
from tensorflow.python.framework.versions import VERSION
from tensorflow.python.platform import sysconfig
version = VERSION.replace("-", "")  # As pip writes 2.22.0-rc0.
print(json.dumps([version, sysconfig.get_compile_flags(), sysconfig.get_link_flags()]))
"""

TENSORFLOWS = ("tensorflow", "tensorflow_cpu")
OTHER_TENSORFLOWS = ("tensorflow", "tensorflow_tpu", "tensorflow_rocm", "tf_nightly")
WHEEL_FLAGS = (
    *("-D_GLIBCXX_USE_CXX11_ABI=1", "--std=c++17"),
    "-DEIGEN_MAX_ALIGN_BYTES=64",
)


def fail(problem: str) -> SystemExit:
    """Returns an error that ends the build without a traceback."""
    return SystemExit(
        f"\nerror: tpu_embedding: {problem}\nTo install without the custom-op "
        "library, set TPU_EMBEDDING_BUILD_OPS=0: the slower portable engine is then "
        "used.\n"
    )


def ask_tensorflow() -> tuple[str, list[str], list[str]]:
    """Returns the version and the compile and link flags of TensorFlow."""
    answer = subprocess.run(
        [sys.executable, "-c", ASK_TENSORFLOW],
        env={**os.environ, "TF_CPP_MIN_LOG_LEVEL": "3"},
        capture_output=True,
        text=True,
        check=False,
    )
    if answer.returncode:
        last_lines = "\n".join(answer.stderr.strip().splitlines()[-3:])
        raise fail(
            f"cannot import TensorFlow with {sys.executable}, and the custom-op "
            f"library is compiled against it:\n{last_lines}\n"
            "pip hides installed packages from a build by default. Install TensorFlow "
            "first, for example\n    pip install 'tensorflow-cpu==2.21.*'\n"
            "then run\n    pip install --no-build-isolation ."
        )
    return json.loads(answer.stdout.splitlines()[-1])


def read_tensorflow(folder: pathlib.Path) -> tuple[str, list[str], list[str]]:
    """Returns the result of `ask_tensorflow` for an unpacked wheel.

    The flags are those of all wheels of TensorFlow since 2.18.
    """
    unpacked = importlib.metadata.distributions(path=[str(folder.parent)])
    versions = {d.version for d in unpacked if d.name.replace("-", "_") in TENSORFLOWS}
    if len(versions) != 1:
        raise fail(
            f"beside TPU_EMBEDDING_TENSORFLOW={folder} there must be the metadata of "
            f"one version of {' or '.join(TENSORFLOWS)}. Found: {len(versions)}."
        )
    return (
        versions.pop(),
        [f"-I{folder}/include", *WHEEL_FLAGS],
        [f"-L{folder}", "-l:libtensorflow_framework.so.2"],
    )


def warn_of_another_tensorflow() -> None:
    """Warns if the extra `cpu` would replace the files of another distribution.

    A build cannot find out which extras pip was asked for.
    """
    names = {d.name.replace("-", "_") for d in importlib.metadata.distributions()}
    others = names.intersection(OTHER_TENSORFLOWS)
    if others and "tensorflow_cpu" not in names:
        print(
            f"warning: tpu_embedding: {', '.join(sorted(others))} is installed. The "
            "extra `cpu` would install tensorflow-cpu over its files, and replace a "
            "TensorFlow with GPU support. Leave the extra out:\n"
            "    pip install --no-build-isolation .",
            file=sys.stderr,
        )


def run(command: list[str]) -> None:
    """Runs a compiler."""
    if subprocess.run(command, check=False).returncode:
        raise fail(f"this command failed:\n    {shlex.join(command)}")


def is_core(source: str) -> bool:
    """Returns whether a source is plain C++, without TensorFlow's headers."""
    return source.startswith(f"{CC}/core/")


class BuildOps(build_ext.build_ext):
    """Compiles the sources in parallel, and only those that changed.

    setuptools itself compiles one file at a time, and all files when one has changed.
    """

    def run(self) -> None:
        """Builds the libraries, and copies them into the checkout if asked to.

        setuptools resets `inplace` while it builds.
        """
        self.into_checkout = self.inplace
        super().run()

    def build_extensions(self) -> None:
        """Builds all libraries; what both contain is compiled once."""
        self.find_compiler()
        folder = os.environ.get("TPU_EMBEDDING_TENSORFLOW")
        version, compile_flags, self.tf_link_flags = (
            read_tensorflow(pathlib.Path(folder)) if folder else ask_tensorflow()
        )
        self.set_core_flags([f for f in compile_flags if not f.startswith("-I")])
        self.op_flags = [
            *FLAGS,
            # TensorFlow's headers cause no warnings if they are system headers.
            *(flag.replace("-I", "-isystem", 1) for flag in compile_flags),
            f'-DTPU_EMBEDDING_TF_VERSION="{version}"',
            *OP_FLAGS,
        ]
        self.objects = self.folder_of_objects(self.op_flags)
        self.objects.mkdir(parents=True, exist_ok=True)
        if not self.into_checkout:
            for ext in self.extensions:
                ext.sources = self.with_one_file_of_ops(ext)
        self.compile_stale(lambda _: True)
        for ext in self.extensions:
            self.build_extension(ext)

    def find_compiler(self) -> None:
        """Sets the compiler that CXX names, which must exist."""
        self.cxx = shlex.split(os.environ.get("CXX", "g++"))
        if not self.cxx or shutil.which(self.cxx[0]) is None:
            raise fail(
                f"no C++ compiler: {shlex.join(self.cxx)!r} is not on the PATH. "
                "Install g++ (Debian: apt-get install g++), or name a compiler in CXX."
            )

    def set_core_flags(self, of_tensorflow: list[str]) -> None:
        """Sets the core's flags: its own and TensorFlow's, without the include folders.

        The core includes none of TensorFlow's headers, so that its objects serve all
        versions whose other flags, the C++ standard and ABI, are equal.
        """
        self.core_flags = [*FLAGS, *of_tensorflow, *CORE_FLAGS]
        self.core_objects = self.folder_of_objects(self.core_flags)

    def compile_stale(self, is_wanted: Callable[[str], bool]) -> None:
        """Compiles the wanted sources that changed since they were compiled."""
        sources = {source: None for ext in self.extensions for source in ext.sources}
        stale = [s for s in sources if is_wanted(s) and self.is_stale(s)]
        # The ops and rules.cc take the longest, so they must not start last.
        stale.sort(key=lambda source: is_core(source) and "rules" not in source)
        jobs = self.parallel if type(self.parallel) is int else os.cpu_count()
        with (
            self.precompiled_headers(stale) as self.include_headers,
            concurrent.futures.ThreadPoolExecutor(jobs) as pool,
        ):
            list(pool.map(self.compile, stale))

    def with_one_file_of_ops(self, ext: setuptools.Extension) -> list[str]:
        """Returns the sources of `ext`, with one that includes those of all ops."""
        ops = [source for source in ext.sources if not is_core(source)]
        text = "".join(f'#include "{pathlib.Path(op).resolve()}"\n' for op in ops)
        file = self.objects.resolve() / f"{ext.name}.cc"
        if not file.exists() or file.read_text() != text:
            file.write_text(text)
        return [*filter(is_core, ext.sources), str(file)]

    def build_extension(self, ext: setuptools.Extension) -> None:
        """Links the library."""
        target = pathlib.Path(self.get_ext_fullpath(ext.name))
        target.parent.mkdir(parents=True, exist_ok=True)
        print(f"linking {target}", flush=True)
        # Link beside the target, then move: a process may have the old library open.
        beside = target.with_suffix(".tmp")
        objects = [str(self.object_of(source)) for source in ext.sources]
        flags = list(self.tf_link_flags)
        if ext.name == SOFTWARE_TPU:
            # The protocol buffers of TPU configurations are in libtensorflow_cc.
            flags += [flag.replace("_framework", "_cc") for flag in flags]
        run([*self.cxx, *LINK_FLAGS, "-o", str(beside), *objects, *flags])
        beside.replace(target)

    def folder_of_objects(self, flags: list[str]) -> pathlib.Path:
        """Returns the folder of objects for this compiler and these flags.

        Objects of different builds are never linked together.
        """
        key = repr((self.cxx, flags))
        return pathlib.Path(
            self.build_temp, hashlib.sha256(key.encode()).hexdigest()[:16]
        )

    def object_of(self, source: str) -> pathlib.Path:
        """Returns the path of the object file of `source`."""
        objects = self.core_objects if is_core(source) else self.objects
        return (objects / source).with_suffix(".o")

    def is_stale(self, source: str) -> bool:
        """Returns whether `source` or a header that it includes has changed."""
        target = self.object_of(source)
        depfile = target.with_suffix(".d")
        if not target.exists() or not depfile.exists():
            return True
        rule = depfile.read_text().replace("\\\n", " ")
        files = map(pathlib.Path, shlex.split(rule.partition(":")[2]))
        compiled = target.stat().st_mtime
        return not all(
            file.exists() and file.stat().st_mtime < compiled for file in files
        )

    @contextlib.contextmanager
    def precompiled_headers(self, sources: list[str]) -> Iterator[list[str]]:
        """Yields the flags that include TensorFlow's headers for many ops at once."""
        if sum(not is_core(source) for source in sources) <= FEW_OPS:
            yield []
            return
        # The file has hundreds of megabytes, so it is not kept.
        with tempfile.TemporaryDirectory(dir=self.objects) as folder:
            header = pathlib.Path(folder, "tensorflow.h")
            header.write_text(PRECOMPILED)
            print("compiling TensorFlow's headers", flush=True)
            command = [*self.cxx, *self.op_flags, "-x", "c++-header"]
            run([*command, str(header), "-o", f"{header}.gch"])
            yield ["-include", str(header)]

    def compile(self, source: str) -> None:
        """Compiles one file."""
        target = self.object_of(source)
        target.parent.mkdir(parents=True, exist_ok=True)
        print(f"compiling {source}", flush=True)
        if is_core(source):
            flags = self.core_flags
        else:
            flags = [*self.op_flags, *self.include_headers]
        started = time.time()
        run([*self.cxx, *flags, "-MMD", "-c", source, "-o", str(target)])
        # A file that was edited meanwhile is newer than this time.
        os.utime(target, (started, started))

    def get_ext_filename(self, fullname: str) -> str:
        """Returns a name without Python's ABI tag, as no library uses Python."""
        return os.path.join(*fullname.split(".")) + ".so"


class BuildCore(BuildOps):
    """Compiles only the core, which needs no TensorFlow, while pip installs that."""

    def build_extensions(self) -> None:
        """Compiles the core with the flags of wheels, into `build_ext`'s folder."""
        self.find_compiler()
        self.set_core_flags([*WHEEL_FLAGS])
        self.compile_stale(is_core)


def extensions() -> list[setuptools.Extension]:
    """Returns the libraries to build, that of the software TPU last."""
    names = list(SOURCES)
    if os.environ.get("TPU_EMBEDDING_BUILD_SOFTWARE_TPU") == "0":
        names.remove(SOFTWARE_TPU)
    if os.environ.get("TPU_EMBEDDING_BUILD_OPS") == "0":
        names = []
    root = pathlib.Path()
    return [
        setuptools.Extension(
            name, [str(path) for glob in SOURCES[name] for path in root.glob(glob)]
        )
        for name in names
    ]


if __name__ == "__main__":
    warn_of_another_tensorflow()
    setuptools.setup(
        # Not in pyproject.toml: setuptools before 77 and later ones reject each
        # other's syntax, and both are in use.
        license="Apache-2.0",
        ext_modules=extensions(),
        cmdclass={"build_ext": BuildOps, "build_core": BuildCore},
    )
