"""Prints the counts that say whether newcomers can find their way in the package.

    python tools/structure.py [--root CHECKOUT] [--static]

The aim of each count stands beside it. The last three counts run a call on one table on
the CPU and count the functions of this package that it passes through, so the library
of the checkout must be built (`make ops`); `--static` leaves them out.
"""

from __future__ import annotations

import argparse
import ast
import functools
import os
import pathlib
import re
import sys
import tempfile
from collections.abc import Callable, Iterator, Mapping
from types import FrameType
from typing import Any

ROOT = pathlib.Path(__file__).resolve().parents[1]
PACKAGE = "tpu_embedding"
SMALL_MODULE_LINES = 120
# CONTRIBUTING.md gives the reason for each aim that is missed.
AIMS = {
    "Python lines": "42,500",
    "Python files": "170",
    "modules of at most 120 lines with one importer": "below 8",
    "longest chain of imports": "18",
    "functions that only make an error": "below 60",
    "steps of a CPU": "2",
    "queues of batches": "5",
    "mechanisms for an update that waits": "2",
    "files that know which part of a table has a row": "2",
    "files that make first values": "2",
    "classes for where a table is": "3",
    "branches on whether a table grows": "below 10",
    "ops of ours": "34",
    "methods of the engine protocol": "18",
    ".Attr lines of ops": "below 110",
    "functions under one enqueue": "below 35",
    "calls in one Keras forward pass": "below 70",
    "calls in one checkpoint.save": "below 100",
}
# The folders of code that computes, and the pattern of files with each mechanism.
COMPUTING = ("engines", "layout", "tables", "ops")
MECHANISMS = {
    "queues of batches": r"^class (?!NestQueue|.*ABC)\w*(Queues?|Ring)\b",
    "mechanisms for an update that waits": (
        r"^class (NestQueue|PendingUpdate)\b|std::deque<Update> updates_"
    ),
    "files that know which part of a table has a row": (
        r"^(?!.*(sparse_core|offset)).*%\s*(self\.)?(num_)?(parts|shards|number|n|size_)\b"
    ),
    "files that make first values": (
        r"^class FirstValues\b|^def first_values\b|^(?!.*def ).*\binitial_value\($"
    ),
}
# Tables that this process, a job or servers have, in whatever form they are wrapped.
WRAPPERS = (
    r"^class (Reach\b|\w+\(Reach\)|_?(Sharded|Served|Divided)(?!\w*(Engine|Array)))"
)
# Outside of where tables and configurations are made.
GROWTH = (
    r"\b(growing|vocabulary) is (not )?None|isinstance\(\w+(\.ids)?, Vocabulary\)"
    r"|\b(spec|table|t)\.grows\b|\bin (self\._)?growing\b(?![.\s])"
)
GROWTH_ROOMS = re.compile(rf"^{PACKAGE}\.(tables|layout|config|vocabulary)\b")


def modules(root: pathlib.Path) -> dict[str, str]:
    """Reads the package's modules: dotted name -> source."""
    found = {}
    for path in sorted((root / PACKAGE).rglob("*.py")):
        parts = path.relative_to(root).with_suffix("").parts
        name = ".".join(parts[:-1] if parts[-1] == "__init__" else parts)
        found[name] = path.read_text()
    return found


def is_for_type_checkers(node: ast.stmt) -> bool:
    """Says whether a statement is `if TYPE_CHECKING:`."""
    return isinstance(node, ast.If) and "TYPE_CHECKING" in ast.unparse(node.test)


def imported_modules(source: str, known: Mapping[str, str]) -> set[str]:
    """Returns the package's modules that a module imports, also within functions.

    Imports for type checkers alone do not count.
    """
    tree = ast.parse(source)
    tree.body = [node for node in tree.body if not is_for_type_checkers(node)]
    found = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module:
            for alias in node.names:
                module = f"{node.module}.{alias.name}"
                found.add(module if module in known else node.module)
    return found & known.keys()


def import_graph(sources: Mapping[str, str]) -> dict[str, set[str]]:
    """Returns for each module the modules that it imports."""
    return {
        name: imported_modules(source, sources) - {name}
        for name, source in sources.items()
    }


def small_with_one_importer(
    sources: Mapping[str, str], graph: Mapping[str, set[str]]
) -> list[str]:
    """Finds modules that might move into the only module that imports them."""
    found = []
    for name, source in sources.items():
        importers = [n for n, imports in graph.items() if name in imports]
        is_package = any(n.startswith(f"{name}.") for n in sources)
        short = len(source.splitlines()) <= SMALL_MODULE_LINES
        if short and len(importers) == 1 and not is_package:
            found.append(f"{name} -> {importers[0]}")
    return found


def longest_chain(graph: Mapping[str, set[str]]) -> list[str]:
    """Finds the longest chain of modules, each of which imports the next.

    The package's own name does not count as a link: commands import it when they run.
    """

    @functools.cache
    def chain(name: str) -> tuple[str, ...]:
        imports = graph[name] - {PACKAGE}
        return (name, *max((chain(n) for n in imports), key=len, default=()))

    return list(max((chain(name) for name in graph), key=len))


def error_functions(sources: Mapping[str, str]) -> list[str]:
    """Finds functions that are declared to return an exception."""
    return [
        f"{name}.{node.name}"
        for name, source in sources.items()
        for node in ast.walk(ast.parse(source))
        if isinstance(node, ast.FunctionDef) and node.returns is not None
        if re.search(r"(Error|Exception)\W*$", ast.unparse(node.returns))
    ]


def engine_methods(source: str) -> list[str]:
    """Finds public methods of the engines' abstract classes and their subclasses."""
    abstract, found = {"abc.ABC"}, []
    for node in ast.parse(source).body:
        if isinstance(node, ast.ClassDef) and abstract & set(
            map(ast.unparse, node.bases)
        ):
            abstract.add(node.name)
            found += [
                f"{node.name}.{method.name}"
                for method in node.body
                if isinstance(method, ast.FunctionDef) and method.name[0] != "_"
            ]
    return found


def lines_of_ops(root: pathlib.Path, pattern: str) -> int:
    """Counts the matches of a pattern where our ops are declared."""
    return sum(
        len(re.findall(pattern, path.read_text(), re.MULTILINE))
        for path in (root / PACKAGE / "ops").rglob("kernels/**/*.cc")
    )


def files_with(root: pathlib.Path, pattern: str) -> list[str]:
    """Returns the files in the folders COMPUTING in which a pattern is found."""
    return [
        str(path.relative_to(root))
        for folder in COMPUTING
        for path in sorted((root / PACKAGE / folder).rglob("*"))
        if path.suffix in (".py", ".h", ".cc")
        if re.search(pattern, path.read_text(), re.MULTILINE)
    ]


def cpu_engines(sources: Mapping[str, str]) -> list[str]:
    """Finds the classes with an engine's `lookup`, without those for TPUs.

    A subclass that only says where the tables are inherits the step of its base class.
    """
    others = re.compile(r"\.(tpu_v2_v4|sparse_core|base)\b")
    return [
        f"{name}.{node.name}"
        for name, source in sources.items()
        if name.startswith(f"{PACKAGE}.engines") and not others.search(name)
        for node in ast.parse(source).body
        if isinstance(node, ast.ClassDef)
        if "lookup" in {getattr(method, "name", None) for method in node.body}
    ]


def calls_of(root: pathlib.Path, function: Callable[[], Any]) -> list[str]:
    """Lists the functions of the package that a call passes through, in order."""
    folder = f"{root / PACKAGE}/"
    found = []

    def record(frame: FrameType, event: str, _: object) -> None:
        code = frame.f_code
        # Comprehensions are part of the function around them.
        ours = code.co_filename.startswith(folder) and "<" not in code.co_name
        if event == "call" and ours:
            found.append(f"{code.co_filename[len(folder) :]}:{code.co_qualname}")

    sys.setprofile(record)
    try:
        function()
    finally:
        sys.setprofile(None)
    return found


def running_counts(root: pathlib.Path) -> Iterator[tuple[str, list[str]]]:
    """Counts of an enqueue, a Keras forward pass and a save, each the second time."""
    sys.path.insert(0, str(root))
    os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "2")
    import tensorflow as tf

    import tpu_embedding as te
    import tpu_embedding.checkpoint
    import tpu_embedding.keras

    ids = tf.constant([1, 2, 3])
    features = {"feature": te.FeatureConfig(te.TableConfig(8, 4), name="feature")}
    embedding = te.TPUEmbedding(features, te.Adagrad(0.1))
    embedding.enqueue({"feature": ids})
    activations = embedding.dequeue()
    embedding.apply_gradients(activations)
    called = calls_of(root, lambda: embedding.enqueue({"feature": ids}))
    yield "functions under one enqueue", sorted(set(called))
    layer = tpu_embedding.keras.TPUEmbedding(features, te.Adagrad(0.1))
    layer({"feature": ids})
    yield (
        "calls in one Keras forward pass",
        calls_of(root, lambda: layer({"feature": ids})),
    )
    embedding = te.TPUEmbedding(features, te.Adagrad(0.1))
    embedding.build()
    with tempfile.TemporaryDirectory() as folder:
        tpu_embedding.checkpoint.save(embedding, f"{folder}/first")
        save = functools.partial(tpu_embedding.checkpoint.save, embedding)
        called = calls_of(root, lambda: save(f"{folder}/second"))
    yield "calls in one checkpoint.save", called


def lines_with(sources: Mapping[str, str], pattern: str) -> list[str]:
    """Returns the lines of modules in which a pattern is found."""
    return [
        f"{name}: {line.strip()}"
        for name, source in sources.items()
        for line in source.splitlines()
        if re.search(pattern, line)
    ]


def static_counts(root: pathlib.Path) -> Iterator[tuple[str, int | list[str]]]:
    """Yields the counts that need no run of the package."""
    sources = modules(root)
    graph = import_graph(sources)
    yield "Python lines", sum(len(text.splitlines()) for text in sources.values())
    yield "Python files", len(sources)
    one_importer = small_with_one_importer(sources, graph)
    yield "modules of at most 120 lines with one importer", one_importer
    yield "longest chain of imports", longest_chain(graph)
    yield "functions that only make an error", error_functions(sources)
    yield "steps of a CPU", cpu_engines(sources)
    for name, pattern in MECHANISMS.items():
        yield name, files_with(root, pattern)
    computing = re.compile(rf"^{PACKAGE}\.(tables|engines)\b")
    found = {n: text for n, text in sources.items() if computing.match(n)}
    yield "classes for where a table is", lines_with(found, WRAPPERS)
    found = {n: text for n, text in sources.items() if not GROWTH_ROOMS.match(n)}
    yield "branches on whether a table grows", lines_with(found, GROWTH)
    yield "ops of ours", lines_of_ops(root, r"^REGISTER_OP\(")
    protocol = [sources[f"{PACKAGE}.engines.{name}"] for name in ("calls", "base")]
    yield "methods of the engine protocol", engine_methods("".join(protocol))
    yield ".Attr lines of ops", lines_of_ops(root, r"\.Attr\(")


def main() -> None:
    """Prints the counts."""
    parser = argparse.ArgumentParser(description="Prints counts and aims.")
    parser.add_argument("--root", type=pathlib.Path, default=ROOT)
    parser.add_argument("--static", action="store_true", help="run nothing")
    parser.add_argument("--list", action="store_true", help="print what was counted")
    arguments = parser.parse_args()
    root = arguments.root.resolve()
    running = iter(()) if arguments.static else running_counts(root)
    for name, found in (*static_counts(root), *running):
        count = found if isinstance(found, int) else len(found)
        print(f"{count:8,}  {name} (aim: {AIMS[name]})")
        if arguments.list and not isinstance(found, int):
            print(*(f"{'':12}{item}" for item in found), sep="\n")


if __name__ == "__main__":
    main()
