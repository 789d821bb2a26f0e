"""The Keras layer: lookups in the forward pass, updates in the backward pass."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any

import keras
import tensorflow as tf

from tpu_embedding import embedding
from tpu_embedding.errors import argument_type
from tpu_embedding.keras import errors, gate, plain, saving
from tpu_embedding.keras.configs import Resolved, resolve, resolve_serving
from tpu_embedding.keras.specs import output_spec
from tpu_embedding.initializers import default_initializer

_EmbeddingFeature = tf.tpu.experimental.HardwareFeature.EmbeddingFeature


@keras.saving.register_keras_serializable("tpu_embedding")
class TPUEmbedding(keras.layers.Layer):
    """Embedding tables as a Keras layer; each table has an optimizer of its own.

    >>> import keras
    >>> import tensorflow as tf
    >>> import tpu_embedding as te
    >>> import tpu_embedding.keras
    >>> films = te.TableConfig(8, 2, initializer=te.RowIdInitializer())
    >>> layer = te.keras.TPUEmbedding({"film": te.FeatureConfig(films)}, te.SGD(0.5))
    >>> inputs = {"film": keras.Input((), dtype="int64")}
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

    Attributes:
      embedding_tables: The table variables, by TableConfig.
    """

    def __init__(  # noqa: PLR0913 - the arguments of TFRS, and ours by keyword.
        self,
        feature_config: Any,
        optimizer: Any,
        pipeline_execution_with_tensor_core: bool = False,
        batch_size: int | None = None,
        embedding_feature: Any = None,
        sparse_core_embedding_config: Any = None,
        *,
        trainable_tables: bool = False,
        loss_scale: float | Callable[[], Any] | None = None,
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
          pipeline_execution_with_tensor_core: False.
          batch_size: The global size of every training batch, or None for any.
          embedding_feature: None, or EmbeddingFeature.UNSUPPORTED or V1 of
            TensorFlow, which are all the same on a host.
          sparse_core_embedding_config: None.
          trainable_tables: Make the tables ordinary trainable weights, which the
            optimizer of the model trains, as TFRS did on a CPU.
          loss_scale: What the loss was multiplied by, or a callable that returns it;
            gradients are divided by it.
          invalid_ids: The rule for tables of tf.tpu.experimental.embedding: "error"
            (also if None), "drop" or "mod". A TableConfig of ours has its own.
          check_numerics: Refuse weights and gradients that are not finite.
          **kwargs: Of keras.layers.Layer: name, trainable, dtype.

        Raises:
          ValueError: If the configuration is wrong, or an option cannot be carried.
          TypeError: If an argument is of the wrong type.
          NotImplementedError: If this release lacks what an argument asks for.
          RuntimeError: If Keras does not run on TensorFlow.
        """
        if keras.backend.backend() != "tensorflow":
            raise errors.backend(keras.backend.backend())
        super().__init__(autocast=False, **kwargs)
        self.supports_jit = False  # XLA has no such kernels.
        if pipeline_execution_with_tensor_core:
            raise errors.not_built_yet("pipeline_execution_with_tensor_core", True)
        if embedding_feature is _EmbeddingFeature.V2:
            raise errors.not_built_yet("embedding_feature", embedding_feature)
        if sparse_core_embedding_config is not None:
            raise errors.not_built_yet(
                "sparse_core_embedding_config", sparse_core_embedding_config
            )
        if loss_scale is not None and not callable(loss_scale):
            if isinstance(loss_scale, bool) or not isinstance(loss_scale, (int, float)):
                raise argument_type("loss_scale", loss_scale, "a number or a callable")
        # In a closure: Keras would wrap and track what an attribute holds.
        arguments = {
            "feature_config": feature_config,
            "optimizer": optimizer,
            "batch_size": batch_size,
            "trainable_tables": trainable_tables,
            "loss_scale": loss_scale,
            "invalid_ids": invalid_ids,
            "check_numerics": check_numerics,
        }
        self._argument = arguments.__getitem__
        self._resolved: Resolved = resolve(feature_config, optimizer, invalid_ids)
        self._virtual: Any = None
        self._core = self._make_core()
        self._weights_of_tables: Callable[[], dict[str, Any]] = dict

    def build(self, input_shape: Any = None) -> None:
        """Makes tables and slots, whatever the shape of the input."""
        del input_shape
        if self.built:
            return
        policies = (self.dtype_policy, keras.config.dtype_policy())
        scaled = [p.name for p in policies if p.compute_dtype == "float16"]
        if scaled and self._argument("loss_scale") is None:
            raise errors.loss_scale_missing(scaled[0])
        if self._argument("trainable_tables"):
            self._build_trainable_tables()
        else:
            self._virtual = self.add_weight(
                name="virtual", shape=(), initializer="zeros", dtype="float32"
            )
            core = self._core()
            core.build()
            for name, variable in core.checkpoint_variables().items():
                self._track_trackable(variable, name)
        self.built = True

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
        """
        resolved = self._resolved
        if serving_config is not None:
            resolved = resolve_serving(serving_config, resolved)
        structure = resolved.structure
        values = structure.flatten("features", features)
        if weights is None:
            gains = [None] * len(values)
        else:
            gains = structure.flatten("weights", weights)
        if serving_config is not None or self._argument("trainable_tables"):
            activations = self._look_up_plainly(resolved, values, gains)
            if not self._argument("trainable_tables") and self.trainable:
                activations = self._trap(activations)
        else:
            activations = self._look_up(values, gains)
        return structure.pack([tf.cast(a, self.compute_dtype) for a in activations])

    def compute_output_spec(
        self, features: Any, weights: Any = None, serving_config: Any = None
    ) -> Any:
        """The KerasTensors of a symbolic call."""
        del weights
        resolved = self._resolved
        if serving_config is not None:
            resolved = resolve_serving(serving_config, resolved)
        return output_spec(resolved, features, self.compute_dtype)
