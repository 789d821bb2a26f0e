"""The parts of Keras 3 that the layer uses. No other module imports Keras 3."""

from __future__ import annotations

import functools
from collections.abc import Mapping
from typing import Any

import keras
import tensorflow as tf
from keras.src import api_export
from keras.src.backend.common.stateless_scope import in_stateless_scope
from keras.src.backend.common.symbolic_scope import in_symbolic_scope
from keras.src.saving import object_registration

from tpu_embedding.inputs import InputKind
from tpu_embedding.keras.symbols import Symbol
from tpu_embedding.tables.trackable import SavesNothing, UnsavedLogical, unsaved

Model = keras.Model
Callback = keras.callbacks.Callback
Optimizer = keras.optimizers.Optimizer
LossScaleOptimizer = keras.optimizers.LossScaleOptimizer
optimizers = keras.optimizers
regularizers = keras.regularizers
set_random_seed = keras.utils.set_random_seed
Embedding = keras.layers.Embedding
# The method of optimizers that updates all variables of a step. It takes a strategy,
# pairs of gradients and variables and, in Keras 3, the learning rate.
ALL_VARIABLES_STEP = "_distributed_tf_update_step"
slot_makers = ((Optimizer, "build"),)  # Optimizer bases with their slot makers.
load_model = keras.saving.load_model
COUNTS_FROM_THE_END = True  # Ids below 0 count from the last row.

register = keras.saving.register_keras_serializable("tpu_embedding")
serialize = keras.saving.serialize_keras_object
deserialize = keras.saving.deserialize_keras_object
serialize_optimizer = keras.optimizers.serialize
deserialize_optimizer = keras.optimizers.deserialize


def save_as(cls: Any, plain: Any) -> None:
    """Makes files store a class under the name of a class of Keras."""
    register(cls)  # Earlier files have this name.
    object_registration.GLOBAL_CUSTOM_NAMES[cls] = plain.__name__  # In h5 files.
    name = api_export.get_name_from_symbol(plain)
    api_export.REGISTERED_OBJS_TO_NAMES[cls] = name


class Layer(keras.layers.Layer):
    """The base class of the layer."""

    def __init__(self, **kwargs: Any) -> None:
        require_tensorflow("TPUEmbedding")
        super().__init__(autocast=False, **kwargs)
        self.supports_jit = False  # XLA has no kernels for these lookups.


def require_tensorflow(name: str) -> None:
    """Raises RuntimeError if Keras runs on another backend."""
    if keras.backend.backend() != "tensorflow":
        raise RuntimeError(
            f"tpu_embedding.keras.{name} needs Keras on TensorFlow, and Keras "
            f"runs on {keras.backend.backend()!r}. Set the environment variable "
            'KERAS_BACKEND to "tensorflow" before Keras is imported.'
        )


class RowEmbedding(keras.layers.Embedding):
    """An Embedding that reads the rows of its ids, and never the whole table."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        require_tensorflow("Embedding")
        super().__init__(*args, **kwargs)

    def call(self, inputs: Any) -> Any:
        """Returns the rows, with the dtype and the shape of Keras's layer."""
        ids = inputs
        if ids.dtype not in ("int32", "int64"):
            ids = keras.ops.cast(ids, "int32")
        if isinstance(ids, tf.SparseTensor):
            ids = tf.sparse.to_dense(ids)  # Keras looks up 0 where there is no id.
        return tf.ragged.map_flat_values(self._read, ids)

    def _read(self, ids: tf.Tensor) -> tf.Tensor:
        # Keras counts negative ids from the end.
        ids = tf.where(ids < 0, ids + tf.cast(self.input_dim, ids.dtype), ids)
        rows = tf.gather(self._embeddings.value, ids)
        if self.lora_enabled:
            low_rank = tf.gather(self.lora_embeddings_a.value, ids)
            scale: Any = self.lora_alpha
            scale /= self.lora_rank
            rows += scale * tf.matmul(low_rank, self.lora_embeddings_b.value)
        return tf.cast(rows, self.compute_dtype)

    def quantize(
        self, mode: str | None = None, type_check: bool = True, **options: Any
    ) -> None:
        """Quantizes the table as Keras does, which refuses other subclasses."""
        del type_check
        # super() fails in a layer whose class was changed: Keras keeps the old method.
        keras.layers.Embedding.quantize(self, mode, type_check=False, **options)


def change_class(layer: Any, cls: Any) -> None:
    """Changes the class of a layer so that Keras can still quantize it."""
    object.__setattr__(layer, "__class__", cls)
    if not isinstance(layer.quantize, functools.partial):  # Not changed before.
        layer.quantize = functools.partial(_quantize_any_class, layer.quantize)


def _quantize_any_class(
    quantize: Any, mode: Any = None, type_check: bool = True, **options: Any
) -> None:
    del type_check
    quantize(mode, type_check=False, **options)


def name_scope(layer: Any) -> Any:
    """Returns the context in which a layer adds its weights."""
    return keras.name_scope(layer.name, caller=layer)


def is_symbolic(arguments: Any) -> bool:
    """Returns whether a nested structure of arguments has a KerasTensor."""
    leaves = keras.tree.flatten(arguments)
    return any(isinstance(leaf, keras.KerasTensor) for leaf in leaves)


def is_inferring_shapes() -> bool:
    """Returns whether results of `call` are used for their shapes and dtypes only."""
    return False  # Keras 3 calls `compute_output_spec` instead.


def placeholder(shape: Any, dtype: str) -> Any:
    """Makes a result that has a shape and a dtype only."""
    return keras.KerasTensor(shape, dtype=dtype)


def symbol(value: Any) -> Symbol:
    """Describes an input of a symbolic call."""
    if not isinstance(value, keras.KerasTensor):
        return Symbol.of(value)
    kind = InputKind.SPARSE if value.sparse else InputKind.DENSE
    if getattr(value, "ragged", False):
        kind = InputKind.RAGGED
    dtype = keras.backend.standardize_dtype(value.dtype)
    # Results of Keras layers never say that they are sparse or ragged, even where they
    # are, like those of a StringLookup of ragged strings.
    history = getattr(value, "_keras_history", None)
    computed = history is not None and not isinstance(
        history.operation, keras.layers.InputLayer
    )
    shape = tuple(value.shape)
    return Symbol(kind, shape, dtype, value, may_differ=computed and len(shape) > 1)


def saved_argument(argument: Any) -> Any:
    """Returns an argument of a registered class as symbolic calls of Keras save it."""
    return argument


def is_tracing_shapes() -> bool:
    """Returns whether Keras traces the call for shapes only, to build a model.

    Keras has no public function for this, nor for `is_stateless`.
    """
    return in_symbolic_scope()


def is_stateless() -> bool:
    """Returns whether the caller passes the weights, as in `stateless_call`."""
    return in_stateless_scope() and not in_symbolic_scope()


def value_of(weight: Any) -> Any:
    """Returns the variable of a weight; anything else as it is."""
    return weight.value if isinstance(weight, keras.Variable) else weight


def built_for(optimizer: Any) -> list[Any]:
    """Returns the variables that an optimizer was built for; [] if it is not built."""
    return list(optimizer._trainable_variables) if is_built(optimizer) else []


def is_built(optimizer: Any) -> bool:
    """Returns whether an optimizer has its slots."""
    return hasattr(optimizer, "_trainable_variables_indices") and bool(
        optimizer._trainable_variables_indices
    )


def is_training(layer: Any) -> bool | None:
    """Returns whether a layer's current call is for training; None if not specified."""
    return layer._get_call_context().training


def loads_functions() -> bool:
    """Returns whether functions of a SavedModel may read the tables of new layers."""
    return False  # Models of tf_keras have such functions.


def runs_functions(layer: Any) -> bool:
    """Returns whether a layer calls SavedModel functions, which read what is stored."""
    del layer
    return False


def is_part_of_saved_model(model: Any) -> bool:
    """Returns whether a loaded model is part of another, which may call functions."""
    del model
    return False


def index_of(optimizer: Any, variable: Any) -> int:
    """Returns the place of a variable in the lists of slots of a built optimizer."""
    return optimizer._get_variable_index(variable)


def find_index(optimizer: Any, variable: Any) -> int | None:
    """Returns what `index_of` does, or None if the optimizer lacks the variable."""
    key = optimizer._var_key(variable)
    return optimizer._trainable_variables_indices.get(key)


def scale_loss(optimizer: Any, loss: tf.Tensor) -> tf.Tensor:
    """Multiplies a loss by the scale of an optimizer, built or not."""
    return optimizer.scale_loss(loss)


def policy_of_scaled_loss(layer: Any) -> str | None:
    """Returns a dtype policy under which Keras scales the loss, if one applies."""
    policies = (layer.dtype_policy, keras.config.dtype_policy())
    return next((p.name for p in policies if p.compute_dtype == "float16"), None)


def track(layer: Any, variable: Any, name: str) -> None:
    """Adds a variable to the checkpoints of a layer."""
    layer._track_trackable(variable, name)


def add_weight(layer: Any, name: str, shape: Any, initializer: Any) -> keras.Variable:
    """Adds a trainable float32 weight to a layer, whatever its dtype policy."""
    return layer.add_weight(
        name=_weight_name(name),
        shape=shape,
        initializer=initializer,
        dtype="float32",
        autocast=False,
    )


def set_state(layer: Any, variables: Mapping[str, Any]) -> None:
    """Shows tables and slots to `get_weights` and everything built on it.

    Args:
      layer: The layer that receives them as weights that are not trainable.
      variables: Each tf.Variable or LogicalVariable by its name in checkpoints.
    """
    layer.state_of_tables = [
        _TableWeight(variable, name) for name, variable in variables.items()
    ]


def saves_training() -> bool:
    """See `keras2.saves_training`."""
    return False  # Keras 3 goes on from `.keras` files.


def _weight_name(name: str) -> str:
    return name.replace("/", "_")  # Keras accepts no "/" in names.


class _TableWeight(SavesNothing, keras.Variable):
    """A view of a table or slot in the same memory.

    An exported model does not save it: the model saves the variables that its graphs
    read, which are those of the tables.
    """

    def __init__(self, variable: tf.Variable, name: str) -> None:
        super().__init__(
            lambda shape, dtype: variable,
            shape=variable.shape,
            dtype=variable.dtype,
            trainable=False,
            autocast=False,
            name=_weight_name(name),
        )

    def _initialize_with_initializer(self, initializer: Any) -> None:
        # Keras calls this later if it builds a model without making variables.
        self._initialize(initializer(self.shape, dtype=self.dtype))

    def _initialize(self, value: Any) -> None:
        self._value = unsaved(value)

    @property
    def _should_act_as_resource_variable(self) -> bool:
        if isinstance(self._value, UnsavedLogical):
            raise AttributeError  # TensorFlow checks whether the attribute exists.
        return True
