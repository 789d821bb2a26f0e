"""The layer for Keras 3: lookups in the forward pass, updates in the backward pass."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import keras
import tensorflow as tf

from tpu_embedding import errors
from tpu_embedding.engines.full_table_view import LogicalVariable
from tpu_embedding.inputs import InputKind, kind_of
from tpu_embedding.keras import keras3
from tpu_embedding.keras.base import Arguments, EmbeddingLayer
from tpu_embedding.keras.conversion import Features
from tpu_embedding.keras.serialization import ServingFeatures
from tpu_embedding.layout.output_shapes import OutputShapes, from_input

# The smallest and largest rank of each kind of input.
_RANKS: dict[InputKind, tuple[int, float, str]] = {
    InputKind.DENSE: (1, math.inf, ">= 1"),
    InputKind.SPARSE: (2, math.inf, ">= 2"),
    InputKind.RAGGED: (2, 2, "2"),
}
_NAMES = {
    InputKind.DENSE: "dense keras.Input",
    InputKind.SPARSE: "keras.Input with sparse=True",
    InputKind.RAGGED: "keras.Input with ragged=True",
}


@keras3.register
class TPUEmbedding(EmbeddingLayer, keras.layers.Layer):
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
        super().__init__(autocast=False, **kwargs)
        self.supports_jit = False  # XLA has no kernels for these lookups.
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
        if serving_config is not None and not isinstance(
            serving_config, ServingFeatures
        ):
            leaves = keras.tree.flatten((features, weights))
            if any(isinstance(leaf, keras.KerasTensor) for leaf in leaves):
                # Keras saves the arguments of symbolic calls.
                self._convert_serving(serving_config)  # Raises errors for wrong ones.
                serving_config = ServingFeatures.of(serving_config, self._table_keys())
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
            numbers of a floating point dtype).
          weights: None, or the same structure with floating point weights, each in
            the layout of its feature, or None for features without weights.
          serving_config: Other FeatureConfigs over the layer's tables, for serving.
            Such a lookup consists of TensorFlow ops and updates nothing.

        Returns:
          The activations in the same structure, each [output shape..., dim], of the
          layer's compute dtype.

        Raises:
          TypeError, ValueError, RuntimeError, NotImplementedError,
          tf.errors.InvalidArgumentError: As TPUEmbedding.enqueue.
          NotImplementedError: In `stateless_call`, unless `trainable_tables=True`.
        """
        if keras3.is_stateless() and not self._parts.arguments.trainable_tables:
            raise NotImplementedError(
                "`stateless_call` passes the values of all weights, but the tables of "
                "tpu_embedding.keras.TPUEmbedding are looked up and updated in place. "
                "Call the layer, or create it with `trainable_tables=True`."
            )
        return self._look_up(features, weights, serving_config)

    def compute_output_spec(
        self, features: Any, weights: Any = None, serving_config: Any = None
    ) -> Any:
        """Checks the arguments of a symbolic call and returns its KerasTensors."""
        wanted = self._parts.features
        if serving_config is not None:
            wanted = self._convert_serving(serving_config)
        return _output_spec(wanted, features, weights, self.compute_dtype)

    def compute_output_shape(self, input_shape: Any) -> Any:
        """Returns the shapes of the activations.

        Args:
          input_shape: In the structure of `feature_config` the shape of each feature,
            with its batch axis.
        """
        return _output_shape(self._parts.features, input_shape)

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
        values = [*(w.value for w in self.weights), *self._parts.tables.stored()]
        weights = [value for value in values if isinstance(value, tf.Variable)]
        return {
            **{n: c for n, c in children.items() if not isinstance(c, LogicalVariable)},
            **{f"_weight_{i}": weight for i, weight in enumerate(weights)},
        }

    def _ensure_built(self) -> None:
        if not self._has_tables:
            with keras.name_scope(self.name, caller=self):
                self.build()


def _output_spec(features: Features, ids: Any, weights: Any, dtype: str) -> Any:
    """Checks a symbolic call and returns the KerasTensors of its activations.

    Args:
      features: The features to look up.
      ids: In the structure of the features KerasTensors or tensors.
      weights: None, or the same structure; None for features without weights.
      dtype: Of the activations.

    Raises:
      TypeError: If a structure is of the wrong type, ids are not integers, or weights
        are not floating point.
      ValueError: If an input's kind or shape does not fit its feature, or weights
        differ in layout from their ids.
    """
    plan, structure = features.plan, features.structure
    shapes = OutputShapes(plan.features)
    values = structure.flatten("features", ids)
    flat_weights = structure.flatten_weights(weights)
    outputs = []
    for spec, value, weight in zip(plan.features, values, flat_weights, strict=True):
        kind = _check_ids(spec.path, value)
        shape = tuple(value.shape)
        shapes.check_input(spec.index, shape, ragged=kind is InputKind.RAGGED)
        if weight is not None:
            _check_weights(spec.path, weight, kind, shape)
        rows = spec.config.output_shape
        if rows is None:
            rows = from_input(spec.path, spec.config, shape)
        dim = plan.tables[spec.table].config.dim
        outputs.append(keras.KerasTensor((*rows, dim), dtype=dtype))
    return structure.pack(outputs)


def _output_shape(features: Features, shapes: Any) -> Any:
    """Returns the shapes of activations for shapes of inputs, in the same structure.

    Raises:
      TypeError, ValueError: As `_output_spec`, for structures and shapes.
    """
    structure = features.structure
    leaves = structure.flatten("input_shape", shapes, container_leaves=True)
    inputs = []
    for spec, leaf in zip(features.plan.features, leaves, strict=True):
        try:
            shape = tuple(tf.TensorShape(leaf).as_list())
        except (TypeError, ValueError) as error:
            raise ValueError(
                f"`input_shape` must hold the shape of feature {spec.path}, a tuple "
                f"of int or None. Received: {leaf!r}."
            ) from error
        # An input of rank 2 may be ragged, which can fill more output shapes.
        inputs.append(keras.KerasTensor(shape, "int64", ragged=len(shape) == 2))
    outputs = _output_spec(features, structure.pack(inputs), None, "float32")
    flat = structure.flatten("activations", outputs)
    return structure.pack([tuple(output.shape) for output in flat])


def _check_ids(path: str, value: Any) -> InputKind:
    kind = _kind(value)
    if kind is None:
        raise errors.feature_kind(path, value)
    name = keras.backend.standardize_dtype(value.dtype)
    if name not in ("int32", "int64"):
        raise TypeError(
            f"The ids of feature {path} must be int32 or int64. Received: a symbolic "
            f'tensor of {name}. Use `keras.Input(shape, dtype="int64")`, also as the '
            "first layer of a Sequential, which otherwise assumes float32."
        )
    smallest, largest, allowed = _RANKS[kind]
    if not smallest <= len(value.shape) <= largest:
        raise errors.input_rank(path, kind.value, len(value.shape), allowed)
    return kind


def _check_weights(path: str, weights: Any, kind: InputKind, shape: Any) -> None:
    if _kind(weights) is not kind:
        raise errors.weights_kind(path, _NAMES[kind], weights)
    name = keras.backend.standardize_dtype(weights.dtype)
    if not tf.as_dtype(name).is_floating:
        raise errors.weights_dtype(path, name)
    if not tf.TensorShape(shape).is_compatible_with(weights.shape):
        raise errors.weights_shape(path, shape, tuple(weights.shape))


def _kind(value: Any) -> InputKind | None:
    if not isinstance(value, keras.KerasTensor):
        return kind_of(value)
    if getattr(value, "ragged", False):
        return InputKind.RAGGED
    return InputKind.SPARSE if value.sparse else InputKind.DENSE
