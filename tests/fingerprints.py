"""Initializers that two programs share, and what each has of its own."""

from __future__ import annotations

import dataclasses
import functools
import pathlib
from collections.abc import Callable
from typing import Any

import numpy as np
import tensorflow as tf

import tpu_embedding as te


def closure(value: Any, *, unit: Any = 1.0) -> Callable[..., Any]:
    def make(shape: Any, dtype: Any = tf.float32) -> Any:
        return tf.fill(shape, tf.cast(value, dtype) * unit)

    return make


def default(value: Any) -> Callable[..., Any]:
    def make(shape: Any, dtype: Any = tf.float32, *, filling: Any = value) -> Any:
        return tf.fill(shape, tf.cast(filling, dtype))

    return make


class Filling:
    def __init__(self, value: Any) -> None:
        self.value = value
        self.handle = object()
        self.names = {"a", "b", "c", "d"}

    def __call__(self, shape: Any, dtype: Any = tf.float32) -> Any:
        return tf.fill(shape, tf.cast(self.value, dtype))


@dataclasses.dataclass
class Fields:
    value: Any
    own: Any = dataclasses.field(default_factory=object)

    def __call__(self, shape: Any, dtype: Any = tf.float32) -> Any:
        return tf.fill(shape, tf.cast(self.value, dtype))


class ByRows(Filling):
    def by_rows(self, shape: Any, dtype: Any = tf.float32) -> Any:
        return lambda start, stop: tf.fill([stop - start, shape[1]], self.value)


def itself() -> Callable[..., Any]:
    def make(shape: Any, dtype: Any = tf.float32) -> Any:
        return make(shape, dtype) if shape is None else tf.zeros(shape, dtype)

    return make


def array(value: float) -> np.ndarray:
    """It differs where its repr has dots."""
    found = np.zeros([3000, 1], np.float32)
    found[1500] = value
    return found


def differing(value: float) -> dict[str, Any]:
    """Initializers whose numbers are those of `value`."""
    return {
        "closure": closure(value),
        "closure of a closure": closure(1.0, unit=closure(value)),
        "default": default(value),
        "lambda": (lambda shape, dtype: 2 * tf.ones(shape, dtype))
        if value
        else (lambda shape, dtype: 2 * tf.zeros(shape, dtype)),
        "partial": functools.partial(closure(1.0), unit=value),
        "partial of a closure": functools.partial(closure(value)),
        "object": Filling(value),
        "object with an array": Filling(array(value)),
        "array": closure(array(value)),
        "tensor": closure(tf.constant(array(value))),
        "dataclass": Fields(array(value), None),
        "tf.function": tf.function(closure(value)),
        "rows": te.RowIdInitializer(int(value)),
        "keras": tf.keras.initializers.Constant(value),
        "keras in a closure": closure(tf.keras.initializers.Constant(value)),
        "array of TensorFlow": tf.constant_initializer(array(value)),
        "list": closure(array(value)[:, 0].tolist()),
        "array of Keras": tf.keras.initializers.Constant(array(value)),
    }


def alike(process: int) -> dict[str, Any]:
    """Initializers of one program in a process that has objects of its own."""
    return {
        **{f"{n} again": value for n, value in differing(1.0).items()},
        "object()": closure(object()),
        "variable": closure(tf.Variable(float(process))),
        "path": closure(f"rows/{process}.npy"),
        "file": closure(pathlib.Path(f"rows/{process}")),
        "set": closure({"a", "b", "c", "d", "e", "f"}),
        "constant set": lambda shape, dtype: tf.cast(
            tf.fill(shape, "a" in {"a", "b", "c", "d"}), dtype
        ),
        "keys": closure(dict.fromkeys({"a", "b", "c", "d", "e"}, 0)),
        "method": Filling(process).__call__,
        "dataclass with an object": Fields(1.0),
        "rows of its own": ByRows(float(process)),
        "itself": itself(),
        "layer": closure(tf.keras.layers.Dense(1)),
        "random": tf.keras.initializers.RandomNormal(),
        "random of TensorFlow": tf.random_normal_initializer(),
        "op": tf.random.normal,
        "tf.function of an op": tf.function(tf.zeros),
        "name": "uniform",
        "nothing": None,
        "numpy": closure(np.random.default_rng(process)),
    }
