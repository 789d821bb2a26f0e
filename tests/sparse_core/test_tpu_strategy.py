"""The program that TPUStrategy would compile: traced here, without a TPU.

A TPUStrategy needs no TPU to be created, nor to trace. Stand-ins replace only the
variables, which would be on TPUs.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

import pytest
import tensorflow as tf
from sparse_core import custom_models
from steps import train_on
from test_distribution import TOPOLOGY, Described

import tpu_embedding as te
from tpu_embedding.engines.sparse_core import engine, state
from tpu_embedding.keras import TPUEmbedding
from tpu_embedding.tables.variables import create_state

CORES, REPLICAS = 4, 8


class Local(tf.Module):
    """A variable of each replica, of which the program sees one."""

    def __init__(
        self, name: str, initial_value: Callable[[], tf.Tensor], *_: Any
    ) -> None:
        super().__init__()
        self.values = [create_state(name, initial_value())] * REPLICAS

    def __getattr__(self, name: str) -> Any:
        if name.startswith("_") or name == "values":
            raise AttributeError(name)
        return getattr(self.values[0], name)


@pytest.fixture
def strategy(monkeypatch: pytest.MonkeyPatch) -> Any:
    for module in (state, engine):
        monkeypatch.setattr(module, "create_local", Local)
    monkeypatch.setattr(state, "fill_tables", lambda *_: None)
    return tf.distribute.TPUStrategy(Described("V2", CORES))


def make(strategy: Any, **arguments: Any) -> te.TPUEmbeddingV2:
    films = te.TableConfig(20, 2, name="films", combiner="sum")
    feature = te.FeatureConfig(films, output_shape=[8], name="film")
    with strategy.scope():
        return te.TPUEmbeddingV2(feature, te.Adagrad(1.0), **arguments)


def program_of(
    strategy: Any, step: Callable[[tf.Tensor], Any]
) -> tuple[dict[str, list[tf.Operation]], set[str]]:
    """The ops of a step's TPU program by type, and the types that stay on the host."""

    @tf.function
    def train(ids: tf.Tensor) -> Any:
        return strategy.run(step, (ids,))

    graph = train.get_concrete_function(tf.TensorSpec([8], tf.int64)).graph
    program: dict[str, list[tf.Operation]] = {}
    outside = set()
    for op in graph.get_operations():
        attributes = op.node_def.attr
        if "_tpu_replicate" in attributes:
            program.setdefault(op.type, []).append(op)
            if "_xla_outside_compilation" in attributes:
                outside.add(op.type)
    return program, outside


# The hosts are other machines, which our library cannot be expected on.
STOCK = {
    "ConvertToListOfSparseCoreCooTensors": 1,
    "SortListOfSparseCoreCooTensors": CORES,
    "ConvertToSparseCoreCsrWrappedCooTensor": 1,
}


@pytest.mark.parametrize(
    ("pipelined", "preprocessing"),
    [(False, STOCK), (True, {"TpuEmbeddingPartition": 1})],
    ids=["stock", "library"],
)
def test_what_runs_on_the_host_and_what_on_the_tpu(
    strategy: Any,
    pipelined: bool,
    preprocessing: dict[str, int],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    if preprocessing is not STOCK:
        monkeypatch.setenv("TPU_EMBEDDING_HOST_OPS", "library")
    embedding = make(
        strategy, check_numerics=True, pipeline_execution_with_tensor_core=pipelined
    )
    embedding.build()

    def step(ids: tf.Tensor) -> tf.Tensor:
        return train_on(embedding, ids, tf.identity)

    program, outside = program_of(strategy, step)
    on_host = {
        *preprocessing,
        "TPUCopyWithDynamicShape",
        "TPUAnnotateTensorsWithDynamicShape",
        "IsFinite",
    }
    on_tpu = {
        "XlaSparseDenseMatmulWithStaticBufferSize",
        "XlaSparseDenseMatmulGradWithAdagradAndStaticBufferSize",
    }
    assert on_host <= outside
    assert on_tpu <= program.keys() - outside
    for kind in on_host - {"IsFinite"} | on_tpu:
        assert len(program[kind]) == preprocessing.get(kind, 1)
    others = {"TpuEmbeddingPartition", *STOCK} - preprocessing.keys()
    assert not others & program.keys()
    (update,) = program["XlaSparseDenseMatmulGradWithAdagradAndStaticBufferSize"]
    # 20 rows on 32 SparseCores, 8 on each; 64 minibatches of 32 shards on 4 of them.
    assert [tuple(t.shape) for t in update.outputs] == [(32, 8)] * 2
    assert update.inputs[0].shape == (4 * 64 * 32,)
    # The table and its accumulators; those of the pending update, and that it is there.
    assert len(program["AssignVariableOp"]) == (2 + 7 + 1 if pipelined else 2)


# 8 columns; a rule has its rate and two numbers of its own.
# The op's valency is a multiple of 8.
VALENCY, WEIGHTS = 2 * custom_models.VALENCY, custom_models.WEIGHTS
STATE: list[list[int]] = [[1, 8], [1, 8], [1, 8]]
# Numbers have any shape: TPUs pass them as [1, 8], the software TPU as scalars.
RULE: list[list[int] | None] = [[1, 8], *STATE, None, None, None, *STATE]
# All samples of a replica at once, as TensorFlow's kernels call a combiner.
VECTORS: list[list[int]] = [[4], [4, VALENCY, 8], [4, WEIGHTS]]
SIZES = {"max_valency": VALENCY, "num_weights": WEIGHTS}
VJPS = {
    "combiner_table_vjp_computation": [*VECTORS, [4, 8], [4, VALENCY, 8]],
    "combiner_weights_vjp_computation": [*VECTORS, [4, 8], [4, WEIGHTS]],
}
# By op how many there are, its attributes, and the shapes of its functions, in and out.
CUSTOM_OPS: dict[str, tuple[int, dict[str, Any], dict[str, Any]]] = {
    "WithStaticBufferSize": (1, {"table_name": b"films", "input_size": 4}, {}),
    "CustomCombinerOnTcWithCsrInput": (
        2,
        {**SIZES, "input_size": 4},
        {"combiner_computation": [*VECTORS, [4, 8]]},
    ),
    "GradWithCsrInput": (
        1,
        {"table_name": b"films", "N": 3, "M": 3},
        {"custom_computation": RULE},
    ),
    "CustomCombinerOnTcGradWithAdagradAndCsrInput": (
        1,
        {**SIZES, "table_name": b"users"},
        VJPS,
    ),
    "CustomCombinerOnTcGradWithCsrInput": (
        1,
        {**SIZES, "table_name": b"both", "N": 3, "M": 3},
        {**VJPS, "optimizer_custom_computation": RULE},
    ),
}


def test_the_ops_of_functions_of_the_users(
    strategy: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A rule, a combiner, and both: ops of their own, the functions as attributes."""
    monkeypatch.setenv("TPU_EMBEDDING_HOST_OPS", "library")
    embedding = custom_models.make(strategy)
    embedding.build()

    def step(_: tf.Tensor) -> Any:
        activations, preserved = embedding(*custom_models.batch(0))
        embedding.apply_gradients(activations, preserved)
        return activations

    program, outside = program_of(strategy, step)
    form = "XlaSparseDenseMatmul"
    found = {kind for kind in program.keys() - outside if kind.startswith(form)}
    assert found == {form + kind for kind in CUSTOM_OPS}
    for kind, (count, attributes, functions) in CUSTOM_OPS.items():
        ops = program[form + kind]
        assert len(ops) == count
        for op in ops:
            assert {name: op.get_attr(name) for name in attributes} == attributes
            for name, shapes in functions.items():
                function = op.graph._get_function(op.get_attr(name).name)
                signature = function.function_type
                specs = [*signature.flat_inputs, *signature.flat_outputs]
                ranked = [
                    spec.shape if spec.shape.rank is not None else None
                    for spec in specs
                ]
                assert ranked == shapes


def test_several_cores_for_each_replica_are_refused() -> None:
    assignment = tf.tpu.experimental.DeviceAssignment.build(
        TOPOLOGY, computation_shape=[1, 1, 1, 2], num_replicas=4
    )
    strategy = tf.distribute.TPUStrategy(
        Described("V2", CORES), experimental_device_assignment=assignment
    )
    with pytest.raises(NotImplementedError, match=r"has 2 TPU cores, .* exactly one"):
        make(strategy)


@pytest.mark.usefixtures("strategy")
def test_the_keras_layer() -> None:
    """Two calls in one program are two lookups, their gradients two updates."""
    tpu = tf.distribute.TPUStrategy(Described("V2", CORES, local=True))
    films = te.TableConfig(20, 2, name="films", combiner="sum")
    with tpu.scope():
        layer = TPUEmbedding(te.FeatureConfig(films), te.Adagrad(1.0), batch_size=32)
        layer.build()
    (virtual,) = layer.trainable_variables

    def step(ids: tf.Tensor) -> tf.Tensor:
        with tf.GradientTape() as tape:
            loss = tf.reduce_sum(layer(ids)) + tf.reduce_sum(layer(ids))
        tape.gradient(loss, virtual)
        return loss

    program, outside = program_of(tpu, step)
    for kind in (
        "XlaSparseDenseMatmulWithStaticBufferSize",
        "XlaSparseDenseMatmulGradWithAdagradAndStaticBufferSize",
    ):
        assert len(program[kind]) == 2
        assert kind not in outside
    assert "TpuEmbeddingPartition" in outside


@pytest.mark.usefixtures("strategy")
def test_a_queue_inside_of_a_program() -> None:
    """What the host does to a queue is ordered by its handles, in functions of its own.

    TensorFlow's passes read and write variables around a whole program, and merge
    equal constants of all parts on the host. `make check-tpu` runs those passes.
    """
    tpu = tf.distribute.TPUStrategy(Described("V2", CORES, local=True))
    with tpu.scope():
        table = te.TableConfig(8, 8, name="films")
        embedding = te.TPUEmbedding(
            te.FeatureConfig(table, output_shape=[8]), te.SGD(0.1)
        )
    embedding.build()

    def step(ids: tf.Tensor) -> tf.Tensor:
        return train_on(embedding, ids, tf.identity)

    program, _ = program_of(tpu, step)
    calls = [
        op
        for kind in ("PartitionedCall", "StatefulPartitionedCall")
        for op in program.get(kind, ())
        if any(t.dtype == tf.resource for t in op.inputs)
    ]
    assert len(calls) == 4  # Enqueue, dequeue, what owes gradients, settle.
    handles = {t.ref() for op in calls for t in op.inputs if t.dtype == tf.resource}
    assert len(handles) == 2  # The batches and the mutex.
    for op in calls:
        assert "_xla_outside_compilation" in op.node_def.attr
        function = op.graph._get_function(op.get_attr("f").name).cached_definition
        assert function.attr["_noinline"].b
        nodes = {node.op for node in function.node_def}
        assert "LookupTableFindV2" in nodes
        assert not nodes & {"AssignVariableOp", "ResourceScatterUpdate"}


@pytest.mark.usefixtures("strategy")
@pytest.mark.parametrize("minibatching", [False, True])
def test_no_op_stays_on_the_host_without_a_kernel_there(
    minibatching: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """TensorFlow's own passes say what runs where; its CPU has no kernel for a copy."""
    monkeypatch.setenv("TPU_EMBEDDING_HOST_OPS", "library")
    tpu = tf.distribute.TPUStrategy(Described("V2", CORES, local=True))
    embedding = make(
        tpu,
        sparse_core_embedding_config=te.SparseCoreEmbeddingConfig(
            minibatching=minibatching
        ),
    )
    embedding.build()

    def step(ids: tf.Tensor) -> tf.Tensor:
        activations = train_on(embedding, ids, tf.identity)
        return tf.reduce_sum(activations)

    @tf.function(autograph=False)
    def train(ids: tf.Tensor) -> Any:
        return tpu.run(step, (ids,))

    module = tf.mlir.experimental.convert_function(
        train.get_concrete_function(tf.TensorSpec([8], tf.int64)),
        pass_pipeline="func.func(tf-executor-graph-pruning)",
    )
    entry = re.search(r"func\.func @(\w+)\(", module)
    assert entry is not None
    module = module.replace(f"@{entry[1]}(", "@main(", 1)
    devices = ["CPU:0", "TPU_SYSTEM:0", *(f"TPU:{i}" for i in range(4))]
    names = ", ".join(f'"/job:localhost/replica:0/task:0/device:{d}"' for d in devices)
    module = module.replace(
        "module attributes {", f"module attributes {{tf.devices = {{{names}}}, ", 1
    )
    bridged = tf.mlir.experimental.run_pass_pipeline(
        module,
        "tf-replicated-clustering-bridge-v2,"
        "func.func(tf-extract-tpu-copy-with-dynamic-shape-op)",
    )
    assert "TPU_REPLICATED_HOST_0" in bridged
    copies = bridged.split('"tf.TPUCopyWithDynamicShape"')
    assert len(copies) == (1 if minibatching else 2)
    if not minibatching:  # It stands in a launch on the TPU.
        launch = copies[0].rsplit('"tf_device.launch"', 1)[1]
        assert "TPU_REPLICATED_CORE_0" in launch


@pytest.mark.parametrize("pipelined", [False, True])
def test_an_update_needs_the_lookup(strategy: Any, pipelined: bool) -> None:
    """Else libtpu writes to a copy of the table, here for gradients of no lookup."""
    embedding = make(strategy, pipeline_execution_with_tensor_core=pipelined)
    embedding.build()

    def step(ids: tf.Tensor) -> tf.Tensor:
        return train_on(embedding, ids, tf.ones([8, 2]))

    program, _ = program_of(strategy, step)
    (lookup,) = program["XlaSparseDenseMatmulWithStaticBufferSize"]
    (update,) = program["XlaSparseDenseMatmulGradWithAdagradAndStaticBufferSize"]
    needed, left = set(), [update]
    while left:  # Through data only: XLA drops control inputs.
        for tensor in left.pop().inputs:
            if tensor.op not in needed:
                needed.add(tensor.op)
                left.append(tensor.op)
    assert lookup in needed
