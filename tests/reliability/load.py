"""Many steps of random shapes, with exact arithmetic: a part of test_load.py.

Gradients are small multiples of UNIT, so that float32 holds every sum exactly and the
tables can be compared bit for bit, however many steps there were.
"""

from __future__ import annotations

import dataclasses
import gc

import numpy as np
import tensorflow as tf
from linux import status
from steps import train_on

import tpu_embedding as te

ROWS, DIM = 500, 4
UNIT = 2.0**-6
LONGEST = 64  # samples in a batch


@dataclasses.dataclass(frozen=True)
class Figures:
    """What a run gave.

    Attributes:
      differences: Values of the table that are not exactly as expected.
      growth: Bytes of resident memory from a tenth of the steps to the end.
    """

    steps: int
    traces: int
    differences: int
    growth: int


class Exact:
    """A table by SGD, and what it must hold."""

    def __init__(self) -> None:
        films = te.TableConfig(
            ROWS, DIM, te.RowIdInitializer(), combiner="sum", name="films"
        )
        self.config = films
        self.embedding = te.TPUEmbedding({"film": te.FeatureConfig(films)}, te.SGD(1.0))
        self.expected = np.repeat(np.arange(ROWS, dtype=np.float64), DIM)
        self.expected = self.expected.reshape(ROWS, DIM)
        self.traces = 0
        spec = tf.TensorSpec([None, DIM])
        self.steps = {
            kind: tf.function(self._step, input_signature=[ids, spec], autograph=False)
            for kind, ids in {
                "dense": tf.TensorSpec([None], tf.int64),
                "ragged": tf.RaggedTensorSpec([None, None], tf.int64, 1),
                "sparse": tf.SparseTensorSpec([None, None], tf.int64),
            }.items()
        }

    def _step(self, ids: object, gradient: tf.Tensor) -> None:
        self.traces += 1
        train_on(self.embedding, {"film": ids}, {"film": gradient})

    def step(self, rng: np.random.Generator) -> None:
        kind = ("dense", "ragged", "sparse")[rng.integers(3)]
        samples = int(rng.integers(LONGEST))
        lengths = (
            np.ones(samples, np.int64)
            if kind == "dense"
            else rng.integers(0, 5, samples)
        )
        ids = rng.integers(0, ROWS, lengths.sum())
        gradient = UNIT * rng.integers(-3, 4, [samples, DIM])
        value = {"dense": _dense, "ragged": _ragged, "sparse": _sparse}[kind]
        self.steps[kind](value(ids, lengths), tf.constant(gradient, tf.float32))
        np.subtract.at(self.expected, ids, np.repeat(gradient, lengths, axis=0))

    def differences(self) -> int:
        actual = self.embedding.embedding_tables[self.config].numpy()
        return int((actual != self.expected).sum())


def _dense(ids: np.ndarray, lengths: np.ndarray) -> tf.Tensor:
    return tf.constant(ids, tf.int64)


def _ragged(ids: np.ndarray, lengths: np.ndarray) -> tf.RaggedTensor:
    return tf.RaggedTensor.from_row_lengths(tf.constant(ids, tf.int64), lengths)


def _sparse(ids: np.ndarray, lengths: np.ndarray) -> tf.SparseTensor:
    rows = np.repeat(np.arange(len(lengths)), lengths)
    columns = np.arange(len(ids)) - np.repeat(np.cumsum(lengths) - lengths, lengths)
    indices = np.stack([rows, columns], axis=1).reshape(-1, 2)
    return tf.SparseTensor(indices, tf.constant(ids, tf.int64), [len(lengths), 5])


def run(steps: int, seed: int) -> Figures:
    """Trains for so many steps."""
    rng = np.random.default_rng(seed)
    exact = Exact()
    start = 0
    for number in range(steps):
        exact.step(rng)
        if number == steps // 10:
            gc.collect()
            start = status("VmRSS")
    gc.collect()
    return Figures(steps, exact.traces, exact.differences(), status("VmRSS") - start)
