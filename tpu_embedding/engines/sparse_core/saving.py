"""Stacks in TensorFlow's checkpoints, as TensorFlow's own class stores them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import tensorflow as tf
from tensorflow.python.trackable import base
from tensorflow.python.training.saving import saveable_object

_VALUE_KEY: str = vars(base)["VARIABLE_VALUE_KEY"]  # pyright does not see it.


class SavedStack(base.Trackable):
    """One stack, or one slot of it: its parts make up one tensor of a checkpoint."""

    def __init__(self, parts: Sequence[tf.Variable]) -> None:
        """Takes the parts of all devices, in order, of one shape."""
        self._parts = list(parts)

    def _gather_saveables_for_checkpoint(self) -> dict[str, Callable[..., Any]]:
        # The newer `_serialize_to_tensors` restores one slice of a tensor only.
        def make(name: str) -> list[Any]:
            return [
                _SavedPart(part, self._slice(number), name)
                for number, part in enumerate(self._parts)
            ]

        return {_VALUE_KEY: make}

    def _slice(self, number: int) -> str:
        """As SaveV2 wants it: the whole shape, then start and length of each axis."""
        shape: Any = self._parts[number].shape
        rows, columns = shape
        total = rows * len(self._parts)
        return f"{total} {columns} {number * rows},{rows}:0,{columns}"


class _SavedPart(saveable_object.SaveableObject):
    """One part of a tensor of a checkpoint."""

    def __init__(self, part: tf.Variable, where: str, name: str) -> None:
        spec = saveable_object.SaveSpec(
            part.read_value, where, name, dtype=part.dtype, device=part.device
        )
        super().__init__(part.read_value, [spec], name)
        self._part = part

    def restore(self, restored_tensors: Sequence[Any], restored_shapes: Any) -> Any:
        """Assigns what the checkpoint has for this part."""
        del restored_shapes  # They are known.
        with tf.device(self._part.device):
            return self._part.assign(restored_tensors[0])
