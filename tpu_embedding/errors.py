"""Errors that several modules raise; other errors are worded where they are raised.

Each function returns the exception: `raise errors.argument_type(...)`.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, TypeGuard


def type_name(value: object) -> str:
    """Returns the qualified name of the class, without a module if it is built-in."""
    cls = type(value)
    module = "" if cls.__module__ == "builtins" else f"{cls.__module__}."
    return f"{module}{cls.__qualname__}"


def quoted(names: Iterable[object]) -> str:
    """Returns the names in quotes, with commas between them."""
    return ", ".join(repr(name) for name in names)


def argument_value(argument: str, value: object, allowed: str) -> ValueError:
    """Makes the error for an argument of the right type, but with a wrong value."""
    return ValueError(f"Argument `{argument}` must be {allowed}. Received: {value!r}.")


def argument_type(argument: str, value: object, allowed: str) -> TypeError:
    """Makes the error for an argument of the wrong type."""
    return TypeError(
        f"Argument `{argument}` must be {allowed}. Received: {value!r} of type "
        f"{type_name(value)}."
    )


def argument_int(argument: str, value: object, smallest: int) -> ValueError:
    """Makes an error like TensorFlow's for a size that is not an int >= `smallest`."""
    return ValueError(
        f"Argument `{argument}` must be an int >= {smallest}. Received: {value!r} "
        f"of type {type_name(value)}. Convert other kinds of integers with int(...)."
    )


def check_flag(argument: str, value: object) -> None:
    """Raises TypeError unless `value` is a bool."""
    if not isinstance(value, bool):
        raise argument_type(argument, value, "a bool")


def is_int(value: object) -> TypeGuard[int]:
    """Returns whether a value is an int: no bool and, as in TensorFlow, not NumPy's."""
    return isinstance(value, int) and not isinstance(value, bool)


def check_int(argument: str, value: Any, least: int, most: int | None = None) -> None:
    """Raises ValueError unless `value` is an int from `least` on, up to `most`."""
    if not is_int(value):
        raise argument_int(argument, value, smallest=least)
    if value < least or (most is not None and value > most):
        allowed = f">= {least}" if most is None else f"from {least} to {most}"
        raise argument_value(argument, value, f"an int {allowed}")


def check_path(path: str) -> None:
    """Refuses a path that is not UTF-8 or has a NUL, where TensorFlow would cut it."""
    if "\0" in path:
        raise ValueError(f"A path cannot hold a NUL character. Received: {path!r}.")
    try:
        path.encode()
    except UnicodeEncodeError as error:
        raise ValueError(f"A path must be UTF-8. Received: {path!r}.") from error


def check_returned(
    function: object, value: Any, wanted: Any, table: str | None = None
) -> None:
    """Raises unless a user's function returned the `wanted` shape and dtype."""
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
    """Returns NumPy's name of a dtype of NumPy or TensorFlow."""
    return str(getattr(dtype, "name", dtype))


def feature_kind(path: str, value: object) -> ValueError:
    """Makes the error for a feature that is not a tensor."""
    return ValueError(
        f"Feature {path} must be a tf.Tensor, tf.SparseTensor or tf.RaggedTensor. "
        f"Received: {value!r} of type {type_name(value)}."
    )


def string_ids(path: str) -> TypeError:
    """Makes the error for strings instead of ids."""
    return TypeError(
        f"The ids of feature {path} must be int32, int64 or floating point. Received: "
        "string. Convert them with keras.layers.StringLookup or keras.layers.Hashing, "
        "in the model or in tf.data, or set TableConfig(string_ids=True), which a "
        "Hashing and a GrowingVocabulary support."
    )


def weights_kind(path: str, expected: str, value: object) -> ValueError:
    """Makes the error for weights of another kind than their feature."""
    return ValueError(
        f"The weights of feature {path} must be None or, like the feature itself, a "
        f"{expected}. Received: {value!r} of type {type_name(value)}. Read a "
        "tf.Variable with tf.convert_to_tensor, and pass weights in the same kind of "
        "tensor as the ids."
    )


def weights_dtype(path: str, dtype_name: str) -> TypeError:
    """Makes the error for weights that are not floating point numbers."""
    return TypeError(
        f"The weights of feature {path} must be of a floating point dtype. Received: "
        f"{dtype_name}. Convert them with tf.cast."
    )


def input_rank(path: str, kind: str, rank: object, allowed: str) -> ValueError:
    """Makes the error for an input whose rank its kind does not allow."""
    return ValueError(
        f"Feature {path}: the rank of a {kind} input must be {allowed}. Received: "
        f"rank {rank}."
    )


def batch_size_conflict(first: int | None, second: int) -> ValueError:
    """Makes the error for a batch size that differs from an earlier one."""
    return ValueError(
        f"A batch size of {first} per replica was given before, so build() cannot set "
        f"{second}. Pass only one of them, or equal sizes."
    )


def weights_shape(path: str, expected: object, actual: object) -> ValueError:
    """Makes the error for weights whose shape differs from that of their ids."""
    return ValueError(
        f"The weights of feature {path} must have the shape of its ids, {expected}. "
        f"Received: {actual}."
    )


def in_control_flow() -> RuntimeError:
    """Makes the error for an enqueue inside control flow of a TPU program."""
    return RuntimeError(
        "A batch was passed to enqueue, or to a layer, inside control flow or a "
        "tf.function inside strategy.run, where a TPU program cannot receive it. Call "
        "enqueue or the layer at the top level of the function passed to strategy.run, "
        "or outside of strategy.run."
    )
