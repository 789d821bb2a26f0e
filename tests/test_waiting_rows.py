"""`te.Adam(lazy_adam=False)` on the host engine, whose rows wait for their entries.

The definition is a step over all rows in float64, with the betas in float32.
"""

from __future__ import annotations

import dataclasses
import itertools
import pathlib
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numpy as np
import pytest
import tensorflow as tf
from growing_options import vocabulary_of
from reference import growing
from replica_values import replicated, this_replica
from steps import evaluate_on, train_on

import tpu_embedding as te
import tpu_embedding.checkpoint
import tpu_embedding.serving
from tpu_embedding.engines.host.waiting import idle_of
from tpu_embedding.optimizers import idle as idle_module

V, D, STEPS = 40, 3, 300
EPSILON = 2.0**-24


def falling(step: Any) -> Any:
    """A rate by step, also of NumPy."""
    step = step if isinstance(step, np.floating) else tf.cast(step, tf.float32)
    return 0.02 / (1.0 + step / 50.0)


OPTIMIZERS: dict[str, Callable[[], te.Adam]] = {
    "adam": lambda: te.Adam(0.01, lazy_adam=False),
    "beside": lambda: te.Adam(
        0.01, epsilon=1e-3, lazy_adam=False, sum_inside_sqrt=False
    ),
    "large_epsilon": lambda: te.Adam(0.01, epsilon=0.1, lazy_adam=False),
    "betas": lambda: te.Adam(0.01, 0.9, 0.99, lazy_adam=False),
    "fast": lambda: te.Adam(
        0.01, 0.75, 0.875, 1e-3, lazy_adam=False, sum_inside_sqrt=False
    ),
    "no_momenta": lambda: te.Adam(0.01, 0.0, 0.0, lazy_adam=False),
    "rates": lambda: te.Adam(falling, lazy_adam=False),
    "decay": lambda: te.Adam(0.01, lazy_adam=False, weight_decay_factor=0.003),
    "decay_by_rate": lambda: te.Adam(
        falling,
        lazy_adam=False,
        weight_decay_factor=0.15,
        multiply_weight_decay_factor_by_learning_rate=True,
    ),
    # In the first steps too much decay to be made up for later.
    "large_decay": lambda: te.Adam(
        falling,
        lazy_adam=False,
        weight_decay_factor=0.4,
        multiply_weight_decay_factor_by_learning_rate=True,
    ),
}


def make_tables(
    names: Any = ("adam",), dtype: str = "float32", **options: Any
) -> list[te.TableConfig]:
    return [
        te.TableConfig(V, D, te.RowIdInitializer(), OPTIMIZERS[n](), "sum", n,
                       dtype=dtype, **options)
        for n in names
    ]  # fmt: skip


def first_rows() -> np.ndarray:
    return np.asarray(te.RowIdInitializer()((V, D), tf.float32))


class Dense:
    """A table, each step of which updates all rows, in the arithmetic of `dtype`."""

    def __init__(self, optimizer: te.Adam, dtype: Any = np.float64) -> None:
        self.optimizer, self.dtype, self.steps = optimizer, dtype, 0
        self.row = first_rows().astype(dtype)
        self.m, self.v = np.zeros_like(self.row), np.zeros_like(self.row)

    def step(self, gradient: np.ndarray) -> None:
        o, number = self.optimizer, self.dtype
        rate = o.learning_rate
        value: Any = rate
        if callable(rate):
            value = falling(np.float32(self.steps))
        value, gradient = number(np.float32(value)), gradient.astype(number)
        b1, b2 = (number(np.float32(beta)) for beta in (o.beta_1, o.beta_2))
        decay = number(np.float32(o.weight_decay_factor or 0.0))
        if o.multiply_weight_decay_factor_by_learning_rate:
            decay *= value
        epsilon = number(np.float32(o.epsilon))
        self.row -= decay * self.row
        self.m = b1 * self.m + (1 - b1) * gradient
        self.v = b2 * self.v + (1 - b2) * gradient**2
        if o.sum_inside_sqrt:
            divisor = np.sqrt(self.v + epsilon**2)
        else:
            divisor = np.sqrt(self.v) + epsilon
        self.row -= value * self.m / divisor
        self.steps += 1

    @property
    def arrays(self) -> dict[str, np.ndarray]:
        return {"parameters": self.row, "momenta": self.m, "velocities": self.v}


def batches(steps: int = STEPS) -> Iterator[tuple[np.ndarray, np.ndarray]]:
    """Four ids and their gradients: rows wait for 1 to 300 steps, some always."""
    rng = np.random.default_rng(3)
    for _ in range(steps):
        ids = np.minimum(rng.zipf(1.3, 4), V - 1)
        yield ids, rng.normal(size=(4, D)).astype(np.float32)


def dense(ids: np.ndarray, values: np.ndarray) -> np.ndarray:
    summed = np.zeros([V, D])
    np.add.at(summed, ids, values)
    return summed


class Trained:
    """An embedding that looks all tables up with the same ids."""

    def __init__(self, tables: list[te.TableConfig], **options: Any) -> None:
        self.tables = tables
        features = [te.FeatureConfig(table) for table in tables]
        self.embedding = te.TPUEmbedding(features, None, **options)
        self.embedding.build()

        @tf.function(
            input_signature=[
                tf.TensorSpec([None], tf.int64),
                tf.TensorSpec([None, D], tf.float32),
            ]
        )
        def step(ids: tf.Tensor, values: tf.Tensor) -> Any:
            return train_on(self.embedding, [ids] * len(tables), [values] * len(tables))

        self.step = step

        @tf.function(input_signature=[tf.TensorSpec([None], tf.int64)])
        def evaluate(ids: tf.Tensor) -> Any:
            return evaluate_on(self.embedding, [ids] * len(tables))

        self.evaluate = evaluate

    def arrays(self, table: int = 0) -> dict[str, np.ndarray]:
        variables = self.embedding.variables[self.tables[table]]
        return {name: variable.numpy() for name, variable in variables.items()}

    def stored(self) -> np.ndarray:
        """The rows of the first table in memory."""
        engine: Any = self.embedding.core.create_engine()
        variable: Any = engine._parts[0].variables[0].parameters
        rows = tf.range(tf.raw_ops.VariableShape(input=variable.handle)[0])
        return tf.raw_ops.ResourceGather(
            resource=variable.handle, indices=rows, dtype=variable.dtype
        ).numpy()


def near(found: Any, expected: Any, steps: float, err_msg: str = "") -> None:
    """Compares with what sums of float32 leave after so many steps."""
    atol = 2 * steps * EPSILON * V / 4
    np.testing.assert_allclose(found, expected, rtol=0, atol=atol, err_msg=err_msg)


def train_both(trained: Trained, twin: Dense, steps: Any) -> None:
    for ids, values in steps:
        trained.step(ids, values)
        twin.step(dense(ids, values))


def writer_of(trained: Trained, base: pathlib.Path) -> Any:
    te.serving.export(trained.embedding, base, signatures=["dense"], deltas=True)
    return te.serving.DeltaWriter(trained.embedding, base, "test")


def served(folder: pathlib.Path, ids: Any, *deltas: pathlib.Path) -> Any:
    """What an export answers after some deltas."""
    model = tf.saved_model.load(str(folder))
    for delta in deltas:
        te.serving.apply_delta(model, delta)
    (found,) = model.signatures["dense"](tf.constant(ids, tf.int64)).values()
    return found


def step_both(
    first: Trained,
    second: Trained,
    number: int,
    ids: Any,
    values: Any,
    folder: pathlib.Path,
) -> None:
    """Steps the first; from step 30 on the second, which restores the first then."""
    if number == 30:
        path = tf.train.Checkpoint(e=first.embedding).write(str(folder / "c"))
        tf.train.Checkpoint(e=second.embedding).read(path).assert_consumed()
    first.step(ids, values)
    if number >= 30:
        second.step(ids, values)


def waits(trained: Trained) -> bool:
    """Whether what is in memory is not what readers see; a lookup writes nothing."""
    before = trained.stored()
    seen = trained.evaluate(tf.range(V, dtype=tf.int64))[0].numpy()
    np.testing.assert_array_equal(before, trained.stored())
    return bool(np.abs(before - seen).max() > 1e-3)


def test_tables_and_slots_are_those_of_steps_over_all_rows() -> None:
    """As near to float64 as such steps in float32 are, and so are lookups."""
    trained = Trained(make_tables(OPTIMIZERS))
    exact = [Dense(make()) for make in OPTIMIZERS.values()]
    single = [Dense(make(), np.float32) for make in OPTIMIZERS.values()]
    for step, (ids, values) in enumerate(batches()):
        activations = trained.step(ids, values)
        for table, twin in enumerate(exact):
            near(activations[table], twin.row[ids], 4 * (step + 1))
        for twin in (*exact, *single):
            twin.step(dense(ids, values))
    assert waits(trained)
    for table, name in enumerate(OPTIMIZERS):
        ours, own, theirs = trained.arrays(table), exact[table], single[table]
        for array, values in own.arrays.items():
            error = np.abs(ours[array] - values)
            rounding = np.abs(theirs.arrays[array] - values)
            # A catch-up rounds once, and each step at least once; the largest errors
            # are those of a few rows that hardly wait.
            assert np.median(error) <= np.median(rounding), (name, array)
            atol = EPSILON * np.abs(values).max()
            assert error.max() <= 2 * rounding.max() + atol, (name, array)


def _saved_by_tensorflow(trained: Trained, folder: pathlib.Path) -> Any:
    checkpoint = tf.train.Checkpoint(embedding=trained.embedding)
    path = checkpoint.write(str(folder / "tensorflow"))
    reader = tf.train.load_checkpoint(path)
    return reader.get_tensor("embedding/adam/.ATTRIBUTES/VARIABLE_VALUE")


def _saved(trained: Trained, folder: pathlib.Path) -> Any:
    te.checkpoint.save(trained.embedding, str(folder / "checkpoint"))
    other = Trained(make_tables())
    te.checkpoint.restore(other.embedding, str(folder / "checkpoint"))
    return other.stored()


def _exported(trained: Trained, folder: pathlib.Path) -> Any:
    te.serving.export(trained.embedding, folder / "export", signatures=["dense"])
    return served(folder / "export", range(V))


READERS: dict[str, Callable[[Any, Any, pathlib.Path], Any]] = {
    "variables": lambda t, table, folder: t.arrays()["parameters"],
    "embedding_tables": lambda t, table, folder: t.embedding.embedding_tables[
        t.tables[0]
    ].numpy(),
    "a variable that was read before": lambda t, table, folder: table.numpy(),
    "convert_to_tensor": lambda t, table, folder: tf.convert_to_tensor(table),
    "operator": lambda t, table, folder: table + 0.0,
    "raw op": lambda t, table, folder: (
        tf.raw_ops.Relu(features=table)
        - tf.raw_ops.Relu(features=-tf.convert_to_tensor(table))
    ),
    "gather": lambda t, table, folder: tf.gather(table, tf.range(V)),
    "tf.function": lambda t, table, folder: tf.function(lambda: table + 0.0)(),
    "evaluation": lambda t, table, folder: t.evaluate(tf.range(V, dtype=tf.int64))[0],
    "Checkpoint": lambda t, table, folder: _saved_by_tensorflow(t, folder),
    "checkpoint.save": lambda t, table, folder: _saved(t, folder),
    "export": lambda t, table, folder: _exported(t, folder),
}


def test_all_readers_see_rows_caught_up(tmp_path: pathlib.Path) -> None:
    trained, twin = Trained(make_tables()), Dense(OPTIMIZERS["adam"]())
    table = trained.embedding.embedding_tables[trained.tables[0]]
    found = batches()
    for reader, read in READERS.items():
        train_both(trained, twin, itertools.islice(found, 8))
        assert waits(trained), reader
        seen = np.asarray(read(trained, table, tmp_path)).reshape([V, D])
        near(seen, twin.row, twin.steps, reader)


def test_what_is_assigned_waits_for_nothing() -> None:
    trained, twin = Trained(make_tables()), Dense(OPTIMIZERS["adam"]())
    variables = trained.embedding.variables[trained.tables[0]]
    for number, (ids, values) in enumerate(batches(30)):
        if number == 10:
            variables["parameters"].assign(first_rows())
            twin.row = first_rows().astype(np.float64)
        if number == 20:
            variables["momenta"].scatter_nd_update([[1], [2]], np.ones([2, D]))
            twin.m[1:3] = 1.0
        trained.step(ids, values)
        twin.step(dense(ids, values))
    for name, values in twin.arrays.items():
        atol = 60 * EPSILON * np.abs(values).max()
        np.testing.assert_allclose(trained.arrays()[name], values, 0, atol)


def test_a_slot_gathers_its_own_rows() -> None:
    trained = Trained(make_tables())
    slots = trained.embedding.variables[trained.tables[0]]
    for ids, values in batches(10):
        trained.step(ids, values)
    found = tf.gather(slots["velocities"], tf.range(V)).numpy()
    np.testing.assert_array_equal(found, trained.arrays()["velocities"])


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_a_resumed_run_has_the_bits_of_the_run_that_saved(
    dtype: str, tmp_path: pathlib.Path
) -> None:
    first = Trained(make_tables(("adam", "decay", "rates"), dtype))
    second = Trained(make_tables(("adam", "decay", "rates"), dtype))
    for number, (ids, values) in enumerate(batches(60)):
        step_both(first, second, number, ids, values, tmp_path)
    for table in range(3):
        theirs = second.arrays(table)
        for name, values in first.arrays(table).items():
            np.testing.assert_array_equal(values, theirs[name])


def test_a_full_history_begins_anew(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(idle_module, "_LONGEST_HISTORY", 7)
    trained, twin = Trained(make_tables()), Dense(OPTIMIZERS["adam"]())
    train_both(trained, twin, batches(40))
    assert waits(trained)
    near(trained.arrays()["parameters"], twin.row, 40)


def test_bfloat16_is_rounded_when_it_is_written() -> None:
    trained, twin = Trained(make_tables(dtype="bfloat16")), Dense(OPTIMIZERS["adam"]())
    ids, values = next(batches())
    trained.step(ids, values)
    start = trained.arrays()
    twin.row = start["parameters"].astype(np.float64)
    twin.m, twin.v = start["momenta"] + 0.0, start["velocities"] + 0.0
    for _ in range(9):  # Of another row.
        trained.step([0], values[:1] * 0.0)
        twin.step(np.zeros([V, D]))
    stored = trained.stored()
    np.testing.assert_array_equal(stored, start["parameters"])
    seen = trained.evaluate(tf.range(V, dtype=tf.int64))[0].numpy()
    near(seen, twin.row, 40)
    read = trained.arrays()["parameters"].astype(np.float64)
    assert 0 < np.abs(read - seen).max() <= 2.0**-7 * np.abs(seen).max()


@pytest.mark.parametrize("replicas", [1, 2])
def test_pending_and_forgotten_updates(replicas: int) -> None:
    """Rows wait for the updates that were applied, by whichever strategy."""
    strategy = replicated(replicas)
    with strategy.scope():
        table = make_tables()[0]
        embedding = te.TPUEmbedding(
            te.FeatureConfig(table), None, pipeline_execution_with_tensor_core=True
        )
    twin = Dense(OPTIMIZERS["adam"]())

    @tf.function
    def step(ids: tf.Tensor, values: tf.Tensor) -> None:
        def run() -> None:
            batch = (tf.split(x, replicas)[this_replica()] for x in (ids, values))
            train_on(embedding, *batch)

        strategy.run(run)

    for number, (ids, values) in enumerate(batches(12)):
        step(tf.constant(ids), tf.constant(values))
        if number == 5:
            embedding.reset()  # Forgets this update, which was pending.
        else:
            twin.step(dense(ids, values))
    near(embedding.embedding_tables[table].numpy(), twin.row, 12)


def test_a_delta_has_every_row_that_moved(tmp_path: pathlib.Path) -> None:
    trained = Trained(make_tables())
    writer = writer_of(trained, tmp_path / "base")
    trained.step(*next(batches()))
    assert writer.export_delta(tmp_path / "0.delta") == {"adam": V}
    found = served(tmp_path / "base", range(V), tmp_path / "0.delta")
    np.testing.assert_array_equal(found, trained.stored())
    assert writer.export_delta(tmp_path / "none.delta") == {"adam": 0}


def test_gradients_of_weights_see_rows_caught_up() -> None:
    table, twin = make_tables()[0], Dense(OPTIMIZERS["adam"]())
    embedding = te.TPUEmbeddingV2(te.FeatureConfig(table), None)

    @tf.function
    def step(ids: tf.Tensor, weights: tf.Tensor, values: tf.Tensor) -> Any:
        with tf.GradientTape() as tape:
            tape.watch(weights)
            found, kept = embedding.embedding_lookup(ids, weights)
            loss = tf.reduce_sum(found)
        embedding.apply_gradients(values, kept)
        return tape.gradient(loss, weights)

    for ids, values in batches(30):
        own = tf.reshape(tf.constant(ids), [4, 1])
        found = step(own, tf.ones([4, 1]), tf.constant(values)).numpy()
        expected = twin.row[ids].sum(-1, keepdims=True)
        near(found, expected, (twin.steps + 4) * D)
        twin.step(dense(ids, values))


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        ({}, True),
        ({"lazy_adam": True}, False),
        ({"clip_weight_min": -1.0}, False),
        ({"clip_weight_max": 1.0}, False),
        ({"weight_decay_factor": 0.01}, True),
        ({"clipvalue": 1.0, "clipnorm": 1.0}, True),
        # The momenta fade more slowly than the root of the velocities.
        ({"beta_1": 0.95, "beta_2": 0.9}, False),
        ({"beta_1": 0.5, "beta_2": 0.0}, False),
        # A root of a sum is less smooth than a sum with a root.
        ({"beta_1": 0.95, "beta_2": 0.98}, False),
        ({"beta_1": 0.95, "beta_2": 0.98, "sum_inside_sqrt": False}, True),
        ({"slot_variable_creation_fn": dict}, False),
    ],
)
def test_where_rows_wait(options: dict[str, Any], expected: bool) -> None:
    optimizer = te.Adam(**{"lazy_adam": False, **options})
    table = te.TableConfig(4, 4, optimizer=optimizer)
    core = te.TPUEmbedding(te.FeatureConfig(table), None).core
    found = idle_of(core.plan.tables[0])
    assert (found is not None) is expected


# Some rows are evicted, wait for admission, share a row, or read first values.
GROWING = {
    "all_fit": growing.Options(400),
    "evicts": growing.Options(16, eviction="lru", min_rows=6),
    "admits": growing.Options(24, 2, 30, "lfu", 0, 8, "initializer"),
    "ages": growing.Options(40, eviction="age", max_age=25, min_rows=3),
    "shares": growing.Options(12, 2, 6, "lru", 0, 4, "shared_row", "shared_row"),
    "is_full": growing.Options(8, unknown="shared_row", when_full="shared_row"),
}


def first_values(id_: int) -> np.ndarray:
    """What the row of an id starts as, uniform in [-1, 1)."""
    numbers = growing.uniforms(11, id_, D)
    return np.array([2.0 * u - 1.0 for u in numbers], np.float32)


class DenseGrowing(Dense):
    """A growing table, each step of which updates all rows."""

    def __init__(self, optimizer: te.Adam, options: growing.Options) -> None:
        super().__init__(optimizer)
        self.vocabulary = growing.Vocabulary(options)
        self.row = np.zeros([options.max_rows, D])
        self.m, self.v = np.zeros_like(self.row), np.zeros_like(self.row)

    def reads(self, lookup: growing.Lookup) -> np.ndarray:
        rows = []
        for id_ in lookup.ids:
            row = self.vocabulary.read(lookup, id_)
            shared = first_values(growing.SHARED_ID)
            special = {"zeros": np.zeros(D), "shared": shared}
            special["first"] = first_values(id_)
            rows.append(special[row] if isinstance(row, str) else self.row[row])
        return np.array(rows)

    def train(
        self,
        lookup: growing.Lookup,
        values: np.ndarray,
        awaited: Sequence[growing.Lookup] = (),
    ) -> None:
        update = self.vocabulary.update([lookup], awaited)
        for row, id_ in update.created:
            self.row[row], self.m[row], self.v[row] = first_values(id_), 0.0, 0.0
        summed = np.zeros_like(self.row)
        for row, gradient in zip(update.rows[0], values, strict=True):
            if row is not None:
                summed[row] += gradient
        self.step(summed)

    @property
    def known(self) -> dict[int, int]:
        """By id its row."""
        shared = {growing.SHARED_ID: 0} if self.vocabulary._has_shared else {}
        own = {row.id: number for number, row in self.vocabulary.rows.items()}
        return shared | own


def growing_table(options: growing.Options, name: str, **others: Any) -> te.TableConfig:
    return te.TableConfig(
        vocabulary_of(options, seed=11),
        D,
        tf.keras.initializers.RandomUniform(-1.0, 1.0),
        OPTIMIZERS[name](),
        "sum",
        name,
        **others,
    )


def ids_of(ids: np.ndarray) -> np.ndarray:
    return ids * (1 << 40) - 7


def growing_batches(steps: int = STEPS) -> Iterator[tuple[np.ndarray, np.ndarray]]:
    for ids, values in batches(steps):
        yield ids_of(ids), values


def require_rows(trained: Trained, twin: DenseGrowing, table: int = 0) -> None:
    """Rows and slots are those of the twin, to what sums of float32 leave."""
    contents = trained.embedding.vocabularies[trained.tables[table]]
    known = twin.known
    known.pop(growing.SHARED_ID, None)
    assert dict(zip(contents.ids, contents.rows, strict=True)) == known
    numbers = [*twin.known.values()]
    ours = trained.arrays(table)
    for array, values in twin.arrays.items():
        near(ours[array][numbers], values[numbers], twin.steps, array)


@pytest.mark.parametrize("pipelined", [False, True])
@pytest.mark.parametrize("name", GROWING)
def test_growing_tables_have_the_numbers_of_steps_over_all_rows(
    name: str, pipelined: bool
) -> None:
    optimizers = ("adam", "large_decay")
    tables = [growing_table(GROWING[name], o) for o in optimizers]
    trained = Trained(tables, pipeline_execution_with_tensor_core=pipelined)
    twins = [DenseGrowing(OPTIMIZERS[o](), GROWING[name]) for o in optimizers]
    pending: list[tuple[list[growing.Lookup], np.ndarray]] = []
    for ids, values in growing_batches():
        awaited = [[own] for own in pending[0][0]] if pending else [[]] * len(twins)
        lookups = [
            twin.vocabulary.look_up(ids.tolist(), training=True, awaited=others)
            for twin, others in zip(twins, awaited, strict=True)
        ]
        activations = trained.step(ids, values)
        for found, twin, lookup in zip(activations, twins, lookups, strict=True):
            near(found, twin.reads(lookup), twin.steps + 1)
        pending.append((lookups, values))
        while len(pending) > pipelined:
            others = [[own] for own in lookups] if pipelined else [[]] * len(twins)
            for twin, lookup, awaits in zip(twins, pending[0][0], others, strict=True):
                twin.train(lookup, pending[0][1], awaits)
            del pending[0]
    for lookups, values in pending:
        for twin, lookup in zip(twins, lookups, strict=True):
            twin.train(lookup, values)
    for table, twin in enumerate(twins):
        require_rows(trained, twin, table)


def test_a_step_of_a_growing_table_writes_the_rows_of_its_batch() -> None:
    trained = Trained([growing_table(GROWING["all_fit"], "adam")])
    for ids, values in growing_batches(30):
        before = trained.stored()
        trained.step(ids, values)
        after = trained.stored()
        written = (before != after[: len(before)]).any(1).sum()
        assert written <= len(np.unique(ids))


def _by_id(trained: Trained, values: Any) -> np.ndarray:
    """Rows as the variable has them, by ascending id."""
    contents = trained.embedding.vocabularies[trained.tables[0]]
    return np.asarray(values)[contents.rows]


def _used() -> Trained:
    """Another embedding, whose rows wait."""
    other = Trained([growing_table(GROWING["evicts"], "adam")])
    for ids, values in growing_batches(20):
        other.step(ids + 1, values)
    return other


def _growing_saved(trained: Trained, folder: pathlib.Path) -> Any:
    te.checkpoint.save(trained.embedding, str(folder / "checkpoint"))
    other = _used()
    te.checkpoint.restore(other.embedding, str(folder / "checkpoint"))
    return _by_id(other, other.arrays()["parameters"])


def _growing_saved_by_tensorflow(trained: Trained, folder: pathlib.Path) -> Any:
    path = tf.train.Checkpoint(e=trained.embedding).write(str(folder / "tensorflow"))
    other = _used()
    tf.train.Checkpoint(e=other.embedding).read(path).assert_consumed()
    return _by_id(other, other.arrays()["parameters"])


def _growing_exported(trained: Trained, folder: pathlib.Path) -> Any:
    te.serving.export(trained.embedding, folder / "export", signatures=["dense"])
    ids = trained.embedding.vocabularies[trained.tables[0]].ids
    return served(folder / "export", ids)


def _growing_gathered(trained: Trained, folder: pathlib.Path) -> Any:
    table = trained.embedding.embedding_tables[trained.tables[0]]
    return _by_id(trained, tf.gather(table, tf.range(tf.shape(table)[0])))


def _growing_looked_up(trained: Trained, folder: pathlib.Path) -> Any:
    engine: Any = trained.embedding.core.create_engine()  # Catches no row up.
    ids = engine._parts[0].vocabularies["adam"].read([])["ids"]
    return trained.evaluate(tf.constant(ids))[0]


def _growing_frozen(trained: Trained, folder: pathlib.Path) -> Any:
    frozen = trained.embedding.freeze_vocabulary(trained.tables[0])
    static = te.TPUEmbedding(te.FeatureConfig(frozen.config), None)
    return static.embedding_tables[frozen.config].numpy()[: len(frozen.ids)]


GROWING_READERS: dict[str, Callable[[Trained, pathlib.Path], Any]] = {
    "variables": lambda t, folder: _by_id(t, t.arrays()["parameters"]),
    "gather": _growing_gathered,
    "evaluation": _growing_looked_up,
    "Checkpoint": _growing_saved_by_tensorflow,
    "checkpoint.save": _growing_saved,
    "export": _growing_exported,
    "freeze": _growing_frozen,
}


def test_all_readers_of_growing_tables_see_rows_caught_up(
    tmp_path: pathlib.Path,
) -> None:
    options = GROWING["evicts"]
    trained = Trained([growing_table(options, "adam")])
    twin = DenseGrowing(OPTIMIZERS["adam"](), options)
    found = growing_batches()
    for reader, read in GROWING_READERS.items():
        for _ in range(8):
            ids, values = next(found)
            trained.step(ids, values)
            twin.train(twin.vocabulary.look_up(ids.tolist(), training=True), values)
        expected = [twin.row[twin.known[id_]] for id_ in sorted(twin.known)]
        stale = trained.stored()[[twin.known[id_] for id_ in sorted(twin.known)]]
        assert np.abs(stale - expected).max() > 1e-3, reader
        near(read(trained, tmp_path), expected, twin.steps, reader)
    require_rows(trained, twin)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_a_resumed_growing_table_has_the_bits_of_the_run_that_saved(
    dtype: str, tmp_path: pathlib.Path
) -> None:
    options = GROWING["shares"]
    table = growing_table(options, "decay", dtype=dtype)
    first, second = Trained([table]), Trained([table])
    for number, (ids, values) in enumerate(growing_batches(60)):
        if number == 20:
            second.step(ids, values)  # It is used.
        step_both(first, second, number, ids, values, tmp_path)
    states = []
    for trained in (first, second):
        trained.embedding.flush()
        states.append(trained.embedding.core.growing()["decay"].read())
    for name in ("ids", "parameters", "momenta", "velocities"):
        np.testing.assert_array_equal(states[0][name], states[1][name], err_msg=name)


def test_rows_that_replace_others_wait_for_nothing() -> None:
    trained = Trained([growing_table(GROWING["evicts"], "decay")])
    vocabulary: Any = trained.embedding.core.growing()["decay"]
    found = growing_batches()
    trained.step(*next(found))
    state = vocabulary.read()
    for _ in range(9):
        trained.step(*next(found))
    vocabulary.write(state)
    for name, values in vocabulary.read().items():
        np.testing.assert_array_equal(values, state[name], err_msg=name)


def test_a_delta_of_a_growing_table_has_every_row_that_moved(
    tmp_path: pathlib.Path,
) -> None:
    options = dataclasses.replace(GROWING["evicts"], unknown="shared_row")
    trained = Trained([growing_table(options, "adam")])
    found = growing_batches()
    for _ in range(20):
        trained.step(*next(found))
    writer = writer_of(trained, tmp_path / "base")
    deltas = []
    for number in range(2):
        for _ in range(4):
            trained.step(*next(found))
        deltas.append(tmp_path / f"{number}.delta")
        writer.export_delta(deltas[-1])
        ids = np.append(trained.embedding.vocabularies[trained.tables[0]].ids, 5)
        found_rows = served(tmp_path / "base", ids, *deltas)
        np.testing.assert_array_equal(found_rows, trained.evaluate(tf.constant(ids))[0])


def test_gradients_of_weights_see_rows_of_growing_tables_caught_up() -> None:
    options = GROWING["shares"]
    table = growing_table(options, "adam")
    embedding = te.TPUEmbedding(te.FeatureConfig(table), None)
    twin = DenseGrowing(OPTIMIZERS["adam"](), options)
    for ids, values in growing_batches(60):
        lookup = twin.vocabulary.look_up(ids.tolist(), training=True)
        weights = tf.ones([4, 1])
        features = tf.constant(ids[:, np.newaxis])
        embedding.enqueue(features, weights)
        embedding.dequeue()
        found = embedding.weight_gradients(tf.constant(values), features, weights)
        expected = (twin.reads(lookup) * values).sum(-1, keepdims=True)
        near(found, expected, (twin.steps + 4) * D * np.abs(values).max())
        embedding.apply_gradients(tf.constant(values))
        twin.train(lookup, values)
