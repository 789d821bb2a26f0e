"""The tools of the repository find what they are there to find."""

from __future__ import annotations

import pathlib

import check
import lint_report
import pytest
import structure

ROOT = pathlib.Path(__file__).resolve().parents[1]


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
    found = list(lint_report.cpp_functions(text.splitlines()))
    assert found == [(4, 6), (2, 8), (10, 12)]


def test_the_lint_report_names_file_and_line():
    long_body = ["def f(a, b, c, d, e, g, h):", *["    print()"] * 121]
    found = [*lint_report.check_python_functions("x.py", long_body)]
    assert [(str(finding)[:14], finding.error) for finding in found] == [
        ("x.py:1: error:", True),
        ("x.py:1: warnin", False),
    ]
    accepted = ["def f():  # length: a reason", *["    print()"] * 121]
    assert [*lint_report.check_python_functions("x.py", accepted)] == []


def test_the_sources_are_found():
    assert "tpu_embedding/__init__.py" in lint_report.sources(".py")
    assert "tests/cc/check.h" in lint_report.sources(".h")


def test_structure_counts_modules_and_errors():
    sources = {
        "p": "from p.a import f",
        "p.a": "from p import b\nfrom p.c import g",
        "p.b": "import p.c",
        "p.c": "def g() -> ValueError: ...\ndef h() -> int: ...",
    }
    graph = structure.import_graph(sources)
    assert structure.longest_chain(graph) == ["p", "p.a", "p.b", "p.c"]
    one_importer = structure.small_with_one_importer(sources, graph)
    assert one_importer == ["p.a -> p", "p.b -> p.a"]
    assert structure.error_functions(sources) == ["p.c.g"]


def test_every_count_has_an_aim():
    counted = [name for name, _ in structure.static_counts(ROOT)]
    assert counted == list(structure.AIMS)[: len(counted)]


def test_check_runs_the_closest_tests_first():
    tests = check.selected_tests(["tpu_embedding/config.py", "tests/v2_calls.py"])
    assert tests[0] == "tests/test_config.py"
    assert "tests/test_embedding_v2.py" in tests
    for name, place in check.TEST_FOLDERS.items():
        assert (ROOT / name).exists()
        assert any(test.startswith(place) for test in check.test_files())


def test_check_passes_over_what_it_does_not_reach(tmp_path, capsys):
    slow = tmp_path / "test_slow.py"
    slow.write_text("def test_a(): ...\ndef test_b(): raise ValueError\n")
    quiet = ["--quiet", "-p", "no:cacheprovider", f"--rootdir={tmp_path}"]
    budget = check.Budget(0.0)
    assert pytest.main([*quiet, str(slow)], plugins=[budget]) == 0
    assert budget.left() == ["test_slow.py"]
    assert "Interrupted" not in capsys.readouterr().out
    budget = check.Budget(60.0)
    assert pytest.main([*quiet, str(slow)], plugins=[budget]) == 1
    assert budget.left() == []
