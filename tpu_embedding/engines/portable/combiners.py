"""Custom combiners, made of TensorFlow's ops.

A feature with a CustomCombiner looks its vectors up one by one: each entry is then a
sample of its own, at its position in its sample.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import tensorflow as tf

from tpu_embedding.combiners import CustomCombiner
from tpu_embedding.engines import errors as engine_errors
from tpu_embedding.layout.csr import (
    CombinedCsrFormatTensor,
    PartitionedCsrFormatTensor,
)
from tpu_embedding.layout.plan import Plan
from tpu_embedding.layout.stacking import Layout, Stack
from tpu_embedding.lookup.entries import Entries
from tpu_embedding.lookup.graph_checks import Check, require, text
from tpu_embedding.optimizers import CustomOptimizer
from tpu_embedding.tables.initial import combiner_values
from tpu_embedding.tables.variables import create_state, variable_name


class Found(NamedTuple):
    """The inputs of a custom combiner, from one lookup of one feature.

    Attributes:
      valencies: int32 [n].
      vectors: float32 [n, max_valency, D].
      weights: float32 [num_weights].
    """

    valencies: tf.Tensor
    vectors: tf.Tensor
    weights: tf.Tensor


class Combiners:
    """The custom combiners of a plan and their weights.

    Attributes:
      num_weights: The number of weights of all tables together.
    """

    def __init__(self, plan: Plan, layout: Layout | None) -> None:
        """Makes the weights, on the device that is current."""
        self._plan = plan
        self._stacks = layout.stacks if layout else ()
        # By index of the table, and the combiner by index of the feature.
        self._weights: dict[int, tf.Variable] = {}
        self._of_features: dict[int, CustomCombiner] = {}
        for table in plan.tables:
            combiner = table.config.custom_combiner
            if combiner is not None:
                name = f"{table.name}/{combiner.CUSTOM_COMBINER_SLOT_NAME}"
                self._weights[table.index] = create_state(
                    variable_name(name), combiner_values(name, combiner).whole()
                )
                self._of_features |= dict.fromkeys(table.features, combiner)
        self._sizes = [int(w.shape[0] or 0) for w in self._weights.values()]
        self.num_weights = sum(self._sizes)

    def variables(self, table: int) -> dict[str, tf.Variable]:
        """The weights of a table by name, if it has any."""
        weights: Any = self._weights.get(table)
        if weights is None or weights.shape[0] == 0:
            return {}
        return {CustomCombiner.CUSTOM_COMBINER_SLOT_NAME: weights}

    def checked(self, entries: Sequence[Entries]) -> list[Entries]:
        """The entries, after a check that no sample has more than `max_valency`."""
        if not self._of_features:
            return list(entries)
        checks = [
            self._valency_check(feature, combiner.max_valency, entries[feature])
            for feature, combiner in self._of_features.items()
        ]
        with tf.control_dependencies(require(checks)):
            return [entry._replace(rows=tf.identity(entry.rows)) for entry in entries]

    def _valency_check(self, feature: int, limit: int, entries: Entries) -> Check:
        spec = self._plan.features[feature]
        counts = tf.math.bincount(tf.cast(entries.samples, tf.int32))

        def message() -> tf.Tensor:
            at = tf.argmax(counts > limit)
            return text(
                f"Feature {spec.path}, table {self._plan.tables[spec.table].name}: "
                "sample ",
                at,
                " has ",
                counts[at],
                f" ids, but its CustomCombiner takes at most {limit} (max_valency).",
            )

        return Check(counts <= limit, message)

    def positions(self, entries: Sequence[Entries]) -> list[Entries]:
        """The entries to look up: one sample for each position of a sample.

        Args:
          entries: For each feature. Those without a custom combiner stay as they are.
        """
        spread = list(entries)
        for feature, combiner in self._of_features.items():
            own = entries[feature]
            numbers = tf.range(tf.size(own.samples, tf.int64))
            begins = tf.searchsorted(own.samples, own.samples, out_type=tf.int64)
            spread[feature] = own._replace(
                samples=own.samples * combiner.max_valency + numbers - begins,
                shape=tf.concat([own.shape, [combiner.max_valency]], 0),
            )
        return spread

    def combine(
        self, entries: Sequence[Entries], vectors: Sequence[tf.Tensor]
    ) -> tuple[list[tf.Tensor], dict[int, Found]]:
        """Combines the vectors of all features.

        Args:
          entries: For each feature, before `positions`.
          vectors: For each feature the lookup of its `positions`.

        Returns:
          (The activations; by feature the inputs of its combiner).
        """
        activations, found = list(vectors), {}
        for feature, combiner in self._of_features.items():
            own = entries[feature]
            table = self._plan.tables[self._plan.features[feature].table]
            dim, count = table.config.dim, tf.cast(own.num_samples, tf.int32)
            samples = tf.cast(own.samples, tf.int32)
            found[feature] = Found(
                tf.math.bincount(samples, minlength=count, maxlength=count),
                tf.reshape(vectors[feature], [-1, combiner.max_valency, dim]),
                self._weights[table.index].read_value(),
            )
            activations[feature] = tf.reshape(
                _combine(combiner, found[feature]), tf.concat([own.shape, [dim]], 0)
            )
        return activations, found

    def backward(
        self, found: Mapping[int, Found], gradients: Sequence[tf.Tensor | None]
    ) -> tuple[list[tf.Tensor | None], tf.Tensor]:
        """The gradients behind the combiners.

        Args:
          found: By feature the inputs of its combiner.
          gradients: For each feature the gradient of its activations, or None.

        Returns:
          (For each feature the gradient of its lookup, or None; the gradients of all
          weights, one after another).
        """
        of_lookups = list(gradients)
        of_weights = {
            table: [tf.zeros(weights.shape)] for table, weights in self._weights.items()
        }
        for feature, own in found.items():
            gradient = gradients[feature]
            if gradient is None:
                continue
            dim = gradient.shape[-1]
            with tf.GradientTape() as tape:
                tape.watch((own.vectors, own.weights))
                combined = _combine(self._of_features[feature], own)
            of_vectors: Any
            of_own_weights: Any
            of_vectors, of_own_weights = tape.gradient(
                [combined],
                [own.vectors, own.weights],
                [tf.reshape(gradient, [-1, dim])],
                unconnected_gradients=tf.UnconnectedGradients.ZERO,
            )
            of_lookups[feature] = tf.reshape(of_vectors, [-1, dim])
            of_weights[self._plan.features[feature].table].append(of_own_weights)
        sums = [tf.add_n(parts) for parts in of_weights.values()]
        return of_lookups, tf.concat([*sums, tf.zeros([0])], 0)

    def update(self, gradients: tf.Tensor, rate_of: Callable[[int], tf.Tensor]) -> None:
        """Trains the weights by one step of SGD.

        Args:
          gradients: Of all weights, one after another, summed over the replicas.
          rate_of: Returns the learning rate of the weights of a table, by its index.
        """
        parts = tf.split(gradients, self._sizes) if self._sizes else []
        for (table, weights), part in zip(self._weights.items(), parts, strict=True):
            weights.assign_sub(rate_of(table) * part)

    def pack(
        self,
        tables: Mapping[str, PartitionedCsrFormatTensor],
        found: Mapping[int, Found],
    ) -> dict[str, Any]:
        """Adds the inputs of combiners to the stacks of a batch."""
        packed: dict[str, Any] = dict(tables)
        for stack in self._stacks:
            own = [found[f] for f in stack.features if f in found]
            if own:
                table = tables[stack.name]
                begins = table.row_pointers[:-1]
                counts = table.row_pointers[1:] - begins
                packed[stack.name] = CombinedCsrFormatTensor(
                    *table,
                    sorted_pos_ids=tf.range(table.row_pointers[-1])
                    - tf.repeat(begins, counts),
                    valencies=tf.concat([one.valencies for one in own], 0),
                    vectors=tf.concat([one.vectors for one in own], 0),
                    weights=own[0].weights,
                )
        return packed

    def unpack(
        self, tables: Mapping[str, Any], samples: Sequence[tf.Tensor]
    ) -> dict[int, Found]:
        """Undoes `pack`.

        Args:
          tables: The stacks, which may hold anything: they come from the user.
          samples: For each feature its number of samples, int64 scalars.

        Raises:
          ValueError: If a shape is that of another combiner.
          tf.errors.InvalidArgumentError: If it has another number of samples.
        """
        found = {}
        for stack in self._stacks:
            own = [f for f in stack.features if f in self._of_features]
            if own:
                counts = [samples[f] for f in own]
                whole = self._checked_found(stack, tables[stack.name], tf.add_n(counts))
                valencies = tf.split(whole.valencies, counts, num=len(own))
                vectors = tf.split(whole.vectors, counts, num=len(own))
                for feature, *values in zip(own, valencies, vectors, strict=True):
                    found[feature] = Found(*values, weights=whole.weights)
        return found

    def _checked_found(self, stack: Stack, table: Any, samples: tf.Tensor) -> Found:
        """The inputs for all features of a stack, after their checks."""
        config = self._plan.tables[stack.tables[0]].config
        combiner = config.custom_combiner
        assert combiner is not None
        shapes = {
            "valencies": [None],
            "vectors": [None, combiner.max_valency, config.dim],
            "weights": [combiner.num_weights],
        }
        found, checks = {}, []
        for field, shape in shapes.items():
            tensor = tf.convert_to_tensor(getattr(table, field))
            if not tensor.shape.is_compatible_with(shape):
                raise ValueError(
                    f"Preserved outputs of stacked table {stack.name!r}: `{field}` is "
                    f"of size {tensor.shape}, but this embedding has "
                    f"{tf.TensorShape(shape)}. Pass the second output of its own "
                    "embedding_lookup."
                )
            found[field] = tf.ensure_shape(tensor, shape)
            if field != "weights":
                checks.append(_samples_check(stack, field, found[field], samples))
        with tf.control_dependencies(require(checks)):
            return Found(**{name: tf.identity(found[name]) for name in found})


def _samples_check(
    stack: Stack, field: str, tensor: tf.Tensor, samples: tf.Tensor
) -> Check:
    got = tf.shape(tensor, tf.int64)[0]
    return Check(
        tf.equal(got, samples),
        lambda: text(
            f"Preserved outputs of stacked table {stack.name}: `{field}` is of ",
            got,
            " samples, but there are ",
            samples,
            ". Pass the second output of embedding_lookup.",
        ),
    )


def _combine(combiner: CustomCombiner, found: Found) -> tf.Tensor:
    """The combiner over all samples, [n, D]."""
    weights = [found.weights] if combiner.num_weights else []
    return tf.vectorized_map(
        lambda one: combiner.compute(one[0], one[1], *weights),
        (found.valencies, found.vectors),
    )


def check_functions(plan: Plan) -> None:
    """Traces each CustomOptimizer and CustomCombiner, before anything is made.

    Raises:
      ValueError: If a function returns another shape, or number of tensors.
      TypeError: If it takes other arguments, or returns anything but float32 tensors.
    """
    for table in plan.tables:
        optimizer, combiner = table.optimizer, table.config.custom_combiner
        if isinstance(optimizer, CustomOptimizer):
            _check_rule(table.name, optimizer, table.config.dim)
        if combiner is not None:
            _check_combiner(table.name, combiner, table.config.dim)


def _check_rule(table: str, optimizer: CustomOptimizer, dim: int) -> None:
    row = tf.TensorSpec([1, dim])
    slots = [tf.TensorSpec([1]) if slot.per_row else row for slot in optimizer.slots]
    numbers = [tf.TensorSpec([])] * (1 + len(optimizer.hyperparameters))

    def rule(gradient: Any, row: Any, *values: Any) -> Any:
        own, numbers = values[: len(slots)], values[len(slots) :]
        return optimizer.compute(gradient, row, own, *numbers, table=table)

    _trace(table, "CustomOptimizer", rule, [row, row, *slots, *numbers])


def _check_combiner(table: str, combiner: CustomCombiner, dim: int) -> None:
    weights = [tf.TensorSpec([combiner.num_weights])] if combiner.num_weights else []
    vectors = tf.TensorSpec([combiner.max_valency, dim])
    _trace(
        table,
        "CustomCombiner",
        functools.partial(combiner.compute, table=table),
        [tf.TensorSpec([], tf.int32), vectors, *weights],
    )


def _trace(table: str, what: str, function: Any, inputs: list[tf.TensorSpec]) -> None:
    with engine_errors.function_of(table, what):
        tf.function(function, autograph=False).get_concrete_function(*inputs)
