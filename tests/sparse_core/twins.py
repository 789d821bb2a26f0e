"""The conformance suite's twin, on SparseCores of the software TPU."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping, Sequence
from typing import Any

import tensorflow as tf
from conformance.cases import Input
from conformance.test_embedding_v2 import Stepwise
from conformance.twin import Feature, Table, Twin
from replica_values import mirrored, of_replicas
from software_tpu.calls import strategy_of
from steps import train_on

import tpu_embedding as te

SYSTEMS = [(name, count) for name in ("v5p", "v6e") for count in (1, 2, 4)]

# Samples that 4 SparseCores divide.
INPUTS = (
    Input("dense1", "dense", (8,)),
    Input("ragged", "ragged", (4, 4)),
    Input("dense3", "dense", (4, 2, 3)),
    Input("sparse2", "sparse", (8, 4)),
    Input("ragged_shaped", "ragged", (8, 4), output_shape=(4, 2)),
    Input("dense2", "dense", (8, 3)),
    Input("sparse3", "sparse", (4, 2, 4)),
    Input("ragged_positions", "ragged", (4, 4), output_shape=(2, 2, 2)),
)


def output_shape(given: Input) -> tuple[int, ...]:
    if given.output_shape is not None:
        return tuple(axis for axis in given.output_shape if axis is not None)
    return given.shape if len(given.shape) == 1 else given.shape[:-1]


@dataclasses.dataclass(frozen=True)
class ShapedFeature(Feature):
    """A feature with a name and a whole output shape, as SparseCores need it."""

    def config(self, tables: Mapping[str, te.TableConfig]) -> te.FeatureConfig:
        name = f"{self.table}_{self.input.name}_{self.weighted}"
        shape = output_shape(self.input)
        return te.FeatureConfig(tables[self.table], output_shape=shape, name=name)


class SparseCoreTwin(Twin):
    """A twin that trains in one program for each signature."""

    def _train_eagerly(self, values: Any, weights: Any, gradients: Any) -> Any:
        return self.strategy.run(self._replica_step, (values, weights, gradients))

    def _replica_step(self, values: Any, weights: Any, gradients: Any) -> Any:
        return train_on(self.embedding, values, gradients, weights=weights)

    def distribute(self, parts: Sequence[Any]) -> Any:
        """One value per replica, also where there is one."""
        return of_replicas(self.strategy, parts)


def parts(inputs: Sequence[Input]) -> tuple[dict[str, Table], dict[str, Feature]]:
    """Two tables of one kind, which are stacked, and a third, which is padded more.

    Every input feeds a table, every other one with weights.
    """
    tables = {
        "one": Table(rows=11, dim=3, combiner="mean"),
        "two": Table(rows=19, dim=3, combiner="sqrtn"),
        "wide": Table(
            rows=11,
            dim=9,
            combiner="sum",
            quantization=te.QuantizationConfig(9, -1.0, 1.0),
        ),
    }
    features: dict[str, Feature] = {
        given.name: ShapedFeature(list(tables)[number % 3], given, number % 2 == 1)
        for number, given in enumerate(inputs)
    }
    assert all(math.prod(output_shape(given)) % 4 == 0 for given in inputs)
    return tables, features


def make_twin(
    system: tuple[str, int],
    optimizer: Any,
    inputs: Sequence[Input] = INPUTS,
    **arguments: Any,
) -> Twin:
    return SparseCoreTwin(
        *parts(inputs),
        optimizer,
        strategy=strategy_of(*system),
        make=Stepwise,
        **arguments,
    )


def make_host_twin(system: tuple[str, int], optimizer: Any) -> Twin:
    """The same on the host engine, with as many replicas."""
    strategy = mirrored(system[1])
    return Twin(*parts(INPUTS), optimizer, strategy, make=Stepwise, inside=True)


def run(strategy: tf.distribute.Strategy, function: Any, *arguments: Any) -> list[Any]:
    """What `function` returns, by replica, each a structure of arrays."""
    found = strategy.run(function, arguments)
    flat = [strategy.experimental_local_results(x) for x in tf.nest.flatten(found)]
    return [
        tf.nest.pack_sequence_as(found, [x.numpy() for x in own])
        for own in zip(*flat, strict=True)
    ]
