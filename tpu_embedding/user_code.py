"""Loads the code that a command line names: MODULE:ATTRIBUTE or FILE.py:ATTRIBUTE."""

from __future__ import annotations

import contextlib
import difflib
import importlib
import importlib.util
import os
import pathlib
import sys
import sysconfig
import traceback
from collections.abc import Callable, Iterable, Iterator
from typing import Any

_PACKAGE = str(pathlib.Path(__file__).parent)
_NOT_OF_THE_USER = (_PACKAGE, *sysconfig.get_paths().values(), "<")
# What the user's code may raise. SystemExit would end the command without a word.
_RAISED = (Exception, SystemExit)


def find(target: str) -> Any:
    """Imports a module or a file and returns the attribute; both may be dotted.

    The folder of the file, or for modules the current folder, stays first in
    `sys.path`, for imports within functions. What the code prints goes to stderr.
    """
    where, _, attribute = target.rpartition(":")
    if not where or not attribute:
        raise ValueError(
            "Pass a module or a .py file and its attribute, as in `my_model:features` "
            f"or `my_model.py:features`. Received: {target!r}."
        )
    path = pathlib.Path(where)
    with _errors(f"Cannot import {where!r}"):
        found: Any = _import_file(path) if path.suffix == ".py" else _import(where)
    for part in attribute.split("."):
        if not hasattr(found, part):
            similar = difflib.get_close_matches(part, dir(found), n=1)
            hint = f" Did you mean {similar[0]!r}?" if similar else ""
            raise ValueError(f"{where} has no attribute {attribute!r}.{hint}")
        found = getattr(found, part)
    return found


def call(name: str, function: Callable[..., Any], *arguments: Any) -> Any:
    """Calls a user's function; what it prints goes to stderr, and errors name it."""
    with _errors(f"{name} failed"):
        return function(*arguments)


def iterate(name: str, values: Iterable[Any]) -> Iterator[Any]:
    """Yields the values of a user's iterable; errors name it."""
    with _errors(f"{name} failed"):
        iterator = iter(values)
    end = object()
    while (value := call(name, next, iterator, end)) is not end:
        yield value


def description(error: BaseException) -> str:
    """Returns the type of an error, its text, and the last line of the user's code.

    >>> description(ValueError("too large"))
    'ValueError: too large'
    """
    what, text = type(error).__name__, str(error).rstrip(".")
    if isinstance(error, SystemExit):
        what, text = f"sys.exit({error.code!r}) was called", ""
    place = last_line(traceback.extract_tb(error.__traceback__))
    place = f" ({place})" if place else ""
    if isinstance(error, SyntaxError):
        place = ""  # The text of a SyntaxError has the place.
    return f"{what}{': ' if text else ''}{text}{place}"


def last_line(frames: Iterable[Any]) -> str:
    """Returns the file and line of the last frame that is the user's code, or ""."""
    own = [f for f in frames if not f.filename.startswith(_NOT_OF_THE_USER)]
    return f"{own[-1].filename}, line {own[-1].lineno}" if own else ""


@contextlib.contextmanager
def _errors(what: str) -> Iterator[None]:
    try:
        with contextlib.redirect_stdout(sys.stderr):
            yield
    except _RAISED as error:
        raise ValueError(f"{what}: {description(error)}.") from error


def _import(name: str) -> Any:
    _search_first(os.getcwd())
    return importlib.import_module(name)


def _import_file(path: pathlib.Path) -> Any:
    """Imports a file by its path, even if another module of that name is loaded."""
    path = path.resolve()
    if not path.is_file():
        raise FileNotFoundError(f"there is no file {path}")
    _search_first(str(path.parent))
    name = path.stem
    known = sys.modules.get(name)
    if known is not None:
        if getattr(known, "__file__", None) == str(path):
            return known
        name = f"{name} of {path.parent}"
    spec = importlib.util.spec_from_file_location(name, path)
    assert spec is not None
    assert spec.loader is not None
    module = sys.modules[name] = importlib.util.module_from_spec(spec)
    try:
        spec.loader.exec_module(module)
    except _RAISED:
        del sys.modules[name]
        raise
    return module


def _search_first(folder: str) -> None:
    if sys.path[:1] != [folder]:
        sys.path.insert(0, folder)
