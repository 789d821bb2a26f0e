"""The portable engine: its parts, its input, and steps in any order.

The host engine is the oracle: after each call both must be in the same state. The
conformance suite compares their numbers.
"""

from __future__ import annotations

import dataclasses
import functools
from typing import Any

import numpy as np
import pytest
import tensorflow as tf
from engine_calls import (
    MODES,
    Mixed,
    assert_same,
    assert_same_variables,
    films,
    make_engine,
    outcome,
)
from replica_values import mirrored
from steps import train_on

import tpu_embedding as te
from tpu_embedding.engines import Call, Engine
from tpu_embedding.engines.portable.engine import _host_of
from tpu_embedding.inputs import IdBatch, InputKind
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
    Refused("id_int32", dense(np.int32([3, -9])), "sample 1 has id -9, but"),
    Refused("id_of_row", dense([[1, 2], [3, 2**40]]), "sample 1 has id 1099511627776,"),
    Refused("id_sparse", sparse([[2, 5]], [3, 9], [8]), "sample 2 has id 8,"),
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
    Refused("splits_empty", ragged([]), "Feature f0: row_splits must start at 0."),
    Refused("splits_start", ragged([1, 2]), "Feature f0: row_splits must start at 0."),
    Refused(
        "splits_fall",
        ragged([0, 3, 1, 3]),
        "Feature f0: row_splits must not decrease, but row 1 goes from 3 to 1.",
    ),
    Refused(
        "splits_end",
        ragged([0, 2], [1, 1, 1]),
        "Feature f0: row_splits end at 2 but there are 3 ids.",
    ),
    Refused(
        "index_outside",
        sparse([[0, 0], [1, 3]], [2, 3]),
        "Feature f0: sparse entry 1 has an index outside of dense_shape (2, 3).",
    ),
    Refused("index_negative", sparse([[0, -1]], [2, 3]), "sparse entry 0 has an index"),
    Refused(
        "index_order",
        sparse([[0, 1], [1, 0], [0, 2], [7, 7]], [2, 3]),
        "Feature f0: sparse entry 2 is out of order or occurs twice. Call "
        "tf.sparse.reorder first and keep one entry per index.",
    ),
    Refused("index_twice", sparse([[0, 1], [0, 1]], [2, 3]), "sparse entry 1 is out"),
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
        "shape_too_large",
        sparse(np.zeros([0, 2]), [2**40, 2]),
        "Feature f0: the shape (1099511627776,) has a negative axis or more than "
        "16777216 samples.",
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
        "weights_count",
        dense([1, 2, 3], weights=[1, 2]),
        "Feature f0: 2 weights for 3 ids. Pass one weight for each id.",
    ),
    Refused(
        "weights_indices",
        sparse([[0, 1]], [2, 3], weights=[1], weight_structure=[[0, 2]]),
        "Feature f0: the weights must have the indices of the ids. Build them with "
        "`with_values`.",
    ),
    Refused(
        "weights_splits",
        ragged([0, 1, 2], weights=[1, 1], weight_structure=[0, 2]),
        "Feature f0: the weights must have the row_splits of the ids.",
    ),
    Refused(
        "weights_not_finite",
        dense([1, 2], weights=[1, np.inf]),
        "Feature f0: sample 1 has a weight that is not finite (inf).",
    ),
    Refused(
        "rows_do_not_fill",
        ragged([0, 0, 0, 0, 0, 0]),
        "Feature f0: a ragged input of 5 rows does not fill the output shape (4, 3) "
        "that FeatureConfig.output_shape declares.",
        OUTPUT_4_3,
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


ACCEPTED = {
    "empty": (dense(np.zeros([0, 3], np.int64)), {}, {}),
    "no_columns": (dense(np.zeros([3, 0], np.int64)), {}, {}),
    "rank_3": (dense(np.arange(8).reshape(2, 2, 2)), {}, {"output_shape": (2, 2)}),
    "sparse_empty_rows": (sparse([[1, 0], [1, 2], [3, 1]], [5, 3], [1, 2, 3]), {}, {}),
    "sparse_rank_3": (
        sparse([[0, 1, 0], [1, 0, 5]], [2, 2, 6], [3, 4]),
        {},
        {"output_shape": (2, 2)},
    ),
    "sequence": (
        ragged([0, 0, 3, 5], [1, 2, 3, 4, 5], weights=[1, -2, 3, 0, 5]),
        {},
        {"max_sequence_length": 2},
    ),
    "sequence_drop": (
        ragged([0, 3], [1, 99, 3]),
        {"invalid_ids": "drop"},
        {"max_sequence_length": 2},
    ),
    "sparse_sequence": (
        sparse([[0, 1], [1, 0], [1, 2]], [2, 3], [1, 2, 3]),
        {},
        {"max_sequence_length": 3},
    ),
    "drop": (ragged([0, 2, 3], [-1, 3, 8]), {"invalid_ids": "drop"}, {}),
    "mod": (ragged([0, 2, 3], [-1, 3, 8]), {"invalid_ids": "mod"}, {}),
    "rows_of_positions": (
        ragged([0, 1, 4], [1, 2, 3, 4]),
        {},
        {"output_shape": (2, 2)},
    ),
    "rows_fill": (ragged([0, 1, 4, 4, 4], [1, 2, 3, 4]), {}, {"output_shape": (2, 2)}),
    "rows_fill_open": (
        ragged([0, 1, 4, 4, 4], [1, 2, 3, 4]),
        {},
        {"output_shape": (None, 2)},
    ),
    "divisor_0": (ragged([0, 2, 3], [1, 2, 3], weights=[2, -2, 0]), {}, {}),
}


@pytest.mark.parametrize("combiner", ["sum", "mean", "sqrtn"])
@pytest.mark.parametrize("case", ACCEPTED)
def test_looks_up_as_the_host(case: str, combiner: str) -> None:
    # Each third case is traced, with another combiner for the case that follows.
    index = list(ACCEPTED).index(case) + ["sum", "mean", "sqrtn"].index(combiner)
    function: Any = tf.function if index % 3 == 0 else lambda call: call
    batch, table, arguments = ACCEPTED[case]
    results = []
    for name in ("portable", "host"):
        feature = te.FeatureConfig(films(combiner=combiner, **table), **arguments)
        rank = max(len(batch.static_shape) - 1, 1)
        engine = make_engine(name, [feature], [rank])

        def step(engine: Engine = engine) -> list[tf.Tensor]:
            here = batch if tf.executing_eagerly() else forget_shapes(batch)
            enqueue_on(engine, [here])
            (activation,) = engine.queue.dequeue(CALL)
            engine.queue.apply_gradients([tf.cos(activation)], CALL)
            return [activation]

        results.append((engine, function(step)()))
    (portable, own), (host, other) = results
    assert own[0].shape == other[0].shape
    assert_same(own, other, case)
    assert_same_variables(portable, host, case)


class Calls:
    """The calls of one replica on an engine, its queue, and lookups past the queue."""

    def __init__(self, engine: Engine) -> None:
        self.engine, self.queue = engine, engine.queue
        self.looked_up: list[Any] = []

    def enqueue(
        self,
        seed: int = 0,
        *,
        training: bool = True,
        bad: bool = False,
    ) -> None:
        batch = Mixed.batch(seed, bad=bad)
        call = Call(replica=0, training=training)
        self.queue.enqueue(self.engine.prepare([batch], call), call)

    def dequeue(self) -> list[tf.Tensor]:
        return self.queue.dequeue(CALL)

    def apply(self, seed: int = 0, *, bad: bool = False) -> None:
        self.queue.apply_gradients(Mixed.gradients(seed, bad=bad), CALL)

    def look_up(self, seed: int, *, bad: bool = False) -> list[tf.Tensor]:
        (prepared,) = self.engine.prepare([Mixed.batch(seed, bad=bad)], CALL)
        activations, looked_up = self.engine.lookup(prepared, CALL)
        self.looked_up.append(looked_up)
        return activations

    def update(self, which: float, seed: int, *, bad: bool = False) -> None:
        if self.looked_up:
            looked_up = self.looked_up[int(which * len(self.looked_up))]
            self.engine.update(looked_up, Mixed.gradients(seed, bad=bad), CALL)


def random_call(rng: np.random.Generator, kinds: str) -> Any:
    """One call, by name and as a function of `Calls`."""
    kind = kinds[rng.integers(len(kinds))]
    training, bad = bool(rng.random() < 0.8), bool(rng.random() < 0.08)
    seed, which = int(rng.integers(1 << 30)), float(rng.random())
    calls: dict[str, Any] = {
        "e": lambda calls: calls.enqueue(seed, training=training, bad=bad),
        "d": lambda calls: calls.dequeue(),
        "a": lambda calls: calls.apply(seed, bad=bad),
        "f": lambda calls: calls.engine.flush(),
        "r": lambda calls: calls.engine.reset(),
        "l": lambda calls: calls.look_up(seed, bad=bad),
        "s": lambda calls: calls.update(which, seed, bad=bad),
    }
    return f"{kind}{'t' * training}{'b' * bad}", calls[kind]


@pytest.mark.parametrize("kinds", ["eedadadadafr", "lsslssfr"])
def test_any_order_of_calls(kinds: str, rng: np.random.Generator) -> None:
    engines = [Calls(Mixed.engine(name)) for name in ("portable", "host")]
    trace = []
    for _ in range(40):
        name, call = random_call(rng, kinds)
        trace.append(name)
        results = [outcome(functools.partial(call, calls)) for calls in engines]
        assert_same(results[0], results[1], trace)
        assert_same_variables(engines[0].engine, engines[1].engine, trace)


def test_a_lookup_is_used_once_within_one_graph() -> None:
    calls, fresh = (Calls(Mixed.engine("portable")) for _ in range(2))

    @tf.function
    def step() -> None:
        calls.look_up(0)
        calls.update(0.0, 0)
        calls.update(0.0, 1)

    with pytest.raises(tf.errors.FailedPreconditionError, match="were applied already"):
        step()
    assert_same_variables(calls.engine, fresh.engine, "never traced to its end")


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
