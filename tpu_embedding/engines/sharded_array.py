"""Matrices in shards that are one tensor in TensorFlow's checkpoints."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from typing import Any

import tensorflow as tf
from tensorflow.python.training.saving import saveable_object_util

_KEY = "VARIABLE_VALUE"  # As in the checkpoint of a variable.


class ShardedArray(tf.__internal__.tracking.Trackable):
    """A table, stack or slot whose variables are one below the other.

    TensorFlow's classes also save slices through saveables: the newer
    `_serialize_to_tensors` can restore only one slice of a tensor.
    """

    def __init__(
        self,
        shards: Sequence[tf.Variable],
        on_restore: Callable[[], None] = lambda: None,
    ) -> None:
        """Stores the arguments.

        Args:
          shards: The variables, in order, of the same width.
          on_restore: Called after a checkpoint was restored into a variable.
        """
        self.shards = list(shards)
        self._on_restore = on_restore

    def _gather_saveables_for_checkpoint(self) -> dict[str, Any]:
        def savers(name: str) -> list[Any]:
            shards = zip(self._slices(), self.shards, strict=True)
            return [_Saver(shard, s, name, self._on_restore) for s, shard in shards]

        return {_KEY: savers}

    def _slices(self) -> list[str]:
        """Returns the slice of each shard in the format of SaveV2; "" for all rows."""
        if len(self.shards) == 1:
            return [""]
        shapes: list[Any] = [tuple(shard.shape) for shard in self.shards]
        heights, width = [height for height, _ in shapes], shapes[0][1]
        starts = itertools.accumulate(heights, initial=0)
        return [
            f"{sum(heights)} {width} {start},{height}:0,{width}"
            for start, height in zip(starts, heights, strict=False)
        ]


class _Saver(saveable_object_util.ResourceVariableSaveable):
    """Saves and restores one shard."""

    def __init__(
        self, shard: Any, where: str, name: str, on_restore: Callable[[], None]
    ) -> None:
        super().__init__(shard, where, name)
        self._on_restore = on_restore

    def restore(self, restored_tensors: Any, restored_shapes: Any) -> Any:
        """Assigns the values of a checkpoint."""
        restored = super().restore(restored_tensors, restored_shapes)
        self._on_restore()
        return restored
