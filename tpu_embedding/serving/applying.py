"""Applies deltas to served models: in this process, or to the folder of an export."""

from __future__ import annotations

import os
from collections.abc import Sequence
from typing import Any

import tensorflow as tf

from tpu_embedding.checkpoint.errors import data_loss
from tpu_embedding.checkpoint.writing import one_writer
from tpu_embedding.serving.delta_files import delta_blocks
from tpu_embedding.serving.following import APPLY

_UNFINISHED = ".unfinished"


def apply_delta(model: Any, path: str | os.PathLike[str]) -> int:
    """Applies a delta to a loaded model, which may answer calls meanwhile.

    A lookup sees each row as it was before the delta or after it. The delta must be
    the one that follows the delta applied last; the model checks that, and every block
    of it, before it serves any new row.

    Args:
      model: What tf.saved_model.load returned for an export with `deltas`.
      path: The delta.

    Returns:
      The number of the delta, which is now the one applied last.

    Raises:
      ValueError: If the model does not take deltas.
      tf.errors.DataLossError: If the file is not a delta or is truncated.
      tf.errors.InvalidArgumentError: If the delta was applied before, or one before it
        is missing, or it follows another export or another run of the trainer, or it
        is damaged. The model then serves what it served before.
    """
    apply = getattr(model, "signatures", {}).get(APPLY)
    if apply is None:
        raise ValueError(
            "The model does not take deltas. Export it with te.serving.export(..., "
            "deltas=True), and pass what tf.saved_model.load returns."
        )
    state: dict[str, tf.Tensor] = {}
    for block in delta_blocks(path):
        state = apply(block=tf.constant(block))
    if not state or state["next_block"]:
        raise data_loss(
            f"Delta {os.fspath(path)} is truncated: the last block is missing."
        )
    return int(state["sequence"])


def apply_to_export(
    path: str, deltas: Sequence[str | os.PathLike[str]], destination: str
) -> int:
    """Writes an export to which deltas were applied, and which takes those after them.

    Args:
      path: An export with `deltas`; it stays as it is.
      deltas: Deltas in their order.
      destination: A folder that does not exist yet.

    Returns:
      The number of the delta applied last.

    Raises:
      ValueError: If `destination` exists, or the model does not take deltas.
      tf.errors.OpError: As `apply_delta` does.
    """
    with one_writer(destination):
        if tf.io.gfile.exists(destination):
            raise ValueError(
                f"{destination} already exists. Pass a new path for the new export."
            )
        unfinished = destination + _UNFINISHED
        if tf.io.gfile.exists(unfinished):  # A killed process may have left one.
            tf.io.gfile.rmtree(unfinished)
        model: Any = tf.saved_model.load(path)
        sequence = 0
        for delta in deltas:
            sequence = apply_delta(model, delta)
        tf.saved_model.save(model, unfinished, signatures=dict(model.signatures))
        tf.io.gfile.rename(unfinished, destination)
    return sequence
