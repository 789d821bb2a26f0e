"""The nested structure of the feature configuration, and values that follow it."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import tensorflow as tf

from tpu_embedding.errors import type_name

SINGLE_LEAF_PATH = "feature"  # The path if the configuration is a single leaf.


class Structure:
    """A nested dict, list, tuple, namedtuple or single leaf that values must follow.

    >>> structure = Structure({"b": 0, "a": (0, 0)})
    >>> structure.flatten("features", {"a": (1, 2), "b": 3})
    [1, 2, 3]
    >>> structure.pack([1, 2, 3])
    {'b': 3, 'a': (1, 2)}
    """

    def __init__(self, nested: Any) -> None:
        """Copies the containers of `nested`, which the user may change later."""
        found = list(flatten_with_paths(nested))
        self._nested = tf.nest.pack_sequence_as(nested, [leaf for _, leaf in found])
        self.paths = tuple(path for path, _ in found)

    def flatten(self, what: str, value: Any, *, container_leaves: bool = False) -> list:
        """Returns the leaves of `value`, in the order of tf.nest: dicts by sorted key.

        A composite tensor is one leaf. With `container_leaves` lists, tuples and dicts
        may be leaves, too.
        """
        if not container_leaves:
            # This is in C++, which is faster; `_walk` says where a structure differs.
            with contextlib.suppress(TypeError, ValueError):
                tf.nest.assert_same_structure(self._nested, value)
                return tf.nest.flatten(value)
        leaves = []
        for path, expected, leaf in _walk(what, "", self._nested, value):
            if not container_leaves and _kind(leaf) is not object:
                raise _wrong_type(what, path, expected, leaf)
            leaves.append(leaf)
        return leaves

    def flatten_weights(self, weights: Any) -> list:
        """Flattens weights as `flatten` does; None alone means None for each leaf."""
        if weights is None:
            return [None] * len(self.paths)
        return self.flatten("weights", weights)

    def flatten_shapes(self, what: str, shapes: Any) -> list:
        """Returns the shapes of all leaves, in the order of `flatten`.

        They may be in this structure, or in any other nesting with as many shapes,
        which are then taken in the order of tf.nest. A shape is a tf.TensorShape, or a
        list or tuple of int and None.
        """
        try:
            leaves = self.flatten(what, shapes, container_leaves=True)
        except (TypeError, ValueError) as error:
            leaves = list(_shapes_in(shapes))
            if len(leaves) == len(self.paths):
                return leaves
            if not leaves or isinstance(error, ValueError):
                raise
            raise ValueError(
                f"`{what}` has {len(leaves)} shapes, but there are {len(self.paths)} "
                "features. Pass one shape for each feature."
            ) from error
        # A leaf may be a container of one shape, as a single feature's [[16]] is.
        within = [list(_shapes_in(leaf)) for leaf in leaves]
        return [
            shape if len(own) != 1 else own[0]
            for shape, own in zip(leaves, within, strict=True)
        ]

    def pack(self, leaves: Sequence[Any]) -> Any:
        """Returns the leaves, in the order of `flatten`, in this structure."""
        return tf.nest.pack_sequence_as(self._nested, list(leaves))


def flatten_with_paths(nested: Any, path: str = "") -> Iterator[tuple[str, Any]]:
    """Yields (path, leaf) in the order of tf.nest."""
    if _kind(nested) is object:
        yield path or SINGLE_LEAF_PATH, nested
        return
    for key, below in _children(nested, path):
        yield from flatten_with_paths(nested[key], below)


def _shapes_in(nested: Any) -> Iterator[Any]:
    """Yields the shapes in any nesting; a sequence of int and None is a shape."""
    is_shape = isinstance(nested, tf.TensorShape) or _kind(nested) is object
    if not is_shape and not isinstance(nested, Mapping):
        is_shape = all(axis is None or isinstance(axis, int) for axis in nested)
    if is_shape:
        yield nested
        return
    for key, _ in _children(nested, ""):
        yield from _shapes_in(nested[key])


def _kind(value: Any) -> type:
    """Returns a container's type, without TensorFlow's wrappers; object for a leaf."""
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
    """Yields (path, expected leaf, actual leaf) in the order of tf.nest.

    tf.nest.assert_same_structure checks the same, but its messages name no path.
    """
    kind = _kind(expected)
    if kind is object:
        yield path, expected, actual
        return
    if kind is not _kind(actual):
        raise _wrong_type(what, path, expected, actual)
    differs = f"The structure of `{what}` differs from `feature_config` at "
    if kind is dict:
        missing, unknown = set(expected) - set(actual), set(actual) - set(expected)
        if missing or unknown:
            raise ValueError(
                f"{differs}{path or 'top'}: missing keys {sorted(map(str, missing))}, "
                f"unknown keys {sorted(map(str, unknown))}."
            )
    elif len(expected) != len(actual):
        raise ValueError(
            f"{differs}{path or 'top'}: expected {len(expected)} elements, got "
            f"{len(actual)}."
        )
    for key, below in _children(expected, path):
        yield from _walk(what, below, expected[key], actual[key])


def _children(container: Any, path: str) -> list[tuple[Any, str]]:
    """Returns (key, path) of each child of a container at `path`, in tf.nest order."""
    keys: Sequence[Any] = range(len(container))
    names = getattr(container, "_fields", keys)
    if isinstance(container, Mapping):
        try:
            keys = names = sorted(container)
        except TypeError as error:
            raise TypeError(
                f"The keys of the dict at {path or 'top'} cannot be sorted: "
                f"{', '.join(map(repr, container))}. Use keys of one type, such as "
                "strings."
            ) from error
    prefix = f"{path}/" if path else ""
    return [(key, f"{prefix}{name}") for key, name in zip(keys, names, strict=True)]


def _wrong_type(what: str, path: str, expected: Any, actual: Any) -> TypeError:
    wanted = "a single value"
    if _kind(expected) is not object:
        wanted = f"a {type(expected).__name__}"
    return TypeError(
        f"The structure of `{what}` differs from `feature_config` at {path or 'top'}: "
        f"expected {wanted}, got one of type {type_name(actual)}."
    )
