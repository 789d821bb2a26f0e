"""What a TPU's compiler does with the names of enqueue, dequeue and apply_gradients.

A batch that is enqueued inside a program under a name is a training batch if the
program sends gradients under that name, whatever enqueue was told.
"""

from __future__ import annotations

import contextlib
from typing import Any

import tensorflow as tf

from tpu_embedding.tpu_generations import NAME_ATTRIBUTE

_SEND = "SendTPUEmbeddingGradients"
_ENQUEUE = "EnqueueTPUEmbedding"


def settle_modes(program: Any) -> None:
    """Sets the mode of each enqueue op that has a name.

    Args:
      program: The graph of one replica's program, traced to its end.
    """
    operations = program.get_operations()
    trained = {_name(op) for op in operations if op.type == _SEND}
    for op in operations:
        name = _name(op)
        if _ENQUEUE in op.type and name is not None:
            _set_mode(op, "train" if name in trained else "inference")


def _name(op: tf.Operation) -> bytes | None:
    with contextlib.suppress(ValueError):  # No such attribute.
        return op.get_attr(NAME_ATTRIBUTE)
    return None


def _set_mode(op: Any, mode: str) -> None:
    index = next(i for i, tensor in enumerate(op.inputs) if tensor.dtype == tf.string)
    op._update_input(index, tf.constant(mode))
