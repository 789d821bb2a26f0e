"""The queue of TPUEmbedding on SparseCores: prepared batches wait on the hosts.

Each replica has a queue on its host. A program takes a batch out of it in a part that
runs on the host, and copies it to the TPU. All replicas of a software TPU act
together, so that a step that fails in one replica leaves all queues equally long.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol

import tensorflow as tf

from tpu_embedding.distribution import Topology, outside_of_replicas
from tpu_embedding.engines import errors
from tpu_embedding.engines.base import QUEUE_CAPACITY, Prepared, StepQueue
from tpu_embedding.engines.batch_queue import BatchQueue, CallsOfRun, pack, unpack
from tpu_embedding.layout.csr import PreprocessedFeatures
from tpu_embedding.layout.output_shapes import Shape


class QueuedEngine(Protocol):
    """What the queue needs of the SparseCore engine, beside `Engine`."""

    lookup: Any
    flush: Any

    def flush_after_lookup(
        self, looked_up: Prepared, activations: list[tf.Tensor], training: tf.Tensor
    ) -> list[tf.Tensor]:
        """Applies the pending update of this replica.

        Returns:
          The activations; those of an evaluation batch as of after the update.
        """
        ...

    def apply(
        self,
        looked_up: Prepared,
        gradients: Sequence[tf.Tensor | None],
        after: Sequence[tf.Tensor],
        *,
        flushed: bool,
    ) -> list[Any]:
        """`Engine.update` after other tensors; returns control inputs.

        Args:
          looked_up: As there.
          gradients: As there.
          after: The other tensors.
          flushed: Whether it is known that no update is pending.
        """
        ...


class HostQueues(StepQueue):
    """The queues of all replicas."""

    def __init__(
        self, engine: QueuedEngine, topology: Topology, specs: PreprocessedFeatures
    ) -> None:
        """Creates the queues.

        Args:
          engine: The engine, which looks batches up.
          topology: Replicas and devices.
          specs: The tf.TensorSpecs of a batch; what it lacks is not queued.
        """
        assert topology.tpu is not None
        self._engine, self._topology, self._specs = engine, topology, specs
        self._devices = [cores[0] for cores in topology.tpu.devices]
        self._hosts = [
            topology.tpu.host_of_program(r) for r in range(topology.num_replicas)
        ]
        self._queues: list[BatchQueue] = outside_of_replicas(self._create)
        self._calls = CallsOfRun(topology)
        # The last lookup, with the graph in which its tensors can be used.
        self._last: tuple[Any, Prepared] | None = None

    def enqueue(
        self,
        batches: Sequence[Prepared],
        replica: int | None,
        *,
        training: bool,
        name: str | None = None,
    ) -> None:
        """See `StepQueue.enqueue`."""
        del name
        assert self._topology.tpu is not None
        if replica is not None and not self._topology.tpu.simulated:
            raise NotImplementedError(
                "TPUEmbedding.enqueue was called inside of strategy.run, on "
                "SparseCores under a TPUStrategy. TensorFlow's compiler does not "
                "accept a TPU program that both enqueues and dequeues. Call enqueue "
                "outside of strategy.run, with the batches of all replicas."
            )
        if replica is None:
            self._put(range(len(batches)), self._queues, batches, training)
        else:
            self._topology.on_host(self._put_own, batches[0], replica, training)
        if not training:
            self._engine.flush()

    def enqueue_on(
        self,
        device: str | tf.Tensor,
        batch: Prepared,
        *,
        training: bool,
        name: str | None = None,
    ) -> None:
        """See `StepQueue.enqueue_on`."""
        del name
        checked = errors.check_device(self._topology, device)

        def put(replica: int) -> tf.Tensor:
            self._put([replica], [self._queues[replica]], [batch], training)
            return tf.constant(True)

        if isinstance(device, str):
            put(self._devices.index(device))
        else:
            tpu = self._topology.tpu
            assert tpu is not None
            ordinals = tf.constant([tpu.ordinal(d) for d in self._devices], tf.int64)
            with tf.control_dependencies(checked):
                found = tf.where(ordinals == tf.cast(device, tf.int64))[0, 0]
            replicas = range(self._topology.num_replicas)
            branches = [lambda replica=replica: put(replica) for replica in replicas]
            tf.switch_case(tf.cast(found, tf.int32), branches)
        if not training:
            self._engine.flush()

    def dequeue(
        self,
        replica: int,
        *,
        shapes: Sequence[Shape] | None = None,
        name: str | None = None,
    ) -> list[tf.Tensor]:
        """See `StepQueue.dequeue`: all batches have the same shapes."""
        del shapes, name
        several = self._topology.num_replicas > 1
        begins = several and not self._calls.made("dequeue", "apply_gradients")
        self._calls.note("dequeue")
        tensors, training = self._topology.on_host(self._take, replica, begins)
        activations, looked_up = self._look_up(tensors, replica)
        self._last = tf.compat.v1.get_default_graph(), looked_up
        return self._engine.flush_after_lookup(looked_up, activations, training)

    def apply_gradients(
        self,
        gradients: Sequence[tf.Tensor | None],
        replica: int,
        *,
        name: str | None = None,
    ) -> None:
        """See `StepQueue.apply_gradients`."""
        del name
        self._calls.note("apply_gradients")
        last, self._last = self._last, None
        if last is not None and last[0] is tf.compat.v1.get_default_graph():
            looked_up, owed = last[1], self._topology.on_host(self._owed, replica)[0]
        else:
            # Another program has dequeued the batch: it is copied to the TPU again.
            owed, tensors = self._topology.on_host(self._owed, replica)
            _, looked_up = self._look_up(tensors, replica)
        done = self._engine.apply(looked_up, gradients, after=[owed], flushed=True)
        self._topology.on_host(self._settle, replica, done)

    def reset(self) -> None:
        """Discards all batches; inside strategy.run those of the calling replica."""
        replica = self._topology.replica()
        if replica is not None:
            self._topology.on_host(lambda: self._own(replica).reset())
            return
        for host, queue in zip(self._hosts, self._queues, strict=True):
            with tf.device(host):
                queue.reset()

    def _create(self) -> list[BatchQueue]:
        queues = []
        for host in self._hosts:
            with tf.device(host):
                queues.append(BatchQueue(1, QUEUE_CAPACITY))
        return queues

    def _own(self, replica: int) -> BatchQueue:
        """The queue of the calling replica; call it on the host."""
        of_replica = self._topology.of_replica
        handles = zip(*(queue.handles for queue in self._queues), strict=True)
        return self._queues[replica].with_handles([of_replica(h) for h in handles])

    def _put_own(self, batch: Prepared, replica: int, training: bool) -> None:
        self._put([replica], [self._own(replica)], [batch], training)

    def _put(
        self,
        replicas: Sequence[int],
        queues: Sequence[BatchQueue],
        batches: Sequence[Prepared],
        training: bool,
    ) -> None:
        """Queues a batch in each of some queues, or none at all."""
        inside = self._topology.replica() is not None
        places = [None if inside else self._hosts[r] for r in replicas]
        packed, room = [], []
        for place, queue, batch in zip(places, queues, batches, strict=True):
            assert batch.tensors is not None
            kept = batch.tensors._replace(output_shapes=(), dropped_ids={})
            with tf.device(place):
                packed.append(pack(tf.nest.flatten(kept)))
                room += queue.check_room()
        done = []
        with tf.control_dependencies([*self._topology.barrier(packed), *room]):
            for place, queue, batch in zip(places, queues, packed, strict=True):
                with tf.device(place):
                    done.append(
                        queue.enqueue(
                            [batch], 0, training=training, begins=False, outside=False
                        )
                    )
        self._topology.barrier(done)

    def _take(self, replica: int, begins: bool) -> tuple[list[tf.Tensor], tf.Tensor]:
        """The tensors of the next batch, and whether it is for training."""
        with tf.control_dependencies(self._topology.barrier([])):
            batch, training, _ = self._own(replica).dequeue(
                0,
                partial=tf.constant(False),
                begins=begins,
                check=lambda batch: [],
            )
        with tf.control_dependencies(self._topology.barrier([batch, training])):
            return self._unpack(batch), tf.identity(training)

    def _owed(self, replica: int) -> tuple[tf.Tensor, list[tf.Tensor]]:
        """A control input, and the tensors of the batch that owes gradients."""
        batch = self._own(replica).owed(0)
        with tf.control_dependencies([batch]):
            return tf.constant(True), self._unpack(batch)

    def _settle(self, replica: int, done: Sequence[Any]) -> None:
        with tf.control_dependencies(done):
            self._own(replica).settle(0)

    def _unpack(self, batch: tf.Tensor) -> list[tf.Tensor]:
        return unpack(batch, tf.nest.flatten(self._specs))

    def _look_up(
        self, tensors: Sequence[tf.Tensor], replica: int
    ) -> tuple[list[tf.Tensor], Prepared]:
        batch = Prepared(tensors=tf.nest.pack_sequence_as(self._specs, tensors))
        return self._engine.lookup(batch, replica, training=True)
