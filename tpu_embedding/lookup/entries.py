"""One feature's ids, of any input kind, as entries (row, sample, gain).

  ragged [[7, 2], [], [7]], combiner mean      rows:    [ 7, 2, 7 ]
                                               samples: [ 0, 0, 2 ]
                                               gains:   [.5,.5, 1 ]

The rules and messages are those of ops/cc/core/feature.cc, in TensorFlow's ops. All
checks are computed before the first one fails, so computing them must not itself fail
on malformed input.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import tensorflow as tf

from tpu_embedding.inputs import InputKind
from tpu_embedding.lookup.graph_checks import (
    Bound,
    Check,
    all_hold,
    element,
    first,
    guard,
    require,
    text,
)
from tpu_embedding.lookup.input_rows import (
    MAX_UNBACKED_ROWS,
    Checks,
    FeatureInput,
    InputRows,
    axes_of,
    ids_in_range,
    input_rows_of,
    output_axes,
    with_sizes,
)


class Entries(NamedTuple):
    """The entries of one feature, sample by sample, or the specs of their tensors.

    Attributes:
      rows: The row of each entry, int64 [n], each in [0, V).
      samples: The sample of each entry, int64 [n], ascending.
      gains: The gain of each entry, float32 [n].
      shape: int64 [k], the output shape without the embedding axis.
    """

    rows: Any
    samples: Any
    gains: Any
    shape: Any

    @property
    def num_samples(self) -> tf.Tensor:
        """The number of samples, an int64 scalar."""
        return tf.reduce_prod(self.shape)


@dataclasses.dataclass(frozen=True)
class Selection:
    """The rows that one feature looks up, with weights in place of gains.

    Attributes:
      rows: The rows, int64 [n], each in [0, V). They depend on the checks.
      unchecked_samples: The sample of each row, int64 [n], for ops that also take
        `rows` and so depend on the checks.
      weights: The weights, float32 [n], or None if all are 1.
      axes: int64 scalars, the output shape without the embedding axis.
      combiner: "sum", "mean" or "sqrtn".
      one_each: Whether entry i is the only entry of sample i, for n samples.
    """

    rows: tf.Tensor
    unchecked_samples: tf.Tensor
    weights: tf.Tensor | None
    axes: list[tf.Tensor]
    combiner: str
    one_each: bool

    @property
    def samples(self) -> tf.Tensor:
        """The sample of each row, int64 [n], ascending, after the checks."""
        with tf.control_dependencies([self.rows]):
            return tf.identity(self.unchecked_samples)

    @property
    def num_samples(self) -> tf.Tensor:
        """The number of samples, an int64 scalar."""
        return math.prod(self.axes[1:], start=self.axes[0])

    def entries(self) -> Entries:
        """Returns the entries, with the gain of each."""
        weights = self.weights
        if weights is None:
            weights = tf.ones_like(self.rows, tf.float32)
        # Ops that allocate memory for the shape must wait for the checks.
        with tf.control_dependencies([self.rows]):
            shape = tf.stack(self.axes)
        # It must not be negative even if a check fails: tracing evaluates constants.
        count = tf.maximum(self.num_samples, 0)
        samples = self.samples
        gains = gains_of(self.combiner, samples, weights, count)
        return Entries(self.rows, samples, gains, shape)


def select(inputs: Sequence[FeatureInput]) -> list[Selection]:
    """Checks the features of one replica and selects the rows that they look up."""
    if tf.executing_eagerly():
        drafts = [_draft(feature) for feature in with_sizes(inputs)]
        require([check for draft in drafts for check in draft.checks()])
        return [draft.finish(draft.ids) for draft in drafts]
    plain = [feature for feature in inputs if _is_plain(feature)]
    drafts = [_draft(feature) for feature in with_sizes(inputs, unless=_is_plain)]
    exact = [None if _is_plain(d.feature) else d.checks() for d in drafts]
    masks = _plain_masks([d for d in drafts if _is_plain(d.feature)])

    def checks() -> list[Check | Bound]:
        # The checks of plain features are made only in the branch that needs them.
        anew = (_draft(feature).checks() for feature in with_sizes(plain))
        each = (next(anew) if own is None else own for own in exact)
        return [check for own in each for check in own]

    ids = [draft.ids for draft in drafts]
    known = [check for own in exact if own is not None for check in own]
    if known or masks:
        ids = guard(all_hold(known, masks), checks, ids)
    return [draft.finish(own) for draft, own in zip(drafts, ids, strict=True)]


@dataclasses.dataclass(frozen=True)
class _Draft:
    """A selection before its checks.

    Attributes:
      feature: The feature.
      input_rows: The rows of its input.
      ids: The ids, int64 [n].
      checks: Makes the checks.
      finish: Makes the selection from the ids, which must depend on the checks.
    """

    feature: FeatureInput
    input_rows: InputRows
    ids: tf.Tensor
    checks: Checks
    finish: Callable[[tf.Tensor], Selection]


def _check_sizes(feature: FeatureInput) -> list[Bound]:
    """Returns the checks of sizes, on which all other checks rely."""
    batch, name = feature.batch, feature.name
    checks: list[Bound] = []
    num_ids = tf.size(batch.ids, tf.int64)
    if batch.kind is InputKind.SPARSE:
        assert feature.num_indices is not None
        rank = tf.size(batch.shape, tf.int64)
        numbers = tf.size(batch.structure, tf.int64)
        checks += _equal(
            numbers,
            feature.num_indices,
            lambda: text(
                f"{name}: a sparse input of ",
                num_ids,
                " values and rank ",
                rank,
                " has ",
                numbers,
                " numbers in its indices; it needs rank >= 2 "
                "and one index of that rank for each value.",
            ),
        )
    if batch.weights is not None:
        num_weights = tf.size(batch.weights, tf.int64)
        checks += _equal(
            num_weights,
            num_ids,
            lambda: text(
                f"{name}: ",
                num_weights,
                " weights for ",
                num_ids,
                " ids. Pass one weight for each id.",
            ),
        )
    return checks


def _equal(
    one: tf.Tensor, other: tf.Tensor, message: Callable[[], tf.Tensor]
) -> list[Bound]:
    return [Bound(one, other, message), Bound(other, one, message)]


def _draft(feature: FeatureInput) -> _Draft:
    batch, config = feature.batch, feature.table.config
    input_rows = input_rows_of(feature)
    axes, positions, shape_checks = output_axes(feature, input_rows)
    ids = tf.cast(_flat(batch.ids), tf.int64)
    weights = None if batch.weights is None else _flat(batch.weights)
    kept = []  # Masks of the entries to keep.
    if config.invalid_ids == "drop":
        kept.append(ids_in_range(ids, config.vocabulary_size))
    sample = input_rows.row
    if positions is not None:
        is_sequence = positions > 0
        sample = tf.where(is_sequence, sample * positions + input_rows.position, sample)
        kept.append(~is_sequence | (input_rows.position < positions))

    def finish(ids: tf.Tensor) -> Selection:
        columns = [ids, sample] if weights is None else [ids, sample, weights]
        if kept:
            # The checks come first: they name the feature if sizes differ, ops do not.
            with tf.control_dependencies([ids]):
                mask = tf.reduce_all(tf.stack(kept), axis=0)
                columns = [tf.boolean_mask(column, mask) for column in columns]
        if config.invalid_ids == "mod":
            columns[0] = tf.math.floormod(columns[0], config.vocabulary_size)
        return Selection(
            rows=columns[0],
            unchecked_samples=columns[1],
            weights=None if weights is None else columns[2],
            axes=axes,
            combiner=config.entry_combiner,
            one_each=input_rows.one_each and not kept,
        )

    def checks() -> list[Check | Bound]:
        structure = [*_check_sizes(feature), *input_rows.checks()]
        structure += [*_check_weight_structure(feature), *shape_checks()]
        return [*structure, *_check_entries(feature, input_rows.row, ids, weights)]

    return _Draft(feature, input_rows, ids, checks, finish)


def _flat(tensor: tf.Tensor) -> tf.Tensor:
    return tensor if tensor.shape.rank == 1 else tf.reshape(tensor, [-1])


def _check_weight_structure(feature: FeatureInput) -> list[Check]:
    other = feature.batch.weight_structure
    if other is None:
        return []
    own, other = (tf.reshape(x, [-1]) for x in (feature.batch.structure, other))
    size = tf.minimum(tf.size(own), tf.size(other))
    same = tf.equal(tf.size(own), tf.size(other))
    what = "indices" if feature.batch.kind is InputKind.SPARSE else "row_splits"
    return [
        Check(
            same & tf.reduce_all(tf.equal(own[:size], other[:size])),
            lambda: text(
                f"{feature.name}: the weights must have the {what} of the ids. Build "
                "them with `with_values`."
            ),
        )
    ]


def _check_entries(
    feature: FeatureInput, row: tf.Tensor, ids: tf.Tensor, weights: tf.Tensor | None
) -> list[Check]:
    """Returns checks of weights, if `check_numerics`, and of ids, if they can fail."""
    config = feature.table.config
    finite = valid = None
    if feature.check_numerics and weights is not None:
        finite = tf.math.is_finite(weights)
    if config.refuses_ids:
        valid = ids_in_range(ids, config.vocabulary_size)
    masks = [mask for mask in (finite, valid) if mask is not None]

    def message() -> tf.Tensor:
        entry = tf.reduce_min(tf.stack([first(~mask) for mask in masks]))
        invalid = text(
            f"{feature.name}, table {feature.table.name}: sample ",
            element(row, entry),
            " has id ",
            element(ids, entry),
            f", but ids must be in [0, {config.vocabulary_size}). Fix the input, or "
            'set invalid_ids="drop" or "mod" where the table or the embedding is '
            "configured.",
        )
        if finite is None or weights is None:
            return invalid
        infinite = text(
            f"{feature.name}: sample ",
            element(row, entry),
            " has a weight that is not finite (",
            element(weights, entry),
            ").",
        )
        return tf.where(element(finite, entry), invalid, infinite)

    # One check for each mask: their sizes may differ, which an earlier check reports.
    return [Check(mask, message) for mask in masks]


def gains_of(
    combiner: str, samples: tf.Tensor, weights: tf.Tensor, num_samples: tf.Tensor
) -> tf.Tensor:
    """Divides weights by the divisor of their sample; 0 if the divisor is exactly 0."""
    if combiner == "sum":
        return weights
    # Double precision is needed, as weights of both signs may almost cancel.
    precise = tf.cast(weights, tf.float64)
    terms = precise if combiner == "mean" else precise * precise
    divisors = tf.math.unsorted_segment_sum(terms, samples, num_samples)
    if combiner == "sqrtn":
        divisors = tf.sqrt(divisors)
    return tf.cast(
        tf.math.divide_no_nan(precise, tf.gather(divisors, samples)), tf.float32
    )


# A quick test checks all plain sparse features at once, in few ops. The exact checks
# take a dozen ops for each feature, and in a small batch the number of ops counts most.
# A batch that passes is valid; any other is checked exactly.

# Entries are ordered by row * _MAX_COLUMNS + column, which no shape overflows.
_MAX_COLUMNS = 2**31


def _is_plain(feature: FeatureInput) -> bool:
    """Returns whether a quick test exists: that of a sparse matrix without weights."""
    batch = feature.batch
    return (
        batch.kind is InputKind.SPARSE
        and batch.static_shape.rank == 2
        and batch.weights is None
        and feature.declared is None
    )


def _plain_masks(features: Sequence[_Draft]) -> list[tf.Tensor]:
    """Returns bool vectors; the features are valid if all elements are true."""
    if not features:
        return []
    axes = [axis for f in features for axis in axes_of(f.feature)]
    shapes = tf.bitcast(tf.stack(axes), tf.uint64)
    largest = []  # Rows and columns for which the test is exact.
    for f in features:
        positions = max(f.feature.spec.config.max_sequence_length, 1)
        num_rows = min(MAX_UNBACKED_ROWS, f.feature.max_samples) // positions
        largest += [num_rows, _MAX_COLUMNS]
    masks = [shapes <= tf.constant(largest, tf.uint64)]
    bounds = tf.unstack(shapes, num=2 * len(features))
    indices = [
        index for f in features for index in (f.input_rows.row, f.input_rows.position)
    ]
    # Negative indices are the largest as unsigned numbers: one comparison is enough.
    masks += [
        tf.bitcast(index, tf.uint64) < bound
        for index, bound in zip(indices, bounds, strict=True)
    ]
    masks += [
        ids_in_range(f.ids, f.feature.table.config.vocabulary_size)
        for f in features
        if f.feature.table.config.refuses_ids
    ]
    # There must be one index for each id.
    num_ids = tf.shape_n([f.ids for f in features], tf.int64)
    num_indices = tf.shape_n([f.input_rows.row for f in features], tf.int64)
    masks.append(tf.equal(_concat(num_ids), _concat(num_indices)))
    # Indices must ascend; a first and a last key enclose those of each feature.
    first_key, last_key = (tf.constant([key], tf.int64) for key in (-1, 2**63 - 1))
    keys = [f.input_rows.row * _MAX_COLUMNS + f.input_rows.position for f in features]
    before = tf.concat([part for own in keys for part in (first_key, own)], 0)
    after = tf.concat([part for own in keys for part in (own, last_key)], 0)
    masks.append(before < after)
    return masks


def _concat(parts: Sequence[tf.Tensor]) -> tf.Tensor:
    return parts[0] if len(parts) == 1 else tf.concat(parts, 0)
