"""The graphs of TPU v2 to v4 programs, under a TPUStrategy whose TPUs are not there.

Only a TPU shows what its compiler makes of them; the other tests here run in software.
"""

from __future__ import annotations

from typing import Any

import pytest
import tensorflow as tf
from described_tpu import LOCAL_TOPOLOGY, PER_HOST, Described, local_tpu
from replica_values import of_replicas
from tensorflow.core.protobuf.tpu import tpu_embedding_configuration_pb2

import tpu_embedding as te
from tpu_embedding.engines.tpu_v2_v4.engine import HostTable, TPUV2V4Engine
from tpu_embedding.keras import TPUEmbedding as TPUEmbeddingLayer

stock: Any = tf.tpu.experimental.embedding
V, D, B = 8, 2, 4
ENQUEUE = "EnqueueTPUEmbeddingArbitraryTensorBatch"
RECV, SEND = "RecvTPUEmbeddingActivations", "SendTPUEmbeddingGradients"
HOST = "/job:localhost/replica:0/task:0/device:CPU:0"
IDS = tf.TensorSpec([B], tf.int64)
RAGGED = tf.RaggedTensorSpec([B, None], tf.int32)


@pytest.fixture(autouse=True)
def no_hardware(monkeypatch: pytest.MonkeyPatch) -> None:
    """Leaves out what is run when an embedding is built."""
    monkeypatch.setattr(TPUV2V4Engine, "_configure", lambda engine: None)
    monkeypatch.setattr(HostTable, "load", lambda table, config: None)
    monkeypatch.setattr(HostTable, "retrieve", lambda table, config: None)


def make_strategy(cores: int = 0) -> tf.distribute.TPUStrategy:
    if not cores:
        return tf.distribute.TPUStrategy(Described(local=True))
    assignment = tf.tpu.experimental.DeviceAssignment.build(
        LOCAL_TOPOLOGY, computation_shape=[1, 1, 1, cores], num_replicas=2
    )
    return tf.distribute.TPUStrategy(
        Described(local=True), experimental_device_assignment=assignment
    )


def make_embedding(strategy: Any, **arguments: Any) -> te.TPUEmbedding:
    """Features a and b of one table."""
    with strategy.scope():
        table = te.TableConfig(V, D, combiner="sum", name="films")
        features = {"a": te.FeatureConfig(table), "b": te.FeatureConfig(table)}
        optimizer = arguments.pop("optimizer", te.Adagrad(0.1))
        return te.TPUEmbedding(features, optimizer, **arguments)


def operations(function: Any, kind: str) -> list[Any]:
    return [op for op in function.graph.get_operations() if op.type == kind]


def attribute(op: Any, name: str) -> Any:
    return op.get_attr(name) if name in op.node_def.attr else None


def trace_named_step() -> tuple[te.TPUEmbedding, Any]:
    """A whole step inside of a program, with a name for its three calls."""
    strategy = make_strategy()
    rates = [lambda: 0.5]
    embedding = make_embedding(strategy, optimizer=te.SGD(rates[0]))

    @tf.function
    def step(ids: Any, ragged: Any) -> Any:
        def replica_fn(ids: Any, ragged: Any) -> Any:
            embedding.enqueue({"a": ids, "b": ragged}, name="x")
            with tf.GradientTape() as tape:
                activations = embedding.dequeue(name="x")
                tape.watch(activations)
                loss = tf.reduce_sum(activations["a"])
            # b has no gradient, which counts as zeros.
            gradients = tape.gradient(loss, activations)
            embedding.apply_gradients(gradients, name="x")
            return loss

        return strategy.run(replica_fn, args=(ids, ragged))

    return embedding, step.get_concrete_function(IDS, RAGGED)


def test_inside_of_a_program() -> None:
    embedding, function = trace_named_step()
    (enqueue,) = operations(function, ENQUEUE)
    assert attribute(enqueue, "_xla_outside_compilation") is not None
    assert attribute(enqueue, "device_ordinal") == -1
    assert attribute(enqueue, "combiners") == [b"sum"]
    assert attribute(enqueue, "_tpu_embedding_layer") == b"x"
    mode = enqueue.inputs[-1].op
    assert mode.type == "SelectV2"
    condition, *words = [tf.get_static_value(tensor) for tensor in mode.inputs]
    assert condition
    assert words == [b"train", b"inference"]
    # Dense a has no splits, ragged b has; neither has weights.
    kinds = [tensor.dtype for tensor in enqueue.inputs]
    assert kinds == [tf.int32] * 2 + [tf.int64] * 2 + [tf.float32] * 2 + [tf.string]
    assert enqueue.inputs[0].shape == [0]
    assert enqueue.inputs[1].shape == [B + 1]

    (receive,), (send,) = operations(function, RECV), operations(function, SEND)
    assert embedding.core.engine is not None
    for op in (receive, send):
        assert attribute(op, "_tpu_embedding_layer") == b"x"
        assert attribute(op, "_xla_outside_compilation") is None
        assert attribute(op, "config") == embedding.core.engine._config
    assert [output.shape for output in receive.outputs] == [[B, D]] * 2
    assert attribute(send, "NN") == 1


@pytest.mark.parametrize("training", [True, False])
def test_outside_of_programs(training: bool) -> None:
    """Each core's batch goes to its own ordinal, on its host."""
    strategy = make_strategy()
    embedding = make_embedding(strategy)
    spec = tf.TensorSpec([B], tf.int32)

    @tf.function
    def enqueue(*batches: Any) -> None:
        ids = of_replicas(strategy, batches)
        embedding.enqueue({"a": ids, "b": ids}, training=training)

    made = operations(enqueue.get_concrete_function(*[spec] * PER_HOST), ENQUEUE)
    assert [attribute(op, "device_ordinal") for op in made] == [0, 1, 2, 3]
    assert {op.device for op in made} == {HOST}
    mode = b"train" if training else b"inference"
    assert [tf.get_static_value(op.inputs[-1]) for op in made] == [mode] * PER_HOST


def test_explicit_device() -> None:
    strategy = make_strategy()
    embedding = make_embedding(strategy)

    @tf.function
    def enqueue(ids: Any) -> None:
        embedding.enqueue({"a": ids, "b": ids}, device="/task:0/device:TPU:2")

    (made,) = operations(enqueue.get_concrete_function(IDS), ENQUEUE)
    assert attribute(made, "device_ordinal") == 2
    assert made.device == HOST
    for device in ("/device:CPU:0", "/device:TPU:4", "bogus", "TPU"):
        with pytest.raises(ValueError, match="must name a"):
            embedding.enqueue({"a": tf.zeros([B], tf.int32)}, device=device)


def test_several_cores_for_each_replica() -> None:
    """The batch of a replica is dealt out to its cores; activations come back whole."""
    strategy = make_strategy(cores=2)
    embedding = make_embedding(strategy)

    @tf.function
    def step(ids: Any, ragged: Any) -> Any:
        embedding.enqueue({"a": ids, "b": ragged})

        def replica_fn() -> Any:
            activations = embedding.dequeue()
            embedding.apply_gradients(activations)
            return activations

        return strategy.run(replica_fn)

    function = step.get_concrete_function(IDS, RAGGED)
    made = operations(function, ENQUEUE)
    assert strategy.extended._tpu_devices.tolist() == [
        [local_tpu(0), local_tpu(1)],
        [local_tpu(2), local_tpu(3)],
    ]
    assert [attribute(op, "device_ordinal") for op in made] == [0, 1, 2, 3]
    assert {tuple(op.inputs[2].shape) for op in made} == {(B // 2,)}
    (receive,) = operations(function, RECV)
    assert [output.shape for output in receive.outputs] == [[B, D]] * 2
    odd = make_embedding(strategy)
    with pytest.raises(ValueError, match=r"must be divisible by 2\. Received: \(3,\)"):
        odd.build(3)


def make_stock(strategy: Any) -> Any:
    """TensorFlow's own class, as if its build had run."""
    with strategy.scope():
        table = stock.TableConfig(V, D, combiner="sum", name="films")
        features = {name: stock.FeatureConfig(table) for name in "ab"}
        # The default raises TypeError with protobuf 7.
        optimizer = stock.Adagrad(0.1, low_dimensional_packing_status=0)
        embedding = stock.TPUEmbedding(features, optimizer)
    cores = embedding._num_cores_per_replica or 1
    embedding._get_and_update_output_shapes_from_input(None, B // cores)
    embedding._config_proto = embedding._create_config_proto()
    embedding._built = True
    return embedding


def described_ops(embedding: Any, strategy: Any) -> list[Any]:
    """The embedding ops of a step outside and inside of a program, without inputs."""

    @tf.function
    def step(ids: Any) -> None:
        def replica_fn() -> None:
            embedding.apply_gradients(embedding.dequeue(name="x"), name="x")

        embedding.enqueue({"a": ids, "b": ids}, name="x")
        strategy.run(replica_fn)

    function = step.get_concrete_function(IDS)
    described = []
    for op in function.graph.get_operations():
        if "TPUEmbedding" not in op.type:
            continue
        attributes = {
            name: attribute(op, name)
            for name in (
                *("device_ordinal", "combiners", "num_outputs", "N", "NN"),
                *("_tpu_embedding_layer", "_xla_outside_compilation"),
            )
        }
        described.append((op.type, op.device, attributes))
        described.append([tuple(output.shape) for output in op.outputs])
        config = tpu_embedding_configuration_pb2.TPUEmbeddingConfiguration()
        described.append(config.FromString(attribute(op, "config") or b""))
        described += [tuple(t.shape) for t in op.inputs if t.dtype != tf.string]
        described += [tf.get_static_value(t) for t in op.inputs if t.dtype == tf.string]
    return described


@pytest.mark.parametrize("cores", [0, 1, 2])
def test_ops_are_those_of_tensorflows_own_class(cores: int) -> None:
    """Devices, ordinals, modes, shapes, names and configuration, also with SPMD."""
    strategy = make_strategy(cores)
    ours = make_embedding(strategy)
    ours.build(B)
    expected = described_ops(make_stock(strategy), strategy)
    assert described_ops(ours, strategy) == expected
    ordinals = [
        found[2]["device_ordinal"]
        for found in expected
        if isinstance(found, tuple) and found[0:1] == (ENQUEUE,)
    ]
    assert ordinals == {0: [0, 1, 2, 3], 1: [0, 1], 2: [0, 1, 2, 3]}[cores]


def test_where_enqueue_may_be_called() -> None:
    strategy = make_strategy()
    embedding = make_embedding(strategy)

    def trace(call: Any) -> None:
        @tf.function
        def step(ids: Any) -> None:
            strategy.run(call, args=(ids,))

        step.get_concrete_function(IDS)

    def computed(ids: Any) -> None:
        embedding.enqueue({"a": ids, "b": ids + 1})

    with pytest.raises(ValueError, match=r"Feature b: inside strategy\.run"):
        trace(computed)

    def in_condition(ids: Any) -> None:
        def enqueue() -> int:
            embedding.enqueue({"a": ids, "b": ids})
            return 1

        tf.cond(ids[0] > 0, enqueue, lambda: 0)

    with pytest.raises(RuntimeError, match=r"inside control flow or a tf\.function"):
        trace(in_condition)

    def in_function(ids: Any) -> None:
        tf.function(lambda: embedding.enqueue({"a": ids, "b": ids}))()

    with pytest.raises(RuntimeError, match=r"inside control flow or a tf\.function"):
        trace(in_function)

    def missing(ids: Any) -> None:
        embedding.enqueue({"a": ids, "b": None})

    for call in (lambda: missing(tf.constant([1] * B)), lambda: trace(missing)):
        with pytest.raises(ValueError, match=r"Feature b must be a tf\.Tensor"):
            call()
    assert embedding.core.engine is None


def test_ids_must_be_on_the_host() -> None:
    embedding = make_embedding(make_strategy())

    @tf.function
    def on_tpu(ids: Any) -> None:
        with tf.device("/device:TPU:0"):
            ids = tf.identity(ids)
        embedding.enqueue({"a": ids, "b": ids})

    with pytest.raises(ValueError, match="experimental_fetch_to_device=False"):
        on_tpu.get_concrete_function(IDS)


def test_shapes_must_be_known() -> None:
    embedding = make_embedding(make_strategy())
    with pytest.raises(ValueError, match="Feature a: a TPU must know"):
        embedding.build()
    nothing = tf.constant([], tf.int32)
    with pytest.raises(ValueError, match=r"Feature a: .* no samples .*\(0,\)"):
        embedding.enqueue({"a": nothing, "b": nothing})

    @tf.function
    def enqueue(ids: Any) -> None:
        embedding.enqueue({"a": ids, "b": ids})

    with pytest.raises(ValueError, match="Feature a: a TPU must know"):
        enqueue.get_concrete_function(tf.TensorSpec([None], tf.int32))
    enqueue.get_concrete_function(tf.TensorSpec([3], tf.int32))
    with pytest.raises(ValueError, match=r"\(3,\) given by the first batch"):
        enqueue.get_concrete_function(tf.TensorSpec([4], tf.int32))


@pytest.mark.parametrize(
    ("table", "optimizer", "error", "text"),
    [
        ({}, None, ValueError, "Table films has no optimizer"),
        ({}, te.RowwiseAdagrad(0.1), NotImplementedError, "optimizer='RowwiseAdagrad'"),
        ({"layout": 3}, te.SGD(0.1), NotImplementedError, "layout=3"),
    ],
    ids=["none", "rowwise", "layout"],
)
def test_what_the_hardware_lacks(
    table: dict[str, Any], optimizer: Any, error: type[Exception], text: str
) -> None:
    config = te.TableConfig(V, D, name="films", **table)
    with make_strategy().scope(), pytest.raises(error, match=text):
        te.TPUEmbedding(te.FeatureConfig(config), optimizer)


def test_calls_that_the_hardware_lacks() -> None:
    embedding = make_embedding(make_strategy(), check_numerics=True)
    with pytest.raises(NotImplementedError, match="check_numerics=True"):
        embedding.build(B)
    embedding = make_embedding(make_strategy())
    embedding.build(B)
    for read in (lambda: embedding.embedding_tables, lambda: embedding.variables):
        with pytest.raises(RuntimeError, match="in the TPU's own memory"):
            read()
    for call in (embedding.dequeue, lambda: embedding.apply_gradients(None)):
        with pytest.raises(RuntimeError, match="must run inside one of 4 replicas"):
            call()
    with pytest.raises(NotImplementedError, match="cannot discard queued"):
        embedding.reset()


def test_the_keras_layer() -> None:
    """A call is a pair of named ops; its gradient is the third of that name."""
    strategy = make_strategy()
    feature = te.FeatureConfig(te.TableConfig(V, D, name="films"))
    with strategy.scope():
        layer = TPUEmbeddingLayer(feature, te.SGD(0.1), batch_size=B * PER_HOST)
        layer.build()
    (virtual,) = layer.trainable_variables

    @tf.function
    def step(ids: Any) -> Any:
        def replica_fn(ids: Any) -> Any:
            with tf.GradientTape() as tape:
                loss = tf.reduce_sum(layer(ids))
            tape.gradient(loss, virtual)
            return layer(ids)

        return strategy.run(replica_fn, args=(ids,))

    function = step.get_concrete_function(IDS)
    trained, looked_up = operations(function, ENQUEUE)
    received = operations(function, RECV)
    (sent,) = operations(function, SEND)
    for op in (trained, received[0], sent):
        assert attribute(op, "_tpu_embedding_layer") == b"lookup_1"
    for op in (looked_up, received[1]):
        assert attribute(op, "_tpu_embedding_layer") is None
    assert not tf.get_static_value(looked_up.inputs[-1].op.inputs[0])
    for op in (trained, looked_up):
        assert attribute(op, "_xla_outside_compilation") is not None
    assert attribute(sent, "_xla_outside_compilation") is None
