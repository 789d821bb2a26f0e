"""Prints all violations that ruff, pyright and clang-format miss, with file and line.

    python tools/lint_report.py

An error makes the exit status 1, a warning does not. Sizes warn where good code usually
stops and fail only far above: cohesion decides how long a file or a function should be
(CONTRIBUTING.md). `# length: the reason` on the `def` line, or within the first ten
lines of a file, accepts a size and silences both.

| size | warning | error |
|---|---|---|
| lines of a file | 600 | 1,200 |
| lines of a Python function's body | 60; 90th percentile 30 | 120 |
| lines of a C++ function | 60 | 120 |
| parameters of a function | 6 | 12 (ruff) |
| cyclomatic complexity | 12 (ruff, run from here) | 18 (ruff) |
"""

from __future__ import annotations

import argparse
import ast
import dataclasses
import pathlib
import re
import shutil
import statistics
import subprocess
import sys
from collections.abc import Iterator, Sequence

ROOT = pathlib.Path(__file__).resolve().parents[1]
FOLDERS = ("tpu_embedding", "tests", "tools", "examples", "benchmarks")
WARN_FILE_LINES, MAX_FILE_LINES = 600, 1200
WARN_FUNCTION_LINES, MAX_FUNCTION_LINES = 60, 120
WARN_P90_FUNCTION_LINES = 30
WARN_PARAMETERS = 6
WARN_COMPLEXITY = 12
ACCEPTED = re.compile(r"(#|//) length: \w+")
LINES_FOR_ACCEPTING_A_FILE = 10
# One word per thing (docs/glossary.md): words of other pages, and the word to use.
WORDS = {
    r"\b[Ss]tock (?!price)|\bTensorFlow's own\b": "TensorFlow's",
    r"\bupstream('s| TensorFlow)": "TensorFlow's",
    r"\boff (a )?TPUs?\b": "on CPUs",
    r"\b(is|are) an? [A-Za-z.]+Error\b": "raises ...Error",
    r"\b[Bb]ut for\b": "except",
    r"\b[Mm]end(s|ed)?\b": "fix",
    r"\b[Rr]efused? by name\b": "raises ... that names the option",
    r"\bids out of range\b|\bbad ids\b": "out-of-range ids",
    r"\b([Ww]hoever|[Ww]ho calls)\b": "the caller",
    r"\b(quanti|regulari|seriali)s(?!t)|\bbehaviour": "American spelling",
}
# Docstrings of functions begin with such a verb, and not with these nouns.
VERB = re.compile(r"See |[A-Z][a-z]+s\b(?!')")
NOUNS = re.compile(
    r"(Activations|Arrays|As|Bars|Batches|Bytes|Facts|Gradients|Ids|Lines|Names|Numbers"
    r"|Pairs|Powers|Ranges|Results|Rows|Samples|Seconds|Strings|Subclasses|Tables"
    r"|Tensors|This|Those|Weights)\b"
)
# The folders of a user, of temporary files, of a container's work tree.
MACHINE_PATH = re.compile(r"/(home|root|tmp|work|usr/local)/")


@dataclasses.dataclass(frozen=True)
class Finding:
    """One violation; printed as `file:line: message`."""

    place: str
    message: str
    error: bool

    def __str__(self) -> str:
        return f"{self.place}: {'error' if self.error else 'warning'}: {self.message}"


def sources(*suffixes: str) -> list[str]:
    """Returns paths of the sources with these suffixes in the repository, sorted."""
    found = [ROOT / "setup.py"] if ".py" in suffixes else []
    for folder in FOLDERS:
        found += [p for p in (ROOT / folder).rglob("*") if p.suffix in suffixes]
    return sorted(str(path.relative_to(ROOT)) for path in found)


def tracked_text() -> list[pathlib.Path]:
    """Returns what git tracks, or would after `git add`, except the golden data."""
    # A clone that belongs to another user is fine: nothing in it is run.
    git = ["git", "-c", "safe.directory=*", "ls-files", "-z"]
    if (ROOT / ".git").exists() and shutil.which("git"):
        options = ["--cached", "--others", "--exclude-standard"]
        listed = subprocess.check_output([*git, *options], cwd=ROOT)
        names = [name for name in listed.decode().split("\0") if name]
    else:
        names = ["BUILD", "Makefile", "README.md", *sources(".py", ".cc", ".h")]
    golden = ROOT / "tests" / "golden"
    paths = [ROOT / name for name in names if (ROOT / name).is_file()]
    return [p for p in paths if p.suffix == ".md" or golden not in p.parents]


def size_finding(
    place: str, message: str, count: int, limits: tuple[int, int]
) -> Iterator[Finding]:
    """Yields a warning above the first limit, an error above the second."""
    if count > limits[0]:
        text = f"{message} (warning above {limits[0]}, error above {limits[1]})"
        yield Finding(place, text, error=count > limits[1])


def check_file_length(name: str, lines: Sequence[str]) -> Iterator[Finding]:
    """Finds long files."""
    if not any(map(ACCEPTED.search, lines[:LINES_FOR_ACCEPTING_A_FILE])):
        limits = (WARN_FILE_LINES, MAX_FILE_LINES)
        yield from size_finding(f"{name}:1", f"{len(lines)} lines", len(lines), limits)


def python_functions(text: str) -> list[ast.FunctionDef | ast.AsyncFunctionDef]:
    """Returns all functions and methods of a module."""
    return [
        node
        for node in ast.walk(ast.parse(text))
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)
    ]


def body_lines(function: ast.FunctionDef | ast.AsyncFunctionDef) -> int:
    """Counts the lines of a function's body without its docstring."""
    body = function.body[1:] if ast.get_docstring(function) else function.body
    return (body[-1].end_lineno or 0) - body[0].lineno + 1 if body else 0


def num_parameters(function: ast.FunctionDef | ast.AsyncFunctionDef) -> int:
    """Counts the parameters that a caller chooses: no `self`, `*args`, `**kwargs`."""
    parameters = function.args
    positional = [a.arg for a in (*parameters.posonlyargs, *parameters.args)]
    own = positional[:1] in (["self"], ["cls"])
    return len(positional) - own + len(parameters.kwonlyargs)


def check_python_functions(name: str, lines: Sequence[str]) -> Iterator[Finding]:
    """Finds long Python functions, and those with many parameters."""
    for node in python_functions("\n".join(lines)):
        place = f"{name}:{node.lineno}"
        definition = lines[node.lineno - 1]
        if not ACCEPTED.search(definition):
            count = body_lines(node)
            limits = (WARN_FUNCTION_LINES, MAX_FUNCTION_LINES)
            message = f"the body of {node.name} has {count} lines"
            yield from size_finding(place, message, count, limits)
        count = num_parameters(node)
        if count > WARN_PARAMETERS:
            limit = f"warning above {WARN_PARAMETERS}"
            message = f"{node.name} has {count} parameters ({limit})"
            yield Finding(place, message, error=False)


def check_docstrings(name: str, lines: Sequence[str]) -> Iterator[Finding]:
    """Finds functions whose docstrings do not begin with a verb."""
    for node in python_functions("\n".join(lines)):
        text = ast.get_docstring(node)
        is_property = any("property" in ast.unparse(d) for d in node.decorator_list)
        if text is None or is_property:
            continue
        if NOUNS.match(text) or not VERB.match(text):
            message = f"the docstring of {node.name} does not begin with a verb"
            yield Finding(f"{name}:{node.lineno}", message, error=True)


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


def check_cpp_functions(name: str, lines: Sequence[str]) -> Iterator[Finding]:
    """Finds long C++ functions."""
    for first, last in cpp_functions(lines):
        if not ACCEPTED.search(lines[first]):
            count = last - first + 1
            limits = (WARN_FUNCTION_LINES, MAX_FUNCTION_LINES)
            message = f"a function of {count} lines"
            yield from size_finding(f"{name}:{first + 1}", message, count, limits)


def check_p90() -> Iterator[Finding]:
    """Finds a large 90th percentile of the bodies of the package's functions."""
    counts = [
        body_lines(node)
        for name in sources(".py")
        if name.startswith("tpu_embedding/")
        for node in python_functions((ROOT / name).read_text())
    ]
    p90 = round(statistics.quantiles(counts, n=10)[-1])
    if p90 > WARN_P90_FUNCTION_LINES:
        limit = f"warning above {WARN_P90_FUNCTION_LINES}"
        message = f"one function in ten has more than {p90} lines ({limit})"
        yield Finding("tpu_embedding", message, error=False)


def check_text(path: pathlib.Path) -> Iterator[Finding]:
    """Finds binary files, and paths that exist on one machine only."""
    name = path.relative_to(ROOT)
    content = path.read_bytes()
    if b"\0" in content:
        yield Finding(f"{name}:1", "a binary file; git tracks only text", error=True)
        return
    for number, line in enumerate(content.decode().splitlines(), 1):
        if MACHINE_PATH.search(line):
            message = f"a path of one machine: {line.strip()}"
            yield Finding(f"{name}:{number}", message, error=True)


def check_complexity() -> Iterator[Finding]:
    """Finds complex functions, counted by ruff; pyproject.toml has the error limit."""
    options = ["--select=C901", "--exit-zero", "--quiet", "--output-format=concise"]
    limit = f"lint.mccabe.max-complexity={WARN_COMPLEXITY}"
    # ruff lies beside the Python of the virtual environment.
    ruff = pathlib.Path(sys.executable).with_name("ruff")
    command = [str(ruff), "check", *options, "--config", limit, "."]
    for line in subprocess.check_output(command, cwd=ROOT, text=True).splitlines():
        place, separator, message = line.partition(": ")
        if separator:
            yield Finding(place, message, error=False)


def check_words(name: str, lines: Sequence[str]) -> Iterator[Finding]:
    """Finds words for which the glossary has another one."""
    for number, line in enumerate(lines, 1):
        for pattern, word in WORDS.items():
            if found := re.search(pattern, line):
                message = f"{found[0].strip()!r}: write {word!r}"
                yield Finding(f"{name}:{number}", message, error=False)


def findings() -> Iterator[Finding]:
    """Yields everything that this module finds in the repository."""
    for name in sources(".py", ".cc", ".h"):
        lines = (ROOT / name).read_text().splitlines()
        yield from check_file_length(name, lines)
        if name.endswith(".py"):
            yield from check_python_functions(name, lines)
        else:
            yield from check_cpp_functions(name, lines)
        if name.startswith("tpu_embedding/"):
            yield from check_words(name, lines)
            if name.endswith(".py"):
                yield from check_docstrings(name, lines)
    for page in sorted([*ROOT.glob("*.md"), *(ROOT / "docs").glob("*.md")]):
        name = str(page.relative_to(ROOT))
        yield from check_words(name, page.read_text().splitlines())
    for path in tracked_text():
        yield from check_text(path)
    yield from check_p90()
    yield from check_complexity()


def main() -> int:
    """Prints all findings; returns 1 if one is an error."""
    parser = argparse.ArgumentParser(description="Prints all violations.")
    parser.add_argument("--errors-only", action="store_true")
    errors_only = parser.parse_args().errors_only
    found = list(findings())
    errors = [finding for finding in found if finding.error]
    for finding in errors if errors_only else found:
        print(finding)
    print(f"lint report: {len(errors)} errors, {len(found) - len(errors)} warnings")
    return 1 if errors else 0


if __name__ == "__main__":
    sys.exit(main())
