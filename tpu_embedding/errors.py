"""Errors that several modules raise; other errors are worded where they are raised.

Each function returns the exception: `raise errors.argument_type(...)`.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any


def type_name(value: object) -> str:
    """The qualified name of the class; a built-in class has no module prefix."""
    cls = type(value)
    module = "" if cls.__module__ == "builtins" else f"{cls.__module__}."
    return f"{module}{cls.__qualname__}"


def quoted(names: Iterable[object]) -> str:
    """The names in quotes, with commas between them."""
    return ", ".join(repr(name) for name in names)


def argument_value(argument: str, value: object, allowed: str) -> ValueError:
    """An argument of the right type whose value is not allowed."""
    return ValueError(f"Argument `{argument}` must be {allowed}. Received: {value!r}.")


def argument_type(argument: str, value: object, allowed: str) -> TypeError:
    """An argument of the wrong type."""
    return TypeError(
        f"Argument `{argument}` must be {allowed}. Received: {value!r} of type "
        f"{type_name(value)}."
    )


def argument_int(argument: str, value: object, smallest: int) -> ValueError:
    """A size that is not an int or too small; TensorFlow raises ValueError for both."""
    return ValueError(
        f"Argument `{argument}` must be an int >= {smallest}. Received: {value!r} "
        f"of type {type_name(value)}. Convert other kinds of integers with int(...)."
    )


def check_returned(
    function: object, value: Any, wanted: Any, table: str | None = None
) -> None:
    """Checks the tensor that a user's function returned.

    Args:
      function: The function.
      value: What it returned.
      wanted: (shape, dtype) that it must return.
      table: Name of the function's table, if known.

    Raises:
      TypeError: If `value` is not a tensor, or has another dtype.
      ValueError: If its shape differs or is unknown.
    """
    where = f"{function!r}" if table is None else f"Table {table!r}: {function!r}"
    shape, dtype = getattr(value, "shape", None), getattr(value, "dtype", None)
    wanted_shape, wanted_dtype = tuple(wanted[0]), _dtype_name(wanted[1])
    must = f"it must return a {wanted_dtype} tensor of shape {wanted_shape}."
    if shape is None or dtype is None:
        raise TypeError(
            f"{where} returned {value!r} of type {type_name(value)}; {must}"
        )
    if getattr(shape, "rank", 0) is None:
        raise ValueError(
            f"{where} returned a tensor of unknown rank; {must} Use tf.ensure_shape."
        )
    if tuple(shape) != wanted_shape:
        raise ValueError(f"{where} returned a tensor of shape {tuple(shape)}; {must}")
    if _dtype_name(dtype) != wanted_dtype:
        raise TypeError(
            f"{where} returned a tensor of {_dtype_name(dtype)}; {must} Use tf.cast."
        )


def _dtype_name(dtype: Any) -> str:
    """NumPy's name of a dtype of NumPy or TensorFlow."""
    return str(getattr(dtype, "name", dtype))


def rate_shape(
    rate: object, shape: object, argument: str = "learning_rate"
) -> ValueError:
    """A learning rate callable, or another one, that returns no scalar."""
    return ValueError(
        f"A callable `{argument}` must return a scalar. {rate!r} returned shape "
        f"{shape}."
    )


def refused_by_engine(
    engine: str, where: str, option: str, value: object
) -> NotImplementedError:
    """An option that means something on other hardware only."""
    return NotImplementedError(
        f"The {engine} engine cannot carry `{option}={value!r}` of {where}: it "
        "is for TPUs alone. Leave it at its default here."
    )


def unsupported_strategy(name: str) -> NotImplementedError:
    """A tf.distribute strategy without an engine."""
    return NotImplementedError(
        f"{name} is not supported by this release. Supported are the default "
        "strategy, OneDeviceStrategy and MirroredStrategy on CPU or GPU, TPUStrategy "
        "and testing.SoftwareTPUStrategy; under every strategy there is "
        "TPUEmbeddingV0, whose tables are ordinary weights."
    )


def no_profiles(engine: str, value: object) -> NotImplementedError:
    """A directory for what only TPU v2 to v4 write."""
    return NotImplementedError(
        f"The {engine} engine cannot carry `profile_data_directory={value!r}`: only "
        "TPU v2 to v4 write profiles. Leave it at None here."
    )


def tpu_not_initialized() -> RuntimeError:
    """A TPUStrategy that does not know its TPUs' hardware."""
    return RuntimeError(
        "The TPU system of this TPUStrategy is not initialized, so that its hardware "
        "for embeddings is not known. Before you create the strategy call "
        "tf.tpu.experimental.initialize_tpu_system(resolver), with the resolver that "
        "the strategy gets."
    )


def unknown_generation(name: object, known: Iterable[str]) -> ValueError:
    """A TPU generation that is not in the table."""
    return ValueError(f"Unknown TPU generation {name!r}. Known are {', '.join(known)}.")


# Features, weights and gradients as they come in. `what` says which of them.


def feature_kind(path: str, value: object) -> ValueError:
    """A feature that is no tensor."""
    return ValueError(
        f"Feature {path} must be a tf.Tensor, tf.SparseTensor or tf.RaggedTensor. "
        f"Received: {value!r} of type {type_name(value)}."
    )


def weights_kind(path: str, expected: str, value: object) -> ValueError:
    """Weights that are not built as their feature is."""
    return ValueError(
        f"The weights of feature {path} must be None or, as the feature itself, a "
        f"{expected}. Received: {value!r} of type {type_name(value)}."
    )


def weights_dtype(path: str, dtype_name: str) -> TypeError:
    """Weights that are no floating point numbers."""
    return TypeError(
        f"The weights of feature {path} must be of a floating point dtype. Received: "
        f"{dtype_name}. Convert them with tf.cast."
    )


def sequence_rank(path: str, max_sequence_length: int, rank: int | None) -> ValueError:
    """A sequence feature needs an input of rank 2."""
    return ValueError(
        f"Feature {path} has `max_sequence_length={max_sequence_length}`, so its input "
        f"must be of rank 2. Received: rank {rank}. Reshape the input, or leave "
        "`max_sequence_length` at 0."
    )


def input_rank(path: str, kind: str, rank: object, allowed: str) -> ValueError:
    """An input of a rank that its kind does not allow."""
    return ValueError(
        f"Feature {path}: the rank of a {kind} input must be {allowed}. Received: "
        f"rank {rank}."
    )


def output_shape_mismatch(
    path: str,
    expected: tuple[object, str],
    actual: tuple[object, str],
) -> ValueError:
    """Two sources give two shapes; each argument is (shape, where it came from)."""
    return ValueError(
        f"Feature {path}: the output shape {expected[0]} given by {expected[1]} does "
        f"not match {actual[0]} given by {actual[1]}."
    )


def batch_size_mismatch(path: str, expected: int, actual: int) -> ValueError:
    """A batch of another size than the one that was promised."""
    return ValueError(
        f"Feature {path} has a batch of {actual} where {expected} was expected: "
        "every batch must have the size given as `batch_size` or to build(). Pad the "
        "last batch of a data set, or drop it with `drop_remainder=True`."
    )


def batch_size_conflict(first: int | None, second: int) -> ValueError:
    """Two sizes were promised."""
    return ValueError(
        f"A batch size of {first} per replica was given before, so build() cannot fix "
        f"{second}. Give one of them, or the same twice."
    )


def batch_size_not_divisible(batch_size: int, num_replicas: int) -> ValueError:
    """The global batch cannot be dealt out evenly."""
    return ValueError(
        f"`batch_size` is global and must be divisible by the number of replicas. "
        f"Received: {batch_size} for {num_replicas} replicas."
    )


def gradient_kind(path: str, value: object) -> ValueError:
    """A gradient that is neither a tensor of floats nor None."""
    return ValueError(
        f"The gradient of feature {path} must be a floating point tf.Tensor or None. "
        f"Received: {value!r} of type {type_name(value)}. Turn "
        "tf.IndexedSlices into a tensor with tf.convert_to_tensor."
    )


def gradient_shape(path: str, expected: object, actual: object) -> ValueError:
    """A gradient of another shape than the activation."""
    return ValueError(
        f"The gradient of feature {path} must have the shape of its activation, "
        f"{expected}. Received: {actual}."
    )


# Calls that come too early or at the wrong place.


def not_built(method: str) -> RuntimeError:
    """A method that needs tables and shapes."""
    return RuntimeError(
        f"{method} was called before the embedding was built. Call build() or "
        "enqueue() first."
    )


def training_without_optimizer(method: str, tables: Iterable[str]) -> RuntimeError:
    """Training of tables that have no optimizer."""
    return RuntimeError(
        f"{method} cannot train the tables {', '.join(tables)}: they have no "
        "optimizer. Pass `optimizer` to the constructor or to each TableConfig, or "
        "use `training=False`."
    )


def enqueue_device(device: object) -> ValueError:
    """enqueue(device=...) is for TPU devices."""
    return ValueError(
        f"Argument `device` of enqueue must name a TPU device. Received: {device!r}. "
        "Leave it at None: the engine on this machine places the batch itself."
    )


def unknown_device(device: object, known: Sequence[str]) -> ValueError:
    """enqueue(device=...) with none of the strategy's devices, or more than one."""
    more = f", ... ({len(known)} in all)" if len(known) > 8 else ""
    return ValueError(
        "Argument `device` of enqueue must name a TPU device of the strategy, with its "
        f"number: {', '.join(known[:8])}{more}. Received: {device!r}. Leave it at None "
        "to enqueue the batches of all replicas."
    )


def other_strategy(own: object, active: object) -> RuntimeError:
    """A call under another strategy than the embedding was made under."""
    name = type(active).__name__
    other = f"another {name}" if type(own) is type(active) else name
    return RuntimeError(
        f"The embedding was created under {type(own).__name__} and is called under "
        f"{other}. Create it inside `strategy.scope()` of the strategy "
        "that runs it."
    )


def outside_of_replica(method: str, num_replicas: int) -> RuntimeError:
    """A method of one replica, called for all of them."""
    among = f", of {num_replicas}" if num_replicas > 1 else ""
    return RuntimeError(
        f"{method} belongs to one replica{among}. Call it in the function that you "
        "give to `strategy.run`."
    )


def unknown_engine(variable: str, value: str, known: Iterable[str]) -> ValueError:
    """The environment asks for an engine that does not exist."""
    return ValueError(
        f"The environment variable {variable} is {value!r}. Unset it, or set it to "
        f"one of {', '.join(known)}."
    )


def host_engine_unavailable(variable: str, reason: str) -> RuntimeError:
    """The environment insists on an engine that cannot run."""
    return RuntimeError(
        f"{variable}=host asks for the host engine, which cannot run: {reason} Unset "
        "the variable to use the portable engine."
    )


def weights_shape(path: str, expected: object, actual: object) -> ValueError:
    """Weights of another shape than their ids."""
    return ValueError(
        f"The weights of feature {path} must have the shape of its ids, {expected}. "
        f"Received: {actual}."
    )


def slot_variable(table: str, slot: str, shape: object, value: object) -> ValueError:
    """What slot_variable_creation_fn made cannot be used."""
    return ValueError(
        f"Table {table}: `slot_variable_creation_fn` must return a dict with a float32 "
        f"variable of shape {shape} under {slot!r}. Received: {value!r}."
    )


def initial_value(name: str, expected: object, actual: object) -> ValueError:
    """An initializer that ignores the shape it is asked for."""
    return ValueError(
        f"The initializer of {name} must return the shape that it is given, "
        f"{expected}. Received: {actual}."
    )
