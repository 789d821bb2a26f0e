"""The host engine sorts ids by row before an update: no entry is lost or moved."""

from __future__ import annotations

import hypothesis
import hypothesis.strategies as st
import numpy as np
import tensorflow as tf
from steps import train_on

import tpu_embedding as te

# Row counts at the digits of a radix sort, and beside them.
ROWS = st.sampled_from([1, 2, 255, 256, 257, 2047, 2048, 2049, 65536, 70001])


@st.composite
def ids_of_features(draw: st.DrawFn) -> tuple[int, list[np.ndarray]]:
    """A table's row count, and one or two features' ids: few rows, or all of them."""
    rows = draw(ROWS)
    seed = draw(st.integers(0, 2**32 - 1))
    rng = np.random.default_rng(seed)
    sizes = draw(st.lists(st.integers(0, 5000), min_size=1, max_size=2))
    spread = draw(st.sampled_from([1, 3, rows]))
    chosen = rng.integers(0, rows, spread)
    dtype = draw(st.sampled_from([np.int32, np.int64]))
    return rows, [rng.choice(chosen, size).astype(dtype) for size in sizes]


@hypothesis.settings(deadline=None, max_examples=60)
@hypothesis.given(ids_of_features())
def test_every_entry_reaches_its_row(drawn: tuple[int, list[np.ndarray]]) -> None:
    """Whole numbers add up without rounding, so the table is the same to the bit."""
    rows, features = drawn
    config = te.TableConfig(rows, 1, tf.zeros_initializer(), combiner="sum")
    embedding = te.TPUEmbedding([te.FeatureConfig(config) for _ in features], te.SGD(1))
    expected = np.zeros([rows, 1], np.float32)
    gradients = []
    for ids in features:
        # Each sample its own number, so that swapped samples show.
        gradient = (np.arange(ids.size, dtype=np.float32) % 1021)[:, np.newaxis]
        np.subtract.at(expected, ids, gradient)
        gradients.append(tf.constant(gradient))
    train_on(embedding, [tf.constant(ids) for ids in features], gradients)
    np.testing.assert_array_equal(embedding.embedding_tables[config], expected)
