"""Puts the batches of cores into their queues, by TensorFlow's ops, in order."""

from __future__ import annotations

import dataclasses
import itertools
import weakref
from collections.abc import Sequence
from typing import Any

import tensorflow as tf

from tpu_embedding.distribution import Topology, TPUSystem
from tpu_embedding.lookup.entries import Selection
from tpu_embedding.lookup.graph_checks import Check, require, text


class CoreQueues:
    """The queues of all cores of a strategy.

    A core is told by the name of its device, or by its number among the devices of the
    one host, a tensor, which TensorFlow's dynamic form of the op takes.
    """

    def __init__(self, topology: Topology, combiners: Sequence[str]) -> None:
        """Takes the combiners of the tables, in their order."""
        assert topology.tpu is not None
        self._topology = topology
        self._tpu: TPUSystem = topology.tpu
        self._combiners = list(combiners)
        # By graph and device the last op that enqueued there.
        self._last: weakref.WeakKeyDictionary[tf.Graph, dict[str, Any]]
        self._last = weakref.WeakKeyDictionary()

    def check(self, device: str | tf.Tensor) -> list[Any]:
        """Refuses a core that the user named and cannot have.

        Returns:
          The control inputs for what must not happen then.
        """
        if self._topology.program() is not None:
            raise ValueError(
                "Argument `device` of enqueue is for calls outside of strategy.run: "
                f"inside, each replica enqueues for its own core. Received: {device}. "
                "Leave it at None."
            )
        if isinstance(device, str):
            return []
        if not device.dtype.is_integer or device.shape.rank != 0:
            raise ValueError(
                "Argument `device` of enqueue must be the name of a TPU device, or an "
                f"integer scalar tensor, its number. Received: {device}."
            )
        if len(self._tpu.hosts) > 1:
            raise ValueError(
                "Argument `device` of enqueue is a number, which tells a device of one "
                f"host, but this TPU has {len(self._tpu.hosts)}. Give the name of the "
                "device."
            )
        number = tf.cast(device, tf.int64)
        known = [self._tpu.ordinal(name) for name in self._names()]

        def unknown() -> tf.Tensor:
            devices = ", ".join(map(str, known))
            return text(
                "Argument `device` of enqueue is ",
                number,
                f", but the TPU devices of the strategy are {devices}.",
            )

        ok = tf.reduce_any(number == tf.constant(known, tf.int64))
        return require([Check(ok, unknown)])

    def put(self, batch: CoreBatch, device: str | tf.Tensor, mode: tf.Tensor) -> Any:
        """Enqueues one batch; returns the op, eagerly None."""
        names, host, ordinal = self._place(device)
        # TensorFlow sees no order among these ops, but batches leave as they came.
        last = self._last.setdefault(tf.compat.v1.get_default_graph(), {})
        earlier = [last[name] for name in names if last.get(name) is not None]
        enqueue = (
            tf.raw_ops.DynamicEnqueueTPUEmbeddingArbitraryTensorBatch
            if tf.is_tensor(ordinal)
            else tf.raw_ops.EnqueueTPUEmbeddingArbitraryTensorBatch
        )
        with tf.device(host), tf.control_dependencies(earlier):
            made = enqueue(
                sample_indices_or_row_splits=batch.splits,
                embedding_indices=batch.ids,
                aggregation_weights=batch.weights,
                mode_override=mode,
                device_ordinal=ordinal,
                combiners=self._combiners,
            )
        last.update(dict.fromkeys(names, made))
        return made

    def _place(
        self, device: str | tf.Tensor
    ) -> tuple[list[str], str | None, int | tf.Tensor]:
        """The devices that it may be, their host, and the ordinal."""
        if not isinstance(device, str):
            return self._names(), self._tpu.hosts[0], tf.cast(device, tf.int32)
        if self._topology.program() is not None:
            # A program runs on one core, which its compiler knows.
            return [device], None, -1
        return [device], self._tpu.host_of(device), self._tpu.ordinal(device)

    def _names(self) -> list[str]:
        return list(itertools.chain.from_iterable(self._tpu.devices))


@dataclasses.dataclass(frozen=True)
class CoreBatch:
    """The batch of one core, an item for each feature.

    Attributes:
      splits: int32 [samples + 1], or [0] where each sample has one id.
      ids: int64 [n].
      weights: float32 [n], or [0] where all are 1.
    """

    splits: list[tf.Tensor]
    ids: list[tf.Tensor]
    weights: list[tf.Tensor]


def core_batches(selections: Sequence[Selection], cores: int) -> list[CoreBatch]:
    """Deals the batch of a replica out to its cores, along the first axis.

    Args:
      selections: What each feature looks up; their number of samples is divisible.
      cores: Of the replica.
    """
    parts = [_parts(selection, cores) for selection in selections]
    return [
        CoreBatch(*(list(column) for column in zip(*features, strict=True)))
        for features in zip(*parts, strict=True)
    ]


def _parts(
    selection: Selection, cores: int
) -> list[tuple[tf.Tensor, tf.Tensor, tf.Tensor]]:
    """(splits, ids, weights) of each core."""
    if selection.one_each and selection.weights is None:
        nothing = tf.zeros([0], tf.int32), tf.zeros([0], tf.float32)
        return [
            (nothing[0], ids, nothing[1])
            for ids in tf.split(tf.reshape(selection.rows, [-1]), cores)
        ]
    count = selection.num_samples
    # After the checks: a sparse input may claim any number of samples.
    with tf.control_dependencies([selection.samples]):
        ends = tf.range(count + 1)
    splits = tf.searchsorted(selection.samples, ends, side="left", out_type=tf.int32)
    if cores == 1:
        return [(splits, selection.rows, _weights(selection, 0, None))]
    parts = []
    for core in range(cores):
        begin, end = count * core // cores, count * (core + 1) // cores
        own = splits[begin : end + 1]
        first, last = own[0], own[-1]
        parts.append(
            (own - first, selection.rows[first:last], _weights(selection, first, last))
        )
    return parts


def _weights(selection: Selection, first: tf.Tensor | int, last: tf.Tensor | None):
    if selection.weights is None:
        return tf.zeros([0], tf.float32)
    return selection.weights[first:last]
