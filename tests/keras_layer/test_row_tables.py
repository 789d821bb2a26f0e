"""Models with `te.keras.Embedding` in checkpoints, exports and plans.

`tests/test_tf_keras.py` runs this file with tf_keras, too.
"""

from __future__ import annotations

import pathlib
from typing import Any

import numpy as np
import pytest
import tensorflow as tf
from keras_layer.version import keras

import tpu_embedding as te
from tpu_embedding import checkpoint
from tpu_embedding.checkpoint.stored import core_of
from tpu_embedding.keras import Embedding, RowSparseOptimizer
from tpu_embedding.keras.keras_api import keras_api

V, D = 12, 4
IS_KERAS_3 = hasattr(keras, "ops")
keras_3 = pytest.mark.skipif(not IS_KERAS_3, reason="tf_keras does not have it")


def make(rows: int = V, optimizer: Any = "adam", cls: Any = Embedding) -> Any:
    """Two tables; the names of the layers are those of the tables."""
    inputs = [
        keras.Input([3], dtype="int64", name="film"),
        keras.Input([2], name="user"),
    ]
    first = keras.initializers.RandomUniform(-1, 1, seed=1)
    found = [
        cls(rows, D, first, name="films")(inputs[0]),
        cls(5, 2, first, name="users")(inputs[1]),
    ]
    flat = [keras.layers.Flatten()(x) for x in found]
    outputs = keras.layers.Dense(1, name="out")(keras.layers.Concatenate()(flat))
    model = keras.Model(inputs, outputs)
    made = optimizer() if callable(optimizer) else optimizer
    if cls is Embedding:
        made = RowSparseOptimizer(made)
    model.compile(made, "mse")
    return model


IDS = [np.array([[1, 2, 3], [4, 5, 6], [1, 7, 8]]), np.array([[0, 1], [2, 3], [4, 0]])]
Y = np.array([[1.0], [-1.0], [0.5]], np.float32)


def train(model: Any, epochs: int = 1) -> Any:
    """Trains with one sample a step, so that rows wait; returns the losses."""
    fitted = model.fit(IDS, Y, batch_size=1, epochs=epochs, shuffle=False, verbose=0)
    return fitted.history["loss"]


def arrays(model: Any) -> dict[str, np.ndarray]:
    tables = core_of(model).checkpoint_rows()
    return {f"{t}/{a}": r.numpy() for t, own in tables.items() for a, r in own.items()}


@pytest.mark.parametrize("rule", ["adam", "sgd", "ftrl"])
def test_tables_and_slots_are_saved_and_restored(rule: str, tmp_path: pathlib.Path):
    optimizers = {
        "adam": keras.optimizers.Adam(0.1),
        "sgd": keras.optimizers.SGD(0.1, momentum=0.9),
        "ftrl": keras.optimizers.Ftrl(0.1),
    }
    slots = {
        "adam": ["momenta", "velocities"],
        "sgd": ["momentums"],
        "ftrl": ["accumulators", "linears"],
    }
    model = make(optimizer=optimizers[rule])
    train(model)
    path = checkpoint.save(model, tmp_path / "saved")
    stored = checkpoint.read(path)
    assert list(stored) == ["films", "users"]
    assert list(stored["films"].slots) == slots[rule]
    assert stored.updates == 3
    expected = arrays(model)
    np.testing.assert_array_equal(  # Rows that waited are caught up.
        stored["films"].parameters.numpy(), model.get_layer("films").get_weights()[0]
    )
    later = train(model)
    checkpoint.restore(model, path)
    assert int(model.optimizer.iterations) == 3
    for name, value in arrays(model).items():
        np.testing.assert_array_equal(value, expected[name])
    assert later


@pytest.mark.parametrize("cls", [keras.layers.Embedding, Embedding])
def test_a_vocabulary_grows_from_a_file_of_keras(cls: Any, tmp_path: pathlib.Path):
    before = make(cls=cls)
    train(before, 2)
    before.save(path := str(tmp_path / "old.keras"))
    weights = str(tmp_path / "old.weights.h5")
    before.save_weights(weights)
    table, moments = before.get_layer("films").get_weights()[0], arrays_of(before)
    for resize in (True, "mean", keras.initializers.Constant(7.0)):
        model = make(V + 3)
        first = model.get_layer("films").get_weights()[0]
        file = weights if resize == "mean" and IS_KERAS_3 else path
        checkpoint.restore(model, file, resize=resize)
        grown = arrays(model)
        np.testing.assert_array_equal(grown["films/parameters"][:V], table)
        new = grown["films/parameters"][V:]
        if resize is True:
            np.testing.assert_array_equal(new, first[V:])
        elif resize == "mean":
            np.testing.assert_allclose(new, [table.mean(0)] * 3, rtol=1e-5)
        else:
            np.testing.assert_array_equal(new, np.full([3, D], 7.0))
        for slot, value in moments.items():
            np.testing.assert_array_equal(grown[f"films/{slot}"][:V], value)
            np.testing.assert_array_equal(grown[f"films/{slot}"][V:], 0)
        assert int(model.optimizer.iterations) == 6


def arrays_of(model: Any) -> dict[str, np.ndarray]:
    """The slots of the films, as Keras has them."""
    optimizer = model.optimizer
    index = keras_api.index_of(optimizer, model.get_layer("films").embeddings)
    return {
        "momenta": optimizer._momentums[index].numpy(),
        "velocities": optimizer._velocities[index].numpy(),
    }


def test_export_serves_the_model_in_each_storage(tmp_path: pathlib.Path):
    model = make()
    train(model)
    expected = model.predict(IDS, verbose=0)
    for storage, mapped, atol in (
        ("float32", False, 1e-6),
        ("int8", False, 0.05),
        ({"films": "bfloat16"}, True, 0.02),
    ):
        path = str(tmp_path / f"{mapped}{len(storage)}")
        report = te.serving.export(model, path, storage=storage, mapped=mapped)
        assert [table.name for table in report.tables][:1] == ["films"]
        loaded: Any = tf.saved_model.load(path)
        served = loaded.signatures["serving_default"]
        inputs = {
            "film": tf.constant(IDS[0], tf.int64),
            "user": tf.constant(IDS[1], tf.float32),
        }
        np.testing.assert_allclose(served(**inputs)["output"], expected, atol=atol)
        if storage == "int8":  # The other table is too narrow for it.
            stored = tf.train.list_variables(f"{path}/variables/variables")
            assert sum(int(np.prod(shape)) == V * D for _, shape in stored) == 1
    assert train(model)  # The export leaves the model as it is.


def test_rows_are_found_by_ids_and_the_others_filled(tmp_path: pathlib.Path):
    """A vocabulary in another order: row 1 of the new table is row 4 of the old."""
    before, model = make(), make(V + 3)
    train(before)
    path = checkpoint.save(before, tmp_path / "saved")
    ids = [0, 4, 99, 1]
    checkpoint.restore(
        model, path, resize="mean", ids={"films": ids}, rename={"users": "users"}
    )
    old, new = arrays(before), arrays(model)
    for name in ("parameters", "momenta", "velocities"):
        stored = old[f"films/{name}"]
        mean = stored.mean(0) if name == "parameters" else np.zeros(D)
        expected = np.stack([stored[0], stored[4], mean, stored[1], *[mean] * 11])
        np.testing.assert_allclose(new[f"films/{name}"], expected, rtol=1e-5)


def wrong(shape: Any, dtype: Any = None) -> tf.Tensor:
    return tf.ones([1, 1], dtype)


REFUSED: dict[str, tuple[dict[str, Any], type[Exception], str]] = {
    "initializer": (
        {"resize": wrong},
        ValueError,
        r"must return a tensor of the shape .* Received: \(1, 1\)",
    ),
    "size": ({}, ValueError, r"films has shape \[15, 4\].*Pass `resize=True`"),
    "name": ({"rename": {"films": "x"}}, KeyError, "no table called x"),
    "ids": ({"ids": {"films": range(20)}}, ValueError, "20 ids .*which has 15 rows"),
}


def test_refusals_change_nothing(tmp_path: pathlib.Path):
    before, model = make(), make(V + 3)
    train(before)
    path = checkpoint.save(before, tmp_path / "saved")
    train(model)
    expected = arrays(model)
    for options, error, words in REFUSED.values():
        with pytest.raises(error, match=words):
            checkpoint.restore(model, path, **options)
    for name, value in arrays(model).items():
        np.testing.assert_array_equal(value, expected[name])
    assert int(model.optimizer.iterations) == 3


WAYS = {
    "op": lambda o: o.Adam(0.1),
    "rows": lambda o: o.RMSprop(0.1, momentum=0.9),
    "dense": lambda o: o.Adam(0.1, beta_1=0.9, beta_2=0.9),
    "clipped": lambda o: o.SGD(0.1, clipnorm=1e-3),
}


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.filterwarnings("ignore:RowSparseOptimizer updates all rows")
def test_telemetry_counts_each_way_of_updates(way: str):
    model, plain = (make(optimizer=WAYS[way](keras.optimizers)) for _ in range(2))
    plain.set_weights(model.get_weights())
    for each in (model, plain):
        train(each)  # Traced before anything counts.
    telemetry = te.Telemetry(model, every=2, hottest=3)
    assert train(model, epochs=2)[0] == train(plain, epochs=2)[0]
    if way != "clipped":
        assert {*model.optimizer.updates_rows_by.values()} == {way}
    read = telemetry.read()  # Of the samples 0, 2, 1.
    assert read["*"]["steps"] == (6, True)
    assert read["*"]["counted_steps"] == (3, True)
    films = read["films"]
    assert films["ids"] == films["distinct_ids"] == (9, False)
    assert films["rows_touched"].value == 8
    assert films["hottest_rows"].value == [(1, 2), (2, 1), (3, 1)]
    assert {*films} == {
        *("ids", "distinct_ids", "rows_touched", "hottest_rows"),
        *("gradient_norm", "update_norm"),
    }
    train(model)
    weights = {**arrays(model)}
    telemetry = te.Telemetry(model, every=1)
    model.fit([x[:1] for x in IDS], Y[:1], verbose=0)
    changes = arrays(model)["films/parameters"] - weights["films/parameters"]
    moved = np.arange(V) if way == "dense" else [1, 2, 3]
    norm = np.linalg.norm(changes[moved])
    found = telemetry.read()["films"]
    assert found["update_norm"] == (pytest.approx(norm, 1e-4), True)
    if way == "clipped":  # The norm is that before it is clipped.
        assert norm <= 1e-4 * 1.01 < found["gradient_norm"].value * 0.1


def test_telemetry_of_dense_gradients_and_of_a_second_reader(tmp_path: pathlib.Path):
    inputs = keras.Input([3], dtype="int64")
    rows = Embedding(V, D, embeddings_regularizer="l2", name="films")(inputs)
    outputs = keras.layers.Dense(1)(keras.layers.Flatten()(rows))
    model = keras.Model(inputs, outputs, name="whole")
    model.compile(RowSparseOptimizer("adam"), "mse")
    first = te.Telemetry(model)
    callback = te.keras.TelemetryCallback(tmp_path, every=1)
    model.fit(IDS[0], Y, batch_size=1, verbose=0, callbacks=[callback])
    read = callback.read()["whole"]
    assert read["*"]["steps"].value == 3
    assert {*read["films"]} == {"gradient_norm", "update_norm"}
    assert list(tmp_path.glob("events*"))
    with pytest.raises(RuntimeError, match="no longer counts"):
        first.read()


def test_telemetry_of_a_loop_of_ones_own_and_of_repeated_ids():
    layer = Embedding(te.Hashing(V, hashes=2), D, name="films")
    optimizer = RowSparseOptimizer(keras.optimizers.SGD(0.5))
    layer.build((None,))
    telemetry = te.Telemetry(layer, every=1)

    @tf.function
    def step(ids: tf.Tensor) -> None:
        with tf.GradientTape() as tape:
            loss = tf.reduce_sum(layer(ids))
        gradients = tape.gradient(loss, layer.trainable_variables)
        optimizer.apply_gradients([(gradients[0], layer.trainable_variables[0])])

    for _ in range(2):
        step(tf.constant([7, 7, 7]))
    found = telemetry.read()["films"]
    assert (found["ids"].value, found["rows_touched"].value) == (12, 2)
    assert found["gradient_norm"].value == pytest.approx(3 * np.sqrt(D), 1e-6)
    assert found["update_norm"].value == pytest.approx(1.5 * np.sqrt(D), 1e-6)
    telemetry.stop()
    step(tf.constant([8]))
    again = te.Telemetry(layer, every=1)
    step(tf.constant([8]))
    assert again.read()["films"]["ids"] == (2, True)
    compiled = tf.function(step, jit_compile=True)
    with pytest.raises(NotImplementedError, match=r"embeddings.*: XLA compiles"):
        compiled(tf.constant([[8]]))


def test_telemetry_that_was_stopped_is_in_nobodys_way():
    model = make(optimizer=keras.optimizers.SGD(0.1))
    telemetry = te.Telemetry(model, every=1)
    train(model)
    model.compile(keras.optimizers.SGD(0.1), "mse")
    telemetry.stop()
    model.compile(RowSparseOptimizer("sgd"), "mse", jit_compile=True)
    train(model)
    with pytest.raises(RuntimeError, match="no longer counts"):
        telemetry.read()


@pytest.mark.parametrize("every", [1, 2])
def test_telemetry_that_stops_beside_a_step(every: int):
    layer = Embedding(V, D, name="films")
    layer.build((None,))
    telemetry = te.Telemetry(layer, every=every)
    counter = keras_api.value_of(layer.embeddings).counter
    gradient = tf.IndexedSlices(tf.ones([1, D]), tf.constant([1]))
    end = counter.begin(gradient, False)
    telemetry.stop()
    end()
    assert counter.steps() == (0, 0)


def test_telemetry_of_tables_with_other_numbers_of_updates(tmp_path: pathlib.Path):
    model = make(optimizer=keras.optimizers.SGD(0.1))
    telemetry = te.Telemetry(model, every=1)
    optimizer = model.optimizer
    tables = [model.get_layer(name).embeddings for name in ("films", "users")]
    gradients = [tf.IndexedSlices(tf.ones([1, n]), tf.constant([1])) for n in (D, 2)]
    optimizer.build(model.trainable_variables)
    for step in range(4):
        count = 2 if step % 2 else 1
        optimizer.apply_gradients(
            list(zip(gradients[:count], tables[:count], strict=True))
        )
    with tf.summary.create_file_writer(str(tmp_path)).as_default():
        telemetry.write(4)
    (file,) = tmp_path.glob("*.tfevents.*")
    found = {
        value.tag: float(tf.make_ndarray(value.tensor))
        for event in tf.compat.v1.train.summary_iterator(str(file))
        for value in event.summary.value
        if value.tag.endswith("/ids")
    }
    assert found == {"embedding/films/ids": 1.0, "embedding/users/ids": 1.0}


def test_telemetry_of_models_that_share_a_layer():
    first, shared = (Embedding(V, D, name=name) for name in ("first", "shared"))
    ids = keras.Input([3], dtype="int64")
    both = keras.Model(ids, keras.layers.Add()([first(ids), shared(ids)]))
    one = keras.Model(ids, shared(ids))
    for model in (both, one):
        model.compile(RowSparseOptimizer("sgd"), "mse")
    of_both, of_one = te.Telemetry(both, every=1), te.Telemetry(one, every=1)
    assert not of_both.is_counting
    assert keras_api.value_of(first.embeddings).counter.owner is None
    of_one.stop()
    assert not of_one.is_counting


def test_telemetry_after_a_dense_gradient():
    layer = Embedding(V, D, name="films")
    layer.build((None,))
    (table,) = layer.trainable_variables
    optimizer = RowSparseOptimizer(keras.optimizers.SGD(0.5))
    optimizer.build([table])
    for gradient, known in (
        (tf.ones([V, D]), False),
        (tf.IndexedSlices(tf.ones([1, D]), tf.constant([1])), True),
    ):
        telemetry = te.Telemetry(layer, every=1)
        optimizer.apply_gradients([(gradient, table)])
        assert ("ids" in telemetry.read()["films"]) == known


class Followed:
    """A model whose outputs are rows, its trainer, and an export that follows it."""

    def __init__(self, folder: pathlib.Path, optimizer: Any, **options: Any) -> None:
        ids = keras.Input([3], dtype="int64", name="film")
        self.layer = Embedding(50, 8, name="films")
        self.model = keras.Model(ids, self.layer(ids))
        self.model.compile(optimizer, "mse", **options)
        self.folder, self.deltas = folder, 0

    def serve(self, storage: str) -> None:
        path = str(self.folder / "base")
        te.serving.export(self.model, path, storage=storage, deltas=True)
        self.served: Any = tf.saved_model.load(path)
        self.writer = te.serving.DeltaWriter(self.model, path, "replicas")

    def train(self, first: int) -> None:
        """Takes two steps, which name five rows together."""
        ids = np.array([[0, 1, 2], [2, 0, 1], [3, 3, 4], [1, 3, 3]]) + first
        goals = np.linspace(-1, 1, 4 * 3 * 8).reshape([4, 3, 8])
        self.model.fit(ids, goals, batch_size=2, shuffle=False, verbose=0)

    def follow(self) -> int:
        """Publishes and applies a delta; returns how many rows it has."""
        self.deltas += 1
        path = str(self.folder / f"{self.deltas}.delta")
        counts = self.writer.export_delta(path)
        te.serving.apply_delta(self.served, path)
        return counts["films"]

    def assert_same_rows(self, other: Any = None) -> None:
        ids = tf.reshape(tf.range(51, dtype=tf.int64) % 50, [-1, 3])
        found = self.served.signatures["serving_default"](film=ids)["output"]
        if other is None:
            expected = self.layer.get_weights()[0][ids.numpy()]
        else:
            expected = other.signatures["serving_default"](film=ids)["output"]
        np.testing.assert_array_equal(found, expected)


FOLLOWED = {
    "adagrad": (lambda o: RowSparseOptimizer(o.Adagrad(0.1)), "op", [5, 5, 0, 5]),
    "lazy": (lambda o: RowSparseOptimizer(o.Adam(0.1), lazy=True), "op", [5, 5, 0, 5]),
    "exact": (lambda o: RowSparseOptimizer(o.Adam(0.1)), "op", [5, 10, 0, 15]),
    "rows": (
        lambda o: RowSparseOptimizer(o.RMSprop(0.1, momentum=0.9)),
        "rows",
        [5, 10, 0, 15],
    ),
    "dense": (
        lambda o: RowSparseOptimizer(o.Adam(0.1, beta_1=0.9, beta_2=0.9)),
        "dense",
        [5, 10, 0, 15],
    ),
}


@pytest.mark.parametrize(
    "name",
    [
        pytest.param(name, marks=() if name == "exact" else pytest.mark.second_tier)
        for name in FOLLOWED
    ],
)
@pytest.mark.filterwarnings("ignore:RowSparseOptimizer updates all rows")
def test_deltas_have_every_row_that_moved(name: str, tmp_path: pathlib.Path):
    make_optimizer, way, counts = FOLLOWED[name]
    followed = Followed(tmp_path, make_optimizer(keras.optimizers))
    followed.serve("float32")
    for step, count in enumerate(counts):
        if count:
            followed.train(10 * step)
        assert followed.follow() == count
        followed.assert_same_rows()
    assert {*followed.model.optimizer.updates_rows_by.values()} == {way}


@pytest.mark.second_tier
@pytest.mark.parametrize("storage", ["float32", "int8"])
def test_deltas_have_rows_that_anybody_wrote(storage: str, tmp_path: pathlib.Path):
    followed = Followed(tmp_path, RowSparseOptimizer("adam"), jit_compile=True)
    model, layer = followed.model, followed.layer
    followed.train(40)
    followed.serve(storage)
    followed.train(0)
    assert followed.follow() == 10  # By XLA; rows of the steps before move too.
    model.compile(RowSparseOptimizer(keras.optimizers.Adagrad(0.1)), "mse")
    followed.train(20)
    assert followed.follow() == 5
    te.keras.unconvert(model)
    model.compile(keras.optimizers.SGD(0.1), "mse")
    followed.train(30)
    te.keras.convert(model)
    assert followed.follow() == 5
    table = layer.get_weights()[0]
    table[[7, 9]] += 1.0
    layer.set_weights([table])
    path = checkpoint.save(model, tmp_path / "saved")
    assert followed.follow() == 2
    followed.train(10)
    assert followed.follow() == 5
    checkpoint.restore(model, path)
    assert followed.follow() == 5
    te.serving.export(model, tmp_path / "after", storage=storage)
    followed.assert_same_rows(tf.saved_model.load(str(tmp_path / "after")))


def test_deltas_of_a_trainer_that_goes_on_from_its_marks(tmp_path: pathlib.Path):
    followed = Followed(tmp_path, RowSparseOptimizer(keras.optimizers.Adagrad(0.1)))
    followed.train(0)
    followed.serve("float32")
    followed.train(10)
    assert followed.follow() == 5
    followed.train(20)
    both = tf.train.Checkpoint(model=followed.model, deltas=followed.writer)
    path = both.write(str(tmp_path / "both"))
    table = followed.layer.get_weights()[0]
    again = Followed(tmp_path, RowSparseOptimizer(keras.optimizers.Adagrad(0.1)))
    again.layer.set_weights([table])
    base = str(tmp_path / "base")
    again.writer = te.serving.DeltaWriter(again.model, base, "replicas")
    tf.train.Checkpoint(model=again.model, deltas=again.writer).read(path)
    again.served, again.deltas = followed.served, followed.deltas
    assert again.follow() == 5
    again.assert_same_rows()
    again.writer.mark_all_rows()
    assert again.follow() == 50
    again.writer.stop()
    with pytest.raises(RuntimeError, match="was stopped"):
        again.follow()


def test_what_is_not_carried_names_the_layer(tmp_path: pathlib.Path):
    model, words = make(), r"te\.keras\.Embedding"
    adamax = keras.Model(model.inputs, model.outputs)
    adamax.compile(keras.optimizers.Adamax(), "mse")
    with pytest.raises(
        NotImplementedError, match=rf"with {words} is compiled with .*max"
    ):
        te.Telemetry(adamax)
    for options in ({"weighted": ["film"]}, {"most_samples": 7}):
        with pytest.raises(
            ValueError, match=f"`{next(iter(options))}` for a whole .*{words}"
        ):
            te.serving.export(model, str(tmp_path / "served"), **options)
    with pytest.raises(ValueError, match="Leave `signatures` out"):
        te.serving.export(model, str(tmp_path / "served"), signatures=["dense"])
    plain = make(cls=keras.layers.Embedding)
    for take in (checkpoint.save, te.serving.export):
        with pytest.raises(TypeError, match=f"{words}.*te.keras.convert"):
            take(plain, str(tmp_path / "plain"))
    model.compile(keras.optimizers.Adamax(), "mse")
    with pytest.raises(NotImplementedError, match=r"slots of .*Adamax are not known.*"):
        checkpoint.save(model, tmp_path / "other")
    checkpoint.save(model.get_layer("films"), tmp_path / "one")
    assert list(checkpoint.read(tmp_path / "one")["films"].slots) == []
    twice = [Embedding(2, 2, name="same") for _ in range(2)]
    for layer in twice:
        layer.build((None, 1))
    made = keras.Sequential([keras.Input([1]), twice[0]])
    other = keras.Sequential([keras.Input([1]), twice[1]], name="other")
    both = keras.Model(made.inputs, [made.outputs[0], other(made.inputs[0])])
    with pytest.raises(ValueError, match="have the same name: same, same"):
        checkpoint.save(both, tmp_path / "twice")


def test_a_plan_has_the_tables_and_slots_of_a_model():
    report = te.plan(make(), batch_size=8, processes=(), topologies=())
    found = {(a.table, a.array): a.shape for a in report.arrays}
    assert found == {
        ("films", "parameters"): (V, D),
        ("films", "momenta"): (V, D),
        ("films", "velocities"): (V, D),
        ("users", "parameters"): (5, 2),
        ("users", "momenta"): (5, 2),
        ("users", "velocities"): (5, 2),
    }
    with pytest.raises(ValueError, match=r"cannot convert .*RMSprop"):
        te.plan(make(optimizer=keras.optimizers.RMSprop()), batch_size=8)
    plain = keras.Sequential([keras.Input([1]), keras.layers.Embedding(2, 2)])
    with pytest.raises(TypeError, match=r"has none of these\. Pass te\.keras\.conv"):
        te.plan(plain, batch_size=8)


class Tied(keras.layers.Layer):
    """Scores all rows of a table."""

    def __init__(self, table: Any) -> None:
        super().__init__()
        self.table = table

    def call(self, found: Any) -> Any:
        return tf.matmul(found, self.table.embeddings, transpose_b=True)


def test_what_deltas_refuse(tmp_path: pathlib.Path):
    followed = Followed(tmp_path, RowSparseOptimizer(keras.optimizers.Adam(0.1)))
    followed.serve("float32")
    base = tmp_path / "base"
    with pytest.raises(ValueError, match=r"has a DeltaWriter for 'replicas'"):
        te.serving.DeltaWriter(followed.model, base, "replicas")
    followed.writer.stop()
    te.serving.DeltaWriter(followed.model, base, "replicas").stop()
    logits = Tied(followed.layer)(followed.model.output)
    tied = keras.Model(followed.model.input, logits)
    with pytest.raises(NotImplementedError, match=r"the whole table 'films' \(as tied"):
        te.serving.export(tied, tmp_path / "tied", deltas=True)
    te.serving.export(tied, tmp_path / "tied")


@keras_3
def test_tables_in_several_weights_are_refused(tmp_path: pathlib.Path):
    model, path = make(), tmp_path / "base"
    te.serving.export(model, path, deltas=True)
    writer = te.serving.DeltaWriter(model, path, "replicas")
    model.get_layer("films").enable_lora(1)
    for refused in (
        lambda: checkpoint.save(model, tmp_path / "saved"),
        lambda: writer.export_delta(tmp_path / "1.delta"),
    ):
        with pytest.raises(NotImplementedError, match=r"'films' is split into .*lora_"):
            refused()


def test_slots_of_another_optimizer_start_anew(tmp_path: pathlib.Path):
    before = make(optimizer=keras.optimizers.Adadelta(0.1))
    train(before)
    before.save(path := str(tmp_path / "old.keras"))
    model = make()
    train(model)
    checkpoint.restore(model, path)
    found = arrays(model)
    for name, value in arrays(before).items():
        if name.endswith("parameters"):
            np.testing.assert_array_equal(found[name], value)
    assert not found["films/momenta"].any()


@keras_3  # tf_keras has no names in .weights.h5 files, and no StringLookup in graphs.
def test_an_export_looks_bags_and_strings_up(tmp_path: pathlib.Path):
    words = keras.Input([None], dtype="string", name="words")
    ids = keras.layers.StringLookup(vocabulary=["a", "b", "c"], mask_token="")(words)
    bags = Embedding(5, 8, combiner="mean", mask_zero=True, name="bags")(ids)
    rows = Embedding(te.Hashing(20, hashes=2), 8, name="hashed")(ids)
    outputs = {"bags": bags, "rows": keras.ops.sum(rows, 1)}
    model = keras.Model(words, outputs)
    batch = tf.constant([["a", "c", ""], ["x", "b", "a"]])
    expected = model(batch)
    te.serving.export(model, str(tmp_path / "served"), storage={"bags": "int8"})
    served: Any = tf.saved_model.load(str(tmp_path / "served"))
    found = served.signatures["serving_default"](words=batch)
    assert sorted(found) == ["bags", "rows"]
    np.testing.assert_allclose(found["bags"], expected["bags"], atol=1e-3)
    np.testing.assert_allclose(found["rows"], expected["rows"], atol=1e-6)


class Subclassed(keras.Model):
    def __init__(self):
        super().__init__()
        self.table = Embedding(5, 8, name="words")

    def call(self, ids: Any, training: bool = False) -> Any:
        return self.table(ids)


def test_a_subclassed_model_is_exported_by_its_signatures(tmp_path: pathlib.Path):
    model, ids, path = Subclassed(), tf.constant([[1, 4]], tf.int64), tmp_path / "a"
    with pytest.raises(ValueError, match=r"Embedding 'words' is not built\. Call the"):
        te.serving.export(model, path)
    expected = model(ids)
    with pytest.raises(ValueError, match=r"does not know its inputs.*`signatures`"):
        te.serving.export(model, path)
    inputs = {"ids": tf.TensorSpec([None, 2], tf.int64)}
    signature = te.serving.Signature(
        inputs, lambda given: te.serving.Request(given["ids"])
    )
    te.serving.export(model, path, signatures={"go": signature})
    served: Any = tf.saved_model.load(str(path))
    found = served.signatures["go"](ids=ids)["output"]
    np.testing.assert_array_equal(found, expected)
