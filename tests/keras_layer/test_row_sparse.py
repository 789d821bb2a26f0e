"""`te.keras.RowSparseOptimizer`, lazy: the rule of Keras, once for each touched row.

`test_catch_up.py` tests the numbers without `lazy`.

`tests/test_tf_keras.py` runs this file with tf_keras, too.
"""

from __future__ import annotations

import pickle
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import tensorflow as tf
from keras_layer.version import keras
from reference.keras_rules import Trained

from tpu_embedding.keras import RowSparseOptimizer
from tpu_embedding.keras.rows import rules

V, D, STEPS = 7, 3, 8
OPTIMIZERS: dict[str, Callable[..., Any]] = {
    "adadelta": lambda **o: keras.optimizers.Adadelta(0.5, **o),
    "adagrad": lambda **o: keras.optimizers.Adagrad(0.3, epsilon=0.01, **o),
    "adam": lambda **o: keras.optimizers.Adam(0.1, **o),
    "amsgrad": lambda **o: keras.optimizers.Adam(0.1, beta_2=0.5, amsgrad=True, **o),
    "adamw": lambda **o: keras.optimizers.AdamW(0.1, weight_decay=0.1, **o),
    "ftrl": lambda **o: keras.optimizers.Ftrl(
        *(0.2, -0.6, 0.2, 0.02, 0.05, 0.01, 0.3), **o
    ),
    "lion": lambda **o: keras.optimizers.Lion(0.1, **o),
    "nadam": lambda **o: keras.optimizers.Nadam(0.1, **o),
    "rmsprop": lambda **o: keras.optimizers.RMSprop(0.1, **o),
    "centered": lambda **o: keras.optimizers.RMSprop(
        0.1, momentum=0.5, centered=True, **o
    ),
    "sgd": lambda **o: keras.optimizers.SGD(0.1, **o),
    "momentum": lambda **o: keras.optimizers.SGD(0.1, momentum=0.9, **o),
    "nesterov": lambda **o: keras.optimizers.SGD(0.1, momentum=0.9, nesterov=True, **o),
}


def variable(rng: np.random.Generator, *shape: int) -> Any:
    made = keras.Variable if hasattr(keras, "Variable") else tf.Variable
    return made(rng.normal(size=shape).astype(np.float32))


def gradients(rng: np.random.Generator, steps: int = STEPS) -> list[tf.IndexedSlices]:
    """Of 5 ids, some of which are equal; the last row occurs in no step."""
    return [
        tf.IndexedSlices(
            tf.constant(rng.normal(size=(5, D)), tf.float32),
            tf.constant(rng.integers(0, V - 1, 5)),
            tf.constant([V, D]),
        )
        for _ in range(steps)
    ]


def train(optimizer: Any, table: Any, slices: list[Any]) -> Any:
    for gradient in slices:
        optimizer.apply_gradients([(gradient, table)])
    return table.numpy()


def dense(slices: list[tf.IndexedSlices]) -> list[tf.Tensor]:
    return [tf.math.unsorted_segment_sum(g.values, g.indices, V) for g in slices]


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_lazy_optimizers_have_other_numbers_than_dense_gradients(name: str):
    slices = gradients(np.random.default_rng(3))
    by_rows, plain = (variable(np.random.default_rng(4), V, D) for _ in range(2))
    train(RowSparseOptimizer(OPTIMIZERS[name](), lazy=True), by_rows, slices)
    train(OPTIMIZERS[name](), plain, dense(slices))
    same = np.allclose(by_rows.numpy(), plain.numpy(), 1e-5)
    assert same is (name in ("sgd", "adagrad"))


@pytest.mark.parametrize("fused", [True, False])
@pytest.mark.parametrize("name", OPTIMIZERS)
def test_touched_rows_have_the_numbers_of_the_rule(
    name: str, fused: bool, rng: np.random.Generator, monkeypatch: pytest.MonkeyPatch
):
    if not fused:
        monkeypatch.setattr(rules, "kernels_for", lambda variables: None)
    table, slices = variable(rng, V, D), gradients(rng)
    expected = Trained(table.numpy(), OPTIMIZERS[name]())
    rate = float(OPTIMIZERS[name]().get_config()["learning_rate"])
    for gradient in slices:
        expected.step(gradient.indices.numpy(), gradient.values.numpy(), rate)
    optimizer = RowSparseOptimizer(OPTIMIZERS[name](), lazy=True)
    found = train(optimizer, table, slices)
    # Values of about 1, in float32, after fewer than 20 roundings in each step.
    np.testing.assert_allclose(found, expected.rows, rtol=0, atol=20 * STEPS * 1e-7)


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_dense_gradients_have_the_bits_of_keras(name: str, rng: np.random.Generator):
    first, slices = variable(rng, V, D), dense(gradients(rng))
    second = variable(rng, V, D)
    second.assign(first.numpy())
    np.testing.assert_array_equal(
        train(RowSparseOptimizer(OPTIMIZERS[name]()), first, slices),
        train(OPTIMIZERS[name](), second, slices),
    )


@pytest.mark.parametrize("name", ["sgd", "adagrad"])
@pytest.mark.parametrize(
    "options",
    [
        {},
        {"clipvalue": 0.5},
        {"clipnorm": 0.7},
        {"global_clipnorm": 0.7},
        {"use_ema": True, "ema_momentum": 0.5, "ema_overwrite_frequency": 3},
    ],
    ids=str,
)
def test_sgd_and_adagrad_have_the_numbers_of_dense_gradients(
    name: str, options: dict[str, Any], rng: np.random.Generator
):
    tables = [variable(rng, V, D) for _ in range(2)]
    others = [variable(rng, 2) for _ in range(2)]
    for pair in (tables, others):
        pair[1].assign(pair[0].numpy())
    slices = gradients(rng, 25 if options else 200)
    ours = RowSparseOptimizer(OPTIMIZERS[name](**options))
    theirs = OPTIMIZERS[name](**options)
    for sparse, whole in zip(slices, dense(slices), strict=True):
        other = tf.constant(rng.normal(size=2), tf.float32)
        ours.apply_gradients([(sparse, tables[0]), (other, others[0])])
        theirs.apply_gradients([(whole, tables[1]), (other, others[1])])
    assert "dense" not in ours.updates_rows_by.values()
    for pair in (tables, others):
        np.testing.assert_allclose(pair[0].numpy(), pair[1].numpy(), rtol=0, atol=4e-6)


def test_decay_reaches_the_rows_of_the_batch_and_dense_variables(
    rng: np.random.Generator,
):
    sgd = keras.optimizers.SGD(0.1, weight_decay=0.5)
    optimizer = RowSparseOptimizer(sgd, lazy=True)
    table, other = variable(rng, V, D), variable(rng, 2)
    before, dense_before = table.numpy(), other.numpy()
    zeros = tf.IndexedSlices(tf.zeros([2, D]), tf.constant([4, 4]))
    optimizer.apply_gradients([(zeros, table), (tf.zeros([2]), other)])
    before[4] *= 1 - 0.1 * 0.5
    np.testing.assert_allclose(table.numpy(), before, rtol=1e-6)
    np.testing.assert_allclose(other.numpy(), dense_before * 0.95, rtol=1e-6)


def test_excluded_variables_do_not_decay(rng: np.random.Generator):
    sgd = keras.optimizers.SGD(0.1, weight_decay=0.5)
    optimizer = RowSparseOptimizer(sgd, lazy=True)
    table = variable(rng, V, D)
    before = table.numpy()
    optimizer.exclude_from_weight_decay(var_list=[table])
    zeros = tf.IndexedSlices(tf.zeros([1, D]), tf.constant([4]))
    train(optimizer, table, [zeros])
    np.testing.assert_array_equal(table.numpy(), before)


def test_a_schedule_counts_the_steps_of_the_optimizer(rng: np.random.Generator):
    schedule = keras.optimizers.schedules.PiecewiseConstantDecay([1], [0.5, 0.25])
    optimizer = RowSparseOptimizer(keras.optimizers.SGD(schedule))
    table = variable(rng, V, D)
    expected = table.numpy()
    one = tf.IndexedSlices(tf.ones([1, D]), tf.constant([3]))
    found = train(optimizer, table, [one, one, one])
    expected[3] -= 0.5 + 0.5 + 0.25
    np.testing.assert_allclose(found, expected, rtol=0, atol=1e-6)


def test_a_gradient_without_rows_changes_nothing(rng: np.random.Generator):
    table = variable(rng, V, D)
    before = table.numpy()
    nothing = tf.IndexedSlices(tf.zeros([0, D]), tf.zeros([0], tf.int32))
    optimizer = RowSparseOptimizer(OPTIMIZERS["adamw"](), lazy=True)
    found = train(optimizer, table, [nothing])
    np.testing.assert_array_equal(found, before)


def test_a_built_optimizer_continues_with_its_slots(rng: np.random.Generator):
    tables, slices = [variable(rng, V, D) for _ in range(2)], dense(gradients(rng))
    tables[1].assign(tables[0].numpy())
    optimizer = OPTIMIZERS["adam"]()
    train(optimizer, tables[0], slices[:3])
    assert RowSparseOptimizer(optimizer) is optimizer
    assert isinstance(optimizer, keras.optimizers.Adam)
    assert int(optimizer.iterations) == 3
    found = train(optimizer, tables[0], slices[3:])
    np.testing.assert_array_equal(found, train(OPTIMIZERS["adam"](), tables[1], slices))


def test_configurations_are_those_of_keras():
    adam = keras.optimizers.Adam(0.25, beta_1=0.5)
    plain = keras.optimizers.serialize(adam)
    optimizer = RowSparseOptimizer(adam, lazy=True)
    saved = keras.optimizers.serialize(optimizer)
    assert saved == plain
    loaded = keras.optimizers.deserialize(saved)
    assert type(loaded) is keras.optimizers.Adam
    pickled = pickle.loads(pickle.dumps(type(optimizer)))
    assert pickled is type(optimizer)
    # As earlier versions saved it.
    earlier = pickled.from_config({**optimizer.get_config(), "lazy": True})
    assert earlier.lazy
    assert earlier.get_config() == loaded.get_config()


def test_names_are_those_of_compile():
    optimizer = RowSparseOptimizer("adam")
    assert isinstance(optimizer, keras.optimizers.Adam)
    assert type(optimizer).__name__ == "RowSparseAdam"


def test_what_is_refused(rng: np.random.Generator):
    with pytest.raises(TypeError, match=r"takes a Keras optimizer.*None"):
        RowSparseOptimizer(None)
    with pytest.raises(ValueError, match="nothing"):
        RowSparseOptimizer("nothing")
    adam = RowSparseOptimizer(keras.optimizers.Adam())
    assert RowSparseOptimizer(adam) is adam
    with pytest.raises(ValueError, match="is already row-sparse, with lazy=False"):
        RowSparseOptimizer(adam, lazy=True)
    with pytest.raises(ValueError, match=r"not support .*Adamax.*It supports Adad"):
        RowSparseOptimizer(keras.optimizers.Adamax())

    class Mine(keras.optimizers.Adam):
        pass

    mine = Mine()
    with pytest.raises(ValueError, match=r"Mine.*not their subclasses"):
        RowSparseOptimizer(mine)
    assert type(mine) is Mine
    scaled = keras.mixed_precision.LossScaleOptimizer(keras.optimizers.Adam())
    with pytest.raises(ValueError, match=r"LossScaleOptimizer\(RowSparseOptimizer"):
        RowSparseOptimizer(scaled)
    strategy = tf.distribute.experimental.CentralStorageStrategy()
    with (
        strategy.scope(),
        pytest.raises(NotImplementedError, match="under CentralStorageStrategy"),
    ):
        RowSparseOptimizer(keras.optimizers.Adam())
    # Of one that was made outside of the strategy, before it has slots.
    with (
        strategy.scope(),
        pytest.raises(NotImplementedError, match="under CentralStorageStrategy"),
    ):
        adam.build([variable(rng, V, D)])
    assert not getattr(adam, "_velocities", None)


@pytest.mark.skipif(not hasattr(keras, "Variable"), reason="tf_keras has it not")
def test_a_loss_scale_of_keras_3_is_refused(rng: np.random.Generator):
    optimizer = keras.optimizers.Adam(loss_scale_factor=8.0)
    with pytest.raises(ValueError, match=r"`loss_scale_factor=8\.0` of Adam works on"):
        RowSparseOptimizer(optimizer)
    assert type(optimizer) is keras.optimizers.Adam
    optimizer = RowSparseOptimizer(keras.optimizers.Adam())
    optimizer.loss_scale_factor = 8.0
    with pytest.raises(ValueError, match=r"`loss_scale_factor=8\.0` of Adam works on"):
        optimizer.build([variable(rng, V, D)])


def test_keras_3_is_wrong_for_an_id_that_repeats():
    """The sentence of docs/coming_from.md. If it fails, Keras was mended."""
    three = tf.IndexedSlices(tf.ones([3, 1]), tf.constant([0, 0, 0]))
    rates = {}
    for wrap in (RowSparseOptimizer, lambda optimizer: optimizer):
        make = keras.Variable if hasattr(keras, "Variable") else tf.Variable
        table = make(np.zeros([1, 1], np.float32))
        optimizer = wrap(keras.optimizers.Adagrad(1.0))
        rates[wrap] = train(optimizer, table, [three]).item()
    ours, theirs = rates.values()
    np.testing.assert_allclose(ours, -3 / np.sqrt(9.1), rtol=1e-6)
    wrong = -3 / np.sqrt(3.1) if hasattr(keras, "Variable") else -3 / np.sqrt(9.1)
    np.testing.assert_allclose(theirs, wrong, rtol=1e-6)
