"""What export takes and refuses, and models of other kinds."""

from __future__ import annotations

import dataclasses
import functools
import pathlib
from collections.abc import Callable
from typing import Any

import keras
import numpy as np
import pytest
import tensorflow as tf
from serving.exported import graph_of

import tpu_embedding as te
from tpu_embedding.serving import Request, Signature, export

V, D = 6, 3
FILMS = te.TableConfig(V, D, name="films", combiner="sum")
TABLE = {FILMS: tf.reshape(tf.range(V * D, dtype=tf.float32), [V, D])}
FEATURES = {"film": te.FeatureConfig(FILMS)}


def load(path: pathlib.Path) -> Any:
    return tf.saved_model.load(str(path)).signatures


def test_a_signature_of_ones_own(tmp_path: pathlib.Path) -> None:
    names = tf.lookup.StaticHashTable(
        tf.lookup.KeyValueTensorInitializer(["Alien", "Brazil"], tf.range(2, 4)), -1
    )
    factor = tf.Variable(2.0)

    class Model(tf.Module):
        def __init__(self) -> None:
            super().__init__()
            self.names = names  # Its files hang on the model.

        def read(self, inputs: dict[str, tf.Tensor]) -> Request:
            ids = self.names.lookup(inputs["title"])
            return Request({"film": ids}, dense={"more": inputs["more"]})

        def __call__(self, activations: Any, dense: Any) -> tf.Tensor:
            return factor * activations["film"] + dense["more"]

    model = Model()
    title, more = tf.TensorSpec([None], tf.string), tf.TensorSpec([None, 1])
    signature = Signature({"title": title, "more": more}, model.read)
    export(
        TABLE, tmp_path, model, feature_config=FEATURES, signatures={"ask": signature}
    )
    signatures = load(tmp_path)
    assert set(signatures) == {"ask", "serving_default"}
    answer = signatures["ask"](
        title=tf.constant(["Brazil", "Alien"]), more=tf.constant([[1.0], [0.0]])
    )
    np.testing.assert_array_equal(answer["output"], [[19, 21, 23], [12, 14, 16]])
    with pytest.raises(tf.errors.InvalidArgumentError, match="sample 0 has id -1"):
        signatures["ask"](title=tf.constant(["Cube"]), more=tf.zeros([1, 1]))


def _examples(rows: list[list[int]]) -> tf.Tensor:
    lists = [tf.train.Int64List(value=row) for row in rows]
    features = [{"film": tf.train.Feature(int64_list=ids)} for ids in lists]
    made = [tf.train.Example(features=tf.train.Features(feature=f)) for f in features]
    return tf.constant([example.SerializeToString() for example in made])


def _train(how: str, num_ids: int = 1) -> Any:
    """An embedding or layer whose batches are [2, 3, num_ids]."""
    batch = {"film": tf.reshape(tf.range(6 * num_ids) % V, [2, 3, num_ids])}
    features = {"film": te.FeatureConfig(te.TableConfig(V, D, combiner="sum"))}
    if how == "layer":
        layer = te.keras.TPUEmbedding(features, te.SGD(0.1))
        layer(batch)
        return layer
    if how == "functional":
        layer = te.keras.TPUEmbedding(features, te.SGD(0.1))
        layer({"film": keras.Input([3, num_ids], dtype="int64", name="film")})
        return layer
    kind: Any = {"V2": te.TPUEmbeddingV2, "V0": te.TPUEmbeddingV0}
    embedding = kind.get(how, te.TPUEmbedding)(features, te.SGD(0.1))
    if how == "build":
        embedding.build({"film": tf.TensorShape([2, 3, num_ids])})
    elif how == "batch":
        embedding.enqueue(batch)
        embedding.apply_gradients(embedding.dequeue())
    else:
        embedding(batch)
    return embedding


SEVERAL_AXES = ["batch", "build", "V2", "V0", "layer", "functional"]


@pytest.mark.parametrize("how", SEVERAL_AXES)
def test_a_feature_is_served_with_the_axes_that_training_read(
    how: str, tmp_path: pathlib.Path
) -> None:
    source = _train(how)
    (table,) = source.embedding_tables.values()
    values = np.asarray(table)
    export(source, tmp_path)
    served = load(tmp_path)
    rows = [[0, 1, 2], [3, 4, 5], [2, 2], []]
    # The activation of a position without an id is zeros.
    expected = np.zeros([4, 3, D], np.float32)
    for sample, ids in enumerate(rows):
        expected[sample, : len(ids)] = values[ids]
    ragged = tf.ragged.constant(rows, tf.int64, row_splits_dtype=tf.int64)
    answers = {
        "examples": served["examples"](examples=_examples(rows)),
        "ragged": served["ragged"](
            film_values=ragged.values, film_row_splits=ragged.row_splits
        ),
    }
    dense = tf.constant([[[0, 5], [1, 1], [2, 0]]], tf.int64)
    answer = served["dense"](film=dense)["film"]
    np.testing.assert_array_equal(answer, values[dense].sum(-2))
    for kind, found in answers.items():
        assert served[kind].structured_outputs["film"].shape == (None, 3, D)
        np.testing.assert_array_equal(found["film"], expected, kind)


@pytest.mark.parametrize("how", SEVERAL_AXES)
@pytest.mark.parametrize("num_ids", [2, 0])
def test_ragged_rows_that_do_not_tell_their_positions_are_refused(
    how: str, num_ids: int, tmp_path: pathlib.Path
) -> None:
    source = _train(how, num_ids)
    for kind in ("ragged", "examples"):
        with pytest.raises(ValueError, match=r"film.*Pass `signatures=\[\"dense"):
            export(source, tmp_path, signatures=[kind])
    assert not list(tmp_path.iterdir())
    export(source, tmp_path, signatures=["dense", "sparse"])
    answer = load(tmp_path)["dense"](film=tf.zeros([1, 3, 4], tf.int64))["film"]
    assert answer.shape == (1, 3, D)


def test_positions_of_batches_that_differ_are_not_told_by_ragged_rows(
    tmp_path: pathlib.Path,
) -> None:
    embedding = _train("batch")
    with pytest.raises(ValueError, match="does not match"):  # It counts for nothing.
        embedding.enqueue({"film": tf.zeros([2, 4], tf.int64)})
    export(embedding, tmp_path / "1")
    embedding.enqueue({"film": tf.zeros([2, 4, 1], tf.int64)}, training=False)
    with pytest.raises(ValueError, match="the same number of positions"):
        export(embedding, tmp_path / "2")


def lookup_table() -> Any:
    keys = tf.lookup.KeyValueTensorInitializer(["Alien", "Brazil"], tf.range(2, 4))
    return tf.lookup.StaticHashTable(keys, -1)


GLOBAL_TABLE = lookup_table()


@dataclasses.dataclass(frozen=True)
class Reader:
    """Holds a table in a dict, as an object that is not trackable."""

    tables: dict[str, Any]

    def read(self, inputs: dict[str, tf.Tensor]) -> Request:
        return Request({"film": self.tables["title"].lookup(inputs["title"])})


def reads() -> dict[str, Callable[[dict[str, tf.Tensor]], Request]]:
    """Functions that use a lookup table which is an attribute of no model."""
    table, lookup = lookup_table(), keras.layers.StringLookup(vocabulary=["Alien"])
    in_closure = {"title": lookup_table().lookup}
    return {
        "closure": lambda inputs: Request({"film": table.lookup(inputs["title"])}),
        "global": lambda inputs: Request(
            {"film": GLOBAL_TABLE.lookup(inputs["title"])}
        ),
        "nested": lambda inputs: Request(
            {"film": next(GLOBAL_TABLE.lookup(text) for text in inputs.values())}
        ),
        "container": lambda inputs: Request(
            {"film": in_closure["title"](inputs["title"])}
        ),
        "dataclass": Reader({"title": lookup_table()}).read,
        "keras": lambda inputs: Request({"film": lookup(inputs["title"]) + 1}),
        "partial": functools.partial(
            lambda found, inputs: Request({"film": found.lookup(inputs["title"])}),
            lookup_table(),
        ),
    }


@pytest.mark.parametrize("way", list(reads()))
def test_lookup_tables_that_a_signature_refers_to_are_saved(
    way: str, tmp_path: pathlib.Path
) -> None:
    signature = Signature({"title": tf.TensorSpec([None], tf.string)}, reads()[way])
    export(TABLE, tmp_path, feature_config=FEATURES, signatures={"by_title": signature})
    found = load(tmp_path)["by_title"](title=tf.constant(["Alien"]))["film"]
    np.testing.assert_array_equal(found, [[6.0, 7.0, 8.0]])


def test_each_of_many_signatures_saves_its_own_lookup_table(
    tmp_path: pathlib.Path,
) -> None:
    def signature(row: int) -> Signature:
        initializer = tf.lookup.KeyValueTensorInitializer(
            ["Alien"], tf.constant([row], tf.int64)
        )
        table = tf.lookup.StaticHashTable(initializer, -1)

        def look_up(inputs: dict[str, tf.Tensor]) -> tf.Tensor:
            return table.lookup(inputs["title"])

        return Signature(
            {"title": tf.TensorSpec([None], tf.string)},
            lambda inputs: Request({"film": look_up(inputs)}),
        )

    signatures = {f"row_{row}": signature(row) for row in range(4)}
    export(TABLE, tmp_path, feature_config=FEATURES, signatures=signatures)
    served = load(tmp_path)
    for row in range(4):
        found = served[f"row_{row}"](title=tf.constant(["Alien"]))["film"]
        np.testing.assert_array_equal(found, next(iter(TABLE.values()))[row : row + 1])


def test_tables_of_numpy_and_storages_by_name(tmp_path: pathlib.Path) -> None:
    users = te.TableConfig(4, 16, name="users")
    values = np.arange(64, dtype=np.float32).reshape(4, 16)
    tables = {FILMS: next(iter(TABLE.values())).numpy(), users: values}
    options: Any = {
        "feature_config": {**FEATURES, "user": te.FeatureConfig(users)},
        "signatures": ["dense"],
    }
    storage = {"users": "int8", FILMS: "float16"}
    report = export(tables, tmp_path / "1", storage=storage, **options)
    assert [table.storage for table in report.tables] == ["float16", "int8"]
    answer = load(tmp_path / "1")["dense"](
        film=tf.constant([2], tf.int64), user=tf.constant([3], tf.int64)
    )
    np.testing.assert_array_equal(answer["film"], [[6.0, 7.0, 8.0]])
    np.testing.assert_allclose(answer["user"], values[3:], atol=15 / 510)
    both: Any = {"users": "int8", users: "int8"}
    with pytest.raises(ValueError, match="has table users twice, by TableConfig and"):
        export(tables, tmp_path / "2", storage=both, **options)
    for bad in (values.astype(np.int32), values[:3], values.astype(object)):
        with pytest.raises(ValueError, match=r"variable, tensor or NumPy array of sha"):
            export({**tables, users: bad}, tmp_path / "2", **options)
    with pytest.raises(ValueError, match="must be a floating point variable or tenso"):
        te.serving_embedding_lookup(
            {"user": tf.constant([3])}, None, tables, options["feature_config"]
        )


class Hidden:
    """Neither trackable nor a dataclass."""

    def __init__(self) -> None:
        self.table = lookup_table()


def test_lookup_tables_that_are_not_found_are_refused(tmp_path: pathlib.Path) -> None:
    hidden = Hidden()
    signature = Signature(
        {"title": tf.TensorSpec([None], tf.string)},
        lambda inputs: Request({"film": hidden.table.lookup(inputs["title"])}),
    )
    with pytest.raises(ValueError, match=r"cannot find. Pass a tf.Module or a Keras"):
        export(TABLE, tmp_path, feature_config=FEATURES, signatures={"a": signature})
    assert not list(tmp_path.iterdir())


def test_exports_tables_that_were_restored(tmp_path: pathlib.Path) -> None:
    serving = te.TPUEmbeddingForServing(FEATURES, te.Adagrad(0.1))
    export(serving, tmp_path, signatures=["dense"])
    found = load(tmp_path)["dense"](film=tf.constant([5], tf.int64))["film"]
    np.testing.assert_array_equal(found, serving.embedding_tables[FILMS][5:])


def test_tables_are_named_in_any_script(tmp_path: pathlib.Path) -> None:
    table = te.TableConfig(V, D, te.RowIdInitializer(), name="фильмы")
    source = te.TPUEmbedding({"кино": te.FeatureConfig(table)}, te.Adagrad(0.1))
    report = export(source, tmp_path, signatures=["dense"])
    assert report.tables[0].name == "фильмы"
    served = load(tmp_path)["dense"]
    (answer,) = served(*(tf.constant([5], tf.int64),)).values()
    np.testing.assert_array_equal(answer, [[5.0] * D])


def test_exports_stacked_tables(tmp_path: pathlib.Path) -> None:
    features = {
        name: te.FeatureConfig(
            te.TableConfig(V, D, te.RowIdInitializer(offset), name=name), name=name
        )
        for name, offset in (("film", 0), ("user", 10))
    }
    source = te.TPUEmbeddingV2(features, te.SGD(0.1))
    export(source, tmp_path / "model", signatures=["dense"])
    ids = tf.constant([4, 5], tf.int64)
    served = load(tmp_path / "model")["dense"](film=ids, user=ids)
    np.testing.assert_array_equal(served["film"], np.repeat([[4.0], [5.0]], D, 1))
    np.testing.assert_array_equal(served["user"], np.repeat([[14.0], [15.0]], D, 1))


def test_hostile_sizes_can_be_limited(tmp_path: pathlib.Path) -> None:
    export(
        TABLE,
        tmp_path,
        feature_config=FEATURES,
        signatures=["sparse"],
        most_samples=100,
    )
    ask = load(tmp_path)["sparse"]
    none = {
        "film_indices": tf.zeros([0, 2], tf.int64),
        "film_values": tf.zeros([0], tf.int64),
    }
    shape = tf.constant([100, 1], tf.int64)
    assert ask(**none, film_dense_shape=shape)["film"].shape == (100, D)
    with pytest.raises(tf.errors.InvalidArgumentError, match="more than 100 samples"):
        ask(**none, film_dense_shape=shape + 1)


def test_shapes_of_inputs_follow_the_features(tmp_path: pathlib.Path) -> None:
    features = [
        te.FeatureConfig(FILMS, max_sequence_length=2),
        te.FeatureConfig(FILMS, output_shape=[None, 2]),
        te.FeatureConfig(FILMS, output_shape=[4]),
    ]
    kinds = ["dense", "sparse"]
    export(TABLE, tmp_path, feature_config=features, signatures=kinds)
    signatures = graph_of(tmp_path).signature_def
    dense, sparse = signatures["dense"].inputs, signatures["sparse"].inputs
    found = {name: tf.TensorShape(i.tensor_shape) for name, i in dense.items()}
    assert {name: shape.as_list() for name, shape in found.items()} == {
        "feature_0": [None, None],
        "feature_1": [None, 2, None],
        "feature_2": [None],
    }
    ranks = [sparse[f"feature_{i}_dense_shape"].tensor_shape for i in range(3)]
    assert [shape.dim[0].size for shape in ranks] == [2, 3, 2]


KEPT = te.TPUEmbedding(FEATURES, None)
CLASH = {"film/0": FEATURES["film"], "film": [FEATURES["film"]]}
REFUSED: list[tuple[Any, dict[str, Any], type[Exception], str]] = [
    (3, {}, TypeError, "must be a TPUEmbedding, a TPUEmbeddingV2, a TPUEmbeddingV0"),
    (TABLE, {}, ValueError, "export needs `feature_config` for a dict of tables"),
    ({}, {"feature_config": FEATURES}, ValueError, "`tables` lacks table films"),
    (KEPT, {"feature_config": FEATURES}, ValueError, "an embedding has its own"),
    (KEPT, {"invalid_ids": "drop"}, ValueError, "keeps the rule that it was"),
    (
        KEPT,
        {"signatures": ["json"]},
        ValueError,
        "Unknown signature 'json'. Use one of",
    ),
    (KEPT, {"signatures": []}, ValueError, "export needs at least one signature."),
    (KEPT, {"signatures": "dense"}, TypeError, "pass ['dense']"),
    (KEPT, {"weighted": "film"}, TypeError, "`weighted` must be a list of names."),
    (KEPT, {"most_samples": 0}, ValueError, "`most_samples` must be an int >= 1."),
    (KEPT, {"most_samples": "9"}, ValueError, "must be an int >= 1. Received: '9'"),
    (
        KEPT,
        {"dense_inputs": {"n": tf.TensorSpec([None, 1])}},
        ValueError,
        "`dense_inputs` are inputs of the model, but there is no model.",
    ),
    (
        KEPT,
        {
            "signatures": {"ask": Signature({}, lambda _: Request({}))},
            "weighted": ["film"],
        },
        ValueError,
        "`weighted` applies only to the signatures that export creates.",
    ),
    (KEPT, {"storage": "int2"}, ValueError, "Unknown storage 'int2'. Use one of fl"),
    (KEPT, {"storage": {FILMS: "f"}}, ValueError, "Unknown storage 'f'. Use one of"),
    (KEPT, {"storage": {"movies": "int8"}}, ValueError, "`storage` names 'movies'. K"),
    (KEPT, {"weighted": ["x"]}, ValueError, "`weighted` names x. Known names: film."),
    (
        KEPT,
        {"model": max, "dense_inputs": {"n": tf.TensorSpec([None, None])}},
        ValueError,
        "`dense_inputs['n']` must be a tf.TensorSpec whose first axis is the batch",
    ),
    (
        KEPT,
        {
            "model": max,
            "dense_inputs": {"film": tf.TensorSpec([None])},
            "signatures": ["dense"],
        },
        ValueError,
        "Both feature film and `dense_inputs` would be the input 'film'",
    ),
    (
        KEPT,
        {
            "model": max,
            "dense_inputs": {"film": tf.TensorSpec([None])},
            "signatures": ["examples"],
        },
        ValueError,
        "Both feature film and `dense_inputs` would be the input 'film'",
    ),
    (
        TABLE,
        {"feature_config": CLASH, "signatures": ["examples", "sparse", "ragged"]},
        ValueError,
        "Both feature film/0 and feature film/0 would be the input 'film",
    ),
    (
        TABLE,
        {
            "feature_config": {"f": FEATURES["film"], "F": FEATURES["film"]},
            "signatures": ["ragged"],
        },
        ValueError,
        "The inputs 'F_values', of feature F, and 'f_values', of feature f, of the",
    ),
    (KEPT, {"model": lambda activations: 3}, TypeError, "must return a tensor or a d"),
    (
        TABLE,
        {
            "feature_config": {"a": {"b": FEATURES["film"]}, "a_b": FEATURES["film"]},
            "signatures": ["examples"],
        },
        ValueError,
        "Both feature a/b and feature a_b would be the output 'a_b' of the exported",
    ),
    (
        TABLE,
        {
            "feature_config": CLASH,
            "signatures": {"own": Signature({}, lambda inputs: Request({}))},
        },
        ValueError,
        "Both feature film/0 and feature film/0 would be the output 'film_0' of the",
    ),
]


@pytest.mark.parametrize(("source", "options", "error", "text"), REFUSED)
def test_bad_arguments_write_nothing(
    source: Any,
    options: dict[str, Any],
    error: type[Exception],
    text: str,
    tmp_path: pathlib.Path,
) -> None:
    folder = tmp_path / "model"
    with pytest.raises(error) as raised:
        export(source, folder, **options)
    assert text in str(raised.value)
    assert not folder.exists()


def test_names_that_differ_in_case_only_are_served_in_examples(
    tmp_path: pathlib.Path,
) -> None:
    features = {"f": FEATURES["film"], "F": FEATURES["film"]}
    export(TABLE, tmp_path, feature_config=features, signatures=["examples"])
    example = tf.train.Example()
    for name, film in (("f", 4), ("F", 5)):
        example.features.feature[name].int64_list.value.append(film)
    serialized = tf.constant([example.SerializeToString()])
    found = load(tmp_path)["examples"](examples=serialized)
    np.testing.assert_array_equal(found["f"], [[12, 13, 14]])
    np.testing.assert_array_equal(found["F"], [[15, 16, 17]])


def test_an_empty_path_is_not_the_working_directory() -> None:
    with pytest.raises(ValueError, match="`path` must name a new or an empty folder"):
        export(TABLE, "", feature_config=FEATURES)


@pytest.mark.parametrize("make", [pathlib.Path.mkdir, pathlib.Path.touch])
def test_nothing_is_overwritten(
    make: Callable[[pathlib.Path], None], tmp_path: pathlib.Path
) -> None:
    make(tmp_path / "file")
    with pytest.raises(ValueError, match="exists and is not an empty folder"):
        export(KEPT, tmp_path, signatures=["dense"])
    assert len(list(tmp_path.iterdir())) == 1


@pytest.mark.parametrize("kind", ["ragged", "sparse", "examples"])
def test_missing_weights_name_the_feature_where_entries_are_left_out(
    kind: str, tmp_path: pathlib.Path
) -> None:
    table = te.TableConfig(V, D, name="films", invalid_ids="drop")
    features = {"film": te.FeatureConfig(table, max_sequence_length=2)}
    source = te.TPUEmbedding(features, None)
    export(source, tmp_path / "model", signatures=[kind], weighted=["film"])
    ids, weights = tf.constant([1, 2], tf.int64), tf.constant([1.0])
    example = tf.train.Example()
    example.features.feature["film"].int64_list.value.extend([1, 2])
    example.features.feature["film_weights"].float_list.value.append(1.0)
    inputs: dict[str, Any] = {
        "ragged": {"film_row_splits": tf.constant([0, 2], tf.int64)},
        "sparse": {
            "film_indices": tf.constant([[0, 0], [0, 1]], tf.int64),
            "film_dense_shape": tf.constant([1, 2], tf.int64),
        },
        "examples": {"examples": tf.constant([example.SerializeToString()])},
    }[kind]
    if kind != "examples":
        inputs |= {"film_values": ids, "film_weights": weights}
    with pytest.raises(tf.errors.InvalidArgumentError, match="film: 1 weights for 2"):
        load(tmp_path / "model")[kind](**inputs)
