"""The parts of tf_keras that the layer uses. No other module imports tf_keras."""

# pyright: reportMissingImports=false

from __future__ import annotations

import contextlib
import functools
import json
from collections.abc import Callable, Mapping
from typing import Any

import tensorflow as tf
import tf_keras
from tf_keras.src.engine import base_layer_utils
from tf_keras.src.saving import object_registration
from tf_keras.src.saving.legacy.saved_model import load as revived
from tf_keras.src.saving.legacy.saved_model import utils as saved_model

from tpu_embedding.inputs import InputKind
from tpu_embedding.keras.symbols import PLACEHOLDER, Symbol
from tpu_embedding.tables.trackable import unsaved

Model = tf_keras.Model
Callback = tf_keras.callbacks.Callback
Optimizer = (tf_keras.optimizers.Optimizer, tf_keras.optimizers.legacy.Optimizer)
LossScaleOptimizer = tf_keras.mixed_precision.LossScaleOptimizer
optimizers = tf_keras.optimizers
regularizers = tf_keras.regularizers
set_random_seed = tf_keras.utils.set_random_seed
Embedding = RowEmbedding = tf_keras.layers.Embedding  # It reads rows.
ALL_VARIABLES_STEP = "_distributed_apply_gradients_fn"  # See `keras3`.
slot_makers = tuple(zip(Optimizer, ("build", "_create_all_weights"), strict=True))
load_model = tf_keras.models.load_model
COUNTS_FROM_THE_END = False


def _in_one_format(function: Callable[..., Any]) -> Callable[..., Any]:
    """Makes a function use the format of `.keras` files in h5 and SavedModel, too.

    tf_keras writes the objects of an h5 file in that format, and reads them in an older
    one, which finds neither registered classes nor initializers.
    """

    @functools.wraps(function)
    def call(value: Any) -> Any:
        scope: Any = saved_model.keras_option_scope(
            saved_model.should_save_traces(), in_tf_saved_model_scope=False
        )
        with scope:
            return function(value)

    return call


register = tf_keras.saving.register_keras_serializable("tpu_embedding")
serialize = _in_one_format(tf_keras.saving.serialize_keras_object)
deserialize = _in_one_format(tf_keras.saving.deserialize_keras_object)
serialize_optimizer = _in_one_format(tf_keras.optimizers.serialize)
deserialize_optimizer = _in_one_format(tf_keras.optimizers.deserialize)


def save_as(cls: Any, plain: Any) -> None:
    """See `keras3.save_as`."""
    register(cls)
    object_registration._GLOBAL_CUSTOM_NAMES[cls] = plain.__name__
    for attribute in ("_keras_api_names", "_keras_api_names_v1"):
        setattr(cls, attribute, vars(plain)[attribute])


def require_tensorflow(name: str) -> None:
    """Does nothing: tf_keras has no other backend."""


class Layer(tf_keras.layers.Layer):
    """The base class of the layer."""

    def __init__(self, **kwargs: Any) -> None:
        super().__init__(autocast=False, **kwargs)

    def _trackable_children(self, save_type: str = "checkpoint", **kwargs: Any) -> Any:
        children = super()._trackable_children(save_type, **kwargs)
        if save_type == "checkpoint":
            children.pop(PLACEHOLDER, None)
        return children


def change_class(layer: Any, cls: Any) -> None:
    """See `keras3.change_class`."""
    object.__setattr__(layer, "__class__", cls)


def name_scope(layer: Any) -> Any:
    """See `keras3.name_scope`; tf_keras names weights after the current tf scope."""
    del layer
    return contextlib.nullcontext()


def is_symbolic(arguments: Any) -> bool:
    """See `keras3.is_symbolic`."""
    leaves = tf.nest.flatten(arguments)
    return any(isinstance(leaf, tf_keras.__internal__.KerasTensor) for leaf in leaves)


def is_inferring_shapes() -> bool:
    """See `keras3.is_inferring_shapes`.

    To infer them tf_keras calls a layer with placeholders, in a graph that never runs.
    """
    graph = tf.compat.v1.get_default_graph()
    return getattr(graph, "name", "").endswith("_scratch_graph")


def placeholder(shape: Any, dtype: str) -> tf.Tensor:
    """See `keras3.placeholder`."""
    return tf.compat.v1.placeholder(dtype, shape)


def symbol(value: Any) -> Symbol:
    """See `keras3.symbol`.

    An Input with sparse=True or ragged=True may be declared without the axis of its
    ids, as in the documentation of TFRS.
    """
    if isinstance(value, tf_keras.__internal__.KerasTensor):
        spec: Any = value.type_spec
        kinds = {
            tf.SparseTensorSpec: InputKind.SPARSE,
            tf.RaggedTensorSpec: InputKind.RAGGED,
        }
        kind = kinds.get(type(spec), InputKind.DENSE)
        return Symbol(kind, tuple(spec.shape), spec.dtype.name, value)
    found = Symbol.of(value)
    if found.kind in (InputKind.SPARSE, InputKind.RAGGED) and len(found.shape) == 1:
        return Symbol(found.kind, (*found.shape, None), found.dtype, value)
    return found


def is_tracing_shapes() -> bool:
    """See `keras3.is_tracing_shapes`."""
    return False  # tf_keras builds models with the first batch of a replica.


def saved_argument(argument: Any) -> Any:
    """See `keras3.saved_argument`; tf_keras also needs it where it traces a call."""
    return json.dumps(argument.get_config())


def is_stateless() -> bool:
    """See `keras3.is_stateless`."""
    return False  # tf_keras has no `stateless_call`.


def value_of(weight: Any) -> Any:
    """See `keras3.value_of`."""
    return weight


def built_for(optimizer: Any) -> list[Any]:
    """See `keras3.built_for`; tf_keras builds an optimizer in each step."""
    del optimizer
    return []


def is_built(optimizer: Any) -> bool:
    """See `keras3.is_built`."""
    return getattr(optimizer, "_built", False)


def is_training(layer: Any) -> bool | None:
    """See `keras3.is_training`."""
    del layer
    training = base_layer_utils.call_context().training
    return None if tf.is_tensor(training) else training


def loads_functions() -> bool:
    """See `keras3.loads_functions`."""
    return saved_model.in_tf_saved_model_scope()


def runs_functions(layer: Any) -> bool:
    """See `keras3.runs_functions`."""
    return isinstance(layer, (revived.RevivedLayer, revived.RevivedNetwork))


def is_part_of_saved_model(model: Any) -> bool:
    """See `keras3.is_part_of_saved_model`."""
    is_root = hasattr(model, "tensorflow_version")
    return hasattr(model, "_serialized_attributes") and not is_root


def index_of(optimizer: Any, variable: Any) -> int:
    """See `keras3.index_of`."""
    return optimizer._index_dict[optimizer._var_key(variable)]


def find_index(optimizer: Any, variable: Any) -> int | None:
    """See `keras3.find_index`."""
    return optimizer._index_dict.get(optimizer._var_key(variable))


def scale_loss(optimizer: Any, loss: tf.Tensor) -> tf.Tensor:
    """See `keras3.scale_loss`."""
    if isinstance(optimizer, LossScaleOptimizer):
        return optimizer.get_scaled_loss(loss)
    return loss


def policy_of_scaled_loss(layer: Any) -> str | None:
    """See `keras3.policy_of_scaled_loss`."""
    policies = (layer.dtype_policy, tf_keras.mixed_precision.global_policy())
    return next((p.name for p in policies if p.compute_dtype == "float16"), None)


def track(layer: Any, variable: Any, name: str) -> None:
    """See `keras3.track`."""
    layer._track_trackable(variable, name, overwrite=True)


def add_weight(layer: Any, name: str, shape: Any, initializer: Any) -> Any:
    """See `keras3.add_weight`."""
    return layer.add_weight(
        name=name,
        shape=shape,
        initializer=initializer,
        dtype="float32",
        trainable=True,
        experimental_autocast=False,
    )


def set_state(layer: Any, variables: Mapping[str, Any]) -> None:
    """See `keras3.set_state`."""
    strategy = tf.distribute.get_strategy()
    for variable in variables.values():
        view = unsaved(variable)
        # `compile` checks in which strategy the weights of a model were created. An
        # engine creates its only copy of them outside of all strategies.
        view._distribute_strategy = strategy
        layer._non_trainable_weights.append(view)


def saves_training() -> bool:
    """Returns whether `model.save` writes a SavedModel, from which training goes on."""
    return saved_model.in_tf_saved_model_scope()
