"""Structures that values have to follow, and errors that name the path."""

from __future__ import annotations

import collections
from typing import Any

import pytest
import tensorflow as tf

import tpu_embedding as te
from tpu_embedding.nest_utils import Structure

Pair = collections.namedtuple("Pair", ["second", "first"])
BAD: dict[str, tuple[Any, Any, type[Exception], str]] = {
    "container": (
        {"a": [0]},
        {"a": (0,)},
        TypeError,
        "The structure of `features` differs from `feature_config` at a: expected a "
        "list, got one of type tuple.",
    ),
    "leaf": (
        {"a": 0},
        {"a": [0]},
        TypeError,
        "The structure of `features` differs from `feature_config` at a: expected a "
        "single value, got one of type list.",
    ),
    "size": (
        [0, 0],
        [0],
        ValueError,
        "The structure of `features` differs from `feature_config` at top: expected 2 "
        "elements, got 1.",
    ),
    "keys": (
        {"x": {"a": 0}},
        {"x": {"b": 0}},
        ValueError,
        "The structure of `features` differs from `feature_config` at x: missing keys "
        "['a'], unknown keys ['b'].",
    ),
}


@pytest.mark.parametrize("case", BAD)
def test_values_that_differ(case: str) -> None:
    nested, value, error, text = BAD[case]
    with pytest.raises(error) as raised:
        Structure(nested).flatten("features", value)
    assert str(raised.value) == text


def test_keys_that_cannot_be_sorted() -> None:
    feature = te.FeatureConfig(te.TableConfig(8, 2))
    with pytest.raises(
        TypeError, match="keys of the dict at a cannot be sorted: 1, 'b'"
    ):
        te.TPUEmbedding({"a": {1: feature, "b": feature}}, te.SGD(0.1))


SHAPES = {
    "list": [[4, 1], [4, 2], [4, 3]],
    "tuple of lists": ([4, 1], [4, 2], [4, 3]),
    "nested": [[[4, 1]], {"x": (4, 2), "y": tf.TensorShape([4, 3])}],
    "own": Pair(second={"a": (4, 1)}, first=[(4, 2), (4, 3)]),
}


@pytest.mark.parametrize("shapes", SHAPES.values(), ids=SHAPES)
def test_shapes_in_any_nesting(shapes: Any) -> None:
    structure = Structure(Pair(second={"a": 0}, first=[0, 0]))
    found = structure.flatten_shapes("shapes", shapes)
    expected = [[4, 1], [4, 2], [4, 3]]
    assert [tf.TensorShape(shape).as_list() for shape in found] == expected


@pytest.mark.parametrize("shape", [[16], [[16]], (tf.TensorShape(16),), {"x": [16]}])
def test_the_shape_of_a_single_leaf(shape: Any) -> None:
    (found,) = Structure(0).flatten_shapes("shapes", shape)
    assert tf.TensorShape(found).as_list() == [16]


def test_build_takes_shapes_in_any_nesting() -> None:
    table = te.TableConfig(8, 2)
    features = tuple(te.FeatureConfig(table) for _ in range(2))
    embedding = te.TPUEmbedding(features, te.SGD(0.1))
    with pytest.raises(ValueError, match="has 3 shapes, but there are 2 features"):
        embedding.build([(4, 1), (4, 1), (4, 1)])
    embedding.build([(4, 1), (4, 3)])
    with pytest.raises(ValueError, match=r"Feature 0: .*\(4,\)"):
        embedding.enqueue((tf.zeros([3, 1], tf.int32), tf.zeros([4, 3], tf.int32)))
