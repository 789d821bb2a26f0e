"""Texts by which processes compare callables: equal callables have equal texts."""

from __future__ import annotations

import dataclasses
import functools
import hashlib
import types
from collections.abc import Callable, Iterable, Mapping, Set
from typing import Any

import numpy as np
import tensorflow as tf

_SHOWN = 200  # Characters of a text; a longer one ends with its hash.
_DEEPEST = 8  # The depth to which nested values are read.
_MANY = 100  # A list of at least this many numbers is read as an array.
# Their objects have counters and names that do not come from the user program.
_LIBRARIES = {"tensorflow", "keras", "tf_keras"}


def of_initializer(initializer: Any) -> str:
    """Returns a text that describes what decides the numbers of an initializer.

    The text is equal in all processes that run one program. It therefore leaves out
    addresses, paths, variables, files and objects of unknown kinds: it would rather
    miss a difference there than invent one.
    """
    text = _Reading().called(initializer, 0)
    return text if len(text) <= _SHOWN else f"{text[:_SHOWN]}... ({_hash(text)})"


class _Reading:
    """Reads one callable, each of its functions once."""

    def __init__(self) -> None:
        self._functions: set[Callable[..., Any]] = set()

    def called(self, value: Any, depth: int) -> str:
        """Describes what is known about a callable that makes the numbers."""
        kind = type(value).__name__
        if value is None or isinstance(value, str):
            return str(value)
        if depth > _DEEPEST:
            return kind
        if isinstance(value, functools.partial):
            called = self.called(value.func, depth + 1)
            arguments = self._value((value.args, value.keywords), depth)
            return f"partial({called}, {arguments})"
        if isinstance(value, types.FunctionType):
            return self._function(value, depth)
        if isinstance(value, types.MethodType):
            method = self.called(value.__func__, depth)
            return f"{method} of {type(value.__self__).__name__}"
        if isinstance(getattr(value, "python_function", None), types.FunctionType):
            return self._function(value.python_function, depth)  # A tf.function.
        named = getattr(value, "__qualname__", None)
        return str(named) if named else f"{kind}({self._object(value, depth)})"

    def _object(self, value: Any, depth: int) -> str:
        if dataclasses.is_dataclass(value):
            shown = [f.name for f in dataclasses.fields(value) if f.repr]
            return self._items({n: getattr(value, n) for n in shown}, depth)
        if hasattr(value, "get_config"):
            try:
                return self._value(value.get_config(), depth)
            except Exception:  # `get_config` is the user's code.
                return ""
        # An object with `by_rows` may hold the rows of this process alone.
        if _is_of_library(type(value)) or hasattr(value, "by_rows"):
            return ""
        method = self._value(type(value).__call__, depth)
        return _hash(method + self._items(getattr(value, "__dict__", {}), depth))

    def _function(self, function: types.FunctionType, depth: int) -> str:
        name = function.__qualname__
        if function in self._functions or _is_of_library(function):
            return name
        self._functions.add(function)
        cells = []
        for cell in function.__closure__ or ():
            try:
                cells.append(cell.cell_contents)
            except ValueError:  # Nothing is assigned to it yet.
                cells.append(None)
        has = (cells, function.__defaults__, function.__kwdefaults__)
        text = self._code(function.__code__) + self._value(has, depth)
        return f"{name} ({_hash(text)})"

    def _code(self, code: types.CodeType) -> str:
        constants = [
            self._code(c) if isinstance(c, types.CodeType) else self._value(c, 0)
            for c in code.co_consts
        ]
        return repr((code.co_code, code.co_names, code.co_varnames, constants))

    def _value(self, value: Any, depth: int) -> str:
        """Describes a value that a callable holds; an unknown one by its type alone."""
        kind = type(value).__name__
        if depth > _DEEPEST:
            return kind
        if isinstance(value, str):
            return kind if "/" in value or "\\" in value else repr(value)
        if value is None or isinstance(value, (bool, int, float, complex, bytes)):
            return repr(value)
        if isinstance(value, (np.ndarray, np.generic, tf.Tensor)):
            return _array(value)
        if isinstance(value, Mapping):
            return f"{{{self._items(value, depth)}}}"
        if isinstance(value, Set):  # Its order varies, so nested values are not read.
            return f"{{{', '.join(sorted(self._each(value, _DEEPEST - 1)))}}}"
        if isinstance(value, (list, tuple)):
            numbers = _numbers(value)
            inner = ", ".join(self._each(value, depth)) if numbers is None else numbers
            return f"[{inner}]"
        classes = {base.__name__ for base in type(value).__mro__}
        if classes & {"function", "partial", "Initializer"}:
            return self.called(value, depth + 1)
        return str(getattr(value, "__qualname__", kind))

    def _each(self, values: Iterable[Any], depth: int) -> list[str]:
        return [self._value(value, depth + 1) for value in values]

    def _items(self, values: Mapping[Any, Any], depth: int) -> str:
        keys = sorted(values, key=lambda key: self._value(key, _DEEPEST))
        both = [(key, self._value(values[key], depth + 1)) for key in keys]
        return ", ".join(f"{self._value(k, _DEEPEST)}: {text}" for k, text in both)


def _is_of_library(named: Any) -> bool:
    return str(named.__module__).partition(".")[0] in _LIBRARIES


def _numbers(values: list[Any] | tuple[Any, ...]) -> str | None:
    """Returns a long list of numbers as the text of an array; None for others."""
    if len(values) < _MANY:
        return None
    try:
        array = np.asarray(values)
    except ValueError:
        return None
    return _array(array) if array.dtype.kind in "biufc" else None


def _array(value: Any) -> str:
    kind = type(value).__name__
    if isinstance(value, np.memmap):
        return kind
    if isinstance(value, tf.Tensor):
        if not hasattr(value, "numpy") or value.dtype in (tf.resource, tf.variant):
            return kind
        value = value.numpy()
    array = np.asarray(value)
    if array.dtype.hasobject:
        return kind
    content = np.ascontiguousarray(array).view(np.uint8)
    digest = _digest(content) if array.size else ""
    return f"array of {array.dtype.name} {list(array.shape)} {digest}"


def _hash(text: str) -> str:
    return f"hash {_digest(text.encode())}"


def _digest(content: Any) -> str:
    return hashlib.blake2b(content, digest_size=6).hexdigest()
