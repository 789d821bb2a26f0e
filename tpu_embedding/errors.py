# length: all messages stand in one place, and every function is a few lines.
"""The wording of every error that a user can meet.

One small function per message. Each returns the exception, so that the line
which raises it reads `raise errors.no_features()`. Errors that depend on values
inside tensors (ids, weights) are TensorFlow's own and are worded in the ops.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

_COMBINERS = '"sum", "mean", "sqrtn"'


def type_name(value: object) -> str:
    """The class as an import writes it, built-in ones without their module."""
    cls = type(value)
    module = "" if cls.__module__ == "builtins" else f"{cls.__module__}."
    return f"{module}{cls.__qualname__}"


# Arguments of the configuration classes.


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
    """A size that is no int, or too small. TensorFlow has ValueError for both."""
    return ValueError(
        f"Argument `{argument}` must be an int >= {smallest}. Received: {value!r} "
        f"of type {type_name(value)}. Convert other kinds of integers with int(...)."
    )


def argument_order(lower: str, upper: str, limits: tuple[Any, Any]) -> ValueError:
    """A lower limit above the upper one."""
    return ValueError(
        f"`{lower}` must not exceed `{upper}`. Received: {limits[0]!r} and "
        f"{limits[1]!r}."
    )


def learning_rate(value: object) -> TypeError:
    """A learning rate that is neither a number nor a callable."""
    return TypeError(
        "Argument `learning_rate` must be a finite number or a callable that returns "
        f"one. Received: {value!r} of type {type_name(value)}. For a rate held in a "
        "variable pass `lambda: variable`."
    )


def learning_rate_arguments(value: object, count: int) -> TypeError:
    """A learning rate callable that needs more than one argument."""
    return TypeError(
        "A callable `learning_rate` takes no argument, or one: the number of updates "
        f"already applied to the table. Received: {value!r}, which needs {count}. "
        "Bind the others with functools.partial or a lambda."
    )


def clip_without_accumulation(clipvalue: object) -> ValueError:
    """Gradient clipping needs the summed gradient."""
    return ValueError(
        "`clipvalue` clips the summed gradient of a row, so it cannot be used with "
        f"`use_gradient_accumulation=False`. Received: clipvalue={clipvalue!r}. Leave "
        "`clipvalue` at None or `use_gradient_accumulation` at True."
    )


def dense_adam_without_accumulation() -> ValueError:
    """Adam over all rows needs the summed gradient."""
    return ValueError(
        "`lazy_adam=False` updates every row once per step, so it cannot be used with "
        "`use_gradient_accumulation=False`. Leave `use_gradient_accumulation` at True "
        "or `lazy_adam` at True."
    )


def combiner(value: object) -> ValueError:
    """A combiner that does not exist."""
    return ValueError(
        f"Argument `combiner` must be one of {_COMBINERS}. Received: {value!r}."
    )


def computed(
    function: object, got: Any, wanted: Any, table: str | None = None
) -> Exception | None:
    """What a function of the user's returned, where it may not; else None.

    Args:
      function: The function.
      got: What it returned.
      wanted: (shape, dtype) of what it should.
      table: Whose function it is, where that is known.
    """
    where = f"{function!r}" if table is None else f"Table {table!r}: {function!r}"
    shape, dtype = getattr(got, "shape", None), getattr(got, "dtype", None)
    wanted_shape, wanted_dtype = tuple(wanted[0]), _dtype_name(wanted[1])
    must = f"it must return a {wanted_dtype} tensor of shape {wanted_shape} there."
    if shape is None or dtype is None:
        return TypeError(f"{where} returned {got!r} of type {type_name(got)}; {must}")
    if getattr(shape, "rank", 0) is None:
        return ValueError(
            f"{where} returned a tensor of unknown rank; {must} Use tf.ensure_shape."
        )
    if tuple(shape) != wanted_shape:
        return ValueError(f"{where} returned a tensor of shape {tuple(shape)}; {must}")
    if _dtype_name(dtype) != wanted_dtype:
        return TypeError(
            f"{where} returned a tensor of {_dtype_name(dtype)}; {must} Use tf.cast."
        )
    return None


def _dtype_name(dtype: Any) -> str:
    """NumPy's name of a dtype of NumPy or TensorFlow."""
    return str(getattr(dtype, "name", dtype))


def dtype(value: object) -> ValueError:
    """A table dtype that no release will know."""
    return ValueError(
        f"Argument `dtype` must be float32 or bfloat16. Received: {value!r}."
    )


def dtype_of_integers(name: str) -> NotImplementedError:
    """A table dtype that is legal elsewhere but not built here."""
    return NotImplementedError(
        f"Tables of dtype {name} are not supported by this release. Argument `dtype` "
        "must be float32 or bfloat16."
    )


def seed_without_rounding(seed: int, dtype: str) -> ValueError:
    """A `rounding_seed` that nothing would use."""
    return ValueError(
        f"Argument `rounding_seed` is {seed}, but a table of dtype {dtype} is not "
        'rounded. Leave it at None, or set `dtype="bfloat16"`.'
    )


def feature_table(value: object) -> ValueError:
    """FeatureConfig with something else than a table."""
    return ValueError(
        f"Argument `table` must be a TableConfig, of this package or of "
        f"tf.tpu.experimental.embedding. Received: {value!r} of type "
        f"{type_name(value)}."
    )


def sequence_with_output_shape(
    feature: str | None, max_sequence_length: int, output_shape: object
) -> ValueError:
    """Two options that both say what the output looks like."""
    called = f" called {feature!r}" if feature else ""
    return ValueError(
        f"A feature{called} cannot have both `max_sequence_length` and `output_shape`. "
        f"Received: {max_sequence_length} and {output_shape}. Leave one of them at "
        "its default."
    )


# The feature configuration as a whole.


def no_features() -> ValueError:
    """An empty feature configuration."""
    return ValueError(
        "`feature_config` holds no FeatureConfig. Pass one, or a dict, list or tuple "
        "of them."
    )


def not_a_feature_config(path: str, value: object) -> ValueError:
    """A leaf of the feature configuration of the wrong kind."""
    return ValueError(
        f"Feature {path}: each leaf of `feature_config` must be a FeatureConfig, of "
        "this package or of tf.tpu.experimental.embedding. Received: "
        f"{value!r} of type {type_name(value)}."
    )


def located(path: str, error: Exception) -> Exception:
    """The same error, with the feature in whose configuration it arose."""
    return type(error)(f"Feature {path}: {error}")


def too_many_rows(name: str, rows: int, most: int) -> ValueError:
    """A table whose rows int32 cannot number."""
    return ValueError(
        f"Table {name!r} has vocabulary_size={rows}, but rows are numbered by int32 as "
        f"on TPUs: at most {most}. Spread the ids over several tables."
    )


def duplicate_table_name(name: str, first: str, second: str) -> ValueError:
    """Two tables, one name."""
    return ValueError(
        f"Two different tables are called {name!r}: the one of feature {first} and "
        f"the one of feature {second}. Table names must be unique. Give them different "
        "names, or pass the same TableConfig object to share one table."
    )


def rate_shape(
    rate: object, shape: object, argument: str = "learning_rate"
) -> ValueError:
    """A learning rate callable, or another one, that returns no scalar."""
    return ValueError(
        f"A callable `{argument}` must return a scalar. {rate!r} returned shape "
        f"{shape}."
    )


def reserved_table_name(name: str) -> ValueError:
    """A table name that stands for something else in checkpoints."""
    return ValueError(
        f"A table cannot be called {name!r}: checkpoints use this name for a slot or "
        "for the count of updates. Give the table another name."
    )


def unsupported_optimizer(
    where: str, optimizer: object, supported: Iterable[str]
) -> ValueError:
    """An optimizer of a class that embeddings do not have."""
    return ValueError(
        f"Unsupported optimizer for {where}: {optimizer!r} of type "
        f"{type_name(optimizer)}. Supported are {', '.join(supported)}, and those "
        "of tf.tpu.experimental.embedding with the same names."
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


def too_many_arguments(extra: object) -> TypeError:
    """More positional arguments than either order of the constructor takes."""
    return TypeError(
        "TPUEmbedding takes (feature_config, optimizer, "
        "pipeline_execution_with_tensor_core), or with an int as second argument "
        "(feature_config, batch_size, optimizer, pipeline_execution_with_tensor_core, "
        f"initialize_tpu_embedding). Also received: {extra!r}."
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
