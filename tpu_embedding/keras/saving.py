"""The layer's tables and slots in weight files."""

from __future__ import annotations

import urllib.parse
from collections.abc import Mapping
from typing import Any

import tensorflow as tf

from tpu_embedding.keras import errors
from tpu_embedding.layout.plan import UPDATES


def save_state(variables: Mapping[str, Any], store: Any) -> None:
    """Writes tables and slots under their names, as far as a file allows them.

    A "/" would make groups in HDF5, so names are quoted as in URLs. HDF5 has no
    bfloat16: such a table is written as float32, which holds the same values.
    """
    for name, variable in variables.items():
        value = tf.convert_to_tensor(variable)
        rounded = value.dtype == tf.bfloat16
        store[_key(name)] = tf.cast(value, tf.float32) if rounded else value


def load_state(layer: str, variables: Mapping[str, Any], store: Any) -> None:
    """Reads what `save_state` wrote, once all of it is known to fit.

    A table of bfloat16 takes the nearest values of one that was float32.

    Raises:
      ValueError: If a table or slot is not there, or has another shape.
    """
    stored = set(store.keys())
    saved = {name: _key(name) for name in variables if _key(name) in stored}
    missing = [name for name in variables if name not in {*saved, UPDATES}]
    if missing:
        raise errors.saved_state_missing(layer, missing)
    values = {name: store[key] for name, key in saved.items()}
    for name, value in values.items():
        own, other = tuple(variables[name].shape), tuple(value.shape)
        if own != other:
            raise errors.saved_state_shape(layer, name, own, other)
    for name, value in values.items():
        variables[name].assign(tf.cast(value[()], variables[name].dtype))


def _key(name: str) -> str:
    return urllib.parse.quote(name, safe="")
