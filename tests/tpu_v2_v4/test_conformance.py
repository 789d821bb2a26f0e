"""TPUEmbedding on the software TPU v2 to v4 against the NumPy reference.

The same twin and data as those of the host engine's suite, which holds that engine to
the same reference.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import tensorflow as tf
from conformance import cases
from conformance.twin import Feature, Table, Twin
from everywhere.twins import Queue

import tpu_embedding as te
from tpu_embedding.testing import SoftwareTPUStrategy

RATE = 0.25
KINDS = ("sparse2", "ragged", "ragged_positions", "sparse_sequence", "dense2")
# With options that no other rule here has, and rates of three sorts.
RULES = {
    "sgd": te.SGD(RATE, clip_weight_min=-1.0, clip_weight_max=0.5),
    "adagrad": te.Adagrad(lambda: RATE, clipvalue=(None, 0.5)),
    "adagrad_momentum": te.AdagradMomentum(
        RATE, momentum=0.9, use_nesterov=True, epsilon=1e-3, weight_decay_factor=0.25
    ),
    "ftrl": te.FTRL(
        tf.keras.optimizers.schedules.PiecewiseConstantDecay([0, 1], [0.5, 1.0, 2.0]),
        l1_regularization_strength=0.2,
        multiply_linear_by_learning_rate=True,
    ),
    "adam": te.Adam(
        lambda: RATE / 2,
        weight_decay_factor=0.5,
        multiply_weight_decay_factor_by_learning_rate=True,
        sum_inside_sqrt=False,
        lazy_adam=False,
    ),
}


def make_strategy(devices: int, cores: int | None = None) -> SoftwareTPUStrategy:
    return SoftwareTPUStrategy(
        "v4", devices, cores_per_replica=cores, meeting_timeout=20
    )


def make_twin(kinds: Any, strategy: SoftwareTPUStrategy, **arguments: Any) -> Twin:
    """Tables of different rules; the kinds go round, every other one with weights.

    Which rule meets which combiner depends on the number of replicas.
    """
    tables, features = {}, {}
    for number, (name, rule) in enumerate(list(RULES.items())[: len(kinds)]):
        combiner = cases.COMBINERS[(number + strategy.num_replicas_in_sync) % 3]
        tables[name] = Table(
            dim=(4, 3, 8)[number % 3], combiner=combiner, optimizer=rule
        )
    for number, kind in enumerate(kinds):
        table = list(RULES)[number % len(RULES)]
        weighted = bool((number + number // len(RULES)) % 2)
        features[kind] = Feature(table, cases.INPUT_BY_NAME[kind], weighted)
    arguments = {"make": Queue, **arguments}
    return Twin(tables, features, strategy=strategy, **arguments)


@pytest.mark.parametrize("devices", [1, 2, 4])
def test_every_rule_and_kind_of_input(devices: int, rng: np.random.Generator) -> None:
    twin = make_twin(cases.INPUT_BY_NAME, make_strategy(devices))
    twin.run(rng, 2, without=["ragged", "dense1"])
    twin.evaluate(twin.draw(rng))


@pytest.mark.parametrize("devices", [1, 2, 4])
def test_every_rule_pipelined(devices: int, rng: np.random.Generator) -> None:
    """Exactly one step old; evaluation and what is saved see every update."""
    twin = make_twin(
        KINDS, make_strategy(devices), pipeline_execution_with_tensor_core=True
    )
    for _ in range(2):
        twin.step(rng, twin.draw(rng))
    twin.evaluate(twin.draw(rng))
    twin.step(rng, twin.draw(rng), without=KINDS[:2])
    for _ in range(2):  # The second finds nothing pending.
        twin.embedding.flush()
        twin.reference.flush()
    twin.step(rng, twin.draw(rng))
    twin.check_variables()


@pytest.mark.parametrize("pipelined", [False, True])
def test_several_cores_for_each_replica(
    pipelined: bool, rng: np.random.Generator
) -> None:
    """Two replicas of two cores, which share a batch along its first axis."""
    twin = make_twin(
        KINDS, make_strategy(4, 2), pipeline_execution_with_tensor_core=pipelined
    )
    assert twin.replicas == 2
    twin.run(rng, 2)
    batch = twin.draw(rng)
    twin.evaluate(batch)
    inputs = twin.distribute(batch.values)
    with pytest.raises(NotImplementedError, match="one core, but each replica has 2"):
        twin.strategy.run(twin.embedding.enqueue, args=(inputs,))


@pytest.mark.parametrize("devices", [1, 2, 4])
def test_inside_of_programs(devices: int, rng: np.random.Generator) -> None:
    make_twin(KINDS[1:2], make_strategy(devices), inside=True).run(rng, 1)


def test_dynamic_rates(rng: np.random.Generator) -> None:
    """One that reads a variable; one of the number of updates, on another table."""
    strategy = make_strategy(2)
    with strategy.scope():
        rate = tf.Variable(RATE)
    steps = tf.keras.optimizers.schedules.PiecewiseConstantDecay(
        [0, 1], [0.5, 1.0, 2.0]
    )
    twin = Twin(
        {
            "one": Table(optimizer=te.SGD(lambda: rate + 0.0)),
            "two": Table(optimizer=te.FTRL(steps)),
        },
        {
            "a": Feature("one", cases.INPUT_BY_NAME["dense1"]),
            "b": Feature("two", cases.INPUT_BY_NAME["dense2"]),
        },
        strategy=strategy,
        make=Queue,
        function=tf.function,
    )
    twin.step(rng, twin.draw(rng))
    rate.assign(0.5)
    twin.step(rng, twin.draw(rng))
    twin.check_variables()
    updates = twin.embedding.core.checkpoint_updates()
    assert updates is not None
    assert updates.numpy() == 2


@pytest.mark.parametrize("rule", ["drop", "mod"])
def test_invalid_ids(rule: str, rng: np.random.Generator) -> None:
    twin = Twin(
        {"table": Table(invalid_ids=rule, combiner="mean")},
        {"a": Feature("table", cases.INPUT_BY_NAME["ragged"], weighted=True)},
        te.Adagrad(RATE),
        strategy=make_strategy(2),
        make=Queue,
    )
    batch = twin.draw(rng)
    for replica, bad in zip(batch.values, (-3, 2**40), strict=True):
        ids = cases.values_of(replica["a"]).astype(np.int64)
        ids[::3] = bad
        replica["a"] = cases.with_values(replica["a"], ids)
    twin.step(rng, batch)
    twin.check_variables()


def test_quantization(rng: np.random.Generator) -> None:
    twin = Twin(
        {"table": Table(quantization=te.QuantizationConfig(5, -1.0, 1.0))},
        {"a": Feature("table", cases.INPUT_BY_NAME["sparse2"], weighted=True)},
        te.SGD(RATE),
        strategy=make_strategy(2),
        make=Queue,
    )
    twin.run(rng, 2)


def test_programs_cannot_flush() -> None:
    """Refused steps have all other orders of pipelined updates."""
    strategy = make_strategy(2)
    with strategy.scope():
        table = te.TableConfig(8, 2, name="films")
        feature = te.FeatureConfig(table, name="film", output_shape=[2])
        embedding = te.TPUEmbedding(feature, te.SGD(1.0), True)
    embedding.build()
    with pytest.raises(NotImplementedError, match=r"outside of strategy\.run"):
        strategy.run(tf.function(embedding.flush))
