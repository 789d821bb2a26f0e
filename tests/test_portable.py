"""The portable engine: its parts, what no class passes to it, lookups past the queue.

The conformance suite has its numbers, reliability what else it refuses.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import pytest
import tensorflow as tf
from replica_values import mirrored
from steps import train_on
from v2_calls import films

import tpu_embedding as te
from tpu_embedding.distribution import Topology
from tpu_embedding.engines import Call, Engine, EngineOptions, choose
from tpu_embedding.engines.portable.engine import _host_of
from tpu_embedding.inputs import IdBatch, InputKind
from tpu_embedding.layout.output_shapes import OutputShapes
from tpu_embedding.layout.plan import make_plan
from tpu_embedding.lookup.graph_checks import Check, refuse, require, text


def test_the_first_of_many_checks_that_fails_is_named() -> None:
    @tf.function
    def check(holds: tf.Tensor) -> tf.Tensor:
        checks = [
            Check(holds[k], lambda k=k: text(f"Check {k} failed.")) for k in range(9)
        ]
        with tf.control_dependencies(require(checks)):
            return tf.constant(True)

    assert check(tf.ones([9], tf.bool))
    for number in range(9):
        with pytest.raises(tf.errors.InvalidArgumentError) as raised:
            check(tf.range(9) < number)
        assert f"Check {number} failed." in raised.value.message
        assert raised.value.message.count("Check") == 1


@pytest.mark.parametrize("function", [lambda call: call, tf.function])
def test_errors_say_the_message_as_it_is(function: Any) -> None:
    message = """It's "quoted", {0} %s \\n and 7."""

    @function
    def invalid(number: tf.Tensor) -> tf.Tensor:
        check = Check(
            number < 7, lambda: text("""It's "quoted", {0} %s \\n and """, number, ".")
        )
        with tf.control_dependencies(require([check])):
            return number + 1

    @function
    def wrong(code: tf.Tensor) -> tf.Tensor:
        with tf.control_dependencies(refuse(code, ["", "other", message])):
            return code + 1

    assert invalid(tf.constant(6)) == 7
    assert wrong(tf.constant(0)) == 1
    with pytest.raises(tf.errors.InvalidArgumentError) as raised:
        invalid(tf.constant(7))
    assert message in raised.value.message
    with pytest.raises(tf.errors.FailedPreconditionError) as refused:
        wrong(tf.constant(2))
    assert message in refused.value.message


def test_checks_are_made_on_the_cpu_of_the_device() -> None:
    worker = "/job:localhost/replica:0/task:0"
    assert _host_of(f"{worker}/device:GPU:1") == f"{worker}/device:CPU:0"
    assert _host_of(f"{worker}/device:CPU:1") == f"{worker}/device:CPU:1"
    assert _host_of("/device:CPU:0") == "/device:CPU:0"


CALL = Call(replica=0)
# Ways to make a call: the engine and what wraps the call.
MODES: dict[str, tuple[str, Callable[[Any], Any]]] = {
    "portable": ("portable", lambda call: call),
    "portable_graph": ("portable", tf.function),
    "host": ("host", lambda call: call),
}


def make_engine(
    name: str, features: Sequence[te.FeatureConfig], ranks: Sequence[int]
) -> Engine:
    """An engine whose features are f0, f1, ... with outputs of the given ranks."""
    keys = {feature.table: feature.table for feature in features}
    paths = [f"f{index}" for index in range(len(features))]
    plan = make_plan(paths, features, keys, te.Adagrad(0.1))
    shapes = OutputShapes(plan.features)
    for spec, rank in zip(plan.features, ranks, strict=True):
        shapes._ranks[spec.index] = rank
    topology = Topology(
        strategy=tf.distribute.get_strategy(),
        engine=name,
        num_replicas=1,
        device="/device:CPU:0",
    )
    engine_class = choose(topology, plan)
    options = EngineOptions(
        plan=plan,
        topology=topology,
        output_shapes=shapes,
        pipelined=False,
        check_numerics=True,
    )
    layout = engine_class.lay_out(options)
    return engine_class(dataclasses.replace(options, layout=layout))


def id_batch(
    kind: InputKind,
    ids: Any,
    structure: Any = None,
    shape: Any = None,
    weights: Any = None,
    weight_structure: Any = None,
) -> IdBatch:
    """An IdBatch that `to_id_batch` need not be able to make."""
    ids = np.asarray(ids)
    if shape is None:
        shape = [len(structure) - 1] if kind is InputKind.RAGGED else ids.shape
    rank = 2 if kind is InputKind.RAGGED else len(shape)
    return IdBatch(
        kind=kind,
        ids=tf.constant(ids),
        structure=None if structure is None else tf.constant(structure, tf.int64),
        dense_shape=tf.constant(shape, tf.int64) if kind is InputKind.SPARSE else None,
        static_shape=tf.TensorShape([None] * rank),
        weights=None if weights is None else tf.constant(weights, tf.float32),
        weight_structure=(
            None
            if weight_structure is None
            else tf.constant(weight_structure, tf.int64)
        ),
    )


def dense(ids: Any, **fields: Any) -> IdBatch:
    return id_batch(InputKind.DENSE, ids, **fields)


def sparse(indices: Any, shape: Any, ids: Any = None, **fields: Any) -> IdBatch:
    ids = np.zeros(len(indices), np.int64) if ids is None else ids
    return id_batch(InputKind.SPARSE, ids, indices, shape, **fields)


def ragged(splits: Any, ids: Any = None, **fields: Any) -> IdBatch:
    ids = np.zeros(splits[-1] if splits else 0, np.int64) if ids is None else ids
    return id_batch(InputKind.RAGGED, ids, splits, **fields)


def forget_shapes(batch: IdBatch) -> IdBatch:
    """In a graph: the same tensors, of shapes that are known only when it runs."""
    tensors = {}
    for field in ("ids", "structure", "weights", "weight_structure"):
        tensor = getattr(batch, field)
        if tensor is not None:
            shape = [None] * tensor.shape.rank
            tensors[field] = tf.raw_ops.PlaceholderWithDefault(
                input=tensor, shape=shape
            )
    return dataclasses.replace(batch, **tensors)


@dataclasses.dataclass(frozen=True)
class Refused:
    """Input that is refused, and the words that it is refused with."""

    name: str
    batch: IdBatch
    message: str
    feature: dict[str, Any] = dataclasses.field(default_factory=dict)


OUTPUT_4_3 = {"output_shape": (4, 3)}
REFUSED = [
    Refused(
        "id",
        dense([3, 9, -1]),
        "Feature f0, table films: sample 1 has id 9, but ids must be in [0, 8). Fix "
        'the input, or set invalid_ids="drop" or "mod" where the table or the '
        "embedding is configured.",
    ),
    Refused(
        "id_cut",
        ragged([0, 1, 4], [1, 1, 1, 11]),
        "sample 1 has id 11,",
        {"max_sequence_length": 2},
    ),
    Refused(
        "id_cut_by_output_shape",
        ragged([0, 0, 4], [1, 1, 1, 11]),
        "sample 1 has id 11,",
        {"output_shape": (2, 3)},
    ),
    Refused(
        "ids_cut",
        dense([[97, 98, 99]]),
        "sample 0 has id 97,",
        {"max_sequence_length": 1},
    ),
    Refused(
        "index_far",
        sparse([[0, 0, 0], [2**62, 2**62, 0]], [2, 8, 2]),
        "Feature f0: sparse entry 1 has an index outside of dense_shape (2, 8, 2).",
    ),
    Refused(
        "column_negative",
        sparse([[0, -1]], [2, 3]),
        "Feature f0: sparse entry 0 has an index outside of dense_shape (2, 3).",
    ),
    Refused(
        "sequence_too_long",
        dense([[1], [2]]),
        "Feature f0: the shape (2, 1099511627776) has a negative axis or more than",
        {"max_sequence_length": 2**40},
    ),
    Refused("splits_empty", ragged([]), "Feature f0: row_splits must start at 0."),
    Refused(
        "axis_negative",
        sparse(np.zeros([0, 2]), [-1, 3]),
        "Feature f0: the shape (None,) has a negative axis or more than 16777216 "
        "samples.",
    ),
    Refused(
        "axes_huge", sparse(np.zeros([0, 3]), [2**31, 2**31, 3]), "the shape (2147"
    ),
    Refused(
        "shape_overflows",
        sparse(np.zeros([0, 3]), [2**32, 2**32, 2]),
        "Feature f0: the shape (4294967296, 4294967296) has a negative axis or more",
    ),
    Refused(
        "index_count",
        sparse([[0, 1], [0, 2]], [2, 3], [1, 1, 1]),
        "Feature f0: a sparse input of 3 values and rank 2 has 4 numbers in its "
        "indices; it needs rank >= 2 and one index of that rank for each value.",
    ),
    Refused(
        "rows_do_not_fill",
        ragged([0, 0, 0, 0, 0, 0]),
        "Feature f0: a ragged input of 5 rows does not fill the output shape (4, 3) "
        "that FeatureConfig.output_shape declares.",
        OUTPUT_4_3,
    ),
    Refused(
        "rows_past_the_axis",
        ragged([0, 0, 0, 0, 0]),
        "a ragged input of 4 rows does not fill the output shape (3,) that ",
        {"output_shape": (3,)},
    ),
    Refused(
        "rows_past_no_axis",
        ragged([0, 0, 0, 0, 0]),
        "a ragged input of 4 rows does not fill the output shape (0,) that ",
        {"output_shape": (0,)},
    ),
    Refused("no_rows", ragged([0]), "a ragged input of 0 rows does not", OUTPUT_4_3),
    Refused(
        "rows_are_not_the_axis",
        ragged([0, 0, 0]),
        "a ragged input of 2 rows does not fill the output shape (4,) that ",
        {"output_shape": (4,)},
    ),
    Refused(
        "rows_do_not_fill_open",
        ragged([0, 0, 0, 0]),
        "a ragged input of 3 rows does not fill the output shape (None, 2) that",
        {"output_shape": (None, 2)},
    ),
    Refused(
        "other_shape",
        dense(np.zeros([4, 2, 1], np.int64)),
        "Feature f0: the input gives output shape (4, 2), not (4, 3) that "
        "FeatureConfig.output_shape declares.",
        OUTPUT_4_3,
    ),
    Refused(
        "other_rows",
        sparse(np.zeros([0, 2]), [5, 2]),
        "the input gives output shape (5,), not (4,) that ",
        {"output_shape": (4,)},
    ),
]


def engine_for(name: str, refused: Refused) -> Engine:
    feature = te.FeatureConfig(films(), **refused.feature)
    rank = max(len(refused.batch.static_shape) - 1, 1)
    return make_engine(name, [feature], [rank])


def enqueue_on(engine: Engine, batch: list[IdBatch]) -> None:
    engine.queue.enqueue(engine.prepare([batch], CALL), CALL)


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("refused", REFUSED, ids=lambda refused: refused.name)
def test_refuses_input(refused: Refused, mode: str) -> None:
    name, function = MODES[mode]
    engine = engine_for(name, refused)

    @function
    def enqueue() -> None:
        batch = refused.batch
        if not tf.executing_eagerly():
            batch = forget_shapes(batch)
        enqueue_on(engine, [batch])

    with pytest.raises(tf.errors.InvalidArgumentError) as raised:
        enqueue()
    assert refused.message in raised.value.message
    with pytest.raises(tf.errors.FailedPreconditionError, match="no batch is enqueued"):
        engine.queue.dequeue(CALL)


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize(
    "batch",
    [
        [dense([1, 8]), ragged([2, 0], [9])],
        [sparse([[0, 5]], [2, 2]), ragged([2, 0], [9])],
    ],
    ids=["dense", "sparse"],  # The second is checked by itself in graphs.
)
def test_names_the_first_bad_feature(batch: list[IdBatch], mode: str) -> None:
    name, function = MODES[mode]
    table = films()
    features = [te.FeatureConfig(table), te.FeatureConfig(table)]
    engine = make_engine(name, features, (1, 1))

    @function
    def enqueue() -> None:
        given = batch if tf.executing_eagerly() else list(map(forget_shapes, batch))
        enqueue_on(engine, given)

    with pytest.raises(tf.errors.InvalidArgumentError, match="Feature f0"):
        enqueue()


@pytest.mark.parametrize("name", ["host", "portable"])
def test_lookups_past_the_queue(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Several wait for their gradients, in any order; each takes them once."""
    monkeypatch.setenv("TPU_EMBEDDING_ENGINE", name)
    feature = te.FeatureConfig(films())
    embedding = te.TPUEmbedding(feature, te.SGD(1.0), check_numerics=True)
    core, gradients = embedding.core, [tf.ones([1, 2])]
    waiting = [core.look_up([tf.constant([row])])[1] for row in (1, 2, 3)]
    for looked_up in (waiting[1], waiting[0]):
        with pytest.raises(tf.errors.InvalidArgumentError, match="nan"):
            core.update(looked_up, [tf.fill([1, 2], np.nan)])  # It may come again.
        core.update(looked_up, gradients)
    with pytest.raises(tf.errors.FailedPreconditionError, match="applied already"):
        core.update(waiting[0], gradients)
    embedding.reset()
    with pytest.raises(tf.errors.FailedPreconditionError, match="step that was disc"):
        core.update(waiting[2], gradients)
    _, looked_up = core.look_up([tf.constant([4])])
    core.update(looked_up, gradients)
    (table,) = embedding.embedding_tables.values()
    assert table.numpy()[:5, 0].tolist() == [0, 0, 1, 3, 3]


def test_a_lookup_is_used_once_within_one_graph(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("TPU_EMBEDDING_ENGINE", "portable")
    embedding = te.TPUEmbedding(te.FeatureConfig(films()), te.SGD(1.0))
    embedding.build()
    (table,) = embedding.embedding_tables.values()
    before = table.numpy()

    @tf.function
    def step() -> None:
        _, looked_up = embedding.core.look_up([tf.constant([1])])
        for _ in range(2):
            embedding.core.update(looked_up, [tf.ones([1, 2])])

    with pytest.raises(tf.errors.FailedPreconditionError, match="were applied already"):
        step()
    np.testing.assert_array_equal(table, before)  # Never traced to its end.


def test_steps_in_a_loop_of_tensorflow(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TPU_EMBEDDING_ENGINE", "portable")
    films = te.TableConfig(2, 1, te.RowIdInitializer(), combiner="sum", name="films")
    # The n-th update has the learning rate 2^n.
    rate = te.SGD(lambda step: 2.0 ** tf.cast(step, tf.float32))
    embedding = te.TPUEmbedding(te.FeatureConfig(films), rate)
    embedding.build()

    @tf.function
    def steps() -> None:
        for _ in tf.range(4):
            train_on(embedding, tf.constant([0, 1]))

    steps()
    assert embedding.embedding_tables[films].numpy()[:, 0].tolist() == [-15, -14]


@pytest.mark.parametrize("made", [te.TPUEmbedding, te.TPUEmbeddingV2])
def test_what_it_lacks_is_refused_at_construction(
    made: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TPU_EMBEDDING_ENGINE", "portable")
    feature = te.FeatureConfig(te.TableConfig(2, 1, name="table"))
    way_out = "The host engine supports this, but needs the compiled library"
    message = "support `pipeline_execution_with_tensor_core=True`. " + way_out
    with pytest.raises(NotImplementedError, match=message):
        made(feature, te.SGD(1.0), True)
    strategy = mirrored(2)
    with (
        strategy.scope(),
        pytest.raises(NotImplementedError, match="support 2 replicas. " + way_out),
    ):
        made(feature, te.SGD(1.0))
    with pytest.raises(NotImplementedError, match="portable engine has no telemetry"):
        te.Telemetry(made(feature, te.SGD(1.0)))
