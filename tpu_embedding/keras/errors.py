"""The wording of the errors of the Keras layer; see `tpu_embedding.errors`."""

from __future__ import annotations

from collections.abc import Iterable

from tpu_embedding.errors import type_name


def backend(name: str) -> RuntimeError:
    """Keras runs on something else than TensorFlow."""
    return RuntimeError(
        "tpu_embedding.keras.TPUEmbedding needs Keras on TensorFlow, and Keras runs "
        f'on {name!r}. Set the environment variable KERAS_BACKEND to "tensorflow" '
        "before Keras is imported."
    )


def no_optimizer(tables: Iterable[str]) -> RuntimeError:
    """A gradient has come for tables that have no optimizer."""
    return RuntimeError(
        f"The layer cannot train the tables {', '.join(tables)}: they have no "
        "optimizer. Pass `optimizer` to the layer or to each TableConfig, or set "
        "`layer.trainable = False`."
    )


def gradient_of_control_flow() -> NotImplementedError:
    """A tape around a branch or a loop that calls the layer."""
    return NotImplementedError(
        "The layer was called inside tf.cond, tf.map_fn or a loop of TensorFlow, under "
        "a tape that was opened outside of it. Call the layer before, with all ids at "
        "once, or open the tape inside."
    )


def stateless_call() -> NotImplementedError:
    """A call with weights of the caller's."""
    return NotImplementedError(
        "`stateless_call` hands over the values of all weights, but the tables of "
        "tpu_embedding.keras.TPUEmbedding are looked up and updated where they are. "
        "Call the layer, or make it with `trainable_tables=True`."
    )


def jacobian() -> NotImplementedError:
    """Many gradients of one call at once."""
    return NotImplementedError(
        "A Jacobian with respect to the weights of tpu_embedding.keras.TPUEmbedding "
        "would update its tables once for each element of the target. Leave the "
        "layer's weights out of the sources, or call tape.gradient."
    )


def second_gradient(memory: int) -> str:
    """The text for a call of a traced function whose gradient is asked for again."""
    return (
        "The gradients of this lookup were applied already; each lookup takes them "
        "once. Call the layer again, or take all gradients with one tape.gradient "
        f"call, at most {memory} calls later."
    )


def optimizer_name(where: str, name: str, known: Iterable[str]) -> ValueError:
    """A string that names no optimizer."""
    return ValueError(
        f"Unknown optimizer {name!r} for {where}. The names are "
        f"{', '.join(map(repr, known))}; other optimizers are passed as objects."
    )


def untranslatable(optimizer: object, known: Iterable[str]) -> ValueError:
    """A Keras optimizer, or something else, that no rule here matches."""
    cls = type(optimizer)
    wraps = hasattr(optimizer, "inner_optimizer")
    return ValueError(
        f"translate_keras_optimizer cannot translate {cls.__module__}."
        f"{cls.__qualname__}. It takes {', '.join(known)} of Keras 3 and of tf_keras, "
        "and no subclasses of them."
        + (" Pass its `inner_optimizer`, and itself as `loss_scale`." if wraps else "")
    )


def refused_option(
    optimizer: str, option: str, value: object, neutral: object
) -> ValueError:
    """An option of a Keras optimizer that embedding tables cannot carry."""
    return ValueError(
        f"Embedding tables cannot carry `{option}={value!r}` of the Keras optimizer "
        f"{optimizer}. Leave it at {neutral!r}, or use an optimizer of tpu_embedding."
    )


def bias_correction(optimizer: str) -> ValueError:
    """Only Adam has a bias to correct."""
    return ValueError(
        f"`bias_correction=True` is for Adam. Received: the optimizer {optimizer}."
    )


def late_schedule(optimizer: str, rate: object) -> RuntimeError:
    """A learning rate that became a schedule when the layer had been made."""
    return RuntimeError(
        f"The `learning_rate` of the Keras optimizer {optimizer} was a number when the "
        f"layer was made, and now is {rate!r}. Embedding tables count the updates for "
        "a schedule from the first one: give the schedule to the optimizer before the "
        "layer is made, or assign numbers."
    )


def loss_scale_missing(cause: str) -> ValueError:
    """Keras scales the loss, and unscales too late for the tables."""
    return ValueError(
        f"{cause} Keras scales the loss and unscales the gradients only after they "
        "have reached the embedding tables. Pass the layer `loss_scale`: the number, "
        "the optimizer that scales, or a callable that returns either, as `lambda: "
        "model.optimizer` for one that `compile` makes. Or have no scaling: use the "
        'policy "mixed_bfloat16", or an optimizer without `loss_scale_factor` in '
        "`compile(auto_scale_loss=False)`, and under float16 pass `loss_scale=1`."
    )


def loss_scale_type(value: object) -> TypeError:
    """A scale that is none of what the layer takes."""
    return TypeError(
        "Argument `loss_scale` must be None, a number, an optimizer of Keras 3 that "
        "scales the loss, or a callable that returns a number or such an optimizer. "
        f"Received: {value!r} of type {type_name(value)}. For a scale held in a "
        "variable pass `lambda: variable`."
    )


def loss_scale_returned(value: object) -> TypeError:
    """A callable that gives no scale."""
    return TypeError(
        "The callable given as `loss_scale` must return a number, a scalar tensor or "
        f"variable, or an optimizer of Keras 3. Received: {value!r} of type "
        f"{type_name(value)}."
    )


def saved_loss_scale(optimizer: str) -> ValueError:
    """An optimizer of which a loaded layer would have a copy."""
    return ValueError(
        f"A layer whose `loss_scale` is an optimizer, here {optimizer}, cannot be "
        "saved or cloned: the copy would follow a scale of its own, not that of its "
        "model. Use `save_weights` or tf.train.Checkpoint, and make the model in code."
    )


def pipelining(value: object) -> NotImplementedError:
    """An update that stays pending, where nobody could apply it in time."""
    return NotImplementedError(
        f"`pipeline_execution_with_tensor_core={value!r}` is not supported by the "
        "layer: each call is a batch of its own, so there is no step that an update "
        "could be late by, and evaluation, export, get_weights and callbacks of Keras "
        "read the tables without a chance to apply it first. Leave it at False, or "
        "use tpu_embedding.TPUEmbedding in a loop of your own."
    )


def trainable_tables_optimizer(where: str) -> ValueError:
    """Two optimizers for one table."""
    return ValueError(
        "With `trainable_tables=True` the optimizer of the model trains the tables, "
        f"so {where} cannot have one of its own. Pass `optimizer=None` to the layer "
        "and leave TableConfig.optimizer at None."
    )


def trainable_tables_option(option: str, value: object) -> ValueError:
    """An option that ordinary weights have no use for."""
    return ValueError(
        f"With `trainable_tables=True` the tables are ordinary weights, which have no "
        f"use for `{option}={value!r}`. Leave it at None."
    )


def trainable_tables_on_tpu() -> NotImplementedError:
    """Ordinary weights, whose lookups a TPU does not take."""
    return NotImplementedError(
        "`trainable_tables=True` looks up by stock ops that no TPU program can hold. "
        "Leave it at False under a TPU strategy, where each table has an optimizer of "
        "its own, or use keras.layers.Embedding."
    )


def symbolic_dtype(path: str, dtype: str) -> TypeError:
    """A keras.Input for ids without a dtype."""
    return TypeError(
        f"The ids of feature {path} must be int32 or int64. Received: a symbolic "
        f'tensor of {dtype}. Use `keras.Input(shape, dtype="int64")`, also at the '
        "head of a Sequential, which takes float32 for granted."
    )


def input_shape(path: str, shape: object) -> ValueError:
    """Something that is no shape where a feature has one."""
    return ValueError(
        f"`input_shape` must hold the shape of feature {path}, a tuple of int or None. "
        f"Received: {shape!r}."
    )


def serving_table(path: str) -> ValueError:
    """A serving feature over a table that the layer does not have."""
    return ValueError(
        f"Feature {path} of `serving_config` has a TableConfig that is none of the "
        "layer's own. Use the TableConfig objects that the layer was made with; for a "
        "loaded layer they are the keys of `layer.embedding_tables`."
    )


def embedding_feature(asked: str, generation: str) -> ValueError:
    """A hint that the TPUs of the strategy belie."""
    return ValueError(
        f"`embedding_feature` is {asked}, but the strategy's TPUs are {generation}. "
        "Leave it at None: the layer asks the strategy."
    )


def serving_in_program() -> NotImplementedError:
    """A lookup in stock ops within the program of a TPU."""
    return NotImplementedError(
        "`serving_config` is for serving: under a TPU strategy such a call belongs "
        "outside of strategy.run. Inside, call the layer without it."
    )


def unknown_table(table: object) -> ValueError:
    """A table that the layer does not have."""
    return ValueError(
        f"The layer has no table for {table!r}. The keys of `layer.embedding_tables` "
        "are its TableConfig objects."
    )


def not_serializable(what: str, value: object) -> ValueError:
    """Something in the configuration that cannot be written into a file."""
    return ValueError(
        f"{what} cannot be saved: {value!r}. Use an object of Keras or of this "
        "package, or register the function or class with "
        "`keras.saving.register_keras_serializable`."
    )


def namedtuple(name: str) -> ValueError:
    """A container whose class no file could bring back."""
    return ValueError(
        f"The namedtuple {name} in a feature configuration cannot be saved or cloned: "
        "Keras writes the inputs of a layer without the class. Use a dict, and "
        "`save_weights` or tf.train.Checkpoint for layers that have it."
    )


def saved_state_missing(layer: str, names: Iterable[str]) -> ValueError:
    """A weights file without what the layer needs."""
    return ValueError(
        f"The layer {layer!r} misses some or all of {', '.join(names)} in the file. "
        "Tables are found by name: give them the names they were saved under, and the "
        "same kind of optimizer."
    )


def refused_before(layer: str, earlier: ValueError) -> ValueError:
    """Nothing under this path of the file, after what was there did not fit."""
    return ValueError(
        f"The file has nothing more for the layer {layer!r}. What was there before was "
        f"refused: {earlier}"
    )


def saved_state_shape(layer: str, name: str, own: object, saved: object) -> ValueError:
    """A weights file whose table has another shape."""
    return ValueError(
        f"{name} of the layer {layer!r} has shape {own}, but {saved} in the file."
    )
