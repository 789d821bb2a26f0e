"""Custom combiners, which look up the vectors of a sample one by one."""

from __future__ import annotations

import functools
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import tensorflow as tf

from tpu_embedding.combiners import CustomCombiner
from tpu_embedding.engines.rates import trace_function
from tpu_embedding.layout.csr import CombinedCsrFormatTensor, PartitionedCsrFormatTensor
from tpu_embedding.layout.plan import Plan
from tpu_embedding.layout.stacking import Layout, Stack
from tpu_embedding.lookup.entries import Entries
from tpu_embedding.lookup.graph_checks import Check, element, first, require, text
from tpu_embedding.optimizers import CustomOptimizer
from tpu_embedding.tables.initial import combiner_values
from tpu_embedding.tables.variables import create_state, variable_name


class CombinerInputs(NamedTuple):
    """The inputs of a custom combiner, from one lookup of one feature."""

    valencies: tf.Tensor  # int32 [n]
    vectors: tf.Tensor  # float32 [n, max_valency, D]
    weights: tf.Tensor  # float32 [num_weights]


class Combiners:
    """The custom combiners of a plan and their weights."""

    def __init__(self, plan: Plan, layout: Layout | None) -> None:
        """Makes the weights, on the device that is current."""
        self._plan = plan
        self._stacks = layout.stacks if layout else ()
        # The weights by index of the table, and the combiner by index of the feature.
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

    def variables(self, table: int) -> dict[str, tf.Variable]:
        """Returns the weights of a table by name, if it has any."""
        weights: Any = self._weights.get(table)
        if weights is None or weights.shape[0] == 0:
            return {}
        return {CustomCombiner.CUSTOM_COMBINER_SLOT_NAME: weights}

    def checked(self, entries: Sequence[Entries]) -> list[Entries]:
        """Returns the entries, after a check of `max_valency` for each sample."""
        checks = [self._valency_check(f, entries[f]) for f in self._of_features]
        with tf.control_dependencies(require(checks)):
            return [entry._replace(rows=tf.identity(entry.rows)) for entry in entries]

    def _valency_check(self, feature: int, entries: Entries) -> Check:
        spec, limit = (
            self._plan.features[feature],
            self._of_features[feature].max_valency,
        )
        counts = tf.math.bincount(tf.cast(entries.samples, tf.int32))

        def message() -> tf.Tensor:
            at = first(counts > limit)
            return text(
                f"Feature {spec.path}, table {self._plan.tables[spec.table].name}: "
                "sample ",
                at,
                " has ",
                element(counts, at),
                f" ids, but its CustomCombiner takes at most {limit} (max_valency).",
            )

        return Check(counts <= limit, message)

    def positions(self, entries: Sequence[Entries]) -> list[Entries]:
        """Makes each entry a sample of its own, at its position in its old sample."""
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
    ) -> tuple[list[tf.Tensor], dict[int, CombinerInputs]]:
        """Combines what was looked up at `positions` of `entries` into activations.

        It also returns the inputs of the combiner of each feature.
        """
        activations, found = list(vectors), {}
        for feature, combiner in self._of_features.items():
            own = entries[feature]
            table = self._plan.tables[self._plan.features[feature].table]
            dim, count = table.config.dim, tf.cast(own.num_samples, tf.int32)
            samples = tf.cast(own.samples, tf.int32)
            found[feature] = CombinerInputs(
                tf.math.bincount(samples, minlength=count, maxlength=count),
                tf.reshape(vectors[feature], [-1, combiner.max_valency, dim]),
                self._weights[table.index].read_value(),
            )
            activations[feature] = tf.reshape(
                _combine(combiner, found[feature]), tf.concat([own.shape, [dim]], 0)
            )
        return activations, found

    def backward(
        self, found: Mapping[int, CombinerInputs], gradients: Sequence[tf.Tensor | None]
    ) -> tuple[list[tf.Tensor | None], dict[int, tf.Tensor]]:
        """Returns the gradient of each feature's lookup, and of weights by table."""
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
            of_own: Any = tape.gradient(
                [combined],
                [own.vectors, own.weights],
                [tf.reshape(gradient, [-1, dim])],
                unconnected_gradients=tf.UnconnectedGradients.ZERO,
            )
            of_lookups[feature] = tf.reshape(of_own[0], [-1, dim])
            of_weights[self._plan.features[feature].table].append(of_own[1])
        return of_lookups, {t: tf.add_n(parts) for t, parts in of_weights.items()}

    def update(
        self, table: int, gradients: Mapping[int, tf.Tensor], rate: tf.Tensor
    ) -> None:
        """Trains the weights of a table, if it has any, by one step of SGD."""
        if table in gradients:
            self._weights[table].assign_sub(rate * gradients[table])

    def pack(
        self,
        tables: Mapping[str, PartitionedCsrFormatTensor],
        found: Mapping[int, CombinerInputs],
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
    ) -> dict[int, CombinerInputs]:
        """Undoes `pack`; the tensors may hold anything: they come from the user."""
        found = {}
        for stack in self._stacks:
            own = [f for f in stack.features if f in self._of_features]
            if own:
                counts = [samples[f] for f in own]
                whole = self._checked_found(stack, tables[stack.name], tf.add_n(counts))
                valencies = tf.split(whole.valencies, counts, num=len(own))
                vectors = tf.split(whole.vectors, counts, num=len(own))
                for feature, *values in zip(own, valencies, vectors, strict=True):
                    found[feature] = CombinerInputs(*values, weights=whole.weights)
        return found

    def _checked_found(
        self, stack: Stack, table: Any, samples: tf.Tensor
    ) -> CombinerInputs:
        config = self._plan.tables[stack.tables[0]].config
        combiner = config.custom_combiner
        assert combiner is not None
        found = CombinerInputs(
            *map(tf.convert_to_tensor, (table[-3], table[-2], table[-1]))
        )
        one = [combiner.max_valency, config.dim]
        shapes = ([samples], [samples, *one], [combiner.num_weights])
        message = (
            f"Preserved outputs of stacked table {stack.name}: valencies, vectors or "
            "weights belong to another batch or CustomCombiner. Pass the second output "
            "of the same embedding_lookup."
        )
        checks = [
            Check(_has_shape(tensor, shape), lambda: text(message))
            for tensor, shape in zip(found, shapes, strict=True)
        ]
        with tf.control_dependencies(require(checks)):
            valencies, vectors = map(tf.identity, found[:2])
            return CombinerInputs(
                valencies, tf.ensure_shape(vectors, [None, *one]), found[2]
            )


def _has_shape(tensor: tf.Tensor, shape: Sequence[Any]) -> tf.Tensor:
    if tensor.shape.rank != len(shape):
        return tf.constant(False)
    wanted = tf.cast(tf.stack(shape), tf.int64)
    return tf.reduce_all(tf.equal(tf.shape(tensor, tf.int64), wanted))


def _combine(combiner: CustomCombiner, found: CombinerInputs) -> tf.Tensor:
    """Applies the combiner to all samples, which gives [n, D]."""
    weights = [found.weights] if combiner.num_weights else []
    return tf.vectorized_map(
        lambda one: combiner.compute(one[0], one[1], *weights),
        (found.valencies, found.vectors),
    )


def check_functions(plan: Plan) -> None:
    """Traces each CustomOptimizer and CustomCombiner, before anything is made."""
    for table in plan.tables:
        name, dim = table.name, table.config.dim
        optimizer, combiner = table.optimizer, table.config.custom_combiner
        if isinstance(optimizer, CustomOptimizer):
            row = tf.TensorSpec([1, dim])
            slots = [tf.TensorSpec([1]) if s.per_row else row for s in optimizer.slots]
            rates = [tf.TensorSpec([])] * (1 + len(optimizer.hyperparameters))
            rule = functools.partial(optimizer.compute, table=name)
            trace_function(name, "CustomOptimizer", rule, [row, row, slots, *rates])
        if combiner is not None:
            valency = tf.TensorSpec([], tf.int32)
            vectors = tf.TensorSpec([combiner.max_valency, dim])
            count = combiner.num_weights
            inputs = [valency, vectors, *([tf.TensorSpec([count])] if count else [])]
            rule = functools.partial(combiner.compute, table=name)
            trace_function(name, "CustomCombiner", rule, inputs)
