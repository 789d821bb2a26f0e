"""The queue of TPUEmbedding on SparseCores: prepared batches wait on the hosts.

Each replica has a queue on its host. A program takes a batch out of it in a part that
runs on the host, and copies it to the TPU. All replicas of a software TPU act
together, so that a step that fails in one replica leaves all queues equally long.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import tensorflow as tf

from tpu_embedding.distribution import TPUTopology, outside_of_replicas
from tpu_embedding.engines.base import check_device
from tpu_embedding.engines.batch_ring import BatchRing, pack, unpack
from tpu_embedding.engines.calls import Call, Prepared, StepQueue
from tpu_embedding.layout.csr import PreprocessedFeatures

if TYPE_CHECKING:
    from tpu_embedding.engines.sparse_core.engine import SparseCoreEngine


class SparseCoreQueue(StepQueue):
    """The queues of all replicas."""

    def __init__(
        self,
        engine: SparseCoreEngine,
        topology: TPUTopology,
        specs: PreprocessedFeatures,
    ) -> None:
        """Makes queues for those tensors of a batch that `specs` describes."""
        self._engine, self._topology, self._specs = engine, topology, specs
        self._devices = [cores[0] for cores in topology.tpu.devices]
        self._hosts = [
            topology.tpu.host_of_program(r) for r in range(topology.num_replicas)
        ]
        # A program, and the handles of the replica's queue in it.
        self._of_program: tuple[Any, list[tf.Tensor]] | None = None
        # The last lookup, with the graph in which its tensors can be used.
        self._last: tuple[Any, Prepared] | None = None

    def enqueue(self, batches: Sequence[Prepared], call: Call) -> None:
        tensors = [_queued(batch) for batch in batches]
        replica, training = call.replica, call.training
        if call.device is not None:
            done = self._put_on(call.device, *tensors, training=training)
        elif replica is None:
            done = self._put(range(len(batches)), self._queues, tensors, training)
        else:
            done = self._on_host(
                replica,
                lambda queue, *own: self._put([replica], [queue], [own], training),
                *tensors[0],
            )
        if not training:  # An evaluation follows the pending update.
            with tf.control_dependencies([done]):
                self._engine.flush()

    def _put_on(
        self, device: str | tf.Tensor, batch: Sequence[tf.Tensor], *, training: bool
    ) -> tf.Tensor:
        """Queues a batch for a device, given by name or by ordinal; see `_put`."""
        checked = check_device(self._topology, device)

        def put(replica: int) -> tf.Tensor:
            queue = self._queues[replica]
            return self._put([replica], [queue], [batch], training)

        if isinstance(device, str):
            return put(self._devices.index(device))
        ordinal = self._topology.tpu.ordinal
        ordinals = tf.constant(list(map(ordinal, self._devices)), tf.int64)
        with tf.control_dependencies(checked):
            found = tf.where(ordinals == tf.cast(device, tf.int64))[0, 0]
        replicas = range(self._topology.num_replicas)
        branches = [lambda replica=replica: put(replica) for replica in replicas]
        return tf.switch_case(tf.cast(found, tf.int32), branches)

    def dequeue(self, call: Call) -> list[tf.Tensor]:
        """See `StepQueue.dequeue`: all batches have the same shapes."""
        tensors, training = self._on_host(_index(call), self._take)
        activations, looked_up = self._look_up(tensors, call)
        self._last = tf.compat.v1.get_default_graph(), looked_up
        return self._engine.flush_after_lookup(looked_up, activations, training)

    def apply_gradients(
        self, gradients: Sequence[tf.Tensor | None], call: Call
    ) -> None:
        replica = _index(call)
        last, self._last = self._last, None
        if last is not None and last[0] is tf.compat.v1.get_default_graph():
            looked_up, owed = last[1], self._on_host(replica, self._owed)[0]
        else:
            # Another program has dequeued the batch: it is copied to the TPU again.
            owed, tensors = self._on_host(replica, self._owed)
            _, looked_up = self._look_up(tensors, call)
        done = self._engine.apply(looked_up, gradients, after=[owed], flushed=True)
        with tf.control_dependencies(done):
            self._on_host(replica, lambda queue: queue.settle())

    def reset(self) -> None:
        """Discards all batches; inside strategy.run those of the calling replica."""
        replica = self._topology.replica()
        if replica is not None:
            self._on_host(replica, BatchRing.reset)
            return
        for host, queue in zip(self._hosts, self._queues, strict=True):
            with tf.device(host):
                queue.reset()

    @functools.cached_property
    def _queues(self) -> list[BatchRing]:
        """The queue of each replica, made when a batch is first queued."""

        def create() -> list[BatchRing]:
            queues = []
            for host in self._hosts:
                with tf.device(host):
                    queues.append(BatchRing())
            return queues

        return outside_of_replicas(create)

    def _on_host(
        self, replica: int, function: Callable[..., Any], *tensors: tf.Tensor
    ) -> Any:
        """Calls function(queue of the calling replica, *tensors) on the host."""

        def part(*tensors: tf.Tensor) -> Any:
            def body(handles: list[tf.Tensor], tensors: list[tf.Tensor]) -> Any:
                queue = self._queues[replica].with_handles(handles)
                found = function(queue, *tensors)
                return tf.constant(True) if found is None else found

            return self._topology.tpu.call_on_host(body, self._handles(), list(tensors))

        return self._topology.on_host(part, *tensors)

    def _handles(self) -> list[tf.Tensor]:
        """Returns the handles of the replica's queue, the same ones in a whole program.

        TensorFlow orders ops that use the same tensor.
        """
        program = self._topology.program()
        if self._of_program is None or self._of_program[0] is not program:
            of_replica = self._topology.of_replica
            handles = zip(*(queue.handles for queue in self._queues), strict=True)
            self._of_program = program, [of_replica(h) for h in handles]
        return self._of_program[1]

    def _put(
        self,
        replicas: Sequence[int],
        queues: Sequence[BatchRing],
        batches: Sequence[Sequence[tf.Tensor]],
        training: bool,
    ) -> tf.Tensor:
        """Queues a batch in each queue, or none at all; returns a control input."""
        inside = self._topology.replica() is not None
        places = [None if inside else self._hosts[r] for r in replicas]
        packed, room = [], []
        for place, queue, batch in zip(places, queues, batches, strict=True):
            with tf.device(place):
                packed.append(pack(batch))
                room += queue.check_room()
        done = []
        with tf.control_dependencies(self._topology.barrier([*packed, *room])):
            for place, queue, batch in zip(places, queues, packed, strict=True):
                with tf.device(place):
                    done += queue.put(batch, training=training)
        with tf.control_dependencies(self._topology.barrier(done)):
            return tf.constant(True)

    def _take(self, queue: BatchRing) -> tuple[list[tf.Tensor], tf.Tensor]:
        """Takes the next batch; returns its tensors, and whether it is for training."""
        # No replica of a software TPU takes its batch unless all can. The hosts of a
        # real TPU decide alone: there this only repeats a check of `take`.
        with tf.control_dependencies(self._topology.barrier(queue.check_batch())):
            training, batch = queue.take()
        with tf.control_dependencies(self._topology.barrier([batch, training])):
            return self._unpack(batch), tf.identity(training)

    def _owed(self, queue: BatchRing) -> tuple[tf.Tensor, list[tf.Tensor]]:
        """Returns a control input, and the tensors of the batch that owes gradients."""
        batch = queue.owed()
        with tf.control_dependencies([batch]):
            return tf.constant(True), self._unpack(batch)

    def _unpack(self, batch: tf.Tensor) -> list[tf.Tensor]:
        return unpack(batch, tf.nest.flatten(self._specs))

    def _look_up(
        self, tensors: Sequence[tf.Tensor], call: Call
    ) -> tuple[list[tf.Tensor], Prepared]:
        batch = Prepared(tensors=tf.nest.pack_sequence_as(self._specs, tensors))
        return self._engine.lookup(batch, call)


def _index(call: Call) -> int:
    assert call.replica is not None
    return call.replica


def _queued(batch: Prepared) -> list[tf.Tensor]:
    """Returns the tensors of a batch that wait in a queue."""
    assert batch.tensors is not None
    return tf.nest.flatten(batch.tensors._replace(output_shapes=(), dropped_ids={}))
