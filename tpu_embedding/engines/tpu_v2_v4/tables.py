"""Copies on the hosts of the tables in the memory of TPUs.

The TPU is loaded from the copies, and they are retrieved from it before reads. Host h
of H has the rows [h * V / H, (h + 1) * V / H); the first hosts have one more row if H
does not divide V. In a checkpoint a table, or a slot, is one tensor, saved in slices.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from typing import Any

import tensorflow as tf

from tpu_embedding.distribution import TPUSystem
from tpu_embedding.layout.plan import TableSpec
from tpu_embedding.tables.initial import ShardInfo, slot_values, table_values
from tpu_embedding.tables.rows import PARAMETERS, MutableTableRows, joined
from tpu_embedding.tables.trackable import ShardedArray
from tpu_embedding.tables.variables import VariableRows, create_state, user_slots


class HostArray(ShardedArray):
    """A table or slot in one variable on each host that has rows of it."""

    def __init__(
        self,
        shards: Sequence[tf.Variable],
        initial_value: float | None,
        on_restore: Callable[[], None],
    ) -> None:
        """See `ShardedArray`; `initial_value` is that of a slot, None for a table."""
        super().__init__(shards, on_restore)
        self._initial_value = initial_value

    def rows(self) -> MutableTableRows:
        """Returns all rows; after rows were written, load them into the TPU."""
        parts = [VariableRows(shard, self._initial_value) for shard in self.shards]
        return joined(parts, self._initial_value)

    def _copy_trackable_to_cpu(self, object_map: Any) -> None:
        # A NotImplementedError would make TensorFlow leave out the table.
        raise RuntimeError(
            "Tables of TPU v2 to v4 cannot be saved asynchronously. Leave "
            "`experimental_enable_async_checkpoint` of tf.train.CheckpointOptions at "
            "False."
        )

    def _trackable_children(self, save_type: str = "checkpoint", **kwargs: Any) -> Any:
        # A SavedModel would contain a function that saves, which cannot save slices.
        if save_type == "savedmodel":
            raise NotImplementedError(
                "tf.saved_model.save cannot save a TPUEmbedding on TPU v2 to v4: its "
                "tables are in the TPU's memory. Save a checkpoint; for serving "
                "restore it into an embedding made outside of the TPU strategy, and "
                "call tpu_embedding.serving.export. Or leave the embedding out of what "
                "the module tracks."
            )
        return super()._trackable_children(save_type, **kwargs)


class HostTable:
    """One table and its slots, with the ops that load and retrieve them.

    Attributes:
      arrays: The arrays by "parameters" and slot name, in the order of the ops.
    """

    def __init__(
        self, spec: TableSpec, tpu: TPUSystem, on_restore: Callable[[], None]
    ) -> None:
        """Creates the variables, with their initial values."""
        optimizer = spec.optimizer
        assert optimizer is not None
        assert optimizer.tpu is not None
        self._name = spec.name
        self._hosts = tpu.hosts
        operation = f"TPUEmbedding{optimizer.tpu.ops}Parameters"
        self._load = getattr(tf.raw_ops, f"Load{operation}")
        self._retrieve = getattr(tf.raw_ops, f"Retrieve{operation}")
        heights = _heights(spec.config.vocabulary_size, len(tpu.hosts))
        shards: dict[str, list[tf.Variable]] = {
            name: [] for name in (PARAMETERS, *(slot.name for slot in optimizer.slots))
        }
        for host, value in zip(tpu.hosts, _parameters(spec, heights), strict=False):
            with tf.device(host):
                parameters = create_state(spec.name, value)
                shards[PARAMETERS].append(parameters)
                for name, slot in _create_slots(spec, parameters).items():
                    shards[name].append(slot)
        initial_values = {slot.name: slot.initial_value for slot in optimizer.slots}
        self.arrays: dict[str, HostArray] = {
            name: HostArray(own, initial_values.get(name), on_restore)
            for name, own in shards.items()
        }

    def load(self, config: bytes) -> None:
        """Loads the TPU from the variables; the first table alone has a `config`."""
        for shard, host in enumerate(self._hosts):
            with tf.device(host):
                self._load(
                    **{n: self._shard(a, shard) for n, a in self.arrays.items()},
                    **self._place(shard),
                    config=config if shard == 0 else b"",
                )

    def retrieve(self, config: bytes) -> None:
        """Retrieves the variables from the TPU; `config` as for `load`."""
        for shard, host in enumerate(self._hosts):
            with tf.device(host):
                values = self._retrieve(
                    **self._place(shard), config=config if shard == 0 else b""
                )
            arrays = list(self.arrays.values())
            values = [values] if len(arrays) == 1 else list(values)
            for array, value in zip(arrays, values, strict=True):
                if shard < len(array.shards):  # Other hosts have only padding.
                    array.shards[shard].assign(value)

    def _place(self, shard: int) -> dict[str, Any]:
        return {
            "table_name": self._name,
            "num_shards": len(self._hosts),
            "shard_id": shard,
        }

    @staticmethod
    def _shard(array: HostArray, shard: int) -> tf.Tensor:
        if shard < len(array.shards):
            return array.shards[shard].read_value()
        return tf.zeros_like(array.shards[0])  # One row of padding.


def _create_slots(spec: TableSpec, parameters: tf.Variable) -> dict[str, tf.Variable]:
    """Creates the slots of the part of a table on one host."""
    assert spec.optimizer is not None
    if spec.optimizer.slot_variable_creation_fn is not None:
        return user_slots(spec, parameters)
    rows: Any = parameters.shape[0]
    made = {}
    for slot in spec.optimizer.slots:
        values = slot_values(spec, slot)
        part = values.part((rows, values.shape[1]))
        made[slot.name] = create_state(values.name, part)
    return made


def _heights(rows: int, num_hosts: int) -> list[int]:
    """Returns the number of rows of each host that has rows."""
    least, more = divmod(rows, num_hosts)
    heights = [least + (host < more) for host in range(num_hosts)]
    return [height for height in heights if height]


def _parameters(spec: TableSpec, heights: Sequence[int]) -> list[tf.Tensor]:
    """Returns the initial values of each shard of the whole table.

    As in TensorFlow, an initializer that takes `shard_info` is called for each shard.
    """
    values = table_values(spec)
    if not values.takes_shard_info:
        return tf.split(values.whole(), heights)
    shapes = [(height, spec.config.dim) for height in heights]
    starts = itertools.accumulate(heights, initial=0)
    return [
        values.part(shape, shard_info=ShardInfo(shape, (start, 0)))
        for start, shape in zip(starts, shapes, strict=False)
    ]
