"""Each class on each engine: the reference's numbers, one checkpoint, one queue."""

from __future__ import annotations

import gc
import itertools
import os
import pathlib
from typing import Any

import numpy as np
import pytest
import tensorflow as tf
from cpu_engines import EACH_ENGINE
from everywhere import histories
from everywhere.twins import CLASSES, make_twin, place, strategy_of
from replica_values import of_replicas

import tpu_embedding as te
from tpu_embedding.testing import SoftwareTPUStrategy

EVERY_CELL = "TPU_EMBEDDING_TEST_EVERY_CELL"  # As `make test-everywhere` sets it.
second_tier = pytest.mark.second_tier
# (engine, devices, pipelined): every engine, and one, two and four devices.
SYSTEMS: list[Any] = [
    ("host", 2, True),
    pytest.param("portable", 1, False, marks=second_tier),
    pytest.param("v2", 2, True, marks=second_tier),
    ("v4", 1, False),
    ("v5p", 1, False),
    ("v6e", 2, True),
    pytest.param("7x", 4, False, marks=second_tier),
]
if os.environ.get(EVERY_CELL) == "1":
    engines = ["host", "portable", "v2", "v4", "v5p", "v6e", "7x"]
    SYSTEMS = [
        system
        for system in itertools.product(engines, [1, 2, 4], [False, True])
        if system[0] != "portable" or system[1:] == (1, False)
    ]


@pytest.mark.parametrize(("engine", "devices", "pipelined"), SYSTEMS)
@pytest.mark.parametrize("name", CLASSES)
def test_numbers(
    name: str,
    engine: str,
    devices: int,
    pipelined: bool,
    rng: np.random.Generator,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    place(engine, monkeypatch)
    options = {"pipeline_execution_with_tensor_core": pipelined}
    twin = make_twin(name, engine, devices, **options)
    twin.run(rng, 3, without=["ragged"])


@pytest.mark.parametrize("target", ["v4", "v6e", "host"])
def test_a_checkpoint_of_one_class_restores_into_another(
    target: str,
    rng: np.random.Generator,
    tmp_path: pathlib.Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """From TPUEmbedding on a SparseCore to TPUEmbeddingV2 anywhere, slots included."""
    place("v6e", monkeypatch)
    twin = make_twin("TPUEmbedding", "v6e", 1)
    twin.run(rng, 1)
    path = te.checkpoint.save(twin.embedding, str(tmp_path / "saved"))
    place(target, monkeypatch)
    other = make_twin("TPUEmbeddingV2", target, 1)
    batch = other.draw(rng)
    other.strategy.run(
        lambda features: other.embedding.embedding_lookup(features)[0],
        (other.distribute(batch.values),),
    )
    te.checkpoint.restore(other.embedding, path)
    expected = {key.name: value for key, value in twin.embedding.variables.items()}
    for key, arrays in other.embedding.variables.items():
        for array, value in arrays.items():
            np.testing.assert_array_equal(value, expected[key.name][array])


def step_of(embedding: Any, strategy: Any) -> Any:
    """A step of one class: gradients of 1, summed over the replicas, a rate of 1."""

    def of_queue(ids: tf.Tensor) -> None:
        embedding.apply_gradients(tf.ones_like(embedding.dequeue()))

    def of_lookups(ids: tf.Tensor) -> None:
        activations, preserved = embedding(ids)
        embedding.apply_gradients(tf.ones_like(activations), preserved)

    def of_variables(ids: tf.Tensor) -> None:
        (variable,) = embedding.embedding_tables.values()
        with tf.GradientTape() as tape:
            loss = tf.reduce_sum(embedding(ids))
        gradient = tf.convert_to_tensor(tape.gradient(loss, variable))
        context: Any = tf.distribute.get_replica_context()
        variable.assign_sub(context.all_reduce("sum", gradient))

    replica_step: Any = {
        te.TPUEmbedding: of_queue,
        te.TPUEmbeddingV2: of_lookups,
        te.TPUEmbeddingV0: of_variables,
    }[type(embedding)]

    def step(ids: list[int]) -> None:
        split = of_replicas(
            strategy, [tf.constant(ids)] * strategy.num_replicas_in_sync
        )
        if replica_step is of_queue:
            embedding.enqueue(split)
        tf.function(lambda ids: strategy.run(replica_step, (ids,)))(split)

    return step


@pytest.mark.parametrize(
    ("name", "engine"),
    [
        ("TPUEmbeddingV0", "host"),
        ("TPUEmbeddingV0", "v4"),
        ("TPUEmbeddingV0", "v6e"),
        ("TPUEmbedding", "v4"),
        ("TPUEmbeddingV2", "7x"),
    ],
)
def test_an_export_after_a_refused_batch(
    name: str, engine: str, tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    place(engine, monkeypatch)
    strategy = strategy_of(engine, 2)
    with strategy.scope():
        table = te.TableConfig(4, 4, te.RowIdInitializer(), combiner="sum", name="t")
        feature = te.FeatureConfig(table, name="film", output_shape=[4])
        embedding = getattr(te, name)(feature, te.SGD(1.0))
        embedding.build()
    step = step_of(embedding, strategy)
    with pytest.raises(tf.errors.InvalidArgumentError):
        step([1, 9, 2, 2])
    step([1, 1, 2, 2])
    te.serving.export(embedding, tmp_path / "served", signatures=["dense"])
    served = tf.saved_model.load(tmp_path / "served").signatures["dense"]
    (rows,) = served(tf.range(4, dtype=tf.int64)).values()
    assert rows[:, 0].numpy().tolist() == [0, 1 - 4, 2 - 4, 3]


@pytest.mark.parametrize(
    "engine", ["host", pytest.param("v4", marks=second_tier), "v5p"]
)
@pytest.mark.parametrize("name", CLASSES)
def test_no_step_stays_in_memory(
    name: str, engine: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Graphs of traced steps are released with their embedding."""
    place(engine, monkeypatch)
    options: dict[str, Any] = {"pipeline_execution_with_tensor_core": True}
    if engine == "v5p":  # Then `prepare`, too, sums over the replicas.
        options["sparse_core_embedding_config"] = te.SparseCoreEmbeddingConfig(
            minibatching=True
        )

    def graphs_after_a_step() -> int:
        strategy = strategy_of(engine, 2)
        with strategy.scope():
            feature = te.FeatureConfig(te.TableConfig(4, 4), output_shape=[4])
            embedding = getattr(te, name)(feature, te.SGD(1.0), **options)
        embedding.build()
        step_of(embedding, strategy)([1, 1, 2, 2])
        del embedding
        gc.collect()
        return sum(isinstance(each, tf.Graph) for each in gc.get_objects())

    before = graphs_after_a_step()
    assert graphs_after_a_step() == before


def test_random_histories(seed: int) -> None:
    """A few of `make fuzz-histories`."""
    assert histories.run(2, seed, "host,v6e", calls=5)["train"] >= 2


CALLS: dict[str, tuple[str, ...]] = {
    "no batch is enqueued": ("dequeue",),
    "was not dequeued": ("train", "apply"),
    "enqueued with training=False": ("evaluate", "dequeue", "apply"),
    "once per": ("train", "dequeue", "apply", "apply"),
    "still owes its gradients": ("train", "train", "dequeue", "dequeue"),
}


@pytest.mark.parametrize("inside", [False, True], ids=["", "in one run"])
@pytest.mark.parametrize("words", CALLS)
def test_wrong_orders_on_sparse_cores(words: str, inside: bool) -> None:
    """Each call in a program of its own, or all in one."""
    twin = make_twin("TPUEmbedding", "v6e", 1)
    strategy, embedding = twin.strategy, twin.embedding
    embedding.build(per_replica_batch_size=2)
    before = _first_table(embedding)
    batch: dict[str, Any] = {
        "dense2": tf.constant([[1, 2], [3, 4]]),
        "ragged": tf.ragged.constant([[1], [2]]),
        "sparse_sequence": tf.sparse.from_dense([[1, 2], [0, 3]]),
    }
    shapes = {"dense2": [2, 3], "ragged": [2, 3], "sparse_sequence": [2, 3, 3]}
    gradients = {name: tf.zeros(shape) for name, shape in shapes.items()}
    calls = {
        "dequeue": lambda *_: embedding.dequeue(),
        "apply": lambda *_: embedding.apply_gradients(gradients),
        "train": embedding.enqueue,
        "evaluate": lambda ids: embedding.enqueue(ids, training=False),
    }

    def run() -> None:
        if inside:
            names = CALLS[words]
            strategy.run(lambda ids: [calls[name](ids) for name in names][:0], (batch,))
            return
        for name in CALLS[words]:
            if name in ("train", "evaluate"):
                calls[name](batch)
            else:
                strategy.run(lambda name=name: calls[name](None) and None)

    with pytest.raises(tf.errors.FailedPreconditionError, match=words):
        run()
    np.testing.assert_array_equal(_first_table(embedding), before)
    embedding.reset()


def test_wrong_orders_of_version_2_on_tpu_v4() -> None:
    """Its one queue allows one lookup that owes gradients, in its own program."""
    strategy = SoftwareTPUStrategy("v4", 1)
    with strategy.scope():
        table = te.TableConfig(8, 4, name="films")
        embedding = te.TPUEmbeddingV2(
            te.FeatureConfig(table, output_shape=[2]), te.SGD(0.1)
        )
    ids = tf.constant([1, 2])

    def films() -> np.ndarray:
        return embedding.core.checkpoint_rows()["films"]["parameters"].numpy()

    def twice(ids: tf.Tensor) -> tf.Tensor:
        embedding(ids)
        return embedding(ids)[0]

    with pytest.raises(NotImplementedError, match="cannot look up twice"):
        strategy.run(twice, (ids,))
    before = films()
    activations, preserved = strategy.run(embedding.embedding_lookup, (ids,))
    with pytest.raises(tf.errors.FailedPreconditionError, match="in the same strategy"):
        strategy.run(embedding.apply_gradients, (activations, preserved))
    np.testing.assert_array_equal(films(), before)

    def late(ids: tf.Tensor) -> None:
        activations, first = embedding(ids)
        embedding.apply_gradients(activations, first)
        activations, _ = embedding(ids)
        embedding.apply_gradients(activations, first)

    with pytest.raises(tf.errors.FailedPreconditionError, match="before the next look"):
        strategy.run(late, (ids,))
    np.testing.assert_array_equal(films(), before)

    def step(prepared: Any) -> None:
        embedding.apply_gradients(*embedding(prepared))

    # A batch that tf.data prepared is looked up as it is.
    prepared = tf.data.Dataset.from_tensors(ids).map(embedding.preprocess_features)
    strategy.run(step, (next(iter(prepared)),))
    assert not np.array_equal(films(), before)


def _first_table(embedding: Any) -> Any:
    return next(iter(embedding.variables.values()))["parameters"]


@pytest.mark.parametrize("engine", [*EACH_ENGINE, "v4", "v5p"])
def test_a_shorter_ragged_batch_is_no_batch_of_sequences(
    engine: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The rows of a last batch must not be cut into positions, to fill the shape."""
    place(engine, monkeypatch)
    strategy = strategy_of(engine, 1)
    table = te.TableConfig(16, 8, te.RowIdInitializer(), combiner="sum")
    with strategy.scope():
        embedding = te.TPUEmbedding({"ids": te.FeatureConfig(table)}, te.SGD(1.0))
    embedding.build([tf.TensorShape([8, None])])

    def batch(rows: int) -> dict[str, tf.RaggedTensor]:
        return {"ids": tf.ragged.constant([[1, 2, 3]] * rows, dtype=tf.int32)}

    spec = {"ids": tf.RaggedTensorSpec([None, None], tf.int32)}
    traced = tf.function(
        lambda features: embedding.enqueue(features, training=False),
        input_signature=[spec],
    )
    with pytest.raises(ValueError, match=r"\(8,\) given by build\(\) .* \(4,\)"):
        embedding.enqueue(batch(4), training=False)
    with pytest.raises(
        tf.errors.InvalidArgumentError, match=r"4 rows does not fill .* build\(\)"
    ):
        traced(batch(4))
    traced(batch(8))
    found = strategy.run(tf.function(embedding.dequeue))["ids"]
    np.testing.assert_array_equal(found, np.full([8, 8], 6.0))
