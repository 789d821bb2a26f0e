"""Errors about checkpoints that several modules raise."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence

import tensorflow as tf


def data_loss(message: str) -> tf.errors.DataLossError:
    """Makes the error of a file that is missing, cut or damaged."""
    return tf.errors.DataLossError(None, None, message)


def corrupted(path: str, reason: str) -> tf.errors.DataLossError:
    """Makes the error of a file that differs from what its writer wrote."""
    return data_loss(
        f"The checkpoint file {path} is damaged: {reason}. Use another "
        "checkpoint, e.g. one that tf.train.CheckpointManager kept."
    )


@contextlib.contextmanager
def parsing(path: str) -> Iterator[None]:
    """Converts the errors of a parser into one that names the file.

    NumPy, h5py, zipfile and json raise errors of many types for a damaged file.

    Raises:
      tf.errors.DataLossError: If the body raises anything else.
    """
    try:
        yield
    except tf.errors.DataLossError:
        raise
    except Exception as error:
        reason = str(error) or type(error).__name__
        raise corrupted(path, f"it cannot be parsed ({reason})") from error


def not_found(path: str) -> tf.errors.NotFoundError:
    """Makes the error of a path without a checkpoint."""
    return tf.errors.NotFoundError(
        None,
        None,
        f"There is no checkpoint at {path}. Give the prefix of a TensorFlow "
        "checkpoint (without `.index`), its folder, a `.keras` or `.weights.h5` file, "
        "a `.npy` or `.npz` file, or a folder of `.npy` files.",
    )


def exists(path: str) -> tf.errors.AlreadyExistsError:
    """Makes the error of a checkpoint that a save would have to delete first."""
    return tf.errors.AlreadyExistsError(
        None,
        None,
        f"There is already a checkpoint at {path}. An interrupted save would leave "
        "neither the old nor the new one. Save to another path, and delete the old one "
        "afterwards.",
    )


def changed_while_saved(array: str) -> tf.errors.AbortedError:
    """Makes the error of a table that another thread changed during a save."""
    return tf.errors.AbortedError(
        None,
        None,
        f"{array} changed while it was saved, so the checkpoint would mix several "
        "updates. No checkpoint was written, and the tables are as they were. Save "
        "between two steps of the training thread, or stop that thread until the save "
        "is done.",
    )


def not_an_embedding(value: object) -> TypeError:
    """Makes the error of an object without tables that `checkpoint` can use."""
    return TypeError(
        "checkpoint.save, checkpoint.restore and `assign` of imported tables take a "
        "TPUEmbedding or a TPUEmbeddingV2. The first two also take a "
        "te.keras.TPUEmbedding, a te.keras.Embedding or a Keras model with either; "
        "te.keras.convert replaces keras.layers.Embedding by te.keras.Embedding. "
        f"Received: {value!r}. tf.train.Checkpoint saves and restores other objects, "
        "such as TPUEmbeddingForServing."
    )


def deep_copy(what: str) -> TypeError:
    """Makes the error of a deep copy: tables belong to this process and strategy."""
    return TypeError(
        f"A {what} cannot be deep-copied. Create another one with the same "
        "configuration and copy the tables with tpu_embedding.checkpoint.save and "
        "restore, or with tf.train.Checkpoint."
    )


def no_tables(path: str) -> ValueError:
    """Makes the error of a checkpoint without embedding tables."""
    return ValueError(
        f"There are no embedding tables in {path}: no object in it has variables of "
        "rank 2. List its variables with tf.train.list_variables."
    )


def shape_text(shape: Sequence[int]) -> str:
    """Returns the text of a shape for messages, e.g. [11, 3]."""
    return "[" + ", ".join(str(axis) for axis in shape) + "]"
