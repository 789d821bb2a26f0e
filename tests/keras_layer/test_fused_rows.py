"""The op that updates the rows of all tables of Keras in a step.

`tests/test_tf_keras.py` runs this file with tf_keras, too. `test_row_sparse.py`
compares the op, like TensorFlow's ops, with a slow reference.
"""

from __future__ import annotations

import concurrent.futures
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import pytest
import tensorflow as tf
from keras_layer.version import keras

from tpu_embedding.keras import RowSparseOptimizer
from tpu_embedding.keras.rows import rules
from tpu_embedding.ops import library

# The SGD of tf_keras keeps momenta that it does not use, so its rule has a slot more.
HAS_IDLE_SLOTS = not hasattr(keras, "Variable")
SHAPES = ((11, 3), (7, 16), (5, 1))
OPTIMIZERS: dict[str, Callable[..., Any]] = {
    "sgd": lambda **o: keras.optimizers.SGD(0.1, **o),
    "adagrad": lambda **o: keras.optimizers.Adagrad(0.3, **o),
    "adagrad from 0": lambda **o: keras.optimizers.Adagrad(0.3, 0.0, 0.01, **o),
    "adam": lambda **o: keras.optimizers.Adam(0.1, **o),
    "adam without epsilon": lambda **o: keras.optimizers.Adam(0.1, epsilon=0.0, **o),
    "ftrl": lambda **o: keras.optimizers.Ftrl(0.2, -0.6, 0.2, 0.02, 0.05, 0.0, 0.3),
}
# What Keras does beside the rule.
AROUND: tuple[dict[str, Any], ...] = (
    {"clipvalue": 0.5},
    {"clipnorm": 0.7},
    {"global_clipnorm": 0.7},
    {"use_ema": True, "ema_momentum": 0.5, "ema_overwrite_frequency": 3},
)
NO_RULE: dict[str, Callable[[], Any]] = {
    "momentum": lambda: keras.optimizers.SGD(0.1, momentum=0.9),
    "amsgrad": lambda: keras.optimizers.Adam(0.1, amsgrad=True),
    "decay": lambda: keras.optimizers.Adam(0.1, weight_decay=0.1),
    "shrinkage": lambda: keras.optimizers.Ftrl(
        0.2, l2_shrinkage_regularization_strength=0.1
    ),
    "nadam": lambda: keras.optimizers.Nadam(0.1),
    "zero accumulator": lambda: keras.optimizers.Ftrl(
        0.2, initial_accumulator_value=0.0
    ),
    "zero root": lambda: keras.optimizers.Adagrad(
        0.2, initial_accumulator_value=0.0, epsilon=0.0
    ),
    "negative beta": lambda: keras.optimizers.Ftrl(0.2, beta=-0.1),
    "tensor": lambda: keras.optimizers.Adam(0.1, beta_1=tf.constant(0.9)),
}


class Calls:
    """Counts the tables that the op updates."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.tables: list[int] = []
        update = rules.update_rows

        def counted(rule: Any, tables: Sequence[Any], *others: Any) -> None:
            self.tables.append(len(tables))
            update(rule, tables, *others)

        monkeypatch.setattr(rules, "update_rows", counted)


@pytest.fixture
def calls(monkeypatch: pytest.MonkeyPatch) -> Calls:
    return Calls(monkeypatch)


def variable(value: Any) -> Any:
    return (keras.Variable if hasattr(keras, "Variable") else tf.Variable)(value)


def tables(dtype: str = "float32", shapes: Any = SHAPES) -> list[Any]:
    rng = np.random.default_rng(3)
    return [variable(rng.normal(size=shape).astype(dtype)) for shape in shapes]


def gradient(
    table: Any, rng: np.random.Generator, ids: str = "int64"
) -> tf.IndexedSlices:
    rows, dim = table.shape
    return tf.IndexedSlices(
        tf.constant(rng.normal(size=(9, dim)), table.dtype),
        tf.constant(rng.integers(0, rows, 9), ids),
        tf.constant([rows, dim]),
    )


def train(
    optimizer: Any, trained: list[Any], steps: int = 6, ids: str = "int64"
) -> Any:
    """The tables and the slots after some steps, of which each has another batch."""
    rng = np.random.default_rng(5)
    for _ in range(steps):
        gradients = [gradient(table, rng, ids) for table in trained]
        optimizer.apply_gradients(zip(gradients, trained, strict=True))
    slots = optimizer.variables if hasattr(keras, "Variable") else optimizer.variables()
    return [value.numpy().copy() for value in [*trained, *slots]]


def without_the_op(monkeypatch: pytest.MonkeyPatch, run: Callable[[], Any]) -> Any:
    with monkeypatch.context() as patch:
        patch.setattr(rules, "kernels_for", lambda variables: None)
        return run()


def lazy(name: str, **options: Any) -> Any:
    return RowSparseOptimizer(OPTIMIZERS[name](**options), lazy=True)


def check_one_op(
    name: str, calls: Calls, monkeypatch: pytest.MonkeyPatch, run: Callable[[], Any]
) -> None:
    """The op updates all tables in each of six steps, as TensorFlow's ops do."""
    found = run()
    assert calls.tables == (
        [] if name == "sgd" and HAS_IDLE_SLOTS else [len(SHAPES)] * 6
    )
    assert_close(found, without_the_op(monkeypatch, run))


def assert_close(found: list[Any], expected: list[Any]) -> None:
    for own, other in zip(found, expected, strict=True):
        np.testing.assert_allclose(own, other, rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("ids", ["int32", "int64"])
@pytest.mark.parametrize("name", OPTIMIZERS)
def test_one_op_has_the_numbers_of_keras(
    name: str, ids: str, calls: Calls, monkeypatch: pytest.MonkeyPatch
):
    check_one_op(name, calls, monkeypatch, lambda: train(lazy(name), tables(), ids=ids))


@pytest.mark.parametrize("around", AROUND, ids=str)
@pytest.mark.parametrize("name", ["sgd", "adagrad", "adam"])
def test_what_keras_does_around_the_rule(
    name: str, around: dict[str, Any], calls: Calls, monkeypatch: pytest.MonkeyPatch
):
    check_one_op(
        name, calls, monkeypatch, lambda: train(lazy(name, **around), tables())
    )


@pytest.mark.parametrize("name", NO_RULE)
def test_other_rules_run_in_tensorflow(name: str, calls: Calls):
    train(RowSparseOptimizer(NO_RULE[name](), lazy=True), tables(), steps=1)
    assert not calls.tables


def test_other_dtypes_ranks_and_dense_gradients_stand_beside(
    calls: Calls, monkeypatch: pytest.MonkeyPatch
):
    def run() -> Any:
        ours = tables()
        (cube,) = tables(shapes=[(4, 2, 3)])
        (dense,) = tables(shapes=[(2,)])
        trained, optimizer = [*ours, cube, dense], lazy("adam")
        rng = np.random.default_rng(7)
        slices = tf.IndexedSlices(tf.ones([3, 2, 3]), tf.constant([1, 1, 2]))
        for _ in range(3):
            gradients = [gradient(table, rng) for table in ours]
            pairs = zip([*gradients, slices, tf.ones([2])], trained, strict=True)
            optimizer.apply_gradients(pairs)
        return [value.numpy().copy() for value in trained]

    found = run()
    assert calls.tables == [len(SHAPES)] * 3
    assert_close(found, without_the_op(monkeypatch, run))
    train(lazy("adam"), tables("float64"), steps=1)
    train(lazy("adam"), tables(shapes=[(4, 0)]), steps=1)
    assert calls.tables == [len(SHAPES)] * 3


SCHEDULE = keras.optimizers.schedules.PiecewiseConstantDecay([0], [0.5, 2.0])


@pytest.mark.parametrize("rate", [0.5, SCHEDULE], ids=["number", "schedule"])
def test_a_rate_changes_between_steps(rate: Any, calls: Calls):
    (table,) = tables(shapes=[(4, 2)])
    optimizer = RowSparseOptimizer(keras.optimizers.Adagrad(rate, 0.25, 0.0), lazy=True)
    optimizer.build([table])
    one = tf.IndexedSlices(tf.ones([1, 2]), tf.constant([3]))

    @tf.function
    def step() -> None:
        optimizer.apply_gradients([(one, table)])

    expected = table.numpy().copy()
    step()
    if rate is not SCHEDULE:
        optimizer.learning_rate = 2.0
    step()
    expected[3] -= 0.5 / np.sqrt(1.25) + 2.0 / np.sqrt(2.25)
    np.testing.assert_allclose(table.numpy(), expected, rtol=1e-6)
    assert calls.tables == [1]  # The function was traced once.


class Rising(keras.optimizers.schedules.LearningRateSchedule):
    """A rate that each evaluation changes."""

    def __init__(self) -> None:
        self.evaluated = 0

    def __call__(self, step: Any) -> Any:
        self.evaluated += 1
        return tf.constant(float(self.evaluated))


def test_a_schedule_is_evaluated_as_often_as_by_keras(calls: Calls):
    first, plain = Rising(), Rising()
    train(RowSparseOptimizer(keras.optimizers.Adagrad(first), lazy=True), tables())
    train(keras.optimizers.Adagrad(plain), tables())
    assert first.evaluated == plain.evaluated
    assert len(calls.tables) == 6


def test_a_refused_step_changes_nothing():
    """Of an id beyond the last table, while the gradients of the others are right."""
    trained, optimizer = tables(), lazy("adam")
    before = train(optimizer, trained, steps=1)
    rng = np.random.default_rng(0)
    gradients = [gradient(table, rng) for table in trained]
    rows, dim = SHAPES[-1]
    for bad in (rows, -1):
        gradients[-1] = tf.IndexedSlices(tf.ones([1, dim]), tf.constant([bad]))
        with pytest.raises(tf.errors.InvalidArgumentError, match=f"id {bad},"):
            optimizer.apply_gradients(zip(gradients, trained, strict=True))
    after = train(optimizer, trained, steps=0)
    for own, other in zip(after, before, strict=True):
        np.testing.assert_array_equal(own, other)


@pytest.mark.parametrize("first", ["rows", "dense"])
def test_two_gradients_of_one_variable(
    first: str, calls: Calls, monkeypatch: pytest.MonkeyPatch
):
    """TensorFlow's ops apply them in their order, beside the op for other tables."""

    def run() -> Any:
        table, other = tables(shapes=[(6, 4), (5, 2)])
        optimizer = lazy("adam")
        optimizer.build([table, other])
        rng = np.random.default_rng(1)
        rows = gradient(table, rng)
        last = rows if first == "rows" else tf.ones(table.shape)
        pairs = [(last, table), (gradient(other, rng), other), (rows, table)]
        optimizer.apply_gradients(pairs)
        return [table.numpy().copy(), other.numpy().copy()]

    found = run()
    assert calls.tables == [1]
    assert_close(found, without_the_op(monkeypatch, run))


def test_threads_that_train_one_table(calls: Calls):
    """Each with an optimizer of its own: no update is lost."""
    (table,) = tables(shapes=[(6, 4)])
    expected = table.numpy().copy()
    one = tf.IndexedSlices(tf.ones([2, 4]), tf.constant([2, 2]))

    def run(_: int) -> None:
        optimizer = RowSparseOptimizer(
            keras.optimizers.Adagrad(0.5, 0.25, 0.0), lazy=True
        )
        for _ in range(50):
            optimizer.apply_gradients([(one, table)])

    with concurrent.futures.ThreadPoolExecutor(4) as pool:
        list(pool.map(run, range(4)))
    # Each optimizer has accumulators of its own; all gradients are 2.
    expected[2] -= 4 * np.sum(0.5 * 2 / np.sqrt(0.25 + 4 * np.arange(1, 51)))
    np.testing.assert_allclose(table.numpy(), expected, rtol=1e-5)
    assert sum(calls.tables) == 200


def test_a_value_that_was_read_before_stays():
    (table,) = tables(shapes=[(6, 4)])
    before = tf.convert_to_tensor(table)
    copy = before.numpy().copy()
    train(RowSparseOptimizer(OPTIMIZERS["adagrad"]()), [table], steps=2)
    np.testing.assert_array_equal(before, copy)
    assert not np.array_equal(table.numpy(), copy)


@pytest.mark.parametrize(
    "where", ["xla", "called by xla", "no library", "portable", "replicas"]
)
def test_where_the_op_is_not_used(
    where: str, calls: Calls, monkeypatch: pytest.MonkeyPatch
):
    (table,) = tables(shapes=[(6, 4)])
    expected = table.numpy().copy()
    optimizer = RowSparseOptimizer(keras.optimizers.Adagrad(0.5, 0.25, 0.0), lazy=True)
    optimizer.build([table])
    one = tf.IndexedSlices(tf.ones([2, 4]), tf.constant([2, 2]))

    def step() -> None:
        optimizer.apply_gradients([(one, table)])

    if where == "xla":
        tf.function(step, jit_compile=True)()
    elif where == "called by xla":
        inner = tf.function(step)
        tf.function(inner, jit_compile=True)()
    elif where == "no library":
        monkeypatch.setattr(library, "unavailable_reason", lambda: "There is none.")
        monkeypatch.setattr(library, "load", lambda: pytest.fail("loads the library"))
        step()
    elif where == "portable":
        monkeypatch.setenv("TPU_EMBEDDING_ENGINE", "portable")
        step()
    else:
        strategy = tf.distribute.OneDeviceStrategy("/cpu:0")
        with strategy.scope():
            (table,) = tables(shapes=[(6, 4)])
            optimizer = RowSparseOptimizer(
                keras.optimizers.Adagrad(0.5, 0.25, 0.0), lazy=True
            )
            optimizer.build([table])
        strategy.run(step)
    assert not calls.tables
    expected[2] -= 0.5 * 2 / np.sqrt(4.25)
    np.testing.assert_allclose(table.numpy(), expected, rtol=1e-6)
