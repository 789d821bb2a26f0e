"""TPUEmbeddingV0: lookups by plain ops under every strategy, trained by a tape."""

from __future__ import annotations

import pathlib
from typing import Any

import forked
import numpy as np
import pytest
import tensorflow as tf
from conformance import cases
from described_tpu import Described
from replica_values import mirrored

import tpu_embedding as te
from tpu_embedding.lookup.features import Padded, combine_padded
from tpu_embedding.tables.readers import VariableReader
from tpu_embedding.testing import SoftwareTPUStrategy

V, D = 11, 4
STRATEGIES = {
    "default": tf.distribute.get_strategy,
    "mirrored": lambda: mirrored(2),
    "multi_worker": tf.distribute.MultiWorkerMirroredStrategy,  # Of one worker.
    "software_tpu": lambda: SoftwareTPUStrategy("v4", 2),
    "tpu_without_engine": lambda: SoftwareTPUStrategy("v5e", 1),
}
# All where that is cheap.
KINDS = {
    "default": tuple(cases.INPUT_BY_NAME),
    "mirrored": ("sparse_sequence",),
    "multi_worker": ("ragged",),
    "software_tpu": ("dense2",),
    "tpu_without_engine": ("dense1", "sparse3", "ragged_positions"),
}


def initializer(shape: Any, dtype: Any) -> Any:
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
    combiner = cases.COMBINERS[list(STRATEGIES).index(name) % 3]
    kinds = [cases.INPUT_BY_NAME[kind] for kind in KINDS[name]]
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
    strategy = mirrored(2)
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


def test_checkpoints_make_tables_that_are_not_there(tmp_path: pathlib.Path) -> None:
    """Saving begins with their initial values, and restoring before build with them."""
    features = te.FeatureConfig(te.TableConfig(V, D, te.RowIdInitializer(), name="t"))
    tracked = tf.train.Checkpoint(e=te.TPUEmbeddingV0(features, te.Adagrad(0.5)))
    first = tracked.write(str(tmp_path / "first"))
    names = [name.split("/.")[0] for name, _ in tf.train.list_variables(first)]
    assert names[1:] == ["e/t.Saccumulators", "e/t"]
    other = te.TPUEmbeddingV0(features, te.Adagrad(1.5))
    tracked = tf.train.Checkpoint(e=other)
    tracked.read(first).assert_consumed()
    second = tracked.write(str(tmp_path / "second"))
    assert tf.train.list_variables(second) == tf.train.list_variables(first)
    (arrays,) = other.variables.values()
    np.testing.assert_array_equal(arrays["parameters"][:, 0], np.arange(V))


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


def trace_on_a_described_tpu(
    features: dict[str, te.FeatureConfig], specs: dict[str, Any]
) -> tuple[Any, dict[str, Any]]:
    """The graph of a lookup and its gradient, and the shapes of the activations."""
    strategy = tf.distribute.TPUStrategy(Described("UNSUPPORTED", local=True))
    with strategy.scope():
        embedding = te.TPUEmbeddingV0(features)
    shapes: dict[str, Any] = {}

    @tf.function
    def step(inputs: Any) -> Any:
        def replica_fn(inputs: Any) -> Any:
            with tf.GradientTape() as tape:
                activations = embedding(inputs)
                loss = tf.add_n([tf.reduce_sum(a) for a in activations.values()])
            shapes.update({name: a.shape for name, a in activations.items()})
            (table,) = embedding.embedding_tables.values()
            return tape.gradient(loss, table).values

        return strategy.run(replica_fn, args=(inputs,))

    return step.get_concrete_function(specs).graph, shapes


def test_programs_of_a_real_tpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """What cannot be in one is outside compilation; what is left has fixed shapes."""
    # No TPU is there to hold it.
    made = {"films": {"parameters": tf.Variable(tf.zeros([V, D]))}}
    monkeypatch.setattr(
        te.TPUEmbeddingV0, "build", lambda self: setattr(self, "_variables", made)
    )
    films = te.TableConfig(V, D, name="films")
    features = {
        "d": te.FeatureConfig(films),
        "r": te.FeatureConfig(films),
        # In strategy.run a sparse input has no static shape.
        "s": te.FeatureConfig(films, output_shape=[4]),
        "q": te.FeatureConfig(films, max_sequence_length=2),
    }
    ragged = tf.RaggedTensorSpec([4, None], tf.int64)
    specs = {
        "d": tf.TensorSpec([4], tf.int64),
        "r": ragged,
        "s": tf.SparseTensorSpec([4, 3], tf.int64),
        "q": ragged,
    }
    graph, shapes = trace_on_a_described_tpu(features, specs)
    assert shapes == {"d": [4, D], "r": [4, D], "s": [4, D], "q": [4, 2, D]}
    program, host = set(), set()
    for op in graph.get_operations():
        if "_tpu_replicate" in op.node_def.attr:
            outside = "_xla_outside_compilation" in op.node_def.attr
            (host if outside else program).add(op.type)
    assert {"If", "ScatterNd"} <= host  # The checks, and the padding.
    assert {"ResourceGather", "Mul", "SelectV2", "Sum"} <= program
    assert not program & {"If", "StatelessIf", "Where", "ScatterNd", "StringJoin"}


def test_what_is_in_a_program_compiles() -> None:
    """By XLA, for the CPU; padding counts nowhere, but an entry of gain 0 does."""
    table = tf.Variable([[np.nan, 1.0], [2.0, 3.0], [4.0, np.inf]])
    padded = Padded(
        tf.constant([[1, 1, -1], [1, -1, -1], [1, 2, -1], [-1, -1, -1]]),
        tf.constant([[0.5, 0.5, 0], [2, 0, 0], [1, 0, 0], [0, 0, 0]]),
    )

    @tf.function(jit_compile=True)
    def look_up() -> Any:
        with tf.GradientTape() as tape:
            activations = combine_padded(padded, VariableReader(table))
        gradient = tape.gradient(activations, table)
        return activations, gradient.indices, tf.convert_to_tensor(gradient)

    activations, rows, gradient = look_up()
    np.testing.assert_array_equal(activations, [[2, 3], [4, 6], [2, np.nan], [0, 0]])
    np.testing.assert_array_equal(gradient, [[0, 0], [4, 4], [0, 0]])
    # Row 0 stands for the sample without entries only.
    np.testing.assert_array_equal(rows, [1] * 7 + [2, 1] + [0] * 3)


def test_errors_of_a_program() -> None:
    """They are those of every other engine; nothing else changes for the worse."""
    strategy = SoftwareTPUStrategy("v5e", 2)
    with strategy.scope():
        table = te.TableConfig(V, D, te.RowIdInitializer(), name="films")
        embedding = te.TPUEmbeddingV0({"a": te.FeatureConfig(table)})

    def look_up(ids: Any) -> Any:
        return strategy.run(embedding, args=({"a": ids},))["a"]

    for wrong in (tf.constant([0, V]), tf.ragged.constant([[1], [2, -1]])):
        with pytest.raises(
            tf.errors.InvalidArgumentError, match="Feature a, table films: sample 1 has"
        ):
            look_up(wrong)
    nothing = tf.RaggedTensor.from_row_splits(tf.zeros([0], tf.int64), [0, 0, 0])
    for found in look_up(nothing).values:
        np.testing.assert_array_equal(found, np.zeros([2, D]))


def test_errors() -> None:
    table = te.TableConfig(V, D, name="films")
    embedding = te.TPUEmbeddingV0({"a": te.FeatureConfig(table)}, None)
    with pytest.raises(ValueError, match="features"):
        embedding({"b": tf.constant([1])})
    with pytest.raises(tf.errors.InvalidArgumentError, match="has id 11"):
        embedding({"a": tf.constant([11])})
    with pytest.raises(TypeError, match="check_numerics"):
        te.TPUEmbeddingV0({"a": te.FeatureConfig(table)}, None, check_numerics=3)  # pyright: ignore[reportArgumentType]
    placed = te.TableConfig(V, D, name="films", layout=3)
    with pytest.raises(NotImplementedError, match=r"`layout=3` of table films"):
        te.TPUEmbeddingV0({"a": te.FeatureConfig(placed)}, None)


def test_optimizers_that_a_cpu_cannot_apply() -> None:
    """Their tables and slots are made all the same; nothing here applies them."""
    table = te.TableConfig(V, 1, name="films")
    for optimizer, slots in (
        (te.SGD(0.1, low_dimensional_packing_status=True), []),
        (te.FrequencyEstimator(weight_exponent=0.5), ["last_hit_step"]),
    ):
        embedding = te.TPUEmbeddingV0([te.FeatureConfig(table)], optimizer)
        assert list(embedding.variables[table]) == ["parameters", *slots]


# In a process of its own: to connect to a cluster is to start TensorFlow anew.
PARAMETER_SERVER = """
import socket
import tensorflow as tf
import tpu_embedding as te

sockets = [socket.create_server(("localhost", 0)) for _ in range(2)]
ports = [s.getsockname()[1] for s in sockets]
for s in sockets:
    s.close()
cluster = tf.train.ClusterSpec(
    {job: [f"localhost:{port}"] for job, port in zip(("worker", "ps"), ports)}
)
servers = [tf.distribute.Server(cluster, job, 0) for job in ("worker", "ps")]
resolver = tf.distribute.cluster_resolver.SimpleClusterResolver(
    cluster, rpc_layer="grpc"
)


def make(strategy):
    with strategy.scope():
        films = te.TableConfig(9, 1, te.RowIdInitializer(), name="films")
        embedding = te.TPUEmbeddingV0(te.FeatureConfig(films), None)
        embedding.build()
    return embedding, embedding.embedding_tables[films]


strategy = tf.distribute.ParameterServerStrategy(resolver)
coordinator = tf.distribute.coordinator.ClusterCoordinator(strategy)
embedding, table = make(strategy)
print(table.device)


@tf.function
def step():
    with tf.GradientTape() as tape:
        activations = embedding(tf.constant([[1, 3], [5, 5]]))
    gradient = tape.gradient(activations, table)
    return activations, tf.convert_to_tensor(gradient)


for value in coordinator.schedule(step).fetch():
    print(value[:, 0].tolist())
cut = tf.distribute.experimental.partitioners.FixedShardsPartitioner(2)
try:
    make(tf.distribute.ParameterServerStrategy(resolver, variable_partitioner=cut))
except NotImplementedError as error:
    print(error)
"""


@pytest.mark.second_tier
def test_parameter_servers() -> None:
    printed = forked.run(["-c", PARAMETER_SERVER]).stdout
    device, activations, gradient, refused = printed.splitlines()
    assert device.startswith("/job:ps/")
    assert activations == "[2.0, 5.0]"
    assert gradient == "[0.0, 0.5, 0.0, 0.5, 0.0, 1.0, 0.0, 0.0, 0.0]"
    assert (
        "Table films would be split by the strategy's `variable_partitioner`" in refused
    )
