"""Holds the repository to its own rules: the facade, the pages, what Bazel builds.

tools/lint_report.py, which `make lint` runs, has those on sizes and on what git tracks.
"""

from __future__ import annotations

import ast
import collections
import functools
import importlib.util
import itertools
import pathlib
import re
import tomllib
from collections.abc import Sequence
from typing import Any

import older_tensorflow
import pytest
from lint_report import sources

import tpu_embedding
from tpu_embedding import optimizers

ROOT = pathlib.Path(__file__).resolve().parents[1]


def test_files_of_a_release_have_one_version_and_one_description():
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    citation = (ROOT / "CITATION.cff").read_text()
    assert f"\nversion: {project['version']}\n" in citation
    assert f": {project['description'].lower()}" in citation.lower()
    headings = re.findall("^## (.*)", (ROOT / "CHANGELOG.md").read_text(), re.MULTILINE)
    assert headings[0].split()[0] == project["version"]


def test_what_is_used_of_private_tensorflow_is_listed():
    """Apart from what compat/estimator/private_tensorflow.py checks itself."""
    private = re.compile(
        r"^from (tensorflow\.python\.\S+) import (\w+(?:, \w+)*)", re.MULTILINE
    )
    used = set()
    for name in sources(".py"):
        if name.startswith("tpu_embedding/"):
            for module, parts in private.findall((ROOT / name).read_text()):
                found = importlib.util.find_spec(module)
                assert found is not None
                package = found.submodule_search_locations is not None
                for part in parts.split(", "):
                    used.add(f"{module}.{part}" if package else module)
    text = (ROOT / "CONTRIBUTING.md").read_text()
    table = text.partition("| in `tensorflow.python` |")[2].partition("\n\n")[0]
    names = [row.split("|")[1] for row in table.splitlines() if row.startswith("| `")]
    listed = [name for row in names for name in re.findall(r"`([\w.]+)`", row)]
    assert sorted(used) == [f"tensorflow.python.{name}" for name in listed]


@pytest.mark.parametrize(("file", "name"), older_tensorflow.names())
def test_what_needs_a_newer_tensorflow_exists(file: str, name: str):
    assert f"\ndef {name}(" in (ROOT / "tests" / file).read_text()


def test_the_facade_exports_what_it_imports():
    body = ast.parse((ROOT / "tpu_embedding" / "__init__.py").read_text()).body
    lazy = [node for part in body if isinstance(part, ast.If) for node in part.body]
    imported = [
        alias.asname or alias.name
        for node in (*body, *lazy)
        if isinstance(node, ast.ImportFrom)
        for alias in node.names
        if alias.name not in ("*", "cluster_config", "optimizers")
    ]
    assert sorted([*imported, *optimizers.__all__]) == sorted(tpu_embedding.__all__)


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
        self.files["data"] += attributes.get("data", [])

    @staticmethod
    def _glob(patterns: list[str], exclude: Sequence[str] = ()) -> list[str]:
        def expand(several: Sequence[str]) -> set[str]:
            paths = itertools.chain.from_iterable(map(ROOT.glob, several))
            return {str(path.relative_to(ROOT)) for path in paths if path.is_file()}

        return sorted(expand(patterns) - expand(exclude))


def test_bazel_builds_what_setup_py_builds():
    files = BazelTargets().files
    cpp = {*files["cc_library"], *files["cc_binary"], *files["cc_test"]}
    c = {name for name in files["data"] if name.endswith((".c", ".h"))}
    assert cpp | c == set(sources(".c", ".cc", ".h"))


def test_bazel_knows_all_python_files():
    files = BazelTargets().files
    python = {*files["py_library"], *files["py_test"], "tests/test_cc.py", "setup.py"}
    assert python - {"pytest_main.py"} == set(sources(".py"))
