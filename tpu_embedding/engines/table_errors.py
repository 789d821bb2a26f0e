"""The wording of errors in what tables are made from and updated with."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping

import tensorflow as tf

from tpu_embedding.errors import type_name

_GIB = 2.0**30


def rate_type(
    rate: object, value: object, argument: str = "learning_rate"
) -> TypeError:
    """A learning rate callable that returns something else than a number."""
    return TypeError(
        f"A callable `{argument}` must return a number or a scalar tensor. {rate!r} "
        f"returned {value!r} of type {type_name(value)}. Does it lack a return?"
    )


def initializer_arguments(name: str, initializer: object, reason: str) -> TypeError:
    """An initializer that cannot be called as tables call it."""
    return TypeError(
        f"The initializer of {name} is called as initializer(shape, dtype=tf.float32), "
        f"which {initializer!r} does not take: {reason}. Write it as `def "
        "initializer(shape, dtype)`."
    )


def not_enough_memory(
    sizes: Mapping[str, int], available: int
) -> tf.errors.ResourceExhaustedError:
    """Tables that this machine cannot hold.

    Args:
      sizes: Bytes of each table and slot, by name.
      available: Bytes that are free.
    """
    largest = sorted(sizes, key=sizes.__getitem__, reverse=True)[:4]
    parts = ", ".join(f"{name} {sizes[name] / _GIB:.1f} GiB" for name in largest)
    more = f" and {len(sizes) - 4} more" if len(sizes) > 4 else ""
    return tf.errors.ResourceExhaustedError(
        None,
        None,
        f"The tables and slots take {sum(sizes.values()) / _GIB:.1f} GiB ({parts}"
        f"{more}), but {available / _GIB:.1f} GiB of memory are free. Nothing was "
        "made. Use a smaller `vocabulary_size` or `dim`, an optimizer with fewer or "
        "smaller slots (SGD, RowwiseAdagrad), or a machine with more memory.",
    )


def table_dtype(table: str, dtype: str, what: str) -> NotImplementedError:
    """A table that is stored as something else than float32."""
    return NotImplementedError(
        f"Table {table}: {what} stores tables as float32, not as {dtype}. Set "
        '`dtype="float32"` here; TPUEmbedding, TPUEmbeddingV2 and keras.TPUEmbedding '
        f"have tables of {dtype} when they are built outside of a TPU strategy."
    )


@contextlib.contextmanager
def function_of(table: str, what: str) -> Iterator[None]:
    """Notes on what a function of the user's raises inside whose function it is."""
    try:
        yield
    except Exception as error:
        error.add_note(f"That is from the function of the {what} of table {table!r}.")
        raise


def captured(name: str, what: str, captures: object) -> ValueError:
    """A function of the user's that brings a variable or tensor along."""
    way_out = {"CustomOptimizer": "Pass numbers that change as `hyperparameters`, or m"}
    return ValueError(
        f"Table {name!r}: the function of its {what} uses tensors or variables from "
        f"outside, {captures!r}, which SparseCores cannot. {way_out.get(what, 'M')}ake "
        "the tensors inside of the function."
    )


def partitioned(table: str) -> NotImplementedError:
    """A ParameterServerStrategy that would read a table whole for each lookup."""
    return NotImplementedError(
        f"Table {table} would be cut by the strategy's `variable_partitioner`, and "
        "then be read whole for each lookup. Create ParameterServerStrategy without "
        "one, or with one that leaves this table whole."
    )
