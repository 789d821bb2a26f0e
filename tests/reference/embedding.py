"""Sections 3 and 7: whole training steps over several features and replicas."""

from __future__ import annotations

import copy
import dataclasses
import inspect
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np

from . import lookup as lookups
from . import optimizers

Activations = list[list[np.ndarray]]  # [replica][feature]


@dataclasses.dataclass
class Table:
    """A table as section 3 knows it.

    Attributes:
      values: The initial values, [V, D].
      optimizer: The class's name, or None.
      hyper: The optimizer's arguments. `learning_rate` is among them: a number, or
        a callable of no argument or of the number of updates already applied.
      combiner: "sum", "mean" or "sqrtn".
      quantization: The quantization of section 6, or None.
      invalid_ids: "error", "drop" or "mod".
    """

    values: np.ndarray
    optimizer: str | None = None
    hyper: dict[str, Any] = dataclasses.field(default_factory=dict)
    combiner: str = "mean"
    quantization: lookups.Quantization | None = None
    invalid_ids: str = "error"


@dataclasses.dataclass
class Feature:
    """A feature as section 2 knows it."""

    table: str
    max_sequence_length: int = 0
    output_shape: tuple[int | None, ...] | None = None


@dataclasses.dataclass
class _Update:
    """The changes that a step makes to tables, fixed when its gradients arrive."""

    gradient_rows: dict[str, dict[int, np.ndarray]]  # [table][row]
    rates: dict[str, float]


class ReferenceEmbedding:
    """TPUEmbedding as the sections define it.

    Features, weights and gradients are given as [replica][feature]: TensorFlow
    tensors of the three kinds, such weights or None, and arrays or None.
    """

    def __init__(
        self,
        tables: Mapping[str, Table],
        features: Sequence[Feature],
        *,
        pipelined: bool = False,
    ) -> None:
        self._configs = dict(tables)
        self._features = list(features)
        self._pipelined = pipelined
        self._tables = {n: np.array(t.values, float) for n, t in tables.items()}
        self._slots = {
            name: optimizers.initial_slots(t.optimizer, t.hyper, t.values.shape)
            for name, t in tables.items()
            if t.optimizer
        }
        self._forward: list[list[lookups.Samples]] = []
        self._pending: _Update | None = None
        self._num_updates = 0

    @property
    def tables(self) -> dict[str, np.ndarray]:
        """The tables, float64, after a pending update."""
        self.flush()
        return self._tables

    @property
    def slots(self) -> dict[str, dict[str, np.ndarray]]:
        """The slots of each table, float64, after a pending update."""
        self.flush()
        return self._slots

    def lookup(
        self,
        features: Sequence[Sequence[Any]],
        weights: Sequence[Sequence[Any]] | None = None,
    ) -> Activations:
        """An evaluation step: the activations, nothing else."""
        self.flush()
        return self._activations(self._samples(features, weights))

    def step(
        self,
        features: Sequence[Sequence[Any]],
        weights: Sequence[Sequence[Any]] | None,
        gradients: Sequence[Sequence[Any]],
    ) -> Activations:
        """Trains one step: `forward`, then `backward`."""
        activations = self.forward(features, weights)
        self.backward(gradients)
        return activations

    def forward(
        self,
        features: Sequence[Sequence[Any]],
        weights: Sequence[Sequence[Any]] | None = None,
    ) -> Activations:
        """The activations of a training step, float64 [*output_shape, D] each."""
        self._forward = self._samples(features, weights)
        activations = self._activations(self._forward)
        self.flush()  # If pipelined, applies the step before, unseen by this one.
        return activations

    def backward(self, gradients: Sequence[Sequence[Any]]) -> None:
        """Takes the gradients of the activations that `forward` gave."""
        self._pending = _Update(self._gradient_rows(gradients), self._rates())
        self._num_updates += 1
        if not self._pipelined:
            self.flush()

    def flush(self) -> None:
        """Applies the update that pipelining left pending."""
        update, self._pending = self._pending, None
        if update is None:
            return
        for name, rate in update.rates.items():
            config = self._configs[name]
            assert config.optimizer
            self._tables[name], self._slots[name] = optimizers.apply(
                config.optimizer,
                config.hyper,
                self._tables[name],
                self._slots[name],
                update.gradient_rows[name],
                rate,
            )

    def discard(self) -> None:
        """Forgets the update that pipelining left pending, and does not count it."""
        self._num_updates -= self._pending is not None
        self._pending = None

    def state(self) -> Any:
        """Copies tables, slots and the number of updates, after a pending update."""
        self.flush()
        return copy.deepcopy((self._tables, self._slots, self._num_updates))

    def restore(self, state: Any) -> None:
        """Takes over what `state` returned, and drops a pending update."""
        self._pending = None
        self._tables, self._slots, self._num_updates = copy.deepcopy(state)

    def _samples(
        self, features: Sequence[Sequence[Any]], weights: Sequence[Sequence[Any]] | None
    ) -> list[list[lookups.Samples]]:
        if weights is None:
            weights = [[None] * len(self._features) for _ in features]
        return [
            [
                lookups.samples_of(
                    value, weight, spec.max_sequence_length, spec.output_shape
                )
                for spec, value, weight in zip(
                    self._features, values, value_weights, strict=True
                )
            ]
            for values, value_weights in zip(features, weights, strict=True)
        ]

    def _activations(self, samples: list[list[lookups.Samples]]) -> Activations:
        return [
            [
                self._activation(spec, feature_samples)
                for spec, feature_samples in zip(self._features, replica, strict=True)
            ]
            for replica in samples
        ]

    def _activation(self, spec: Feature, samples: lookups.Samples) -> np.ndarray:
        config, table = self._configs[spec.table], self._tables[spec.table]
        flat = lookups.lookup(
            table, samples, config.combiner, config.quantization, config.invalid_ids
        )
        return flat.reshape(*samples.shape, table.shape[1])

    def _gradient_rows(
        self, gradients: Sequence[Sequence[Any]]
    ) -> dict[str, dict[int, np.ndarray]]:
        """Sums G by table and touched row over replicas, features, samples, entries."""
        rows: dict[str, dict[int, np.ndarray]] = {name: {} for name in self._configs}
        for replica, replica_gradients in zip(self._forward, gradients, strict=True):
            for spec, samples, gradient in zip(
                self._features, replica, replica_gradients, strict=True
            ):
                self._add_gradient(rows[spec.table], spec, samples, gradient)
        return rows

    def _add_gradient(
        self,
        rows: dict[int, np.ndarray],
        spec: Feature,
        samples: lookups.Samples,
        gradient: Any,
    ) -> None:
        config, table = self._configs[spec.table], self._tables[spec.table]
        num_samples, dim = len(samples.entries), table.shape[1]
        if gradient is None:
            gradient = np.zeros((num_samples, dim))
        flat = np.asarray(gradient, np.float64).reshape(num_samples, dim)
        entries_of = lookups.resolve_ids(samples, len(table), config.invalid_ids)
        for sample, entries in enumerate(entries_of):
            weights = [weight for _, weight in entries]
            gains = lookups.gains(weights, config.combiner)
            for (row, _), gain in zip(entries, gains, strict=True):
                rows.setdefault(row, np.zeros(dim))
                rows[row] = rows[row] + gain * flat[sample]

    def _rates(self) -> dict[str, float]:
        """The learning rate of each table that has an optimizer."""
        evaluated: dict[int, float] = {}  # Calls each callable once per step.
        rates = {}
        for name, config in self._configs.items():
            if config.optimizer is None:
                continue
            rate = config.hyper["learning_rate"]
            if callable(rate):
                if id(rate) not in evaluated:
                    evaluated[id(rate)] = self._evaluate(rate)
                rate = evaluated[id(rate)]
            rates[name] = float(rate)
        return rates

    def _evaluate(self, rate: Callable[..., Any]) -> float:
        takes_step = bool(inspect.signature(rate).parameters)
        return float(rate(self._num_updates) if takes_step else rate())
