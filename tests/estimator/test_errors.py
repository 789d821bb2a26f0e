"""TPUEstimator: what its calls refuse, by type and words."""

from __future__ import annotations

import pathlib
import re
from typing import Any

import numpy as np
import pytest
import tensorflow as tf
from error_tables import ErrorTable, check_error, each_error
from estimator.estimator_models import SPEC, batches, dense, make, model_fn, sparse, v1
from interop.spec_cases import SGD, dict_spec, embedding, sequence, weighted

from tpu_embedding import estimator, interop
from tpu_embedding.compat.estimator import private_tensorflow

I = interop  # noqa: E741 - short, for the tables.


def input_fn() -> Any:
    raise AssertionError("not to be called")


def entry(index: list[int], shape: list[int]) -> Any:
    return v1.SparseTensorValue(np.array([index]), np.array([1]), np.array(shape))


CALLS: ErrorTable = {
    ValueError: {
        "train takes `steps` or `max_steps`, not both.": (
            lambda e: e.train(input_fn, steps=1, max_steps=1)
        ),
        "Argument `steps` must be an int >= 1. Received: 0.": (
            lambda e: e.train(input_fn, steps=0)
        ),
        "Argument `max_steps` must be an int >= 1. Received: -1.": (
            lambda e: e.train(input_fn, max_steps=-1)
        ),
        "Argument `steps` must be an int >= 1. Received: '2'.": (
            lambda e: e.train(input_fn, steps="2")
        ),
        "Argument `steps` must be an int >= 1. Received: 1.5.": (
            lambda e: e.train(input_fn, steps=1.5)
        ),
        "Argument `steps` must be an int >= 1.": (
            lambda e: e.evaluate(input_fn, steps=0)
        ),
        "`predict_keys` 'colour' are not among the predictions 'out'.": (
            lambda e: next(e.predict(batches({"a": dense([[1]])}), ["colour"]))
        ),
        "An input_fn must return a tf.data.Dataset": (
            lambda e: e.train(lambda: (1, 2, 3), steps=1)
        ),
        "There is no checkpoint in ": lambda e: e.get_variable_names(),
        " to export. Call `train` first, or pass `checkpoint_path`.": (
            lambda e: e.export_saved_model("unused", input_fn)
        ),
    },
    tf.errors.InvalidArgumentError: {
        "Feature a: there are 1 sparse entries, too few for the dense_shape "
        "[1099511627776, 1].": (
            lambda e: next(e.predict(batches({"a": entry([0, 0], [2**40, 1])})))
        ),
        "Feature a: sparse entry 0 is outside of the dense_shape [2, 2].": (
            lambda e: next(e.predict(batches({"a": entry([1, -1], [2, 2])})))
        ),
    },
    TypeError: {
        "Argument `hooks` must be SessionRunHooks. Received: 3 of type int.": (
            lambda e: e.train(input_fn, [3], 1)
        )
    },
}


@each_error(CALLS)
def test_calls(error: type[Exception], text: str, bad: Any, tmp_path: pathlib.Path):
    check_error(error, text, lambda: bad(make(tmp_path)))


def returning(value: Any) -> Any:
    return lambda features, labels, mode: value


A = {"a": dense([[1]])}
COLUMN_W = I.embedding_column(weighted("w", "wt"), 1)
SPEC_W = I.EmbeddingConfigSpec([COLUMN_W], SGD)
SHARED_W = I.EmbeddingConfigSpec(
    [COLUMN_W, I.embedding_column(weighted("v", "wt"), 1)], SGD
)
SEQUENCE = I.EmbeddingConfigSpec(
    [I.embedding_column(sequence("s"), 1, max_sequence_length=2)], SGD
)
WEIGHTS = {"w": sparse([[1]]), "wt": sparse([[1.0]], np.float32)}
NO_COMBINER = dict_spec(tables={"t": I.TableConfig(8, 2, None, None)})


def twice(features: Any, labels: Any, mode: str) -> Any:
    spec = model_fn(features, labels, mode)
    v1.gradients(spec.loss, v1.trainable_variables())
    return spec


def unused(features: Any, labels: Any, mode: str) -> Any:
    step = v1.assign_add(v1.train.get_global_step(), 1)
    return estimator.TPUEstimatorSpec(mode, loss=tf.constant(0.0), train_op=step)


FEATURES: ErrorTable = {
    ValueError: {
        "Feature 'a' of the EmbeddingConfigSpec is not among the features of the "
        "input_fn: 'b'.": (SPEC, {"b": dense([[1]])}, model_fn),
        "Feature 'a': ids must be of shape [batch] or [batch, n]. Received shape "
        "(1, 1, 1).": (SPEC, {"a": dense([[[1]]])}, model_fn),
        "Only sequence columns take ids of rank 3.": (
            SPEC,
            {"a": sparse([[[1]]])},
            model_fn,
        ),
        "Feature 'a' holds strings.": (SPEC, {"a": sparse([["x"]], object)}, model_fn),
        "Cannot find the weights 'wt' of feature 'w' among the features.": (
            SPEC_W,
            {"w": sparse([[1]])},
            model_fn,
        ),
        "Cannot find the weights 'wt' of feature 'w'": (
            SHARED_W,
            {**WEIGHTS, "v": sparse([[1]])},
            model_fn,
        ),
        "Feature 'w' and its weights 'wt' must both be SparseTensors": (
            SPEC_W,
            {"w": sparse([[1]]), "wt": np.float32([[1.0]])},
            model_fn,
        ),
        "Sequence feature 's' must be of rank 2": (
            SEQUENCE,
            {"s": sparse([[[[1]]]])},
            model_fn,
        ),
        "Feature 'f': a table without combiner takes one id for each sample": (
            NO_COMBINER,
            {"f": dense([[1, 2]])},
            model_fn,
        ),
        "The model_fn must return a TPUEstimatorSpec. Received: 3 of type int.": (
            SPEC,
            A,
            returning(3),
        ),
        "The model_fn must return a spec of mode 'train'. Received: 'infer'": (
            SPEC,
            A,
            returning(estimator.TPUEstimatorSpec("infer", predictions=1)),
        ),
    },
    RuntimeError: {
        "The gradients of feature 'a' were computed twice.": (SPEC, A, twice),
        "The model_fn did not use column 'a_embedding' of the EmbeddingConfigSpec.": (
            SPEC,
            A,
            unused,
        ),
    },
    tf.errors.InvalidArgumentError: {"id 8": (SPEC, {"a": sparse([[8]])}, model_fn)},
}


@each_error(FEATURES)
def test_training(error: type[Exception], text: str, bad: Any, tmp_path: pathlib.Path):
    spec, features, model = bad
    trained = make(tmp_path, spec, model)
    check_error(error, text, lambda: trained.train(batches(features), steps=1))
    assert tf.executing_eagerly()


def test_ragged_and_other_features(tmp_path: pathlib.Path):
    def ragged() -> Any:
        return tf.data.Dataset.from_tensors({"a": tf.ragged.constant([[1], [2, 3]])})

    with pytest.raises(ValueError, match="Feature 'a' is a RaggedTensor"):
        make(tmp_path).train(ragged, steps=1)
    with pytest.raises(TypeError, match="`features` must be a dict"):
        make(tmp_path).train(lambda: (tf.constant([1]), None), steps=1)


def test_arguments_of_the_model_fn(tmp_path: pathlib.Path):
    without = make(tmp_path, model=lambda features, mode: None)
    with pytest.raises(ValueError, match="must take the argument `labels`"):
        without.train(batches(A, dense([1])), steps=1)
    without = make(tmp_path, params={"p": 1})
    with pytest.raises(ValueError, match="model_fn must take the argument `params`"):
        without.train(batches(A), steps=1)


def test_dicts_have_no_cpu_path(tmp_path: pathlib.Path):
    made = make(tmp_path, dict_spec(), use_tpu=False)
    with pytest.raises(NotImplementedError, match="use_tpu=False or eval_on_tpu=False"):
        made.train(batches({"f": dense([1])}), steps=1)
    with pytest.raises(NotImplementedError, match="export_saved_model looks"):
        made.export_saved_model(tmp_path, input_fn)


def test_export_outputs(tmp_path: pathlib.Path):
    outputs: dict[str, Any] = {}

    def model(features: Any, labels: Any, mode: str) -> Any:
        out = estimator.dense_features(features, SPEC.feature_columns)
        step = v1.assign_add(v1.train.get_global_step(), 1)
        more = {"export_outputs": outputs} if mode == "infer" else {}
        return estimator.TPUEstimatorSpec(mode, out, tf.reduce_sum(out), step, **more)

    trained = make(tmp_path, model=model).train(batches(A), steps=1)
    receiver = estimator.build_raw_serving_input_receiver_fn(
        {"a": tf.zeros([1, 1], tf.int64)}
    )
    bad = (
        ({"x": 3}, TypeError, "export_outputs['x'] must be a PredictOutput"),
        (
            {"x": estimator.PredictOutput(1), "y": estimator.PredictOutput(1)},
            ValueError,
            "must be called \"serving_default\". Received: 'x', 'y'.",
        ),
    )
    for given, error, text in bad:
        outputs.clear()
        outputs.update(given)
        with pytest.raises(error, match=re.escape(text)):
            trained.export_saved_model(tmp_path / "export", receiver)


def test_a_receiver_without_return(tmp_path: pathlib.Path):
    text = "must return a ServingInputReceiver. Received: None of type NoneType."
    with pytest.raises(TypeError, match=text):
        make(tmp_path).export_saved_model(
            tmp_path, lambda: None, checkpoint_path="none"
        )


def test_single_input_of_classic_signatures():
    inputs = {"a": 1, "b": 2}
    with pytest.raises(ValueError, match="RegressionOutput takes one receiver tensor"):
        estimator.RegressionOutput(1)._signature(inputs)


def test_samples_need_one_first_axis(tmp_path: pathlib.Path):
    def model(features: Any, labels: Any, mode: str) -> Any:
        out = estimator.dense_features(features, SPEC.feature_columns)
        return estimator.TPUEstimatorSpec(mode, {"out": out, "sum": tf.reduce_sum(out)})

    found = make(tmp_path, model=model).predict(batches(A))
    with pytest.raises(ValueError, match="with the same first axis"):
        next(found)


def test_columns_that_change_ids_are_warned_of(said: list[str]):
    fc = tf.feature_column
    hashed = fc.categorical_column_with_hash_bucket("h", 8, tf.int64)
    listed = fc.sequence_categorical_column_with_vocabulary_list("v", [5, 7])
    spec = I.EmbeddingConfigSpec(
        [
            embedding("a", 1),
            I.embedding_column(weighted("w", "wt"), 1),
            I.embedding_column(hashed, 1),
            I.embedding_column(listed, 1, max_sequence_length=2),
        ],
        SGD,
    )
    make(spec=spec, use_tpu=False)
    assert not said
    make(spec=spec)
    columns = "columns 'h_embedding', 'v_embedding' apply"
    assert [text for text in said if columns in text]


def test_another_tensorflow_is_refused_by_name():
    used = {
        "tensorflow.python.tpu.tpu_function": ("tpu_shard_context", "no_such_name"),
        "tensorflow.python.no_such_module": ("anything",),
    }
    missing = (
        r"needs tensorflow\.python\.tpu\.tpu_function\.no_such_name, "
        r"tensorflow\.python\.no_such_module, which TensorFlow"
    )
    with pytest.raises(ImportError, match=missing):
        private_tensorflow.require(used)


def test_only_one_file_imports_private_modules():
    folder = pathlib.Path(private_tensorflow.__file__).parent
    private = [
        p.name for p in folder.glob("*.py") if "tensorflow.python" in p.read_text()
    ]
    assert private == ["private_tensorflow.py"]
