"""`te.keras.RowSparseOptimizer`: rows that wait have the numbers of dense gradients.

`tests/test_tf_keras.py` runs this file with tf_keras, too.
"""

from __future__ import annotations

import tempfile
import warnings
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import tensorflow as tf
from keras_layer.version import keras
from reference.keras_rules import Trained

from tpu_embedding import keras as te_keras
from tpu_embedding.keras.rows import fused
from tpu_embedding.keras.rows import waiting as waiting_module
from tpu_embedding.optimizers.idle import quadrature

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
        monkeypatch.setattr(fused, "kernels_for", lambda variables: None)
    return request.param


def layer_of(table: Any) -> Any:
    layer = te_keras.Embedding(*table.shape)
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


def steps_of(optimizer: Any, table: Any, is_dense: bool = False) -> Callable[..., None]:
    """A traced step of a batch: it takes a gradient of 4 ids."""
    optimizer.build([table])
    rows = int(table.shape[0])

    @tf.function(
        input_signature=[
            tf.TensorSpec([4], tf.int64),
            tf.TensorSpec([4, D], tf.float32),
        ]
    )
    def step(ids: Any, values: Any) -> None:
        gradient = tf.IndexedSlices(values, ids, tf.constant([rows, D], tf.int64))
        optimizer.apply_gradients([(dense(gradient) if is_dense else gradient, table)])

    return lambda gradient: step(gradient.indices, gradient.values)


def slots_of(optimizer: Any) -> list[Any]:
    found = optimizer.variables if IS_KERAS_3 else optimizer.variables()
    return [v.numpy() for v in found if tuple(v.shape) == (V, D)]


def rate_at(step: int) -> float:
    return 1.0 if step < 150 else 0.25


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_tables_and_slots_are_those_of_dense_gradients(name: str, way: str):
    """Beside Keras in float32, with a rate that is assigned in the middle."""
    ours, theirs = OPTIMIZERS[name](), OPTIMIZERS[name]()
    ours = te_keras.RowSparseOptimizer(ours)
    layer, table = layer_of(first_table()), plain_table(first_table())
    rate = (
        float(keras.backend.get_value(ours.learning_rate))
        if not IS_KERAS_3
        else (float(ours.learning_rate))
    )
    exact = Trained(first_table(), OPTIMIZERS[name]())
    updates = steps_of(ours, layer.embeddings), steps_of(theirs, table, is_dense=True)
    for step, gradient in enumerate(gradients()):
        for optimizer in (ours, theirs):
            optimizer.learning_rate = rate * rate_at(step)
        exact.step(
            *(gradient.indices.numpy(), gradient.values.numpy()),
            *(rate * rate_at(step), True),
        )
        for update in updates:
            update(gradient)
    assert set(ours.updates_rows_by.values()) <= {"op", "rows"}
    for own, other in zip(slots_of(ours), slots_of(theirs), strict=True):
        scale = np.abs(other).max()
        np.testing.assert_allclose(own, other, rtol=0, atol=STEPS * 6e-8 * scale)
    # 300 roundings of values of about 1, and Keras's bias correction, whose relative
    # error of 1e-5 (float32 of 1 - 0.999) is part of both.
    np.testing.assert_allclose(
        layer.get_weights()[0], table.numpy(), rtol=0, atol=STEPS * 1.2e-7
    )
    np.testing.assert_allclose(
        layer.get_weights()[0], exact.rows, rtol=0, atol=STEPS * 1.2e-7 + 3e-5
    )


def trained(
    steps: int = 50, make: Callable[[], Any] = OPTIMIZERS["adamw"]
) -> tuple[Any, Any, Any, Any]:
    """A layer and its optimizer, most rows of which wait, and the dense twins."""
    ours, theirs = te_keras.RowSparseOptimizer(make()), make()
    layer, table = layer_of(first_table()), plain_table(first_table())
    updates = steps_of(ours, layer.embeddings), steps_of(theirs, table, is_dense=True)
    for gradient in gradients(steps):
        for update in updates:
            update(gradient)
    return layer, ours, table.numpy(), slots_of(theirs)


def _in_function(read: Callable[[], Any]) -> Any:
    return tf.function(read)()


def _saved(layer: Any) -> Any:
    with tempfile.TemporaryDirectory() as folder:
        path = tf.train.Checkpoint(layer=layer).write(f"{folder}/checkpoint")
        reader = tf.train.load_checkpoint(path)
        shapes = reader.get_variable_to_shape_map()
        (name,) = [name for name, shape in shapes.items() if shape == [V, D]]
        return reader.get_tensor(name)


def _sum_of_rows(table: Any) -> Any:
    return tf.linalg.diag(tf.reduce_sum(tf.convert_to_tensor(table), 0))


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
    layer, _, expected, _ = trained()
    stored = waiting_module.gather(_variable(layer.embeddings), tf.range(V))
    assert np.abs(stored.numpy() - expected).max() > 1e-2  # Rows wait.
    if reader.startswith("lookup for") and not IS_KERAS_3:
        reader = "lookup"
    found = np.asarray(READERS[reader](layer))
    np.testing.assert_allclose(found, expected, rtol=0, atol=1e-5)


def _variable(weight: Any) -> Any:
    return weight.value if IS_KERAS_3 else weight


def test_lookups_write_nothing(way: str):
    layer, optimizer, expected, _ = trained()
    table = _variable(layer.embeddings)
    before = waiting_module.gather(table, tf.range(V)).numpy()
    np.testing.assert_allclose(layer(tf.range(V)), expected, rtol=0, atol=1e-5)
    with tf.GradientTape() as tape:
        loss = tf.reduce_sum(layer(tf.constant([5, 7, 5])))
    gradient = tape.gradient(loss, layer.embeddings)
    assert isinstance(gradient, tf.IndexedSlices)
    np.testing.assert_array_equal(dense(gradient)[5], [2.0] * D)
    after = waiting_module.gather(table, tf.range(V)).numpy()
    np.testing.assert_array_equal(before, after)
    assert optimizer is not None


def test_slots_are_caught_up_when_they_are_read(way: str):
    _, optimizer, _, expected = trained()
    for own, other in zip(slots_of(optimizer), expected, strict=True):
        np.testing.assert_allclose(own, other, rtol=2e-5, atol=1e-9)


def test_a_function_that_was_traced_before_the_optimizer_was_built(way: str):
    ours = te_keras.RowSparseOptimizer(O.Adam(0.01))
    layer, table = layer_of(first_table()), plain_table(first_table())
    theirs = O.Adam(0.01)
    look_up = tf.function(lambda: layer(tf.range(V)))
    np.testing.assert_array_equal(look_up(), first_table())
    updates = steps_of(ours, layer.embeddings), steps_of(theirs, table, is_dense=True)
    for gradient in gradients(50):
        for update in updates:
            update(gradient)
    np.testing.assert_allclose(look_up(), table.numpy(), rtol=0, atol=1e-5)


def test_another_optimizer_takes_a_table_over(way: str):
    layer, first, expected, _ = trained()
    step = steps_of(first, layer.embeddings)
    step(gradients(1)[0])
    before = layer.get_weights()[0]
    second = te_keras.RowSparseOptimizer(O.Adam(0.01))
    second.build([layer.embeddings])
    np.testing.assert_array_equal(layer.get_weights()[0], before)
    with pytest.raises(tf.errors.InvalidArgumentError, match="Another optimizer was"):
        step(gradients(1)[0])
    with pytest.raises(RuntimeError, match="trained by another optimizer"):
        first.apply_gradients([(gradients(1)[0], layer.embeddings)])
    np.testing.assert_array_equal(layer.get_weights()[0], before)
    second.apply_gradients([(gradients(1)[0], layer.embeddings)])
    assert not np.array_equal(layer.get_weights()[0], before)
    assert expected is not None


def test_values_that_are_assigned_are_up_to_date(way: str):
    layer, optimizer, _, slots = trained(make=OPTIMIZERS["adam"])
    value = np.full([V, D], 0.5, np.float32)
    layer.set_weights([value])
    np.testing.assert_array_equal(layer(tf.range(V)), value)
    for own, other in zip(slots_of(optimizer), slots, strict=True):
        np.testing.assert_allclose(own, other, rtol=2e-5, atol=1e-9)


@pytest.mark.parametrize("decay", [None, 0.05])
def test_a_full_history_is_begun_again(
    decay: float | None, way: str, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(waiting_module, "_LONGEST_HISTORY", 300)

    def make() -> Any:
        return O.Adam(0.01, beta_1=0.8, weight_decay=decay)

    passes = 1500 // 299
    ours, theirs = te_keras.RowSparseOptimizer(make()), make()
    layer, table = layer_of(first_table()), plain_table(first_table())
    updates = steps_of(ours, layer.embeddings), steps_of(theirs, table, is_dense=True)
    for gradient in gradients(5 * STEPS):
        for update in updates:
            update(gradient)
    clock = _variable(layer.embeddings).waiting.clock.numpy()
    assert list(clock[:2]) == [5 * STEPS, passes * 299]
    np.testing.assert_allclose(
        layer.get_weights()[0], table.numpy(), rtol=0, atol=5 * STEPS * 1.2e-7
    )


def test_a_decay_that_leaves_nothing_is_refused(way: str):
    layer = layer_of(first_table())
    optimizer = te_keras.RowSparseOptimizer(O.SGD(1.0, weight_decay=1.0))
    with pytest.raises(tf.errors.InvalidArgumentError, match="must be below 1"):
        optimizer.apply_gradients([(gradients(1)[0], layer.embeddings)])
    np.testing.assert_array_equal(layer.get_weights()[0], first_table())


@pytest.mark.parametrize(
    ("make", "why"),
    [
        (lambda: O.Adam(0.01, beta_1=0.9, beta_2=0.9), "need more than 16 nodes"),
        (lambda: O.Adam(0.01, beta_1=0.9, beta_2=0.5), "for more than 4096 steps"),
        (lambda: O.SGD(0.01, momentum=0.9999), "for more than 4096 steps"),
        (lambda: O.Ftrl(0.1, l2_shrinkage_regularization_strength=0.1), "l2_shrink"),
    ],
)
def test_what_cannot_be_caught_up_is_dense_with_one_warning(
    make: Callable[[], Any], why: str
):
    layer, table = layer_of(first_table()), plain_table(first_table())
    ours, theirs = te_keras.RowSparseOptimizer(make()), make()
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        for gradient in gradients(20):
            ours.apply_gradients([(gradient, layer.embeddings)])
            theirs.apply_gradients([(dense(gradient), table)])
    (text,) = [str(w.message) for w in said if "RowSparse" in str(w.message)]
    assert why in text
    assert "lazy=True" in text
    assert list(ours.updates_rows_by.values()) == ["dense"]
    np.testing.assert_allclose(
        layer.get_weights()[0], table.numpy(), rtol=0, atol=20 * 1.2e-7
    )


def test_tables_of_other_layers_are_dense_with_a_warning():
    ours, theirs = te_keras.RowSparseOptimizer(O.Adam(0.01)), O.Adam(0.01)
    first, second = plain_table(first_table()), plain_table(first_table())
    with pytest.warns(UserWarning, match=r"not the table of a te\.keras\.Embedding"):
        ours.apply_gradients([(gradients(1)[0], first)])
    theirs.apply_gradients([(dense(gradients(1)[0]), second)])
    np.testing.assert_allclose(first.numpy(), second.numpy(), rtol=0, atol=1e-7)


def test_steps_without_a_gradient_are_no_steps(way: str):
    """Keras leaves out a variable whose gradient is None."""
    layer, table = layer_of(first_table()), plain_table(first_table())
    other, twin = plain_table(np.zeros(2, "f")), plain_table(np.zeros(2, "f"))
    ours, theirs = te_keras.RowSparseOptimizer(O.Adam(0.01)), O.Adam(0.01)
    for optimizer, pair in ((ours, (layer.embeddings, other)), (theirs, (table, twin))):
        optimizer.build(list(pair))
    one = tf.ones([2])
    for step, gradient in enumerate(gradients(60)):
        pairs = [(gradient, layer.embeddings)] if step % 3 else []
        ours.apply_gradients([*pairs, (one, other)])
        pairs = [(dense(gradient), table)] if step % 3 else []
        theirs.apply_gradients([*pairs, (one, twin)])
    np.testing.assert_allclose(
        layer.get_weights()[0], table.numpy(), rtol=0, atol=60 * 1.2e-7
    )


def test_dense_and_sparse_steps_in_turn(way: str):
    layer, table = layer_of(first_table()), plain_table(first_table())
    ours, theirs = (make(0.01, weight_decay=0.05) for make in (O.AdamW, O.AdamW))
    ours = te_keras.RowSparseOptimizer(ours)
    for step, gradient in enumerate(gradients(60)):
        own = gradient if step % 7 else dense(gradient)
        ours.apply_gradients([(own, layer.embeddings)])
        theirs.apply_gradients([(dense(gradient), table)])
    np.testing.assert_allclose(
        layer.get_weights()[0], table.numpy(), rtol=0, atol=60 * 1.2e-7
    )


@pytest.mark.parametrize("beta_1", [0.0, 0.5, 0.9, 0.95, 0.99])
@pytest.mark.parametrize("beta_2", [0.98, 0.99, 0.999, 0.99999])
def test_nodes_give_the_sum_over_all_steps(beta_1: float, beta_2: float):
    """Rates that change at random, roots from below epsilon to far above it."""
    if beta_1 == 0.99 and beta_2 < 0.999:
        return  # Refused; see above.
    rng, root_fade = np.random.default_rng(7), np.sqrt(beta_2)
    rule = quadrature(beta_1, root_fade)
    roots = 10.0 ** rng.uniform(-4, 8, [200, 1])
    for steps in (1, 2, 3, 10, 100, 2000):
        ages = np.arange(1, steps + 1)
        weights = rng.uniform(0.1, 1, steps)
        exact = (weights * beta_1**ages) @ (1 / (roots * root_fade**ages + 1)).T
        short = ages[: rule.horizon]
        summed = weights[short - 1] @ rule.weights[short - 1]
        found = (1 / (roots * root_fade**rule.nodes + 1)) @ summed
        np.testing.assert_allclose(found, exact, rtol=2e-7, atol=1e-300)
