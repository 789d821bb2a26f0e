"""`te.keras.RowSparseOptimizer`: rows that wait match training with dense gradients.

`tests/test_tf_keras.py` runs this file with tf_keras, too.
"""

from __future__ import annotations

import functools
import itertools
import tempfile
import warnings
from collections.abc import Callable, Iterable
from concurrent import futures
from typing import Any

import numpy as np
import pytest
import tensorflow as tf
from keras_layer.models import mirrored
from keras_layer.version import keras
from reference.keras_rules import Trained
from replica_values import this_replica
from steps import train_on

import tpu_embedding as te
from tpu_embedding import keras as te_keras
from tpu_embedding.keras.keras_api import keras_api
from tpu_embedding.keras.rows import rules
from tpu_embedding.keras.rows import waiting as waiting_module
from tpu_embedding.keras.rows.waiting import make_plain
from tpu_embedding.optimizers import idle as idle_module
from tpu_embedding.optimizers.idle import Idle, quadrature, terms_of_roots
from tpu_embedding.tables.waiting import gather

V, D, STEPS = 40, 3, 300
IS_KERAS_3 = hasattr(keras, "Variable")
O = keras.optimizers  # noqa: E741
OPTIMIZERS: dict[str, Callable[..., Any]] = {
    "adadelta": lambda: O.Adadelta(0.5),
    "adagrad": lambda: O.Adagrad(0.3, epsilon=0.01),
    "adagrad, decay": lambda: O.Adagrad(0.3, weight_decay=0.01),
    "adam": lambda: O.Adam(0.01),
    "adam, large epsilon": lambda: O.Adam(0.01, epsilon=0.1),
    "adam, betas": lambda: O.Adam(0.01, beta_1=0.95, beta_2=0.98),
    "adam, decay": lambda: O.Adam(0.01, weight_decay=0.05),
    "amsgrad": lambda: O.Adam(0.01, beta_2=0.9, amsgrad=True),
    "adamw": lambda: O.AdamW(0.01, weight_decay=0.05),
    "ftrl": lambda: O.Ftrl(0.2, -0.6, 0.2, 0.02, 0.05, 0.0, 0.3),
    "lion": lambda: O.Lion(0.01, weight_decay=0.05),
    "nadam": lambda: O.Nadam(0.01),
    "nadam, large epsilon": lambda: O.Nadam(0.01, epsilon=0.1),
    "rmsprop": lambda: O.RMSprop(0.01),
    "centered": lambda: O.RMSprop(0.01, momentum=0.5, epsilon=0.01, centered=True),
    "sgd, decay": lambda: O.SGD(0.1, weight_decay=0.05),
    "momentum": lambda: O.SGD(0.1, momentum=0.9),
    "nesterov": lambda: O.SGD(0.1, momentum=0.95, nesterov=True, weight_decay=0.05),
}


@pytest.fixture(params=["kernels", "TensorFlow's ops"])
def way(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    if request.param != "kernels":
        monkeypatch.setattr(waiting_module, "kernels_for", lambda variables: None)
        monkeypatch.setattr(rules, "kernels_for", lambda variables: None)
    return request.param


def layer_of(table: Any) -> Any:
    layer = te_keras.Embedding(*table.shape, dtype=tf.as_dtype(table.dtype).name)
    layer.build(None)
    layer.set_weights([table])
    return layer


def first_table(rows: int = V) -> Any:
    return np.random.default_rng(4).normal(size=(rows, D)).astype(np.float32)


def gradients(steps: int = STEPS, rows: int = V) -> list[tf.IndexedSlices]:
    """Of 4 ids, most of which are rare: rows wait for 1 to 300 steps, some always."""
    rng = np.random.default_rng(3)
    ids = np.minimum(rng.zipf(1.3, [steps, 4]), rows - 1)
    return [
        tf.IndexedSlices(
            tf.constant(rng.normal(size=(4, D)), tf.float32),
            tf.constant(own),
            tf.constant([rows, D], tf.int64),
        )
        for own in ids
    ]


def dense(gradient: tf.IndexedSlices) -> tf.Tensor:
    shape: Any = gradient.dense_shape
    return tf.math.unsorted_segment_sum(gradient.values, gradient.indices, shape[0])


def plain_table(value: Any) -> Any:
    return keras.Variable(value) if IS_KERAS_3 else tf.Variable(value)


def steps_of(
    optimizer: Any, table: Any, is_dense: bool = False, jit_compile: bool | None = None
) -> Callable[..., None]:
    """A traced step of a batch: it takes a gradient of 4 ids."""
    optimizer.build([table])
    rows = int(table.shape[0])

    @tf.function(
        input_signature=[
            tf.TensorSpec([4], tf.int64),
            tf.TensorSpec([4, D], tf.float32),
        ],
        jit_compile=jit_compile,
    )
    def step(ids: Any, values: Any) -> None:
        gradient = tf.IndexedSlices(values, ids, tf.constant([rows, D], tf.int64))
        optimizer.apply_gradients([(dense(gradient) if is_dense else gradient, table)])

    return lambda gradient: step(gradient.indices, gradient.values)


def slots_of(optimizer: Any) -> list[Any]:
    return [slot.numpy() for slot in slot_variables_of(optimizer)]


def slot_variables_of(optimizer: Any) -> list[Any]:
    found = optimizer.variables if IS_KERAS_3 else optimizer.variables()
    return [v for v in found if tuple(v.shape) == (V, D)]


def check_slots(optimizer: Any, expected: list[Any], steps: int) -> None:
    for own, other in zip(slots_of(optimizer), expected, strict=True):
        near(own, other, steps)


def rate_at(step: int) -> float:
    return 1.0 if step < 150 else 0.25


def rate_of(optimizer: Any) -> float:
    return float(optimizer.get_config()["learning_rate"])


@functools.cache
def dense_twins(name: str) -> tuple[Any, list[Any], Any, float]:
    """Of Keras the table and the slots, of float64 the table, and their rounding.

    The rate is assigned in the middle. Keras forms 1 - beta_2^t in float32: the root of
    it is wrong by a part of at most half of 2^-24 / (1 - beta_2), and so is each move.
    """
    optimizer, table = OPTIMIZERS[name](), plain_table(first_table())
    rate, exact = rate_of(optimizer), Trained([first_table()], OPTIMIZERS[name]())
    update = steps_of(optimizer, table, is_dense=True)
    for step, gradient in enumerate(gradients()):
        optimizer.learning_rate = rate * rate_at(step)
        update(gradient)
        exact.step([0], [dense(gradient).numpy()], rate * rate_at(step))
    (rows,) = exact.rows
    moved = np.abs(rows - first_table()).max()
    bias = 2.0**-25 / (1.0 - getattr(optimizer, "beta_2", 0.0)) * moved
    return table.numpy(), slots_of(optimizer), rows, bias


def rounding(steps: int, values: Any) -> float:
    """Of float32 in some steps, each of which rounds values twice."""
    return 2 * steps * 2.0**-24 * float(np.abs(values).max())


def near(found: Any, expected: Any, steps: int) -> None:
    """Compares with the rounding of so many steps."""
    atol = rounding(steps, expected)
    np.testing.assert_allclose(found, expected, rtol=0, atol=atol)


class Pair:
    """A layer whose rows wait, and a table beside it that dense gradients train."""

    def __init__(
        self, make: Callable[[], Any] = lambda: O.Adam(0.01), first: Any = None
    ) -> None:
        first = first_table() if first is None else first
        self.layer, self.table = layer_of(first), plain_table(first)
        self.ours, self.theirs = te_keras.RowSparseOptimizer(make()), make()

    def step(self, gradient: tf.IndexedSlices, own: Any = None) -> None:
        own = gradient if own is None else own
        self.ours.apply_gradients([(own, self.layer.embeddings)])
        self.theirs.apply_gradients([(dense(gradient), self.table)])

    def train(self, steps: int) -> None:
        for gradient in gradients(steps):
            self.step(gradient)

    @functools.cached_property
    def _updates(self) -> list[Callable[..., None]]:
        ours = steps_of(self.ours, self.layer.embeddings)
        return [ours, steps_of(self.theirs, self.table, is_dense=True)]

    def train_in_functions(self, steps: Iterable[tf.IndexedSlices]) -> None:
        for gradient in steps:
            for update in self._updates:
                update(gradient)

    def check(self, steps: int, size: Any = None) -> None:
        """The rounding is that of so many steps, of the table or of `size`."""
        own, other = self.layer.get_weights()[0], self.table.numpy()
        atol = rounding(steps, other if size is None else size)
        np.testing.assert_allclose(own, other, rtol=0, atol=atol)


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_tables_and_slots_are_those_of_dense_gradients(name: str, way: str):
    """Beside Keras in float32, with a rate that is assigned in the middle."""
    theirs, their_slots, exact, bias = dense_twins(name)
    ours = te_keras.RowSparseOptimizer(OPTIMIZERS[name]())
    layer, rate = layer_of(first_table()), rate_of(ours)
    update = steps_of(ours, layer.embeddings)
    for step, gradient in enumerate(gradients()):
        ours.learning_rate = rate * rate_at(step)
        update(gradient)
    assert set(ours.updates_rows_by.values()) <= {"op", "rows"}
    check_slots(ours, their_slots, STEPS)
    own, atol = layer.get_weights()[0], rounding(STEPS, theirs) + bias
    near(own, theirs, STEPS)
    np.testing.assert_allclose(own, exact, rtol=0, atol=atol)


@pytest.mark.second_tier
@pytest.mark.parametrize("name", ["adamw", "nesterov"])
def test_replicas_have_the_numbers_of_dense_gradients(name: str, way: str):
    """Each of two replicas looks two ids up, and reads what waits."""
    steps, strategy = 120, mirrored(2)
    theirs, their_slots = dense_twin(steps, OPTIMIZERS[name])
    with strategy.scope():
        layer = layer_of(first_table())
        ours = te_keras.RowSparseOptimizer(OPTIMIZERS[name]())
        ours.build(layer.trainable_weights)

    @tf.function
    def step(ids: Any, values: Any) -> None:
        def run() -> None:
            with tf.GradientTape() as tape:
                found = layer(tf.split(ids, 2)[this_replica()])
                loss = tf.reduce_sum(found * tf.split(values, 2)[this_replica()])
            found = tape.gradient(loss, layer.trainable_weights)
            ours.apply_gradients(zip(found, layer.trainable_weights, strict=True))

        strategy.run(run)

    for gradient in gradients(steps):
        step(gradient.indices, gradient.values)
    assert set(ours.updates_rows_by.values()) <= {"op", "rows"}
    near(layer.get_weights()[0], theirs, steps)
    check_slots(ours, their_slots, steps)


@pytest.mark.parametrize("name", ["adam", "adam, large epsilon", "adagrad"])
def test_translated_optimizers_have_the_numbers_of_dense_gradients(name: str):
    make = OPTIMIZERS[name] if name != "adagrad" else lambda: O.Adagrad(0.3)
    theirs, _ = dense_twin(120, make)
    optimizer = te_keras.translate_keras_optimizer(make(), lazy=False)
    table = te.TableConfig(V, D, lambda *_, **__: first_table(), optimizer)
    embedding = te.TPUEmbedding(te.FeatureConfig(table), None)
    for gradient in gradients(120):
        train_on(embedding, gradient.indices, gradient.values)
    # Keras adds 1e-7 to the root of Adagrad.
    near(embedding.embedding_tables[table].numpy(), theirs, 120)


def test_ftrl_cannot_be_translated_with_updates_of_all_rows():
    with pytest.raises(ValueError, match="lazy=False for Ftrl"):
        te_keras.translate_keras_optimizer(O.Ftrl(0.1), lazy=False)


def trained(
    steps: int = 50, make: Callable[[], Any] = OPTIMIZERS["adamw"]
) -> tuple[Any, Any, Any, Any]:
    """A layer and its optimizer, most rows of which wait, and the dense twins."""
    ours, layer = te_keras.RowSparseOptimizer(make()), layer_of(first_table())
    update = steps_of(ours, layer.embeddings)
    for gradient in gradients(steps):
        update(gradient)
    return layer, ours, *dense_twin(steps, make)


@functools.cache
def dense_twin(steps: int, make: Callable[[], Any]) -> tuple[Any, list[Any]]:
    optimizer, table = make(), plain_table(first_table())
    update = steps_of(optimizer, table, is_dense=True)
    for gradient in gradients(steps):
        update(gradient)
    return table.numpy(), slots_of(optimizer)


_read_in: dict[str, tuple[Pair, Any]] = {}


def _in_function(read: Callable[[], Any]) -> Any:
    return tf.function(read)()


def _saved(layer: Any) -> Any:
    with tempfile.TemporaryDirectory() as folder:
        path = tf.train.Checkpoint(layer=layer).write(f"{folder}/checkpoint")
        reader = tf.train.load_checkpoint(path)
        shapes = reader.get_variable_to_shape_map()
        (name,) = [name for name, shape in shapes.items() if shape == [V, D]]
        return reader.get_tensor(name)


READERS: dict[str, Callable[[Any], Any]] = {
    "get_weights": lambda layer: layer.get_weights()[0],
    "numpy": lambda layer: layer.embeddings.numpy(),
    "np.asarray": lambda layer: np.asarray(layer.embeddings),
    "convert_to_tensor": lambda layer: tf.convert_to_tensor(layer.embeddings),
    "identity": lambda layer: tf.identity(layer.embeddings),
    "operator": lambda layer: layer.embeddings + 0.0,
    "slice": lambda layer: layer.embeddings[:],
    "generated op": lambda layer: tf.multiply(layer.embeddings, 1.0),
    "raw op": lambda layer: (
        tf.raw_ops.Relu(features=layer.embeddings)
        - tf.raw_ops.Relu(features=-tf.convert_to_tensor(layer.embeddings))
    ),
    "stack": lambda layer: tf.concat([layer.embeddings, layer.embeddings], 0)[:V],
    "matmul": lambda layer: tf.matmul(tf.eye(V), layer.embeddings),
    "gather": lambda layer: tf.gather(layer.embeddings, tf.range(V)),
    "gather_nd": lambda layer: tf.gather_nd(layer.embeddings, tf.range(V)[:, None]),
    "lookup": lambda layer: layer(tf.range(V)),
    "lookup for training": lambda layer: layer(tf.range(V), training=True),
    "lookup of the first axis": lambda layer: layer(tf.range(V)[None])[0],
    "tf.function": lambda layer: _in_function(lambda: layer(tf.range(V))),
    "tied logits": lambda layer: _in_function(
        lambda: tf.transpose(tf.matmul(tf.eye(D), layer.embeddings, transpose_b=True))
    ),
    "checkpoint": _saved,
}


@pytest.mark.parametrize("reader", READERS)
def test_who_reads_sees_rows_caught_up(reader: str, way: str):
    if way not in _read_in:
        _read_in[way] = Pair(OPTIMIZERS["adamw"]), iter(gradients(500))
    pair, rest = _read_in[way]
    pair.train_in_functions(itertools.islice(rest, 20))
    layer, expected = pair.layer, pair.table.numpy()
    stored = gather(_variable(layer.embeddings), tf.range(V))
    assert np.abs(stored.numpy() - expected).max() > 1e-2  # Rows wait.
    if reader.startswith("lookup for") and not IS_KERAS_3:
        reader = "lookup"
    near(np.asarray(READERS[reader](layer)), expected, 500)


def _variable(weight: Any) -> Any:
    return weight.value if IS_KERAS_3 else weight


def test_lookups_write_nothing(way: str):
    layer, optimizer, expected, _ = trained()
    table = _variable(layer.embeddings)
    before = gather(table, tf.range(V)).numpy()
    near(layer(tf.range(V)), expected, 50)
    with tf.GradientTape() as tape:
        loss = tf.reduce_sum(layer(tf.constant([5, 7, 5])))
    gradient = tape.gradient(loss, layer.embeddings)
    assert isinstance(gradient, tf.IndexedSlices)
    np.testing.assert_array_equal(dense(gradient)[5], [2.0] * D)
    after = gather(table, tf.range(V)).numpy()
    np.testing.assert_array_equal(before, after)
    assert optimizer is not None


def test_slots_are_caught_up_when_they_are_read(way: str):
    _, optimizer, _, expected = trained()
    check_slots(optimizer, expected, 50)


def test_a_slot_gathers_its_own_rows(way: str):
    _, optimizer, _, expected = trained()
    for own, other in zip(slot_variables_of(optimizer), expected, strict=True):
        near(tf.gather(_variable(own), tf.range(V)), other, 50)


def test_a_function_that_was_traced_before_the_optimizer_was_built(way: str):
    """Or before another one took the table over."""
    pair = Pair()
    layer = pair.layer
    readers: list[Any] = [
        tf.function(lambda: layer(tf.range(V))),
        tf.function(lambda: layer.embeddings + 0.0),
        tf.function(lambda: tf.gather_nd(layer.embeddings, tf.range(V)[:, None])),
    ]
    for read in readers:
        np.testing.assert_array_equal(read(), first_table())
    for rate in (0.01, 0.02):
        pair.ours, pair.theirs = te_keras.RowSparseOptimizer(O.Adam(rate)), O.Adam(rate)
        pair.ours.build([layer.embeddings])
        pair.theirs.build([pair.table])
        pair.train(6)
        for read in readers:
            pair.train(1)
            near(read(), pair.table.numpy(), 18)


@pytest.mark.parametrize("place", range(3))
def test_another_thread_may_read_the_whole_table_during_a_step(
    place: int, monkeypatch: pytest.MonkeyPatch
):
    pair, writes = Pair(OPTIMIZERS["momentum"]), itertools.count()

    def read_and_scatter(*arguments: Any) -> None:
        if next(writes) % 3 == place:  # The table, its slot and what waits.
            with futures.ThreadPoolExecutor(1) as reader:
                reader.submit(pair.layer.get_weights).result()
        scatter(*arguments)

    scatter = waiting_module.scatter
    monkeypatch.setattr(waiting_module, "scatter", read_and_scatter)
    pair.train(20)
    assert next(writes) == 60
    pair.check(20)


def test_traced_steps_mark_rows_before_they_write_them():
    layer, optimizer = layer_of(first_table()), te_keras.RowSparseOptimizer(O.Nadam())
    optimizer.build([layer.embeddings])
    waiting = waiting_module.waiting_of(_variable(layer.embeddings))
    assert waiting is not None
    rows = tf.constant([1, 2])

    @tf.function
    def write() -> None:
        waiting.write(rows, waiting.caught_up(rows))

    operations = write.get_concrete_function().graph.get_operations()
    marks, *writes = (op for op in operations if op.type == "ResourceScatterUpdate")
    assert len(writes) == len(waiting.variables)
    assert all(marks in op.control_inputs for op in writes)


def test_another_optimizer_takes_a_table_over(way: str):
    layer, first, *_ = trained(10)
    step = steps_of(first, layer.embeddings)
    step(gradients(1)[0])
    before = layer.get_weights()[0]
    second = te_keras.RowSparseOptimizer(O.Adam(0.01))
    second.build([layer.embeddings])
    np.testing.assert_array_equal(layer.get_weights()[0], before)
    refused = waiting_module.other_optimizer(r"\S+").replace(".", r"\.")
    with pytest.raises(tf.errors.InvalidArgumentError, match=refused):
        step(gradients(1)[0])
    with pytest.raises(RuntimeError, match=refused):
        first.apply_gradients([(gradients(1)[0], layer.embeddings)])
    np.testing.assert_array_equal(layer.get_weights()[0], before)
    second.apply_gradients([(gradients(1)[0], layer.embeddings)])
    assert not np.array_equal(layer.get_weights()[0], before)


def test_a_refused_step_changes_nothing():
    """Neither variables before the table nor Nadam's product of momenta."""
    pair = Pair(lambda: O.Nadam(0.1))
    kernel, gradient = plain_table(np.ones(2, "f")), gradients(1)[0]
    pairs = [(tf.ones([2]), kernel), (gradient, pair.layer.embeddings)]
    pair.ours.apply_gradients(pairs)
    before = [v.numpy() for v in (kernel, pair.ours._u_product)]
    pair.ours.beta_1 = 0.5
    with pytest.raises(RuntimeError, match="an option of this Nadam changed after"):
        pair.ours.apply_gradients(pairs)
    after = [v.numpy() for v in (kernel, pair.ours._u_product)]
    np.testing.assert_equal(after, before)


@pytest.mark.parametrize(
    ("option", "value"),
    [("weight_decay", None), ("beta_1", 0.5), ("beta_2", 0.5), ("epsilon", 0.1)],
)
def test_options_that_change_while_rows_wait_are_refused(option: str, value: Any):
    layer, optimizer, *_ = trained(2)
    before = layer.get_weights()[0]
    setattr(optimizer, option, value)
    with pytest.raises(RuntimeError, match="an option of this AdamW changed after"):
        optimizer.apply_gradients([(gradients(1)[0], layer.embeddings)])
    np.testing.assert_array_equal(layer.get_weights()[0], before)


def test_options_change_between_unconvert_and_convert():
    """The slots and the number of steps stay, as in Keras."""

    def model_of(cls: Any) -> Any:
        ids = keras.Input((), dtype="int64")
        model = keras.Model(ids, cls(V, D)(ids))
        model.layers[-1].set_weights([first_table()])
        model.compile(O.Adam(0.01), "mse")
        return model

    ours, theirs = model_of(te_keras.Embedding), model_of(keras.layers.Embedding)
    te_keras.convert(ours)
    batches = np.random.default_rng(5).permuted(np.tile(np.arange(V), (12, 1)), axis=1)
    for step, ids in enumerate(batches[:, :4]):  # No id occurs twice in a batch.
        if step == 6:
            te_keras.unconvert(ours)
            for model in (ours, theirs):
                model.optimizer.beta_1 = 0.5
                model.compile(model.optimizer, "mse")
            te_keras.convert(ours)
        for model in (ours, theirs):
            model.train_on_batch(ids, np.ones([4, D], np.float32))
    (own,), (other,) = ours.get_weights(), theirs.get_weights()
    np.testing.assert_allclose(own, other, rtol=0, atol=rounding(12, other))


@pytest.mark.parametrize("second", ["adamw", "sgd", "use_ema"])
@pytest.mark.filterwarnings("ignore:RowSparseOptimizer updates all rows")
def test_an_optimizer_that_is_built_in_a_trace_takes_a_table_over(second: str):
    """Keras 3 builds it there after `compile`; nobody has read the table before."""
    make = {
        **OPTIMIZERS,
        "sgd": lambda: O.SGD(0.1),
        "use_ema": lambda: O.Adam(0.01, use_ema=True),
    }[second]
    pair = Pair()
    pair.train(4)
    layer, first = pair.layer, pair.ours
    ours = te_keras.RowSparseOptimizer(make())
    tf.function(lambda: ours.build([layer.embeddings]))()
    pair.ours, pair.theirs = ours, make()
    pair.train(4)
    pair.check(8)
    with pytest.raises(RuntimeError, match="no longer trained by the optimizer"):
        first.apply_gradients([(gradients(1)[0], layer.embeddings)])


def test_a_lazy_optimizer_that_is_built_in_a_trace_takes_a_table_over():
    pair = Pair()
    pair.train(4)
    table = pair.layer.embeddings
    lazy = te_keras.RowSparseOptimizer(OPTIMIZERS["momentum"](), lazy=True)
    tf.function(lambda: lazy.build([table]))()
    before = pair.layer.get_weights()[0]
    np.testing.assert_array_equal(before[0], pair.layer(tf.range(1))[0])
    (gradient,) = gradients(1)
    lazy.apply_gradients([(gradient, table)])
    changed = (pair.layer.get_weights()[0] != before).any(axis=1)
    assert set(np.flatnonzero(changed)) <= set(gradient.indices.numpy())
    assert changed.any()


@pytest.mark.parametrize("first", ["lazy", "XLA", "unconvert"])
def test_traced_steps_are_refused_once_the_table_is_of_another(first: str):
    layer = layer_of(first_table())
    is_lazy = first == "lazy"
    old = te_keras.RowSparseOptimizer(O.SGD(0.1, momentum=0.9), lazy=is_lazy)
    step = steps_of(old, layer.embeddings, jit_compile=first == "XLA")
    step(gradients(1)[0])
    if first == "unconvert":
        make_plain(layer.embeddings)
    else:
        te_keras.RowSparseOptimizer(O.Adam(0.01)).build([layer.embeddings])
    before = layer.get_weights()[0]
    kinds = (RuntimeError, tf.errors.InvalidArgumentError)
    with pytest.raises(kinds, match="is no longer trained by the optimizer of this"):
        step(gradients(1)[0])
    np.testing.assert_array_equal(layer.get_weights()[0], before)


def test_tables_of_one_shape_have_rules_of_their_own():
    """Eager calls of one op share a kernel if their attributes are equal."""
    for decay in (None, 0.1, 0.5):
        pair = Pair(functools.partial(O.Adam, 0.01, weight_decay=decay))
        pair.train(3)
        pair.check(3)


def test_values_that_are_assigned_are_up_to_date(way: str):
    layer, optimizer, _, slots = trained(make=OPTIMIZERS["adam"])
    value = np.full([V, D], 0.5, np.float32)
    layer.set_weights([value])
    np.testing.assert_array_equal(layer(tf.range(V)), value)
    check_slots(optimizer, slots, 50)


@pytest.mark.parametrize("decay", [None, 0.05])
def test_a_full_history_is_begun_again(
    decay: float | None, way: str, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(idle_module, "_LONGEST_HISTORY", 80)
    steps = 250
    pair = Pair(lambda: O.Adam(0.01, beta_1=0.5, weight_decay=decay))
    pair.train_in_functions(gradients(steps))
    clock = _variable(pair.layer.embeddings).waiting.clock.numpy()
    assert list(clock[:2]) == [steps, steps // 79 * 79]
    pair.check(steps)


def test_a_decay_that_leaves_nothing_is_refused(way: str):
    layer = layer_of(first_table())
    optimizer = te_keras.RowSparseOptimizer(O.SGD(1.0, weight_decay=1.0))
    with pytest.raises(tf.errors.InvalidArgumentError, match="must be below 1"):
        optimizer.apply_gradients([(gradients(1)[0], layer.embeddings)])
    step = steps_of(optimizer, layer.embeddings, jit_compile=True)
    with pytest.raises(ValueError, match="must be below 1"):
        step(gradients(1)[0])
    np.testing.assert_array_equal(layer.get_weights()[0], first_table())


def test_a_decay_excludes_a_table_by_the_name_of_its_layer():
    optimizer = te_keras.RowSparseOptimizer(O.SGD(0.1, weight_decay=0.5))
    optimizer.exclude_from_weight_decay(var_names=["films"])
    layer = te_keras.Embedding(V, D, name="films")
    layer(tf.constant([0]))
    before = layer.get_weights()[0]
    zeros = tf.IndexedSlices(tf.zeros([1, D]), tf.constant([1]), tf.constant([V, D]))
    for _ in range(2):
        optimizer.apply_gradients([(zeros, layer.embeddings)])
    np.testing.assert_array_equal(layer.get_weights()[0], before)


@pytest.mark.parametrize(
    ("make", "why"),
    [
        (lambda: O.Adam(0.01, beta_1=0.9, beta_2=0.9), "only 0.9 of the averages"),
        (lambda: O.Adam(0.01, beta_1=0.9, beta_2=0.5), "for more than 4096 steps"),
        (lambda: O.SGD(0.01, momentum=0.9999), "for more than 4096 steps"),
        (lambda: O.Ftrl(0.1, l2_shrinkage_regularization_strength=0.1), "l2_shrink"),
        pytest.param(
            lambda: O.AdamW(0.01, gradient_accumulation_steps=3),
            "`gradient_accumulation_steps` accumulates dense",
            marks=pytest.mark.skipif(not IS_KERAS_3, reason="Of Keras 3."),
        ),
        pytest.param(
            lambda: O.Adam(0.01, epsilon=0.01, adaptive_epsilon=True),
            "`adaptive_epsilon` changes epsilon",
            marks=pytest.mark.skipif(IS_KERAS_3, reason="Of tf_keras."),
        ),
    ],
)
def test_what_cannot_be_caught_up_is_dense_with_one_warning(
    make: Callable[[], Any], why: str
):
    pair = Pair(make)
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        pair.train(20)
    (text,) = [str(w.message) for w in said if "RowSparse" in str(w.message)]
    assert why in text
    assert "lazy=True" in text
    assert list(pair.ours.updates_rows_by.values()) == ["dense"]
    pair.check(20, size=1.0)


@pytest.mark.parametrize(
    ("name", "dtype"),
    [
        pytest.param(
            *(name, dtype), marks=() if name == "adam" else pytest.mark.second_tier
        )
        for number, name in enumerate(OPTIMIZERS)
        for k, dtype in enumerate(("bfloat16", "float16", "float64"))
        if name == "adam" or k == number % 3
        # Its correction of epsilon is not smooth in the first steps.
        if (name, dtype) != ("nadam, large epsilon", "float64")
    ],
)
@pytest.mark.filterwarnings("ignore:RowSparseOptimizer updates all rows")
def test_tables_of_other_dtypes(name: str, dtype: str):
    """Keras rounds the values of 16 bits, and its constants for them, in each step."""
    first = tf.cast(first_table(), dtype).numpy()
    pair = Pair(OPTIMIZERS[name], first)
    for own in gradients(100):
        values = tf.cast(own.values, dtype)
        pair.step(tf.IndexedSlices(values, own.indices, own.dense_shape))
    ours = [pair.layer.get_weights()[0], *slots_of(pair.ours)]
    theirs = [pair.table.numpy(), *slots_of(pair.theirs)]
    rtol = 1e-7 if dtype == "float64" else 0.0
    for found, expected in zip(np.float64(ours), np.float64(theirs), strict=True):
        atol = rtol * np.abs(expected).max()
        np.testing.assert_allclose(found, expected, rtol, atol)


def test_tables_of_other_layers_are_dense_with_a_warning():
    ours, theirs = te_keras.RowSparseOptimizer(O.Adam(0.01)), O.Adam(0.01)
    first, second = plain_table(first_table()), plain_table(first_table())
    with pytest.warns(UserWarning, match=r"does not belong to a te\.keras\.Embedding"):
        ours.apply_gradients([(gradients(1)[0], first)])
    theirs.apply_gradients([(dense(gradients(1)[0]), second)])
    np.testing.assert_allclose(first.numpy(), second.numpy(), rtol=0, atol=1e-7)


AROUND: dict[str, dict[str, Any]] = {
    "clipnorm": {"clipnorm": 0.5},
    "global_clipnorm": {"global_clipnorm": 0.5},
    "clipvalue": {"clipvalue": 0.3},
    "schedule": {"learning_rate": O.schedules.ExponentialDecay(0.05, 3, 0.7)},
    "iterations": {},
}


@pytest.mark.parametrize("around", AROUND)
def test_what_keras_does_around_a_step(around: str):
    """Also after `iterations` was assigned, forwards and backwards."""
    options = {"learning_rate": 0.01, "weight_decay": 0.05, **AROUND[around]}
    pair = Pair(lambda: O.Adam(**options))
    numbers = {3: 600, 7: 200, 9: 1} if around == "iterations" else {}
    for step, gradient in enumerate(gradients(12)):
        pair.step(gradient)
        if step in numbers:
            pair.ours.iterations.assign(numbers[step])
            pair.theirs.iterations.assign(numbers[step])
    pair.check(12)


@pytest.mark.parametrize("how", ["constraint", "use_ema"])
@pytest.mark.parametrize(("name", "by"), [("Adam", "op"), ("Nadam", "rows")])
def test_what_computes_on_all_rows_catches_them_up_after_each_step(
    name: str, by: str, how: str, way: str
):
    """Only ops of the library do that faster than dense steps."""
    ema = {"use_ema": True, "ema_momentum": 0.5, "ema_overwrite_frequency": 7}
    says = "MaxNorm constrains" if how == "constraint" else "`use_ema` averages"
    pair = Pair(lambda: getattr(O, name)(0.01, **(ema if how == "use_ema" else {})))
    with pytest.warns(UserWarning, match=rf"all rows of .*{says} all rows"):
        train_constrained(pair, how == "constraint")
    check_slots(pair.ours, slots_of(pair.theirs), 40)
    ways = set(pair.ours.updates_rows_by.values())
    assert ways == {by if way == "kernels" else "dense"}


@pytest.mark.parametrize("name", ["Adagrad", "SGD"])
def test_rows_that_do_not_move_are_constrained_without_a_warning(name: str, way: str):
    pair = Pair(lambda: getattr(O, name)(0.3))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        train_constrained(pair)
    ways = set(pair.ours.updates_rows_by.values())
    assert ways
    assert "dense" not in ways


def test_tables_of_one_name_are_updated_each_in_its_way(way: str):
    norm: Any = keras.constraints.MaxNorm(1.0, axis=1)
    layers = [
        te_keras.Embedding(V, D, name="same", embeddings_constraint=constraint)
        for constraint in (norm, None)
    ]
    for layer in layers:
        layer.build(None)
    tables = [layer.embeddings for layer in layers]
    optimizer = te_keras.RowSparseOptimizer(O.Nadam(0.01))
    with pytest.warns(UserWarning, match="MaxNorm constrains all rows"):
        optimizer.build(tables)
    gradient = gradients(1)[0]
    variables = [keras_api.value_of(table) for table in tables]
    by_rows = [optimizer.has_only_rows(gradient, each) for each in variables]
    assert by_rows == [way == "kernels", True]


def train_constrained(pair: Pair, constrained: bool = True) -> None:
    """Trains a pair for 40 steps, and compares the tables."""
    norm: Any = keras.constraints.MaxNorm(1.0, axis=1) if constrained else None
    pair.layer = te_keras.Embedding(V, D, embeddings_constraint=norm)
    pair.layer.build(None)
    pair.layer.set_weights([first_table()])
    for gradient in gradients(40):
        pair.step(gradient)
        if constrained:
            pair.table.assign(norm(pair.table))
    pair.check(40)


def test_steps_without_a_gradient_are_no_steps(way: str):
    """Keras leaves out a variable whose gradient is None."""
    pair = Pair()
    layer, table = pair.layer, pair.table
    other, twin = plain_table(np.zeros(2, "f")), plain_table(np.zeros(2, "f"))
    pair.ours.build([layer.embeddings, other])
    pair.theirs.build([table, twin])
    one = tf.ones([2])
    for step, gradient in enumerate(gradients(18)):
        pairs = [(gradient, layer.embeddings)] if step % 3 else []
        pair.ours.apply_gradients([*pairs, (one, other)])
        pairs = [(dense(gradient), table)] if step % 3 else []
        pair.theirs.apply_gradients([*pairs, (one, twin)])
    pair.check(18, size=1.0)


def test_dense_and_sparse_steps_in_turn(way: str):
    pair = Pair(lambda: O.AdamW(0.01, weight_decay=0.05))
    for step, gradient in enumerate(gradients(18)):
        pair.step(gradient, gradient if step % 5 else dense(gradient))
    pair.check(18, size=1.0)


@pytest.mark.parametrize("powers", [True, False])
@pytest.mark.parametrize("beta_1", [0.0, 0.5, 0.9, 0.95, 0.99])
@pytest.mark.parametrize("beta_2", [0.98, 0.99, 0.999, 0.99999])
def test_nodes_give_the_sum_over_all_steps(beta_1: float, beta_2: float, powers: bool):
    """Rates that change at random, roots from below epsilon to far above it."""
    rng, root_fade = np.random.default_rng(7), float(np.sqrt(beta_2))
    if beta_1 == 0.99 and beta_2 < 0.999:
        with pytest.raises(ValueError, match=r"a step keeps 0\.99 of the momenta"):
            quadrature(beta_1, root_fade, powers=powers)
        return
    rule = quadrature(beta_1, root_fade, powers=powers)
    assert not rule.powers or powers
    roots = 10.0 ** rng.uniform(-4, 8, [200, 1])
    terms = terms_of_roots(rule, roots[:, 0], root_fade)
    for steps in (1, 2, 3, 10, 100, 2000):
        ages = np.arange(1, steps + 1)
        weights = rng.uniform(0.1, 1, steps)
        exact = (weights * beta_1**ages) @ (1 / (roots * root_fade**ages + 1)).T
        short = ages[: rule.horizon]
        summed = weights[short - 1] @ rule.weights[short - 1]
        found = terms @ summed
        np.testing.assert_allclose(found, exact, rtol=2e-7, atol=1e-300)


@pytest.mark.parametrize(
    "idle",
    [
        Idle((0.9, 0.999), "root", square=1, epsilon=1e-7),
        Idle((0.95, 0.98), "root", square=1, epsilon=1e-7),
        Idle((0.9, 0.999), "root", square=1, epsilon=1e-7, epsilon_inside=True),
        Idle((0.9, 0.99, 1.0), "root", square=2, epsilon=1e-3),
        Idle((0.9,), "momentum"),
        Idle((0.99,), "sign"),
    ],
    ids=str,
)
def test_random_rows_are_nearer_to_float64_than_dense_steps(idle: Idle, way: str):
    """Rows that begin to wait at any step, with values and rates of any size."""
    errors = errors_of_random_rows(idle, rows=500, steps=120)
    assert errors["caught up"] <= errors["dense float32"]


def errors_of_random_rows(idle: Idle, rows: int, steps: int) -> dict[str, float]:
    """The largest errors, relative to the row and its largest move."""
    rng = np.random.default_rng(11)
    first: list[Any] = [rng.normal(size=[rows, 1])]
    first += [rng.normal(size=[rows, 1]) * 10.0 ** rng.uniform(-6, 0, [rows, 1])]
    first += [10.0 ** rng.uniform(-14, 0, [rows, 1])] * (len(idle.fades) - 1)
    first = [value.astype(np.float32) for value in first]
    begin = rng.integers(0, steps, rows)
    variables = [tf.Variable(value) for value in first]
    waiting = waiting_module.Waiting(idle, variables, 1, decays=True)
    dense = {kind: [v.astype(kind) for v in first] for kind in (np.float32, np.float64)}
    sizes = np.abs(first[0]).astype(np.float64)
    for now in range(steps):
        weight, shrinkage = 10.0 ** rng.uniform(-4, -2), rng.uniform(0, 1e-3)
        own = np.flatnonzero(begin == now)
        waiting.write(own, [tf.constant(value[own]) for value in first])
        waiting.advance(tf.constant([weight, 0.0, shrinkage], tf.float64))
        for kind, (row, *slots) in dense.items():
            waits = np.flatnonzero(begin < now)
            for slot, fade in zip(slots, idle.fades, strict=True):
                slot[waits] *= kind(fade)
            move: Any = slots[idle.moment][waits]
            if idle.move == "sign":
                move = np.sign(move)
            elif idle.move == "root":
                square, epsilon = slots[idle.square][waits], kind(idle.epsilon)
                inside = idle.epsilon_inside
                move = move / (
                    np.sqrt(square + epsilon**2)
                    if inside
                    else np.sqrt(square) + epsilon
                )
            row[waits] = row[waits] * kind(1 - shrinkage) - kind(weight) * move
            sizes = np.maximum(sizes, np.abs(row))
    exact = dense[np.float64][0]
    found = {"caught up": waiting.caught_up(tf.range(rows))[0].numpy()}
    found["dense float32"] = dense[np.float32][0]
    return {
        name: float((np.abs(row - exact) / sizes).max()) for name, row in found.items()
    }
