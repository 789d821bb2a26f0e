"""The input row and position of each entry of a feature, and the output shape.

An input row is one slice of the input along its last axis, which this module also calls
row. The rules and messages are those of ops/cc/core/feature.cc, in TensorFlow's ops.
All checks are computed before the first one fails, so no op here may fail on malformed
input. The exceptions are a shape and indices of another rank.
"""

from __future__ import annotations

import dataclasses
import functools
import math
import re
from collections.abc import Callable, Sequence
from typing import Any

import tensorflow as tf

from tpu_embedding.inputs import IdBatch, InputKind
from tpu_embedding.layout.output_shapes import Declared
from tpu_embedding.layout.plan import FeatureSpec, TableSpec
from tpu_embedding.lookup.graph_checks import Bound, Check, element, first, text

# Makes checks when called, because each check costs ops in a graph.
Checks = Callable[[], list[Check | Bound]]

MAX_SAMPLES = 2**31  # More than any batch has; only hostile shapes claim more.
# The shape of an input need not match its data. With more than MAX_UNBACKED_ROWS rows
# it needs one id for every MAX_ROWS_PER_ID rows, so that memory stays in proportion to
# the input.
MAX_UNBACKED_ROWS = 2**24
MAX_ROWS_PER_ID = 64


@dataclasses.dataclass(frozen=True)
class FeatureInput:
    """One batch of a feature, and the rules for it.

    Attributes:
      spec: The feature.
      table: The table of the feature.
      batch: The ids.
      declared: The output shape that was declared, or None.
      check_numerics: Whether weights must be finite.
      max_samples: The largest number of samples that the input may have.
      positions: The number of positions of each ragged row that is a sample of the
        declared shape; 0 for other input.
      max_rows: int64 scalar, the largest number of rows that an input with this many
        ids may have. Set by `with_sizes` if `claims`.
      num_indices: int64 scalar, the size of the indices of an input with this many
        ids. Set by `with_sizes` if `claims`.
    """

    spec: FeatureSpec
    table: TableSpec
    batch: IdBatch
    declared: Declared | None
    check_numerics: bool
    max_samples: int = MAX_SAMPLES
    positions: int = 0
    max_rows: tf.Tensor | None = None
    num_indices: tf.Tensor | None = None

    @property
    def claims(self) -> bool:
        """Whether the shape may claim rows without data: not if ragged or of rank 1."""
        batch = self.batch
        if batch.kind is InputKind.DENSE:
            return batch.static_shape.rank != 1
        return batch.kind is InputKind.SPARSE

    @property
    def name(self) -> str:
        """The feature as error messages name it."""
        return f"Feature {self.spec.path}"


@dataclasses.dataclass(frozen=True)
class InputRows:
    """The rows of an input.

    Attributes:
      axes: int64 scalars, the shape without the last axis. The number of rows is
        their product.
      row: int64 [n], the input row of each entry.
      position: int64 [n], the position of each entry in its row.
      checks: Makes the checks of the input's structure.
      one_each: Whether entry i is the only entry of row i.
    """

    axes: list[tf.Tensor]
    row: tf.Tensor
    position: tf.Tensor
    checks: Checks
    one_each: bool = False


def with_sizes(
    features: Sequence[FeatureInput],
    unless: Callable[[FeatureInput], bool] = lambda _: False,
) -> list[FeatureInput]:
    """Sets `max_rows` and `num_indices`, for all features of a call in few ops."""

    def claims(feature: FeatureInput) -> bool:
        return feature.claims and not unless(feature)

    claiming = [feature for feature in features if claims(feature)]
    if not claiming:
        return list(features)
    num_ids = tf.stack([tf.size(f.batch.ids, tf.int64) for f in claiming])
    ranks = tf.stack([tf.size(f.batch.shape, tf.int64) for f in claiming])
    limits = tf.constant([f.max_samples for f in claiming], tf.int64)
    backed = tf.maximum(MAX_ROWS_PER_ID * num_ids, MAX_UNBACKED_ROWS)
    max_rows = iter(tf.unstack(tf.minimum(backed, limits)))
    num_indices = iter(tf.unstack(num_ids * ranks))
    return [
        dataclasses.replace(
            feature, max_rows=next(max_rows), num_indices=next(num_indices)
        )
        if claims(feature)
        else feature
        for feature in features
    ]


def input_rows_of(feature: FeatureInput) -> InputRows:
    """Returns the rows of a feature's input."""
    return _READERS[feature.batch.kind](feature)


def ids_in_range(ids: tf.Tensor, vocabulary_size: int) -> tf.Tensor:
    """Returns which ids are valid, bool [n]: as uint64 negative ids are the largest."""
    return tf.bitcast(ids, tf.uint64) < vocabulary_size


def axes_of(feature: FeatureInput) -> list[tf.Tensor]:
    """Returns the axes of sparse input, int64 scalars.

    No check covers a shape of another rank. This op fails on it, and the op's name is
    in TensorFlow's error.
    """
    return tf.unstack(
        feature.batch.shape,
        num=feature.batch.static_shape.rank,
        name=_op_name("dense_shape", feature),
    )


def _op_name(part: str, feature: FeatureInput) -> str:
    """Returns an op name that names the feature in TensorFlow's errors."""
    path = re.sub(r"\W", "_", feature.spec.path, flags=re.ASCII)
    return f"{part}_of_{path}"


def finite_gradient(path: str, gradient: tf.Tensor) -> Check:
    """Checks that the gradient of a feature, float32 [..., dim], is finite."""
    values = tf.reshape(gradient, [-1])
    bad = ~tf.math.is_finite(values)

    def not_finite() -> tf.Tensor:
        at = first(bad)
        return text(
            f"Feature {path}: the gradient of sample ",
            at // gradient.shape[-1],
            " is not finite (",
            element(values, at),
            ").",
        )

    return Check(~tf.reduce_any(bad), not_finite)


def output_axes(
    feature: FeatureInput, input_rows: InputRows
) -> tuple[list[tf.Tensor], tf.Tensor | None, Checks]:
    """Finds the output shape of a feature.

    Returns:
      (axes of the output, number of positions per row, function that makes the
      checks). The number of positions is None if a row is always one sample, and 0 if
      it is one sample in this batch. Else each position of a row is one sample.
    """
    length, declared = feature.spec.config.max_sequence_length, feature.declared
    if not length and declared and feature.batch.kind is InputKind.RAGGED:
        (count,) = input_rows.axes
        if not feature.positions:
            return _filled(feature, declared, count)
        inner = [axis for axis in declared.shape[1:] if axis is not None]
        axes = [count, *(tf.constant(axis, tf.int64) for axis in inner)]
        positions = tf.constant(feature.positions, tf.int64)
        return axes, positions, lambda: _check_size(feature, axes, feature.max_samples)
    axes, positions = input_rows.axes, None
    if length:
        positions = tf.constant(length, tf.int64)
        axes = [*axes, positions]

    def checks() -> list[Check | Bound]:
        made: list[Check | Bound] = []
        if feature.claims:
            made += _check_size(feature, input_rows.axes, feature.max_rows)
        if declared is not None:
            made.append(_check_declared(feature, declared, axes))
        if length:
            made += _check_size(feature, axes, feature.max_samples)
        return made

    return axes, positions, checks


def _check_size(
    feature: FeatureInput, axes: list[tf.Tensor], most: Any
) -> list[Check | Bound]:
    """Checks that a shape, which need not match its data, may fit into memory."""
    most = tf.convert_to_tensor(most, tf.int64)

    def message() -> tf.Tensor:
        return text(
            f"{feature.name}: the shape ",
            _shape_text(axes),
            " has a negative axis or more than ",
            most,
            " samples.",
        )

    if len(axes) == 1:
        zero = tf.constant(0, tf.int64)
        return [Bound(zero, axes[0], message), Bound(axes[0], most, message)]
    # This uses double precision: a product of hostile axes overflows an integer.
    shape = tf.stack(axes)
    products = tf.math.cumprod(tf.cast(shape, tf.float64))
    fits = (shape >= 0, shape <= most, products <= tf.cast(most, tf.float64))
    return [Check(ok, message) for ok in fits]


def _filled(
    feature: FeatureInput, declared: Declared, count: tf.Tensor
) -> tuple[list[tf.Tensor], tf.Tensor | None, Checks]:
    """Finds the output shape of `count` ragged rows; returns what `output_axes` does.

    The rows fill the declared shape if its product is `count`, with at most one open
    axis, or if it has several axes and its product is m times `count`; then each row
    has m positions.
    """
    known = math.prod(axis for axis in declared.shape if axis is not None)
    num_open = sum(axis is None for axis in declared.shape)
    divisor = max(known, 1)
    positions = None
    if num_open == 0 and len(declared.shape) == 1:
        fills = tf.equal(count, known)
    elif num_open == 0:
        multiple = known // tf.maximum(count, 1)
        positions = tf.where(tf.equal(count, known), tf.zeros_like(count), multiple)
        fills = tf.equal(count, known) | (
            (multiple > 0) & tf.equal(count * multiple, known)
        )
    else:
        fills = tf.equal(count % divisor, 0) & (known > 0) & (num_open == 1)
    axes = [
        count // divisor if a is None else tf.constant(a, tf.int64)
        for a in declared.shape
    ]
    check = Check(
        fills,
        lambda: text(
            f"{feature.name}: a ragged input of ",
            count,
            f" rows does not fill the output shape {_declared_text(declared)}.",
        ),
    )
    return axes, positions, lambda: [check]


def _check_declared(
    feature: FeatureInput, declared: Declared, axes: list[tf.Tensor]
) -> Check:
    matches = tf.constant(len(axes) == len(declared.shape))
    for axis, expected in zip(axes, declared.shape, strict=False):
        if expected is not None:
            matches &= tf.equal(axis, expected)
    return Check(
        matches,
        lambda: text(
            f"{feature.name}: the input gives output shape ",
            _shape_text(axes),
            f", not {_declared_text(declared)}.",
        ),
    )


def _dense_rows(feature: FeatureInput) -> InputRows:
    batch = feature.batch
    index = tf.range(tf.size(batch.ids, tf.int64))
    if batch.static_shape.rank == 1:
        count = tf.unstack(batch.shape, num=1)
        return InputRows(count, index, tf.zeros_like(index), list, one_each=True)
    *axes, length = tf.unstack(batch.shape, num=batch.static_shape.rank)
    length = tf.maximum(length, 1)  # A length of 0 would divide by 0.
    return InputRows(axes, index // length, index % length, list)


def _ragged_rows(feature: FeatureInput) -> InputRows:
    splits, name = feature.batch.structure, feature.name
    num_ids = tf.size(feature.batch.ids, tf.int64)
    begins, ends = splits[:-1], splits[1:]
    rises = ends >= begins

    def falling() -> tf.Tensor:
        row = first(~rises)
        return text(
            f"{name}: row_splits must not decrease, but row ",
            row,
            " goes from ",
            element(begins, row),
            " to ",
            element(ends, row),
            ".",
        )

    start = functools.partial(text, f"{name}: row_splits must start at 0.")
    checks: list[Check | Bound] = [
        Check(tf.size(splits) > 0, start),
        Check(tf.equal(splits[:1], 0), start),
        Check(rises, falling),
        Check(
            tf.equal(splits[-1:], num_ids),
            lambda: text(
                f"{name}: row_splits end at ",
                tf.reduce_max(splits[-1:]),
                " but there are ",
                num_ids,
                " ids.",
            ),
        ),
    ]
    index = tf.range(num_ids)
    row = tf.searchsorted(splits, index, side="right", out_type=tf.int64) - 1
    # The extra split and the maximum are needed only if splits fail the checks.
    starts = tf.gather(tf.concat([splits, [0]], 0), tf.maximum(row, 0))
    count = tf.size(splits, tf.int64) - 1
    return InputRows([count], row, index - starts, lambda: checks)


def _sparse_rows(feature: FeatureInput) -> InputRows:
    batch = feature.batch
    rank, name = batch.static_shape.rank, _op_name("indices", feature)
    axes = axes_of(feature)
    # Indices of another rank fail with the name of this op, as in `axes_of`.
    row, *middle, column = tf.unstack(batch.structure, num=rank, axis=1, name=name)
    for axis, index in zip(axes[1:], middle, strict=False):
        row = row * axis + index
    checks = functools.partial(_check_indices, feature, axes)
    return InputRows(axes[:-1], row, column, checks)


def _check_indices(feature: FeatureInput, axes: list[tf.Tensor]) -> list[Check | Bound]:
    """Checks that the indices of sparse input are inside its shape and ascend."""
    shape, indices = feature.batch.shape, feature.batch.structure
    # Negative indices are the largest as unsigned numbers: one comparison is enough.
    limits = tf.bitcast(tf.maximum(shape, 0), tf.uint64)
    inside = tf.bitcast(indices, tf.uint64) < limits
    # In row-major order an axis must grow by at least 1 unless the axes before it grow.
    # From the last axis to the first, `wanted` is the step still needed.
    first_steps, *steps = tf.unstack(indices[1:] - indices[:-1], num=len(axes), axis=1)
    wanted = tf.constant(1, tf.int64)
    for step in reversed(steps):
        wanted = tf.cast(step < wanted, tf.int64)
    ascends = first_steps >= wanted

    def message() -> tf.Tensor:
        entry_inside = tf.reduce_all(inside, axis=1)
        bad = ~(entry_inside & tf.concat([entry_inside[:1], ascends], 0))
        entry = first(bad)
        start = text(f"{feature.name}: sparse entry ", entry)
        outside = text(
            start, " has an index outside of dense_shape ", _shape_text(axes), "."
        )
        unordered = text(
            start,
            " is out of order or occurs twice. Call tf.sparse.reorder first and keep "
            "one entry per index.",
        )
        return tf.where(element(entry_inside, entry), unordered, outside)

    return [Check(inside, message), Check(ascends, message)]


_READERS = {
    InputKind.DENSE: _dense_rows,
    InputKind.SPARSE: _sparse_rows,
    InputKind.RAGGED: _ragged_rows,
}


def _shape_text(axes: list[tf.Tensor]) -> tf.Tensor:
    """Returns the shape as Python prints a tuple, with None for a negative axis."""
    shape = tf.stack(axes)
    words = tf.where(shape < 0, "None", tf.strings.as_string(shape))
    joined = tf.strings.reduce_join(words, separator=", ")
    return text("(", joined, ",)" if len(axes) == 1 else ")")


def _declared_text(declared: Declared) -> str:
    return f"{tuple(declared.shape)} that {declared.source} declares"
