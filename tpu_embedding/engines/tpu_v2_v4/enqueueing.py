"""Puts the batches of cores into their queues, by TensorFlow's ops, in order."""

from __future__ import annotations

import itertools
import weakref
from collections.abc import Sequence
from typing import Any

import tensorflow as tf

from tpu_embedding.distribution import Topology, TPUSystem
from tpu_embedding.engines.tpu_v2_v4 import errors
from tpu_embedding.engines.tpu_v2_v4.batches import CoreBatch
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
            raise errors.device_inside(device)
        if isinstance(device, str):
            return []
        if not device.dtype.is_integer or device.shape.rank != 0:
            raise errors.device_number(device)
        if len(self._tpu.hosts) > 1:
            raise errors.number_of_several_hosts(len(self._tpu.hosts))
        number = tf.cast(device, tf.int64)
        known = [self._tpu.ordinal(name) for name in self._names()]

        def unknown() -> tf.Tensor:
            before, after = errors.unknown_number(known)
            return text(before, number, after)

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
