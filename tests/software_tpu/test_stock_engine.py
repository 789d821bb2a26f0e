"""An outside check: TensorFlow's own TPUEmbedding trains on the software engine.

That class was written for TPU v2 to v4 by people who had them. Stand-ins replace what
it needs of TPUStrategy: the check of the strategy's class. All else is
TensorFlow's: the configuration, the arguments of the ops, the loading of tables.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

import numpy as np
import pytest
import tensorflow as tf
from conformance import cases
from conformance.cases import Input
from conformance.twin import Feature, Table
from everywhere.twins import EverywhereTwin
from tensorflow.python.tpu import tpu_embedding_v2 as stock_module

import tpu_embedding as te
from tpu_embedding.testing import SoftwareTPUStrategy

stock = tf.tpu.experimental.embedding


def stock_optimizer(optimizer: Any) -> Any:
    """The same of TensorFlow's classes."""
    fields = {f.name: f for f in dataclasses.fields(optimizer)}
    del fields["clipnorm"]
    options = {field: getattr(optimizer, field) for field in fields}
    # With protobuf 7 the default, a Python enum, raises TypeError.
    options["low_dimensional_packing_status"] = 0
    return getattr(stock, type(optimizer).__name__)(**options)


class StockTable(Table):
    """A table as TensorFlow's class takes it."""

    def config(self, name: str) -> Any:
        return stock.TableConfig(
            self.rows,
            self.dim,
            # As a function that takes a shape, not a Keras initializer.
            lambda shape, dtype: tf.constant(cases.named_values(*shape), dtype),
            self.optimizer and stock_optimizer(self.optimizer),
            self.combiner,
            name,
            stock.QuantizationConfig(16, -1.0, 1.0) if self.quantization else None,
        )


class StockFeature(Feature):
    """A feature as TensorFlow's class takes it."""

    def config(self, tables: Mapping[str, Any]) -> Any:
        return stock.FeatureConfig(tables[self.table], self.input.max_sequence_length)


class Stock(stock.TPUEmbedding):
    """TensorFlow's class, which enqueues in functions alone, as a twin calls it."""

    def enqueue(self, *arguments: Any, **options: Any) -> None:
        enqueue = super().enqueue
        if tf.executing_eagerly():
            enqueue = tf.function(enqueue)
        enqueue(*arguments, **options)

    @property
    def variables(self) -> dict[Any, dict[str, np.ndarray]]:
        self._retrieve_variables()
        return {
            table: {
                slot: variable.variables[0].numpy()
                for slot, variable in self._variables[table.name].items()
            }
            for table in self._table_config
        }


class StockTwin(EverywhereTwin):
    """TensorFlow's class on the software TPU, and the reference beside it."""

    def _check_other_rows(self, name: str, values: np.ndarray) -> None:
        """Leaves out what needs a plan of this package."""


def tables(rate: tf.Variable) -> dict[str, Table]:
    """The rate of two of them is dynamic, and the same; that of a third is another."""
    dynamic: Any = rate.read_value
    half: Any = lambda: rate.read_value() / 2  # noqa: E731
    momentum = te.AdagradMomentum(
        dynamic, 0.9, True, epsilon=1e-3, beta2=0.9, clipvalue=(-0.75, 0.5)
    )
    ftrl = te.FTRL(
        0.25,
        l1_regularization_strength=0.01,
        beta=0.4,
        multiply_linear_by_learning_rate=True,
    )
    decaying = te.Adam(
        0.5,
        sum_inside_sqrt=False,
        epsilon=1e-3,
        weight_decay_factor=0.25,
        multiply_weight_decay_factor_by_learning_rate=True,
    )
    clipped = te.SGD(0.25, clip_weight_min=-1.5, clip_weight_max=1.5)
    adam = te.Adam(half, lazy_adam=False, epsilon=1e-3)
    quantized = te.QuantizationConfig(16, -1.0, 1.0)
    return {
        "films": StockTable(12, 4, "mean", clipped),
        "users": StockTable(
            9, 8, "sqrtn", te.Adagrad(dynamic, weight_decay_factor=0.125)
        ),
        "cities": StockTable(7, 5, "sum", momentum),
        "shops": StockTable(10, 3, "mean", adam),
        "tags": StockTable(8, 1, "sum", ftrl),
        "words": StockTable(11, 2, "sqrtn", decaying, quantized),
    }


SPARSE, RAGGED = Input("sparse", "sparse", (4, 4)), Input("ragged", "ragged", (5, 4))
SEQUENCES = {
    kind: Input(kind, kind, (4, 4), max_sequence_length=2)
    for kind in ("sparse", "ragged")
}
FEATURES = {
    "home": StockFeature("cities", Input("dense", "dense", (4,))),
    "watched": StockFeature("films", SPARSE, weighted=True),
    "liked": StockFeature("films", RAGGED, weighted=True),
    "history": StockFeature("users", SEQUENCES["sparse"], weighted=True),
    "friends": StockFeature("users", RAGGED),
    "recent": StockFeature("shops", SEQUENCES["ragged"], weighted=True),
    "visited": StockFeature("shops", SPARSE),
    "topics": StockFeature("tags", SPARSE, weighted=True),
    "said": StockFeature("words", RAGGED, weighted=True),
}


@pytest.mark.parametrize("pipelined", [False, True], ids=["plain", "pipelined"])
@pytest.mark.parametrize("num_devices", [1, 2])
def test_tensorflows_own_class_trains(
    num_devices: int,
    pipelined: bool,
    rng: np.random.Generator,
    monkeypatch: pytest.MonkeyPatch,
):
    # The class takes a software TPU for a TPU.
    monkeypatch.setattr(stock_module.tpu_strategy, "TPUStrategyV2", SoftwareTPUStrategy)
    rate = tf.Variable(0.5)
    twin = StockTwin(
        tables(rate),
        FEATURES,
        strategy=SoftwareTPUStrategy("v4", num_devices, meeting_timeout=20.0),
        function=tf.function,
        make=Stock,
        pipeline_execution_with_tensor_core=pipelined,
    )
    for step in range(3):
        rate.assign(0.5 / (1 + step))
        twin.step(rng, twin.draw(rng))
    twin.evaluate(twin.draw(rng))
    twin.check_variables()
