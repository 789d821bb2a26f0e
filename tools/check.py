"""Lints, and runs the tests of what changed, for at most two minutes.

    make check

Changed is what differs from the commit where this branch left `origin/main` (from HEAD
where there is no `origin/main`), with what is not committed yet. The tests of a changed
file are, in this order:

1. the file itself, where it is a test, and the tests that import it, where it is a
   helper of tests;
2. `test_<name>*.py` of a module or a C++ file with that name;
3. the tests that import the module by its full name;
4. the tests in the folder of its package (`TEST_FOLDERS`);
5. for C++ the programs of tests/cc and one training test.

What is not reached within `--seconds` is named, and left to `make test`.
"""

from __future__ import annotations

import argparse
import os
import pathlib
import re
import subprocess
import sys
import time
from collections.abc import Iterator

import pytest

ROOT = pathlib.Path(__file__).resolve().parents[1]
# How the paths of a package's tests start, if not with its own name under tests.
TEST_FOLDERS = {
    "tpu_embedding/engines": "tests/conformance",
    "tpu_embedding/engines/portable": "tests/test_portable",
    "tpu_embedding/layout": "tests/test_plan",
    "tpu_embedding/lookup": "tests/conformance",
    "tpu_embedding/keras": "tests/keras_layer",
    "tpu_embedding/testing": "tests/software_tpu",
    "tpu_embedding/engines/sparse_core": "tests/sparse_core",
    "tpu_embedding/engines/tpu_v2_v4": "tests/tpu_v2_v4",
    "tpu_embedding/optimizers": "tests/conformance",
    "examples": "tests/test_examples.py",
    "benchmarks": "tests/test_benchmarks.py",
}
ALWAYS = ("tests/test_public.py", "tests/test_repository.py")
# After all others, where the package has changed.
OF_PACKAGE = ("tests/test_documented_loops.py",)
OF_DOCUMENTATION = ("tests/test_documentation.py",)
OF_CPP = ("tests/test_cc.py", "tests/test_library.py", "tests/test_embedding.py")
SECONDS = 100.0


def git(*arguments: str) -> list[str]:
    """The lines that a git command prints; none where it fails."""
    command = ["git", "-c", "safe.directory=*", *arguments]
    done = subprocess.run(
        command, cwd=ROOT, text=True, capture_output=True, check=False
    )
    return done.stdout.splitlines() if done.returncode == 0 else []


def changed_files() -> list[str]:
    """Paths that differ from the base, and untracked ones."""
    base = git("merge-base", "HEAD", "origin/main") or ["HEAD"]
    names = git("diff", "--name-only", base[0])
    names += git("ls-files", "--others", "--exclude-standard")
    return sorted({name for name in names if (ROOT / name).exists()})


def test_files() -> dict[str, str]:
    """Path -> source of all test modules and their helpers."""
    paths = sorted((ROOT / "tests").rglob("*.py"))
    return {str(path.relative_to(ROOT)): path.read_text() for path in paths}


def tests_importing(module: str, sources: dict[str, str]) -> list[str]:
    """The tests that name a module in an import."""
    package, _, name = module.rpartition(".")
    parts = [rf"^\s*(?:from|import) {re.escape(module)}\b"]
    if package:
        parts.append(rf"^\s*from {re.escape(package)} import [^#]*?\b{name}\b")
    pattern = re.compile("|".join(parts), re.MULTILINE)
    return [name for name, text in sources.items() if pattern.search(text)]


def tests_of(name: str, sources: dict[str, str]) -> Iterator[str]:
    """Yields the tests of one changed file, the closest first."""
    path = pathlib.PurePath(name)
    if name.startswith("tests/") and name.endswith(".py"):
        yield name
        module = ".".join(path.with_suffix("").parts[1:]).removesuffix(".__init__")
        yield from tests_importing(module, sources)
        return
    stem = path.stem.removesuffix("_test")
    by_name = re.compile(rf"/test_{re.escape(stem)}(_\w+)?\.py$")
    found = [match for test in sources if (match := by_name.search(test))]
    # test_config.py before test_config_errors.py.
    yield from (match.string for match in sorted(found, key=lambda m: len(m[0])))
    if path.suffix in {".cc", ".h"}:
        yield from OF_CPP
        return
    module = ".".join(path.with_suffix("").parts).removesuffix(".__init__")
    yield from tests_importing(module, sources)
    folders = [str(parent) for parent in path.parents]
    for folder in folders:
        place = TEST_FOLDERS.get(folder, folder.replace("tpu_embedding", "tests", 1))
        if place != "tests" and place.startswith("tests"):
            yield from (test for test in sources if test.startswith(place))


def selected_tests(changed: list[str]) -> list[str]:
    """The test modules to run, the closest to the changes first, each once."""
    sources = test_files()
    found = [test for name in changed for test in tests_of(name, sources)]
    wanted = [test for test in found if pathlib.PurePath(test).name.startswith("test_")]
    wanted += ALWAYS
    if any(name.endswith(".md") for name in changed):
        wanted += OF_DOCUMENTATION
    if any(name.startswith("tpu_embedding/") for name in changed):
        wanted += OF_PACKAGE
    return list(dict.fromkeys(wanted))


class Budget:
    """A plugin of pytest that runs no test after its time is up."""

    def __init__(self, seconds: float) -> None:
        self._end = time.monotonic() + seconds
        self._left: set[str] = set()

    @pytest.hookimpl(tryfirst=True)
    def pytest_runtest_protocol(self, item: pytest.Item) -> bool | None:
        """Passes a test over, by returning True, when the time is up."""
        if time.monotonic() < self._end:
            return None
        self._left.add(item.nodeid.partition("::")[0])
        return True

    def left(self) -> list[str]:
        """The test modules that were not reached, or not to their end."""
        return sorted(self._left)


def run_tests(files: list[str], seconds: float) -> bool:
    """Runs test modules of the checkout; returns whether what ran passed."""
    budget = Budget(seconds)
    sys.path.insert(0, str(ROOT))
    options = ["--quiet", "--exitfirst", "--durations=10"]
    code = pytest.main([*options, *files], plugins=[budget])
    if budget.left():
        print(f"After {seconds:.0f} s not reached, wholly or in part:", *budget.left())
    return code in (pytest.ExitCode.OK, pytest.ExitCode.NO_TESTS_COLLECTED)


def main() -> int:
    """Runs `make lint` beside the tests; returns 1 if one of them fails."""
    parser = argparse.ArgumentParser(description="Lints and tests what changed.")
    parser.add_argument("--seconds", type=float, default=SECONDS, help="for the tests")
    parser.add_argument("--list", action="store_true", help="name the tests; run none")
    arguments = parser.parse_args()
    files = selected_tests(changed_files())
    if arguments.list:
        print(*files, sep="\n")
        return 0
    lint = subprocess.Popen(
        ["make", "--no-print-directory", "lint"],
        cwd=ROOT,
        env={name: v for name, v in os.environ.items() if name != "MAKEFLAGS"},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )
    passed = run_tests(files, arguments.seconds)
    output, _ = lint.communicate()
    print(output)
    if lint.returncode or not passed:
        print("make check: the", "tests" if not passed else "lint", "failed")
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
