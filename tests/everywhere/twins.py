"""Each class on each engine: how the twin of the conformance suite is made there."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
import tensorflow as tf
from conformance.cases import Input
from conformance.twin import Feature, Table, Twin
from replica_values import mirrored, of_replicas

import tpu_embedding as te
from tpu_embedding import distribution
from tpu_embedding.testing import SoftwareTPUStrategy

# Two replicas' and four SparseCores' worth of samples; shapes come from the batch.
INPUTS = (
    Input("dense2", "dense", (4, 3)),
    Input("ragged", "ragged", (4, 4)),
    Input("sparse_sequence", "sparse", (4, 4), max_sequence_length=3),
)
CPU_ENGINES = distribution.CPU_ENGINES


def place(engine: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Asks for an engine of a CPU, or for none where the strategy has a TPU."""
    if engine in CPU_ENGINES:
        monkeypatch.setenv(distribution.ENGINE_VARIABLE, engine)
    else:
        monkeypatch.delenv(distribution.ENGINE_VARIABLE, raising=False)


def strategy_of(engine: str, devices: int) -> tf.distribute.Strategy:
    """The strategy of an engine; the environment says which of those for CPUs."""
    if engine in CPU_ENGINES:
        return mirrored(devices)
    return SoftwareTPUStrategy(engine, devices, meeting_timeout=20)


class _Readable:
    """Reads tables that are in the memory of a TPU as a checkpoint would."""

    @property
    def variables(self: Any) -> dict[Any, dict[str, np.ndarray]]:
        rows = self.core.checkpoint_rows()
        return {
            spec.key: {name: r.numpy() for name, r in rows[spec.name].items()}
            for spec in self.core.plan.tables
        }


class Queue(_Readable, te.TPUEmbedding):
    """te.TPUEmbedding."""


class Lookups(_Readable, te.TPUEmbeddingV2):
    """te.TPUEmbeddingV2 with the calls of te.TPUEmbedding, inside of strategy.run."""

    def enqueue(self, features: Any, weights: Any = None, training: bool = True) -> Any:
        self._batch = features, weights

    def dequeue(self, *_: Any) -> Any:
        if _:
            return super().dequeue(*_)
        activations, self._preserved = self.embedding_lookup(*self._batch)
        return activations

    def apply_gradients(self, gradients: Any, *_: Any) -> None:
        super().apply_gradients(gradients, self._preserved)


CLASSES = {"TPUEmbedding": Queue, "TPUEmbeddingV2": Lookups}


class EverywhereTwin(Twin):
    """A twin whose values are distributed also where there is one replica."""

    def distribute(self, parts: Sequence[Any]) -> Any:
        return of_replicas(self.strategy, parts)


def make_twin(name: str, engine: str, devices: int, **arguments: Any) -> Twin:
    """Two tables, one rule each; a feature of each input, one of them with weights."""
    tables = {
        "one": Table(rows=11, dim=3, combiner="mean", optimizer=te.Adagrad(0.25)),
        "two": Table(rows=19, dim=3, combiner="sqrtn", optimizer=te.SGD(lambda: 0.5)),
    }
    features = {
        given.name: Feature(list(tables)[number % 2], given, number == 1)
        for number, given in enumerate(INPUTS)
    }
    return EverywhereTwin(
        tables,
        features,
        strategy=strategy_of(engine, devices),
        make=CLASSES[name],
        inside=name == "TPUEmbeddingV2",
        **arguments,
    )
