"""TPUEmbeddingV0: lookups by plain ops under every strategy, trained by a tape."""

from __future__ import annotations

import pathlib
from typing import Any

import numpy as np
import pytest
import tensorflow as tf
from conformance import cases
from described_tpu import Described

import tpu_embedding as te
from tpu_embedding.testing import SoftwareTPUStrategy

V, D = 11, 4
STRATEGIES = {
    "default": tf.distribute.get_strategy,
    "mirrored": lambda: tf.distribute.MirroredStrategy(["CPU:0", "CPU:1"]),
    "software_tpu": lambda: SoftwareTPUStrategy("v4", 2),
}


def initializer(shape: Any, dtype: Any) -> Any:
    del dtype
    return cases.named_values(*shape)


def configuration(
    combiner: str, kinds: Any
) -> tuple[te.TableConfig, dict[str, te.FeatureConfig]]:
    """One table, and kinds of input with weights and without."""
    table = te.TableConfig(V, D, initializer, name="films", combiner=combiner)
    features = {}
    for case in kinds:
        for name in (case.name, f"{case.name}_weighted"):
            features[name] = te.FeatureConfig(
                table,
                max_sequence_length=case.max_sequence_length,
                output_shape=case.output_shape,
            )
    return table, features


def draw(rng: np.random.Generator, kinds: Any) -> tuple[dict[str, Any], dict[str, Any]]:
    values, weights = {}, {}
    for case in kinds:
        ids = case.draw(rng, V)
        values[case.name] = values[f"{case.name}_weighted"] = ids
        weights[case.name] = None
        weights[f"{case.name}_weighted"] = cases.positive_weights(rng, ids)
    return values, weights


@pytest.mark.parametrize("name", STRATEGIES)
def test_same_as_tpu_embedding(name: str, rng: np.random.Generator) -> None:
    """Activations and gradients, the latter seen through SGD with a rate of 1."""
    strategy = STRATEGIES[name]()
    combiner = cases.COMBINERS[list(STRATEGIES).index(name)]
    # All kinds where that is cheap.
    few = [cases.INPUT_BY_NAME[kind] for kind in ("dense2", "sparse_sequence")]
    kinds = cases.INPUTS if name == "default" else few
    table, features = configuration(combiner, kinds)
    values, weights = draw(rng, kinds)
    other = te.TPUEmbedding(features, te.SGD(1.0))
    other.enqueue(values, weights)
    expected = other.dequeue()
    other.apply_gradients(expected)
    with strategy.scope():
        embedding = te.TPUEmbeddingV0(features, None)
        embedding.build()
    variable = embedding.embedding_tables[table]

    def step() -> Any:
        def replica_fn() -> Any:
            with tf.GradientTape() as tape:
                activations = embedding(values, weights)
                squares = [tf.reduce_sum(a**2) / 2 for a in activations.values()]
                loss = tf.add_n(squares)
            gradient = tape.gradient(loss, variable)
            return activations, tf.convert_to_tensor(gradient)

        return strategy.run(replica_fn)

    call = step if name == "default" else tf.function(step)
    activations, gradients = call()
    bound = cases.tolerance(8, 2 * 4.0)
    for feature, value in expected.items():
        for found in strategy.experimental_local_results(activations[feature]):
            cases.assert_close(found, value.numpy(), bound, feature)
    before = cases.named_values(V, D)
    update = before - other.embedding_tables[table].numpy()
    # At most 6 entries of a row in each of 22 features, each up to 2 * 4.
    bound = cases.tolerance(22 * 24, 2 * 4.0, steps=1)
    for found in strategy.experimental_local_results(gradients):
        cases.assert_close(found, update, bound, "gradient")


@pytest.mark.parametrize("name", STRATEGIES)
def test_the_first_lookup_makes_the_tables(name: str) -> None:
    """Inside of a replica, too, and each replica has its copy."""
    strategy = STRATEGIES[name]()
    table = te.TableConfig(V, D, te.RowIdInitializer(), name="films")
    with strategy.scope():
        embedding = te.TPUEmbeddingV0(te.FeatureConfig(table), te.Adagrad(1.0))
    activations = strategy.run(lambda: embedding(tf.constant([1, 2])))
    for found in strategy.experimental_local_results(activations):
        assert found.numpy()[:, 0].tolist() == [1.0, 2.0]
    for variable in embedding.variables[table].values():
        copies = strategy.experimental_local_results(variable)
        assert len(copies) == strategy.num_replicas_in_sync
    assert sorted(embedding._trackable_children()) == ["films", "films/accumulators"]


def test_checkpoints_are_those_of_tpu_embedding(tmp_path: pathlib.Path) -> None:
    strategy = tf.distribute.MirroredStrategy(["CPU:0", "CPU:1"])
    table = te.TableConfig(V, D, initializer, name="films")
    with strategy.scope():
        embedding = te.TPUEmbeddingV0(te.FeatureConfig(table), te.Adam(0.1))
        embedding.build()
    arrays = embedding.variables[table]
    assert list(arrays) == ["parameters", "momenta", "velocities"]
    arrays["velocities"].assign(tf.ones([V, D]))
    assert [arrays[name].trainable for name in arrays] == [True, False, False]
    path = tf.train.Checkpoint(e=embedding).write(str(tmp_path / "saved"))
    other = te.TPUEmbedding(
        te.FeatureConfig(te.TableConfig(V, D, name="films")), te.Adam(0.1)
    )
    other.build()
    tf.train.Checkpoint(e=other).read(path).assert_consumed()
    (restored,) = other.variables.values()
    for name, variable in arrays.items():
        np.testing.assert_array_equal(restored[name], variable.numpy(), name)


def test_slots_that_the_user_makes() -> None:
    made: list[Any] = []

    def create(table: Any, names: list[str], initializers: list[Any]) -> dict[str, Any]:
        made.append((table.shape, names))
        zeros = initializers[0](table.shape, tf.float32)
        return {name: tf.Variable(zeros, name=name) for name in names}

    table = te.TableConfig(V, D, name="films")
    optimizer = te.Adagrad(0.1, slot_variable_creation_fn=create)
    embedding = te.TPUEmbeddingV0([te.FeatureConfig(table)], optimizer)
    assert list(embedding.variables[table]) == ["parameters", "accumulators"]
    assert made == [((V, D), ["accumulators"])]


def test_programs_of_a_real_tpu(monkeypatch: pytest.MonkeyPatch) -> None:
    strategy = tf.distribute.TPUStrategy(Described("UNSUPPORTED", local=True))
    monkeypatch.setattr(te.TPUEmbeddingV0, "build", lambda embedding: None)
    with strategy.scope():
        features = te.FeatureConfig(te.TableConfig(V, D, name="films"))
        embedding = te.TPUEmbeddingV0(features)

    @tf.function
    def step(ids: Any) -> None:
        strategy.run(embedding, args=(ids,))

    with pytest.raises(NotImplementedError, match="a TPU program cannot check ids"):
        step.get_concrete_function(tf.TensorSpec([4], tf.int32))


def test_errors() -> None:
    table = te.TableConfig(V, D, name="films")
    embedding = te.TPUEmbeddingV0({"a": te.FeatureConfig(table)}, None)
    with pytest.raises(ValueError, match="features"):
        embedding({"b": tf.constant([1])})
    with pytest.raises(tf.errors.InvalidArgumentError, match="has id 11"):
        embedding({"a": tf.constant([11])})
    with pytest.raises(TypeError, match="check_numerics"):
        te.TPUEmbeddingV0({"a": te.FeatureConfig(table)}, None, check_numerics=3)  # pyright: ignore[reportArgumentType]
    low = te.SGD(0.1, low_dimensional_packing_status=True)
    with pytest.raises(NotImplementedError, match="low_dimensional_packing_status"):
        te.TPUEmbeddingV0({"a": te.FeatureConfig(table)}, low)
