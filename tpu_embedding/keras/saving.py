"""The layer's tables and slots in weight files."""

from __future__ import annotations

import urllib.parse
from collections.abc import Mapping
from typing import Any

import tensorflow as tf

from tpu_embedding.keras import errors
from tpu_embedding.layout.tables import UPDATES


def save_state(variables: Mapping[str, Any], store: Any) -> None:
    """Writes tables and slots under their names, as far as a file allows them.

    A "/" would make groups in HDF5, so names are quoted as in URLs.
    """
    for name, variable in variables.items():
        store[_key(name)] = tf.convert_to_tensor(variable)


def load_state(layer: str, variables: Mapping[str, Any], store: Any) -> None:
    """Reads what `save_state` wrote, once all of it is known to fit.

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
        variables[name].assign(value[()])


def _key(name: str) -> str:
    return urllib.parse.quote(name, safe="")
