"""From an EmbeddingConfigSpec to TPUEmbedding: what then happens."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import tensorflow as tf
from interop.spec_cases import SGD, dict_spec, embedding, shared, spec, weighted
from steps import evaluate_on, train_on

import tpu_embedding as te
import tpu_embedding.keras
from tpu_embedding import interop


def test_parameters_that_no_table_needs_are_not_looked_at():
    own = interop.TableConfig(8, 2, optimization_parameters=SGD)
    for unneeded in (interop.MomentumParameters(0.1, 0.9), "sgd", None):
        made = dict_spec(tables={"t": own}, optimization_parameters=unneeded)
        assert made.adapt().optimizer is None
        assert (
            made.adapt().tables["t"].optimizer == spec(parameters=SGD).adapt().optimizer
        )


def test_a_multiplier_needs_the_parts():
    made = spec(experimental_gradient_multiplier_fn=lambda step: step * 2.0)
    with pytest.raises(NotImplementedError, match=r"spec\.adapt\(\)"):
        made.to_tpu_embedding()
    scaled = made.adapt().scale({"a": tf.ones([2]), "b": None}, 3.0)
    assert scaled["a"].numpy().tolist() == [6.0, 6.0]
    assert scaled["b"] is None
    for returned, error, text in (
        (tf.ones([2]), ValueError, r"must return a scalar.*shape \(2,\)"),
        (None, TypeError, "returned None of type NoneType. Does it lack a return"),
        ("2", TypeError, "returned '2' of type str"),
    ):
        bad = spec(experimental_gradient_multiplier_fn=lambda step, r=returned: r)
        with pytest.raises(error, match=text):
            bad.adapt().scale({"a": tf.ones([2])}, 3)


def test_the_rule_for_invalid_ids_is_that_of_every_table():
    start, a = constant(2)
    made = spec(embedding("a", combiner="sum", initializer=start))
    trained = made.to_tpu_embedding(invalid_ids="drop")
    found = evaluate_on(trained, {"a": tf.constant([[3, 8], [-1, 9]])})["a"]
    np.testing.assert_array_equal(found, [a[3], [0, 0]])
    (table,) = made.adapt(invalid_ids="mod").tables.values()
    assert table.invalid_ids == "mod"
    text = 'set invalid_ids="drop" or "mod" where the table or the embedding'
    with pytest.raises(tf.errors.InvalidArgumentError, match=text):
        made.to_tpu_embedding(invalid_ids=None).enqueue({"a": tf.constant([8])})
    with pytest.raises(ValueError, match="`invalid_ids` must be one of"):
        made.to_tpu_embedding(invalid_ids="wrap")


def test_columns_without_a_table_stay_with_the_parts():
    numeric = tf.feature_column.numeric_column("n")
    adapted = spec(numeric, embedding("a")).adapt()
    assert adapted.other_columns == (numeric,)
    assert adapted.features == ["a"]


def test_an_empty_profile_directory_is_none():
    assert spec(profile_data_directory="").to_tpu_embedding().embedding_tables


def constant(columns: int, rows: int = 8) -> Any:
    values = np.arange(rows * columns, dtype=np.float32).reshape(rows, columns)
    return tf.compat.v1.constant_initializer(values), values


def test_a_spec_of_columns_trains():
    start, a = constant(2)
    made = spec(
        embedding("a", initializer=start),
        interop.embedding_column(
            weighted("w", "wt"), 2, combiner="sum", initializer=start
        ),
        *shared("y", "z", combiner="sqrtn", initializer=start),
    )
    adapted, trained = made.adapt(), made.to_tpu_embedding()
    features = {
        "a": tf.constant([[0, 1], [2, 2]]),
        "w": tf.constant([[0, 1], [2, 2]]),
        "wt": tf.constant([[0.5, 1.0], [0.0, 2.0]]),
        "y": tf.constant([[0, 1], [2, 2]]),
        "z": tf.constant([3, 4]),
    }
    ids = {key: features[key] for key in adapted.features}
    trained.enqueue(ids, adapted.weights(features))
    activations = {k: v.numpy() for k, v in trained.dequeue().items()}
    np.testing.assert_allclose(activations["a"], [(a[0] + a[1]) / 2, a[2]])
    np.testing.assert_allclose(activations["w"], [a[0] / 2 + a[1], 2 * a[2]])
    root = np.sqrt(np.float32(2))
    # Two roundings: of the root's inverse and of the product.
    np.testing.assert_allclose(
        activations["y"], [(a[0] + a[1]) / root, 2 * a[2] / root], rtol=3e-7
    )
    trained.apply_gradients({k: tf.ones([2, 2]) for k in activations})
    tables = {t.name: v.numpy() for t, v in trained.embedding_tables.items()}
    moved = {0: 0.25, 1: 0.25, 2: 0.5}
    expected = a - [[moved.get(row, 0.0)] for row in range(8)]
    np.testing.assert_array_equal(tables["tbl_a"], expected)
    moved = {0: 0.25, 1: 0.5, 2: 1.0}
    expected = a - [[moved.get(row, 0.0)] for row in range(8)]
    np.testing.assert_array_equal(tables["tbl_w_weighted_by_wt"], expected)
    assert tables["tbl_y_z_shared_embedding"][3, 0] == 6 - 0.5


def step(trained: Any, ids: Any, gradient: Any) -> np.ndarray:
    """One step of the one feature "f"; its table."""
    train_on(trained, {"f": tf.constant(ids)}, {"f": tf.constant(gradient)})
    (table,) = trained.embedding_tables.values()
    return table.numpy()


def table(**options: Any) -> Any:
    start, _ = constant(1)
    return {"t": interop.TableConfig(8, 1, start, "sum", **options)}


def test_the_clipping_limit_acts_on_the_sum():
    made = dict_spec(tables=table(), clipping_limit=1.5).to_tpu_embedding()
    found = step(made, [3, 3, 4], [[1.0], [1.0], [-1.0]])
    assert found[:6, 0].tolist() == [0, 1, 2, 3 - 0.75, 4.5, 5]


def test_rates_of_one_table():
    made = dict_spec(tables=table(learning_rate=0.0)).to_tpu_embedding()
    assert step(made, [3], [[1.0]])[3, 0] == 3.0
    own = interop.StochasticGradientDescentParameters(2.0)
    made = dict_spec(
        tables=table(optimization_parameters=own), optimization_parameters=None
    )
    assert step(made.to_tpu_embedding(), [3], [[1.0]])[3, 0] == 1.0


def test_a_rate_function_gets_the_step_before_the_update():
    def rate(global_step: Any = None) -> Any:
        return tf.where(tf.equal(global_step, 0), 2.0, 0.0)

    made = dict_spec(tables=table(learning_rate_fn=rate)).to_tpu_embedding()
    assert step(made, [3], [[1.0]])[3, 0] == 1.0
    assert step(made, [3], [[1.0]])[3, 0] == 1.0
    variable = tf.Variable(0, trainable=False)
    made = dict_spec(tables=table(learning_rate_fn=rate)).to_tpu_embedding(variable)
    assert step(made, [3], [[1.0]])[3, 0] == 1.0
    assert step(made, [3], [[1.0]])[3, 0] == -1.0
    variable.assign(1)
    assert step(made, [3], [[1.0]])[3, 0] == -1.0


def test_one_function_of_two_tables_is_one_rate():
    calls = []

    def rate(global_step: Any) -> Any:
        calls.append(global_step)
        return 0.5

    made = spec(
        embedding("a", learning_rate_fn=rate), embedding("b", learning_rate_fn=rate)
    )
    trained = made.to_tpu_embedding()
    train_on(trained, {"a": tf.constant([1]), "b": tf.constant([1])}, tf.identity)
    assert len(calls) == 1


def test_sequences_pipelining_and_options_arrive():
    made = dict_spec(
        features={"f": interop.FeatureConfig("t", 3)},
        tables=table(),
        pipeline_execution_with_tensor_core=True,
        partition_strategy="mod",
    )
    adapted = made.adapt()
    assert adapted.pipelined
    assert adapted.partition_strategy == "mod"
    trained = made.to_tpu_embedding(check_numerics=True)
    for expected in (3.0, 3.0, 1.5):  # One step old; the first is fresh.
        trained.enqueue({"f": tf.ragged.constant([[3]])})
        activations = trained.dequeue()["f"].numpy()
        assert activations.tolist() == [[[expected], [0.0], [0.0]]]
        trained.apply_gradients({"f": 3 * tf.ones([1, 3, 1])})
    with pytest.raises(tf.errors.InvalidArgumentError, match="finite"):
        step(trained, [[3]], [[[np.nan]] * 3])


def test_initializers_of_the_shape_alone():
    made = dict_spec(
        tables={"t": interop.TableConfig(4, 1, lambda shape: np.ones(shape) + 0)}
    )
    trained = made.to_tpu_embedding()
    trained.build()
    (found,) = trained.embedding_tables.values()
    assert found.numpy().tolist() == [[1.0]] * 4


def test_no_combiner_is_a_sum_of_one():
    made = dict_spec(tables={"t": interop.TableConfig(4, 1, None, None)})
    (config,) = made.adapt().tables.values()
    assert config.combiner == "sum"


def test_a_profile_directory_is_refused():
    with pytest.raises(NotImplementedError, match="`profile_data_directory`"):
        spec(profile_data_directory="profiles", parameters=SGD).to_tpu_embedding()


def test_frequencies_are_counted_in_global_steps():
    parameters = interop.FrequencyEstimatorParameters(0.25, 8.0, 4.0, 0.0)
    made = dict_spec(
        tables={"t": interop.TableConfig(4, 1, tf.compat.v1.ones_initializer())},
        optimization_parameters=parameters,
    )
    variable = tf.Variable(3, trainable=False)
    for given, expected in ((variable, 1.5), (None, 0.75)):  # Steps 3 and 0.
        assert step(made.to_tpu_embedding(given), [2], [[0.0]])[2, 0] == expected


def test_a_spec_in_the_keras_layer():
    start, a = constant(1)
    adapted = dict_spec(
        features={"f": interop.FeatureConfig("t", weight_key="w")},
        tables={"t": interop.TableConfig(8, 1, start, "sum")},
        optimization_parameters=interop.MomentumParameters(0.5, 0.5),
    ).adapt()
    layer = te.keras.TPUEmbedding(adapted.feature_config, adapted.optimizer)
    features = {"f": tf.constant([[1, 2]]), "w": tf.constant([[1.0, 3.0]])}
    ids = {key: features[key] for key in adapted.features}
    with pytest.raises(
        ValueError, match="The weights 'w' of feature 'f' are not among"
    ):
        adapted.weights(ids)
    for number in range(2):
        with tf.GradientTape() as tape:
            found = layer(ids, adapted.weights(features))["f"]
            loss = tf.reduce_sum(found)
        if not number:
            assert found.numpy() == a[1] + 3 * a[2]
        tape.gradient(loss, layer.trainable_variables)
    (table,) = layer.embedding_tables.values()
    # Gradients 1 and 3; the steps are 0.5 and 0.75 of them.
    assert table.numpy()[:4, 0].tolist() == [0, 1 - 1.25, 2 - 3.75, 3]
