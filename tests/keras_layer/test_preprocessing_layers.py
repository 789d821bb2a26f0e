"""Keras preprocessing layers, keras.utils.FeatureSpace and tf.data before a lookup.

`tests/test_tf_keras.py` runs this file with tf_keras, too.
"""

from __future__ import annotations

import bisect
import dataclasses
import pathlib
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import tensorflow as tf
from keras_layer.version import keras
from steps import evaluate_on

import tpu_embedding as te
from tpu_embedding.keras import TPUEmbedding
from tpu_embedding.testing import SoftwareTPUStrategy

# Warnings of Keras: of dicts in another order than sorted, and of FeatureSpace.
pytestmark = [
    pytest.mark.filterwarnings("ignore:The structure of `inputs`:UserWarning"),
    pytest.mark.filterwarnings("ignore:When providing `inputs` as a dict:UserWarning"),
]
WORDS = ["a", "b", "c"]
BOUNDS = [0.0, 1.5, 2.0]
BINS = 5
STRINGS = [["b", "zz"], ["a", "a"], ["c", "b"]]
NUMBERS = [[0.5, -3.0], [1.5, 1.5], [7.0, 1.9]]
INTEGERS = [[20, -1], [10, 10], [30, 20]]
LENGTHS = [1, 0, 2]  # Of the ragged and sparse rows.
LABELS = np.array([[1.0], [2.0], [3.0]], np.float32)


@dataclasses.dataclass(frozen=True)
class Case:
    """A layer, what it is given, and the ids that it has to give."""

    make: Callable[[], Any]
    dtype: str
    rows: list[list[Any]]
    to_id: Callable[[Any], int]
    size: int


def hashed(word: str) -> int:
    """By TensorFlow's own op, which has the hash of keras.layers.Hashing."""
    return int(tf.strings.to_hash_bucket_fast(word, BINS))


def word_id(word: str) -> int:
    return WORDS.index(word) + 1 if word in WORDS else 0


CASES = {
    "string_lookup": Case(
        lambda: keras.layers.StringLookup(vocabulary=WORDS),
        "string",
        STRINGS,
        word_id,
        len(WORDS) + 1,
    ),
    "hashing": Case(
        lambda: keras.layers.Hashing(BINS), "string", STRINGS, hashed, BINS
    ),
    "integer_lookup": Case(
        lambda: keras.layers.IntegerLookup(vocabulary=[10, 20, 30]),
        "int64",
        INTEGERS,
        lambda value: max(value, 0) // 10,
        4,
    ),
    "discretization": Case(
        lambda: keras.layers.Discretization(BOUNDS),
        "float32",
        NUMBERS,
        lambda value: bisect.bisect_right(BOUNDS, value),
        len(BOUNDS) + 1,
    ),
}
# The shape of the Input, and its further arguments.
KINDS: dict[str, tuple[tuple[int | None, ...], dict[str, Any]]] = {
    "scalar": ((), {}),
    "column": ((1,), {}),
    "row": ((2,), {}),
    "ragged": ((None,), {"ragged": True}),
    "sparse": ((None,), {"sparse": True}),
}
FEATURES = [
    (name, kind)
    for name in CASES
    for kind in KINDS
    # IntegerLookup of Keras 3.15 makes sparse input dense, and fails in graphs.
    if (name, kind) != ("integer_lookup", "sparse") or keras.__name__ == "tf_keras"
]


def tensor(rows: list[list[Any]], kind: str, dtype: str) -> Any:
    """The rows as a tensor of that kind."""
    if kind == "scalar":
        return tf.constant([row[0] for row in rows], dtype)
    if kind in ("column", "row"):
        return tf.constant([row[: 1 + (kind == "row")] for row in rows], dtype)
    cut = [row[:length] for row, length in zip(rows, LENGTHS, strict=True)]
    ragged = tf.ragged.constant(cut, tf.as_dtype(dtype), row_splits_dtype=tf.int64)
    return ragged if kind == "ragged" else ragged.to_sparse()


def raw_and_ids(
    features: list[tuple[str, str]] = FEATURES,
) -> tuple[dict[str, Any], dict[str, Any]]:
    """Of each feature the input of the preprocessing layer, and the ids by hand."""
    raw, ids = {}, {}
    for name, kind in features:
        case = CASES[name]
        raw[f"{name}_{kind}"] = tensor(case.rows, kind, case.dtype)
        rows = [[case.to_id(value) for value in row] for row in case.rows]
        ids[f"{name}_{kind}"] = tensor(rows, kind, "int64")
    return raw, ids


def feature_config(
    features: list[tuple[str, str]] = FEATURES,
) -> dict[str, te.FeatureConfig]:
    initializer = te.RowIdInitializer()
    tables = {
        name: te.TableConfig(
            case.size, 2, combiner="mean", name=name, initializer=initializer
        )
        for name, case in CASES.items()
    }
    return {f"{name}_{kind}": te.FeatureConfig(tables[name]) for name, kind in features}


def make_model(features: list[tuple[str, str]] = FEATURES) -> Any:
    inputs, ids = {}, {}
    layers = {name: case.make() for name, case in CASES.items()}
    for name, kind in features:
        shape, options = KINDS[kind]
        key, dtype = f"{name}_{kind}", CASES[name].dtype
        inputs[key] = keras.Input(shape, dtype=dtype, name=key, **options)
        ids[key] = layers[name](inputs[key])
    activations = TPUEmbedding(feature_config(features), te.Adagrad(0.1))(ids)
    joined = keras.layers.Concatenate()([activations[key] for key in ids])
    dense = keras.layers.Dense(1, use_bias=False, kernel_initializer="ones")
    dense.trainable = False
    model = keras.Model(inputs, dense(joined))
    model.compile("sgd", "mse")
    return model


def predictions_of_a_loop(ids: dict[str, Any], steps: int) -> np.ndarray:
    """What the model predicts after training, by te.TPUEmbedding with ids by hand."""
    embedding = te.TPUEmbedding(feature_config(), te.Adagrad(0.1))
    for _ in range(steps):
        embedding.enqueue(ids)
        with tf.GradientTape() as tape:
            activations = embedding.dequeue()
            tape.watch(activations)
            found = tf.reduce_sum(tf.concat(list(activations.values()), -1), -1)
            loss = tf.reduce_mean((found[:, None] - LABELS) ** 2)
        embedding.apply_gradients(tape.gradient(loss, activations))
    joined = tf.concat(list(evaluate_on(embedding, ids).values()), -1)
    return tf.reduce_sum(joined, -1, keepdims=True).numpy()


def test_layers_in_the_model_train_save_and_load(tmp_path: pathlib.Path):
    raw, ids = raw_and_ids()
    model = make_model()
    data = tf.data.Dataset.from_tensors((raw, LABELS)).repeat(3)
    model.fit(data, shuffle=False, verbose=0)
    expected = predictions_of_a_loop(ids, steps=3)
    assert np.abs(expected - predictions_of_a_loop(ids, steps=0)).min() > 0.01
    np.testing.assert_allclose(model.predict_on_batch(raw), expected, rtol=1e-5)
    model.save(tmp_path / "model.keras")
    loaded: Any = keras.models.load_model(tmp_path / "model.keras")
    np.testing.assert_array_equal(
        loaded.predict_on_batch(raw), model.predict_on_batch(raw)
    )


@pytest.mark.parametrize("mask", [None, ""])
def test_missing_cells_in_a_file_need_a_mask_token(
    tmp_path: pathlib.Path, mask: str | None
):
    # docs/errors.md and docs/preprocessing.md say so. If the case of None fails,
    # Keras 3 has mended its file: take the advice out.
    words = keras.layers.StringLookup(mask_token=mask)
    words.adapt(tf.constant(["a", "a", "b", "b", ""]))
    cells = keras.Input((), dtype="string")
    table = te.TableConfig(words.vocabulary_size(), 4, name="words")
    layer = TPUEmbedding(te.FeatureConfig(table), te.Adagrad(0.1))
    model = keras.Model(cells, layer(words(cells)))
    batch = tf.constant(["a", "", "unknown"])
    before = model(batch).numpy()
    model.save(tmp_path / "m.keras")
    after = keras.models.load_model(tmp_path / "m.keras")(batch).numpy()
    assert np.array_equal(after[[0, 2]], before[[0, 2]])
    kept = mask == "" or keras.__name__ != "keras"
    assert np.array_equal(after[1], before[1]) == kept


def test_an_exported_model_takes_strings_and_numbers(tmp_path: pathlib.Path):
    features = [("string_lookup", "ragged"), ("hashing", "sparse")]
    features += [("integer_lookup", "row"), ("discretization", "scalar")]
    raw, _ = raw_and_ids(features)
    model = make_model(features)
    # The signature of model.export is dense; other kinds are traced by hand.
    specs = {
        key: tf.type_spec_from_value(value)._unbatch()._batch(None)
        for key, value in raw.items()
    }
    serve = tf.function(model.call, input_signature=[specs])
    expected = serve(raw)
    archive = keras.export.ExportArchive()
    archive.track(model)
    archive.add_endpoint("serve", serve)
    archive.write_out(tmp_path / "model")
    served = tf.saved_model.load(tmp_path / "model")
    np.testing.assert_array_equal(served.serve(raw), expected)


@pytest.mark.parametrize("make", [te.TPUEmbedding, te.TPUEmbeddingV2])
def test_layers_in_tf_data_feed_a_loop(make: Any):
    raw, ids = raw_and_ids()
    layers = {name: case.make() for name, case in CASES.items()}

    def preprocess(features: dict[str, Any]) -> dict[str, Any]:
        return {
            f"{name}_{kind}": layers[name](features[f"{name}_{kind}"])
            for name, kind in FEATURES
        }

    embedding = make(feature_config(), te.Adagrad(0.1))
    (batch,) = tf.data.Dataset.from_tensors(raw).map(preprocess)
    for features in (batch, preprocess(raw)):
        activations, expected = (
            look_up(embedding, tensors) for tensors in (features, ids)
        )
        for key in ids:
            np.testing.assert_array_equal(activations[key], expected[key], key)


@pytest.mark.parametrize("generation", ["v4", "v6e"])
def test_layers_in_tf_data_feed_tpus(generation: str):
    lookup = CASES["string_lookup"].make()
    words = tf.constant([["a", "zz"], ["b", "a"], ["c", "c"], ["b", "b"]])
    ids = tf.data.Dataset.from_tensor_slices({"word": lookup(words)})
    rows = tf.data.Dataset.from_tensor_slices({"word": words})
    rows = rows.map(lambda row: {"word": lookup(row["word"])})
    labels = tf.data.Dataset.from_tensor_slices(tf.range(4.0)[:, None])
    table = te.TableConfig(4, 8, te.RowIdInitializer(), combiner="mean", name="t")
    found = []
    for strategy, features in (
        (tf.distribute.get_strategy(), ids),
        (SoftwareTPUStrategy(generation, 2), rows),
    ):
        with strategy.scope():
            word = keras.Input((2,), batch_size=2, dtype="int64", name="word")
            layer = TPUEmbedding(
                {"word": te.FeatureConfig(table)}, te.Adagrad(0.1), batch_size=4
            )
            dense = keras.layers.Dense(1, kernel_initializer="ones")
            model = keras.Model({"word": word}, dense(layer({"word": word})["word"]))
            model.compile(keras.optimizers.SGD(0.01), "mse")
        data = tf.data.Dataset.zip(features, labels).batch(4, drop_remainder=True)
        model.fit(data.repeat(2), shuffle=False, verbose=0)
        found.append(np.asarray(layer.embedding_tables[table].read_value()))
    np.testing.assert_allclose(found[1], found[0], rtol=1e-5)


def look_up(embedding: Any, features: Any) -> Any:
    if isinstance(embedding, te.TPUEmbedding):
        return evaluate_on(embedding, features)
    return embedding(features)[0]


@pytest.mark.parametrize("kind", ["ragged", "sparse"])
def test_weights_beside_computed_ids(kind: str):
    """The result of a Keras layer does not say that it is ragged or sparse."""
    shape, options = KINDS[kind]
    inputs = {
        "word": keras.Input(shape, dtype="string", name="word", **options),
        "weight": keras.Input(shape, dtype="float32", name="weight", **options),
    }
    ids = CASES["string_lookup"].make()(inputs["word"])
    table = te.TableConfig(
        4, 1, combiner="sum", name="t", initializer=te.RowIdInitializer()
    )
    layer = TPUEmbedding({"word": te.FeatureConfig(table)}, te.SGD(0.1))
    outputs = layer({"word": ids}, weights={"word": inputs["weight"]})
    model = keras.Model(inputs, outputs["word"])
    batch = {
        "word": tensor(STRINGS, kind, "string"),  # [b], [], [c, b]
        "weight": tensor([[2.0], [], [0.5, 10.0]], kind, "float32"),
    }
    np.testing.assert_allclose(
        model(batch), [[2 * 2.0], [0.0], [3 * 0.5 + 2 * 10.0]], rtol=1e-6
    )
    with pytest.raises(ValueError, match="weights of feature word must be None or"):
        model({**batch, "weight": tf.constant([[2.0, 1.0]] * 3)})


def test_computed_ragged_ids_fill_an_output_shape():
    words = keras.Input((None,), batch_size=3, dtype="string", ragged=True, name="word")
    ids = CASES["string_lookup"].make()(words)
    table = te.TableConfig(4, 1, name="t", initializer=te.RowIdInitializer())
    config = {"word": te.FeatureConfig(table, output_shape=[3, 2])}
    outputs = TPUEmbedding(config, te.SGD(0.1))({"word": ids})
    assert outputs["word"].shape == (3, 2, 1)
    found = keras.Model(words, outputs)(tensor(STRINGS, "ragged", "string"))
    np.testing.assert_array_equal(found["word"][..., 0], [[2, 0], [0, 0], [3, 2]])


def not_zero(ids: Any) -> Any:
    return tf.cast(tf.not_equal(ids, 0), tf.float32)


@pytest.mark.parametrize("way", ["drop", "weights"])
def test_padding_of_strings_is_left_out(way: str):
    """The two ways that docs/preprocessing.md gives."""
    words = keras.Input((2,), dtype="string", name="word")
    ids = keras.layers.StringLookup(vocabulary=WORDS, mask_token="")(words)
    table = te.TableConfig(
        5,
        1,
        combiner="mean",
        name="t",
        initializer=te.RowIdInitializer(),
        invalid_ids="drop",
    )
    layer = TPUEmbedding(te.FeatureConfig(table), te.SGD(0.1))
    if way == "drop":
        outputs = layer(ids - 1)
    else:
        mask = keras.layers.Lambda(not_zero, output_shape=(2,))(ids)
        outputs = layer(ids, weights=mask)
    batch = tf.constant([["c", "a"], ["c", ""], ["", ""]])
    one_less = way == "drop"  # Rows of the table: its first is the unknown word.
    expected = [[(4 + 2) / 2 - one_less], [4 - one_less], [0]]
    np.testing.assert_allclose(keras.Model(words, outputs)(batch), expected)


def feature_space() -> tuple[Any, dict[str, Any]]:
    space = keras.utils.FeatureSpace
    features = {
        "word": space.string_categorical(output_mode="int"),
        "hash": space.string_hashed(BINS, output_mode="int"),
        "number": space.integer_categorical(output_mode="int"),
        "bin": space.float_discretized(3, output_mode="int"),
        "value": space.float_normalized(),
    }
    if keras.__name__ == "tf_keras":
        # Its saved models lose the boundaries of bins that `adapt` found.
        del features["bin"]
    found = space(
        features,
        crosses=[space.cross(("word", "number"), 7, output_mode="int")],
        output_mode="dict",
    )
    raw = {
        "word": ["a", "b", "a"],
        "hash": ["x", "y", "z"],
        "number": [4, 5, 4],
        "bin": [0.1, 0.5, 0.9],
        "value": [1.0, 2.0, 3.0],
    }
    raw = {key: raw[key] for key in features}
    found.adapt(tf.data.Dataset.from_tensor_slices(raw))
    return found, {key: tf.constant(values) for key, values in raw.items()}


def test_feature_space_before_the_layer(tmp_path: pathlib.Path):
    space, raw = feature_space()
    encoded = space.get_encoded_features()
    sizes = {"word": 3, "hash": BINS, "number": 3, "bin": 3, "word_X_number": 7}
    sizes = {key: size for key, size in sizes.items() if key in encoded}
    # The sizes that docs/preprocessing.md tells where to find.
    assert space.preprocessors["word"].vocabulary_size() == sizes["word"]
    assert space.preprocessors["number"].vocabulary_size() == sizes["number"]
    config = {
        key: te.FeatureConfig(te.TableConfig(size, 2, name=key))
        for key, size in sizes.items()
    }
    layer = TPUEmbedding(config, te.Adagrad(0.1))
    activations = layer({key: encoded[key] for key in sizes})
    joined = keras.layers.Concatenate()([*activations.values(), encoded["value"]])
    score = keras.layers.Dense(1)(joined)
    labels = tf.data.Dataset.from_tensor_slices(LABELS)
    rows = tf.data.Dataset.from_tensor_slices(raw)
    model = keras.Model(space.get_inputs(), score)
    model.compile("sgd", "mse")
    before = [table.numpy() for table in layer.embedding_tables.values()]
    model.fit(tf.data.Dataset.zip(rows, labels).batch(3), shuffle=False, verbose=0)
    for table, values in zip(layer.embedding_tables.values(), before, strict=True):
        assert np.any(table.numpy() != values)

    # The same in tf.data: the model of encoded features, which TPUs train.
    second = keras.Model(encoded, score)
    (found,) = rows.batch(3).map(space)
    expected = model.predict_on_batch({key: v[:, None] for key, v in raw.items()})
    np.testing.assert_allclose(second.predict_on_batch(found), expected, rtol=1e-6)

    model.save(tmp_path / "model.keras")
    loaded: Any = keras.models.load_model(tmp_path / "model.keras")
    loaded.export(tmp_path / "model")
    served = tf.saved_model.load(tmp_path / "model")
    request = {key: v[:, None] for key, v in raw.items()}
    serve = served.signatures["serving_default"]
    _, specs = serve.structured_input_signature
    request = {key: tf.cast(v, specs[key].dtype) for key, v in request.items()}
    (answer,) = serve(**request).values()
    np.testing.assert_allclose(answer, expected, rtol=1e-6)

    # A SavedModel cannot hold a FeatureSpace of tf_keras, only a model made with it.
    encode = space
    if keras.__name__ == "tf_keras":
        encode = keras.Model(space.get_inputs(), encoded)
        raw = {key: values[:, None] for key, values in raw.items()}

    def read(inputs: Any) -> te.serving.Request:
        ids = encode(inputs)
        return te.serving.Request({key: ids[key] for key in sizes})

    specs = {
        key: tf.TensorSpec([None, *value.shape[1:]], value.dtype)
        for key, value in raw.items()
    }
    te.serving.export(
        layer.embedding_tables,
        tmp_path / "tables",
        feature_config=config,
        signatures={"ask": te.serving.Signature(specs, read)},
    )
    answer = tf.saved_model.load(tmp_path / "tables").signatures["ask"](**raw)
    for key, rows in layer({key: encode(raw)[key] for key in sizes}).items():
        np.testing.assert_array_equal(answer[key], rows)


def test_what_is_no_id_is_refused_with_the_way_out():
    layer = TPUEmbedding(
        {"word": te.FeatureConfig(te.TableConfig(4, 2, name="t"))}, "sgd"
    )
    words = keras.Input((1,), dtype="string")
    for strings in (words, tf.constant(["a"]), tf.ragged.constant([["a"]])):
        with pytest.raises(
            TypeError, match=r"Received: string\. Convert .*StringLookup or"
        ):
            layer({"word": strings})
    for mode in ("multi_hot", "one_hot", "count"):
        lookup = keras.layers.StringLookup(vocabulary=WORDS, output_mode=mode)
        with pytest.raises(TypeError, match='use `output_mode="int"`'):
            layer({"word": lookup(words)})


def test_dense_inputs_are_known_to_be_dense():
    layer = TPUEmbedding(te.FeatureConfig(te.TableConfig(4, 2, name="t")), "sgd")
    ids = keras.Input((2,), dtype="int64")
    weights = keras.Input((None,), dtype="float32", ragged=True)
    with pytest.raises(ValueError, match="None or, like the feature itself, a dense"):
        layer(ids, weights=weights)
