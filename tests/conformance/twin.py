"""Trains one embedding twice, with TPUEmbedding and with the NumPy reference."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
import tensorflow as tf
from conformance import cases
from conformance.cases import Input
from reference.embedding import Feature as ReferenceFeature
from reference.embedding import ReferenceEmbedding
from reference.embedding import Table as ReferenceTable
from reference.lookup import Quantization
from replica_values import of_replicas

import tpu_embedding as te

# No term of a summed gradient is larger: a gain is below 2, a gradient at most 1.
LARGEST_TERM = 2.0


@dataclasses.dataclass(frozen=True)
class Table:
    """A table of both sides; `optimizer` is one of the package or None."""

    rows: int = 11
    dim: int = 4
    combiner: str = "mean"
    optimizer: Any = None
    quantization: te.QuantizationConfig | None = None
    invalid_ids: str = "error"
    dtype: str = "float32"

    def config(self, name: str) -> te.TableConfig:
        return te.TableConfig(
            self.rows,
            self.dim,
            initializer=lambda shape, dtype: cases.named_values(*shape),
            optimizer=self.optimizer,
            combiner=self.combiner,
            name=name,
            quantization_config=self.quantization,
            invalid_ids=self.invalid_ids,
            dtype=self.dtype,
        )

    def reference(self, default: Any) -> ReferenceTable:
        optimizer = self.optimizer or default
        quantization = self.quantization
        return ReferenceTable(
            values=cases.named_values(self.rows, self.dim),
            optimizer=type(optimizer).__name__ if optimizer else None,
            hyper=_arguments(optimizer) if optimizer else {},
            combiner=self.combiner,
            quantization=quantization
            and Quantization(
                quantization.num_buckets, quantization.lower, quantization.upper
            ),
            invalid_ids=self.invalid_ids,
        )


def _arguments(optimizer: Any) -> dict[str, Any]:
    return {f.name: getattr(optimizer, f.name) for f in dataclasses.fields(optimizer)}


@dataclasses.dataclass(frozen=True)
class Feature:
    """A feature of both sides."""

    table: str
    input: Input
    weighted: bool = False

    def config(self, tables: Mapping[str, te.TableConfig]) -> te.FeatureConfig:
        return te.FeatureConfig(
            tables[self.table],
            max_sequence_length=self.input.max_sequence_length,
            output_shape=self.input.output_shape,
        )

    def reference(self) -> ReferenceFeature:
        return ReferenceFeature(
            self.table, self.input.max_sequence_length, self.input.output_shape
        )


@dataclasses.dataclass
class Batch:
    """A step's input.

    Attributes:
      values: [replica][feature], tensors of the three kinds.
      weights: The same; None for a feature without.
      condition: The largest sum |w| / |sum w| of a sample, which scales all errors.
    """

    values: list[dict[str, Any]]
    weights: list[dict[str, Any]]
    condition: float = 1.0


class Twin:
    """Runs every step on both sides and compares what comes out.

    `function` wraps the training step, for example tf.function. With `inside` each
    replica enqueues its training batches, inside strategy.run.
    """

    def __init__(
        self,
        tables: Mapping[str, Table],
        features: Mapping[str, Feature],
        optimizer: Any = None,
        strategy: tf.distribute.Strategy | None = None,
        function: Callable[[Any], Any] = lambda step: step,
        inside: bool = False,
        make: Callable[..., Any] = te.TPUEmbedding,
        **constructor: Any,
    ) -> None:
        self.tables, self.features = dict(tables), dict(sorted(features.items()))
        self.strategy = strategy or tf.distribute.get_strategy()
        self.replicas = self.strategy.num_replicas_in_sync
        self.configs = {name: table.config(name) for name, table in tables.items()}
        with self.strategy.scope():
            self.embedding = make(
                {name: f.config(self.configs) for name, f in self.features.items()},
                optimizer,
                **constructor,
            )
        self.reference = ReferenceEmbedding(
            {name: table.reference(optimizer) for name, table in tables.items()},
            [feature.reference() for feature in self.features.values()],
            pipelined=constructor.get("pipeline_execution_with_tensor_core", False),
        )
        self._train = function(self._train_eagerly)
        self._inside = inside
        self._steps = 0
        self._condition = 1.0
        self._terms = dict.fromkeys(tables, 1)  # Most entries of a row in a step.
        self._named: dict[str, set[int]] = {name: set() for name in tables}

    def draw(self, rng: np.random.Generator) -> Batch:
        """Draws a batch for each replica; every other feature has int32 ids."""
        values = [
            {
                name: feature.input.draw(
                    rng,
                    self.tables[feature.table].rows,
                    tf.int64 if number % 2 else tf.int32,
                )
                for number, (name, feature) in enumerate(self.features.items())
            }
            for _ in range(self.replicas)
        ]
        weights = [
            {
                name: cases.positive_weights(rng, replica[name])
                if feature.weighted
                else None
                for name, feature in self.features.items()
            }
            for replica in values
        ]
        return Batch(values, weights)

    def draw_gradients(
        self, rng: np.random.Generator, shapes: Sequence[Mapping[str, Any]]
    ) -> list[dict[str, np.ndarray]]:
        """Draws gradients like `shapes`, of magnitudes from 1/32 to 1.

        Each column has one sign: with weights that are not negative no sum cancels,
        and an error in it stays relative to it, as `cases.tolerance` wants.
        """
        drawn = []
        for replica in shapes:
            drawn.append({})
            for name, like in replica.items():
                signs = np.where(np.arange(like.shape[-1]) % 2, -1, 1)
                magnitudes = 2.0 ** rng.uniform(-5, 0, like.shape)
                drawn[-1][name] = (signs * magnitudes).astype(np.float32)
        return drawn

    def run(
        self, rng: np.random.Generator, steps: int, without: Sequence[str] = ()
    ) -> None:
        """Trains random batches and compares all variables at the end.

        From the second batch on, the features in `without` have None as gradient.
        """
        for step in range(steps):
            self.step(rng, self.draw(rng), without if step else ())
        self.check_variables()

    def step(
        self, rng: np.random.Generator, batch: Batch, without: Sequence[str] = ()
    ) -> None:
        """Trains one step on both sides and compares the activations."""
        expected = self.by_name(self.reference.forward(*self.reference_batch(batch)))
        gradients: list[dict[str, Any]] = self.draw_gradients(rng, expected)
        for replica in gradients:
            replica.update(dict.fromkeys(without))
        actual = self._train(
            self.distribute(batch.values),
            self.distribute(batch.weights),
            self.distribute(
                [
                    {n: None if g is None else tf.constant(g) for n, g in r.items()}
                    for r in gradients
                ]
            ),
        )
        self._compare(batch, actual, expected)
        self.reference.backward([list(replica.values()) for replica in gradients])
        self._note(batch)

    def evaluate(self, batch: Batch) -> None:
        """Evaluates one step on both sides and compares the activations."""
        expected = self.by_name(self.reference.lookup(*self.reference_batch(batch)))
        self.embedding.enqueue(
            self.distribute(batch.values),
            self.distribute(batch.weights),
            training=False,
        )
        actual = self.strategy.run(self.embedding.dequeue)
        self._compare(batch, actual, expected)

    def check_variables(self) -> None:
        """Compares all tables and slots; rows never named must have kept their bits."""
        variables = self.embedding.variables
        for name, config in self.configs.items():
            expected = {
                "parameters": self.reference.tables[name],
                **self.reference.slots.get(name, {}),
            }
            actual = variables[config]
            assert sorted(actual) == sorted(expected)
            for variable, values in expected.items():
                scale = self._condition * max(LARGEST_TERM, np.abs(values).max())
                bound = cases.tolerance(self._terms[name], scale, self._steps)
                what = f"{name} {variable} after {self._steps} steps"
                cases.assert_close(actual[variable], values, bound, what)
            self._check_other_rows(name, np.asarray(actual["parameters"]))

    def distribute(self, parts: Sequence[Any]) -> Any:
        """Makes one value per replica, as enqueue and strategy.run take it."""
        if self.replicas == 1:
            return parts[0]
        return of_replicas(self.strategy, parts)

    def _train_eagerly(self, values: Any, weights: Any, gradients: Any) -> Any:
        if not self._inside:
            self.embedding.enqueue(values, weights)

        def replica_step(own_values: Any, own_weights: Any, own_gradients: Any) -> Any:
            if self._inside:
                self.embedding.enqueue(own_values, own_weights)
            activations = self.embedding.dequeue()
            self.embedding.apply_gradients(own_gradients)
            return activations

        return self.strategy.run(replica_step, args=(values, weights, gradients))

    def reference_batch(self, batch: Batch) -> tuple[list, list]:
        return (
            [list(replica.values()) for replica in batch.values],
            [list(replica.values()) for replica in batch.weights],
        )

    def by_name(self, activations: Any) -> list[dict[str, np.ndarray]]:
        return [
            dict(zip(self.features, replica, strict=True)) for replica in activations
        ]

    def _compare(self, batch: Batch, actual: Any, expected: Any) -> None:
        self._condition = max(self._condition, batch.condition)
        for name, feature in self.features.items():
            parts = self.strategy.experimental_local_results(actual[name])
            assert len(parts) == self.replicas
            # After updates the table already has an error.
            terms = feature.input.shape[-1]
            for replica, part in enumerate(parts):
                table = self.reference._tables[feature.table]
                largest = max(1, np.abs(table).max(initial=0))
                scale = self._condition * LARGEST_TERM * largest
                cases.assert_close(
                    part,
                    expected[replica][name],
                    cases.tolerance(
                        max(terms, self._terms[feature.table]), scale, self._steps
                    ),
                    f"activation of {name}, step {self._steps}, replica {replica}",
                )

    def _note(self, batch: Batch) -> None:
        """Remembers which rows were named, and how often at most in one step."""
        self._steps += 1
        for name, table in self.tables.items():
            ids = [
                cases.values_of(replica[feature]).ravel()
                for replica in batch.values
                for feature, config in self.features.items()
                if config.table == name
            ]
            if not ids:
                continue
            named = np.concatenate(ids)
            if table.invalid_ids == "drop":
                named = named[(named >= 0) & (named < table.rows)]
            rows, counts = np.unique(named % table.rows, return_counts=True)
            self._named[name].update(rows.tolist())
            self._terms[name] = max(self._terms[name], counts.max(initial=1))

    def _check_other_rows(self, name: str, values: np.ndarray) -> None:
        table = self.tables[name]
        specs = {spec.name: spec for spec in self.embedding.core.plan.tables}
        optimizer = specs[name].optimizer
        if optimizer is not None and optimizer.touches_all_rows:
            return
        others = sorted(set(range(table.rows)) - self._named[name])
        before = cases.named_values(table.rows, table.dim)
        np.testing.assert_array_equal(values[others], before[others], err_msg=name)
