"""The Keras layer: lookups in the forward pass, updates in the backward pass."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import tensorflow as tf

from tpu_embedding.config import DistributedOptions
from tpu_embedding.keras.base import Arguments, EmbeddingLayer
from tpu_embedding.keras.keras_api import keras_api
from tpu_embedding.keras.serialization import ServingFeatures
from tpu_embedding.tables.trackable import LogicalVariable


@keras_api.register
class TPUEmbedding(EmbeddingLayer, keras_api.Layer):
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
        distributed_options: DistributedOptions | None = None,
        **kwargs: Any,
    ) -> None:
        """Checks the configuration; `build` or the first call creates the tables.

        Args:
          feature_config: A FeatureConfig or a nested dict, list, tuple or namedtuple
            of them, of this package or of tf.tpu.experimental.embedding.
          optimizer: For tables without their own: an optimizer of this package, of
            tf.tpu.experimental.embedding, of Keras 3 or tf_keras (see
            `tpu_embedding.keras.translate_keras_optimizer`), or "sgd", "adagrad" (with
            a learning rate of 0.001, as in Keras), "adam" or "ftrl" for those of this
            package. None: lookups only. TableConfig.optimizer accepts the same.
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
          distributed_options: How the processes of a MultiWorkerMirroredStrategy share
            the tables; None: the defaults of DistributedOptions.
          **kwargs: Of keras.layers.Layer: name, trainable, dtype.

        Raises:
          ValueError: If the configuration is wrong, an option is not supported, or
            `trainable_tables` is combined with an option for updates.
          TypeError: If an argument is of the wrong type.
          NotImplementedError: If an argument is not supported by this release.
          RuntimeError: If Keras does not run on TensorFlow.
        """
        super().__init__(**kwargs)
        self._configure(
            Arguments(
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
                distributed_options=distributed_options,
            )
        )

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
        if self._has_tables:
            return
        self._build_tables(input_shape)
        self.built = True

    def __call__(
        self,
        features: Any,
        weights: Any = None,
        serving_config: Any = None,
        **kwargs: Any,
    ) -> Any:
        """See `call`."""
        if not self._has_tables:
            self.built = False  # Keras sets it after `build_from_config`.
        if (
            serving_config is not None
            and not isinstance(serving_config, (ServingFeatures, str))
            and keras_api.is_symbolic((features, weights))
        ):
            # Keras saves the arguments of symbolic calls.
            self._convert_serving(serving_config)  # Raises errors for wrong ones.
            serving_config = keras_api.saved_argument(
                ServingFeatures.of(serving_config, self._table_keys())
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
            tf.Tensor, tf.SparseTensor or tf.RaggedTensor of int32 or int64 (or whole
            numbers of a floating point dtype). On CPUs an id may be a scalar, whose
            activation is [dim].
          weights: None, or the same structure with floating point weights, each in
            the layout of its feature, or None for features without weights. On CPUs a
            tf.GradientTape finds their gradient, as of any input.
          serving_config: Other FeatureConfigs over the layer's tables, for serving.
            Such a lookup consists of TensorFlow ops and updates nothing.

        Returns:
          The activations in the same structure, each [output shape..., dim], of the
          layer's compute dtype.

        Raises:
          ValueError: If features or weights are refused; TPUEmbedding.enqueue lists all
            errors.
          NotImplementedError: In `stateless_call`, unless `trainable_tables=True`.
        """
        if keras_api.is_stateless() and not self._parts.arguments.trainable_tables:
            raise NotImplementedError(
                "`stateless_call` passes the values of all weights, but the tables of "
                "tpu_embedding.keras.TPUEmbedding are looked up and updated in place. "
                "Call the layer, or create it with `trainable_tables=True`."
            )
        if keras_api.is_inferring_shapes():
            return self._infer(features, weights, serving_config, keras_api.placeholder)
        return self._look_up(features, weights, serving_config)

    def compute_output_shape(self, input_shape: Any) -> Any:
        """Returns the shapes of the activations.

        Args:
          input_shape: In the structure of `feature_config` the shape of each feature,
            with its batch axis.
        """
        return self._infer_from_shapes(input_shape)

    def get_build_config(self) -> dict[str, Any] | None:
        """Returns whether the layer is built; a copy may have other input shapes."""
        return {"input_shape": None} if self._has_tables else None

    def build_from_config(self, config: Mapping[str, Any]) -> None:
        """Builds a layer that is being loaded, unless a TPU needs shapes first."""
        del config
        if self._parts.tables.can_build():
            self.build()

    def _trackable_children(self, save_type: str = "checkpoint", **kwargs: Any) -> Any:
        children = super()._trackable_children(save_type, **kwargs)
        if save_type == "checkpoint":
            return children  # Tables and slots; the views for Keras are not attributes.
        # Exported graphs also refer to the placeholder variable.
        values = [
            *(keras_api.value_of(weight) for weight in self.weights),
            *self._parts.tables.stored(),
        ]
        weights = [value for value in values if isinstance(value, tf.Variable)]
        return {
            **{n: c for n, c in children.items() if not isinstance(c, LogicalVariable)},
            **{f"_weight_{i}": weight for i, weight in enumerate(weights)},
        }

    def _ensure_built(self) -> None:
        if not self._has_tables:
            with keras_api.name_scope(self):
                self.build()
