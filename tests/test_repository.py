"""Holds the repository to its own rules: sizes, the facade, what git tracks.

A function or file that must be longer says why, on its `def` line or on one of its
first lines: `# length: the reason`.
"""

from __future__ import annotations

import ast
import collections
import functools
import importlib.util
import itertools
import pathlib
import re
import shutil
import subprocess
from collections.abc import Iterator, Sequence
from typing import Any

import pytest

import tpu_embedding

ROOT = pathlib.Path(__file__).resolve().parents[1]
FOLDERS = ("tpu_embedding", "tests", "examples", "benchmarks")
MAX_FILE_LINES = 400
MAX_PYTHON_BODY_LINES = 40
MAX_CPP_FUNCTION_LINES = 60
EXEMPTION_LINES = 10
EXEMPTION = re.compile(r"(#|//) length: \w+")


def sources(*suffixes: str) -> list[str]:
    found = [ROOT / "setup.py"] if ".py" in suffixes else []
    for folder in FOLDERS:
        found += [p for p in (ROOT / folder).rglob("*") if p.suffix in suffixes]
    return sorted(str(path.relative_to(ROOT)) for path in found)


def tracked_files() -> list[pathlib.Path]:
    """What git tracks or would after `git add`; without git, what must be there."""
    # A clone by another user is fine here: nothing of it is run.
    git = ["git", "-c", "safe.directory=*", "ls-files", "-z"]
    if (ROOT / ".git").exists() and shutil.which("git"):
        options = ["--cached", "--others", "--exclude-standard"]
        listed = subprocess.check_output([*git, *options], cwd=ROOT)
        names = [name for name in listed.decode().split("\0") if name]
    else:
        names = ["BUILD", "Makefile", "README.md", *sources(".py", ".cc", ".h")]
    return [ROOT / name for name in names if (ROOT / name).is_file()]


def tracked_text() -> list[pathlib.Path]:
    """All of them but the golden files, which are data."""
    golden = ROOT / "tests" / "golden"
    return [
        path
        for path in tracked_files()
        if path.suffix == ".md" or golden not in path.parents
    ]


def test_the_readme_names_every_page_and_example():
    text = (ROOT / "README.md").read_text()
    pages = [f"docs/{path.name}" for path in (ROOT / "docs").glob("*.md")]
    examples = [path.name for path in (ROOT / "examples").glob("[0-9][0-9]_*.py")]
    assert pages
    assert examples
    assert [name for name in (*pages, *examples) if name not in text] == []


def test_what_is_used_of_private_tensorflow_is_listed():
    """Apart from what interop/private_tensorflow.py checks itself."""
    private = re.compile(r"^from (tensorflow\.python\.\S+) import (\w+)", re.MULTILINE)
    used = set()
    for name in sources(".py"):
        if name.startswith("tpu_embedding/"):
            for module, part in private.findall((ROOT / name).read_text()):
                found = importlib.util.find_spec(module)
                assert found is not None
                package = found.submodule_search_locations is not None
                used.add(f"{module}.{part}" if package else module)
    text = (ROOT / "docs" / "architecture.md").read_text()
    table = text.partition("| in `tensorflow.python` |")[2].partition("\n\n")[0]
    names = [row.split("|")[1] for row in table.splitlines() if row.startswith("| `")]
    listed = [name for row in names for name in re.findall(r"`([\w.]+)`", row)]
    assert sorted(used) == [f"tensorflow.python.{name}" for name in listed]


def test_the_sources_are_found():
    assert "tpu_embedding/__init__.py" in sources(".py")
    assert "tests/cc/check.h" in sources(".h")


@pytest.mark.parametrize("name", sources(".py", ".cc", ".h"))
def test_files_are_short(name: str):
    lines = (ROOT / name).read_text().splitlines()
    count = len(lines)
    exempt = any(EXEMPTION.search(line) for line in lines[:EXEMPTION_LINES])
    assert count <= MAX_FILE_LINES or exempt


def body_lines(function: ast.FunctionDef | ast.AsyncFunctionDef) -> int:
    body = function.body[1:] if ast.get_docstring(function) else function.body
    if not body:
        return 0
    return (body[-1].end_lineno or 0) - body[0].lineno + 1


@pytest.mark.parametrize("name", sources(".py"))
def test_python_functions_are_short(name: str):
    text = (ROOT / name).read_text()
    lines = text.splitlines()
    too_long = [
        f"{name}:{node.lineno} {node.name}: {body_lines(node)} lines"
        for node in ast.walk(ast.parse(text))
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)
        and body_lines(node) > MAX_PYTHON_BODY_LINES
        and not EXEMPTION.search(lines[node.lineno - 1])
    ]
    assert not too_long


def cpp_functions(lines: Sequence[str]) -> Iterator[tuple[int, int]]:
    """Yields the first and last line of each block that a bare `}` ends.

    clang-format puts that brace below the first line of the block. At column 0 it
    ends a function, at column 2 a method or a part of a function; types end in `};`,
    namespaces in a comment.
    """
    for last, line in enumerate(lines):
        closing = re.fullmatch(r"( {0}| {2})}", line)
        if closing is None:
            continue
        starts = re.compile(rf" {{0,{len(closing[1])}}}[^ #]")
        first = next(n for n in range(last - 1, -1, -1) if starts.match(lines[n]))
        yield first, last


def test_cpp_functions_are_found():
    text = """
namespace a {
int F(int b,
      int c) {
  if (b) {
    return c;
  }
  return b;
}
struct S {
  int G() {
    return 1;
  }
};
}  // namespace a
"""
    assert list(cpp_functions(text.splitlines())) == [(4, 6), (2, 8), (10, 12)]


@pytest.mark.parametrize("name", sources(".cc", ".h"))
def test_cpp_functions_are_short(name: str):
    lines = (ROOT / name).read_text().splitlines()
    too_long = [
        f"{name}:{first + 1}: {last - first + 1} lines"
        for first, last in cpp_functions(lines)
        if last - first + 1 > MAX_CPP_FUNCTION_LINES
        and not EXEMPTION.search(lines[first])
    ]
    assert not too_long


def test_the_facade_has_no_code():
    module = ast.parse((ROOT / "tpu_embedding" / "__init__.py").read_text())
    docstring, *statements, names = module.body
    assert ast.get_docstring(module)
    assert isinstance(docstring, ast.Expr)
    assert all(isinstance(node, ast.ImportFrom) for node in statements)
    assert isinstance(names, ast.Assign)
    assert ast.unparse(names.targets[0]) == "__all__"


def test_the_facade_exports_what_it_imports():
    imported = [
        alias.asname or alias.name
        for node in ast.parse((ROOT / "tpu_embedding" / "__init__.py").read_text()).body
        if isinstance(node, ast.ImportFrom)
        for alias in node.names
    ]
    assert sorted(imported) == sorted(tpu_embedding.__all__)


def test_git_tracks_only_text():
    binary = [path.name for path in tracked_text() if b"\0" in path.read_bytes()]
    assert not binary


# The folders of a user, of temporary files, of a container's work tree.
MACHINE_PATH = re.compile(r"/(home|root|tmp|work|usr/local)/")


def test_git_tracks_no_path_of_one_machine():
    found = [
        f"{path.relative_to(ROOT)}:{number}: {line.strip()}"
        for path in tracked_text()
        for number, line in enumerate(path.read_text().splitlines(), 1)
        if MACHINE_PATH.search(line)
    ]
    assert not found


class BazelTargets:
    """Runs BUILD, whose syntax is also Python's, and keeps the files of its targets."""

    def __init__(self) -> None:
        self.files: dict[str, list[str]] = collections.defaultdict(list)
        ignored = ("load", "package", "licenses", "exports_files", "genrule")
        rules = ("cc_binary", "cc_library", "cc_test", "py_library", "py_test")
        scope: dict[str, Any] = dict.fromkeys(ignored, lambda *_, **__: None)
        scope.update({rule: functools.partial(self._add, rule) for rule in rules})
        exec((ROOT / "BUILD").read_text(), {**scope, "glob": self._glob})  # noqa: S102

    def _add(self, rule: str, **attributes: Any) -> None:
        for name in ("srcs", "hdrs"):
            self.files[rule] += attributes.get(name, [])

    @staticmethod
    def _glob(patterns: list[str], exclude: Sequence[str] = ()) -> list[str]:
        def expand(several: Sequence[str]) -> set[str]:
            paths = itertools.chain.from_iterable(map(ROOT.glob, several))
            return {str(path.relative_to(ROOT)) for path in paths if path.is_file()}

        return sorted(expand(patterns) - expand(exclude))


def test_bazel_builds_what_setup_py_builds():
    files = BazelTargets().files
    cpp = {*files["cc_library"], *files["cc_binary"], *files["cc_test"]}
    assert cpp == set(sources(".cc", ".h"))


def test_bazel_knows_all_python_files():
    files = BazelTargets().files
    python = {*files["py_library"], *files["py_test"], "tests/test_cc.py", "setup.py"}
    assert python - {"pytest_main.py"} == set(sources(".py"))
