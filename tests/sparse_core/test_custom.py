"""Rules and combiners that are user functions, on every engine.

No TensorFlow op makes the positions of entries in their samples
(`sorted_pos_ids`), which a CustomCombiner needs, so that there is no oracle for them:
they are checked here by what the combiner makes of them, and in test_preprocessing.py.
"""

from __future__ import annotations

import pathlib
import types
from typing import Any

import numpy as np
import pytest
import tensorflow as tf
from replica_values import mirrored, of_replicas, this_replica
from software_tpu.calls import strategy_of
from sparse_core import custom_models as models
from sparse_core.custom_models import feature
from sparse_core.twins import run

import tpu_embedding as te
from tpu_embedding import checkpoint
from tpu_embedding import keras as keras_layer
from tpu_embedding.engines.sparse_core.ops import functions_of
from tpu_embedding.layout.plan import make_plan

EPSILON = float(np.finfo(np.float32).eps)
# Sums of up to 16 terms, twice, the combiner's three products and the rule.
TOLERANCE = 64 * EPSILON * models.MAX_VALUE
stock = tf.tpu.experimental.embedding
STRATEGIES = {"sparse_core": lambda: strategy_of("v6e", 2), "host": lambda: mirrored(1)}


class Trainer:
    """Steps of all replicas, traced once; their ids are part of the graph."""

    def __init__(self, strategy: Any, embedding: Any) -> None:
        self._strategy, self._embedding = strategy, embedding
        self._train = tf.function(
            lambda given: strategy.run(self._step, (given,)), autograph=False
        )

    def __call__(self, gradients: list[dict[str, np.ndarray]]) -> list[Any]:
        """One step; the activations of each replica."""
        given = {
            name: of_replicas(
                self._strategy, [tf.constant(own[name]) for own in gradients]
            )
            for name in gradients[0]
        }
        local = self._strategy.experimental_local_results
        found = {name: local(value) for name, value in self._train(given).items()}
        return [
            {name: own[replica].numpy() for name, own in found.items()}
            for replica in range(self._strategy.num_replicas_in_sync)
        ]

    def _step(self, gradients: Any) -> Any:
        activations, preserved = self._embedding(*models.batch(this_replica()))
        self._embedding.apply_gradients(gradients, preserved)
        return activations


def assert_near(embedding: Any, paper: models.Paper) -> None:
    found = {
        key.name: {name: np.asarray(value) for name, value in arrays.items()}
        for key, arrays in embedding.variables.items()
    }
    assert {n: set(a) for n, a in found.items()} == {
        n: set(a) for n, a in paper.arrays.items()
    }
    for table, arrays in paper.arrays.items():
        for name, value in arrays.items():
            assert np.abs(value).max() < models.MAX_VALUE
            np.testing.assert_allclose(
                found[table][name], value, atol=TOLERANCE, err_msg=f"{table} {name}"
            )


def draw(rng: np.random.Generator, num_replicas: int) -> list[dict[str, np.ndarray]]:
    dims = {"films": 6, "users": 5, "both": 5}
    return [
        {n: rng.uniform(-0.5, 0.5, (4, d)).astype(np.float32) for n, d in dims.items()}
        for _ in range(num_replicas)
    ]


@pytest.mark.parametrize(
    ("engine", "package", "pipelined"),
    [("sparse_core", te, False), ("sparse_core", te, True), ("host", stock, False)],
    ids=["sparse_core", "pipelined", "host"],
)
def test_steps(
    engine: str,
    package: Any,
    pipelined: bool,
    rng: np.random.Generator,
    tmp_path: pathlib.Path,
) -> None:
    strategy = STRATEGIES[engine]()
    slot_dim = 1 if engine == "host" else 2
    embedding = models.make(
        strategy, package, slot_dim, pipeline_execution_with_tensor_core=pipelined
    )
    paper, trainer = models.Paper(slot_dim), Trainer(strategy, embedding)
    for _ in range(1 if pipelined else 2):  # A pipelined second one sees old rows.
        gradients = draw(rng, strategy.num_replicas_in_sync)
        expected = paper.step(gradients)
        found = trainer(gradients)
        for own, other in zip(found, expected, strict=True):
            for name, value in other.items():
                np.testing.assert_allclose(own[name], value, atol=TOLERANCE)
    assert_near(embedding, paper)
    if pipelined:
        return
    path = tf.train.Checkpoint(embedding=embedding).write(str(tmp_path / "all"))
    other = models.make(strategy, slot_dim=slot_dim)
    tf.train.Checkpoint(embedding=other).read(path).assert_consumed()
    assert_near(other, paper)
    with pytest.raises(NotImplementedError, match=r"'both': .* tf\.train"):
        checkpoint.save(embedding, tmp_path / "own")


def test_a_sample_with_too_many_ids() -> None:
    for engine, make in STRATEGIES.items():
        strategy = make()
        embedding = models.make(strategy)
        embedding.build()
        ids, _ = models.batch(0)
        ids["both"] = tf.ragged.constant([[1], [0, 1, 2, 3, 4], [], []], tf.int64)
        text = r"both, table both: sample 1 has 5 ids, .* at most 4 \(max_valency\)"
        with pytest.raises(tf.errors.InvalidArgumentError, match=text):
            embedding.preprocess_features(ids)
        assert set(embedding.embedding_layouts) == {"films", "users", "both"}, engine


def test_a_combiner_without_weights_sees_empty_samples() -> None:
    combiner = te.CustomCombiner(
        lambda n, vectors: tf.where(n > 0, vectors[0], -tf.ones_like(vectors[0])), 2
    )
    ids = tf.ragged.constant([[], [3, 1]], dtype=tf.int64)
    for make in STRATEGIES.values():
        strategy = make()
        with strategy.scope():
            embedding = te.TPUEmbeddingV2(
                feature(combiner=combiner, initializer=te.RowIdInitializer()),
                te.SGD(1.0),
            )
        embedding.build()
        for found in run(strategy, lambda own=embedding: own(ids)[0]):
            assert found.tolist() == [[-1, -1], [3, 3]]


def test_pipelining_does_not_divide_by_weights_that_are_not_there() -> None:
    combiner = te.CustomCombiner(
        lambda valency, vectors, weights: vectors[0] / weights[0],
        2,
        1,
        tf.constant_initializer(2.0),
        0.5,
    )
    strategy = strategy_of("v6e", 1)
    with strategy.scope():
        embedding = te.TPUEmbeddingV2(
            feature(combiner=combiner, initializer=tf.constant_initializer(1.0)),
            te.SGD(1.0),
            pipeline_execution_with_tensor_core=True,
        )

    def weights() -> float:
        (arrays,) = embedding.variables.values()
        return float(arrays["custom_combiner_variables"][0])

    def step() -> None:
        _, preserved = embedding(tf.constant([[1], [2]]))
        embedding.apply_gradients(tf.ones([2, 2]), preserved)

    strategy.run(step)
    embedding.flush()
    assert weights() == 2.5  # + 0.5 * 2 samples * 2 columns * 1 / 2.0 ** 2
    embedding.flush()
    assert weights() == 2.5


def test_callables_are_called_by_apply_gradients() -> None:
    """Once for two tables, before anything changes, for the update of that step."""
    for pipelined in (False, True):
        v6e = strategy_of("v6e", 1)
        for strategy in (v6e,) if pipelined else (v6e, tf.distribute.get_strategy()):
            scale = tf.Variable(1.0)
            calls = tf.Variable(0.0)

            def hyperparameter(calls=calls, scale=scale) -> tf.Tensor:
                calls.assign_add(1.0)
                return scale.read_value()

            optimizer = te.CustomOptimizer(
                lambda g, t, _, rate, numbers: t - numbers[0] * g,
                hyperparameters=[hyperparameter],
            )
            features = {
                n: te.FeatureConfig(
                    te.TableConfig(8, 2, tf.zeros_initializer(), name=n),
                    output_shape=[2],
                    name=n,
                )
                for n in "ab"
            }
            with strategy.scope():
                embedding = te.TPUEmbeddingV2(
                    features, optimizer, pipeline_execution_with_tensor_core=pipelined
                )

            def step(embedding=embedding) -> None:
                ids = tf.constant([[1], [1]])
                _, preserved = embedding({"a": ids, "b": ids})
                gradient = tf.ones([2, 2])
                embedding.apply_gradients({"a": gradient, "b": gradient}, preserved)

            for value in (1.0, 10.0, 100.0):
                scale.assign(value)
                strategy.run(step)
            embedding.flush()
            assert calls.numpy() == 3.0
            for table in embedding.embedding_tables.values():
                assert np.asarray(table)[1].tolist() == [-222.0, -222.0]


COMBINER = te.CustomCombiner(lambda valency, vectors: vectors[0], 2)
OPTIMIZER = te.CustomOptimizer(lambda g, t, *_: t - g)


def combined(max_valency: int | None, num_weights: int = 0) -> Any:
    """On the host, of table "films"; without a valency, with a plain combiner."""
    combiner: Any = "sum"
    if max_valency is not None:
        combiner = te.CustomCombiner(
            lambda valency, vectors, *_: tf.reduce_sum(vectors, 0),
            max_valency,
            num_weights,
            tf.constant_initializer(1.0),
        )
    embedding = te.TPUEmbeddingV2(feature(combiner=combiner), te.SGD(1.0))
    embedding.build()
    return embedding


def test_batches_and_preserved_outputs_of_another_combiner() -> None:
    ids = tf.constant([[1, 2], [3, 3]])
    two, three = combined(2), combined(3)
    long = tf.constant([[1, 2, 3], [4, 5, 6]])
    for other in (three, combined(None)):
        with pytest.raises(
            tf.errors.InvalidArgumentError, match=r"sample 0 has 3 ids, .* at most 2"
        ):
            two(other.preprocess_features(long))
    _, preserved = two(ids)
    text = "stacked table films: valencies, vectors or weights belong to another"
    for other in (three, combined(2, 1)):
        with pytest.raises(tf.errors.InvalidArgumentError, match=text):
            two.apply_gradients(tf.ones([2, 2]), other(ids)[1])
    plain = combined(None)
    for one, other, kinds in (
        (two, plain, r"a CombinedCsrFormatTensor\. Received: Partit"),
        (plain, two, r"a PartitionedCsrFormatTensor\. Received: Combin"),
    ):
        with pytest.raises(ValueError, match=f"'films' must be {kinds}"):
            one.apply_gradients(tf.ones([2, 2]), other(ids)[1])
    batch = two.preprocess_features(ids)._replace(tables=preserved)
    with pytest.raises(ValueError, match=r"PartitionedCsrFormatTensor\. Received: Co"):
        two(batch)
    short = {"films": preserved["films"]._replace(valencies=tf.constant([2]))}
    with pytest.raises(tf.errors.InvalidArgumentError, match=text):
        two.apply_gradients(tf.ones([2, 2]), short)


@pytest.mark.parametrize("make", [te.TPUEmbedding, te.TPUEmbeddingV0])
def test_other_classes_refuse_functions(make: Any) -> None:
    with pytest.raises(NotImplementedError, match="'films': only TPUEmbeddingV2 takes"):
        make(feature(), OPTIMIZER)
    with pytest.raises(NotImplementedError, match="takes a CustomCombiner"):
        make(feature(combiner=COMBINER), te.SGD(0.1))


def test_serving_refuses_a_combiner() -> None:
    config = feature(combiner=COMBINER)
    with pytest.raises(NotImplementedError, match="takes a CustomCombiner"):
        te.serving_embedding_lookup(
            tf.constant([1, 2]), None, {config.table: tf.zeros([8, 2])}, config
        )
    with pytest.raises(NotImplementedError, match="takes a CustomOptimizer"):
        keras_layer.TPUEmbedding(feature(optimizer=OPTIMIZER), te.SGD(0.1))


def test_a_combiner_without_its_ops_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """TensorFlow 2.18 and 2.19 have none."""
    op = "XlaSparseDenseMatmulCustomCombinerOnTcWithCsrInput"
    monkeypatch.delattr(tf.raw_ops, op, raising=False)
    with (
        strategy_of("v6e", 2).scope(),
        pytest.raises(
            NotImplementedError,
            match=r"'films': a CustomCombiner on SparseCores needs TensorFlow 2\.20 or",
        ),
    ):
        te.TPUEmbeddingV2(feature(combiner=COMBINER), te.SGD(0.1))
    with strategy_of("v6e", 2).scope():
        te.TPUEmbeddingV2(feature(optimizer=OPTIMIZER), te.SGD(0.1))


def test_minibatches_beside_a_combiner_are_refused() -> None:
    config = te.SparseCoreEmbeddingConfig(minibatching=True)
    with (
        strategy_of("v6e", 2).scope(),
        pytest.raises(NotImplementedError, match=r"'films': minibatching is not"),
    ):
        te.TPUEmbeddingV2(
            feature(combiner=COMBINER), te.SGD(0.1), sparse_core_embedding_config=config
        )


def test_a_slot_of_one_number_for_each_row_is_refused() -> None:
    """TensorFlow 2.20's kernel ends the process: `Check failed: d < dims()`."""
    with pytest.raises(
        NotImplementedError,
        match=r"'both': slot 'steps' of its CustomOptimizer .* Set its `slot_dims` to",
    ):
        models.make(strategy_of("v6e", 2), slot_dim=1)


@pytest.mark.parametrize("function", [{"combiner": COMBINER}, {"optimizer": OPTIMIZER}])
def test_the_limits_of_functions_are_those_that_a_tpu_compiles(function: Any) -> None:
    """Their ops have none: libtpu takes four for each sample of a SparseCore."""

    def make(samples: int, **limits: int) -> te.TPUEmbeddingV2:
        options = {"optimizer": te.SGD(1.0), **function}
        table = te.TableConfig(64, 2, name="films", **options)
        config = te.SparseCoreEmbeddingConfig(
            **{name: {"films": limit} for name, limit in limits.items()}
        )
        with strategy_of("v6e", 2).scope():
            embedding = te.TPUEmbeddingV2(
                te.FeatureConfig(table, output_shape=[samples], name="film"),
                sparse_core_embedding_config=config,
            )
        embedding.build()
        return embedding

    # Two SparseCores with two samples each: 8. The 10 ids of a sample are too many.
    for argument in ("max_ids_per_table", "max_unique_ids_per_table"):
        with pytest.raises(
            ValueError, match=f"{argument} is 9 for stack 'films'.* 8: "
        ):
            make(4, **{argument: 9})
    embedding = make(4, max_ids_per_table=8)
    even = tf.ragged.constant([[0, 4, 8, 12, 16], [20, 24, 28, 32], [], []], tf.int64)
    if "optimizer" in function:
        with pytest.raises(
            tf.errors.InvalidArgumentError, match=r"films.* 9 .*max_ids|films.* 9 ids"
        ):
            embedding.preprocess_features(even)
    # 4 x 4096 samples of a SparseCore: too many for its memory, whatever the user sets.
    with pytest.raises(ValueError, match=r"'films'.* 16384 distinct.* smaller batch"):
        make(8192)


def test_a_rule_gets_scalars_where_a_tpu_passes_rows() -> None:
    """TensorFlow's kernels for TPUs pass the rate and hyperparameters as [1, D]."""
    seen = []

    def rule(gradient, table, slots, rate, hyperparameters) -> Any:
        seen.append([number.shape.as_list() for number in (rate, *hyperparameters)])
        return table - tf.fill([1, 3], rate) * hyperparameters[0] * gradient

    traced = trace_rule(rule, [2])
    assert seen == [[[], []]]
    ones = tf.ones([1, 8])
    for number in (tf.constant, lambda x: tf.fill([1, 8], x)):
        (row,) = traced(ones, ones, number(0.25), number(2.0))
        assert row.numpy().tolist() == [[0.5] * 3 + [1.0] * 5]


def trace_rule(rule: Any, hyperparameters: Any = None) -> Any:
    """The rule of a table of 3 columns in a stack of 8."""
    optimizer = te.CustomOptimizer(rule, 0.1, None, None, hyperparameters)
    table = te.TableConfig(4, 3, optimizer=optimizer)
    plan = make_plan(
        ["f"], [te.FeatureConfig(table)], {table: table}, None, custom=True
    )
    stack: Any = types.SimpleNamespace(tables=[0], width=8)
    return functions_of(plan, stack).rule


@pytest.mark.parametrize(
    ("rule", "cuts"),
    [
        (lambda g, t, *_: t - tf.sign(g) * tf.sqrt(tf.ones_like(t)), False),
        (lambda g, t, *_: t - g / g.shape[1] * 3.0, True),
        (lambda g, t, *_: t - g * [[1.0, 2.0, 3.0]] / [[1.0, 2.0, 3.0]], True),
        (lambda g, t, *_: t - tf.reduce_mean(g, 1, keepdims=True), True),
    ],
    ids=["elementwise", "width", "columns", "mean"],
)
def test_columns_are_cut_off_only_where_a_rule_sees_them(rule: Any, cuts: bool) -> None:
    """The slices are what libtpu does not compile."""
    traced = trace_rule(rule)
    (joined,) = [op for op in traced.graph.get_operations() if op.type == "ConcatV2"]
    assert joined.inputs[1].shape == [1, 5 if cuts else 0]
    gradient = tf.constant([[1.0, 1.0, 1.0, 0.0, 0.0, 0.0, 0.0, 0.0]])
    (row,) = traced(gradient, tf.ones([1, 8]), tf.constant(0.1))
    np.testing.assert_array_equal(row[:, :3], [[0.0] * 3])
