"""Bad inputs, and what must be said of each: the table of test_bad_input.py.

The feature "bad" reads a table of ROWS rows; beside it stands "good", which is fine.
"""

from __future__ import annotations

import dataclasses
from typing import Any

import numpy as np
import tensorflow as tf

ROWS, DIM = 8, 2
VALUE = tf.errors.InvalidArgumentError
FIX = "Fix the input"


def ragged(values: Any, splits: Any, dtype: Any = tf.int64) -> tf.RaggedTensor:
    """Of any splits: nothing is checked."""
    splits = tf.constant(splits, tf.int64)
    return tf.RaggedTensor.from_row_splits(
        tf.constant(values, dtype), splits, validate=False
    )


def sparse(indices: Any, values: Any, shape: Any, dtype: Any = tf.int64) -> Any:
    indices = np.reshape(np.array(indices, np.int64), [-1, len(shape)])
    return tf.SparseTensor(indices, tf.constant(values, dtype), shape)


@dataclasses.dataclass(frozen=True)
class Bad:
    """A bad input; `words` are what the message must say of it."""

    name: str
    value: Any
    words: tuple[str, ...]
    weights: Any = None
    error: type[Exception] = VALUE


def _each_kind(name: str, bad_id: int, dtype: tf.DType = tf.int64) -> list[Bad]:
    """An id that is wrong, in every kind of input."""
    words = ("Feature bad, table films: sample 1 has id", str(bad_id), "[0, 8)", FIX)
    kinds = {
        "dense": tf.constant([3, bad_id], dtype),
        "dense2": tf.constant([[3, 1], [0, bad_id]], dtype),
        "sparse": sparse([[0, 0], [1, 4]], [3, bad_id], [2, 5], dtype),
        "ragged": ragged([3, 0, bad_id], [0, 1, 3], dtype),
    }
    return [Bad(f"{name}_{kind}", value, words) for kind, value in kinds.items()]


IDS = [
    *_each_kind("negative", -1, tf.int32),
    *_each_kind("past_the_end", ROWS),
    # Its lower 32 bits are the id 1.
    *_each_kind("beyond_32_bits", 2**32 + 1),
    *_each_kind("least", -(2**63)),
]

STRUCTURES = [
    Bad(
        "splits_start",
        ragged([1, 2, 3], [1, 2, 3]),
        ("Feature bad: row_splits must start at 0.",),
    ),
    Bad(
        "splits_fall",
        ragged([1, 2, 3], [0, 3, 1, 3]),
        ("Feature bad: row_splits must not decrease, but row 1 goes from 3 to 1.",),
    ),
    Bad(
        "splits_past_the_end",
        ragged([1, 2], [0, 1, 5]),
        ("Feature bad: row_splits end at 5 but there are 2 ids.",),
    ),
    Bad(
        "splits_before_the_end",
        ragged([1, 2, 3], [0, 1, 2]),
        ("Feature bad: row_splits end at 2 but there are 3 ids.",),
    ),
    Bad(
        "splits_far_away",
        ragged([1, 2], [0, 2**62, 2]),
        ("must not decrease, but row 1 goes from 4611686018427387904 to 2.",),
    ),
    Bad(
        "sparse_order",
        sparse([[0, 1], [1, 0], [0, 2], [7, 7]], [1, 2, 3, 4], [2, 3]),
        (
            "Feature bad: sparse entry 2 is out of order or occurs twice. Call "
            "tf.sparse.reorder first and keep one entry per index.",
        ),
    ),
    Bad(
        "sparse_twice",
        sparse([[0, 1], [0, 1]], [1, 2], [2, 3]),
        ("sparse entry 1 is out of order or occurs twice.",),
    ),
    Bad(
        "sparse_column",
        sparse([[0, 3]], [1], [2, 3]),
        ("Feature bad: sparse entry 0 has an index outside of dense_shape (2, 3).",),
    ),
    Bad(
        "sparse_row",
        sparse([[0, 0], [2, 0]], [1, 1], [2, 3]),
        ("Feature bad", "sparse entry 1", "outside of dense_shape"),
    ),
    Bad(
        "sparse_negative",
        sparse([[-1, 0]], [1], [2, 3]),
        ("Feature bad", "sparse entry 0", "outside of dense_shape"),
    ),
    Bad(
        "sparse_huge",
        sparse([[0, 0]], [1], [2**31, 3]),
        ("Feature bad", "(2147483648,)", "more than 16777216 samples"),
    ),
    Bad(
        "sparse_beyond_any_memory",
        sparse([[0, 0]], [1], [2**62, 3]),
        ("Feature bad", "4611686018427387904", "more than 16777216 samples"),
    ),
    Bad(
        "dense_huge",
        tf.zeros([2**31, 0], tf.int64),
        ("Feature bad", "(2147483648,)", "more than 16777216 samples"),
    ),
]

NAN, INFINITY = float("nan"), float("inf")
WEIGHTS = [
    Bad(
        "weights_not_a_number",
        tf.constant([1, 2]),
        ("Feature bad", "sample 1", "not finite", "nan"),
        tf.constant([1.0, NAN]),
    ),
    Bad(
        "weights_infinite",
        ragged([1, 2, 3], [0, 1, 3]),
        ("Feature bad", "sample 1", "not finite", "(-inf)"),
        ragged([1.0, 2.0, -INFINITY], [0, 1, 3], tf.float32),
    ),
    Bad(
        "weights_of_other_splits",
        ragged([1, 2, 3], [0, 1, 3]),
        (
            "Feature bad: the weights must have the row_splits of the ids. Build them "
            "with `with_values`.",
        ),
        ragged([1.0, 2.0, 3.0], [0, 2, 3], tf.float32),
    ),
    Bad(
        "weights_of_other_number",
        ragged([1, 2, 3], [0, 1, 3]),
        ("Feature bad: 2 weights for 3 ids. Pass one weight for each id.",),
        ragged([1.0, 2.0], [0, 1, 2], tf.float32),
    ),
    Bad(
        "weights_of_other_indices",
        sparse([[0, 0], [1, 1]], [1, 2], [2, 3]),
        (
            "Feature bad: the weights must have the indices of the ids. Build them "
            "with `with_values`.",
        ),
        sparse([[0, 0], [1, 2]], [1.0, 2.0], [2, 3], tf.float32),
    ),
]

BY_VALUE = [*IDS, *STRUCTURES, *WEIGHTS]

# These are refused by what is known while tracing: the same in graphs.
BY_TYPE = [
    Bad(
        "ids_of_int16",  # Those of floats are refused by value: test_float_ids.py.
        tf.constant([1, 2], tf.int16),
        ("feature bad", "int32, int64 or floating point", "int16", "tf.cast"),
        error=TypeError,
    ),
    Bad(
        "ids_of_strings",
        ragged([b"a", b"b"], [0, 1, 2], tf.string),
        ("feature bad", "int32, int64 or floating point", "string", "StringLookup"),
        error=TypeError,
    ),
    Bad(
        "weights_of_integers",
        tf.constant([1, 2]),
        ("weights of feature bad", "floating point", "int32", "tf.cast"),
        tf.constant([1, 2]),
        TypeError,
    ),
    Bad(
        "weights_of_another_kind",
        sparse([[0, 0]], [1], [2, 3]),
        ("weights of feature bad", "SparseTensor"),
        tf.constant([1.0]),
        ValueError,
    ),
    Bad(
        "weights_of_another_shape",
        tf.constant([1, 2]),
        ("weights of feature bad", "(2,)", "(3,)"),
        tf.constant([1.0, 2.0, 3.0]),
        ValueError,
    ),
    Bad(
        "a_scalar",
        tf.constant(3),
        ("Feature bad", "rank", ">= 1", "rank 0"),
        error=ValueError,
    ),
    Bad(
        "ragged_of_rank_3",
        tf.ragged.constant([[[1], []], [[2, 3]]]),
        ("Feature bad", "rank of a ragged input must be 2", "rank 3"),
        error=ValueError,
    ),
    Bad(
        "sparse_of_rank_1",
        sparse([[0]], [1], [2]),
        ("Feature bad", "rank of a sparse input must be >= 2", "rank 1"),
        error=ValueError,
    ),
]
