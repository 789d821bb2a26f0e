"""The Keras layer: lookups in the forward pass, updates in the backward pass."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

import keras
import tensorflow as tf

from tpu_embedding.engines.full_table_view import LogicalVariable
from tpu_embedding.keras import errors, running, saving, serialization, symbolic
from tpu_embedding.keras.arguments import (
    Arguments,
    EmbeddingFeature,
    check_hints,
)
from tpu_embedding.keras.engine_trained import UpdatedTables
from tpu_embedding.keras.keras_trained import TrainableTables
from tpu_embedding.keras.loss_scale import check_loss_scale, encode_loss_scale
from tpu_embedding.keras.resolve import Resolved, resolve, resolve_serving
from tpu_embedding.keras.tables import LayerTables
from tpu_embedding.optimizers.checks import check_flag


@dataclasses.dataclass(frozen=True, eq=False)
class _Parts:
    """What was made of it; in one attribute, which TensorFlow does not track."""

    arguments: Arguments
    resolved: Resolved
    tables: LayerTables


@keras.saving.register_keras_serializable("tpu_embedding")
class TPUEmbedding(keras.layers.Layer):
    """Embedding tables as a Keras layer; each table has an optimizer of its own.

    >>> import keras
    >>> import tensorflow as tf
    >>> import tpu_embedding as te
    >>> import tpu_embedding.keras
    >>> films = te.TableConfig(8, 2, initializer=te.RowIdInitializer())
    >>> layer = te.keras.TPUEmbedding({"film": te.FeatureConfig(films)}, te.SGD(0.5))
    >>> inputs = {"film": keras.Input((), dtype="int64", name="film")}
    >>> model = keras.Model(inputs, layer(inputs)["film"])
    >>> model({"film": tf.constant([3, 5])}).numpy().tolist()
    [[3.0, 3.0], [5.0, 5.0]]

    The tables are not among `trainable_variables`. One scalar is that stands for
    them: a gradient of any loss with respect to the model's trainable variables
    sends the gradients of the activations to the tables, whose optimizers update
    them at once. So custom loops and `model.fit` train the tables as they are. Each
    call is a batch with one update of its own; all calls of a step see the tables
    as they were before any of its updates. Without a tf.GradientTape nothing is
    updated and nothing owed.

    Tables and slots are weights that are not trainable: `get_weights`, `summary` and
    callbacks such as EarlyStopping see them. What is saved are they, by name, and not
    the scalar.
    """

    def __init__(
        self,
        feature_config: Any,
        optimizer: Any,
        pipeline_execution_with_tensor_core: bool = False,
        batch_size: int | None = None,
        embedding_feature: Any = None,
        sparse_core_embedding_config: Any = None,
        *,
        trainable_tables: bool = False,
        loss_scale: Any = None,
        invalid_ids: str | None = None,
        check_numerics: bool = False,
        **kwargs: Any,
    ) -> None:
        """Reads the configuration; the tables are made by build or the first call.

        Args:
          feature_config: A FeatureConfig or a nested dict, list, tuple or namedtuple
            of them, of this package or of tf.tpu.experimental.embedding.
          optimizer: For tables without one of their own: an optimizer of this
            package, of tf.tpu.experimental.embedding, of Keras 3 or tf_keras (see
            `translate_keras_optimizer`), or "sgd", "adagrad", "adam" or "ftrl" for
            those of this package. None: lookups only. TableConfig.optimizer takes
            the same.
          pipeline_execution_with_tensor_core: False. What reads weights in a model of
            Keras could not apply an update that is left pending.
          batch_size: The global size of every batch, or None for any. Exported graphs
            take any size. TPUs need it, or FeatureConfig.output_shape.
          embedding_feature: None or an EmbeddingFeature of TensorFlow: which engine
            of a TPU is meant; the strategy knows. A host has one engine for all.
          sparse_core_embedding_config: None or a SparseCoreEmbeddingConfig, of this
            package or of TensorFlow: stacks and buffers on SparseCores, if there are.
          trainable_tables: Make the tables ordinary trainable weights, which the
            optimizer of the model trains, as TFRS did on a CPU.
          loss_scale: What the loss was multiplied by: None, a number, an optimizer of
            Keras 3 (a LossScaleOptimizer, or one with a `loss_scale_factor`) or a
            callable that returns one of these; gradients are divided by it. Where one
            of a call is not finite then, all of that call count as 0, or with
            `check_numerics` are an error. Needed wherever the loss is scaled.
          invalid_ids: The rule for tables of tf.tpu.experimental.embedding: "error"
            (also if None), "drop" or "mod". A TableConfig of ours has its own.
          check_numerics: Refuse weights and gradients that are not finite.
          **kwargs: Of keras.layers.Layer: name, trainable, dtype.

        Raises:
          ValueError: If the configuration is wrong, an option cannot be carried, or
            `trainable_tables` comes with an option for updates.
          TypeError: If an argument is of the wrong type.
          NotImplementedError: If this release lacks what an argument asks for.
          RuntimeError: If Keras does not run on TensorFlow.
        """
        if keras.backend.backend() != "tensorflow":
            raise errors.backend(keras.backend.backend())
        if pipeline_execution_with_tensor_core is not False:
            raise errors.pipelining(pipeline_execution_with_tensor_core)
        check_loss_scale(loss_scale)
        check_flag("trainable_tables", trainable_tables)
        super().__init__(autocast=False, **kwargs)
        self.supports_jit = False  # XLA has no such kernels; Keras asks this.
        arguments = Arguments(
            feature_config=feature_config,
            optimizer=optimizer,
            batch_size=batch_size,
            embedding_feature=embedding_feature,
            sparse_core_embedding_config=sparse_core_embedding_config,
            trainable_tables=trainable_tables,
            loss_scale=loss_scale,
            invalid_ids=invalid_ids,
            check_numerics=check_numerics,
        )
        check_hints(arguments)
        resolved = resolve(feature_config, optimizer, invalid_ids)
        self._parts = _Parts(arguments, resolved, _make_tables(arguments, resolved))
        self._refused_load: ValueError | None = None

    def build(self, input_shape: Any = None) -> None:
        """Makes tables and slots, whatever the shape of the input.

        Raises:
          ValueError: If the loss will be scaled and `loss_scale` is not given.
        """
        del input_shape
        if self.built:
            return
        policies = (self.dtype_policy, keras.config.dtype_policy())
        scaled = [p.name for p in policies if p.compute_dtype == "float16"]
        arguments = self._parts.arguments
        updates = not arguments.trainable_tables
        if scaled and updates and arguments.loss_scale is None:
            cause = f"Under the dtype policy {scaled[0]!r}"
            raise errors.loss_scale_missing(cause)
        self._parts.tables.build(self)
        for name, variable in self._parts.tables.variables().items():
            self._track_trackable(variable, name)
        self.built = True

    def __call__(
        self,
        features: Any,
        weights: Any = None,
        serving_config: Any = None,
        **kwargs: Any,
    ) -> Any:
        """See `call`; Keras keeps the arguments of symbolic calls, to save them."""
        leaves = keras.tree.flatten((features, weights))
        symbolic = any(isinstance(leaf, keras.KerasTensor) for leaf in leaves)
        kept = (type(None), serialization.ServingFeatures)
        if symbolic and not isinstance(serving_config, kept):
            self._resolve(serving_config)  # Has errors for what cannot be kept.
            serving_config = serialization.ServingFeatures.of(
                serving_config, self._table_keys()
            )
        return super().__call__(
            features, weights=weights, serving_config=serving_config, **kwargs
        )

    def call(
        self, features: Any, weights: Any = None, serving_config: Any = None
    ) -> Any:
        """Looks a batch up.

        Args:
          features: In the structure of `feature_config` (or of `serving_config`)
            tf.Tensor, tf.SparseTensor or tf.RaggedTensor of int32 or int64.
          weights: None, or the same structure with floating point weights of each
            feature's own layout, or None for features without.
          serving_config: Other FeatureConfigs over the layer's tables, for serving;
            such a lookup consists of stock TensorFlow ops and updates nothing.

        Returns:
          The activations in the same structure, [output shape..., dim] each, of the
          layer's compute dtype.

        Raises:
          The errors of TPUEmbedding.lookup.
          NotImplementedError: In `stateless_call`, unless `trainable_tables=True`.
        """
        if running.is_stateless() and not self._parts.arguments.trainable_tables:
            raise errors.stateless_call()
        resolved = self._resolve(serving_config)
        structure = resolved.structure
        values = symbolic.with_integer_ids(structure.flatten("features", features))
        flat_weights = structure.flatten_weights(weights)
        tables = self._parts.tables
        if serving_config is None:
            activations = tables.look_up(values, flat_weights, trainable=self.trainable)
        else:
            activations = tables.serve(
                resolved, values, flat_weights, trainable=self.trainable
            )
        return structure.pack([tf.cast(a, self.compute_dtype) for a in activations])

    def compute_output_spec(
        self, features: Any, weights: Any = None, serving_config: Any = None
    ) -> Any:
        """The KerasTensors of a symbolic call, whose arguments it checks."""
        resolved = self._resolve(serving_config)
        return symbolic.output_spec(resolved, features, weights, self.compute_dtype)

    def compute_output_shape(self, input_shape: Any) -> Any:
        """The shapes of the activations.

        Args:
          input_shape: In the structure of `feature_config` the shape of each feature,
            with its batch axis.
        """
        return symbolic.output_shape(self._parts.resolved, input_shape)

    @property
    def embedding_tables(self) -> dict[Any, Any]:
        """The table variables, [vocabulary_size, dim] of TableConfig.dtype.

        Keyed by the TableConfig that the user passed; builds the layer. Under a TPU
        strategy they are no variables but are read and assigned as such, outside of
        graphs.
        """
        self._ensure_built()
        variables = self._parts.tables.variables()
        return {
            spec.key: variables[spec.name] for spec in self._parts.resolved.plan.tables
        }

    def update_embedding_table(self, table: Any, embedding_table: Any) -> None:
        """Gives a table new values; its slots stay.

        Args:
          table: A key of `embedding_tables`.
          embedding_table: [vocabulary_size, dim] of any floating dtype; a table of
            bfloat16 takes the nearest values.

        Raises:
          ValueError: If the layer has no such table, or the shape differs.
        """
        tables = self.embedding_tables
        if table not in tables:
            raise errors.unknown_table(table)
        tables[table].assign(tf.cast(embedding_table, tables[table].dtype))

    def get_config(self) -> dict[str, Any]:
        """The configuration as JSON.

        Raises:
          ValueError: If an initializer, a learning rate or another part of the
            configuration is no object that Keras can serialise, or a namedtuple.
        """
        arguments = self._parts.arguments
        features = serialization.encode_features(
            arguments.feature_config, arguments.invalid_ids
        )
        hint = arguments.embedding_feature
        return {
            **super().get_config(),
            "feature_config": features,
            "optimizer": serialization.encode_optimizer(
                arguments.optimizer, "the layer"
            ),
            "batch_size": arguments.batch_size,
            "embedding_feature": None if hint is None else hint.name,
            "sparse_core_embedding_config": serialization.encode_sparse_core(
                arguments.sparse_core_embedding_config
            ),
            "trainable_tables": arguments.trainable_tables,
            "loss_scale": encode_loss_scale(arguments.loss_scale),
            "invalid_ids": arguments.invalid_ids,
            "check_numerics": arguments.check_numerics,
        }

    @classmethod
    def from_config(cls, config: Mapping[str, Any]) -> TPUEmbedding:
        """A layer as `get_config` described it, with TableConfigs of its own."""
        arguments = dict(config)
        arguments["feature_config"] = serialization.decode_features(
            config["feature_config"]
        )
        arguments["optimizer"] = serialization.decode_optimizer(config["optimizer"])
        arguments["loss_scale"] = serialization.decode_object(config["loss_scale"])
        hint = config["embedding_feature"]
        arguments["embedding_feature"] = hint and EmbeddingFeature[hint]
        arguments["sparse_core_embedding_config"] = serialization.decode_sparse_core(
            config["sparse_core_embedding_config"]
        )
        return cls(**arguments)

    def get_build_config(self) -> dict[str, Any] | None:
        """Says that the layer is built; shapes play no part in that."""
        return {"input_shape": None} if self.built else None

    def build_from_config(self, config: Mapping[str, Any]) -> None:
        """Builds a layer that is being loaded."""
        del config
        self.build()

    def save_own_variables(self, store: Any) -> None:
        """Writes tables and slots under their names; the virtual weight is left out."""
        self._ensure_built()
        saving.save_state(self._parts.tables.variables(), store)

    def load_own_variables(self, store: Any) -> None:
        """Reads what `save_own_variables` wrote.

        Raises:
          ValueError: If a table or slot is not there, or has another shape.
        """
        self._ensure_built()
        try:
            saving.load_state(self.name, self._parts.tables.variables(), store)
        except ValueError as error:
            # Keras asks again at other places of the file and shows the last error.
            if store.keys() or self._refused_load is None:
                self._refused_load = error
                raise
            raise errors.refused_before(self.name, self._refused_load) from error
        self._refused_load = None

    def _trackable_children(self, save_type: str = "checkpoint", **kwargs: Any) -> Any:
        children = super()._trackable_children(save_type, **kwargs)
        if save_type == "checkpoint":
            return children  # Tables and slots: Keras's own views are no attributes.
        # Exported graphs refer to the virtual weight too.
        values = [*(w.value for w in self.weights), *self._parts.tables.stored()]
        weights = [value for value in values if isinstance(value, tf.Variable)]
        return {
            **{n: c for n, c in children.items() if not isinstance(c, LogicalVariable)},
            **{f"_weight_{i}": weight for i, weight in enumerate(weights)},
        }

    def _ensure_built(self) -> None:
        if not self.built:
            with keras.name_scope(self.name, caller=self):
                self.build()

    def _table_keys(self) -> list[Any]:
        return [spec.key for spec in self._parts.resolved.plan.tables]

    def _resolve(self, serving_config: Any) -> Resolved:
        if serving_config is None:
            return self._parts.resolved
        if isinstance(serving_config, serialization.ServingFeatures):
            serving_config = serving_config.over(self._table_keys())
        return resolve_serving(serving_config, self._parts.resolved)


def _make_tables(arguments: Arguments, resolved: Resolved) -> LayerTables:
    if arguments.trainable_tables:
        for option in ("batch_size", "loss_scale"):
            value = getattr(arguments, option)
            if value is not None:
                raise errors.trainable_tables_option(option, value)
        return TrainableTables(resolved, check_numerics=arguments.check_numerics)
    return UpdatedTables(
        resolved,
        batch_size=arguments.batch_size,
        sparse_core=arguments.sparse_core_embedding_config,
        loss_scale=arguments.loss_scale,
        check_numerics=arguments.check_numerics,
    )
