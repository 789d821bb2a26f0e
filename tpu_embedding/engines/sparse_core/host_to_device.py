"""The way between a host and a TPU: the queue of TPUEmbedding, features and stacks.

Prepared batches wait on the hosts. Each replica has a queue on its host. A program
takes a batch out of it in a part that runs on the host, and copies it to the TPU. All
replicas of a software TPU act together, so that a step that fails in one replica leaves
all queues equally long.

The samples of a replica are divided among its SparseCores: each SparseCore has a block
of the samples of every feature, one feature after another. A stack lists its samples
SparseCore by SparseCore.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import tensorflow as tf

from tpu_embedding.distribution import TPUTopology, outside_of_replicas
from tpu_embedding.engines.base import check_device
from tpu_embedding.engines.batch_ring import BatchRing, pack, unpack
from tpu_embedding.engines.calls import Call, Prepared, StepQueue
from tpu_embedding.layout.csr import (
    BufferSizes,
    CombinedCsrFormatTensor,
    PartitionedCsrFormatTensor,
    PartitionedStack,
    Partitioning,
    PreprocessedFeatures,
)
from tpu_embedding.layout.plan import Plan
from tpu_embedding.layout.stacking import Layout
from tpu_embedding.lookup.graph_checks import Check, require, text
from tpu_embedding.lookup.input_rows import finite_gradient

if TYPE_CHECKING:
    from tpu_embedding.engines.sparse_core.engine import SparseCoreEngine

_NUM_CUTS = 63  # Places at which 64 buckets of rows can be cut apart.


class StackedSamples:
    """Converts activations and gradients between features and stacks."""

    def __init__(self, plan: Plan, layout: Layout, sparse_cores: int) -> None:
        """Takes a plan with stacks; the SparseCores of a device divide all samples."""
        self._layout = layout
        self._cores = sparse_cores
        self._dims = plan.dims
        self._shapes: list[Any] = list(layout.output_shapes)

    def split(self, stacks: Mapping[str, tf.Tensor]) -> list[tf.Tensor]:
        """Returns the features' activations, [output shape..., dim], from stacks."""
        by_core = [
            tf.reshape(stacks[stack.name], [self._cores, -1, stack.width])
            for stack in self._layout.stacks
        ]
        activations = []
        for feature, stack in enumerate(self._layout.feature_stacks):
            begin = self._layout.sample_offsets[feature] // self._cores
            end = begin + self._layout.samples[feature] // self._cores
            dim = self._dims[feature]
            own = by_core[stack][:, begin:end, :dim]
            activations.append(tf.reshape(own, [*self._shapes[feature], dim]))
        return activations

    def join(self, gradients: Sequence[tf.Tensor | None]) -> dict[str, tf.Tensor]:
        """Joins gradients of features by stack, [samples, width]; None means zeros."""
        joined = {}
        for stack in self._layout.stacks:
            parts = [self._part(gradients[f], f, stack.width) for f in stack.features]
            joined[stack.name] = tf.reshape(
                tf.concat(parts, 1), [stack.samples, stack.width]
            )
        return joined

    def _part(self, gradient: tf.Tensor | None, feature: int, width: int) -> tf.Tensor:
        shape = [self._cores, self._layout.samples[feature] // self._cores]
        if gradient is None:
            return tf.zeros([*shape, width])
        dim = self._dims[feature]
        return tf.pad(
            tf.reshape(gradient, [*shape, dim]), [[0, 0], [0, 0], [0, width - dim]]
        )


def batch_specs(partitioning: Partitioning) -> PreprocessedFeatures:
    """Returns specs of the tensors that `copy_to_device` needs, for full buffers."""
    size = tf.TensorSpec([], tf.int32)

    def entries(stack: PartitionedStack, dtype: tf.DType = tf.int32) -> tf.TensorSpec:
        ids = stack.samples * partitioning.max_ids_per_chip_per_sample
        return tf.TensorSpec([ids], dtype)

    return PreprocessedFeatures(
        tables={
            stack.name: PartitionedCsrFormatTensor(
                row_pointers=tf.TensorSpec([partitioning.num_row_pointers], tf.int32),
                sorted_sample_ids=entries(stack),
                sorted_token_ids=entries(stack),
                sorted_gains=entries(stack, tf.float32),
                sample_count=size,
                num_minibatches_per_physical_sparse_core=size,
            )
            for stack in partitioning.stacks
        },
        output_shapes=(),
        dropped_ids={},
        sizes={stack.name: BufferSizes(size, size) for stack in partitioning.stacks},
        sorted_pos_ids={t.name: entries(t) for t in partitioning.stacks if t.positions},
        marks=tf.TensorSpec([len(partitioning.fingerprint)], tf.int64),
    )


def check_gradients(
    plan: Plan, gradients: Sequence[tf.Tensor | None]
) -> list[tf.Tensor | None]:
    """Returns the same gradients, after checking that they are finite."""
    checks = [
        finite_gradient(spec.path, gradient)
        for spec, gradient in zip(plan.features, gradients, strict=True)
        if gradient is not None
    ]
    with tf.control_dependencies(require(checks)):
        return [None if g is None else tf.identity(g) for g in gradients]


def cuts_to_sum(cuts: tf.Tensor) -> tf.Tensor:
    """Spreads minibatch cuts, the bits of int64 [stacks], over int32 [stacks, cuts].

    TPUs can only sum over replicas, so each bit becomes a number of its own.
    """
    bits = tf.range(_NUM_CUTS, dtype=tf.int64)
    words = tf.broadcast_to(cuts[:, tf.newaxis], [cuts.shape[0], _NUM_CUTS])
    flags = tf.bitwise.bitwise_and(tf.bitwise.right_shift(words, bits), 1)
    return tf.cast(flags, tf.int32)


def cuts_of_sum(total: tf.Tensor) -> tf.Tensor:
    """Returns the cuts of all replicas, from the sum of what `cuts_to_sum` returned."""
    bits = tf.cast(total > 0, tf.int64)
    places = tf.range(_NUM_CUTS, dtype=tf.int64)
    return tf.reduce_sum(tf.bitwise.left_shift(bits, places), 1)


def copy_to_device(
    batch: PreprocessedFeatures, partitioning: Partitioning, whole: bool
) -> dict[str, Any]:
    """Copies the used part of each buffer into the memory of the TPU.

    With `whole` it copies whole buffers. TensorFlow moves the op that copies a part
    from the host to the TPU only if it stands before everything that the TPU computes;
    elsewhere it would stay on the host, which has no kernel for it.

    Returns:
      A PartitionedCsrFormatTensor by stack name; for a CustomCombiner a
      CombinedCsrFormatTensor, without the fields that its lookup adds.
    """
    with tf.control_dependencies(require([_was_made_for(batch, partitioning)])):
        tables = tf.nest.map_structure(tf.identity, batch.tables)
    return {
        name: table
        if whole
        else _copy_table(table, batch.sizes[name], batch.sorted_pos_ids.get(name))
        for name, table in tables.items()
    }


def _was_made_for(batch: PreprocessedFeatures, partitioning: Partitioning) -> Check:
    own = partitioning.fingerprint
    marks = tf.ensure_shape(tf.cast(batch.marks, tf.int64), [len(own)])

    def message() -> tf.Tensor:
        hardware = text(
            "The preprocessed batch was made for ",
            marks[0],
            " devices of ",
            marks[1],
            f" SparseCores each, but this embedding has {own[0]} devices of {own[1]}. "
            "Preprocess it with this embedding.",
        )
        tables = text(
            "The preprocessed batch was made by an embedding with other tables, "
            "features or limits. Preprocess it with this embedding."
        )
        return tf.where(tf.reduce_any(marks[:2] != own[:2]), hardware, tables)

    return Check(tf.reduce_all(marks == own), message)


def _copy_table(
    table: PartitionedCsrFormatTensor, sizes: BufferSizes, positions: Any
) -> PartitionedCsrFormatTensor | CombinedCsrFormatTensor:
    buffers = [*table[:4], *([] if positions is None else [positions])]
    entries = len(buffers) - 1
    copied = tf.raw_ops.TPUCopyWithDynamicShape(
        tensors=buffers, unpadded_sizes=[sizes.row_pointers, *[sizes.ids] * entries]
    )
    annotated = tf.raw_ops.TPUAnnotateTensorsWithDynamicShape(tensors=copied)
    for tensor, buffer in zip(annotated, buffers, strict=True):
        tensor.set_shape(buffer.shape)
    pointers, sample_ids, token_ids, gains = annotated[:4]
    found = table._replace(
        row_pointers=pointers,
        sorted_sample_ids=sample_ids,
        sorted_token_ids=token_ids,
        sorted_gains=gains,
    )
    if positions is None:
        return found
    return CombinedCsrFormatTensor(*found, annotated[4], None, None, None)


def check_sizes(tables: Mapping[str, Any], partitioning: Partitioning) -> None:
    """Refuses preserved outputs with buffers made for other hardware or limits."""
    for stack in partitioning.stacks:
        batch = tables[stack.name]
        expected = {
            "row_pointers": partitioning.num_row_pointers,
            "sorted_token_ids": stack.samples
            * partitioning.max_ids_per_chip_per_sample,
        }
        found: dict[str, Any] = {f: getattr(batch, f).shape for f in expected}
        wrong = [f for f in expected if not found[f].is_compatible_with([expected[f]])]
        count = tf.get_static_value(batch.sample_count)
        if count is not None and count != stack.samples:
            wrong.append("sample_count")
            expected["sample_count"], found["sample_count"] = stack.samples, count
        if wrong:
            raise ValueError(
                f"Preserved outputs of stacked table {stack.name!r}: `{wrong[0]}` has "
                f"size {found[wrong[0]]}, but this embedding has {expected[wrong[0]]}. "
                "Pass the second output of its own embedding_lookup."
            )


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
