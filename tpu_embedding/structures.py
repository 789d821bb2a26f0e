"""The nested structure of the feature configuration, and values that follow it."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

import tensorflow as tf

from tpu_embedding import errors


class Structure:
    """A nested dict, list, tuple, namedtuple or single leaf to be followed.

    >>> structure = Structure({"b": 0, "a": (0, 0)})
    >>> structure.flatten("features", {"a": (1, 2), "b": 3})
    [1, 2, 3]
    >>> structure.pack([1, 2, 3])
    {'b': 3, 'a': (1, 2)}
    """

    def __init__(self, nested: Any) -> None:
        """Keeps the containers of `nested`.

        Raises:
          TypeError: If the keys of a dict cannot be sorted.
        """
        _check_keys("", nested)
        # A copy: the user may change his own containers later.
        self._nested = tf.nest.map_structure(lambda leaf: leaf, nested)

    def flatten(self, what: str, value: Any, *, container_leaves: bool = False) -> list:
        """The leaves of `value`, those of dicts by sorted key.

        Args:
          what: The name of the argument, for messages.
          value: Must have this structure; a composite tensor is one leaf.
          container_leaves: Leaves may be lists, tuples or dicts themselves.

        Raises:
          TypeError: If a container is of another type.
          ValueError: If a container has another size or other keys.
        """
        leaves = []
        for path, expected, leaf in _walk(what, "", self._nested, value):
            if not container_leaves and _kind(leaf) is not object:
                raise errors.structure_type(what, path, expected, leaf)
            leaves.append(leaf)
        return leaves

    def pack(self, leaves: Sequence[Any]) -> Any:
        """The leaves, in the order of `flatten`, in this structure."""
        return tf.nest.pack_sequence_as(self._nested, list(leaves))


def _check_keys(path: str, nested: Any) -> None:
    """Raises a TypeError for keys that cannot be sorted, as TensorFlow does."""
    children = enumerate(nested) if isinstance(nested, (list, tuple)) else ()
    if isinstance(nested, Mapping):
        try:
            sorted(nested)
        except TypeError as error:
            raise _mixed_keys(path, nested) from error
        children = nested.items()
    for key, child in children:
        _check_keys(f"{path}/{key}" if path else str(key), child)


def _mixed_keys(path: str, keys: Iterable[Any]) -> TypeError:
    """Keys of several types in one dict."""
    return TypeError(
        f"The keys of the dict at {path or 'top'} cannot be sorted: "
        f"{', '.join(map(repr, keys))}. Use keys of one type."
    )


def _kind(value: Any) -> type:
    """What tells two containers apart: their class, less TensorFlow's wrappers."""
    if isinstance(value, Mapping):
        return dict
    if isinstance(value, list):
        return list
    if isinstance(value, tuple):
        return type(value) if hasattr(value, "_fields") else tuple
    return object


def _walk(
    what: str, path: str, expected: Any, actual: Any
) -> Iterator[tuple[str, Any, Any]]:
    """Yields (path, expected leaf, actual leaf), in the order of tf.nest."""
    kind = _kind(expected)
    if kind is object:
        yield path, expected, actual
        return
    if kind is not _kind(actual):
        raise errors.structure_type(what, path, expected, actual)
    if kind is dict:
        missing, unknown = set(expected) - set(actual), set(actual) - set(expected)
        if missing or unknown:
            raise errors.structure_keys(what, path, missing, unknown)
        keys = sorted(expected)
    else:
        if len(expected) != len(actual):
            raise errors.structure_size(what, path, len(expected), len(actual))
        keys = range(len(expected))
    names = getattr(expected, "_fields", keys)
    for key, name in zip(keys, names, strict=True):
        inner = f"{path}/{name}" if path else str(name)
        yield from _walk(what, inner, expected[key], actual[key])
