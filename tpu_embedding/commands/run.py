"""`python -m tpu_embedding run SCRIPT`: a program for TPUs or for Keras, unchanged."""

from __future__ import annotations

import argparse
import contextlib
import functools
import importlib.machinery
import os
import pathlib
import runpy
import sys
import types
from collections.abc import Callable, Sequence
from typing import Any

from tpu_embedding.compat import drop_in


def install_keras() -> None:
    """Makes the Embedding layers and optimizers of Keras work by rows, and says so."""
    from tpu_embedding.keras.rows import converting  # Loads Keras.

    converting.convert_process()
    print(
        "tpu_embedding: in this process keras.layers.Embedding is te.keras.Embedding, "
        "and optimizers of Keras are in a te.keras.RowSparseOptimizer.",
        file=sys.stderr,
    )


def prepare(
    target: str,
    arguments: Sequence[str],
    replace: Callable[[], None],
    *,
    module: bool = False,
) -> Callable[[], Any]:
    """Calls `replace`, and returns what runs a program as Python does.

    Args:
      target: The path of a script, of a folder or zip file with a `__main__.py`, or
        with `module` the name of a module, as for `python -m`.
      arguments: Of the program.
      replace: Replaces names, once it is known which Keras the program needs.
      module: Whether `target` is a module.
    """
    path = _path_of_module(target) if module else _path_of_script(target)
    folder = pathlib.Path.cwd() if module else path.resolve().parent
    needs = False
    if "TF_USE_LEGACY_KERAS" not in os.environ and path.is_file():
        # The program will raise the error, or is not a text file.
        with contextlib.suppress(SyntaxError, ValueError):
            needs = drop_in.needs_tf_keras(path, folder)
    if needs:
        os.environ["TF_USE_LEGACY_KERAS"] = "1"
        print(
            "tpu_embedding: TF_USE_LEGACY_KERAS=1, because the script needs tf_keras.",
            file=sys.stderr,
        )
    replace()
    sys.argv = [str(path) if module else target, *arguments]
    if sys.flags.safe_path:  # Then no folder of a program is first.
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


def _of_program(trace: types.TracebackType | None) -> types.TracebackType | None:
    """A traceback from where the program begins, as Python prints it."""
    found, skipped = trace, (__file__, "<frozen runpy>", "runpy.py")
    while found is not None and found.tb_frame.f_code.co_filename.endswith(skipped):
        found = found.tb_next
    return found or trace


def run(parsed: argparse.Namespace) -> int:
    """Runs `run`."""
    if parsed.keras and parsed.on != "host":
        raise ValueError(
            "run --keras trains tables where the script does. Leave --on out, or "
            "leave --keras out for a program written for TPUs."
        )
    replace = install_keras
    if not parsed.keras:
        replace = functools.partial(drop_in.install_with_devices, parsed.on)
    program = prepare(parsed.script, parsed.arguments, replace, module=parsed.module)
    try:
        program()
    except Exception as error:  # As Python does for a program that fails.
        trace = _of_program(error.__traceback__)
        sys.excepthook(type(error), error.with_traceback(trace), trace)
        return 1
    return 0
