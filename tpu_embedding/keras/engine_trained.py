"""Tables that their own optimizers train, in the backward pass."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

import keras
import tensorflow as tf

from tpu_embedding import distribution, engines
from tpu_embedding.embedding_base import CallEmbedding, EmbeddingOptions, per_replica
from tpu_embedding.keras import errors, gradient_hook, running
from tpu_embedding.keras.calls import Calls
from tpu_embedding.keras.loss_scale import check_scale_is_known, unscaled
from tpu_embedding.keras.resolve import Resolved
from tpu_embedding.keras.tables import LayerTables
from tpu_embedding.keras.weights import as_weight
from tpu_embedding.lookup.features import FeatureLookup
from tpu_embedding.tf_configs import adapt_sparse_core

# Where TensorFlow makes the gradients of tf.cond and of loops.
_CONTROL_FLOW = (".cond_v2", ".while_v2")


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
        loss_scale: Any,
        check_numerics: bool,
    ) -> None:
        """Makes the embedding for the strategy whose scope is open."""
        self._resolved = resolved
        self._without_optimizer = [
            spec.name for spec in resolved.plan.tables if spec.optimizer is None
        ]
        self._loss_scale = loss_scale
        self._check_numerics = check_numerics
        where = distribution.current()
        self._batch_size = per_replica(batch_size, where)
        options = EmbeddingOptions(
            pipelined=False, invalid_ids=None, check_numerics=check_numerics
        )
        features = resolved.features()
        if engines.choose(where, resolved.plan).stores_stacks:
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
            as_weight(variable, name) for name, variable in self.variables().items()
        ]

    def variables(self) -> dict[str, Any]:
        return dict(self._variables)

    def stored(self) -> list[Any]:
        self._core.retrieve()
        return [v for reader in self._core.readers() for v in reader.variables]

    def look_up(
        self, values: Sequence[Any], weights: Sequence[Any], *, trainable: bool
    ) -> list[tf.Tensor]:
        recording, in_program = running.is_recording(), self._core.in_program
        in_replica = self._core.is_in_replica()
        exportable = not tf.executing_eagerly() and not running.is_evaluation()
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
        check_scale_is_known(self._loss_scale)
        call = _Call(
            structure.pack(values),
            structure.pack(weights),
            flat[0],
            ticket,
            # In a program the ticket itself knows, for it is traced whole.
            None if tf.executing_eagerly() or in_program else self._calls.number(),
        )

        return gradient_hook.let_through(
            self._virtual, flat, lambda gradients: self._backward(call, gradients)
        )

    def _backward(self, call: _Call, gradients: Sequence[tf.Tensor]) -> list[tf.Tensor]:
        """Submits the gradients of a call; tensors that are there afterwards."""
        if self._without_optimizer:
            raise errors.no_optimizer(self._without_optimizer)
        # A tf.gather of activations sends IndexedSlices.
        dense = [tf.convert_to_tensor(gradient) for gradient in gradients]
        divided = self._resolved.structure.pack(
            unscaled(dense, self._loss_scale, check_numerics=self._check_numerics)
        )
        graph = tf.compat.v1.get_default_graph()
        if call.reaches(graph):
            self._core.submit(call.ticket, divided)
            return []
        if type(graph).__module__.endswith(_CONTROL_FLOW):
            raise errors.gradient_of_control_flow()
        return [self._submit_anew(call, divided)]

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
        why = (
            gradient_hook.NO_TAPE
            if resolved is self._resolved
            else gradient_hook.FOR_SERVING
        )
        return gradient_hook.let_nothing_through(self._virtual, activations, why)
