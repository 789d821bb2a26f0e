"""Custom combiners in stock ops.

What a CustomCombiner looks up are its vectors: each entry is a sample of its own, at
its position in the sample that it is of.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import tensorflow as tf

from tpu_embedding.combiners import CustomCombiner
from tpu_embedding.engines import table_errors
from tpu_embedding.engines.initial_values import combiner_weights
from tpu_embedding.engines.variables import create_state, variable_name
from tpu_embedding.layout.csr import (
    CombinedCsrFormatTensor,
    PartitionedCsrFormatTensor,
)
from tpu_embedding.layout.plan import Plan
from tpu_embedding.layout.stacking import Layout, Stack
from tpu_embedding.lookup.entries import Entries
from tpu_embedding.lookup.graph_checks import Check, require, text
from tpu_embedding.optimizers import CustomOptimizer


@dataclasses.dataclass(frozen=True)
class Found:
    """What one lookup of one feature found.

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
      of_features: By index of the feature its combiner; of those that have one.
      weights: By index of the table the weights, float32 [num_weights]; of those with
        a custom combiner, which may have none.
    """

    def __init__(self, plan: Plan, layout: Layout | None) -> None:
        """Makes the weights, on the device that is current."""
        self._plan = plan
        self._stacks = layout.stacks if layout else ()
        self.weights: dict[int, tf.Variable] = {}
        self.of_features: dict[int, CustomCombiner] = {}
        for table in plan.tables:
            combiner = table.config.custom_combiner
            if combiner is not None:
                name = f"{table.name}/{combiner.NAME}"
                self.weights[table.index] = create_state(
                    variable_name(name), combiner_weights(name, combiner)
                )
                self.of_features |= dict.fromkeys(table.features, combiner)

    def variables(self, table: int) -> dict[str, tf.Variable]:
        """The weights of a table by their name; nothing without any."""
        weights: Any = self.weights.get(table)
        if weights is None or weights.shape[0] == 0:
            return {}
        return {CustomCombiner.NAME: weights}

    def checked(self, entries: Sequence[Entries]) -> list[Entries]:
        """The entries, if no sample has more of them than its combiner takes."""
        if not self.of_features:
            return list(entries)
        checks = [
            self._check(feature, combiner, entries[feature])
            for feature, combiner in self.of_features.items()
        ]
        with tf.control_dependencies(require(checks)):
            return [
                dataclasses.replace(entry, rows=tf.identity(entry.rows))
                for entry in entries
            ]

    def places(self, feature: int, entries: Entries) -> Entries:
        """Each entry as the one of a sample: its position, of [..., max_valency]."""
        valency = self.of_features[feature].max_valency
        numbers = tf.range(tf.size(entries.samples, tf.int64))
        starts = tf.searchsorted(entries.samples, entries.samples, out_type=tf.int64)
        return dataclasses.replace(
            entries,
            samples=entries.samples * valency + numbers - starts,
            shape=tf.concat([entries.shape, [valency]], 0),
        )

    def all_places(self, entries: Sequence[Entries]) -> list[Entries]:
        """`places` of the features with a custom combiner, the others as they are."""
        return [
            self.places(feature, own) if feature in self.of_features else own
            for feature, own in enumerate(entries)
        ]

    def combine_all(
        self, entries: Sequence[Entries], vectors: Sequence[tf.Tensor]
    ) -> tuple[list[tf.Tensor], dict[int, Found]]:
        """The activations of all features, and by feature what the update is to know.

        Args:
          entries: For each feature, before `places`.
          vectors: For each feature what was looked up at its places.
        """
        activations, found = list(vectors), {}
        for feature in self.of_features:
            activations[feature], found[feature] = self._combine(
                feature, entries[feature], vectors[feature]
            )
        return activations, found

    def _combine(self, feature: int, entries: Entries, vectors: tf.Tensor) -> Any:
        """(The activations, [*entries.shape, D], what the update is to know)."""
        combiner = self.of_features[feature]
        table = self._plan.tables[self._plan.features[feature].table]
        dim = table.config.dim
        found = Found(
            valencies=tf.math.bincount(
                tf.cast(entries.samples, tf.int32),
                minlength=tf.cast(entries.num_samples, tf.int32),
                maxlength=tf.cast(entries.num_samples, tf.int32),
            ),
            vectors=tf.reshape(vectors, [-1, combiner.max_valency, dim]),
            weights=self.weights[table.index].read_value(),
        )
        shape = tf.concat([entries.shape, [dim]], 0)
        return tf.reshape(_combine(combiner, found), shape), found

    @property
    def num_weights(self) -> int:
        """Of all tables together."""
        return sum(self._sizes())

    def _sizes(self) -> list[int]:
        configs = [self._plan.tables[table].config for table in self.weights]
        combiners = [config.custom_combiner for config in configs]
        return [one.num_weights for one in combiners if one is not None]

    def backward(
        self, found: Mapping[int, Found], gradients: Sequence[tf.Tensor | None]
    ) -> tuple[dict[int, tf.Tensor], tf.Tensor]:
        """The gradients behind the combiners.

        Args:
          found: By feature what its lookup found.
          gradients: For each feature that of its activations, or None.

        Returns:
          (By feature that of its vectors, those of all weights one after another).
        """
        of_vectors = {}
        of_weights = {
            table: [tf.zeros(weights.shape)] for table, weights in self.weights.items()
        }
        for feature, own in found.items():
            gradient = gradients[feature]
            if gradient is not None:
                of_vectors[feature], one = self._gradients(feature, own, gradient)
                of_weights[self._plan.features[feature].table].append(one)
        sums = [tf.add_n(parts) for parts in of_weights.values()]
        return of_vectors, tf.concat([*sums, tf.zeros([0])], 0)

    def _gradients(
        self, feature: int, found: Found, gradient: tf.Tensor
    ) -> tuple[tf.Tensor, tf.Tensor]:
        """Those of the vectors, [n * max_valency, D], and of the weights."""
        combiner = self.of_features[feature]
        dim = gradient.shape[-1]
        with tf.GradientTape() as tape:
            tape.watch((found.vectors, found.weights))
            combined = _combine(combiner, found)
        of_vectors: Any
        of_weights: Any
        of_vectors, of_weights = tape.gradient(
            [combined],
            [found.vectors, found.weights],
            [tf.reshape(gradient, [-1, dim])],
            unconnected_gradients=tf.UnconnectedGradients.ZERO,
        )
        return tf.reshape(of_vectors, [-1, dim]), of_weights

    def pack(
        self,
        tables: Mapping[str, PartitionedCsrFormatTensor],
        found: Mapping[int, Found],
    ) -> dict[str, Any]:
        """The batch of a lookup with what it found."""
        packed: dict[str, Any] = dict(tables)
        for stack in self._stacks:
            own = [found[f] for f in stack.features if f in found]
            if own:
                packed[stack.name] = CombinedCsrFormatTensor(
                    *tables[stack.name],
                    sorted_pos_ids=_positions(tables[stack.name].row_pointers),
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
          tables: What it gave.
          samples: For each feature its number of samples, int64 scalars.

        Raises:
          ValueError: If a shape is that of another combiner.
          tf.errors.InvalidArgumentError: If it is of another number of samples.
        """
        found = {}
        for stack in self._stacks:
            own = [f for f in stack.features if f in self.of_features]
            if not own:
                continue
            counts = [samples[f] for f in own]
            whole = self._checked_found(stack, tables[stack.name], tf.add_n(counts))
            valencies = tf.split(whole.valencies, counts, num=len(own))
            vectors = tf.split(whole.vectors, counts, num=len(own))
            for feature, *values in zip(own, valencies, vectors, strict=True):
                found[feature] = Found(*values, weights=whole.weights)
        return found

    def _checked_found(self, stack: Stack, table: Any, samples: tf.Tensor) -> Found:
        """What was found for all features of a stack."""
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
                wanted = tf.TensorShape(shape)
                raise ValueError(
                    f"Preserved outputs of stacked table {stack.name!r}: `{field}` is "
                    f"of size {tensor.shape}, but this embedding has {wanted}. Pass "
                    "the second output of its own embedding_lookup."
                )
            found[field] = tf.ensure_shape(tensor, shape)
            if shape[0] is None:
                checks.append(_check_samples(stack, field, found[field], samples))
        with tf.control_dependencies(require(checks)):
            return Found(**{name: tf.identity(found[name]) for name in found})

    def update(self, gradients: tf.Tensor, rate_of: Callable[[int], tf.Tensor]) -> None:
        """One step of SGD.

        Args:
          gradients: Those of all weights one after another, summed.
          rate_of: Gives the learning rate of a table's weights, by its index.
        """
        sizes = self._sizes()
        parts = tf.split(gradients, sizes) if sizes else []
        for (table, weights), part in zip(self.weights.items(), parts, strict=True):
            weights.assign_sub(rate_of(table) * part)

    def _check(self, feature: int, combiner: CustomCombiner, entries: Entries) -> Check:
        spec = self._plan.features[feature]
        counts = tf.math.bincount(tf.cast(entries.samples, tf.int32))
        most = combiner.max_valency

        def message() -> tf.Tensor:
            at = tf.argmax(counts > most)
            return text(
                f"Feature {spec.path}, table {self._plan.tables[spec.table].name}: "
                "sample ",
                at,
                " has ",
                counts[at],
                f" ids, but its CustomCombiner takes at most {most} (max_valency).",
            )

        return Check(tf.reduce_all(counts <= most), message)


def _check_samples(
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
            ". Pass on what the lookup gave.",
        ),
    )


def _combine(combiner: CustomCombiner, found: Found) -> tf.Tensor:
    """The combiner over all samples, [n, D]."""
    weights = [found.weights] if combiner.num_weights else []
    return tf.vectorized_map(
        lambda one: combiner.compute(one[0], one[1], *weights),
        (found.valencies, found.vectors),
    )


def _positions(pointers: tf.Tensor) -> tf.Tensor:
    """The position of each entry of a plain CSR in its sample, int32."""
    counts = pointers[1:] - pointers[:-1]
    return tf.range(pointers[-1]) - tf.repeat(pointers[:-1], counts)


def check_functions(plan: Plan) -> None:
    """Traces each CustomOptimizer and CustomCombiner for its table.

    Raises:
      ValueError: If a function returns another shape, or number of tensors.
      TypeError: If it takes other arguments, or returns what is no float32 tensor.
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

    def combine(valency: Any, vectors: Any, *weights: Any) -> Any:
        return combiner.compute(valency, vectors, *weights, table=table)

    vectors = tf.TensorSpec([combiner.max_valency, dim])
    inputs = [tf.TensorSpec([], tf.int32), vectors, *weights]
    _trace(table, "CustomCombiner", combine, inputs)


def _trace(table: str, what: str, function: Any, inputs: list[tf.TensorSpec]) -> None:
    with table_errors.function_of(table, what):
        tf.function(function, autograph=False).get_concrete_function(*inputs)
