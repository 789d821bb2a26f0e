"""TPUEstimator beyond training: evaluation, prediction, export, warm start, hooks."""

from __future__ import annotations

import itertools
import pathlib
from typing import Any

import keras
import numpy as np
import pytest
import tensorflow as tf
from absl import logging
from estimator.estimator_models import (
    batches,
    dense,
    linear_model,
    make_estimator,
    sparse,
    v1,
    variables,
)
from interop.spec_cases import SGD, embedding, fc, ids, shared, weighted

from tpu_embedding import estimator, interop
from tpu_embedding.compat.estimator import private_tensorflow

ROWS = v1.constant_initializer(np.arange(8.0))
FEATURES = {
    "a": sparse([[3], [4, 5]]),
    "y": sparse([[1], [2]]),
    "z": sparse([[1], [2]]),
}
A = "dense_features/a_embedding/embedding_weights"


def columns() -> list[Any]:
    start = {"initializer": ROWS}
    return [embedding("a", 1, **start), *shared("y", "z", dimension=1, **start)]


def make(folder: pathlib.Path, model: Any = None, **options: Any) -> Any:
    made = columns()
    spec = interop.EmbeddingConfigSpec(made, SGD)
    return make_estimator((model or linear_model)(made), folder, spec, **options)


def one(trained: Any, **options: Any) -> Any:
    """The first prediction."""
    found = trained.predict(batches(FEATURES), **options)
    first = next(found)
    found.close()
    return first


@pytest.mark.parametrize("use_tpu", [False, True])
def test_without_a_checkpoint_initial_values_are_used(
    tmp_path: pathlib.Path, use_tpu: bool
):
    fresh = make(tmp_path, use_tpu=use_tpu)
    assert fresh.latest_checkpoint() is None
    metrics = fresh.evaluate(batches(FEATURES), steps=2, name="x")
    assert metrics == {"loss": 3 + 4.5 + 2 * 3, "global_step": 0}
    assert fresh.eval_dir("x") == str(tmp_path / "eval_x")
    assert list(pathlib.Path(fresh.eval_dir("x")).iterdir())
    assert one(fresh)["out"].tolist() == [3, 1, 1]


def test_prediction_leaves_no_graph_behind(tmp_path: pathlib.Path):
    found = make(tmp_path).predict(batches(FEATURES))
    next(found)
    assert tf.executing_eagerly()
    found.close()


def test_predictions_as_they_are(tmp_path: pathlib.Path):
    trained = make(tmp_path)
    batch = one(trained, yield_single_examples=False, predict_keys="out")
    assert batch["out"].tolist() == [[3, 1, 1], [4.5, 2, 2]]


def test_a_finite_input_ends_everything(tmp_path: pathlib.Path):
    def input_fn() -> Any:
        tensors = {key: tf.SparseTensor(*value) for key, value in FEATURES.items()}
        return tf.data.Dataset.from_tensors(tensors).repeat(3)

    trained = make(tmp_path).train(input_fn)
    assert trained.get_variable_value("global_step") == 3
    assert len(list(trained.predict(input_fn))) == 6
    assert trained.evaluate(input_fn)["global_step"] == 3
    assert trained.train(input_fn, max_steps=3) is trained
    assert trained.get_variable_value("global_step") == 3


def test_inputs_as_tensors_and_params(tmp_path: pathlib.Path):
    seen = {}

    def input_fn(params: Any, mode: str, config: Any) -> Any:
        seen[mode] = (params["batch_size"], params["use_tpu"], params["p"], config)
        return {key: tf.SparseTensor(*v) for key, v in FEATURES.items()}, None

    sizes = {"train_batch_size": 2, "eval_batch_size": 3, "eval_on_tpu": False}
    trained = make(tmp_path, _with_params(seen), params={"p": 7}, **sizes)
    trained.train(input_fn, steps=1)
    trained.evaluate(input_fn, steps=1)
    assert seen["train"] == (2, True, 7, trained.config)
    assert seen["eval"] == (3, False, 7, trained.config)
    assert seen["model train"]["use_tpu"]
    assert not seen["model eval"]["use_tpu"]
    assert trained.params == {"p": 7}


def _with_params(seen: dict[str, Any]) -> Any:
    def model(made: list[Any]) -> Any:
        def model_fn(features: Any, labels: Any, mode: str, params: Any) -> Any:
            seen[f"model {mode}"] = params
            return linear_model(made)(features, labels, mode)

        return model_fn

    return model


@pytest.mark.parametrize("use_tpu", [False, True])
def test_export(tmp_path: pathlib.Path, use_tpu: bool):
    trained = make(tmp_path / "model", use_tpu=use_tpu)
    trained.train(batches(FEATURES), steps=1)
    expected = one(trained, yield_single_examples=False)["out"]
    examples = fc.make_parse_example_spec(columns())
    (tmp_path / "note").write_text("kept")
    folder = trained.export_saved_model(
        tmp_path / "export",
        estimator.build_parsing_serving_input_receiver_fn(examples),
        assets_extra={"more/note": str(tmp_path / "note")},
    )
    assert pathlib.Path(folder, "assets.extra", "more", "note").read_text() == "kept"
    loaded = tf.saved_model.load(folder)
    found = loaded.signatures["serving_default"](examples=_examples())
    np.testing.assert_array_equal(found["out"], expected)


def _examples() -> tf.Tensor:
    rows = ({"a": [3], "y": [1], "z": [1]}, {"a": [4, 5], "y": [2], "z": [2]})
    features = [
        {
            key: tf.train.Feature(int64_list=tf.train.Int64List(value=value))
            for key, value in row.items()
        }
        for row in rows
    ]
    made = [tf.train.Example(features=tf.train.Features(feature=f)) for f in features]
    return tf.constant([example.SerializeToString() for example in made])


_CLASSIC = ("regress", "classify")


def test_the_context_of_the_params_on_tpus(tmp_path: pathlib.Path):
    deployments = []

    def input_fn(params: dict[str, Any]) -> Any:
        context = params["context"]
        deployments.append(context.current_input_fn_deployment())
        with pytest.raises(NotImplementedError, match="device_assignment` is not"):
            _ = context.device_assignment
        return batches(FEATURES)()

    make(tmp_path, linear_model, use_tpu=True).evaluate(input_fn, steps=1)
    assert deployments == [("/device:CPU:0", 0, 1, 1)]


def test_a_use_tpu_of_the_params_gives_way(tmp_path: pathlib.Path):
    """Old models hand all of their flags over as params, this one among them."""
    seen = []

    def input_fn(params: dict[str, Any]) -> Any:
        seen.append((params["use_tpu"], params["depth"]))
        return batches(FEATURES)()

    def model(made: list[Any]) -> Any:
        inner = linear_model(made)
        return lambda features, labels, mode, params: inner(features, labels, mode)

    flags = {"use_tpu": False, "depth": 3}
    make(tmp_path, model, params=flags, use_tpu=True).evaluate(input_fn, steps=1)
    assert seen == [(True, 3)]


def test_export_of_named_outputs(tmp_path: pathlib.Path):
    made = [interop.embedding_column(ids("a"), 1, initializer=ROWS)]

    def model_fn(features: Any, mode: str) -> Any:
        out = estimator.dense_features(features, made)
        outputs = {
            "serving_default": estimator.PredictOutput(out),
            "regress": estimator.RegressionOutput(out[:, 0]),
            "classify": estimator.ClassificationOutput(scores=out),
        }
        step = v1.assign_add(v1.train.get_global_step(), 1)
        loss = tf.reduce_sum(out)
        return estimator.TPUEstimatorSpec(mode, out, loss, step, export_outputs=outputs)

    spec = interop.EmbeddingConfigSpec(made, SGD)
    trained = make_estimator(model_fn, tmp_path, spec)
    trained.train(batches({"a": dense([[1]])}), steps=1)
    examples = fc.make_parse_example_spec(made)
    parsing = estimator.build_parsing_serving_input_receiver_fn(examples)
    folder = trained.export_saved_model(tmp_path / "parsing", parsing)
    loaded = tf.saved_model.load(folder)
    found = {name: loaded.signatures[name](inputs=_examples()) for name in _CLASSIC}
    assert found["regress"]["outputs"].numpy().tolist() == [3.0, 4.5]
    assert found["classify"]["scores"].numpy().tolist() == [[3.0], [4.5]]
    found = loaded.signatures["serving_default"](examples=_examples())
    assert found["output"].numpy().tolist() == [[3.0], [4.5]]
    raw = estimator.build_raw_serving_input_receiver_fn(
        {"a": tf.zeros([1, 2], tf.int64)}
    )
    with pytest.raises(ValueError, match="must be of type string"):
        trained.export_saved_model(tmp_path / "raw", raw)


def test_export_of_raw_features(tmp_path: pathlib.Path):
    made = [interop.embedding_column(ids("a"), 1, initializer=ROWS)]
    spec = interop.EmbeddingConfigSpec(made, SGD)
    trained = make_estimator(linear_model(made), tmp_path, spec, use_tpu=False)
    trained.train(batches({"a": dense([[1]])}), steps=1)
    example = {"a": tf.zeros([1, 2], tf.int64)}
    folder = trained.export_saved_model(
        tmp_path / "export", estimator.build_raw_serving_input_receiver_fn(example)
    )
    signature = tf.saved_model.load(folder).signatures["serving_default"]
    found = signature(a=tf.constant([[3, 5]], tf.int64))
    assert found["out"].numpy().tolist() == [[4.0]]


def test_warm_start(tmp_path: pathlib.Path):
    first = make(tmp_path / "first").train(batches(FEATURES), steps=2)
    moved = variables(first)
    for use_tpu in (True, False):
        folder = tmp_path / str(use_tpu)
        second = make(folder, use_tpu=use_tpu, warm_start_from=first.model_dir)
        second.train(batches(FEATURES), steps=1)
        found = variables(second)
        # One more step of the same gradients from where the first had come to.
        change = 0.5 if use_tpu else 1.0
        assert found[A][3, 0] == moved[A][3, 0] - change
        assert found["bias"] == moved["bias"] - 1.0
        assert found["global_step"] == 1


def test_warm_start_of_some_and_of_other_names(tmp_path: pathlib.Path):
    first = make(tmp_path / "first").train(batches(FEATURES), steps=2)
    moved = variables(first)
    settings = estimator.WarmStartSettings(
        first.model_dir,
        ["dense_features/a.*"],
        var_name_to_prev_var_name={A: "y_z_shared_embedding"},
    )
    second = make(tmp_path / "second", warm_start_from=settings)
    second.train(batches(FEATURES), steps=1)
    found = variables(second)
    assert found[A][3, 0] == moved["y_z_shared_embedding"][3, 0] - 0.5
    assert found["y_z_shared_embedding"][3, 0] == 3.0
    assert found["bias"] == -1.0


class Counts(v1.train.SessionRunHook):
    """Counts its sessions."""

    ends = 0

    def end(self, session: Any) -> None:
        self.ends += 1


def test_hooks_and_host_calls_run(tmp_path: pathlib.Path):
    hooks = {name: Counts() for name in ("train", "eval", "predict", "given")}
    seen: list[int] = []

    def host_call(step: Any) -> Any:
        return tf.numpy_function(lambda s: seen.append(int(s)) or s, [step], tf.int64)

    def model(made: list[Any]) -> Any:
        def model_fn(features: Any, labels: Any, mode: str) -> Any:
            spec = linear_model(made)(features, labels, mode)
            step = v1.train.get_global_step().read_value()
            return estimator.TPUEstimatorSpec(
                mode,
                spec.predictions,
                spec.loss,
                spec.train_op,
                host_call=(host_call, [step]),
                training_hooks=[hooks["train"]],
                evaluation_hooks=[hooks["eval"]],
                prediction_hooks=[hooks["predict"]],
            )

        return model_fn

    trained = make(tmp_path, model)
    trained.train(batches(FEATURES), hooks=[hooks["given"]], steps=2)
    trained.evaluate(batches(FEATURES), hooks=[hooks["given"]], steps=1)
    list(itertools.islice(trained.predict(batches(FEATURES)), 1))
    assert len(seen) == 2
    ends = {name: hook.ends for name, hook in hooks.items()}
    assert ends == {"train": 1, "eval": 1, "predict": 0, "given": 2}


def name_scopes(features: Any, made: list[Any]) -> Any:
    """As DenseFeatures of Keras 2: a name scope for each column, no variable scope."""
    cache = private_tensorflow.feature_cache(features)
    for column in made:
        with tf.name_scope(f"dense_features/{column.name}/"):
            column.create_state(None)
    tensors = [column.get_dense_tensor(cache, None) for column in made]
    return tf.concat(tensors, axis=1)


def test_tables_of_keras_2_are_named_by_name_scopes(tmp_path: pathlib.Path):
    trained = make(tmp_path, lambda made: linear_model(made, name_scopes))
    trained.train(batches(FEATURES), steps=1)
    assert set(variables(trained)) == {A, "y_z_shared_embedding", "bias", "global_step"}


@pytest.mark.parametrize("use_tpu", [True, False])
def test_unnamed_keras_layers_have_the_same_names_in_each_graph(
    tmp_path: pathlib.Path, use_tpu: bool
):
    keras.layers.Dense(1)  # A layer of another model is counted, too.
    made = [embedding("a", 1, initializer=ROWS)]

    def dense_layer(features: Any, made: list[Any]) -> Any:
        return keras.layers.Dense(1)(estimator.dense_features(features, made))

    spec = interop.EmbeddingConfigSpec(made, SGD)
    trained = make_estimator(
        linear_model(made, dense_layer), tmp_path, spec, use_tpu=use_tpu
    )
    trained.train(batches({"a": sparse([[1]])}), steps=1)
    assert {"dense/kernel", "dense/bias"} <= set(variables(trained))
    trained.evaluate(batches({"a": sparse([[1]])}), steps=1)
    assert keras.layers.Dense(1).name != "dense"


def no_scopes(features: Any, made: list[Any]) -> Any:
    """No scope around the columns at all."""
    cache = private_tensorflow.feature_cache(features)
    for column in made:
        column.create_state(None)
    tensors = [column.get_dense_tensor(cache, None) for column in made]
    return tf.concat(tensors, axis=1)


def test_tables_without_scopes_keep_apart(tmp_path: pathlib.Path, said: list[str]):
    made = [embedding("a", 1, initializer=ROWS), embedding("b", 1, initializer=ROWS)]
    spec = interop.EmbeddingConfigSpec(made, SGD)
    trained = make_estimator(linear_model(made, no_scopes), tmp_path, spec)
    trained.train(batches({"a": dense([[1]]), "b": dense([[2]])}), steps=1)
    found = variables(trained)
    assert found["a_embedding/embedding_weights"][:3, 0].tolist() == [0, 0.5, 2]
    assert found["b_embedding/embedding_weights"][:3, 0].tolist() == [0, 1, 1.5]
    assert [text for text in said if "'tbl_a' is saved as 'a_embedding/" in text]


def test_a_feature_without_gradient_counts_as_zeros(
    tmp_path: pathlib.Path, said: list[str]
):

    def layer(features: Any, made: list[Any]) -> Any:
        estimator.dense_features(features, made[:1])
        return estimator.dense_features(features, made[1:])

    trained = make(tmp_path, lambda made: linear_model(made, layer))
    trained.train(batches(FEATURES), steps=1)
    np.testing.assert_array_equal(variables(trained)[A][:, 0], np.arange(8))
    assert [text for text in said if "Feature 'a': the train_op computed no" in text]


def test_options_without_effect_are_named_once(
    tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch
):
    said: list[str] = []
    monkeypatch.setattr(
        logging, "log_first_n", lambda level, text, n, *a: said.append(text % a)
    )
    spec = interop.EmbeddingConfigSpec(columns(), SGD, 1.0)
    trained = make_estimator(linear_model(columns()), tmp_path, spec, use_tpu=False)
    trained.train(batches(FEATURES), steps=1)
    (text,) = said
    assert text.endswith("no effect: optimization_parameters, clipping_limit.")


def test_other_columns_beside_embeddings(tmp_path: pathlib.Path):
    made = [
        embedding("a", 1, initializer=ROWS),
        fc.numeric_column("n", shape=(2,)),
        fc.indicator_column(ids("i", 3)),
        interop.embedding_column(weighted("w", "wt"), 1, initializer=ROWS),
    ]
    features = {
        "a": dense([[1]]),
        "n": np.float32([[7, 8]]),
        "i": dense([[2]]),
        "w": sparse([[2, 4]]),
        "wt": sparse([[1.0, 3.0]], np.float32),
    }
    spec = interop.EmbeddingConfigSpec([made[0], made[3]], SGD)
    trained = make_estimator(linear_model(made), tmp_path, spec)
    found = next(trained.predict(batches(features)))
    assert found["out"].tolist() == [1, 0, 0, 1, 7, 8, 3.5]
