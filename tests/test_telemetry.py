"""te.Telemetry against counts made entry by entry in Python."""

from __future__ import annotations

import collections
import os
import pathlib
from typing import Any

import numpy as np
import pytest
import tensorflow as tf
from reference.lookup import gains as reference_gains
from reference.lookup import samples_of
from replica_values import mirrored, of_replicas
from steps import evaluate_on, look_up, train_on

import tpu_embedding as te
import tpu_embedding.keras
from tpu_embedding.cluster_config import STATUS_VARIABLE
from tpu_embedding.testing import SoftwareTPUStrategy

# Random batches; 1,000 by `make fuzz-telemetry`.
BATCHES = int(os.environ.get("TPU_EMBEDDING_TELEMETRY_BATCHES", "50"))
CLASSES = ("queue", "lookup", "layer")


def make_configs(dtype: str = "float32") -> dict[str, te.FeatureConfig]:
    films = te.TableConfig(
        40, 3, te.RowIdInitializer(), te.Adagrad(0.3), "sum", "films",
        invalid_ids="drop", dtype=dtype,
    )  # fmt: skip
    users = te.TableConfig(
        15, 4, te.RowIdInitializer(), te.SGD(0.2), "mean", "users", invalid_ids="mod"
    )
    days = te.TableConfig(
        7, 2, te.RowIdInitializer(), te.Adam(0.1, lazy_adam=False), "sqrtn", "days"
    )
    return {
        "film": te.FeatureConfig(films, name="film"),
        "seen": te.FeatureConfig(films, max_sequence_length=3, name="seen"),
        "user": te.FeatureConfig(users, name="user"),
        "day": te.FeatureConfig(days, name="day"),
    }


def make_batch(random: np.random.Generator, invalid: bool = True) -> Any:
    """Random features of three kinds, and weights for one of them."""
    size = int(random.integers(1, 6))
    low, high = (-2, 44) if invalid else (0, 40)
    lengths = random.integers(0, 5, [2, size])
    seen, film = (
        tf.RaggedTensor.from_row_lengths(
            tf.constant(random.integers(low, high, n.sum()), tf.int64), n
        )
        for n in lengths
    )
    users = random.integers(0, 30 if invalid else 15, [size, 2])
    features = {
        "film": film.to_sparse(),
        "seen": seen,
        "user": tf.constant(users, tf.int64),
        "day": tf.constant(random.integers(0, 7, [size]), tf.int32),
    }
    weights = dict.fromkeys(features)
    weights["user"] = tf.constant(random.uniform(0.5, 2, [size, 2]), tf.float32)
    return features, weights


class Counted:
    """The figures of all batches so far, counted entry by entry."""

    def __init__(self, configs: dict[str, te.FeatureConfig]) -> None:
        self.configs = configs
        self.totals: Any = collections.defaultdict(collections.Counter)
        self.row_ids: Any = collections.defaultdict(collections.Counter)
        self.last_rows: dict[str, dict[int, np.ndarray]] = {}

    def add(self, replicas: list[tuple[Any, Any, Any]]) -> None:
        """Counts one step: features, weights and gradients of each replica."""
        rows: Any = collections.defaultdict(dict)
        for features, weights, gradients in replicas:
            for name, config in self.configs.items():
                self._add_feature(
                    config, features[name], weights[name], gradients[name], rows
                )
        self.last_rows = rows
        for table, touched in rows.items():
            self.totals[table]["distinct_ids"] += len(touched)

    def _add_feature(
        self, config: Any, ids: Any, weights: Any, gradient: Any, rows: Any
    ) -> None:
        table, total = config.table, self.totals[config.table.name]
        found = samples_of(ids, weights, config.max_sequence_length)
        size = table.vocabulary_size
        for sample in [*found.entries, found.cut]:
            total["invalid_ids"] += sum(not 0 <= i < size for i, _ in sample)
        gradient = np.reshape(gradient, [-1, table.dim])
        for at, sample in enumerate(found.entries):
            kept = [
                (i % size, weight)
                for i, weight in sample
                if table.invalid_ids == "mod" or 0 <= i < size
            ]
            total["samples"] += 1
            total["samples_without_ids"] += not kept
            gains = reference_gains([w for _, w in kept], table.combiner)
            for (row, _), gain in zip(kept, gains, strict=True):
                total["ids"] += 1
                self.row_ids[table.name][row] += 1
                summed = rows[table.name].setdefault(row, np.zeros(table.dim))
                summed += gain * gradient[at]

    def check(self, read: Any, before: Any, after: Any, *, invalid: bool) -> None:
        """Compares all figures; `before` and `after` are tables around the step."""
        assert list(read) == ["*", *before]
        for table in before:
            figures = read[table]
            for name in ("ids", "samples", "samples_without_ids", "distinct_ids"):
                assert figures[name] == (self.totals[table][name], True), (table, name)
            if invalid:
                assert figures["invalid_ids"].value == self.totals[table]["invalid_ids"]
            else:
                assert "invalid_ids" not in figures
            counts = self.row_ids[table]
            assert figures["rows_touched"].value == len(counts)
            hottest = sorted(counts.items(), key=lambda pair: (-pair[1], pair[0]))
            assert figures["hottest_rows"].value == hottest[:4]
            squares = sum(np.square(g).sum() for g in self.last_rows[table].values())
            assert figures["gradient_norm"].value == pytest.approx(squares**0.5, 1e-5)
            rows = sorted(self.last_rows[table])  # Others wait for their entries.
            change = np.linalg.norm((after[table] - before[table])[rows])
            assert figures["update_norm"].value == pytest.approx(change, 1e-5, 1e-6)


class Trained:
    """One of the three classes, trained with random gradients."""

    def __init__(self, kind: str, configs: Any, **options: Any) -> None:
        self.kind = kind
        make: Any = {
            "queue": te.TPUEmbedding,
            "lookup": te.TPUEmbeddingV2,
            "layer": te.keras.TPUEmbedding,
        }[kind]
        self.embedding = make(configs, None, **options)

    def tables(self) -> dict[str, np.ndarray]:
        tables = self.embedding.embedding_tables
        return {
            key.name: tf.cast(table, tf.float64).numpy()
            for key, table in tables.items()
        }

    def step(self, features: Any, weights: Any, random: Any) -> dict[str, np.ndarray]:
        """Trains one step; the gradients."""

        def draw(activations: Any) -> Any:
            return {
                name: tf.constant(random.normal(size=a.shape), tf.float32)
                for name, a in activations.items()
            }

        if self.kind != "layer":
            activations, preserved = look_up(self.embedding, features, weights)
            gradients = draw(activations)
            self.embedding.apply_gradients(gradients, *preserved)
        else:
            with tf.GradientTape() as tape:
                activations = self.embedding(features, weights)
                gradients = draw(activations)
                loss = tf.add_n(
                    [tf.reduce_sum(activations[n] * gradients[n]) for n in gradients]
                )
            tape.gradient(loss, self.embedding.trainable_variables)
        return {name: g.numpy().astype(np.float64) for name, g in gradients.items()}


@pytest.mark.parametrize(
    ("kind", "dtype", "batches"),
    [
        *((kind, "float32", BATCHES) for kind in CLASSES),
        ("queue", "bfloat16", max(BATCHES // 10, 5)),
    ],
)
def test_every_figure_of_fuzzed_batches(kind: str, dtype: str, batches: int):
    random = np.random.default_rng([batches, CLASSES.index(kind)])
    configs = make_configs(dtype)
    trained, counted = Trained(kind, configs), Counted(configs)
    telemetry = te.Telemetry(trained.embedding, every=1, hottest=4)
    for step in range(batches):
        features, weights = make_batch(random)
        before = trained.tables()
        gradients = trained.step(features, weights, random)
        counted.add([(features, weights, gradients)])
        read = telemetry.read()
        after = trained.tables()
        counted.check(read, before, after, invalid=kind != "lookup")
        assert read["*"]["steps"] == (step + 1, True)


def test_counting_changes_no_bit():
    trained = [Trained("queue", make_configs("bfloat16")) for _ in range(2)]
    te.Telemetry(trained[0].embedding, every=2)
    for seed in range(4):
        for each in trained:
            random = np.random.default_rng(seed)
            features, weights = make_batch(random)
            each.step(features, weights, random)
    tables = [each.tables() for each in trained]
    for name, values in tables[0].items():
        assert (values == tables[1][name]).all(), name


def test_only_every_nth_update_is_counted():
    random = np.random.default_rng(0)
    trained = Trained("queue", make_configs())
    counted = Counted(make_configs())
    telemetry = te.Telemetry(trained.embedding, every=3, hottest=4)
    for step in range(7):
        features, weights = make_batch(random)
        gradients = trained.step(features, weights, random)
        if step % 3 == 0:
            counted.add([(features, weights, gradients)])
    read = telemetry.read()
    assert read["*"]["steps"] == (7, True)
    assert read["*"]["counted_steps"] == (3, True)
    for table, totals in counted.totals.items():
        assert read[table]["ids"] == (totals["ids"], False)
        assert read[table]["rows_touched"] == (len(counted.row_ids[table]), False)


def test_replicas_count_as_one_batch():
    random = np.random.default_rng(3)
    strategy = mirrored(2)
    configs = make_configs()
    with strategy.scope():
        embedding = te.TPUEmbedding(configs, None)
        embedding.build()
    telemetry = te.Telemetry(embedding, every=1, hottest=4)
    counted = Counted(configs)
    for _ in range(3):
        batches = [make_batch(random) for _ in range(2)]
        features = {
            name: of_replicas(strategy, [b[0][name] for b in batches])
            for name in configs
        }
        weights = dict.fromkeys(configs)
        weights["user"] = of_replicas(strategy, [b[1]["user"] for b in batches])
        tables = embedding.embedding_tables
        before = {c.name: tf.cast(t, tf.float64).numpy() for c, t in tables.items()}
        given: list[Any] = []

        def step(features: Any, weights: Any, given: list[Any] = given):
            embedding.enqueue(features, weights)
            gradients = {
                name: tf.constant(random.normal(size=a.shape), tf.float32)
                for name, a in embedding.dequeue().items()
            }
            given.append({n: g.numpy() for n, g in gradients.items()})
            embedding.apply_gradients(gradients)

        strategy.run(step, args=(features, weights))
        counted.add([(f, w, g) for (f, w), g in zip(batches, given, strict=True)])
        after = {c.name: tf.cast(t, tf.float64).numpy() for c, t in tables.items()}
        counted.check(telemetry.read(), before, after, invalid=True)


def simple(**options: Any) -> te.TPUEmbedding:
    films = te.TableConfig(8, 2, te.RowIdInitializer(), name="films")
    return te.TPUEmbedding(te.FeatureConfig(films, name="f"), te.SGD(0.5), **options)


def train(embedding: te.TPUEmbedding, ids: list[int]) -> None:
    train_on(embedding, tf.constant(ids))


def test_a_pending_update_is_counted_when_it_is_applied():
    embedding = simple(pipeline_execution_with_tensor_core=True)
    telemetry = te.Telemetry(embedding, every=1)
    train(embedding, [1, 2])
    read = telemetry.read()
    assert (read["*"]["steps"].value, read["*"]["pending_updates"].value) == (0, 1)
    train(embedding, [3, 3])
    assert telemetry.read()["films"]["hottest_rows"].value == [(1, 1), (2, 1)]
    embedding.flush()
    read = telemetry.read()
    assert (read["*"]["steps"].value, read["*"]["pending_updates"].value) == (2, 0)
    assert read["films"]["ids"].value == 4
    train(embedding, [4, 4])
    embedding.reset()
    assert telemetry.read()["films"]["ids"].value == 4


def test_refused_steps_and_evaluation_are_not_counted():
    embedding = simple(check_numerics=True)
    telemetry = te.Telemetry(embedding, every=1)
    train(embedding, [1, 2])
    before = telemetry.read()
    with pytest.raises(tf.errors.InvalidArgumentError, match="id 8"):
        embedding.enqueue(tf.constant([8]))
    evaluate_on(embedding, tf.constant([3, 4, 4]))
    embedding.enqueue(tf.constant([3]))
    embedding.dequeue()
    with pytest.raises(tf.errors.InvalidArgumentError, match="not finite"):
        embedding.apply_gradients(tf.constant([[np.nan, 0.0]]))
    assert telemetry.read() == before
    embedding.apply_gradients(tf.ones([1, 2]))
    assert telemetry.read()["films"]["ids"].value == 3


@pytest.mark.parametrize("kind", ["queue", "v2"])
@pytest.mark.parametrize("pipelined", [False, True])
def test_refused_steps_of_replicas_and_tables_of_one_name(
    kind: str, pipelined: bool, tmp_path: pathlib.Path
):
    """In functions that are traced for several sizes, with a restore in between."""
    random = np.random.default_rng(11)
    strategy = mirrored(2)
    counters: list[collections.Counter[int]] = [collections.Counter() for _ in range(2)]
    options = {"check_numerics": True, "pipeline_execution_with_tensor_core": pipelined}
    make = {"queue": te.TPUEmbedding, "v2": te.TPUEmbeddingV2}[kind]
    embeddings, readers, steps = [], [], []
    for _ in counters:
        films = te.TableConfig(8, 2, te.RowIdInitializer(), name="films")
        with strategy.scope():
            embedding = make(te.FeatureConfig(films, name="f"), te.SGD(0.5), **options)
            embedding.build()
        readers.append(te.Telemetry(embedding, every=1))

        def in_replica(ids: Any, value: Any, embedding: Any = embedding) -> None:
            train_on(embedding, ids, lambda a: value * tf.ones_like(a))

        @tf.function
        def step(ids: Any, value: Any, in_replica: Any = in_replica) -> None:
            strategy.run(in_replica, args=(ids, value))

        embeddings.append(embedding)
        steps.append(step)
    applied = [0, 0]
    for number in range(14):
        which = int(random.integers(2))
        ids = list(random.integers(0, 8, [2, random.choice([1, 3])]))
        value = [1.0, 1.0]
        bad = number % 5 == 3
        if bad and random.random() < 0.5:
            ids[int(random.integers(2))][0] = 8
        elif bad:
            value[int(random.integers(2))] = np.nan
        arguments = (
            of_replicas(strategy, [tf.constant(x, tf.int64) for x in ids]),
            of_replicas(strategy, [tf.constant(x) for x in value]),
        )
        if bad:
            with pytest.raises(tf.errors.InvalidArgumentError):
                steps[which](*arguments)
        else:
            steps[which](*arguments)
            applied[which] += 1
            counters[which].update(np.concatenate(ids).tolist())
        if number == 9:
            path = te.checkpoint.save(embeddings[0], str(tmp_path / "saved"))
            before = readers[0].read()
            te.checkpoint.restore(embeddings[0], path)
            after = readers[0].read()
            assert after["films"] == before["films"]
    for embedding, reader, counter, count in zip(
        embeddings, readers, counters, applied, strict=True
    ):
        embedding.flush()
        read = reader.read()
        assert read["*"]["steps"].value == count
        found = read["films"]
        assert found["ids"] == (sum(counter.values()), True)
        assert found["rows_touched"].value == len(counter)
        hottest = sorted(counter.items(), key=lambda item: (-item[1], item[0]))
        assert found["hottest_rows"].value == hottest


def test_queue_depth():
    embedding = simple()
    telemetry = te.Telemetry(embedding)
    for depth in (1, 2):
        embedding.enqueue(tf.constant([1]))
        assert telemetry.read()["*"]["queue_depth"] == (depth, True)
    embedding.dequeue()
    assert telemetry.read()["*"]["queue_depth"].value == 1


def test_counting_in_a_function_and_stopping():
    embedding = simple()
    telemetry = te.Telemetry(embedding, every=1)

    @tf.function
    def steps(count: tf.Tensor):
        for i in tf.range(count):
            train_on(embedding, tf.stack([tf.cast(i % 8, tf.int32), 1]))

    steps(tf.constant(3))
    read = telemetry.read()
    assert read["*"]["steps"].value == 3
    assert read["films"]["hottest_rows"].value == [(1, 4), (0, 1), (2, 1)]
    telemetry.stop()
    steps(tf.constant(2))
    with pytest.raises(RuntimeError, match="no longer counts"):
        telemetry.read()
    steps(tf.constant(2, tf.int64))  # Traced again, while nothing is counted.
    again = te.Telemetry(embedding, every=1)
    steps(tf.constant(2))
    assert again.read()["*"]["steps"].value == 2


@pytest.mark.parametrize("before", [[], [5]])
def test_counting_begins_while_an_update_is_pending(before: list[int]):
    embedding = simple(pipeline_execution_with_tensor_core=True)
    if before:  # Counted by another telemetry until it was stopped.
        first = te.Telemetry(embedding, every=1)
        train(embedding, before)
        first.stop()
    train(embedding, [1, 2])
    telemetry = te.Telemetry(embedding, every=2)
    for ids in ([3], [4, 4], [6]):
        train(embedding, ids)
    embedding.flush()
    read = telemetry.read()
    assert read["*"]["steps"].value == 4
    assert sorted(read["films"]["hottest_rows"].value) == [(1, 1), (2, 1), (4, 2)]
    assert not read["films"]["ids"].exact


def test_a_function_that_counted_counts_for_the_next_telemetry():
    embedding = simple()

    @tf.function
    def step(ids: tf.Tensor):
        train_on(embedding, ids)

    first = te.Telemetry(embedding, every=1)
    step(tf.constant([1, 2]))
    first.stop()
    step(tf.constant([3, 3]))
    second = te.Telemetry(embedding, every=1)
    step(tf.constant([4, 4]))
    assert second.read()["films"]["hottest_rows"].value == [(4, 2)]
    assert second.read()["*"]["steps"].value == 1


def test_another_telemetry_takes_over():
    embedding = simple()
    first = te.Telemetry(embedding, every=1)
    train(embedding, [1])
    second = te.Telemetry(embedding, every=1)
    train(embedding, [2])
    assert second.read()["films"]["hottest_rows"].value == [(2, 1)]
    for call in (first.read, first.stop, lambda: first.write(1)):
        with pytest.raises(RuntimeError, match="another one was created"):
            call()

    @tf.function
    def read():
        second.read()

    with pytest.raises(RuntimeError, match="inside a tf"):
        read()


def test_nothing_of_it_is_in_checkpoints(tmp_path: pathlib.Path):
    embedding, counted = simple(), simple()
    telemetry = te.Telemetry(counted, every=1)
    paths = []
    for each in (embedding, counted):
        train(each, [1, 5])
        name = str(tmp_path / str(len(paths)))
        paths.append(tf.train.Checkpoint(embedding=each).write(name))
    names = [sorted(n for n, _ in tf.train.list_variables(p)) for p in paths]
    assert names[0] == names[1]
    before = telemetry.read()
    tf.train.Checkpoint(embedding=counted).read(paths[0]).assert_consumed()
    assert telemetry.read() == before


def summaries(folder: pathlib.Path) -> dict[str, Any]:
    found = {}
    for file in sorted(folder.glob("*.tfevents.*")):
        for event in tf.compat.v1.train.summary_iterator(str(file)):
            for value in event.summary.value:
                found[value.tag, event.step] = (
                    tf.make_ndarray(value.tensor),
                    value.metadata.summary_description,
                )
    return found


def test_a_status_has_the_samples_of_all_steps():
    embedding = simple()
    telemetry = te.Telemetry(embedding, every=2)
    assert telemetry.status()["samples_per_second"] == 0
    for ids in ([1], [7, 7], [2, 2, 3]):
        train(embedding, ids)
    status = telemetry.status()
    assert status["samples_per_second"] == pytest.approx(2 * status["steps_per_second"])
    train(embedding, [1, 2, 3, 4, 5])
    status = telemetry.status()
    assert status["samples_per_second"] == pytest.approx(5 * status["steps_per_second"])


def test_summaries(tmp_path: pathlib.Path):
    embedding = simple()
    telemetry = te.Telemetry(embedding, every=2)
    writer = tf.summary.create_file_writer(str(tmp_path))
    with writer.as_default():
        for step, ids in enumerate([[1], [7, 7], [2, 2, 3]]):
            train(embedding, ids)
            telemetry.write(step)
    writer.close()
    found = summaries(tmp_path)
    assert found["embedding/films/ids", 0] == (1, "Mean of an update. Exact.")
    # No update was counted since the last time.
    assert {tag for tag, step in found if step == 1} == {
        f"embedding/{name}"
        for name in (
            *("steps", "counted_steps", "queue_depth", "pending_updates"),
            *("steps_per_second", "samples_per_second"),
        )
    }
    ids = found["embedding/films/ids", 2]
    assert ids == (3, "Mean of an update. Sampled: every update number n * 2.")
    assert found["embedding/films/rows_touched", 2][0] == 3
    assert found["embedding/films/gradient_norm", 2][0] == pytest.approx(10**0.5)
    assert found["embedding/films/update_norm", 2][0] == pytest.approx(2.5**0.5)
    assert found["embedding/steps", 2] == (3, "Exact.")
    (text,) = [v for (tag, s), (v, _) in found.items() if "hottest" in tag and s == 2]
    assert text.item().decode().splitlines()[2:] == [
        "| 2 | 2 |",
        "| 1 | 1 |",
        "| 3 | 1 |",
    ]
    buckets = found["embedding/films/ids_by_row", 2][0]
    assert buckets[:, 2].sum() == 2


def keras_model(**options: Any) -> Any:
    import keras

    films = te.FeatureConfig(te.TableConfig(8, 2, name="films"))
    layer = te.keras.TPUEmbedding(films, te.SGD(0.5), name="tables")
    ids = keras.Input((), dtype="int64")
    model = keras.Sequential([ids, layer, keras.layers.Dense(1)])
    model.compile("sgd", "mse", **options)
    return model


def test_callback(tmp_path: pathlib.Path):
    import keras

    model = keras_model()
    callback = te.keras.TelemetryCallback(tmp_path, every=1)
    for _ in range(2):
        model.fit(
            tf.constant([1, 2, 2, 3]), tf.ones([4, 1]), batch_size=2, verbose=0,
            shuffle=False, callbacks=[callback],
            validation_data=(tf.constant([7]), tf.ones([1, 1])),
        )  # fmt: skip
    read = callback.read()["tables"]
    assert read["*"]["steps"] == (4, True)
    assert read["films"]["hottest_rows"].value == [(2, 4), (1, 2), (3, 2)]
    found = summaries(tmp_path)
    assert found["tables/films/ids", 2][0] == 2
    assert found["tables/films/ids", 4][0] == 2

    other = keras.Sequential([keras.layers.Dense(1)])
    other.compile("sgd", "mse")
    fresh = te.keras.TelemetryCallback(str(tmp_path), write_every=2)
    with pytest.raises(ValueError, match=r"found no .*te\.keras\.Embedding"):
        other.fit(tf.ones([1, 1]), tf.ones([1, 1]), verbose=0, callbacks=[fresh])
    with pytest.raises(ValueError, match="counts another model"):
        other.fit(tf.ones([1, 1]), tf.ones([1, 1]), verbose=0, callbacks=[callback])
    for argument in ("every", "write_every"):
        with pytest.raises(ValueError, match=f"`{argument}` must be an int >= 1"):
            te.keras.TelemetryCallback(tmp_path, **{argument: 0})


def test_callback_with_several_steps_in_an_execution(tmp_path: pathlib.Path):
    model = keras_model(steps_per_execution=4)
    callback = te.keras.TelemetryCallback(tmp_path, every=1, write_every=3)
    batches = tf.zeros([10], tf.int64), tf.ones([10, 1])
    model.fit(*batches, batch_size=1, epochs=2, verbose=0, callbacks=[callback])
    steps = {at: int(v) for (tag, at), (v, _) in summaries(tmp_path).items()
             if tag == "tables/steps"}  # fmt: skip
    # After 10 the next are 14 and 18; Keras tells of 4, 8, 10 batches in each epoch.
    assert steps == {n: n for n in (4, 8, 10, 14, 18)}


def test_two_callbacks_in_one_fit_are_refused_before_the_first_step(
    tmp_path: pathlib.Path,
):
    model = keras_model()
    batch = tf.constant([1]), tf.ones([1, 1])
    before = model.predict(batch[0], verbose=0)
    callbacks = [te.keras.TelemetryCallback(tmp_path / part) for part in "ab"]
    with pytest.raises(RuntimeError, match="Pass one TelemetryCallback"):
        model.fit(*batch, verbose=0, callbacks=callbacks)
    np.testing.assert_array_equal(model.predict(batch[0], verbose=0), before)
    model.fit(*batch, verbose=0, callbacks=callbacks[1:])
    assert callbacks[1].read()["tables"]["*"]["steps"].value == 1


def test_callback_refuses_layers_of_one_name(tmp_path: pathlib.Path):
    import keras

    ids = keras.Input((), dtype="int64")
    rows = []
    for part in ("a", "b"):
        table = te.TableConfig(8, 2, name=part)
        layer = te.keras.TPUEmbedding(te.FeatureConfig(table), te.SGD(1), name="same")
        inner = keras.Sequential([keras.Input((), dtype="int64"), layer], name=part)
        rows.append(inner(ids))
    model = keras.Model(ids, keras.layers.Dense(1)(keras.layers.add(rows)))
    model.compile("sgd", "mse")
    callback = te.keras.TelemetryCallback(tmp_path)
    with pytest.raises(ValueError, match="are called same, same"):
        model.fit(tf.constant([1]), tf.ones([1, 1]), verbose=0, callbacks=[callback])


@pytest.mark.parametrize("generation", ["v4", "v6e"])
def test_tpus_refuse_by_name(generation: str):
    with SoftwareTPUStrategy(generation, num_devices=1).scope():
        embedding = te.TPUEmbedding(
            te.FeatureConfig(te.TableConfig(8, 2, name="films"), output_shape=[2]),
            te.SGD(0.5),
        )
        with pytest.raises(NotImplementedError, match="engine has no telemetry"):
            te.Telemetry(embedding)


def test_wrong_arguments():
    config = te.FeatureConfig(te.TableConfig(8, 2, name="films"))
    with pytest.raises(ValueError, match="`every` must be an int >= 1"):
        te.Telemetry(simple(), every=0)
    with pytest.raises(ValueError, match="`hottest` must be an int >= 0"):
        te.Telemetry(simple(), hottest=2.5)  # pyright: ignore[reportArgumentType]
    te.Telemetry(simple(), every=2**70, hottest=2**70).read()
    star = te.FeatureConfig(te.TableConfig(8, 2, name="*"))
    with pytest.raises(ValueError, match=r"A table is called '\*'"):
        te.Telemetry(te.TPUEmbedding(star, te.SGD(1)))
    for wrong in (config, te.TPUEmbeddingV0(config, None)):
        with pytest.raises(TypeError, match="embedding"):
            te.Telemetry(wrong)  # pyright: ignore[reportArgumentType]
    layer = te.keras.TPUEmbedding(config, None, trainable_tables=True)
    with pytest.raises(NotImplementedError, match="trainable_tables=True"):
        te.Telemetry(layer)


def test_a_status_that_cannot_be_written_ends_no_training(
    tmp_path: pathlib.Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
):
    embedding = simple()
    train(embedding, [1, 2])
    telemetry = te.Telemetry(embedding, every=1)
    monkeypatch.setenv(STATUS_VARIABLE, str(tmp_path / "gone" / "status"))
    assert "steps" in telemetry.status()
    assert "The status is not written: [Errno 2]" in caplog.text
