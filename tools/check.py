"""Lints, and runs the tests of what changed, for at most two minutes.

    make check

A file has changed if it differs from the commit where this branch left `origin/main`
(from HEAD if there is no `origin/main`), committed or not. The tests that changed run
first, then those of the package and the tools, then those of pages. The tests of
a changed file are, the closest first:

1. the file itself, if it is a test, and the tests that import it, if it is a helper
   of tests;
2. `test_<name>*.py` of a module or a C++ file with that name;
3. the tests that import the module by its full name;
4. the tests in the folder of its package (`TEST_FOLDERS`);
5. for C++ the programs of tests/cc and one training test.

Unchanged tests run only if they are in the first tier. Tests that are not reached in
`--seconds` are named and left to `make test`; the check fails if they include a changed
test, or all tests of a changed file.
"""

from __future__ import annotations

import argparse
import ast
import itertools
import os
import pathlib
import re
import subprocess
import sys
import time
from collections.abc import Collection, Iterator

import pytest

ROOT = pathlib.Path(__file__).resolve().parents[1]
# How the paths of a package's tests start, if not with its own name under tests.
TEST_FOLDERS = {
    "tpu_embedding/commands": "tests/serving/test_delta",
    "tpu_embedding/compat/estimator": "tests/estimator",
    "tpu_embedding/compat/interop": "tests/interop",
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
    "benchmarks": "tests/test_benchmark",
}
# What runs tests that need their own process; for "" that is `make test-peers`.
RUN_BY = {"tests/tf_keras/": "tests/test_tf_keras.py", "tests/peers/": ""}
ALWAYS = ("tests/test_public.py", "tests/test_repository.py")
# These tests run after all others, if the package has changed.
OF_PACKAGE = ("tests/test_documented_loops.py",)
OF_DOCUMENTATION = ("tests/test_documentation.py",)
OF_CPP = ("tests/test_cc.py", "tests/test_library.py", "tests/test_embedding.py")
SECONDS = 100.0


def git(*arguments: str) -> list[str]:
    """Returns the lines that a git command prints, or none if it fails."""
    command = ["git", "-c", "safe.directory=*", *arguments]
    done = subprocess.run(
        command, cwd=ROOT, text=True, capture_output=True, check=False
    )
    return done.stdout.splitlines() if done.returncode == 0 else []


def changed_files() -> list[str]:
    """Returns paths that differ from the base, and untracked ones."""
    base = git("merge-base", "HEAD", "origin/main") or ["HEAD"]
    names = git("diff", "--name-only", base[0])
    names += git("ls-files", "--others", "--exclude-standard")
    return sorted({name for name in names if (ROOT / name).exists()})


def test_files() -> dict[str, str]:
    """Reads all test modules and their helpers: path -> source."""
    paths = sorted((ROOT / "tests").rglob("*.py"))
    return {str(path.relative_to(ROOT)): path.read_text() for path in paths}


def imports(source: str) -> set[str]:
    """Returns the full names that a module imports: modules, and names from them."""
    found = set()
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module:
            found.add(node.module)
            found |= {f"{node.module}.{alias.name}" for alias in node.names}
    return found


def tests_importing(module: str, sources: dict[str, str]) -> list[str]:
    """Returns the tests that name a module in an import."""
    return [
        name
        for name, text in sources.items()
        if module.rpartition(".")[2] in text and module in imports(text)
    ]


def runnable(name: str) -> str | None:
    """Returns the module that runs a test file, or ""; None if it has no tests."""
    if not pathlib.PurePath(name).name.startswith("test_"):
        return None
    return next((by for place, by in RUN_BY.items() if name.startswith(place)), name)


def tests_of(name: str, sources: dict[str, str]) -> Iterator[str]:
    """Yields the tests of one changed file, the closest first."""
    path = pathlib.PurePath(name)
    if name.startswith("tests/") and name.endswith(".py"):
        yield name
        module = ".".join(path.with_suffix("").parts[1:]).removesuffix(".__init__")
        yield from tests_importing(module, sources)
        return
    if path.suffix == ".md":
        yield from OF_DOCUMENTATION
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


def selected_tests(changed: list[str]) -> dict[str, list[str]]:
    """Returns each changed file's tests, the closest first; test files come first."""
    sources = test_files()

    def place(name: str) -> int:
        return 0 if name.startswith("tests/") else 2 if name.endswith(".md") else 1

    return {
        name: list(dict.fromkeys(filter(None, map(runnable, tests_of(name, sources)))))
        for name in sorted(changed, key=place)
    }


def in_turn(selected: dict[str, list[str]]) -> list[str]:
    """Orders all tests, each once: changed ones, then the closest of each file, etc."""
    changed = [name for tests in selected for name in tests if name in selected]
    by_rank = itertools.zip_longest(*selected.values())
    found = [*changed, *(name for rank in by_rank for name in rank if name), *ALWAYS]
    if any(name.startswith("tpu_embedding/") for name in selected):
        found += OF_PACKAGE
    return list(dict.fromkeys(found))


class Budget:
    """A plugin of pytest that runs no test after its time is up.

    Attributes:
      reached: The test modules of which at least one test ran.
      left: The test modules that were not reached, or not to their end.
    """

    def __init__(self, seconds: float, changed: Collection[str] = ()) -> None:
        self._end = time.monotonic() + seconds
        self._changed = changed
        self.reached: set[str] = set()
        self.left: set[str] = set()

    def pytest_collection_modifyitems(
        self, config: pytest.Config, items: list[pytest.Item]
    ) -> None:
        """Leaves out the later tiers of files that did not change."""
        left_out = [
            item
            for item in items
            if any(map(item.get_closest_marker, ("second_tier", "third_tier")))
            and item.nodeid.partition("::")[0] not in self._changed
        ]
        config.hook.pytest_deselected(items=left_out)
        items[:] = [item for item in items if item not in left_out]

    @pytest.hookimpl(tryfirst=True)
    def pytest_runtest_protocol(self, item: pytest.Item) -> bool | None:
        """Skips a test, by returning True, if the time is up."""
        in_time = time.monotonic() < self._end
        (self.reached if in_time else self.left).add(item.nodeid.partition("::")[0])
        return None if in_time else True

    def has_tested(self, name: str, tests: Collection[str]) -> bool:
        """Says whether a changed file ran, or, if it has no tests, one of `tests`."""
        own = runnable(name)
        if own is not None:
            return own in self.reached and own not in self.left
        return not tests or not self.reached.isdisjoint(tests)


def run_tests(selected: dict[str, list[str]], seconds: float) -> bool:
    """Runs test modules of the checkout; returns whether the change was tested."""
    budget = Budget(seconds, [*selected, *filter(None, map(runnable, selected))])
    sys.path.insert(0, str(ROOT))
    options = ["--quiet", "--exitfirst", "--durations=10"]
    code = pytest.main([*options, *in_turn(selected)], plugins=[budget])
    if budget.left:
        print(f"After {seconds:.0f} s not reached, wholly or in part:", *budget.left)
    untested = [
        name for name in selected if not budget.has_tested(name, selected[name])
    ]
    if untested:
        print("Changed and not tested (CHECK='--seconds 600'?):", *untested)
    return code == pytest.ExitCode.OK and not untested


def main() -> int:
    """Runs `make lint` beside the tests; returns 1 if one of them fails."""
    parser = argparse.ArgumentParser(description="Lints and tests what changed.")
    parser.add_argument("--seconds", type=float, default=SECONDS, help="for the tests")
    parser.add_argument("--list", action="store_true", help="name the tests; run none")
    arguments = parser.parse_args()
    selected = selected_tests(changed_files())
    if arguments.list:
        print(*in_turn(selected), sep="\n")
        return 0
    lint = subprocess.Popen(
        ["make", "--no-print-directory", "lint"],
        cwd=ROOT,
        env={name: v for name, v in os.environ.items() if name != "MAKEFLAGS"},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )
    passed = run_tests(selected, arguments.seconds)
    output, _ = lint.communicate()
    print(output)
    if lint.returncode or not passed:
        print("make check: the", "tests" if not passed else "lint", "failed")
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
