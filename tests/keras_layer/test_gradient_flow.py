"""What reaches the tables, how often, and what does not."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import tensorflow as tf
from keras_layer import models
from keras_layer.version import keras
from replica_values import of_replicas

import tpu_embedding as te
from tpu_embedding.compat import tfrs_layer
from tpu_embedding.keras import TPUEmbedding

# Of what the layer asks of an engine; the rest happens before it is asked.
on_both_engines = pytest.mark.usefixtures("engine")

IDS = tf.constant([1, 2, 1])


def make_layer(
    optimizer: Any = te.SGD(1.0),  # noqa: B008
    make: Any = TPUEmbedding,
    **options: Any,
) -> Any:
    table = te.TableConfig(4, 2, te.initializers.RowIdInitializer(), name="t")
    layer = make(te.FeatureConfig(table), optimizer, **options)
    layer.build()
    return layer


def table_of(layer: Any) -> np.ndarray:
    (table,) = layer.embedding_tables.values()
    return table.numpy()


def train(layer: Any, loss_of: Callable[[], Any]) -> Any:
    with tf.GradientTape() as tape:
        loss = loss_of()
    return tape.gradient(loss, layer.trainable_variables)


def gradient(layer: Any, ids: Any = IDS) -> Any:
    return train(layer, lambda: tf.reduce_sum(layer(ids)))


each_way = pytest.mark.parametrize(
    "wrap", [lambda call: call, tf.function], ids=["eager", "graph"]
)
ONCE = np.array([[0, 0], [-1, -1], [1, 1], [3, 3]], np.float32)


@on_both_engines
@each_way
def test_one_gradient_is_one_update(wrap: Any):
    layer = make_layer()
    assert [v.shape for v in layer.trainable_variables] == [()]
    step = wrap(gradient)
    (of_virtual,) = step(layer)
    assert of_virtual == 0
    np.testing.assert_array_equal(table_of(layer), ONCE)
    step(layer)
    np.testing.assert_array_equal(table_of(layer)[1], [-3, -3])


def test_a_traced_forward_pass_under_an_outer_tape_updates_once():
    layer = make_layer()
    forward = tf.function(layer)
    for _ in range(2):
        layer.update_embedding_table(*_initial(layer))
        train(layer, lambda: tf.reduce_sum(forward(IDS)))
        np.testing.assert_array_equal(table_of(layer), ONCE)


def test_a_function_within_a_function_needs_its_tape_in_one_of_them():
    layer = make_layer()
    inner = tf.function(layer)

    @tf.function
    def outer(ids: Any) -> Any:
        return inner(ids)

    text = "No unary variant unary_op function found for op ZEROS_LIKE"
    with tf.GradientTape(), pytest.raises(tf.errors.InternalError, match=text):
        outer(IDS)
    tf.function(lambda: train(layer, lambda: tf.reduce_sum(inner(IDS))))()
    np.testing.assert_array_equal(table_of(layer), ONCE)


@on_both_engines
@pytest.mark.parametrize("trainable_tables", [False, True])
@each_way
def test_a_scalar_id_is_a_sample_without_a_batch_axis(
    wrap: Any, trainable_tables: bool
):
    rows = te.initializers.RowIdInitializer()
    table = te.TableConfig(4, 2, rows, combiner="sum", name="t")
    config = {name: te.FeatureConfig(table) for name in ("one", "many")}
    rule = None if trainable_tables else te.SGD(1.0)
    layer = TPUEmbedding(config, rule, trainable_tables=trainable_tables)
    optimizer = keras.optimizers.SGD(1.0)

    def step(one: Any, weight: Any) -> Any:
        with tf.GradientTape() as tape:
            found = layer({"one": one, "many": IDS}, {"one": weight, "many": None})
            loss = tf.reduce_sum(found["one"]) + tf.reduce_sum(found["many"])
        gradients = tape.gradient(loss, layer.trainable_variables)
        optimizer.apply_gradients(
            zip(gradients, layer.trainable_variables, strict=True)
        )
        return found

    found = wrap(step)(tf.constant(3), tf.constant(0.5))
    assert found["many"].shape == (3, 2)
    np.testing.assert_array_equal(found["one"], [1.5, 1.5])
    expected = ONCE - [[0, 0], [0, 0], [0, 0], [0.5, 0.5]]
    np.testing.assert_array_equal(table_of(layer), expected)


@pytest.mark.parametrize("graph", [False, True])
def test_dense_ids_keep_their_axes_in_the_place_of_the_layer_of_tfrs(graph: bool):
    layer = make_layer(make=tfrs_layer.TPUEmbedding)
    ids = tf.constant([[1, 2], [2, 1], [2, 2]])

    def step() -> tf.Tensor:
        with tf.GradientTape() as tape:
            found = layer(ids)
            loss = tf.reduce_sum(found)
        tape.gradient(loss, layer.trainable_variables)
        return found

    (table,) = layer.embedding_tables.values()
    before = table.numpy()
    found = (tf.function(step, autograph=False) if graph else step)()
    np.testing.assert_array_equal(found, before[ids.numpy()])
    updates = np.array([[0, 0], [2, 2], [4, 4], [0, 0]])
    np.testing.assert_array_equal(table, before - updates)
    inputs = keras.Input((2,), dtype="int64")
    model = keras.Model(inputs, layer(inputs))
    assert model.output_shape == (None, 2, 2)
    np.testing.assert_array_equal(model(ids), table.numpy()[ids.numpy()])


@pytest.mark.parametrize("length", [0, 2])
def test_a_scalar_id_is_refused_where_a_batch_is_needed(length: int):
    table = te.TableConfig(4, 2, name="t")
    config = te.FeatureConfig(table, max_sequence_length=length)
    layer = TPUEmbedding(config, te.SGD(1.0), batch_size=None if length else 2)
    with pytest.raises(ValueError, match="rank 2" if length else "batch"):
        layer(tf.constant(3))


def _initial(layer: Any) -> tuple[Any, Any]:
    (table,) = layer.embedding_tables
    return table, te.RowIdInitializer()((4, 2))


@pytest.mark.parametrize("graph", [False, True])
def test_a_table_is_not_read_where_its_gradient_would_be_lost(graph: bool):
    """As tied logits read it, without the part of the gradient that is the table's."""
    layer = make_layer()
    (table,) = layer.embedding_tables

    def step() -> None:
        with tf.GradientTape() as tape:
            activations = layer(IDS)
            with tape.stop_recording():
                assert layer.embedding_tables
            tf.matmul(layer.embedding_tables[table], activations, transpose_b=True)

    with pytest.raises(RuntimeError, match=r"`trainable_tables=True`, or use"):
        (tf.function(step, autograph=False) if graph else step)()
    layer.trainable = False
    step()
    tied = TPUEmbedding(te.FeatureConfig(table), None, trainable_tables=True)
    with tf.GradientTape() as tape:
        loss = tf.reduce_sum(tied(IDS) @ tf.transpose(tied.embedding_tables[table]))
    (of_table,) = tape.gradient(loss, tied.trainable_variables)
    assert np.all(tf.convert_to_tensor(of_table).numpy() != 0)


def test_a_trace_without_a_tape_says_why_it_has_no_gradient():
    layer = make_layer()
    forward = tf.function(layer)
    forward(IDS)
    with pytest.raises(LookupError, match=r"without a recording tf\.GradientTape"):  # noqa: SIM117
        with tf.GradientTape():
            forward(IDS)
    np.testing.assert_array_equal(table_of(layer)[1], [1, 1])


def test_calls_without_a_tape_change_nothing_and_owe_nothing():
    layer = make_layer()
    for call in (layer, tf.function(layer)):
        for _ in range(70):  # More than the queue of the engine would hold.
            call(IDS)
    with tf.GradientTape():
        layer(IDS)  # And a tape that nobody asks.
    gradient(layer)
    np.testing.assert_array_equal(table_of(layer), ONCE)


@on_both_engines
@each_way
def test_two_towers_are_two_updates_that_saw_the_same_tables(wrap: Any):
    layer = make_layer(te.Adagrad(1.0, initial_accumulator_value=1.0))

    def step() -> Any:
        with tf.GradientTape() as tape:
            first, second = layer(IDS), layer(IDS)
            loss = tf.reduce_sum(first) + 2 * tf.reduce_sum(second)
        tape.gradient(loss, layer.trainable_variables)
        return first, second

    first, second = wrap(step)()
    np.testing.assert_array_equal(first, second)
    # The backward pass happens to reach the first call first.
    for row, gradients in ((1, (2.0, 4.0)), (2, (1.0, 2.0))):
        accumulator, value = 1.0, float(row)
        for g in gradients:
            accumulator += g * g
            value -= g / np.sqrt(accumulator)
        np.testing.assert_allclose(table_of(layer)[row], value, rtol=1e-6)


@pytest.mark.parametrize("graph", [False, True])
def test_a_second_gradient_of_one_call_fails(graph: bool):
    layer = make_layer()

    def step() -> None:
        with tf.GradientTape(persistent=True) as tape:
            loss = tf.reduce_sum(layer(IDS))
        tape.gradient(loss, layer.trainable_variables)
        tape.gradient(loss, layer.trainable_variables)

    with pytest.raises(tf.errors.FailedPreconditionError, match="once"):
        (tf.function(step) if graph else step)()
    if not graph:
        np.testing.assert_array_equal(table_of(layer), ONCE)
    before = table_of(layer)
    gradient(layer)  # Nothing is left behind.
    np.testing.assert_array_equal(
        before - table_of(layer), 3 - ONCE - 3 + [[0, 0], [1, 1], [2, 2], [3, 3]]
    )


@on_both_engines
def test_a_second_gradient_of_a_traced_call_fails():
    layer = make_layer()
    forward = tf.function(layer)
    with tf.GradientTape(persistent=True) as tape:
        loss = tf.reduce_sum(forward(IDS))
        other = tf.reduce_sum(forward(IDS))
    tape.gradient(loss, layer.trainable_variables)
    with pytest.raises(tf.errors.FailedPreconditionError, match="applied already"):
        tape.gradient(loss, layer.trainable_variables)
    np.testing.assert_array_equal(table_of(layer), ONCE)
    tape.gradient(other, layer.trainable_variables)
    np.testing.assert_array_equal(table_of(layer)[1], [-3, -3])


def test_a_gradient_may_be_computed_in_a_graph_within_that_of_the_call():
    layer = make_layer()

    @tf.function
    def step(train: tf.Tensor) -> None:
        with tf.GradientTape() as tape:
            loss = tf.reduce_sum(layer(IDS))
            if train:  # A graph of its own.
                tape.gradient(loss, layer.trainable_variables)

    step(tf.constant(False))
    np.testing.assert_array_equal(table_of(layer)[1], [1, 1])
    step(tf.constant(True))
    np.testing.assert_array_equal(table_of(layer), ONCE)


@each_way
def test_what_is_computed_again_in_the_backward_pass_updates_once(wrap: Any):
    layer = make_layer()
    again = tf.recompute_grad(lambda scale: scale * layer(IDS))
    wrap(lambda: train(layer, lambda: tf.reduce_sum(again(tf.constant(1.0)))))()
    np.testing.assert_array_equal(table_of(layer), ONCE)


@pytest.mark.parametrize("kind", ["cond", "while", "map"])
def test_a_tape_around_control_flow_is_refused(kind: str):
    layer = make_layer()

    def loop() -> tf.Tensor:
        loss = tf.constant(0.0)
        for i in tf.range(2):
            loss += tf.reduce_sum(layer(IDS[i : i + 1]))
        return loss

    loss_of = {
        "cond": lambda: tf.cond(
            tf.size(IDS) > 0, lambda: tf.reduce_sum(layer(IDS)), lambda: 0.0
        ),
        "while": loop,
        "map": lambda: tf.reduce_sum(
            tf.map_fn(lambda i: layer(i[None]), IDS, fn_output_signature=tf.float32)
        ),
    }[kind]

    step = tf.function(lambda: train(layer, loss_of))
    with pytest.raises(NotImplementedError, match=r"opened outside of it\. Call the"):
        step()
    np.testing.assert_array_equal(table_of(layer)[1], [1, 1])


def test_a_persistent_tape_serves_several_calls():
    layer = make_layer()
    with tf.GradientTape(persistent=True) as tape:
        first, second = tf.reduce_sum(layer(IDS)), tf.reduce_sum(layer(IDS))
    tape.gradient(first, layer.trainable_variables)
    np.testing.assert_array_equal(table_of(layer), ONCE)
    tape.gradient(second, layer.trainable_variables)
    np.testing.assert_array_equal(table_of(layer)[1], [-3, -3])


@each_way
def test_activations_may_be_gathered(wrap: Any):
    layer = make_layer()
    wrap(lambda: train(layer, lambda: tf.reduce_sum(tf.gather(layer(IDS), [0, 0]))))()
    np.testing.assert_array_equal(table_of(layer)[1:3], [[-1, -1], [2, 2]])


@pytest.mark.parametrize("pfor", [True, False])
def test_a_jacobian_of_the_tables_is_refused(pfor: bool):
    layer = make_layer()
    with tf.GradientTape(persistent=True) as tape:
        activations = layer(IDS)
        tape.watch(activations)
        score = tf.reduce_sum(activations**2, axis=1)
    with pytest.raises(NotImplementedError, match=r"or call tape\.gradient"):
        tape.jacobian(score, layer.trainable_variables, experimental_use_pfor=pfor)
    assert tape.jacobian(score, activations).shape == (3, 3, 2)
    np.testing.assert_array_equal(table_of(layer)[1], [1, 1])


def test_nested_tapes_update_once():
    layer = make_layer()
    kernel = tf.Variable([[1.0], [2.0]])
    with tf.GradientTape() as outer:
        with tf.GradientTape() as inner:
            activations = layer(IDS)
            inner.watch(activations)
            score = tf.reduce_sum(tf.square(activations @ kernel))
        slope = inner.gradient(score, activations)
        loss = score + tf.reduce_sum(slope)
    outer.gradient(loss, [*layer.trainable_variables, kernel])
    assert not np.array_equal(table_of(layer)[1], [1, 1])
    # d score / d a = 2 (a.k) k; slope summed adds 2 * 3 * k, for each sample.
    k = np.array([1.0, 2.0])
    of_sample = 2 * (1 * 3) * k + 2 * 3 * k
    np.testing.assert_allclose(table_of(layer)[1], 1 - 2 * of_sample, rtol=1e-6)


@each_way
def test_a_frozen_layer_is_not_updated(wrap: Any):
    layer = make_layer()
    layer.trainable = False

    def step() -> None:
        with tf.GradientTape() as tape:
            loss = tf.reduce_sum(layer(IDS))
        assert set(tape.gradient(loss, layer.variables)) == {None}

    wrap(step)()
    np.testing.assert_array_equal(table_of(layer)[1], [1, 1])
    layer.trainable = True
    gradient(layer)
    np.testing.assert_array_equal(table_of(layer), ONCE)


@each_way
def test_gradients_with_respect_to_other_things_train_nothing(wrap: Any):
    layer = make_layer()
    kernel = tf.Variable([[1.0], [2.0]])

    def step() -> tuple[Any, Any]:
        with tf.GradientTape(persistent=True) as tape:
            activations = layer(IDS)
            loss = tf.reduce_sum(activations @ kernel)
        return tape.gradient(loss, kernel), tape.gradient(loss, {"a": activations})

    of_kernel, of_activations = wrap(step)()
    np.testing.assert_array_equal(of_kernel, [[4], [4]])
    np.testing.assert_array_equal(of_activations["a"][0], [1, 2])
    np.testing.assert_array_equal(table_of(layer)[1], [1, 1])


def test_forward_mode_trains_nothing():
    layer = make_layer()
    (virtual,) = layer.trainable_variables
    with tf.autodiff.ForwardAccumulator(virtual.value, tf.constant(1.0)) as forward:
        activations = layer(IDS)
    assert forward.jvp(activations) is None
    np.testing.assert_array_equal(table_of(layer)[1], [1, 1])


def test_only_the_tapes_that_record_count():
    layer = make_layer()
    with tf.GradientTape() as tape:
        with tape.stop_recording():
            unseen = tf.reduce_sum(layer(IDS))
        seen = tf.reduce_sum(layer(IDS))
        loss = seen + unseen
    tape.gradient(loss, layer.trainable_variables)
    np.testing.assert_array_equal(table_of(layer), ONCE)


@each_way
def test_without_an_optimizer_there_are_lookups_only(wrap: Any):
    layer = make_layer(None)
    assert layer(IDS).numpy()[0].tolist() == [1, 1]
    text = r"the tables t: .* or set `layer.trainable = F"
    with pytest.raises(RuntimeError, match=text):
        wrap(gradient)(layer)
    layer.trainable = False
    assert layer(IDS).numpy()[0].tolist() == [1, 1]


def test_a_feature_without_a_part_in_the_loss_touches_its_rows():
    table = te.TableConfig(4, 2, te.RowIdInitializer(), name="t")
    config = (te.FeatureConfig(table), te.FeatureConfig(table))
    adam = te.Adam(0.5, beta_1=0.5, epsilon=1.0)
    layer = TPUEmbedding(config, adam)
    ids = tf.constant([1]), tf.constant([2])
    train(layer, lambda: tf.reduce_sum(tf.add(*layer(ids))))
    train(layer, lambda: tf.reduce_sum(layer(ids)[0]))
    momenta = models.state(layer)["t%2Fmomenta"]
    np.testing.assert_allclose(momenta[1:3, 0], [0.75, 0.25])


def test_gradients_may_stop():
    layer = make_layer()
    stopped = train(layer, lambda: tf.reduce_sum(tf.stop_gradient(layer(IDS))))
    assert stopped == [None]
    np.testing.assert_array_equal(table_of(layer)[1], [1, 1])


@on_both_engines
def test_an_infinite_gradient_is_an_error_where_asked():
    layer = make_layer(check_numerics=True)
    with pytest.raises(tf.errors.InvalidArgumentError, match="not finite"):
        train(layer, lambda: tf.reduce_sum(layer(IDS)) * float("inf"))
    gradient(layer)
    np.testing.assert_array_equal(table_of(layer), ONCE)


@on_both_engines
@each_way
def test_bad_ids_fail_in_training_and_evaluation(wrap: Any):
    layer = make_layer()
    bad = tf.constant([1, 4])
    text = r"sample 1 has id 4, but ids must be in \[0, 4\)"
    with pytest.raises(tf.errors.InvalidArgumentError, match=text):
        wrap(gradient)(layer, bad)
    with pytest.raises(tf.errors.InvalidArgumentError, match=text):
        wrap(layer)(bad)
    np.testing.assert_array_equal(table_of(layer)[1], [1, 1])


@each_way
def test_the_step_after_a_refused_batch_trains(wrap: Any):
    """A replica whose own batch was good gives the refused step up, too."""
    strategy = models.mirrored(2)
    with strategy.scope():
        layer = make_layer()

    def distribute(parts: list[list[int]]) -> Any:
        return of_replicas(strategy, list(map(tf.constant, parts)))

    def step(parts: Any) -> None:
        strategy.run(lambda ids: gradient(layer, ids), (parts,))

    call = wrap(step)
    for refused in ([[1], [9]], [[9], [1]]):
        with pytest.raises(tf.errors.InvalidArgumentError, match="has id 9"):
            call(distribute(refused))
        call(distribute([[2], [3]]))
    np.testing.assert_array_equal(table_of(layer)[:, 0], [0, 1, 0, 1])
