"""The tools of the repository find what they are there to find."""

from __future__ import annotations

import pathlib

import check
import lint_report
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


def test_the_lint_report_finds_docstrings_without_a_verb():
    starts = ["The rows.", "Rows of a table.", "Whether it is so.", "Returns rows."]
    lines = [f'def f(): """{start}"""' for start in starts]
    found = [finding.place for finding in lint_report.check_docstrings("x.py", lines)]
    assert found == ["x.py:1", "x.py:2", "x.py:3"]


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


def test_check_runs_what_changed_first_and_pages_last():
    changed = ["docs/telemetry.md", "tpu_embedding/config.py", "tests/test_dims.py"]
    selected = check.selected_tests([*changed, "tests/peers/test_tfrs.py"])
    assert check.in_turn(selected)[:3] == [
        "tests/test_dims.py",
        "tests/test_config.py",
        "tests/test_documentation.py",
    ]
    assert selected["docs/telemetry.md"] == ["tests/test_documentation.py"]
    assert selected["tests/peers/test_tfrs.py"] == []
    of_helper = check.selected_tests(["tests/v2_calls.py"])["tests/v2_calls.py"]
    assert "tests/test_embedding_v2.py" in of_helper
    for name, place in check.TEST_FOLDERS.items():
        assert (ROOT / name).exists()
        assert any(test.startswith(place) for test in check.test_files())


def test_check_reads_imports_and_not_what_stands_near_them():
    sources = {
        "a": "from tpu_embedding import config\n",
        "b": "from tpu_embedding import (\n    errors,\n)\nimport config\n",
        "c": "from tpu_embedding.config import TableConfig\n",
    }
    assert check.tests_importing("tpu_embedding.config", sources) == ["a", "c"]


def test_check_fails_where_a_change_was_not_tested(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(check, "ROOT", tmp_path)
    monkeypatch.chdir(tmp_path)
    (tmp_path / "pytest.ini").write_text("[pytest]\nmarkers = second_tier\n")
    (tmp_path / "tests").mkdir()
    marked = "import pytest\n@pytest.mark.second_tier\ndef test_b(): assert not {}\n"
    for name, value in (("own", 0), ("other", 1)):
        (tmp_path / f"tests/test_{name}.py").write_text(
            f"def test_a(): ...\n{marked.format(value)}"
        )
    monkeypatch.setattr(check, "ALWAYS", ())
    selected = {
        "tests/test_own.py": ["tests/test_own.py"],
        "module.py": ["tests/test_other.py"],
    }
    # The second tier of a test that did not change is left out.
    assert check.run_tests(selected, 60.0)
    assert "3 passed" in capsys.readouterr().out
    assert not check.run_tests({**selected, "tests/test_other.py": []}, 60.0)
    assert not check.run_tests(selected, 0.0)
    assert "tests/test_own.py module.py" in capsys.readouterr().out
