"""Errors that several engines raise."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import tensorflow as tf

from tpu_embedding.distribution import Topology
from tpu_embedding.lookup.graph_checks import Check, require, text


@contextlib.contextmanager
def function_of(table: str, what: str) -> Iterator[None]:
    """Notes on what a user function raises inside whose function it is."""
    try:
        yield
    except Exception as error:
        error.add_note(
            f"The function of the {what} of table {table!r} raised this error."
        )
        raise


def trace(
    table: str, what: str, function: Callable[..., Any], inputs: Sequence[Any]
) -> Any:
    """Traces a user function; its errors say which table it is of."""
    with function_of(table, what):
        return tf.function(function, autograph=False).get_concrete_function(*inputs)


def check_device(topology: Topology, device: str | tf.Tensor) -> list[Any]:
    """Refuses a core that the user named, and returns the checks of its ordinal."""
    assert topology.tpu is not None
    if topology.program() is not None:
        raise ValueError(
            "Argument `device` of enqueue is not supported inside strategy.run, "
            "where each replica enqueues for its own core. "
            f"Received: {device}. Leave it at None."
        )
    if isinstance(device, str):
        return []
    if not device.dtype.is_integer or device.shape.rank != 0:
        raise ValueError(
            "Argument `device` of enqueue must be the name of a TPU device, or its "
            f"ordinal, an integer scalar tensor. Received: {device}."
        )
    if len(topology.tpu.hosts) > 1:
        raise ValueError(
            "Argument `device` of enqueue is an ordinal, which identifies a device "
            f"of one host, but this TPU has {len(topology.tpu.hosts)} hosts. Pass the "
            "name of the device."
        )
    number = tf.cast(device, tf.int64)
    known = [topology.tpu.ordinal(name) for name in topology.tpu.all_devices]

    def unknown() -> tf.Tensor:
        ordinals = ", ".join(map(str, known))
        return text(
            "Argument `device` of enqueue is ",
            number,
            f", but the TPU devices of the strategy are {ordinals}.",
        )

    ok = tf.reduce_any(number == tf.constant(known, tf.int64))
    return require([Check(ok, unknown)])
