"""Runs the programs of users in this process, as Python would run them."""

from __future__ import annotations

import ast
import contextlib
import importlib.machinery
import importlib.metadata
import os
import pathlib
import re
import runpy
import sys
import types
from collections.abc import Callable, Iterator, Sequence
from typing import Any

_NEEDS_TF_KERAS = ("tf_keras", "tensorflow_recommenders")
_ONLY_IN_TF_KERAS = ("DenseFeatures", "SequenceFeatures")  # Keras 3 has removed them.
_SETS_TF_KERAS = re.compile(r"os\.environ\['TF_USE_LEGACY_KERAS'\] = '(1|[Tt]rue)'")


def prepare(
    target: str,
    arguments: Sequence[str],
    replace: Callable[[], None],
    *,
    module: bool = False,
) -> Callable[[], Any]:
    """Calls `replace`, and returns a function that runs a program as Python does.

    Args:
      target: The path of a script, of a folder or zip file with a `__main__.py`, or
        with `module` the name of a module, as for `python -m`.
      arguments: The arguments of the program.
      replace: Replaces names, once it is known which Keras the program needs.
      module: Whether `target` is a module.
    """
    path = _path_of_module(target) if module else _path_of_script(target)
    folder = pathlib.Path.cwd() if module else path.resolve().parent
    needs = False
    if "TF_USE_LEGACY_KERAS" not in os.environ and path.is_file():
        # Either the program raises this error when it runs, or it is a zip file.
        with contextlib.suppress(SyntaxError, ValueError):
            needs = needs_tf_keras(path, folder)
    if needs:
        os.environ["TF_USE_LEGACY_KERAS"] = "1"
        print(
            "tpu_embedding: TF_USE_LEGACY_KERAS=1, because the script needs tf_keras.",
            file=sys.stderr,
        )
    replace()
    sys.argv = [str(path) if module else target, *arguments]
    if sys.flags.safe_path:  # Then Python did not prepend a folder.
        sys.path.insert(0, "")
    sys.path[0] = str(folder)
    if module:
        return lambda: runpy.run_module(target, run_name="__main__", alter_sys=True)
    return lambda: runpy.run_path(target, run_name="__main__")


def _path_of_script(target: str) -> pathlib.Path:
    path = pathlib.Path(target)
    if not path.exists():
        raise FileNotFoundError(
            f"There is no script {target!r}. For a module use `run -m`."
        )
    if path.suffix == ".ipynb":
        raise ValueError(
            f"{target!r} is a notebook. Convert it with `jupyter nbconvert --to "
            "script`, or call `tpu_embedding.install(...)` in its first cell."
        )
    main = path / "__main__.py"
    if path.is_dir() and not main.is_file():
        raise FileNotFoundError(f"{target!r} is a folder without a __main__.py.")
    return main if path.is_dir() else path


def _path_of_module(name: str) -> pathlib.Path:
    """Finds a module without importing its packages, which may import TensorFlow."""
    folders = [str(pathlib.Path.cwd()), *sys.path]
    for part in (*name.split("."), "__main__"):
        spec = importlib.machinery.PathFinder.find_spec(part, folders)
        if spec is None:
            break
        if spec.submodule_search_locations is None:
            return pathlib.Path(str(spec.origin))
        folders = list(spec.submodule_search_locations)
    raise FileNotFoundError(
        f"There is no module {name!r} in the current folder or on Python's path, or it "
        "is a package without a __main__.py."
    )


def status_of(program: Callable[[], Any]) -> int:
    """Runs what `prepare` returned; returns 0, or prints its error and returns 1."""
    try:
        program()
    except Exception as error:
        trace = _of_program(error.__traceback__)
        sys.excepthook(type(error), error.with_traceback(trace), trace)
        return 1
    return 0


def _of_program(trace: types.TracebackType | None) -> types.TracebackType | None:
    """Returns a traceback from where the program begins, as Python prints it."""
    found, skipped = trace, (__file__, "<frozen runpy>", "runpy.py")
    while found is not None and found.tb_frame.f_code.co_filename.endswith(skipped):
        found = found.tb_next
    return found or trace


def needs_tf_keras(script: pathlib.Path, folder: pathlib.Path | None = None) -> bool:
    """Returns whether a script imports tf_keras or TFRS, itself or through imports.

    A script also counts if it uses a class that only tf_keras has. The function reads
    the script, the modules in `folder` or beside it, and the requirements of the
    packages that they import, and runs nothing.
    """
    folder = folder or script.resolve().parent
    seen, waiting = set[pathlib.Path](), [script]
    packages = set[str]()
    while waiting:
        path = waiting.pop()
        if path in seen:
            continue
        seen.add(path)
        try:
            tree = ast.parse(path.read_bytes(), str(path))
        except (SyntaxError, ValueError):
            if path == script:
                raise
            continue  # The program may never import it.
        if _names_of_tf_keras(tree):
            return True
        for level, module in _imports(tree):
            if level == 0:
                packages.add(module.partition(".")[0])
            package = path.resolve().parents[level - 1] if level else folder
            local = package.joinpath(*module.split("."))
            candidates = [local.with_suffix(".py"), local / "__init__.py"]
            candidates += [local.parent.with_suffix(".py")]
            waiting += [candidate for candidate in candidates if candidate.is_file()]
    if packages & set(_NEEDS_TF_KERAS):
        return True
    distributions = importlib.metadata.packages_distributions()
    names = {name for package in packages for name in distributions.get(package, ())}
    return any(
        re.match(r"(tf[-_]keras|tensorflow[-_]recommenders)\b", requirement)
        for name in names - {"tensorflow", "tensorflow-cpu", "tpu_embedding"}
        for requirement in importlib.metadata.requires(name) or ()
        if "extra ==" not in requirement
    )


def _names_of_tf_keras(tree: ast.Module) -> bool:
    return any(
        (isinstance(node, ast.Attribute) and node.attr in _ONLY_IN_TF_KERAS)
        or (
            isinstance(node, ast.Assign) and _SETS_TF_KERAS.fullmatch(ast.unparse(node))
        )
        for node in ast.walk(tree)
    )


def _imports(tree: ast.Module) -> Iterator[tuple[int, str]]:
    """Yields the modules that are imported, with the number of dots before each."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from ((0, alias.name) for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            prefix = f"{node.module}." if node.module else ""
            if node.module:
                yield node.level, node.module
            yield from ((node.level, f"{prefix}{alias.name}") for alias in node.names)
