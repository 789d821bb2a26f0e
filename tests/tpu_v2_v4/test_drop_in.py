"""Details of TensorFlow's TPUEmbedding that programs written for it depend on."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import tensorflow as tf

import tpu_embedding as te
from tpu_embedding.testing import SoftwareTPUStrategy


def make(**arguments: Any) -> tuple[te.TPUEmbedding, SoftwareTPUStrategy]:
    strategy = SoftwareTPUStrategy("v4", 2, meeting_timeout=20)
    table = te.TableConfig(8, 2, te.RowIdInitializer(), name="films")
    with strategy.scope():
        optimizer = te.Adagrad(1.0, **arguments)
        return te.TPUEmbedding(
            te.FeatureConfig(table, name="film"), optimizer
        ), strategy


@pytest.mark.parametrize("inside", [False, True])
def test_ids_that_were_fetched_to_the_tpu_are_refused(inside: bool) -> None:
    embedding, strategy = make()
    ids = tf.data.Dataset.from_tensors(tf.constant([1, 2])).repeat()

    def evaluate(options: Any) -> Any:
        iterator = iter(
            strategy.distribute_datasets_from_function(lambda _: ids, options)
        )

        @tf.function
        def call() -> Any:
            own = next(iterator)

            def step(own: Any) -> Any:
                if inside:
                    embedding.enqueue(own, training=False)
                return embedding.dequeue()

            if not inside:
                embedding.enqueue(own, training=False)
            return strategy.run(step, args=(own,))

        return call()

    embedding.build(2)
    with pytest.raises(ValueError, match=r"not on .*CPU:1, .*fetch_to_device=False"):
        evaluate(None)
    options = tf.distribute.InputOptions(experimental_fetch_to_device=False)
    for own in evaluate(options).values:
        np.testing.assert_array_equal(own, [[1, 1], [2, 2]])


def test_slots_that_the_user_creates() -> None:
    def create(table: Any, names: Any, initializers: Any) -> dict[str, Any]:
        assert table.shape == (8, 2)
        (value,) = (initializer((1,)) for initializer in initializers)
        np.testing.assert_allclose(value, 0.5)
        zeros = tf.zeros(table.shape)
        return {name: tf.Variable(zeros, trainable=False) for name in names}

    embedding, strategy = make(
        initial_accumulator_value=0.5, slot_variable_creation_fn=create
    )

    def step() -> None:
        embedding.dequeue()
        embedding.apply_gradients(tf.constant([[3.0, -2.0], [0.0, 0.0]]))

    embedding.enqueue(tf.constant([5, 6]))
    strategy.run(step)
    (arrays,) = embedding.core.checkpoint_rows().values()
    # The accumulator starts at 0, so that the first step is of length 1.
    np.testing.assert_allclose(arrays["accumulators"].numpy()[5], [36, 16])
    np.testing.assert_allclose(arrays["parameters"].numpy()[5], [4, 6])
