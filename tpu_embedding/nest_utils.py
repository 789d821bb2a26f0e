"""The nested structure of the feature configuration, and values that follow it."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import tensorflow as tf

from tpu_embedding import errors

SINGLE_LEAF_PATH = "feature"  # Of a configuration that is no container.


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
        # A copy: the user may change his own containers later.
        leaves = [leaf for _, leaf in flatten_with_paths(nested)]
        self._nested = tf.nest.pack_sequence_as(nested, leaves)

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
                raise _wrong_type(what, path, expected, leaf)
            leaves.append(leaf)
        return leaves

    def flatten_weights(self, weights: Any) -> list:
        """As `flatten`; a None in place of the whole stands for None at each leaf."""
        if weights is None:
            weights = tf.nest.map_structure(lambda leaf: None, self._nested)
        return self.flatten("weights", weights)

    def pack(self, leaves: Sequence[Any]) -> Any:
        """The leaves, in the order of `flatten`, in this structure."""
        return tf.nest.pack_sequence_as(self._nested, list(leaves))


def flatten_with_paths(nested: Any, path: str = "") -> Iterator[tuple[str, Any]]:
    """Yields (path, leaf) in the order of tf.nest.

    Raises:
      TypeError: If the keys of a dict cannot be sorted.
    """
    if _kind(nested) is object:
        yield path or SINGLE_LEAF_PATH, nested
        return
    for key, name in _children(nested, path):
        yield from flatten_with_paths(nested[key], _below(path, name))


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
        raise _wrong_type(what, path, expected, actual)
    if kind is dict:
        missing, unknown = set(expected) - set(actual), set(actual) - set(expected)
        if missing or unknown:
            raise errors.structure_keys(what, path, missing, unknown)
    elif len(expected) != len(actual):
        raise errors.structure_size(what, path, len(expected), len(actual))
    for key, name in _children(expected, path):
        yield from _walk(what, _below(path, name), expected[key], actual[key])


def _children(container: Any, path: str) -> list[tuple[Any, Any]]:
    """(key, name in paths) of each child, in the order of tf.nest."""
    if isinstance(container, Mapping):
        try:
            return [(key, key) for key in sorted(container)]
        except TypeError as error:
            raise errors.structure_mixed_keys(path, container) from error
    return list(enumerate(getattr(container, "_fields", range(len(container)))))


def _below(path: str, name: Any) -> str:
    return f"{path}/{name}" if path else str(name)


def _wrong_type(what: str, path: str, expected: Any, actual: Any) -> TypeError:
    wanted = "a single value"
    if _kind(expected) is not object:
        wanted = f"a {type(expected).__name__}"
    return errors.structure_type(what, path, wanted, actual)
