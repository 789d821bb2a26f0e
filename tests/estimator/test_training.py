"""TPUEstimator: what each option of the spec does to the numbers."""

from __future__ import annotations

import pathlib
from typing import Any

import numpy as np
import pytest
import tensorflow as tf
from estimator.estimator_models import (
    batches,
    dense,
    linear_model,
    make_estimator,
    sparse,
    v1,
    variables,
)
from interop.spec_cases import SGD, dict_spec, embedding, sequence, shared, weighted

from tpu_embedding import estimator, interop
from tpu_embedding.compat.estimator.tables import EmbeddingTables

A = "dense_features/a_embedding/embedding_weights"
ZEROS = {"initializer": v1.zeros_initializer()}
SUM = {"combiner": "sum", **ZEROS}
ONE_ID = {"a": sparse([[3], [3], [4], [5]])}  # Row 3 twice; each gradient is 1.


def run(
    folder: pathlib.Path,
    columns: list[Any],
    features: Any = None,
    steps: int = 1,
    **options: Any,
) -> Any:
    """Trains a linear model over columns; the estimator."""
    spec = interop.EmbeddingConfigSpec(
        columns, **{"optimization_parameters": SGD, **options}
    )
    trained = make_estimator(linear_model(columns), folder, spec)
    return trained.train(batches(features or ONE_ID), steps=steps)


def rows(trained: Any, name: str = A) -> list[float]:
    return trained.get_variable_value(name)[:, 0].tolist()


def test_duplicates_are_summed_before_the_limit(tmp_path: pathlib.Path):
    trained = run(tmp_path, [embedding("a", 1, **SUM)], clipping_limit=1.5)
    assert rows(trained) == [0, 0, 0, -0.75, -0.5, -0.5, 0, 0]


def test_the_portable_engine_is_refused(
    tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setenv("TPU_EMBEDDING_ENGINE", "portable")
    with pytest.raises(NotImplementedError, match="TPUEstimator does not run on the"):
        run(tmp_path, [embedding("a", 1, **SUM)], clipping_limit=1.5)


def test_the_multiplier_comes_before_the_limit(tmp_path: pathlib.Path):
    seen = []

    def multiplier(step: Any) -> Any:
        seen.append(step)
        return tf.cast(step + 1, tf.float32) * 0.5

    trained = run(
        tmp_path,
        [embedding("a", 1, **SUM)],
        steps=2,
        clipping_limit=1.5,
        experimental_gradient_multiplier_fn=multiplier,
    )
    # Steps 0 and 1: gradients times 0.5 and 1; row 3 has 1.0, then 2.0 cut to 1.5.
    assert rows(trained) == [0, 0, 0, -1.25, -0.75, -0.75, 0, 0]
    assert len(seen) == 1  # Traced once.


def test_rate_functions_get_the_step_before_the_update(tmp_path: pathlib.Path):
    def rate(step: Any) -> Any:
        return tf.where(tf.equal(step, 0), 2.0, 0.0)

    columns = [
        embedding("a", 1, learning_rate_fn=rate, **SUM),
        embedding("b", 1, **SUM),
    ]
    features = {**ONE_ID, "b": ONE_ID["a"]}
    trained = run(tmp_path, columns, features)
    once = [0, 0, 0, -4, -2, -2, 0, 0]
    assert rows(trained) == once
    trained.train(batches(features), steps=1)  # Step 1: the rate is 0 from now on.
    assert rows(trained) == once
    b = "dense_features/b_embedding/embedding_weights"
    assert rows(trained, b) == [0, 0, 0, -2, -1, -1, 0, 0]


def quadratic_model(column: Any) -> Any:
    """The loss is sum(activation^2) / 2: the gradient is the activation itself."""

    def model_fn(features: Any, mode: str) -> Any:
        out = estimator.dense_features(features, [column])
        loss = tf.reduce_sum(out**2) / 2
        step = v1.train.get_global_step()
        optimizer = v1.train.GradientDescentOptimizer(1.0)
        train_op = optimizer.minimize(loss, step)
        return estimator.TPUEstimatorSpec(mode, out, loss, train_op)

    return model_fn


@pytest.mark.parametrize("pipelined", [False, True])
def test_pipelining_is_one_step_old_and_comes_home(
    tmp_path: pathlib.Path, pipelined: bool
):
    column = embedding("a", 1, combiner="sum", initializer=v1.ones_initializer())
    spec = interop.EmbeddingConfigSpec(
        [column], SGD, pipeline_execution_with_tensor_core=pipelined
    )
    features = {"a": sparse([[3]])}
    trained = make_estimator(quadratic_model(column), tmp_path, spec)
    trained.train(batches(features), steps=3)
    # w1 = 1 - 0.5 * 1; pipelined: w2 = w1 - 0.5 * w0, w3 = w2 - 0.5 * w1.
    expected = (0.0 - 0.25) if pipelined else 0.125
    assert trained.get_variable_value(A)[3, 0] == expected
    # Each call of train begins fresh, and the update of its end is saved.
    trained.train(batches(features), steps=1)
    assert trained.get_variable_value(A)[3, 0] == expected / 2


def test_pipelined_rates_are_those_of_their_own_step(tmp_path: pathlib.Path):
    def rate(step: Any) -> Any:
        return tf.cast(step, tf.float32)

    trained = run(
        tmp_path,
        [embedding("a", 1, learning_rate_fn=rate, **SUM)],
        {"a": sparse([[3]])},
        steps=3,
        pipeline_execution_with_tensor_core=True,
    )
    assert rows(trained)[3] == -(0 + 1 + 2)


def test_dense_ids_of_0_are_no_entries(tmp_path: pathlib.Path):
    features = {"a": dense([[0, 3], [0, 0], [3, 3]])}
    column = interop.embedding_column(
        tf.feature_column.categorical_column_with_identity("a", 8), 1, **SUM
    )
    assert rows(run(tmp_path, [column], features)) == [0, 0, 0, -1.5, 0, 0, 0, 0]


def test_weights_shared_tables_and_names(tmp_path: pathlib.Path):
    column = interop.embedding_column(weighted("w", "wt"), 1, **SUM)
    columns = [column, *shared("y", "z", dimension=1, **SUM)]
    features = {
        "w": sparse([[1, 2], [2]]),
        "wt": sparse([[2, 4], [-6]]),  # Integers, and a negative one.
        "y": sparse([[1], [1]]),
        "z": sparse([[1], [2]]),
    }
    trained = run(tmp_path, columns, features)
    w = "dense_features/w_weighted_by_wt_embedding/embedding_weights"
    assert rows(trained, w) == [0, -1, 1, 0, 0, 0, 0, 0]
    assert rows(trained, "y_z_shared_embedding")[:4] == [0, -1.5, -0.5, 0]
    # No dummies and nothing else: the file fits runs with use_tpu=False.
    assert set(variables(trained)) == {w, "y_z_shared_embedding", "bias", "global_step"}


def test_empty_samples_touch_row_0_as_on_a_cpu(tmp_path: pathlib.Path):
    ones = v1.ones_initializer()
    features = {"a": sparse([[3], [], [4]])}
    found = {}
    for safe in (True, False):
        column = embedding("a", 1, initializer=ones, use_safe_embedding_lookup=safe)
        parameters = interop.FtrlParameters(0.5)
        folder = tmp_path / str(safe)
        trained = run(folder, [column], features, optimization_parameters=parameters)
        found[safe] = rows(trained)[0]
    assert found == {True: 0.0, False: 1.0}


@pytest.mark.parametrize("safe", [True, False])
def test_activations_keep_the_static_batch_size(safe: bool, tmp_path: pathlib.Path):
    column = embedding("a", 2, use_safe_embedding_lookup=safe)
    shapes = []

    def model_fn(features: Any, labels: Any, mode: str) -> Any:
        shapes.append(features["a"].shape.as_list())
        return linear_model([column])(features, labels, mode)

    spec = interop.EmbeddingConfigSpec([column], optimization_parameters=SGD)
    trained = make_estimator(model_fn, tmp_path, spec)
    ids = tf.constant([[1, 2, 3], [4, 5, 6]], tf.int64)
    trained.train(batches({"a": dense(ids)}), steps=1)
    assert shapes == [[2, 2]]


def sequence_model(column: Any) -> Any:
    def model_fn(features: Any, mode: str) -> Any:
        out, lengths = estimator.sequence_features(features, [column])
        positions = tf.cast(tf.range(tf.shape(out)[1]) + 1, tf.float32)
        loss = tf.reduce_sum(out * positions[tf.newaxis, :, tf.newaxis])
        train_op = None
        if mode == estimator.ModeKeys.TRAIN:
            optimizer = v1.train.GradientDescentOptimizer(1.0)
            train_op = optimizer.minimize(loss, v1.train.get_global_step())
        predictions = {"out": out, "lengths": lengths}
        return estimator.TPUEstimatorSpec(mode, predictions, loss, train_op)

    return model_fn


ROWS = v1.constant_initializer(np.arange(8.0))
SEQUENCES = {
    "gap": ([[1, None, 2], [3]], "mean", [[1, 0], [3, 0]], [2, 1]),
    "long": ([[1, 2, 3], [4, 5]], "mean", [[1, 2], [4, 5]], [2, 2]),
    "sum": ([[[1, 2], [3]], [[4]]], "sum", [[3, 3], [4, 0]], [2, 1]),
    "mean": ([[[1, 2], [3]], [[4]]], "mean", [[1.5, 3], [4, 0]], [2, 1]),
    "empty": ([[], [4]], "mean", [[0, 0], [4, 0]], [0, 1]),
}


@pytest.mark.parametrize("case", SEQUENCES)
def test_sequences(case: str, tmp_path: pathlib.Path):
    entries, combiner, expected, lengths = SEQUENCES[case]
    column = interop.embedding_column(
        sequence("s"), 1, combiner, ROWS, max_sequence_length=2
    )
    spec = interop.EmbeddingConfigSpec([column], SGD)
    trained = make_estimator(sequence_model(column), tmp_path, spec)
    found = trained.predict(
        batches({"s": sparse(entries)}), yield_single_examples=False
    )
    batch = next(found)
    found.close()
    assert batch["out"][:, :, 0].tolist() == expected
    assert batch["lengths"].tolist() == lengths


def test_sequences_train(tmp_path: pathlib.Path):
    column = interop.embedding_column(
        sequence("s"), 1, "mean", v1.zeros_initializer(), max_sequence_length=2
    )
    spec = interop.EmbeddingConfigSpec([column], SGD)
    trained = make_estimator(sequence_model(column), tmp_path, spec)
    trained.train(batches({"s": sparse([[1, 2, 3], [2]])}), steps=1)
    name = "sequence_features/s_embedding/embedding_weights"
    # Position 0 has gradient 1, position 1 gradient 2; row 3 is cut off.
    assert rows(trained, name)[:4] == [0, -0.5, -1.5, 0]


def test_tables_by_dict(tmp_path: pathlib.Path):
    table = interop.TableConfig(8, 1, v1.zeros_initializer(), "sum")
    spec = dict_spec(
        tables={"t": table},
        features={"f": interop.FeatureConfig("t")},
        optimization_parameters=interop.AdagradParameters(0.5),
    )

    def model_fn(features: Any, mode: str) -> Any:
        loss = tf.reduce_sum(features["f"])
        optimizer = v1.train.GradientDescentOptimizer(1.0)
        train_op = optimizer.minimize(loss, v1.train.get_global_step())
        return estimator.TPUEstimatorSpec(mode, loss=loss, train_op=train_op)

    trained = make_estimator(model_fn, tmp_path, spec)
    trained.train(batches({"f": sparse([[3]])}), steps=1)
    found = variables(trained)
    assert set(found) == {"t", "t/Adagrad", "global_step"}
    # float32: 0.1 + 1, its root, a quotient; three roundings.
    np.testing.assert_allclose(found["t"][3, 0], -0.5 / 1.1**0.5, rtol=4e-7)


def test_one_id_without_a_combiner(tmp_path: pathlib.Path):
    table = interop.TableConfig(8, 1, v1.zeros_initializer(), None)
    trained = make_estimator(linear_model([]), tmp_path, dict_spec(tables={"t": table}))
    trained.train(batches({"f": dense([0, 3])}), steps=1)
    assert rows(trained, "t")[:4] == [-0.5, 0, 0, -0.5]  # Id 0 is one.


def test_checkpoints_go_to_and_fro(tmp_path: pathlib.Path):
    columns = [embedding("a", 1, **SUM)]
    parameters = interop.MomentumParameters(1.0, 0.7, use_nesterov=True)
    spec = interop.EmbeddingConfigSpec(columns, parameters)

    def model_fn(features: Any, mode: str) -> Any:
        loss = tf.reduce_sum(estimator.dense_features(features, columns))
        optimizer = v1.train.MomentumOptimizer(1.0, 0.7, use_nesterov=True)
        train_op = optimizer.minimize(loss, v1.train.get_global_step())
        return estimator.TPUEstimatorSpec(mode, loss=loss, train_op=train_op)

    found = {}
    for order, steps in (((True, False, True), 1), ((False,), 3)):
        folder = tmp_path / str(order[0])
        for use_tpu in order:
            trained = make_estimator(model_fn, folder, spec, use_tpu=use_tpu)
            trained.train(batches(ONE_ID), steps=steps)
        found[order[0]] = variables(trained)
    assert set(found[True]) == set(found[False])
    for name, value in found[False].items():
        # Three steps of two products and sums in float32.
        np.testing.assert_allclose(found[True][name], value, rtol=1e-6)


def test_tables_take_no_name_from_the_model(tmp_path: pathlib.Path):
    columns = [embedding("a", 1, **SUM)]
    spec = interop.EmbeddingConfigSpec(columns, SGD)
    trained = make_estimator(linear_model(columns, bias="tbl_a"), tmp_path, spec)
    trained.train(batches(ONE_ID), steps=1)
    assert set(variables(trained)) == {A, "tbl_a", "global_step"}
    assert trained.get_variable_value("tbl_a") == -1.0


@pytest.mark.parametrize("pipelined", [False, True])
def test_order_of_the_ops(pipelined: bool):
    """What would otherwise be a race: it is in the graph, whoever wins on the day."""
    with tf.Graph().as_default():
        v1.train.get_or_create_global_step()
        options = {"pipeline_execution_with_tensor_core": pipelined}
        tables = EmbeddingTables(dict_spec(**options), training=True)
        train_op = tf.no_op()
        activations = tables.activations({"f": tf.constant([[1]])})["f"]
        read = tables._read_step.op
        assert read in before(activations.op)
        update = tables.train_op(train_op)
        assert {read, train_op, tables._looked_up.value.op} <= before(update)
        assert (tables.flush is not None) is pipelined
        if pipelined:
            applied = [op for op in before(update) if op.type in ("If", "StatelessIf")]
            assert tables._looked_up.value.op in before(applied[0])


def before(op: Any) -> set[Any]:
    """All ops that come before one, by data or by control."""
    found: set[Any] = set()
    waiting = [op]
    while waiting:
        current = waiting.pop()
        inputs = {*current.control_inputs, *(t.op for t in current.inputs)}
        waiting += inputs - found
        found |= inputs
    return found
