"""Gradients of per-id weights beside dense autodiff and finite differences."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import tensorflow as tf
from replica_values import mirrored
from steps import train_on

import tpu_embedding as te
import tpu_embedding.keras
from tpu_embedding.testing import SoftwareTPUStrategy

ROWS, DIM = 9, 3
CLASSES = ("queue", "lookup", "layer")
COMBINERS = ("sum", "mean", "sqrtn")


def initial(shape: Any, dtype: Any = tf.float32) -> tf.Tensor:
    values = np.random.default_rng(7).normal(size=shape)
    return tf.constant(values, dtype)


def make_configs(combiner: str) -> dict[str, te.FeatureConfig]:
    """Three features share a table; ids are dropped, or taken modulo V."""
    shared = te.TableConfig(
        ROWS, DIM, initial, te.Adagrad(0.3), combiner, "shared", invalid_ids="drop"
    )
    own = te.TableConfig(
        ROWS, DIM, initial, te.SGD(0.2), combiner, "own", invalid_ids="mod"
    )
    return {
        "dense": te.FeatureConfig(shared, name="dense"),
        "ragged": te.FeatureConfig(shared, name="ragged"),
        "sequence": te.FeatureConfig(shared, max_sequence_length=2, name="sequence"),
        "sparse": te.FeatureConfig(own, name="sparse"),
    }


LENGTHS = {"ragged": [2, 0, 3], "sequence": [3, 1, 2], "sparse": [1, 3, 2]}
IDS = {
    "dense": [[1, 5], [5, 5], [2, 10]],
    "ragged": [1, 1, 4, -1, 8],
    "sequence": [0, 2, 7, 3, 12, 6],
    "sparse": [3, 3, 8, 11, 0, 4],
}


def features_and_weights(weights: dict[str, Any]) -> tuple[dict[str, Any], Any]:
    """The batch, with the numbers in `weights` in the form of each feature."""

    def ragged(name: str, values: Any) -> tf.RaggedTensor:
        return tf.RaggedTensor.from_row_lengths(values, LENGTHS[name])

    forms: Any = {
        "dense": lambda v: v,
        "ragged": lambda v: ragged("ragged", v),
        "sequence": lambda v: ragged("sequence", v),
    }
    ids = {n: forms[n](tf.constant(IDS[n], tf.int64)) for n in forms}
    given = {n: forms[n](weights[n]) for n in forms}
    # to_sparse has no gradient of its own in older releases.
    indices = [[i, j] for i, n in enumerate(LENGTHS["sparse"]) for j in range(n)]
    for into, values in (
        (ids, tf.constant(IDS["sparse"], tf.int64)),
        (given, weights["sparse"]),
    ):
        into["sparse"] = tf.SparseTensor(indices, values, [3, 3])
    return ids, given


def random_weights(seed: int = 0) -> dict[str, np.ndarray]:
    random = np.random.default_rng(seed)
    return {
        name: random.uniform(0.5, 2.0, np.shape(ids)).astype(np.float32)
        for name, ids in IDS.items()
    }


def upstream() -> dict[str, np.ndarray]:
    random = np.random.default_rng(3)
    shapes = dict.fromkeys(IDS, (3, DIM)) | {"sequence": (3, 2, DIM)}
    return {
        name: random.normal(size=shape).astype(np.float32)
        for name, shape in shapes.items()
    }


def samples(name: str, values: Any) -> list[list[tuple[int, Any]]]:
    """For each sample of a feature its (row, weight), from flat ids and weights."""
    ids = np.reshape(IDS[name], [-1])
    lengths = LENGTHS.get(name, [2, 2, 2])
    rows, at = [], 0
    for length in lengths:
        row = [(int(ids[i]), values[i]) for i in range(at, at + length)]
        at += length
        if name == "sequence":
            rows += [row[p : p + 1] for p in range(2)]
        else:
            rows.append(row)
    if name == "sparse":
        return [[(i % ROWS, w) for i, w in row] for row in rows]
    return [[(i, w) for i, w in row if 0 <= i < ROWS] for row in rows]


def dense_gradients(combiner: str, weights: dict[str, Any]) -> dict[str, np.ndarray]:
    """By autodiff of the definition, sample by sample, in float64."""
    table = initial([ROWS, DIM], tf.float64)
    found = {}
    for name, gradient in upstream().items():
        variable = tf.constant(weights[name].reshape(-1), tf.float64)
        with tf.GradientTape() as tape:
            tape.watch(variable)
            loss = tf.constant(0.0, tf.float64)
            flat = gradient.reshape(-1, DIM)
            for at, sample in enumerate(samples(name, tf.unstack(variable))):
                if not sample:
                    continue
                own = tf.stack([weight for _, weight in sample])
                divisor = {
                    "sum": lambda w: tf.constant(1.0, tf.float64),
                    "mean": tf.reduce_sum,
                    "sqrtn": lambda w: tf.sqrt(tf.reduce_sum(w * w)),
                }[combiner](own)
                vectors = tf.gather(table, [row for row, _ in sample])
                summed = tf.linalg.matvec(vectors, own / divisor, transpose_a=True)
                loss += tf.reduce_sum(summed * flat[at])
        result = tape.gradient(loss, variable)
        found[name] = result.numpy().reshape(weights[name].shape)
    return found


def loss_of(activations: dict[str, tf.Tensor]) -> tf.Tensor:
    """A loss whose gradients are those of `upstream`."""
    scale = upstream()
    return tf.add_n([tf.reduce_sum(a * scale[n]) for n, a in activations.items()])


def check_dense(found: Any, combiner: str, weights: dict[str, Any]) -> None:
    for name, expected in dense_gradients(combiner, weights).items():
        np.testing.assert_allclose(found[name], expected, 1e-5, 1e-6, err_msg=name)


def flat(value: Any) -> np.ndarray:
    return getattr(value, "values", value).numpy()


def make(kind: str, configs: Any, **options: Any) -> Any:
    classes: Any = {
        "queue": te.TPUEmbedding,
        "lookup": te.TPUEmbeddingV2,
        "layer": te.keras.TPUEmbedding,
    }
    return classes[kind](configs, None, **options)


def gradients_of(kind: str, embedding: Any, weights: dict[str, Any]) -> Any:
    """Trains one step; the gradients of the weights, by feature."""
    given = {name: tf.constant(value) for name, value in weights.items()}
    if kind == "queue":
        features, formed = features_and_weights(given)
        embedding.enqueue(features, formed)
        embedding.dequeue()
        gradients = {name: tf.constant(g) for name, g in upstream().items()}
        found = embedding.weight_gradients(gradients, features, formed)
        embedding.apply_gradients(gradients)
        return {name: flat(value) for name, value in found.items()}
    tape: Any = tf.GradientTape()
    with tape:
        tape.watch(given)
        features, formed = features_and_weights(given)
        preserved = None
        if kind == "lookup":
            activations, preserved = embedding(features, formed)
        else:
            activations = embedding(features, formed)
        loss = loss_of(activations)
    if kind == "lookup":
        found, gradients = tape.gradient(loss, [given, activations])
        embedding.apply_gradients(gradients, preserved)
    else:
        found, _ = tape.gradient(loss, [given, embedding.trainable_variables])
    return {name: value.numpy() for name, value in found.items()}


@pytest.mark.parametrize("combiner", COMBINERS)
@pytest.mark.parametrize("graph", [False, True])
def test_a_layer_whose_tables_are_frozen(engine: str, combiner: str, graph: bool):
    layer = make("layer", make_configs(combiner))
    layer.trainable = False
    weights = random_weights()
    variables = {name: tf.Variable(value) for name, value in weights.items()}

    def gradients() -> Any:
        with tf.GradientTape() as tape:
            given = {name: 1.0 * variable for name, variable in variables.items()}
            activations = layer(*features_and_weights(given))
            loss = loss_of(activations)
        return tape.gradient(loss, variables)

    before = {k: v.numpy() for k, v in layer.embedding_tables.items()}
    found = (tf.function(gradients) if graph else gradients)()
    check_dense(found, combiner, weights)
    for key, table in layer.embedding_tables.items():
        assert (table.numpy() == before[key]).all()


@pytest.mark.parametrize("combiner", COMBINERS)
@pytest.mark.parametrize("kind", CLASSES)
def test_dense_autodiff_and_training(engine: str, kind: str, combiner: str):
    weights = random_weights()
    embedding, plain = (make(kind, make_configs(combiner)) for _ in range(2))
    found = gradients_of(kind, embedding, weights)
    check_dense(found, combiner, weights)
    # The tables are trained as without these gradients.
    features, formed = features_and_weights(
        {name: tf.constant(value) for name, value in weights.items()}
    )
    if kind == "layer":
        with tf.GradientTape() as tape:
            activations = plain(features, formed)
            loss = loss_of(activations)
        tape.gradient(loss, plain.trainable_variables)
    else:
        gradients = {name: tf.constant(g) for name, g in upstream().items()}
        train_on(plain, features, gradients, weights=formed)
    for one, other in zip(
        embedding.embedding_tables.values(),
        plain.embedding_tables.values(),
        strict=True,
    ):
        assert (one.numpy() == other.numpy()).all()
        assert (one.numpy() != initial([ROWS, DIM]).numpy()).any()


@pytest.mark.parametrize("combiner", COMBINERS)
def test_finite_differences(engine: str, combiner: str):
    embedding = make("lookup", make_configs(combiner))
    weights = random_weights(1)
    found = gradients_of("lookup", make("lookup", make_configs(combiner)), weights)

    def loss(changed: dict[str, Any]) -> float:
        given = {n: tf.constant(w) for n, w in changed.items()}
        activations, _ = embedding(*features_and_weights(given))
        return sum(
            float(np.sum(a.numpy().astype(np.float64) * upstream()[n]))
            for n, a in activations.items()
        )

    step = 2e-3
    for name, weight in weights.items():
        slopes = np.zeros(weight.size)
        moves = range(0, weight.size, 1 if engine == "host" else 3)
        for i in moves:
            ends = []
            for sign in (1, -1):
                moved = weight.reshape(-1).astype(np.float64)
                moved[i] += sign * step
                moved = moved.astype(np.float32).reshape(weight.shape)
                ends.append(loss({**weights, name: moved}))
            slopes[i] = (ends[0] - ends[1]) / (2 * step)
        largest = max(np.abs(found[name]).max(), 1e-2)
        difference = np.abs(slopes - found[name].reshape(-1))[list(moves)].max()
        assert difference <= 1e-3 * largest, (name, slopes, found[name])


@pytest.mark.parametrize("combiner", COMBINERS)
def test_weights_whose_divisor_is_0(engine: str, combiner: str):
    embedding = make("lookup", make_configs(combiner))
    weights = {name: np.zeros_like(w) for name, w in random_weights().items()}
    found = gradients_of("lookup", embedding, weights)
    assert all(np.isfinite(value).all() for value in found.values())
    if combiner != "sum":
        assert all((value == 0).all() for value in found.values())


def test_a_keras_model_learns_weights_in_fit(engine: str):
    import keras

    table = te.TableConfig(4, 1, te.RowIdInitializer(), combiner="sum", name="t")
    layer = te.keras.TPUEmbedding(te.FeatureConfig(table), te.SGD(0.0))
    ids = keras.Input((2,), dtype="int64")
    scores = keras.layers.Embedding(4, 1, embeddings_initializer="ones")
    weights = keras.layers.Reshape((2,))(scores(ids))
    model = keras.Model(ids, layer(ids, weights))
    model.compile(keras.optimizers.SGD(0.1), "mse")
    # Activation 1 * w1 + 2 * w2 = 3, target 0: d(3^2)/dw = 6 * (1, 2).
    model.fit(tf.constant([[1, 2]]), tf.zeros([1, 1]), verbose=0)
    found = scores.get_weights()[0].ravel()
    np.testing.assert_allclose(found, [1, 1 - 0.6, 1 - 1.2, 1], atol=1e-6)


def test_gradients_in_functions(engine: str):
    table = te.TableConfig(4, 1, te.RowIdInitializer(), combiner="sum", name="t")
    embedding = te.TPUEmbeddingV2(te.FeatureConfig(table, output_shape=[1]), te.SGD(0))
    scale = tf.Variable([[1.0, 2.0]])

    @tf.function
    def step():
        with tf.GradientTape() as tape:
            activations, preserved = embedding(tf.constant([[1, 3]]), 2.0 * scale)
        found = tape.gradient(activations, scale)
        embedding.apply_gradients(tf.ones_like(activations), preserved)
        return found

    @tf.function
    def forward():
        return embedding(tf.constant([[1, 3]]), 2.0 * scale)[0]

    assert step().numpy().tolist() == [[2.0, 6.0]]
    with tf.GradientTape() as tape:
        activations = forward()
    assert tape.gradient(activations, scale).numpy().tolist() == [[2.0, 6.0]]


@pytest.mark.parametrize("kind", ["queue", "lookup"])
def test_a_tape_outside_of_a_function_finds_gradients_of_the_dense_model(
    engine: str, kind: str
):
    table = te.TableConfig(4, 1, te.RowIdInitializer(), combiner="sum", name="t")
    make = te.TPUEmbedding if kind == "queue" else te.TPUEmbeddingV2
    embedding: Any = make(te.FeatureConfig(table, output_shape=[1]), te.SGD(1))
    kernel = tf.Variable(2.0)

    @tf.function
    def forward(weights: tf.Tensor) -> tf.Tensor:
        ids = tf.constant([[1, 3]])
        return kernel * train_on(embedding, ids, weights=weights)

    with tf.GradientTape() as tape:
        loss = forward(tf.constant([[1.0, 2.0]]))
    assert tape.gradient(loss, kernel).numpy() == 7  # 1 * 1 + 2 * 3
    [rows] = embedding.embedding_tables.values()
    assert rows.numpy().ravel().tolist() == [0, 0, 2, 1]


def test_calls_of_one_step_see_the_tables_before_its_updates(engine: str):
    table = te.TableConfig(4, 1, te.RowIdInitializer(), combiner="sum", name="t")
    layer = te.keras.TPUEmbedding(te.FeatureConfig(table), te.SGD(1.0))
    weights = tf.Variable([[1.0]])
    tape: Any = tf.GradientTape()
    with tape:
        loss = sum(layer(tf.constant([[3]]), 1.0 * weights) for _ in range(2))
    found = tape.gradient(loss, [weights, *layer.trainable_variables])[0]
    assert found.numpy().tolist() == [[6.0]]
    (values,) = layer.embedding_tables.values()
    assert values.numpy()[3].tolist() == [1.0]


@pytest.mark.parametrize("engine", ["host"], indirect=True)
def test_replicas(engine: str):
    strategy = mirrored(2)
    table = te.TableConfig(4, 1, te.RowIdInitializer(), combiner="sum", name="t")
    with strategy.scope():
        embedding = te.TPUEmbedding(te.FeatureConfig(table), te.SGD(1.0))
        embedding.build()

    @tf.function
    def step():
        def replica():
            ids, weights = tf.constant([[3, 1]]), tf.constant([[1.0, 2.0]])
            embedding.enqueue(ids, weights)
            gradients = tf.ones_like(embedding.dequeue())
            found = embedding.weight_gradients(gradients, ids, weights)
            embedding.apply_gradients(gradients)
            return found

        return strategy.run(replica)

    found = strategy.experimental_local_results(step())
    assert [value.numpy().tolist() for value in found] == [[[3.0, 1.0]]] * 2


def test_what_has_no_gradient_refuses_by_name(engine: str):
    table = te.TableConfig(4, 1, te.RowIdInitializer(), combiner="sum", name="t")
    config = te.FeatureConfig(table, name="f")
    ids, scale = tf.constant([[1, 3]]), tf.Variable([[1.0, 2.0]])
    ahead = te.TPUEmbeddingV2(config, te.SGD(0.1))
    with tf.GradientTape():
        with pytest.raises(NotImplementedError, match="A preprocessed batch has no"):
            ahead.preprocess_features(ids, 1.0 * scale)
        ahead.preprocess_features(ids, tf.stop_gradient(1.0 * scale))
    if engine == "portable":
        return  # It is never pipelined.
    late = te.TPUEmbedding(config, te.SGD(0.1), True)
    late.enqueue(ids, scale.value())
    gradient = tf.ones_like(late.dequeue())
    with pytest.raises(NotImplementedError, match="pipeline_execution"):
        late.weight_gradients(gradient, ids, scale.value())


@pytest.mark.parametrize("generation", ["v4", "v6e"])
def test_tpus_refuse_by_name(generation: str):
    table = te.TableConfig(8, 8, combiner="sum", name="t")
    config = te.FeatureConfig(table, output_shape=[2], name="f")
    scale = tf.Variable([[1.0], [1.0]])
    with SoftwareTPUStrategy(generation, num_devices=1).scope():
        embedding = te.TPUEmbedding(config, te.SGD(0.1))
    with (
        tf.GradientTape(),
        pytest.raises(NotImplementedError, match="engine has no gradients of weights"),
    ):
        embedding.enqueue(tf.constant([[1], [2]]), 1.0 * scale)


@pytest.mark.parametrize("dtype", [tf.float32, tf.float64])
@pytest.mark.parametrize("combiner", COMBINERS)
def test_a_variable_used_twice_and_second_order(
    engine: str, combiner: str, dtype: tf.DType
):
    configs = {n: c for n, c in make_configs(combiner).items() if n == "dense"}
    configs["again"] = te.FeatureConfig(configs["dense"].table, name="again")
    configs["plain"] = te.FeatureConfig(configs["dense"].table, name="plain")
    embedding = te.TPUEmbeddingV2(configs, None)
    ids = dict.fromkeys(configs, tf.constant(IDS["dense"], tf.int64))
    table = tf.constant(initial([ROWS, DIM]).numpy(), tf.float64)
    upper = tf.constant(upstream()["dense"], tf.float64)

    def combined(weights: tf.Tensor) -> tf.Tensor:
        known = tf.cast(ids["dense"] < ROWS, tf.float64) * weights
        total = tf.reduce_sum(known, 1, keepdims=True)
        squares = tf.reduce_sum(known * known, 1, keepdims=True)
        gains = known / {"sum": 1.0, "mean": total, "sqrtn": squares**0.5}[combiner]
        rows = tf.gather(table, tf.minimum(ids["dense"], ROWS - 1))
        return tf.reduce_sum(rows * gains[..., tf.newaxis], 1)

    def ours(weights: tf.Tensor) -> tf.Tensor:
        given = {"dense": weights, "again": weights * weights, "plain": None}
        found = embedding(ids, given)[0]
        return found["dense"] * found["again"] + found["plain"]

    def dense(weights: tf.Tensor) -> tf.Tensor:
        plain = combined(tf.ones_like(weights))
        return combined(weights) * combined(weights * weights) + plain

    results = []
    for function, kind in ((ours, dtype), (dense, tf.float64)):
        variable = tf.Variable(random_weights()["dense"], dtype=kind)
        with tf.GradientTape(persistent=True) as outer:
            with tf.GradientTape() as inner:
                activation = function(tf.convert_to_tensor(variable))
                loss = tf.reduce_sum(tf.cast(activation, tf.float64) * upper)
            first = inner.gradient(loss, variable)
            squares = tf.reduce_sum(first * first)
        results.append([first, outer.gradient(squares, variable)])
        assert [g.dtype for g in results[-1]] == [kind, kind]
    for got, expected in zip(*results, strict=True):
        scale = np.abs(expected.numpy()).max()
        np.testing.assert_allclose(got, expected, 1e-4, 1e-5 * scale)
