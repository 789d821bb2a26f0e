"""Whether a TensorFlow checkpoint has the tables of an embedding in its dtypes."""

from __future__ import annotations

from collections.abc import Mapping

import tensorflow as tf
from tensorflow.python.trackable.trackable_utils import escape_local_name

from tpu_embedding.checkpoint import errors


def check_dtypes(path: str, own: Mapping[str, tf.DType]) -> None:
    """Refuses a checkpoint whose tables tf.train.Checkpoint could not restore.

    Args:
      path: The checkpoint's prefix.
      own: By name in the embedding the dtype of each table.

    Raises:
      TypeError: If objects of the checkpoint have all these tables, but none has them
        in these dtypes.
    """
    stored = tf.train.load_checkpoint(path).get_variable_to_dtype_map()
    found = [_stored_in(stored, name) for name in own]
    holders = set(found[0]).intersection(*found[1:])
    others = [
        [
            (name, dtype, dtypes[holder])
            for (name, dtype), dtypes in zip(own.items(), found, strict=True)
            if dtypes[holder] != dtype
        ]
        for holder in sorted(holders)
    ]
    if others and all(others):
        name, dtype, other = others[0][0]
        raise errors.other_dtype(path, name, other.name, dtype.name)


def _stored_in(stored: Mapping[str, tf.DType], table: str) -> dict[str, tf.DType]:
    """By key of the object that holds it the dtype of each table of that name."""
    end = f"/{escape_local_name(table)}/.ATTRIBUTES/VARIABLE_VALUE"
    # With a slash before it, as the object may be the root, which has no key.
    keys = {f"/{key}": dtype for key, dtype in stored.items()}
    return {key[: -len(end)]: d for key, d in keys.items() if key.endswith(end)}
