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
from typing import Any

import numpy as np
import pytest
import tensorflow as tf
from reference import embedding as reference
from reference import lookup
from replica_values import of_replicas
from software_tpu import calls, partitioned
from tensorflow.python.tpu import tpu_embedding_v3 as stock_module

from tpu_embedding.testing import SoftwareTPUStrategy

stock = tf.tpu.experimental.embedding
DEVICES, SPARSE_CORES = 2, 4
NUM_TARGETS = DEVICES * SPARSE_CORES
EPSILON = float(np.finfo(np.float32).eps)
# Of float32 in one update: those of the rule (as in tests/test_optimizer_rules.py),
# and those of a sum of up to 100 gradients.
ROUNDINGS = 40 + 100
RATE = 0.25
STEPS = 2

OPTIMIZERS: list[tuple[str, dict[str, Any]]] = [
    ("SGD", {}),
    ("Adagrad", {}),
    ("AdagradMomentum", {"momentum": 0.9, "use_nesterov": True, "epsilon": 1e-3}),
    ("Adam", {"epsilon": 1e-3}),
    ("FTRL", {"l1_regularization_strength": 0.01, "beta": 0.4}),
]
# By name: vocabulary, width, combiner. The first two are stacked; the widths of the
# others are padded.
TABLES = {
    "films": (20, 8, "mean"),
    "users": (13, 8, "sqrtn"),
    "cities": (9, 5, "sum"),
    "shops": (30, 16, "mean"),
}
# By name: table, samples of a replica.
FEATURES = {
    "watched": ("films", 8),
    "home": ("cities", 4),
    "liked": ("films", 4),
    "friends": ("users", 12),
    "visited": ("shops", 8),
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


class Twin:
    """The stock class on the software TPU, and the reference beside it."""

    def __init__(
        self,
        strategy: SoftwareTPUStrategy,
        optimizer: tuple[str, dict[str, Any]],
        rng: np.random.Generator,
    ):
        name, hyper = optimizer
        hyper = {**hyper, "learning_rate": RATE}
        self.strategy, self.rng = strategy, rng
        self.values = {
            table: rng.normal(size=(rows, width)).astype(np.float32)
            for table, (rows, width, _) in TABLES.items()
        }
        self.paper = reference.ReferenceEmbedding(
            {
                table: reference.Table(self.values[table], name, hyper, combiner)
                for table, (_, _, combiner) in TABLES.items()
            },
            [reference.Feature(table) for table, _ in FEATURES.values()],
        )
        tables = {
            table: stock.TableConfig(rows, width, combiner=combiner, name=table)
            for table, (rows, width, combiner) in TABLES.items()
        }
        features = [
            stock.FeatureConfig(tables[table], output_shape=[samples], name=feature)
            for feature, (table, samples) in FEATURES.items()
        ]
        with strategy.scope():
            self.stock = stock.TPUEmbeddingV2(features, getattr(stock, name)(**hyper))
            self._make_variables()

    def system(self, stack: str) -> partitioned.System:
        members = self.stock._stacked_table_to_tables[stack]
        return partitioned.System(
            DEVICES,
            SPARSE_CORES,
            num_samples=self.stock._table_to_sample_count[stack],
            num_rows=sum(table.vocabulary_size for table in members),
        )

    def place(self, table: str, ids: Any) -> np.ndarray:
        """The rows of `ids` in their stack."""
        _, offset, rotation = self.stock._table_to_stacked_table_offset[table]
        ids = np.asarray(ids)
        core = (ids + rotation) % NUM_TARGETS
        return offset + ids // NUM_TARGETS * NUM_TARGETS + core

    def _make_variables(self) -> None:
        self.stock._variables = {}
        for stack, members in self.stock._stacked_table_to_tables.items():
            system = self.system(stack)
            values = np.zeros((system.num_rows, members[0].dim), np.float32)
            for table in members:
                own = self.values[table.name]
                rows = self.place(table.name, np.arange(len(own)))
                values[rows, : own.shape[1]] = own
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

    def batch(self) -> tuple[list, list]:
        """Ragged ids and weights, by replica and feature."""
        ids, weights = [], []
        for _ in range(DEVICES):
            ids.append([])
            weights.append([])
            for table, samples in FEATURES.values():
                lengths = self.rng.integers(0, 4, size=samples)
                total = int(lengths.sum())
                flat = self.rng.integers(TABLES[table][0], size=total)
                scale = self.rng.uniform(0.5, 1.5, size=total).astype(np.float32)
                ids[-1].append(tf.RaggedTensor.from_row_lengths(flat, lengths))
                weights[-1].append(tf.RaggedTensor.from_row_lengths(scale, lengths))
        return ids, weights

    def preprocess(self, ids: list, weights: list) -> dict[str, Any]:
        """One replica's features, as the class's own enqueue would return them."""
        entries: dict[str, list] = {stack: [] for stack in self.stock._variables}
        parts = zip(
            self.stock._flat_features, FEATURES.values(), ids, weights, strict=True
        )
        for (path, _), (table, samples), own_ids, own_weights in parts:
            stack, *_ = self.stock._table_to_stacked_table_offset[table]
            offset = self.stock._feature_to_sample_offset[path]
            core_size = self.stock._table_to_sample_count[stack] // SPARSE_CORES
            of_core = samples // SPARSE_CORES
            found = lookup.samples_of(own_ids, own_weights).entries
            for sample, own in enumerate(found):
                place = sample // of_core * core_size
                place += offset // SPARSE_CORES + sample % of_core
                gains = lookup.gains([w for _, w in own], TABLES[table][2])
                entries[stack] += [
                    (place, int(self.place(table, id_)), gain)
                    for (id_, _), gain in zip(own, gains, strict=True)
                ]
        return {
            stack: with_tail(self.system(stack).csr(own))
            for stack, own in entries.items()
        }

    def step(self) -> None:
        ids, weights = self.batch()
        replicas = [self.preprocess(*own) for own in zip(ids, weights, strict=True)]
        gradients = [
            [
                self.rng.normal(size=(samples, TABLES[table][1])).astype(np.float32)
                for table, samples in FEATURES.values()
            ]
            for _ in range(DEVICES)
        ]
        parts = list(zip(replicas, gradients, strict=True))
        given = of_replicas(self.strategy, tf.nest.map_structure(tf.constant, parts))
        looked_up = self.strategy.run(self.program, (given,))
        expected = self.paper.step(ids, weights, gradients)
        for feature, distributed in enumerate(looked_up):
            local = self.strategy.experimental_local_results(distributed)
            for replica, value in enumerate(local):
                # Values near 1, of up to 3 entries, after a step of ROUNDINGS.
                np.testing.assert_allclose(
                    value,
                    expected[replica][feature],
                    rtol=STEPS * ROUNDINGS * EPSILON,
                    atol=3 * STEPS * ROUNDINGS * EPSILON,
                )

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
        with tf.control_dependencies(activations):
            self.stock.apply_gradients(gradients, preserved)
        return activations

    def check(self) -> None:
        for table, (rows, width, _) in TABLES.items():
            stack, *_ = self.stock._table_to_stacked_table_offset[table]
            places = self.place(table, np.arange(rows))
            expected = {"parameters": self.paper.tables[table]}
            expected.update(self.paper.slots[table])
            for name, value in expected.items():
                parts = [v.numpy() for v in self.stock._variables[stack][name].values]
                np.testing.assert_allclose(
                    self.system(stack).join(parts)[places, :width],
                    value,
                    rtol=STEPS * ROUNDINGS * EPSILON,
                    atol=STEPS * ROUNDINGS * EPSILON,
                    err_msg=f"{table} {name}",
                )


@pytest.mark.parametrize("optimizer", OPTIMIZERS, ids=lambda o: o[0])
def test_tensorflows_own_class_trains(
    optimizer: tuple, strategy: SoftwareTPUStrategy, rng: np.random.Generator
):
    twin = Twin(strategy, optimizer, rng)
    stacks = {place[0] for place in twin.stock._table_to_stacked_table_offset.values()}
    assert len(stacks) < len(TABLES)
    for _ in range(STEPS):
        twin.step()
    twin.check()
