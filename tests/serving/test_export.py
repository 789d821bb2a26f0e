"""The exported model: what is in it, who can load it, what it answers."""

from __future__ import annotations

import pathlib
import subprocess
import sys
from typing import Any

import numpy as np
import pytest
import tensorflow as tf
from serving import exported
from serving.exported import FILMS, D, Trained

import tpu_embedding as te

# A logit sums 22 products; an activation at most 3, of values and weights below 4.
TOLERANCE = 22 * 16 * 2.0**-24
WITHOUT_PACKAGE = pathlib.Path(__file__).with_name("load_without_package.py")


@pytest.mark.parametrize("kind", ["ragged", "sparse", "examples"])
def test_signatures_answer_as_the_embedding(
    kind: str, trained: Trained, served: Any
) -> None:
    answers = served[kind](**exported.requests()[kind])
    for name, values in trained.expected().items():
        np.testing.assert_allclose(answers[name], values, rtol=0, atol=TOLERANCE)


def test_the_dense_signature(trained: Trained, served: Any) -> None:
    tables = trained.embedding.embedding_tables
    history = tf.constant([[1, 2, 3], [4, 5, 6]], tf.int64)
    answers = served["dense"](
        film=tf.constant([3, 22], tf.int64),
        more_0=tf.constant([4, 4], tf.int64),
        more_0_weights=tf.constant([-2.0, 0.0]),
        more_1=tf.constant([-1, 6], tf.int64),
        history=history,
        numbers=tf.zeros([2, 2]),
    )
    films, users = tables[trained.films].numpy(), tables[trained.users].numpy()
    zeros = np.zeros(D)
    np.testing.assert_array_equal(answers["film"], films[[3, 22]])
    np.testing.assert_array_equal(answers["seen"], [-films[4], zeros])  # sqrtn
    np.testing.assert_array_equal(answers["user"], [zeros, users[6]])  # drop
    np.testing.assert_array_equal(answers["history"], films[history[:, :2]])


def test_the_first_signature_is_the_default(folder: pathlib.Path) -> None:
    signatures = exported.graph_of(folder).signature_def
    own = {name for name in signatures if not name.startswith("__")}
    assert own == {"dense", "sparse", "ragged", "examples", "serving_default"}
    assert signatures["serving_default"].inputs.keys() == (
        signatures["dense"].inputs.keys()
    )


def test_all_ops_are_stock(folder: pathlib.Path) -> None:
    ops = exported.ops_of(folder)
    assert {"VarHandleOp", "ReadVariableOp"} < ops
    # After one of these each reading of the table would copy it.
    assert "ResourceGather" not in ops


def test_slots_are_not_in_it(folder: pathlib.Path) -> None:
    listed = tf.train.list_variables(str(folder / "variables" / "variables"))
    shapes = sorted(shape for name, shape in listed if "VARIABLE" in name)
    assert shapes == [[7, D], [22], [FILMS, D]]


def test_slots_of_a_model_that_has_the_embedding_are_not_in_it(
    trained: Trained, tmp_path: pathlib.Path
) -> None:
    class Model(tf.Module):
        def __init__(self) -> None:
            super().__init__()
            self.embedding = trained.embedding
            self.factor = tf.Variable(2.0)

        def __call__(self, activations: Any) -> tf.Tensor:
            return self.factor * activations["film"]

    te.serving.export(
        trained.embedding, tmp_path, Model(), signatures=["dense"], storage="int8"
    )
    listed = tf.train.list_variables(str(tmp_path / "variables" / "variables"))
    shapes = [tuple(shape) for name, shape in listed if "VARIABLE" in name]
    tables = [(FILMS, D), (FILMS, 2), (7, D), (7, 2)]
    assert sorted(shapes) == sorted([*tables, ()])


@pytest.mark.second_tier
def test_loads_without_the_package(trained: Trained, folder: pathlib.Path) -> None:
    printed = subprocess.run(
        [sys.executable, str(WITHOUT_PACKAGE), str(folder)],
        input=exported.example(0),
        capture_output=True,
        check=True,
    ).stdout
    expected = trained.expected()["logits"][:1]
    found = [float(word) for word in printed.split()]
    np.testing.assert_allclose(found, expected, rtol=0, atol=TOLERANCE)


def run_in_c(folder: pathlib.Path, kind: str, output: str, inputs: Any) -> Any:
    signature = exported.graph_of(folder).signature_def[kind]
    arguments = [str(folder), signature.outputs[output].name]
    types = {tf.int64: "i64", tf.float32: "f32"}
    for name, value in inputs.items():
        shape = ",".join(map(str, value.shape)) or "-"
        values = ",".join(map(repr, value.numpy().ravel().tolist())) or "-"
        arguments += [signature.inputs[name].name, types[value.dtype], shape, values]
    program = exported.c_program("run_signature.c", folder.parent)
    return subprocess.run(
        [str(program), *arguments], capture_output=True, text=True, check=False
    )


@pytest.mark.second_tier
@pytest.mark.parametrize("kind", ["ragged", "sparse"])
def test_answers_the_same_in_c(
    kind: str, trained: Trained, served: Any, folder: pathlib.Path
) -> None:
    inputs = exported.requests()[kind]
    ran = run_in_c(folder, kind, "logits", inputs)
    assert ran.returncode == 0, ran.stderr
    found = [float(line) for line in ran.stdout.splitlines()]
    np.testing.assert_allclose(
        found, served[kind](**inputs)["logits"], rtol=0, atol=1e-6
    )


@pytest.mark.second_tier
def test_refuses_ids_in_c_too(folder: pathlib.Path) -> None:
    inputs = exported.requests()["ragged"]
    inputs["film_values"] = tf.constant([1, FILMS, 2], tf.int64)
    ran = run_in_c(folder, "ragged", "logits", inputs)
    assert ran.returncode == 1
    assert "Feature film, table films: sample 1 has id 23" in ran.stderr


HOSTILE = {
    "id_too_large": ("film_values", [3, FILMS, 0], "table films: sample 1 has id 23"),
    "id_negative": ("film_values", [3, -1, 0], "table films: sample 1 has id -1"),
    "index_outside": (
        "film_indices",
        [[0, 0], [1, 0], [3, 0]],
        "sparse entry 2 has an",
    ),
    "index_wraps": (  # 2^31 times 2^33 is 0 in 64 bits.
        "film_indices",
        [[0, 0], [1, 0], [2**33 + 2, 0]],
        "sparse entry 2 has an",
    ),
    "index_negative": ("film_indices", [[0, 0], [-1, 0], [2, 0]], "sparse entry 1 has"),
    "out_of_order": ("film_indices", [[0, 0], [2, 0], [1, 0]], "entry 2 is out of ord"),
    "twice": ("film_indices", [[0, 0], [1, 0], [1, 0]], "sparse entry 2 is out of ord"),
    "too_few_indices": (
        "film_indices",
        [[0, 0]],
        "a sparse input of 3 values and rank",
    ),
    "shape_too_large": ("film_dense_shape", [2**50, 4], "has a negative axis or more "),
    "shape_overflows": ("film_dense_shape", [2**62, 4], "has a negative axis or more "),
    "shape_negative": ("film_dense_shape", [-3, 4], "outside of dense_shape (None"),
    "shape_of_another_rank": ("film_dense_shape", [3], "dense_shape_of_film"),
    "indices_of_another_rank": ("film_indices", [[0]] * 3, "indices_of_film"),
    "no_columns": ("film_dense_shape", [3, -4], "outside of dense_shape (3, None"),
    "weights_missing": ("more_0_weights", [1.0], "1 weights for 4 ids"),
}


@pytest.mark.parametrize("case", HOSTILE)
def test_hostile_sparse_input_is_refused(case: str, served: Any) -> None:
    name, values, message = HOSTILE[case]
    inputs = exported.requests()["sparse"]
    inputs[name] = tf.constant(values, inputs[name].dtype)
    with pytest.raises(tf.errors.InvalidArgumentError) as raised:
        served["sparse"](**inputs)
    assert message in raised.value.message


def test_shapes_that_the_quick_test_does_not_take(served: Any) -> None:
    inputs = exported.requests()["sparse"]
    wanted = served["sparse"](**inputs)
    inputs["film_dense_shape"] = tf.constant([3, 2**40], tf.int64)
    for name, value in served["sparse"](**inputs).items():
        np.testing.assert_array_equal(value, wanted[name])


@pytest.mark.parametrize(
    ("splits", "message"),
    [
        ([], "row_splits must start at 0"),
        ([1, 2, 3, 3], "row_splits must start at 0"),
        ([0, 2, 1, 3], "row_splits must not decrease, but row 1 goes"),
        ([0, 1, 2, 9], "row_splits end at 9 but there are 3 ids"),
    ],
)
def test_hostile_splits_are_refused(splits: Any, message: str, served: Any) -> None:
    inputs = exported.requests()["ragged"]
    inputs["film_row_splits"] = tf.constant(splits, tf.int64)
    with pytest.raises(tf.errors.InvalidArgumentError) as raised:
        served["ragged"](**inputs)
    assert f"Feature film: {message}" in raised.value.message


def test_examples_that_are_none_are_refused(served: Any) -> None:
    with pytest.raises(tf.errors.InvalidArgumentError):
        served["examples"](examples=tf.constant([b"no example"]))


@pytest.mark.parametrize("size", [0, 1, 10_000])
def test_batches_of_any_size(size: int, trained: Trained, served: Any) -> None:
    films = trained.embedding.embedding_tables[trained.films].numpy()
    ids = np.arange(size) % FILMS
    inputs = {}
    for name in ("film", "more_0", "more_1", "history"):
        inputs[f"{name}_values"] = tf.constant([], tf.int64)
        inputs[f"{name}_row_splits"] = tf.zeros([size + 1], tf.int64)
    inputs["film_values"] = tf.constant(ids, tf.int64)
    inputs["film_row_splits"] = tf.range(size + 1, dtype=tf.int64)
    inputs |= {"more_0_weights": tf.zeros([0]), "numbers": tf.zeros([size, 2])}
    answers = served["ragged"](**inputs)
    np.testing.assert_array_equal(answers["film"], films[ids])
    np.testing.assert_array_equal(answers["seen"], np.zeros([size, D]))
    np.testing.assert_array_equal(answers["history"], np.zeros([size, 2, D]))


def test_names_that_arguments_of_python_cannot_have(tmp_path: pathlib.Path) -> None:
    table = te.TableConfig(8, 2, te.RowIdInitializer())
    names = ("from", "None", "self", "name")
    embedding = te.TPUEmbedding(dict.fromkeys(names, te.FeatureConfig(table)), None)
    embedding.build()
    te.serving.export(embedding, tmp_path, signatures=["dense"])
    dense = tf.saved_model.load(tmp_path).signatures["dense"]
    inputs = ("feature_from", "feature_None", "feature_self", "name")
    answers = dense(**{name: tf.constant([3], tf.int64) for name in inputs})
    for name in inputs:
        np.testing.assert_array_equal(answers[name], [[3, 3]])
