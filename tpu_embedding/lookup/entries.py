"""One feature's ids, of any input kind, as entries (row, sample, gain).

  ragged [[7, 2], [], [7]], combiner mean      rows:    [ 7, 2, 7 ]
                                               samples: [ 0, 0, 2 ]
                                               gains:   [.5,.5, 1 ]

These are the rules and messages of ops/cc/core/feature.cc, in stock ops. All checks
come first: what they are computed from must stand input of any sort.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Sequence

import tensorflow as tf

from tpu_embedding.inputs import InputKind
from tpu_embedding.lookup import quick
from tpu_embedding.lookup.graph_checks import (
    Bound,
    Change,
    Check,
    all_hold,
    guard,
    no_change,
    require,
    text,
)
from tpu_embedding.lookup.input_rows import (
    Checks,
    FeatureInput,
    Rows,
    first,
    ids_in_range,
    output_axes,
    rows_of,
    with_sizes,
)
from tpu_embedding.lookup.quick import Plain


@dataclasses.dataclass(frozen=True)
class Entries:
    """The entries of one feature, sample by sample.

    Attributes:
      rows: int64 [n], each in [0, V).
      samples: int64 [n], ascending.
      gains: float32 [n].
      shape: int64 [k], the output shape without the embedding axis.
    """

    rows: tf.Tensor
    samples: tf.Tensor
    gains: tf.Tensor
    shape: tf.Tensor

    @property
    def num_samples(self) -> tf.Tensor:
        """int64 scalar."""
        return tf.reduce_prod(self.shape)


@dataclasses.dataclass(frozen=True)
class Selection:
    """What one feature looks up, before gains are made of its weights.

    Attributes:
      rows: int64 [n], each in [0, V); they wait for the checks.
      unchecked_samples: int64 [n], for ops that take `rows` too and so wait for them.
      weights: float32 [n], or None where all are 1.
      axes: int64 scalars, the output shape without the embedding axis.
      combiner: The table's.
      one_each: Entry i is all that sample i has, and n is the number of samples.
    """

    rows: tf.Tensor
    unchecked_samples: tf.Tensor
    weights: tf.Tensor | None
    axes: list[tf.Tensor]
    combiner: str
    one_each: bool

    @property
    def samples(self) -> tf.Tensor:
        """int64 [n], ascending, after the checks."""
        with tf.control_dependencies([self.rows]):
            return tf.identity(self.unchecked_samples)

    @property
    def num_samples(self) -> tf.Tensor:
        """int64 scalar."""
        return math.prod(self.axes[1:], start=self.axes[0])

    def entries(self) -> Entries:
        """With the gain of each entry."""
        weights = self.weights
        if weights is None:
            weights = tf.ones_like(self.rows, tf.float32)
        # Whoever makes room for a shape must wait for its checks, as the rows do.
        with tf.control_dependencies([self.rows]):
            shape = tf.stack(self.axes)
        # Not negative even where a check fails: tracing looks at constants, too.
        count = tf.maximum(self.num_samples, 0)
        samples = self.samples
        gains = _gains(self.combiner, samples, weights, count)
        return Entries(self.rows, samples, gains, shape)


def build_entries(
    inputs: Sequence[FeatureInput], on_failure: Change = no_change
) -> list[Entries]:
    """As `select`, with gains."""
    return [selection.entries() for selection in select(inputs, on_failure)]


def select(
    inputs: Sequence[FeatureInput], on_failure: Change = no_change
) -> list[Selection]:
    """Checks the features of one replica and says what they look up.

    Args:
      inputs: The features.
      on_failure: What is to change before an error.

    Raises:
      tf.errors.InvalidArgumentError: If ids, weights or splits are not valid.
    """
    if tf.executing_eagerly():
        drafts = [_draft(feature) for feature in with_sizes(inputs)]
        require([check for draft in drafts for check in draft.checks()], on_failure)
        return [draft.finish(draft.ids) for draft in drafts]
    plain = [feature for feature in inputs if quick.covers(feature)]
    drafts = [_draft(feature) for feature in with_sizes(inputs, quick.covers)]
    exact = [None if quick.covers(d.feature) else d.checks() for d in drafts]
    masks = quick.masks_of(
        [Plain(d.feature, d.rows, d.ids) for d in drafts if quick.covers(d.feature)]
    )

    def checks() -> list[Check | Bound]:
        # Those of plain features are made where they are needed, of the inputs alone.
        anew = (_draft(feature).checks() for feature in with_sizes(plain))
        each = (next(anew) if own is None else own for own in exact)
        return [check for own in each for check in own]

    ids = [draft.ids for draft in drafts]
    known = [check for own in exact if own is not None for check in own]
    if known or masks:
        ids = guard(all_hold(known, masks), checks, ids, on_failure)
    return [draft.finish(own) for draft, own in zip(drafts, ids, strict=True)]


@dataclasses.dataclass(frozen=True)
class _Draft:
    """A selection that holds if the checks do.

    Attributes:
      feature: The feature.
      rows: Its rows.
      ids: int64 [n].
      checks: Of the feature.
      finish: Makes the selection of the ids, as they are after the checks.
    """

    feature: FeatureInput
    rows: Rows
    ids: tf.Tensor
    checks: Checks
    finish: Callable[[tf.Tensor], Selection]


def _check_sizes(feature: FeatureInput) -> list[Bound]:
    """What the rest relies on."""
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
                " ids. Weights have the feature's own structure.",
            ),
        )
    return checks


def _equal(
    one: tf.Tensor, other: tf.Tensor, message: Callable[[], tf.Tensor]
) -> list[Bound]:
    return [Bound(one, other, message), Bound(other, one, message)]


def _draft(feature: FeatureInput) -> _Draft:
    batch, config = feature.batch, feature.table.config
    rows = rows_of(feature)
    axes, positions, shape_checks = output_axes(feature, rows)
    ids = tf.cast(_flat(batch.ids), tf.int64)
    weights = None if batch.weights is None else _flat(batch.weights)
    kept = []  # Masks of the entries that are to stay.
    if config.invalid_ids == "drop":
        kept.append(ids_in_range(ids, config.vocabulary_size))
    sample = rows.row
    if positions is not None:
        is_sequence = positions > 0
        sample = tf.where(is_sequence, sample * positions + rows.position, sample)
        kept.append(~is_sequence | (rows.position < positions))

    def finish(ids: tf.Tensor) -> Selection:
        columns = [ids, sample] if weights is None else [ids, sample, weights]
        if kept:
            # After the checks: masks and weights of other sizes fail without a name.
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
            one_each=rows.one_each and not kept,
        )

    def checks() -> list[Check | Bound]:
        structure = [*_check_sizes(feature), *rows.checks()]
        structure += [*_check_weight_structure(feature), *shape_checks()]
        return [*structure, *_check_entries(feature, rows.row, ids, weights)]

    return _Draft(feature, rows, ids, checks, finish)


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
                f"{feature.name}: the weights have other {what} than the ids. Build "
                "them with `with_values`."
            ),
        )
    ]


def _check_entries(
    feature: FeatureInput, row: tf.Tensor, ids: tf.Tensor, weights: tf.Tensor | None
) -> list[Check]:
    """That each weight is finite and each id in range, where that is asked for."""
    config = feature.table.config
    finite = valid = None
    if feature.check_numerics and weights is not None:
        finite = tf.math.is_finite(weights)
    if config.invalid_ids == "error":
        valid = ids_in_range(ids, config.vocabulary_size)
    masks = [mask for mask in (finite, valid) if mask is not None]

    def message() -> tf.Tensor:
        entry = first(~tf.reduce_all(tf.stack(masks), axis=0))
        invalid = text(
            f"{feature.name}, table {feature.table.name}: sample ",
            row[entry],
            " has id ",
            ids[entry],
            f", but ids must be in [0, {config.vocabulary_size}). Mend the input, or "
            'set invalid_ids="drop" or "mod" where the table or the embedding is '
            "configured.",
        )
        if finite is None or weights is None:
            return invalid
        infinite = text(
            f"{feature.name}: sample ",
            row[entry],
            " has a weight that is not finite (",
            weights[entry],
            ").",
        )
        return tf.where(finite[entry], invalid, infinite)

    # Each by itself: where sizes differ, an earlier check says so.
    return [Check(mask, message) for mask in masks]


def _gains(
    combiner: str, samples: tf.Tensor, weights: tf.Tensor, num_samples: tf.Tensor
) -> tf.Tensor:
    """Weights over each sample's divisor; one of exactly 0 makes all of them 0."""
    if combiner == "sum":
        return weights
    # In double precision, as weights of both signs may almost cancel.
    precise = tf.cast(weights, tf.float64)
    terms = precise if combiner == "mean" else precise * precise
    divisors = tf.math.unsorted_segment_sum(terms, samples, num_samples)
    if combiner == "sqrtn":
        divisors = tf.sqrt(divisors)
    return tf.cast(
        tf.math.divide_no_nan(precise, tf.gather(divisors, samples)), tf.float32
    )
