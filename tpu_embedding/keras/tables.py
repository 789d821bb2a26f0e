"""The tables of a layer: trained by their own optimizers, or by the model's."""

from __future__ import annotations

import abc
import dataclasses
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import keras
import tensorflow as tf

from tpu_embedding import embedding, engines, topology
from tpu_embedding.engines.table_dtypes import require_dtypes
from tpu_embedding.initializers import default_initializer
from tpu_embedding.keras import errors, gate
from tpu_embedding.keras.calls import Calls
from tpu_embedding.keras.configs import Resolved
from tpu_embedding.lookup.combine import VariableReader
from tpu_embedding.serving.lookup import FeatureLookup

# Where TensorFlow makes the gradients of tf.cond and of loops.
_CONTROL_FLOW = (".cond_v2", ".while_v2")


class LayerTables(abc.ABC):
    """What holds the tables, looks them up and lets gradients through.

    The features are those that the layer was made with, unless said otherwise.
    """

    @abc.abstractmethod
    def build(self, layer: keras.layers.Layer) -> None:
        """Makes the tables, and those weights of the layer that Keras is to know."""

    @abc.abstractmethod
    def variables(self) -> dict[str, Any]:
        """Everything to be saved, by its name in checkpoints."""

    @abc.abstractmethod
    def look_up(
        self, values: Sequence[Any], weights: Sequence[Any], *, trainable: bool
    ) -> list[tf.Tensor]:
        """The activations of one batch, float32.

        Args:
          values: For each feature its ids.
          weights: For each feature its weights or None.
          trainable: Whether a gradient may change the tables.
        """

    @abc.abstractmethod
    def serve(
        self,
        resolved: Resolved,
        values: Sequence[Any],
        weights: Sequence[Any],
        *,
        trainable: bool,
    ) -> list[tf.Tensor]:
        """As `look_up`, for other features over the tables, in stock ops."""


class _TableWeight(keras.Variable):
    """A table or slot as Keras sees it: the same memory, no copy."""

    def __init__(self, variable: tf.Variable, name: str) -> None:
        super().__init__(
            lambda shape, dtype: variable,
            shape=variable.shape,
            dtype=variable.dtype,
            trainable=False,
            autocast=False,
            name=_flat(name),
        )

    def _initialize_with_initializer(self, initializer: Any) -> None:
        # At once, or later where Keras builds models without making variables.
        self._initialize(initializer(self.shape, dtype=self.dtype))


@dataclasses.dataclass(frozen=True, eq=False)
class _Call:
    """One lookup whose gradient may be asked for.

    Attributes:
      values: The ids, in the user's structure.
      weights: Their weights or None, in the same.
      ticket: Of the lookup.
      number: int64 scalar of a call in a graph, else None; see `Calls`.
    """

    values: Any
    weights: Any
    ticket: Any
    number: tf.Tensor | None

    def reaches(self, graph: Any) -> bool:
        """Whether the ticket can be used in `graph`: made there or around it."""
        ticket = tf.nest.flatten(self.ticket)[0]
        if hasattr(ticket, "numpy"):
            return True  # Made eagerly.
        while graph is not None and graph is not ticket.graph:
            graph = getattr(graph, "outer_graph", None)
        return graph is not None


class UpdatedTables(LayerTables):
    """Tables of a core TPUEmbedding, updated in the backward pass."""

    def __init__(
        self,
        resolved: Resolved,
        *,
        batch_size: int | None,
        loss_scale: float | Callable[[], Any] | None,
        check_numerics: bool,
    ) -> None:
        """Makes the embedding for the strategy whose scope is open."""
        self._resolved = resolved
        self._without_optimizer = [
            spec.name for spec in resolved.plan.tables if spec.optimizer is None
        ]
        self._loss_scale = loss_scale
        self._check_numerics = check_numerics
        engines.require_lookups(topology.current(), "keras.TPUEmbedding")
        self._core = embedding.TPUEmbedding(
            resolved.features(),
            resolved.optimizer,
            batch_size=batch_size,
            check_numerics=check_numerics,
        )
        if batch_size is not None:
            batch_size //= tf.distribute.get_strategy().num_replicas_in_sync
        self._batch_size = batch_size
        self._virtual: Any = None
        self._calls: Any = None

    def build(self, layer: keras.layers.Layer) -> None:
        self._virtual = layer.add_weight(
            name="virtual",
            shape=(),
            initializer="zeros",
            dtype="float32",
            autocast=False,
        )
        self._core.build()
        with tf.init_scope():
            self._calls = Calls()
        # For `get_weights` and what builds on it: EarlyStopping, summary, export.
        layer.state_of_tables = [
            _TableWeight(variable, name) for name, variable in self.variables().items()
        ]

    def variables(self) -> dict[str, Any]:
        return self._core.checkpoint_variables()

    def look_up(
        self, values: Sequence[Any], weights: Sequence[Any], *, trainable: bool
    ) -> list[tf.Tensor]:
        recording = gate.is_recording()
        between_replicas = tf.distribute.in_cross_replica_context() and (
            tf.distribute.get_strategy().num_replicas_in_sync > 1
        )
        exportable = not tf.executing_eagerly() and not gate.is_evaluation()
        if not recording and (exportable or between_replicas):
            # Only stock ops go into a graph that may be exported.
            return self.serve(self._resolved, values, weights, trainable=trainable)
        structure = self._resolved.structure
        activations, ticket = self._core.lookup(
            structure.pack(values), structure.pack(weights)
        )
        flat = structure.flatten("activations", activations)
        if not trainable:
            return flat
        if not recording:
            # Read all the same: tf.recompute_grad, and so keras.RematScope, computes
            # gradients of what it saw being read while nothing was recorded.
            tf.convert_to_tensor(self._virtual)
            return flat
        number = None if tf.executing_eagerly() else self._calls.number()
        call = _Call(structure.pack(values), structure.pack(weights), ticket, number)

        def backward(gradients: Sequence[tf.Tensor]) -> list[tf.Tensor]:
            if self._without_optimizer:
                raise errors.no_optimizer(self._without_optimizer)
            # A tf.gather of activations sends IndexedSlices.
            dense = [tf.convert_to_tensor(gradient) for gradient in gradients]
            unscaled = structure.pack(self._unscaled(dense))
            graph = tf.compat.v1.get_default_graph()
            if call.reaches(graph):
                self._core.submit(ticket, unscaled)
                return []
            if type(graph).__module__.endswith(_CONTROL_FLOW):
                raise errors.gradient_of_control_flow()
            return [self._submit_anew(call, unscaled)]

        return gate.let_through(self._virtual, flat, backward)

    def _submit_anew(self, call: _Call, gradients: Any) -> tf.Tensor:
        """Submits in the gradient of a function, which tickets cannot go to.

        What a function hands over to its gradient needs a gradient itself, which a
        ticket has not. And such graphs lack the control dependencies that order
        stateful ops and keep them, which a function in them has.

        Returns:
          A tensor that is there once the update is applied.
        """

        @tf.function(autograph=False)
        def submit() -> tf.Tensor:
            self._calls.take(call.number)
            _, ticket = self._core.lookup(call.values, call.weights)
            self._core.submit(ticket, gradients)
            return tf.constant(True)

        return submit()

    def serve(
        self,
        resolved: Resolved,
        values: Sequence[Any],
        weights: Sequence[Any],
        *,
        trainable: bool,
    ) -> list[tf.Tensor]:
        lookup = FeatureLookup(
            resolved.plan,
            _readers(resolved, self.variables()),
            check_numerics=self._check_numerics,
            batch_size=self._batch_size if resolved is self._resolved else None,
        )
        activations = lookup(resolved.plan.features, values, weights)
        if not trainable or tf.executing_eagerly():
            return activations
        return gate.let_nothing_through(self._virtual, activations)

    def _unscaled(self, gradients: Sequence[tf.Tensor]) -> list[tf.Tensor]:
        if self._loss_scale is None:
            return list(gradients)
        scale = self._loss_scale() if callable(self._loss_scale) else self._loss_scale
        scale = tf.cast(tf.convert_to_tensor(scale), tf.float32)
        unscaled = [gradient / scale for gradient in gradients]
        if self._check_numerics:
            return unscaled
        # A scale grows until a gradient overflows; Keras leaves such steps out.
        finite = tf.reduce_all(
            [tf.reduce_all(tf.math.is_finite(gradient)) for gradient in unscaled]
        )
        return [tf.where(finite, gradient, 0.0) for gradient in unscaled]


class TrainableTables(LayerTables):
    """Tables that are weights of the layer, trained by the optimizer of the model."""

    def __init__(self, resolved: Resolved, *, check_numerics: bool) -> None:
        """Refuses optimizers that would have nothing to do.

        Raises:
          ValueError: If a table has an optimizer.
          NotImplementedError: If a table is not float32, which the optimizer of the
            model would round to the nearest and so lose its steps.
        """
        require_dtypes(resolved.plan, ("float32",), "trainable_tables=True")
        for spec in resolved.plan.tables:
            if spec.optimizer is not None:
                raise errors.trainable_tables_optimizer(f"table {spec.name}")
        self._resolved = resolved
        self._check_numerics = check_numerics
        self._variables: dict[str, Any] = {}

    def build(self, layer: keras.layers.Layer) -> None:
        for spec in self._resolved.plan.tables:
            config = spec.config
            self._variables[spec.name] = layer.add_weight(
                name=_flat(spec.name),
                shape=(config.vocabulary_size, config.dim),
                initializer=config.initializer or default_initializer(config.dim),
                dtype="float32",
                autocast=False,
            )

    def variables(self) -> dict[str, Any]:
        return dict(self._variables)

    def look_up(
        self, values: Sequence[Any], weights: Sequence[Any], *, trainable: bool
    ) -> list[tf.Tensor]:
        return self.serve(self._resolved, values, weights, trainable=trainable)

    def serve(
        self,
        resolved: Resolved,
        values: Sequence[Any],
        weights: Sequence[Any],
        *,
        trainable: bool,
    ) -> list[tf.Tensor]:
        del trainable  # Keras leaves frozen weights out of trainable_variables.
        tables = {name: variable.value for name, variable in self._variables.items()}
        lookup = FeatureLookup(
            resolved.plan,
            _readers(resolved, tables),
            check_numerics=self._check_numerics,
        )
        return lookup(resolved.plan.features, values, weights)


def _readers(resolved: Resolved, tables: Mapping[str, Any]) -> dict[int, Any]:
    """How stock ops read the tables, by index; `tables` has them by name."""
    specs = resolved.plan.tables
    return {spec.index: VariableReader(tables[spec.name]) for spec in specs}


def _flat(name: str) -> str:
    """A name that Keras takes for a variable."""
    return name.replace("/", "_")
