"""Chooses the reader for a checkpoint.

A new kind of checkpoint is a module with a reader, and a row in `_FORMATS`.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Collection

import tensorflow as tf

from tpu_embedding.checkpoint.checkpoint_view import LogicalCheckpoint
from tpu_embedding.checkpoint.keras_format import is_keras, read_keras
from tpu_embedding.checkpoint.numpy_format import is_numpy, read_numpy
from tpu_embedding.checkpoint.tensorflow_format import (
    read_first_layouts,
    read_tensorflow,
)
from tpu_embedding.layout.partition import TableLayout

_INDEX = ".index"
_Reader = Callable[[str, str | None, Collection[str]], LogicalCheckpoint]
# (whether a path is of this kind, its reader); any other path is TensorFlow's.
_FORMATS: tuple[tuple[Callable[[str], bool], _Reader], ...] = (
    (is_numpy, read_numpy),
    (is_keras, read_keras),
)


def read(
    path: str | os.PathLike[str],
    *,
    root: str | None = None,
    tables: Collection[str] = (),
) -> LogicalCheckpoint:
    """Returns the tables of a checkpoint of any kind.

    It reads names and shapes at once, and values on request.

    Args:
      path: The prefix of a TensorFlow checkpoint, or its folder for the latest one;
        weights that Keras saved, `.weights.h5` or `.keras`, of this package's layer or
        of a keras-rs DistributedEmbedding; a `.npy` or `.npz` file, or a folder of
        `.npy` files.
      root: The object that holds the tables, e.g. "embedding" or "model/embedding".
        None finds the object, if there is only one.
      tables: Names known to be tables, which help to find the object.

    Returns:
      The tables by name.

    Raises:
      tf.errors.NotFoundError: If there is no checkpoint at `path`.
      tf.errors.DataLossError: If its index is damaged.
      ValueError: If it holds no tables, or several objects with tables.
    """
    place = os.fspath(path)
    for matches, reader in _FORMATS:
        if matches(place):
            return reader(place, root, tables)
    return read_tensorflow(_prefix(place), root, tables)


def read_layouts(path: str | os.PathLike[str]) -> list[TableLayout]:
    """Returns the layouts of the first object of a checkpoint that has a record.

    Args:
      path: The prefix of a TensorFlow checkpoint, or its folder for the latest one.

    Returns:
      The place of each table.

    Raises:
      tf.errors.NotFoundError: If there is no checkpoint at `path`.
      ValueError: If no object has a record of layouts.
    """
    place = os.fspath(path)
    if not any(matches(place) for matches, _ in _FORMATS):
        layouts = read_first_layouts(_prefix(place))
        if layouts is not None:
            return layouts
    raise ValueError(
        f"{place} has no SparseCore layout record: its tables are stored whole. A "
        "TPUEmbeddingV2 on SparseCores writes one with tf.train.Checkpoint."
    )


def _prefix(path: str) -> str:
    if tf.io.gfile.isdir(path):
        return tf.train.latest_checkpoint(path) or path
    if path.endswith(_INDEX) and tf.io.gfile.exists(path):
        return path.removesuffix(_INDEX)
    return path
