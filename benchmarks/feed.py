"""Batches, taken from an iterator inside the tf.function, and gradients.

A tf.function that is called with 26 tensors costs a millisecond of Python, whatever it
does with them; training loops take the batch from a tf.data iterator inside instead.
Ours and all TensorFlow peers are fed alike, and given their gradients alike.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import tensorflow as tf

from benchmarks.scenarios import Scenario, jagged, weights


def dense(batches: Sequence[Sequence[np.ndarray]]) -> Callable[[], list[tf.Tensor]]:
    """Returns the batches in turn, as dense tensors; call it in a tf.function."""
    if any(np.any(ids < 0) for ids in batches[0]):
        raise NotImplementedError("Bags of several sizes make no dense tensor.")
    iterator = _iterator([tuple(map(tf.constant, batch)) for batch in batches])
    return lambda: list(iterator.get_next())


def sparse(
    batches: Sequence[Sequence[np.ndarray]],
) -> Callable[[], list[tf.SparseTensor]]:
    """Returns the batches in turn, as SparseTensors; call it in a tf.function.

    A dataset would pack SparseTensors in each step, so it gets only their parts.
    """
    parts = [
        tuple(part for ids in b for part in (np.argwhere(ids >= 0), ids[ids >= 0]))
        for b in batches
    ]
    iterator = _iterator(parts)

    def get_next() -> list[tf.SparseTensor]:
        flat = iterator.get_next()
        shapes = [ids.shape for ids in batches[0]]
        pairs = zip(flat[::2], flat[1::2], shapes, strict=True)
        return [tf.SparseTensor(*pair) for pair in pairs]

    return get_next


def ragged(
    batches: Sequence[Sequence[np.ndarray]], *, weighted: bool = False
) -> Callable[[], tuple[list[tf.RaggedTensor], list[tf.RaggedTensor] | None]]:
    """Returns the batches in turn, as RaggedTensors with their weights or None."""
    parts = []
    for batch in batches:
        values, splits = zip(*(jagged([ids]) for ids in batch), strict=True)
        parts.append((splits, values, tuple(map(weights, values)) if weighted else ()))
    iterator = _iterator(parts)
    kind: Any = tf.RaggedTensor

    def get_next() -> tuple[list[tf.RaggedTensor], list[tf.RaggedTensor] | None]:
        splits, *flat = iterator.get_next()
        ids, given = (
            [
                kind.from_row_splits(v, s, validate=False)
                for v, s in zip(values, splits, strict=False)
            ]
            for values in flat
        )
        return ids, given or None

    return get_next


def gradients(scenario: Scenario) -> list[tf.Tensor]:
    """Returns gradients of each feature's activations, in place of a dense part's.

    Each feature has its own: a shared one would stay in the caches.
    """
    shape = [scenario.batch_size, scenario.dim]
    return [tf.ones(shape) for _ in scenario.rows]


def _iterator(batches: Sequence[tuple[Any, ...]]) -> tf.data.Iterator:
    data = [tf.data.Dataset.from_tensors(batch) for batch in batches]
    joined = data[0]
    for one in data[1:]:
        joined = joined.concatenate(one)
    return iter(joined.repeat())
