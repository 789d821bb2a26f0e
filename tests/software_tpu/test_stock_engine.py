"""An outside check: TensorFlow's own TPUEmbedding trains on the software engine.

That class was written for TPU v2 to v4 by people who had them. What it needs of
TPUStrategy is stood in for: the check of the strategy's class. All else is
TensorFlow's: the configuration, the arguments of the ops, the loading of tables.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import tensorflow as tf
from reference import embedding as reference
from reference import lookup as reference_lookup
from replica_values import of_replicas
from tensorflow.python.tpu import tpu_embedding_v2 as stock_module

from tpu_embedding.testing import SoftwareTPUStrategy

stock = tf.tpu.experimental.embedding
EPSILON = float(np.finfo(np.float32).eps)
# As in test_kernels.py.
ROUNDINGS = 40 + 100
STEPS = 3
# The largest value of tables and slots here, and the most terms of an activation.
SCALE = 4.0
TERMS = 4
# With protobuf 7 the default, a Python enum, raises TypeError.
PACKING = {"low_dimensional_packing_status": 0}

# By name: vocabulary, width, combiner, optimizer and its arguments. The rate of two
# of them is dynamic, and the same; that of a third is another one.
TABLES: dict[str, tuple[int, int, str, str, dict[str, Any]]] = {
    "films": (12, 4, "mean", "SGD", {"clip_weight_min": -1.5, "clip_weight_max": 1.5}),
    "users": (9, 8, "sqrtn", "Adagrad", {"weight_decay_factor": 0.125}),
    "cities": (
        *(7, 5, "sum", "AdagradMomentum"),
        {
            "momentum": 0.9,
            "use_nesterov": True,
            "epsilon": 1e-3,
            "beta2": 0.9,
            "clipvalue": (-0.75, 0.5),
        },
    ),
    "shops": (10, 3, "mean", "Adam", {"lazy_adam": False, "epsilon": 1e-3}),
    "tags": (
        *(8, 1, "sum", "FTRL"),
        {
            "l1_regularization_strength": 0.01,
            "beta": 0.4,
            "multiply_linear_by_learning_rate": True,
        },
    ),
    "words": (
        *(11, 2, "sqrtn", "Adam"),
        {
            "sum_inside_sqrt": False,
            "epsilon": 1e-3,
            "weight_decay_factor": 0.25,
            "multiply_weight_decay_factor_by_learning_rate": True,
        },
    ),
}
RATES = {"films": 0.25, "tags": 0.25, "words": 0.5}  # the others are dynamic
QUANTIZED = "words"
# By name: table, kind, samples of a replica, has weights, sequence length.
FEATURES: dict[str, tuple[str, str, int, bool, int]] = {
    "home": ("cities", "dense", 4, False, 0),
    "watched": ("films", "sparse", 4, True, 0),
    "liked": ("films", "ragged", 3, True, 0),
    "history": ("users", "sparse", 3, True, 2),
    "friends": ("users", "ragged", 5, False, 0),
    "recent": ("shops", "ragged", 3, True, 2),
    "visited": ("shops", "sparse", 4, False, 0),
    "topics": ("tags", "sparse", 4, True, 0),
    "said": ("words", "ragged", 4, True, 0),
}


class Twin:
    """The stock class on the software TPU, and the reference beside it."""

    def __init__(
        self,
        strategy: SoftwareTPUStrategy,
        rng: np.random.Generator,
        pipelined: bool,
    ):
        self.strategy, self.rng = strategy, rng
        self.rate = tf.Variable(0.5)
        self.step_number = 0
        self.values = {
            name: rng.normal(size=(rows, width)).astype(np.float32)
            for name, (rows, width, *_) in TABLES.items()
        }
        self.paper = self._reference(pipelined)
        self.stock = self._stock(pipelined)
        self.train = tf.function(self._train)
        self.evaluate = tf.function(self._evaluate)

    def _reference(self, pipelined: bool) -> reference.ReferenceEmbedding:
        rates = {"users": self._next_rate, "cities": self._next_rate}
        rates["shops"] = lambda: self._next_rate() / 2
        tables = {}
        for name, (_, _, combiner, optimizer, hyper) in TABLES.items():
            rate = RATES.get(name, rates.get(name))
            tables[name] = reference.Table(
                self.values[name],
                optimizer,
                {**hyper, "learning_rate": rate},
                combiner,
                reference_lookup.Quantization(16, -1.0, 1.0)
                if name == QUANTIZED
                else None,
            )
        features = [
            reference.Feature(table, length)
            for table, _, _, _, length in FEATURES.values()
        ]
        return reference.ReferenceEmbedding(tables, features, pipelined=pipelined)

    def _next_rate(self) -> float:
        return 0.5 / (1 + self.step_number)

    def _stock(self, pipelined: bool) -> Any:
        def dynamic() -> tf.Tensor:
            return self.rate.read_value()

        rates = {"users": dynamic, "cities": dynamic}
        rates["shops"] = lambda: self.rate.read_value() / 2
        tables = {}
        for name, (rows, width, combiner, optimizer, hyper) in TABLES.items():
            rate = RATES.get(name, rates.get(name))
            tables[name] = stock.TableConfig(
                rows,
                width,
                # As a function that takes a shape, not a Keras initializer.
                lambda shape, dtype, name=name: tf.constant(self.values[name], dtype),
                getattr(stock, optimizer)(rate, **hyper, **PACKING),
                combiner,
                name,
                stock.QuantizationConfig(16, -1.0, 1.0) if name == QUANTIZED else None,
            )
        features = [
            stock.FeatureConfig(tables[table], length, name=name)
            for name, (table, _, _, _, length) in FEATURES.items()
        ]
        with self.strategy.scope():
            return stock.TPUEmbedding(features, None, pipelined)

    def _train(self, ids: Any, weights: Any, gradients: Any) -> Any:
        self.stock.enqueue(ids, weights, training=True)

        def program(gradients: Any) -> Any:
            activations = self.stock.dequeue()
            self.stock.apply_gradients(gradients)
            return activations

        return self.strategy.run(program, (gradients,))

    def _evaluate(self, ids: Any, weights: Any) -> Any:
        self.stock.enqueue(ids, weights, training=False)
        return self.strategy.run(self.stock.dequeue)

    def _draw(self, table: str, kind: str, samples: int, weighted: bool) -> tuple:
        """Ids of one feature, and weights of the same structure or None."""
        if kind == "dense":
            return tf.constant(self.rng.integers(TABLES[table][0], size=samples)), None
        lengths = self.rng.integers(0, TERMS, size=samples)
        lengths[0] = TERMS - 1  # for one shape, and for a sequence that is cut
        total = int(lengths.sum())
        ids = tf.RaggedTensor.from_row_lengths(
            self.rng.integers(TABLES[table][0], size=total), lengths
        )
        weights = ids.with_values(
            tf.constant(self.rng.uniform(0.5, 1.5, size=total), tf.float32)
        )
        if kind == "sparse":
            ids, weights = ids.to_sparse(), weights.to_sparse()
        return ids, weights if weighted else None

    def batch(self) -> tuple[list, list]:
        """Ids and weights, by replica and feature."""
        drawn = [
            [self._draw(*spec[:4]) for spec in FEATURES.values()]
            for _ in range(self.strategy.num_replicas_in_sync)
        ]
        return (
            [[ids for ids, _ in replica] for replica in drawn],
            [[weights for _, weights in replica] for replica in drawn],
        )

    def gradients(self) -> list:
        """By replica and feature."""
        return [
            [
                self.rng.normal(
                    size=(samples, *([length] if length else []), TABLES[table][1])
                ).astype(np.float32)
                for table, _, samples, _, length in FEATURES.values()
            ]
            for _ in range(self.strategy.num_replicas_in_sync)
        ]

    def distributed(self, values: list) -> list:
        """Values by replica and feature as distributed ones by feature."""
        return [
            None
            if values[0][f] is None
            else of_replicas(self.strategy, [own[f] for own in values])
            for f in range(len(FEATURES))
        ]

    def check_activations(self, actual: Any, expected: list, what: str) -> None:
        for feature, name in enumerate(FEATURES):
            local = self.strategy.experimental_local_results(actual[feature])
            for replica, value in enumerate(local):
                np.testing.assert_allclose(
                    value,
                    expected[replica][feature],
                    rtol=0,
                    atol=TERMS * STEPS * ROUNDINGS * EPSILON * SCALE,
                    err_msg=f"{what}, {name}, replica {replica}",
                )

    def run_step(self) -> None:
        ids, weights = self.batch()
        gradients = self.gradients()
        self.rate.assign(self._next_rate())
        looked_up = self.train(
            self.distributed(ids),
            self.distributed(weights),
            tf.nest.map_structure(tf.identity, self.distributed(gradients)),
        )
        expected = self.paper.step(ids, weights, gradients)
        self.check_activations(looked_up, expected, f"step {self.step_number}")
        self.step_number += 1

    def check_evaluation(self) -> None:
        ids, weights = self.batch()
        looked_up = self.evaluate(self.distributed(ids), self.distributed(weights))
        self.check_activations(looked_up, self.paper.lookup(ids, weights), "evaluation")

    def check_tables(self) -> None:
        self.stock._retrieve_variables()
        for name in TABLES:
            expected = {"parameters": self.paper.tables[name]}
            expected.update(self.paper.slots[name])
            variables = self.stock._variables[name]
            assert set(variables) == set(expected)
            for slot, value in expected.items():
                (variable,) = variables[slot].variables
                np.testing.assert_allclose(
                    variable.numpy(),
                    value,
                    rtol=0,
                    atol=STEPS * ROUNDINGS * EPSILON * SCALE,
                    err_msg=f"{name} {slot}",
                )


@pytest.fixture
def as_tpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """The class takes a software TPU for a TPU."""
    monkeypatch.setattr(stock_module.tpu_strategy, "TPUStrategyV2", SoftwareTPUStrategy)


@pytest.mark.parametrize("pipelined", [False, True], ids=["plain", "pipelined"])
@pytest.mark.parametrize("num_devices", [1, 2])
@pytest.mark.usefixtures("as_tpu")
def test_tensorflows_own_class_trains(
    num_devices: int, pipelined: bool, rng: np.random.Generator
):
    strategy = SoftwareTPUStrategy("v4", num_devices, meeting_timeout=20.0)
    twin = Twin(strategy, rng, pipelined)
    for _ in range(STEPS):
        twin.run_step()
    twin.check_evaluation()
    twin.check_tables()
