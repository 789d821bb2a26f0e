"""The arguments, records and lookup of a `te.keras.Embedding` whose ids are hashed."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Mapping
from typing import Any

import tensorflow as tf

from tpu_embedding.checkpoint.checkpoint_view import (
    differs,
    hashing_numbers,
    parse_hashing,
)
from tpu_embedding.checkpoint.tensorflow_format import Bundle
from tpu_embedding.hashing import join_rows, rows_of
from tpu_embedding.inputs import to_id_batch
from tpu_embedding.layout.plan import HASHING
from tpu_embedding.vocabulary import Hashing, RowHash

_FIRST = ("input_dim", "output_dim", "embeddings_initializer")
RECORD = "hashing_record"  # The child of a hashed layer in checkpoints.
_TABLES = ("_embeddings", "embeddings")  # The table there, of Keras 3 and of tf_keras.
_LARGEST_FLOAT = 2**24  # The least whole number whose successor is no float32.


class NoRecord(tf.__internal__.tracking.Trackable):
    """Takes the place of a Hashing's record in a layer that is not hashed."""

    def __init__(self, layer: str) -> None:
        """Takes the name of the layer."""
        self._layer = layer

    def _checkpoint_adapter(self, path: str) -> Any:
        stored = [each for each in _stored_hashings(Bundle(path)) if each is not None]
        raise differs(f"The layer {self._layer!r}", path, None, stored[0])


def check_checkpoint(layer: str, hashing: Hashing, path: str) -> None:
    """Checks a hashed layer before tf.train.Checkpoint restores it.

    If the checkpoint has several layers, one of them must fit. Which one the layer
    restores is known only when its record is read, and the record checks that one.

    Raises:
      ValueError: If the ids of all layers there have other rows.
    """
    stored = _stored_hashings(Bundle(path))
    if stored and hashing not in stored:
        raise differs(f"The layer {layer!r}", path, hashing, stored[0])


def _stored_hashings(bundle: Bundle) -> list[Hashing | None]:
    """Returns the Hashing of each embedding layer of a checkpoint, or None."""
    values = [node.values for node in bundle.objects().values()]
    return [
        parse_hashing(bundle.prefix, bundle.restore(own[RECORD]))
        if RECORD in own
        else None
        for own in values
        if not own.keys().isdisjoint((RECORD, *_TABLES))
    ]


def of_table(
    args: tuple[Any, ...], kwargs: dict[str, Any]
) -> tuple[tuple[Any, ...], dict[str, Any], Hashing | None]:
    """Returns the arguments of Keras's layer for the table, and the Hashing or None.

    In the result of `get_config` the Hashing's options are in place of `input_dim`.
    """
    named = {**dict(zip(_FIRST, args, strict=False)), **kwargs}
    hashing = named.get("input_dim")
    if isinstance(hashing, Mapping):
        hashing = Hashing(**hashing)
    if not isinstance(hashing, Hashing):
        return args, kwargs, None
    named["input_dim"] = hashing.num_rows
    if isinstance(named.get("output_dim"), int):  # Keras refuses anything else.
        named["output_dim"] = width = hashing.width(named["output_dim"])
        stddev = 1 / math.sqrt(max(width, 1) * hashing.hashes)
        options = {"mean": 0.0, "stddev": stddev, "seed": None}
        default = {"class_name": "TruncatedNormal", "config": options}
        named.setdefault("embeddings_initializer", default)
    return args[len(_FIRST) :], named, hashing


def config_of(hashing: Hashing | None, output_dim: int) -> dict[str, Any]:
    """Returns what `get_config` adds for a Hashing."""
    if hashing is None:
        return {}
    dim = value_dim(hashing, output_dim)
    return {"input_dim": dataclasses.asdict(hashing), "output_dim": dim}


def save_hashing(hashing: Hashing | None, store: Any) -> None:
    """Writes a Hashing beside the weights of a layer."""
    if hashing is not None:
        store[HASHING] = hashing_numbers(hashing)


def checked_store(name: str, hashing: Hashing | None, store: Any) -> Any:
    """Returns the weights of a file as Keras's layer reads them.

    Raises:
      ValueError: If ids have other rows in the file.
    """
    keys = {*store.keys()}  # A store cannot say whether it has a key.
    stored = None
    if HASHING in keys:
        stored = parse_hashing("the file", store[HASHING][()])
    if not keys:
        return store  # Keras says that there are no weights.
    if stored == hashing:
        return {key: store[key] for key in keys - {HASHING}} if hashing else store
    raise differs(f"The layer {name!r}", "the file", hashing, stored)


def value_dim(hashing: Hashing | None, columns: int) -> int:
    """Returns the width of the value of an id, in a table of so many columns."""
    if hashing is None or hashing.combine == "sum":
        return columns
    return columns * hashing.hashes


def look_up_rows(
    look_up: Callable[[Any], Any],
    name: str,
    ids: Any,
    hashing: Hashing | None,
    combine: Callable[[tf.Tensor], tf.Tensor] = lambda rows: rows,
) -> Any:
    """Looks up ids, whose rows of each hash are combined before they are joined.

    Args:
      look_up: A function that reads rows by their numbers.
      name: The name of the layer, for messages.
      ids: The ids, a dense, sparse or ragged tensor.
      hashing: The Hashing that gives ids rows; None if an id is the number of its row.
      combine: A function that combines the rows of the ids.
    """
    if hashing is None:
        return combine(look_up(ids))
    if isinstance(ids, tf.SparseTensor):
        ids = tf.sparse.to_dense(ids)  # Keras looks up 0 where there is no id.
    if isinstance(ids, tf.RaggedTensor):
        flat = look_up_rows(look_up, name, ids.flat_values, hashing, combine)
        return ids.with_flat_values(flat)
    whole = _integers(name, ids)
    rows = [rows_of(whole, RowHash(hashing, k)) for k in range(hashing.hashes)]
    parts = tf.unstack(look_up(tf.stack(rows)), hashing.hashes)
    return join_rows([combine(part) for part in parts], hashing)


def _integers(name: str, ids: Any) -> tf.Tensor:
    """Converts ids to int64 or int32; float32 has only some numbers above 2**24."""
    ids = tf.convert_to_tensor(ids)
    if not ids.dtype.is_floating:
        flat = to_id_batch(name, tf.reshape(ids, [-1])).ids
        return tf.reshape(flat, tf.shape(ids))
    text = (
        f"{name}: an id of a floating point dtype must be a whole number of at most "
        f"{_LARGEST_FLOAT:,}: floats above it are rounded. Pass integers: "
        'keras.Input(shape, dtype="int64").'
    )
    fits = (tf.abs(ids) <= _LARGEST_FLOAT) & (ids == tf.floor(ids))
    with tf.control_dependencies([tf.debugging.Assert(tf.reduce_all(fits), [text])]):
        return tf.cast(ids, tf.int64)
