"""Variables on the hosts that stand in for tables in the memory of TPUs.

A TPU is loaded from them, and they are brought up to date before anything reads them.
Host h has the rows [h * V / H, (h + 1) * V / H), the first hosts one more where H hosts
do not divide V: a table and its slots are one tensor, in slices, in a checkpoint.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from typing import Any

import tensorflow as tf
from tensorflow.python.training.saving import saveable_object_util

from tpu_embedding.distribution import TPUSystem
from tpu_embedding.engines.initial_values import (
    ShardInfo,
    initial_value,
    initializer_of,
    takes_shard_info,
)
from tpu_embedding.engines.variables import VariableRows, create_state
from tpu_embedding.layout.plan import TableSpec
from tpu_embedding.layout.table_arrays import (
    PARAMETERS,
    JoinedRows,
    MutableRows,
    checkpoint_name,
)

_KEY = "VARIABLE_VALUE"  # As in the checkpoint of a variable.


class StandIn(tf.__internal__.tracking.Trackable):
    """A table or slot: one variable on each host that has rows of it."""

    def __init__(
        self,
        shards: Sequence[tf.Variable],
        initial_value: float | None,
        on_restore: Callable[[], None],
    ) -> None:
        """Takes the variables.

        Args:
          shards: In order of the hosts.
          initial_value: Of a slot.
          on_restore: Called after a checkpoint was restored into the variables.
        """
        self.shards = list(shards)
        self._initial_value = initial_value
        self._on_restore = on_restore

    def rows(self) -> MutableRows:
        """All rows; who writes them has to load the TPU afterwards."""
        parts = [VariableRows(shard, self._initial_value) for shard in self.shards]
        return JoinedRows(parts, self._initial_value)

    def _gather_saveables_for_checkpoint(self) -> dict[str, Any]:
        # The one way to save a tensor in slices, as TensorFlow's own class does.
        def savers(name: str) -> list[Any]:
            shards = zip(self._slices(), self.shards, strict=True)
            return [_Saver(shard, s, name, self._on_restore) for s, shard in shards]

        return {_KEY: savers}

    def _copy_trackable_to_cpu(self, object_map: Any) -> None:
        raise RuntimeError(
            "Tables of TPU v2 to v4 cannot be saved asynchronously. Leave "
            "`experimental_enable_async_checkpoint` of tf.train.CheckpointOptions at "
            "False."
        )

    def _trackable_children(self, save_type: str = "checkpoint", **kwargs: Any) -> Any:
        # A SavedModel would hold a function that saves, which cannot have the slices.
        if save_type == "savedmodel":
            raise NotImplementedError(
                "tf.saved_model.save cannot save a TPUEmbedding on TPU v2 to v4: its "
                "tables are in the TPU's memory. Save a checkpoint; for serving "
                "restore it into an embedding made outside of the TPU strategy, and "
                "call tpu_embedding.serving.export. Or leave the embedding out of what "
                "the module tracks."
            )
        return super()._trackable_children(save_type, **kwargs)

    def _slices(self) -> list[str]:
        """Where each shard is in the whole, as checkpoints write it; "" for all."""
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
        """Assigns what a checkpoint has."""
        restored = super().restore(restored_tensors, restored_shapes)
        self._on_restore()
        return restored


class StandInTable:
    """One table and its slots, and how to load and retrieve them.

    Attributes:
      arrays: By "parameters" and slots, in the order of the ops.
    """

    def __init__(
        self, spec: TableSpec, tpu: TPUSystem, on_restore: Callable[[], None]
    ) -> None:
        """Makes the variables, with their initial values."""
        assert spec.optimizer is not None
        assert spec.optimizer.tpu is not None
        self._name = spec.name
        self._hosts = tpu.hosts
        operation = f"TPUEmbedding{spec.optimizer.tpu.ops}Parameters"
        self._load = getattr(tf.raw_ops, f"Load{operation}")
        self._retrieve = getattr(tf.raw_ops, f"Retrieve{operation}")
        heights = _heights(spec.config.vocabulary_size, len(tpu.hosts))
        arrays: dict[str, tuple[list[tf.Tensor], float | None]] = {
            PARAMETERS: (_parameters(spec, heights), None)
        }
        for slot in spec.optimizer.slots:
            width = 1 if slot.per_row else spec.config.dim
            values = [tf.fill((h, width), float(slot.initial_value)) for h in heights]
            arrays[slot.name] = (values, slot.initial_value)
        self.arrays: dict[str, StandIn] = {}
        for name, (values, initial) in arrays.items():
            full_name = checkpoint_name(spec.name, name)
            shards = []
            for host, value in zip(tpu.hosts, values, strict=False):
                with tf.device(host):
                    shards.append(create_state(full_name, value))
            self.arrays[name] = StandIn(shards, initial, on_restore)

    def load(self, config: bytes) -> None:
        """Sends the values of the variables to the TPU.

        Args:
          config: The configuration, or nothing where the TPU has seen it.
        """
        for shard, host in enumerate(self._hosts):
            with tf.device(host):
                self._load(
                    **{n: self._shard(a, shard) for n, a in self.arrays.items()},
                    **self._place(shard),
                    config=config if shard == 0 else b"",
                )

    def retrieve(self, config: bytes) -> None:
        """Brings the variables up to date; `config` as for `load`."""
        for shard, host in enumerate(self._hosts):
            with tf.device(host):
                values = self._retrieve(
                    **self._place(shard), config=config if shard == 0 else b""
                )
            arrays = list(self.arrays.values())
            values = [values] if len(arrays) == 1 else list(values)
            for array, value in zip(arrays, values, strict=True):
                if shard < len(array.shards):  # Else the host has padding only.
                    array.shards[shard].assign(value)

    def _place(self, shard: int) -> dict[str, Any]:
        return {
            "table_name": self._name,
            "num_shards": len(self._hosts),
            "shard_id": shard,
        }

    @staticmethod
    def _shard(array: StandIn, shard: int) -> tf.Tensor:
        if shard < len(array.shards):
            return array.shards[shard].read_value()
        return tf.zeros_like(array.shards[0])  # Padding, of one row.


def _heights(rows: int, num_hosts: int) -> list[int]:
    """The rows of each host that has any."""
    least, more = divmod(rows, num_hosts)
    heights = [least + (host < more) for host in range(num_hosts)]
    return [height for height in heights if height]


def _parameters(spec: TableSpec, heights: Sequence[int]) -> list[tf.Tensor]:
    """The initial values of each shard: parts of the whole table.

    An initializer that takes `shard_info` is called for each shard, as by TensorFlow.
    """
    initializer = initializer_of(spec)
    rows, dim = spec.config.vocabulary_size, spec.config.dim

    def part(height: int, **arguments: Any) -> tf.Tensor:
        shape = (height, dim)
        return initial_value(
            spec.name, shape, lambda: initializer(shape, dtype=tf.float32, **arguments)
        )

    if not takes_shard_info(initializer):
        return tf.split(part(rows), heights)
    starts = itertools.accumulate(heights, initial=0)
    return [
        part(height, shard_info=ShardInfo((height, dim), (start, 0)))
        for start, height in zip(starts, heights, strict=False)
    ]
