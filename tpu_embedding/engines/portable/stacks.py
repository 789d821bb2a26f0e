"""Entries as stacked batches, and back."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import tensorflow as tf

from tpu_embedding.layout.csr import PartitionedCsrFormatTensor
from tpu_embedding.layout.plan import Plan
from tpu_embedding.layout.stacking import Layout, Stack
from tpu_embedding.lookup.entries import Entries
from tpu_embedding.lookup.graph_checks import Check, require, text


def write_stack(
    layout: Layout, stack: Stack, entries: Sequence[Entries]
) -> list[tf.Tensor]:
    """The row_pointers, sample ids, token ids and gains of one stack."""
    samples, tokens = [], []
    first_sample = tf.zeros([], tf.int64)
    for feature in stack.features:
        samples.append(entries[feature].samples + first_sample)
        tokens.append(entries[feature].rows + layout.row_offsets[feature])
        first_sample += entries[feature].num_samples
    all_samples = tf.concat(samples, 0)
    pointers = tf.searchsorted(all_samples, tf.range(first_sample + 1))
    return [
        tf.cast(pointers, tf.int32),
        tf.cast(all_samples, tf.int32),
        tf.cast(tf.concat(tokens, 0), tf.int32),
        tf.concat([entries[feature].gains for feature in stack.features], 0),
    ]


def read_stack(
    plan: Plan,
    layout: Layout,
    stack: Stack,
    table: PartitionedCsrFormatTensor,
    shapes: Sequence[tf.Tensor],
) -> list[Entries]:
    """Undoes `write_stack`, for each feature and its output shape, int64 [k].

    The tensors of the table may hold anything: they come from the user. Those that
    `write_stack` cannot have made are refused.
    """
    specs = [plan.features[f] for f in stack.features]
    # The product of large axes overflows an integer, but not a float64.
    sizes = tf.stack([tf.reduce_prod(tf.cast(s, tf.float64)) for s in shapes])
    counts = tf.stack([tf.reduce_prod(shape) for shape in shapes])
    pointers = tf.cast(tf.reshape(table.row_pointers, [-1]), tf.int64)
    tokens = tf.cast(table.sorted_token_ids, tf.int64)
    gains = tf.cast(table.sorted_gains, tf.float32)
    steps = tf.concat([pointers, [tf.size(tokens, tf.int64)]], 0)
    steps -= tf.concat([[0], pointers], 0)
    are_whole = tf.stack([steps[0], steps[-1], tf.size(gains, tf.int64)])
    checks = {
        "a feature has a number of samples that is negative or too large": (
            tf.reduce_all(tf.concat(shapes, 0) >= 0)
            & tf.reduce_all(sizes <= tf.int32.max)
        ),
        "it needs one of its row_pointers more than samples": tf.equal(
            tf.size(pointers, tf.int64), tf.reduce_sum(counts) + 1
        ),
        "row_pointers must rise from 0 to the number of sorted_token_ids, which is "
        "that of sorted_gains": (
            tf.reduce_all(steps >= 0)
            & tf.reduce_all(tf.equal(are_whole, [0, 0, tf.size(tokens, tf.int64)]))
        ),
    }
    with tf.control_dependencies(_require(stack, checks)):
        ends = tf.gather(pointers, tf.cumsum(counts))
        numbers = tf.concat([tf.range(count) for count in tf.unstack(counts)], 0)
    lengths = ends - tf.concat([[0], ends[:-1]], 0)
    owners = tf.repeat(tf.range(len(specs)), lengths)
    begins = [layout.row_offsets[f] for f in stack.features]
    num_rows = [plan.tables[spec.table].config.vocabulary_size for spec in specs]
    rows = tokens - tf.gather(tf.constant(begins, tf.int64), owners)
    known = (rows >= 0) & (rows < tf.gather(tf.constant(num_rows, tf.int64), owners))
    paths = ", ".join(spec.path for spec in specs)
    what = f"a token id belongs to no row of the table of its feature ({paths})"
    with tf.control_dependencies(_require(stack, {what: tf.reduce_all(known)})):
        samples = tf.repeat(numbers, steps[1:-1])
        values = (rows, samples, gains)
        parts = [tf.split(own, lengths, num=len(specs)) for own in values]
    return [Entries(*own) for own in zip(*parts, shapes, strict=True)]


def _require(stack: Stack, checks: dict[str, tf.Tensor]) -> list[Any]:
    """Refuses a stack with the first text whose condition is false."""
    end = ". Pass on what the lookup gave."
    return require(
        [
            Check(
                ok, lambda what=what: text(f"Stacked table {stack.name}: {what}{end}")
            )
            for what, ok in checks.items()
        ]
    )
