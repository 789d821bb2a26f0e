"""An outside check: TensorFlow's own TPUEmbeddingV2 trains on these kernels.

That class was written for the hardware by people who had it. Stand-ins replace
what it needs of TPUStrategy: the check of the strategy's class, the names of devices,
outside compilation, and sharded variables, which are mirrored ones here whose
components differ. What its enqueue would do, for which tensorflow-cpu has no kernels,
`partitioned` does. All else, from the stacking of tables and the order of samples to
the arguments of the ops, is TensorFlow's.
"""

from __future__ import annotations

import types
from collections.abc import Mapping
from typing import Any

import numpy as np
import pytest
import tensorflow as tf
from conformance import cases
from conformance.cases import Input
from conformance.twin import Feature
from reference import lookup
from replica_values import of_replicas
from software_tpu import calls, partitioned
from software_tpu.test_stock_engine import StockTable, StockTwin, stock_optimizer
from tensorflow.python.tpu import tpu_embedding_v3 as stock_module

import tpu_embedding as te
from tpu_embedding.testing import SoftwareTPUStrategy

stock = tf.tpu.experimental.embedding
DEVICES, SPARSE_CORES = 2, 4
NUM_TARGETS = DEVICES * SPARSE_CORES
RATE = 0.25


class StockFeature(Feature):
    """A feature as TensorFlow's class takes it."""

    def config(self, tables: Mapping[str, Any]) -> Any:
        shape = [self.input.shape[0]]
        name = self.input.name
        return stock.FeatureConfig(tables[self.table], output_shape=shape, name=name)


# The first two are stacked; the widths of the others are padded.
TABLES = {
    "films": StockTable(20, 8, "mean"),
    "users": StockTable(13, 8, "sqrtn"),
    "cities": StockTable(9, 5, "sum"),
    "shops": StockTable(30, 16, "mean"),
}
# By name: table, samples of a replica.
FEATURES = {
    name: StockFeature(table, Input(name, "ragged", (samples, 3)), weighted=True)
    for name, table, samples in (
        ("watched", "films", 8),
        ("home", "cities", 4),
        ("liked", "films", 4),
        ("friends", "users", 12),
        ("visited", "shops", 8),
    )
}


@pytest.fixture
def strategy(monkeypatch: pytest.MonkeyPatch) -> SoftwareTPUStrategy:
    """A strategy that the class takes for a TPUStrategy."""
    software = calls.strategy_of("v5p", DEVICES)
    extended = software.extended
    feature = types.SimpleNamespace(num_embedding_devices_per_chip=SPARSE_CORES)
    devices = np.array([[device] for device in extended.worker_devices])
    monkeypatch.setattr(extended, "tpu_hardware_feature", feature, raising=False)
    monkeypatch.setattr(extended, "_tpu_devices", devices, raising=False)
    for module, name, value in (
        (stock_module.tpu_strategy, "TPUStrategyV2", SoftwareTPUStrategy),
        (
            stock_module.tpu_replication,
            "outside_compilation",
            lambda function, **arguments: function(**arguments),
        ),
    ):
        monkeypatch.setattr(module, name, value)
    return software


def with_tail(csr: dict[str, Any]) -> dict[str, Any]:
    """The arrays at the fixed sizes of a TPU's buffers, and how much is in use."""
    capacity = 16 * len(csr["row_pointers"])
    used = {
        "row_pointers": len(csr["row_pointers"]),
        "ids": len(csr["sorted_token_ids"]),
    }
    padded = {
        name: np.pad(array, (0, capacity - len(array))) if array.ndim else array
        for name, array in csr.items()
    }
    return {"csr": padded, "used": used}


class Stock:
    """TensorFlow's class with tables of named values, and what its enqueue would do."""

    def __init__(self, features: Any, optimizer: Any) -> None:
        self.stock = stock.TPUEmbeddingV2(features, stock_optimizer(optimizer))
        self.tables = {f.table.name: f.table for f in features.values()}
        self.stock._variables = {}
        for stack, members in self.stock._stacked_table_to_tables.items():
            system = self.system(stack)
            values = np.zeros((system.num_rows, members[0].dim), np.float32)
            for table in members:
                own = cases.named_values(
                    TABLES[table.name].rows, TABLES[table.name].dim
                )
                values[self.places(table.name), : own.shape[1]] = own
            slots = members[0].optimizer._slot_names()
            starts = members[0].optimizer._slot_initializers()
            named = {"parameters": values}
            for slot, start in zip(slots, starts, strict=True):
                named[slot] = start(values.shape, tf.float32).numpy()
            self.stock._variables[stack] = {
                name: self._sharded(system.cut(value)) for name, value in named.items()
            }
        self.stock._built = True

    @staticmethod
    def _sharded(parts: list[np.ndarray]) -> tf.Variable:
        variable = tf.Variable(parts[0])
        for component, part in zip(variable.values, parts, strict=True):
            component.assign(part)
        return variable

    def system(self, stack: str) -> partitioned.System:
        members = self.stock._stacked_table_to_tables[stack]
        return partitioned.System(
            DEVICES,
            SPARSE_CORES,
            num_samples=self.stock._table_to_sample_count[stack],
            num_rows=sum(table.vocabulary_size for table in members),
        )

    def places(self, table: str) -> np.ndarray:
        """The rows of a table in its stack, by id."""
        _, offset, rotation = self.stock._table_to_stacked_table_offset[table]
        ids = np.arange(TABLES[table].rows)
        core = (ids + rotation) % NUM_TARGETS
        return offset + ids // NUM_TARGETS * NUM_TARGETS + core

    @property
    def variables(self) -> dict[Any, dict[str, np.ndarray]]:
        found = {}
        for stack, members in self.stock._stacked_table_to_tables.items():
            whole = {
                name: self.system(stack).join([v.numpy() for v in variable.values])
                for name, variable in self.stock._variables[stack].items()
            }
            for table in members:
                rows, dim = self.places(table.name), TABLES[table.name].dim
                own = {name: values[rows, :dim] for name, values in whole.items()}
                found[self.tables[table.name]] = own
        return found

    def preprocess(self, ids: Any, weights: Any) -> dict[str, Any]:
        """One replica's features, as the class's own enqueue would return them."""
        entries: dict[str, list] = {stack: [] for stack in self.stock._variables}
        for name, feature in FEATURES.items():
            stack, *_ = self.stock._table_to_stacked_table_offset[feature.table]
            offset = self.stock._feature_to_sample_offset[name]
            core_size = self.stock._table_to_sample_count[stack] // SPARSE_CORES
            of_core = feature.input.shape[0] // SPARSE_CORES
            places = self.places(feature.table)
            found = lookup.samples_of(ids[name], weights[name]).entries
            for sample, own in enumerate(found):
                place = sample // of_core * core_size
                place += offset // SPARSE_CORES + sample % of_core
                gains = lookup.gains(
                    [w for _, w in own], TABLES[feature.table].combiner
                )
                entries[stack] += [
                    (place, int(places[id_]), gain)
                    for (id_, _), gain in zip(own, gains, strict=True)
                ]
        return {
            stack: with_tail(self.system(stack).csr(own))
            for stack, own in entries.items()
        }

    def program(self, given: Any) -> Any:
        partitions, gradients = given
        tensors = {}
        for stack, partition in partitions.items():
            csr = stock_module.PartitionedCsrFormatTensor(
                sample_count=self.system(stack).num_samples, **partition["csr"]
            )
            used = partition["used"]
            tensors[stack] = (csr, used["row_pointers"], used["ids"])
        activations, preserved = self.stock.dequeue(tensors)
        # A lookup must see the table of before the update.
        with tf.control_dependencies(tf.nest.flatten(activations)):
            self.stock.apply_gradients(gradients, preserved)
        return activations


class Twin(StockTwin):
    """The stock class on the software TPU, and the reference beside it."""

    def distribute(self, parts: Any) -> Any:
        return parts

    def _train_eagerly(self, values: Any, weights: Any, gradients: Any) -> Any:
        pairs = zip(values, weights, strict=True)
        replicas = [self.embedding.preprocess(*pair) for pair in pairs]
        parts = list(zip(replicas, gradients, strict=True))
        given = of_replicas(self.strategy, tf.nest.map_structure(tf.constant, parts))
        return self.strategy.run(self.embedding.program, (given,))


@pytest.mark.parametrize(
    "optimizer",
    [
        te.SGD(RATE),
        te.Adagrad(RATE),
        te.AdagradMomentum(RATE, 0.9, use_nesterov=True, epsilon=1e-3),
        te.Adam(RATE, epsilon=1e-3),
        te.FTRL(RATE, l1_regularization_strength=0.01, beta=0.4),
    ],
    ids=lambda optimizer: type(optimizer).__name__,
)
def test_tensorflows_own_class_trains(
    optimizer: Any, strategy: SoftwareTPUStrategy, rng: np.random.Generator
):
    twin = Twin(TABLES, FEATURES, optimizer, strategy, make=Stock)
    stacks = twin.embedding.stock._stacked_table_to_tables
    assert len(stacks) < len(TABLES)
    twin.run(rng, 2)
