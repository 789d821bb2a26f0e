"""The Keras layer: lookups in the forward pass, updates in the backward pass."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

import keras
import tensorflow as tf
from absl import logging

from tpu_embedding import distribution
from tpu_embedding.config import SparseCoreEmbeddingConfig
from tpu_embedding.engines.full_table_view import LogicalVariable
from tpu_embedding.errors import argument_type
from tpu_embedding.keras import keras3, serialization, symbolic
from tpu_embedding.keras.conversion import Features, convert_features, convert_serving
from tpu_embedding.keras.engine_trained import EngineTrainedTables
from tpu_embedding.keras.keras_trained import KerasTrainedTables
from tpu_embedding.keras.loss_scale import (
    check_loss_scale,
    encode_loss_scale,
    loss_scale_missing,
)
from tpu_embedding.optimizers.checks import check_flag

_EmbeddingFeature = tf.tpu.experimental.HardwareFeature.EmbeddingFeature
_SparseCoreConfigs = (
    SparseCoreEmbeddingConfig,
    tf.tpu.experimental.embedding.SparseCoreEmbeddingConfig,
)


@dataclasses.dataclass(frozen=True, eq=False)
class _Arguments:
    """The constructor's arguments, for `get_config`."""

    feature_config: Any
    optimizer: Any
    pipeline_execution_with_tensor_core: bool
    batch_size: int | None
    embedding_feature: Any
    sparse_core_embedding_config: Any
    trainable_tables: bool
    loss_scale: Any
    invalid_ids: str | None
    check_numerics: bool


@dataclasses.dataclass(frozen=True, eq=False)
class _Parts:
    """The state of the layer in one object: Keras would wrap lists and dicts."""

    arguments: _Arguments
    features: Features
    tables: EngineTrainedTables | KerasTrainedTables


@keras3.register
class TPUEmbedding(keras.layers.Layer):
    """Embedding tables as a Keras layer; each table has its own optimizer.

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

    The tables do not appear in `trainable_variables`; a single scalar, the placeholder
    variable, represents them. The gradient of a loss with respect to the placeholder
    variable applies the gradients of the activations: the optimizers update the
    tables at once. Custom loops and `model.fit` therefore train the tables without
    changes. Each call of the layer is a batch with its own update; all calls of a step
    see the tables as they were before the first of these updates. Calls without a
    tf.GradientTape update nothing.

    Tables and slots are weights that are not trainable: `get_weights`, `summary` and
    callbacks such as EarlyStopping see them. Files contain them by name, without the
    placeholder variable.
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
        """Checks the configuration; `build` or the first call creates the tables.

        Args:
          feature_config: A FeatureConfig or a nested dict, list, tuple or namedtuple
            of them, of this package or of tf.tpu.experimental.embedding.
          optimizer: For tables without their own: an optimizer of this package, of
            tf.tpu.experimental.embedding, of Keras 3 or tf_keras (see
            `translate_keras_optimizer`), or "sgd", "adagrad", "adam" or "ftrl" for
            those of this package. None: lookups only. TableConfig.optimizer accepts
            the same.
          pipeline_execution_with_tensor_core: On TPU v2 to v4, delay each update by
            one step. Elsewhere the layer logs a warning and updates at once.
          batch_size: The global size of every batch, or None for any. Exported graphs
            accept any size. TPUs need it, unless the shapes of the inputs or
            FeatureConfig.output_shape contain the batch size of a replica.
          embedding_feature: None, or the EmbeddingFeature of TensorFlow that the
            strategy's TPUs must have. Ignored on CPU and GPU.
          sparse_core_embedding_config: None or a SparseCoreEmbeddingConfig, of this
            package or of TensorFlow: stacks and buffers. Ignored without SparseCores.
          trainable_tables: Make the tables ordinary trainable weights, which the
            optimizer of the model trains, as TFRS does on a CPU.
          loss_scale: The factor of the loss: None, a number, a Keras optimizer (a
            LossScaleOptimizer, or one with a `loss_scale_factor`) or a callable that
            returns one of these. The layer divides gradients by it. If a gradient of a
            call is not finite then, all gradients of the call count as 0, or raise an
            error with `check_numerics`. Required whenever the loss is scaled.
          invalid_ids: The policy for tables of tf.tpu.experimental.embedding: "error"
            (the default), "drop" or "mod". A TableConfig of this package has its own.
          check_numerics: Raise an error for weights and gradients that are not finite.
          **kwargs: Of keras.layers.Layer: name, trainable, dtype.

        Raises:
          ValueError: If the configuration is wrong, an option is not supported, or
            `trainable_tables` is combined with an option for updates.
          TypeError: If an argument is of the wrong type.
          NotImplementedError: If an argument is not supported by this release.
          RuntimeError: If Keras does not run on TensorFlow.
        """
        if keras.backend.backend() != "tensorflow":
            raise RuntimeError(
                "tpu_embedding.keras.TPUEmbedding needs Keras on TensorFlow, and Keras "
                f"runs on {keras.backend.backend()!r}. Set the environment variable "
                'KERAS_BACKEND to "tensorflow" before Keras is imported.'
            )
        check_flag(
            "pipeline_execution_with_tensor_core", pipeline_execution_with_tensor_core
        )
        check_loss_scale(loss_scale)
        check_flag("trainable_tables", trainable_tables)
        super().__init__(autocast=False, **kwargs)
        self.supports_jit = False  # XLA has no kernels for these lookups.
        arguments = _Arguments(
            feature_config=feature_config,
            optimizer=optimizer,
            pipeline_execution_with_tensor_core=pipeline_execution_with_tensor_core,
            batch_size=batch_size,
            embedding_feature=embedding_feature,
            sparse_core_embedding_config=sparse_core_embedding_config,
            trainable_tables=trainable_tables,
            loss_scale=loss_scale,
            invalid_ids=invalid_ids,
            check_numerics=check_numerics,
        )
        topology = distribution.current()
        _check_hints(arguments, topology)
        features = convert_features(feature_config, optimizer, invalid_ids)
        tables = _create_tables(arguments, features, topology)
        self._parts = _Parts(arguments, features, tables)
        self._refused_load: ValueError | None = None

    def build(self, input_shape: Any = None) -> None:
        """Creates tables and slots.

        Args:
          input_shape: In the structure of `feature_config` the shapes of a replica's
            inputs. Only TPUs need them, to learn the batch size if no argument of the
            layer contains it.

        Raises:
          ValueError: If the loss will be scaled and `loss_scale` is not given, or if a
            TPU needs a shape that is not known.
        """
        if self.built:
            return
        policies = (self.dtype_policy, keras.config.dtype_policy())
        scaled = [p.name for p in policies if p.compute_dtype == "float16"]
        arguments = self._parts.arguments
        updates = not arguments.trainable_tables
        if scaled and updates and arguments.loss_scale is None:
            raise loss_scale_missing(f"Under the dtype policy {scaled[0]!r}")
        self._parts.tables.build(self, input_shape)
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
        """See `call`."""
        if serving_config is not None and not isinstance(
            serving_config, serialization.ServingFeatures
        ):
            leaves = keras.tree.flatten((features, weights))
            if any(isinstance(leaf, keras.KerasTensor) for leaf in leaves):
                # Keras saves the arguments of symbolic calls.
                self._convert(serving_config)  # Raises errors for wrong ones.
                serving_config = serialization.ServingFeatures.of(
                    serving_config, self._table_keys()
                )
        return super().__call__(
            features, weights=weights, serving_config=serving_config, **kwargs
        )

    def call(
        self, features: Any, weights: Any = None, serving_config: Any = None
    ) -> Any:
        """Looks up a batch.

        Args:
          features: In the structure of `feature_config` (or of `serving_config`)
            tf.Tensor, tf.SparseTensor or tf.RaggedTensor of int32 or int64.
          weights: None, or the same structure with floating point weights, each in
            the layout of its feature, or None for features without weights.
          serving_config: Other FeatureConfigs over the layer's tables, for serving.
            Such a lookup consists of TensorFlow ops and updates nothing.

        Returns:
          The activations in the same structure, each [output shape..., dim], of the
          layer's compute dtype.

        Raises:
          TypeError, ValueError, RuntimeError, NotImplementedError,
          tf.errors.InvalidArgumentError: As TPUEmbedding.lookup.
          NotImplementedError: In `stateless_call`, unless `trainable_tables=True`.
        """
        parts = self._parts
        if keras3.is_stateless() and not parts.arguments.trainable_tables:
            raise NotImplementedError(
                "`stateless_call` passes the values of all weights, but the tables of "
                "tpu_embedding.keras.TPUEmbedding are looked up and updated in place. "
                "Call the layer, or create it with `trainable_tables=True`."
            )
        wanted = self._convert(serving_config)
        structure = wanted.structure
        values = structure.flatten("features", features)
        if keras3.is_tracing_shapes():
            values = symbolic.with_integer_ids(values)
        flat_weights = structure.flatten_weights(weights)
        if serving_config is None:
            activations = parts.tables.look_up(
                values, flat_weights, trainable=self.trainable
            )
        else:
            activations = parts.tables.serve(
                wanted.plan, values, flat_weights, trainable=self.trainable
            )
        return structure.pack([tf.cast(a, self.compute_dtype) for a in activations])

    def compute_output_spec(
        self, features: Any, weights: Any = None, serving_config: Any = None
    ) -> Any:
        """Checks the arguments of a symbolic call and returns its KerasTensors."""
        wanted = self._convert(serving_config)
        return symbolic.output_spec(wanted, features, weights, self.compute_dtype)

    def compute_output_shape(self, input_shape: Any) -> Any:
        """Returns the shapes of the activations.

        Args:
          input_shape: In the structure of `feature_config` the shape of each feature,
            with its batch axis.
        """
        return symbolic.output_shape(self._parts.features, input_shape)

    @property
    def embedding_tables(self) -> dict[Any, Any]:
        """The table variables, [vocabulary_size, dim] of TableConfig.dtype.

        Keyed by the TableConfig that the user passed. Builds the layer. Under a TPU
        strategy the values are not variables, but are read and assigned like
        variables, outside of graphs.
        """
        self._ensure_built()
        variables = self._parts.tables.variables()
        return {
            spec.key: variables[spec.name] for spec in self._parts.features.plan.tables
        }

    def update_embedding_table(self, table: Any, embedding_table: Any) -> None:
        """Assigns new values to a table and keeps its slots.

        Args:
          table: A key of `embedding_tables`.
          embedding_table: [vocabulary_size, dim] of any floating dtype; a bfloat16
            table takes the nearest values.

        Raises:
          ValueError: If the layer has no such table, or the shape differs.
        """
        tables = self.embedding_tables
        if table not in tables:
            raise ValueError(
                f"The layer has no table for {table!r}. The keys of "
                "`layer.embedding_tables` are its TableConfig objects."
            )
        tables[table].assign(tf.cast(embedding_table, tables[table].dtype))

    def get_config(self) -> dict[str, Any]:
        """Returns the configuration as JSON.

        Raises:
          ValueError: If an initializer, a learning rate or another object cannot be
            serialized by Keras, or features are in a namedtuple.
        """
        arguments = self._parts.arguments
        hint = arguments.embedding_feature
        return {
            **super().get_config(),
            **vars(arguments),
            "feature_config": serialization.encode_features(
                arguments.feature_config, arguments.invalid_ids
            ),
            "optimizer": serialization.encode_optimizer(
                arguments.optimizer, "the layer"
            ),
            "embedding_feature": None if hint is None else hint.name,
            "sparse_core_embedding_config": serialization.encode_sparse_core(
                arguments.sparse_core_embedding_config
            ),
            "loss_scale": encode_loss_scale(arguments.loss_scale),
        }

    @classmethod
    def from_config(cls, config: Mapping[str, Any]) -> TPUEmbedding:
        """Creates a layer from `get_config`, with new TableConfig objects."""
        arguments = dict(config)
        arguments["feature_config"] = serialization.decode_features(
            config["feature_config"]
        )
        arguments["optimizer"] = serialization.decode_optimizer(config["optimizer"])
        arguments["loss_scale"] = serialization.decode_object(config["loss_scale"])
        hint = config["embedding_feature"]
        arguments["embedding_feature"] = hint and _EmbeddingFeature[hint]
        arguments["sparse_core_embedding_config"] = serialization.decode_sparse_core(
            config["sparse_core_embedding_config"]
        )
        return cls(**arguments)

    def get_build_config(self) -> dict[str, Any] | None:
        """Returns whether the layer is built; a copy may have other input shapes."""
        return {"input_shape": None} if self.built else None

    def build_from_config(self, config: Mapping[str, Any]) -> None:
        """Builds a layer that is being loaded, unless a TPU needs shapes first."""
        del config
        if self._parts.tables.can_build():
            self.build()

    def save_own_variables(self, store: Any) -> None:
        """Writes tables and slots by name, without the placeholder variable."""
        self._ensure_built()
        serialization.save_state(self._parts.tables.variables(), store)

    def load_own_variables(self, store: Any) -> None:
        """Reads what `save_own_variables` wrote.

        Raises:
          ValueError: If the file lacks a table or slot, or one has another shape.
        """
        self._ensure_built()
        try:
            serialization.load_state(self.name, self._parts.tables.variables(), store)
        except ValueError as error:
            # Keras tries again at other places of the file and shows the last error.
            if store.keys() or self._refused_load is None:
                self._refused_load = error
                raise
            raise ValueError(
                f"The file has no other data for the layer {self.name!r}. Its data was "
                f"refused: {self._refused_load}"
            ) from error
        self._refused_load = None

    def _trackable_children(self, save_type: str = "checkpoint", **kwargs: Any) -> Any:
        children = super()._trackable_children(save_type, **kwargs)
        if save_type == "checkpoint":
            return children  # Tables and slots; the views for Keras are not attributes.
        # Exported graphs also refer to the placeholder variable.
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
        return [spec.key for spec in self._parts.features.plan.tables]

    def _convert(self, serving_config: Any) -> Features:
        if serving_config is None:
            return self._parts.features
        if isinstance(serving_config, serialization.ServingFeatures):
            serving_config = serving_config.over(self._table_keys())
        return convert_serving(serving_config, self._parts.features)


def _check_hints(arguments: _Arguments, topology: distribution.Topology) -> None:
    """Checks the arguments that describe TPUs."""
    hint = arguments.embedding_feature
    if hint is not None and not isinstance(hint, _EmbeddingFeature):
        raise argument_type("embedding_feature", hint, "None or an EmbeddingFeature")
    config = arguments.sparse_core_embedding_config
    if config is not None and not isinstance(config, _SparseCoreConfigs):
        raise argument_type(
            "sparse_core_embedding_config",
            config,
            "None or a SparseCoreEmbeddingConfig",
        )
    if hint is not None and not topology.has_feature(hint.name):
        assert topology.tpu is not None
        raise ValueError(
            f"`embedding_feature` is {hint.name}, but the strategy's TPUs are "
            f"{topology.tpu.generation.name}. Leave it at None: the layer asks the "
            "strategy."
        )


def _create_tables(
    arguments: _Arguments, features: Features, topology: distribution.Topology
) -> EngineTrainedTables | KerasTrainedTables:
    pipelined = arguments.pipeline_execution_with_tensor_core
    if arguments.trainable_tables:
        for option in ("batch_size", "loss_scale"):
            value = getattr(arguments, option)
            if value is not None:
                raise ValueError(
                    "With `trainable_tables=True` the tables are ordinary weights, "
                    f"which do not support `{option}={value!r}`. Leave it at None."
                )
    if pipelined and (arguments.trainable_tables or topology.engine != "tpu_v2_v4"):
        # Evaluation, export, get_weights and callbacks read the tables without a
        # chance to apply a pending update first; TPU v2 to v4 apply it themselves.
        logging.log_first_n(
            logging.WARNING,
            "tpu_embedding.keras.TPUEmbedding ignores "
            "`pipeline_execution_with_tensor_core=True` except on TPU v2 to v4: it "
            "applies each update at once. To pipeline elsewhere, use "
            "tpu_embedding.TPUEmbedding or TPUEmbeddingV2 in a custom loop.",
            1,
        )
        pipelined = False
    if arguments.trainable_tables:
        return KerasTrainedTables(
            features.plan, topology, check_numerics=arguments.check_numerics
        )
    return EngineTrainedTables(
        features,
        topology,
        pipelined=pipelined,
        batch_size=arguments.batch_size,
        sparse_core=arguments.sparse_core_embedding_config,
        loss_scale=arguments.loss_scale,
        check_numerics=arguments.check_numerics,
    )
