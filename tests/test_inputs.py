"""Properties of inputs: any batch gives what the slow reading of semantics.md gives."""

from __future__ import annotations

from typing import Any

import hypothesis
import numpy as np
import tensorflow as tf
from hypothesis import strategies as st
from reference import lookup as reference

import tpu_embedding as te
from tpu_embedding.inputs import op_inputs, to_id_batch

V, D = 7, 3
TABLE = np.arange(V * D, dtype=np.float32).reshape(V, D) / 8 - 1

ids = st.integers(0, V - 1)
rows = st.lists(st.lists(ids, max_size=4), max_size=5)
dtypes = st.sampled_from([tf.int32, tf.int64])
combiners = st.sampled_from(["sum", "mean", "sqrtn"])


@st.composite
def batches(draw: st.DrawFn) -> Any:
    """A dense, sparse or ragged batch of rank 2, and weights or None."""
    ragged = tf.ragged.constant(draw(rows), dtype=draw(dtypes), ragged_rank=1)
    kind = draw(st.sampled_from(["dense", "sparse", "ragged"]))
    # Positive powers of two: no divisor comes near 0.
    powers = st.integers(-3, 3)
    count = int(tf.size(ragged.flat_values))
    drawn = draw(st.lists(powers, min_size=count, max_size=count))
    weights = ragged.with_flat_values(tf.constant([2.0**p for p in drawn], tf.float32))
    if kind == "sparse":
        ragged, weights = ragged.to_sparse(), weights.to_sparse()
    elif kind == "dense":
        ragged, weights = ragged.to_tensor(), weights.to_tensor(default_value=1.0)
    return ragged, weights if draw(st.booleans()) else None


@hypothesis.given(batches(), combiners, st.integers(0, 3))
def test_any_batch(batch: Any, combiner: str, length: int) -> None:
    features, weights = batch
    config = te.TableConfig(V, D, lambda shape, dtype: TABLE, combiner=combiner)
    embedding = te.TPUEmbedding(te.FeatureConfig(config, length), None)
    embedding.enqueue(features, weights, training=False)
    activations = embedding.dequeue().numpy()
    samples = reference.samples_of(features, weights, length)
    expected = reference.lookup(TABLE, samples, combiner)
    # At most 4 terms of at most 8 * 2, and as many roundings in each gain.
    np.testing.assert_allclose(
        activations,
        np.reshape(expected, activations.shape),
        rtol=0,
        atol=64 * 8 * 2**-24,
    )


def test_an_op_gets_no_tensor_that_it_can_do_without() -> None:
    """TensorFlow's cost of a step grows with the inputs of its ops."""
    ragged = tf.ragged.constant([[1, 2], [3]], dtype=tf.int64)
    sparse = ragged.to_sparse()
    weights = ragged.with_flat_values(tf.ones([3]))
    values = [tf.constant([1, 2]), tf.constant([[1, 2]]), ragged, sparse, ragged]
    given = [None, tf.ones([1, 2]), weights, None, None]
    batches = [
        to_id_batch(str(n), *both)
        for n, both in enumerate(zip(values, given, strict=True))
    ]
    # The ids of each, three structures, one shape, and two with weights.
    assert len(op_inputs(batches)) == 5 + 3 + 1 + 2
    shapes = [batch.shape.numpy().tolist() for batch in batches]
    assert shapes == [[2], [1, 2], [2], [2, 2], [2]]
