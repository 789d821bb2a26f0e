"""TPUEmbedding from outside: what it refuses, and that refusing changes nothing."""

from __future__ import annotations

import collections
from typing import Any

import numpy as np
import pytest
import tensorflow as tf
from steps import evaluate_on, train_on

import tpu_embedding as te

stock = tf.tpu.experimental.embedding
V, D = 8, 2


pytestmark = pytest.mark.usefixtures("engine")


ADAGRAD = te.Adagrad(0.5)


def make(optimizer: Any = ADAGRAD, **options: Any) -> te.TPUEmbedding:
    films = te.TableConfig(V, D, te.RowIdInitializer(), combiner="sum", name="films")
    return te.TPUEmbedding({"film": te.FeatureConfig(films)}, optimizer, **options)


def state(embedding: te.TPUEmbedding) -> dict[str, bytes]:
    (table,) = embedding.variables.values()
    return {name: variable.numpy().tobytes() for name, variable in table.items()}


IDS = tf.constant([3, 5, 3])
FEATURES = {"film": IDS}
GRADIENTS = {"film": tf.ones([3, D])}


def train_once(embedding: te.TPUEmbedding) -> None:
    train_on(embedding, FEATURES, GRADIENTS)


def test_what_is_no_tensor_is_refused() -> None:
    """All other bad inputs are in reliability/test_bad_input.py."""
    for value in (np.array([1]), None):
        with pytest.raises(ValueError, match=r"Feature film must be a tf\.Tensor"):
            make().enqueue({"film": value})


@pytest.mark.parametrize("queued", [True, False])
def test_a_refused_first_batch_fixes_no_rank(queued: bool) -> None:
    embedding = make()
    bad = tf.constant([[[1, V]]])
    with pytest.raises(tf.errors.InvalidArgumentError):
        embedding.enqueue({"film": bad}) if queued else embedding.core.look_up([bad])
    train_once(embedding)


BAD_GRADIENTS: dict[str, tuple[Any, type[Exception], str]] = {
    "list": ([tf.ones([3, D])], TypeError, "`gradients`"),
    "missing": ({}, ValueError, "missing keys ['film']"),
    "numpy": ({"film": np.ones([3, D], np.float32)}, ValueError, "tf.Tensor or None"),
    "integers": ({"film": tf.ones([3, D], tf.int32)}, ValueError, "floating point"),
    "slices": (
        {"film": tf.IndexedSlices(tf.ones([1, D]), tf.constant([0]))},
        ValueError,
        "Convert tf.IndexedSlices with tf.convert_to_tensor",
    ),
    "width": ({"film": tf.ones([3, D + 1])}, ValueError, "shape of its activation"),
    "rank": ({"film": tf.ones([3])}, ValueError, "shape of its activation"),
    "samples": (
        {"film": tf.ones([4, D])},
        tf.errors.InvalidArgumentError,
        "Feature film: the gradient has shape [4,2], but the activation had [3,2]",
    ),
}


@pytest.mark.parametrize("case", BAD_GRADIENTS)
def test_bad_gradients_change_nothing(case: str) -> None:
    gradients, error, words = BAD_GRADIENTS[case]
    embedding, twin = make(), make()
    embedding.enqueue(FEATURES)
    embedding.dequeue()
    before = state(embedding)
    with pytest.raises(error) as raised:
        embedding.apply_gradients(gradients)
    assert words in str(raised.value)
    assert state(embedding) == before
    embedding.apply_gradients(GRADIENTS)  # they are still owed
    train_once(twin)
    assert state(embedding) == state(twin)


def test_a_gradient_of_another_batch_than_the_output_shape() -> None:
    feature = te.FeatureConfig(te.TableConfig(10, D), output_shape=[3])
    embedding = te.TPUEmbedding({"film": feature}, te.SGD(0.1))
    embedding.enqueue(FEATURES)
    embedding.dequeue()
    with pytest.raises(ValueError, match=r"shape of its activation, \(3, 2\)"):
        embedding.apply_gradients({"film": tf.ones([4, D])})
    embedding.apply_gradients({"film": tf.ones([3, D])})


def test_before_build() -> None:
    with pytest.raises(RuntimeError, match="dequeue was called before"):
        make().dequeue()
    with pytest.raises(RuntimeError, match="apply_gradients was called before"):
        make().apply_gradients(GRADIENTS)


def test_without_optimizer() -> None:
    embedding = make(None)
    with pytest.raises(RuntimeError, match="films: they have no optimizer"):
        embedding.enqueue(FEATURES)
    assert evaluate_on(embedding, FEATURES)["film"].numpy()[:, 0].tolist() == [3, 5, 3]
    assert list(state(embedding)) == ["parameters"]
    with pytest.raises(RuntimeError, match="films: they have no optimizer"):
        embedding.apply_gradients(GRADIENTS)


@pytest.mark.parametrize(
    ("arguments", "options"),
    [
        ((4, te.SGD(0.1)), {}),
        ((4, te.SGD(0.1), False, True), {}),
        ((te.SGD(0.1),), {"batch_size": 4}),
        ((), {"optimizer": te.SGD(0.1), "batch_size": 4}),
    ],
)
def test_batch_size(arguments: Any, options: Any) -> None:
    embedding = te.TPUEmbedding(
        {"film": te.FeatureConfig(te.TableConfig(V, D))}, *arguments, **options
    )
    embedding.enqueue({"film": tf.constant([1, 2, 3, 4])})
    for training in (True, False):
        with pytest.raises(ValueError, match="a batch of 3 where 4 was expected"):
            embedding.enqueue(FEATURES, training=training)
    open_size = tf.function(
        lambda ids: embedding.enqueue({"film": ids}),
        input_signature=[tf.TensorSpec([None], tf.int32)],
    )
    with pytest.raises(tf.errors.InvalidArgumentError, match="batch_size declares"):
        open_size(IDS)


@pytest.mark.parametrize("size", [0, -1, True, 2.5, "4"])
def test_build_takes_no_size_but_an_int_from_1_on(size: Any) -> None:
    embedding = make()
    with pytest.raises(ValueError, match=r"`per_replica_batch_size` must be an int >="):
        embedding.build(per_replica_batch_size=size)
    if isinstance(size, int):
        with pytest.raises(ValueError, match="`per_replica_input_shapes` must be an i"):
            embedding.build(size)
    with pytest.raises(ValueError, match="of 3 per replica was given before"):
        embedding.build(2, 3)
    embedding.build(2, 2)


@pytest.mark.parametrize("shape", [None, "a", -3, [1.5], [], [-1, 2]])
def test_build_takes_no_shape_but_that_of_ids(shape: Any) -> None:
    embedding = make()
    text = r"^The input shape of feature film given to build\(\) must have at least one"
    with pytest.raises(ValueError, match=text):
        embedding.build({"film": shape})
    embedding.build({"film": [None]})


def test_constructor_refuses() -> None:
    with pytest.raises(ValueError, match="holds no FeatureConfig"):
        te.TPUEmbedding({}, te.SGD(0.1))
    with pytest.raises(ValueError, match="Unsupported optimizer"):
        make("sgd")
    with pytest.raises(TypeError, match="Also received: \\(1,\\)"):
        te.TPUEmbedding(te.FeatureConfig(te.TableConfig(V, D)), te.SGD(0.1), False, 1)
    with pytest.raises(TypeError, match="Also received: \\(0,\\)"):
        te.TPUEmbedding(
            te.FeatureConfig(te.TableConfig(V, D)), 4, te.SGD(0.1), False, True, 0
        )
    with pytest.raises(TypeError, match="batch_size=8"):
        make(4, batch_size=8)
    with pytest.raises(ValueError, match="`batch_size` must be an int >= 1"):
        make(batch_size=True)
    with pytest.raises(TypeError, match="`check_numerics` must be a bool"):
        make(check_numerics=1)
    with pytest.raises(TypeError, match="`profile_data_directory` must be a str or"):
        make(profile_data_directory=3)
    with pytest.raises(ValueError, match="`batch_size` must be an int >= 1"):
        make(batch_size=0)


def test_device_is_for_tpus() -> None:
    for device in ("/device:CPU:0", "/device:TPU:0"):
        with pytest.raises(ValueError, match="must be a TPU core or the device"):
            make().enqueue(FEATURES, device=device)


def test_a_tensor_read_before_an_update_keeps_its_value() -> None:
    embedding = make()
    embedding.build()
    (table,) = embedding.embedding_tables.values()
    reads = []
    for _ in range(3):
        reads.append((table.read_value(), table.numpy()))
        train_once(embedding)
    for tensor, value in reads:
        np.testing.assert_array_equal(tensor, value)
    assert not np.array_equal(reads[0][1], reads[2][1])


def test_keys_are_the_objects_that_were_passed() -> None:
    ours, theirs = te.TableConfig(V, D, name="a"), stock.TableConfig(V, D, name="b")
    pair = collections.namedtuple("pair", ["left", "right"])
    features = pair(te.FeatureConfig(ours), [stock.FeatureConfig(theirs)])
    embedding = te.TPUEmbedding(features, stock.Adagrad(0.1))
    assert list(embedding.embedding_tables) == [ours, theirs]
    assert list(embedding.variables[theirs]) == ["parameters", "accumulators"]
    activations = evaluate_on(embedding, pair(IDS, [IDS]))
    assert type(activations) is pair
    assert isinstance(activations.right, list)


@pytest.mark.parametrize(
    ("engine", "pipelined"),
    [("host", False), ("host", True), ("portable", False)],
    indirect=["engine"],
)
def test_checkpoint(pipelined: bool, tmp_path: Any) -> None:
    schedule = tf.keras.optimizers.schedules.PolynomialDecay(0.5, 4)
    embedding = make(
        te.Adagrad(schedule), pipeline_execution_with_tensor_core=pipelined
    )
    for _ in range(2):
        train_once(embedding)
    path = tf.train.Checkpoint(embedding=embedding).save(tmp_path / "model")
    names = {name for name, _ in tf.train.list_variables(path)}
    suffix = "/.ATTRIBUTES/VARIABLE_VALUE"
    assert {f"embedding/films{suffix}", f"embedding/_updates{suffix}"} <= names
    saved = state(embedding)  # with the update that was pending
    train_once(embedding)
    for built in (False, True):
        restored = make(te.Adagrad(schedule))
        if built:
            restored.build()
        status = tf.train.Checkpoint(embedding=restored).restore(path)
        assert state(restored) == saved
        status.assert_consumed()
        train_once(restored)
        assert state(restored) == state(embedding)


def test_the_features_are_copied() -> None:
    features: dict[str, Any] = {"film": te.FeatureConfig(te.TableConfig(V, D))}
    embedding = te.TPUEmbedding(features, te.SGD(1.0))
    features["user"] = te.FeatureConfig(te.TableConfig(V, D))
    train_once(embedding)


def test_several_embeddings_live_side_by_side() -> None:
    first, second = make(initialize_tpu_embedding=False), make()
    train_once(first)
    before = state(first)
    train_once(second)
    assert state(first) == before == state(second)


def test_build_takes_the_shape_of_a_sequence_with_its_length() -> None:
    """As TensorFlow's class does: (batch, ids) or (batch, length, ids)."""
    for shape in ([2, 5], [2, 3, 5]):
        films = te.TableConfig(8, 2, name="films")
        feature = te.FeatureConfig(films, max_sequence_length=3)
        embedding = te.TPUEmbedding({"film": feature}, te.SGD(0.1))
        embedding.build({"film": tf.TensorShape(shape)})
        found = evaluate_on(embedding, {"film": tf.ragged.constant([[1], [2, 3]])})
        assert found["film"].shape == [2, 3, 2]
    with pytest.raises(ValueError, match="rank 2"):
        te.TPUEmbedding({"film": feature}, te.SGD(0.1)).build({"film": [2, 4, 5]})


def rows(embedding: te.TPUEmbedding) -> list[float]:
    (table,) = embedding.embedding_tables.values()
    return table.numpy()[:, 0].tolist()


@pytest.mark.parametrize(
    ("engine", "pipelined"),
    [("host", False), ("host", True), ("portable", False)],
    indirect=["engine"],
)
def test_a_rate_that_fails_changes_nothing(pipelined: bool) -> None:
    fails = [True]

    def rate() -> float:
        if fails[0]:
            raise ArithmeticError
        return 1.0

    embedding = make(te.SGD(rate), pipeline_execution_with_tensor_core=pipelined)
    embedding.enqueue(FEATURES)
    embedding.dequeue()
    before = rows(embedding)
    with pytest.raises(ArithmeticError):
        embedding.apply_gradients(GRADIENTS)
    assert rows(embedding) == before
    fails[0] = False
    embedding.apply_gradients(GRADIENTS)  # they are still owed
    assert rows(embedding) == [0, 1, 2, 1, 4, 4, 6, 7]


def test_a_rate_that_is_no_scalar() -> None:
    embedding = make(te.SGD(lambda: tf.constant([1.0, 2.0])))
    with pytest.raises(ValueError, match="must return a scalar"):
        train_once(embedding)


@pytest.mark.parametrize("engine", ["host"], indirect=True)
def test_a_pipelined_update_has_the_rate_of_its_own_step() -> None:
    rate = tf.Variable(1.0)
    embedding = make(te.SGD(lambda: rate), pipeline_execution_with_tensor_core=True)
    for value in (1.0, 10.0, 100.0):
        rate.assign(value)
        train_once(embedding)
    rate.assign(1000.0)
    assert rows(embedding)[5] == 5 - 111


def test_build_that_fails_fixes_nothing() -> None:
    films = te.TableConfig(V, D)
    features = [te.FeatureConfig(films), te.FeatureConfig(films, output_shape=[4])]
    embedding = te.TPUEmbedding(features, te.SGD(1.0))
    with pytest.raises(ValueError, match=r"\(4,\) given by FeatureConfig.output_shape"):
        embedding.build([(3, 1), (3, 1)])
    embedding.build([(4, 1), (4, 1)])
    other = te.TPUEmbedding(features, te.SGD(1.0), batch_size=4)
    with pytest.raises(ValueError, match="A batch size of 4 per replica was given"):
        other.build(2)


def test_reset_forgets_what_is_under_way() -> None:
    embedding = make(te.SGD(1.0))
    embedding.reset()  # before build there is nothing to forget
    embedding.enqueue(FEATURES)
    embedding.dequeue()  # and here something fails
    embedding.enqueue({"film": tf.constant([0, 1, 2])})
    with pytest.raises(tf.errors.FailedPreconditionError, match="reset"):
        embedding.dequeue()
    embedding.reset()
    with pytest.raises(tf.errors.FailedPreconditionError, match="no batch is"):
        embedding.dequeue()
    before = rows(embedding)
    embedding.enqueue(FEATURES)
    assert embedding.dequeue()["film"].numpy()[:, 0].tolist() == [3, 5, 3]
    assert rows(embedding) == before
    embedding.apply_gradients(GRADIENTS)
    assert rows(embedding) != before
