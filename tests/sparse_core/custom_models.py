"""An embedding whose rule and combiner are functions, and its NumPy reference."""

from __future__ import annotations

from typing import Any

import numpy as np
import tensorflow as tf

import tpu_embedding as te

VALENCY, WEIGHTS, RATE, WEIGHTS_RATE = 4, 3, 0.5, 0.125
START = (1.0, 0.5, -0.25)
# Of each of two replicas; an id may come twice in a sample, and in both replicas.
FILMS = [[[3, 3, 1], [], [5], [3, 0, 3, 12]], [[3], [7, 7], [], [1, 2]]]
USERS = [[[2, 9, 2], [4], [], [2]], [[0, 1, 2, 3], [9], [9, 9], [10]]]
GAINS = [
    [[0.5, 2.0, -1.0], [1.5], [], [1.0]],
    [[1.0, 2.0, 0.5, 1.0], [2.0], [0.25, 3.0], [1.0]],
]
MAX_VALUE = 128.0  # Larger than any value of the tables, slots and gradients.


def rule(gradient, table, slots, rate, hyperparameters) -> Any:
    """Adagrad with a forgetful accumulator, slower row by row."""
    accumulators, steps = slots
    decay, scale = hyperparameters
    accumulators = decay * accumulators + gradient * gradient
    change = rate * scale * gradient / tf.sqrt(accumulators) / (1.0 + steps)
    return table - change, accumulators, steps + 1.0


def combine(valency, vectors, weights) -> tf.Tensor:
    """The first vectors, each with a weight, over the valency."""
    count = tf.maximum(tf.cast(valency, tf.float32), 1.0)
    return tf.linalg.matvec(vectors[:WEIGHTS], weights, transpose_a=True) / count


def numbers(shape: Any, dtype: Any) -> tf.Tensor:
    """An initializer by which each row is told from the others."""
    return tf.reshape(tf.range(np.prod(shape), dtype=dtype) / 64.0, shape) + 0.5


def make(
    strategy: tf.distribute.Strategy,
    package: Any = te,
    slot_dim: int = 2,
    **arguments: Any,
) -> Any:
    """Three tables: one with a rule, one with a combiner, one with both.

    `slot_dim` is that of the slot "steps"; SparseCores support 2.
    """
    optimizer = package.CustomOptimizer(
        rule,
        RATE,
        slot_names=["accumulators", "steps"],
        slot_initializers=[numbers, tf.constant_initializer(1.0)],
        hyperparameters=[0.75, lambda: tf.constant(2.0)],
        slot_dims=[2, slot_dim],
    )
    combiner = package.CustomCombiner(
        combine, VALENCY, WEIGHTS, tf.constant_initializer(START), WEIGHTS_RATE
    )
    tables = {
        "films": package.TableConfig(13, 6, numbers, optimizer, "sum", "films"),
        "users": package.TableConfig(
            11, 5, numbers, package.Adagrad(RATE), combiner, "users"
        ),
        "both": package.TableConfig(11, 5, numbers, optimizer, combiner, "both"),
    }
    features = {
        name: package.FeatureConfig(table, output_shape=[4], name=name)
        for name, table in tables.items()
    }
    with strategy.scope():
        return te.TPUEmbeddingV2(features, **arguments)


def feature(package: Any = te, **options: Any) -> Any:
    table = package.TableConfig(8, 2, name="films", **options)
    return package.FeatureConfig(table, output_shape=[2], name="film")


def batch(replica: int) -> tuple[Any, Any]:
    """Ids and weights of one replica."""
    gains = tf.ragged.constant(GAINS[replica], dtype=tf.float32)
    users = tf.ragged.constant(USERS[replica], dtype=tf.int64)
    films = tf.ragged.constant(FILMS[replica], dtype=tf.int64)
    ids = {"films": films, "users": users, "both": users}
    return ids, {"films": None, "users": gains, "both": gains}


class Paper:
    """The same steps in float64, row by row and sample by sample."""

    def __init__(self, slot_dim: int = 2) -> None:
        sizes = {"films": (13, 6), "users": (11, 5), "both": (11, 5)}
        self.arrays: dict[str, dict[str, np.ndarray]] = {}
        for name, shape in sizes.items():
            start = np.arange(np.prod(shape)).reshape(shape) / 64.0 + 0.5
            steps = np.ones((shape[0], 1 if slot_dim == 1 else shape[1]))
            slots = {"accumulators": start.copy(), "steps": steps}
            if name == "users":
                slots = {"accumulators": np.full(shape, 0.1)}
            weights = {"custom_combiner_variables": np.array(START)}
            self.arrays[name] = {
                "parameters": start,
                **slots,
                **(weights if name != "films" else {}),
            }

    def step(self, gradients: list[dict[str, np.ndarray]]) -> list[dict[str, Any]]:
        """The activations of each replica; then the update."""
        found: list[dict[str, Any]] = [{} for _ in gradients]
        for name, arrays in self.arrays.items():
            rows: dict[int, np.ndarray] = {}
            of_weights = np.zeros(WEIGHTS)
            for replica in range(len(gradients)):
                samples, gradient = [], gradients[replica][name]
                ids = FILMS[replica] if name == "films" else USERS[replica]
                for s, own in enumerate(ids):
                    gains = [1.0] * len(own) if name == "films" else GAINS[replica][s]
                    activation, scales, change = self._sample(
                        arrays, own, gains, gradient[s]
                    )
                    samples.append(activation)
                    of_weights += change
                    for id_, scale in zip(own, scales, strict=True):
                        rows[id_] = rows.get(id_, 0.0) + scale * gradient[s]
                found[replica][name] = np.array(samples)
            self._update(name, arrays, rows)
            if "custom_combiner_variables" in arrays:
                arrays["custom_combiner_variables"] -= WEIGHTS_RATE * of_weights
        return found

    @staticmethod
    def _sample(arrays: Any, ids: list[int], gains: Any, gradient: np.ndarray) -> Any:
        """The activation, d activation / d row by entry, and that by weight."""
        vectors = [
            gain * arrays["parameters"][id_]
            for id_, gain in zip(ids, gains, strict=True)
        ]
        weights = arrays.get("custom_combiner_variables")
        if weights is None:
            return sum(vectors, np.zeros_like(gradient)), gains, 0.0
        scales = np.zeros(VALENCY)
        scales[:WEIGHTS] = weights / max(len(ids), 1)
        change = np.zeros(WEIGHTS)
        for k, vector in enumerate(vectors[:WEIGHTS]):
            change[k] = vector @ gradient / len(ids)
        parts = [s * v for s, v in zip(scales, vectors, strict=False)]
        entry_scales = [s * g for s, g in zip(scales, gains, strict=False)]
        return sum(parts, np.zeros_like(gradient)), entry_scales, change

    @staticmethod
    def _update(name: str, arrays: Any, rows: dict[int, np.ndarray]) -> None:
        for id_, gradient in rows.items():
            accumulators = arrays["accumulators"][id_]
            decay, scale = (1.0, 1.0) if name == "users" else (0.75, 2.0)
            accumulators[:] = decay * accumulators + gradient**2
            change = RATE * scale * gradient / np.sqrt(accumulators)
            if name != "users":
                change /= 1.0 + arrays["steps"][id_]
                arrays["steps"][id_] += 1.0
            arrays["parameters"][id_] -= change
