"""Entries as stacked batches, and back, made of TensorFlow's ops.

The rules and messages are those of ops/cc/core/stacks.cc.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import tensorflow as tf

from tpu_embedding.layout.csr import PartitionedCsrFormatTensor
from tpu_embedding.layout.plan import Plan
from tpu_embedding.layout.stacking import Layout, Stack
from tpu_embedding.lookup.entries import Entries
from tpu_embedding.lookup.graph_checks import Check, no_change, require, text


def write_stack(
    layout: Layout, stack: Stack, entries: Sequence[Entries]
) -> list[tf.Tensor]:
    """The row_pointers, sample ids, token ids and gains of one stack.

    Args:
      layout: All stacks.
      stack: The stack to write.
      entries: The entries of all features.
    """
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


def read_stacks(
    plan: Plan,
    layout: Layout,
    tables: Mapping[str, PartitionedCsrFormatTensor],
    shapes: Sequence[tf.Tensor],
) -> list[Entries]:
    """Undoes `write_stack`.

    Args:
      plan: The features.
      layout: All stacks.
      tables: The batch of each stack by name, which may hold anything: it comes from
        the user.
      shapes: For each feature its output shape, int64 [k].

    Raises:
      tf.errors.InvalidArgumentError: If the stacks are not as `write_stack` made
        them.
    """
    samples = [tf.reduce_prod(shape) for shape in shapes]
    checks = []
    for stack in layout.stacks:
        checks += _check_counts(plan, stack, shapes)
        total = tf.add_n([samples[f] for f in stack.features])
        checks += _check_pointers(stack, tables[stack.name], total)
    entries: dict[int, Entries] = {}
    with tf.control_dependencies(require(checks, no_change)):
        for stack in layout.stacks:
            first = tf.zeros([], tf.int64)
            for f in stack.features:
                entries[f] = _read_feature(
                    tables[stack.name], tf.identity(first), shapes[f]
                )
                first += samples[f]
    checks = []
    for stack in layout.stacks:
        checks += _check_tokens(plan, layout, stack, entries)
    with tf.control_dependencies(require(checks, no_change)):
        return [
            Entries(
                rows=entries[f].rows - layout.row_offsets[f],
                samples=tf.identity(entries[f].samples),
                gains=tf.identity(entries[f].gains),
                shape=tf.identity(entries[f].shape),
                num_invalid=entries[f].num_invalid,
            )
            for f in range(len(shapes))
        ]


def _read_feature(
    table: PartitionedCsrFormatTensor, first: tf.Tensor, shape: tf.Tensor
) -> Entries:
    """The entries of one feature, with token ids in place of rows."""
    samples = tf.reduce_prod(shape)
    pointers = tf.cast(table.row_pointers, tf.int64)[first : first + samples + 1]
    begin, end = pointers[0], pointers[-1]
    return Entries(
        rows=tf.cast(table.sorted_token_ids, tf.int64)[begin:end],
        samples=tf.repeat(tf.range(samples), pointers[1:] - pointers[:-1]),
        gains=tf.cast(table.sorted_gains, tf.float32)[begin:end],
        shape=shape,
        num_invalid=tf.zeros([], tf.int64),  # Stacks do not say.
    )


def _check_counts(plan: Plan, stack: Stack, shapes: Sequence[tf.Tensor]) -> list[Check]:
    most = tf.int32.max
    checks = []
    for f in stack.features:
        # The product of large axes overflows an integer, but not a float64.
        samples = tf.reduce_prod(tf.cast(shapes[f], tf.float64))
        message = (
            f"Stacked table {stack.name}: feature {plan.features[f].path} has a "
            "number of samples that is negative or too large. Pass on what the "
            "lookup gave."
        )
        valid = tf.reduce_all(shapes[f] >= 0) & (samples <= most)
        checks.append(Check(valid, lambda message=message: text(message)))
    return checks


def _check_pointers(
    stack: Stack, table: PartitionedCsrFormatTensor, samples: tf.Tensor
) -> list[Check]:
    pointers = tf.cast(tf.reshape(table.row_pointers, [-1]), tf.int64)
    size = tf.size(pointers, tf.int64)
    tokens = tf.size(table.sorted_token_ids, tf.int64)
    ends = tf.concat([pointers[:1], pointers[-1:]], 0)
    rising = (
        tf.reduce_all(pointers[1:] >= pointers[:-1])
        & tf.reduce_all(
            tf.equal(ends, tf.stack([tf.zeros([], tf.int64), tokens])[: tf.size(ends)])
        )
        & tf.equal(tf.size(table.sorted_gains, tf.int64), tokens)
    )
    return [
        Check(
            tf.equal(size, samples + 1),
            lambda: text(
                f"Stacked table {stack.name}: ",
                size,
                " row_pointers for ",
                samples,
                " samples; it needs one more than samples.",
            ),
        ),
        Check(
            rising,
            lambda: text(
                f"Stacked table {stack.name}: row_pointers must rise from 0 to the "
                "number of sorted_token_ids, which is that of sorted_gains. Pass on "
                "what the lookup gave."
            ),
        ),
    ]


def _check_tokens(
    plan: Plan, layout: Layout, stack: Stack, entries: Mapping[int, Entries]
) -> list[Check]:
    checks = []
    before = tf.zeros([], tf.int64)
    for f in stack.features:
        spec = plan.features[f]
        first = layout.row_offsets[f]
        end = first + plan.tables[spec.table].config.vocabulary_size
        tokens = entries[f].rows
        bad = (tokens < first) | (tokens >= end)

        def message(
            tokens: tf.Tensor = tokens,
            bad: tf.Tensor = bad,
            before: tf.Tensor = before,
            where: str = f", but it belongs to feature {spec.path}, whose table has "
            f"the ids [{first}, {end}). Pass on what the lookup gave.",
        ) -> tf.Tensor:
            at = tf.argmax(bad)
            return text(
                f"Stacked table {stack.name}: entry ",
                before + at,
                " has token id ",
                tokens[at],
                where,
            )

        checks.append(Check(~tf.reduce_any(bad), message))
        before += tf.size(tokens, tf.int64)
    return checks
