"""The tables of a layer: trained by their own optimizers, or by the model's."""

from __future__ import annotations

import abc
import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

import keras
import tensorflow as tf

from tpu_embedding import engines, topology
from tpu_embedding.adapters import adapt_sparse_core
from tpu_embedding.embedding_base import CallEmbedding, EmbeddingOptions, per_replica
from tpu_embedding.engines.logical import LogicalVariable
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
    def stored(self) -> list[Any]:
        """The tf.Variables that hold the tables, which exported graphs refer to.

        They hold what is to be exported.
        """

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


class _LogicalWeight(_TableWeight):
    """One that is no variable to TensorFlow; what stores it is exported instead."""

    @property
    def _should_act_as_resource_variable(self) -> bool:
        raise AttributeError  # TensorFlow asks whether there is such an attribute.

    def _initialize(self, value: Any) -> None:
        self._value = value

    def _serialize_to_tensors(self) -> dict[str, Any]:
        return {}

    def _restore_from_tensors(self, restored_tensors: Any) -> None:
        del restored_tensors  # There are none.

    def _export_to_saved_model_graph(self, *args: Any, **kwargs: Any) -> list[Any]:
        del args, kwargs
        return []


def _as_weight(variable: Any, name: str) -> _TableWeight:
    logical = isinstance(variable, LogicalVariable)
    return (_LogicalWeight if logical else _TableWeight)(variable, name)


@dataclasses.dataclass(frozen=True, eq=False)
class _Call:
    """One lookup whose gradient may be asked for.

    Attributes:
      values: The ids, in the user's structure.
      weights: Their weights or None, in the same.
      activation: One of those that were looked up.
      ticket: Of the lookup.
      number: int64 scalar of a call in a graph, else None; see `Calls`.
    """

    values: Any
    weights: Any
    activation: tf.Tensor
    ticket: Any
    number: tf.Tensor | None

    def reaches(self, graph: Any) -> bool:
        """Whether the ticket can be used in `graph`: made there or around it."""
        if hasattr(self.activation, "numpy"):
            return True  # Made eagerly.
        while graph is not None and graph is not self.activation.graph:
            graph = getattr(graph, "outer_graph", None)
        return graph is not None


class UpdatedTables(LayerTables):
    """Tables of a core TPUEmbedding, updated in the backward pass."""

    def __init__(
        self,
        resolved: Resolved,
        *,
        batch_size: int | None,
        sparse_core: Any,
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
        where = topology.current()
        self._batch_size = per_replica(batch_size, where)
        options = EmbeddingOptions(
            pipelined=False, invalid_ids=None, check_numerics=check_numerics
        )
        features = resolved.features()
        if engines.stacks_tables(where):
            features = resolved.completed_features(self._batch_size)
            config = adapt_sparse_core(sparse_core)
            options = dataclasses.replace(options, sparse_core=config)
        self._core = CallEmbedding(features, resolved.optimizer, options, batch_size)
        self._variables: dict[str, Any] = {}
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
        self._variables = self._core.logical_variables()
        with tf.init_scope():
            self._calls = Calls()
        # For `get_weights` and what builds on it: EarlyStopping, summary, export.
        layer.state_of_tables = [
            _as_weight(variable, name) for name, variable in self.variables().items()
        ]

    def variables(self) -> dict[str, Any]:
        return dict(self._variables)

    def stored(self) -> list[Any]:
        self._core.retrieve()
        return [v for reader in self._core.readers() for v in reader.variables]

    def look_up(
        self, values: Sequence[Any], weights: Sequence[Any], *, trainable: bool
    ) -> list[tf.Tensor]:
        recording, in_program = gate.is_recording(), self._core.in_program
        in_replica = self._core.is_in_replica()
        exportable = not tf.executing_eagerly() and not gate.is_evaluation()
        # Only stock ops go into a graph that may be exported, which no program is.
        served = not recording and not in_program
        if served and (exportable or not in_replica):
            return self.serve(self._resolved, values, weights, trainable=trainable)
        structure = self._resolved.structure
        activations, ticket = self._core.lookup(
            structure.pack(values),
            structure.pack(weights),
            training=trainable and recording,
        )
        flat = structure.flatten("activations", activations)
        if not trainable:
            return flat
        if not recording:
            # Read all the same: tf.recompute_grad, and so keras.RematScope, computes
            # gradients of what it saw being read while nothing was recorded.
            tf.convert_to_tensor(self._virtual)
            return flat
        if self._loss_scale is None or self._loss_scale == 1:
            gate.check_loss_is_not_scaled()
        call = _Call(
            structure.pack(values),
            structure.pack(weights),
            flat[0],
            ticket,
            # In a program the ticket itself knows, for it is traced whole.
            None if tf.executing_eagerly() or in_program else self._calls.number(),
        )

        return gate.let_through(
            self._virtual, flat, lambda gradients: self._backward(call, gradients)
        )

    def _backward(self, call: _Call, gradients: Sequence[tf.Tensor]) -> list[tf.Tensor]:
        """Submits the gradients of a call; tensors that are there afterwards."""
        if self._without_optimizer:
            raise errors.no_optimizer(self._without_optimizer)
        # A tf.gather of activations sends IndexedSlices.
        dense = [tf.convert_to_tensor(gradient) for gradient in gradients]
        unscaled = self._resolved.structure.pack(self._unscaled(dense))
        graph = tf.compat.v1.get_default_graph()
        if call.reaches(graph):
            self._core.submit(call.ticket, unscaled)
            return []
        if type(graph).__module__.endswith(_CONTROL_FLOW):
            raise errors.gradient_of_control_flow()
        return [self._submit_anew(call, unscaled)]

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
        if self._core.in_program:
            raise errors.serving_in_program()
        self._core.retrieve()
        # Outside of replicas Keras traces models with a batch of one replica, too.
        checked = resolved is self._resolved and self._core.is_in_replica()
        names = [spec.name for spec in self._resolved.plan.tables]
        readers = dict(zip(names, self._core.readers(), strict=True))
        lookup = FeatureLookup(
            resolved.plan,
            {spec.index: readers[spec.name] for spec in resolved.plan.tables},
            check_numerics=self._check_numerics,
            batch_size=self._batch_size if checked else None,
        )
        activations = lookup(resolved.plan.features, values, weights)
        if not trainable or tf.executing_eagerly():
            return activations
        why = gate.NO_TAPE if resolved is self._resolved else gate.FOR_SERVING
        return gate.let_nothing_through(self._virtual, activations, why)

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
          NotImplementedError: Under a TPU strategy; or if a table is not float32, which
            the optimizer of the model would round to the nearest and so lose its steps.
        """
        if topology.is_tpu():
            raise errors.trainable_tables_on_tpu()
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

    def stored(self) -> list[Any]:
        return [variable.value for variable in self._variables.values()]

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
        lookup = FeatureLookup(
            resolved.plan,
            {
                spec.index: VariableReader(self._variables[spec.name].value)
                for spec in resolved.plan.tables
            },
            check_numerics=self._check_numerics,
        )
        return lookup(resolved.plan.features, values, weights)


def _flat(name: str) -> str:
    """A name that Keras takes for a variable."""
    return name.replace("/", "_")
