"""The engine for CPUs: our own kernels, in place on TensorFlow variables."""

from __future__ import annotations

import functools
import math
from collections.abc import Sequence
from typing import Any

import tensorflow as tf

from tpu_embedding import errors
from tpu_embedding.engines.base import (
    QUEUE_CAPACITY,
    EngineOptions,
    Prepared,
    StepQueue,
)
from tpu_embedding.engines.cpu_base import StackedBatches, WholeTablesEngine
from tpu_embedding.engines.telemetry import Counts, TableCounts
from tpu_embedding.inputs import IdBatch, op_inputs
from tpu_embedding.layout.csr import PreprocessedFeatures
from tpu_embedding.layout.output_shapes import Shape
from tpu_embedding.layout.placement import Placement
from tpu_embedding.layout.plan import TableSpec
from tpu_embedding.layout.stacking import Layout
from tpu_embedding.ops import library, records
from tpu_embedding.tables.variables import TableVariables


class HostBatches:
    """Batches of a plan in the form of the kernels, and as plain tensors: no state."""

    def __init__(
        self,
        options: EngineOptions,
        device: str | None,
        placement: Placement | None = None,
    ) -> None:
        """Writes the plan as the kernels read it.

        Args:
          options: The options of the engine.
          device: Where batches are prepared; None: where each call is.
          placement: See `HostEngine`.
        """
        self.ops = library.load()
        self.plan_record = _plan_record(options, placement)
        self._device = device
        self._plan = options.plan
        self._output_shapes = options.output_shapes
        self._stacks = StackedBatches(options.plan, options.layout)
        self._call_records: dict[Any, bytes] = {}

    def prepare(self, batch: Sequence[IdBatch], *, training: bool) -> tf.Tensor:
        """The batch as the kernels take it: a variant of this device and process."""
        with tf.device(self._device):
            return self.ops.tpu_embedding_prepare(
                **op_inputs(batch),
                plan=self.plan_record,
                call=self._call_record(batch, training),
            )

    def to_tensors(
        self, batch: tf.Tensor, *, raises: bool = True
    ) -> PreprocessedFeatures:
        """See `Engine.to_tensors`.

        Args:
          batch: What `prepare` returned.
          raises: Whether a refused batch raises its error here, or has a `refusal`.
        """
        with tf.device(self._device):
            result = self.ops.tpu_embedding_to_stacks(
                batch=batch,
                num_stacks=len(self._stacks.layout.stacks),
                num_features=len(self._plan.features),
                raises=raises,
            )
            columns = (
                result.row_pointers,
                result.sample_ids,
                result.token_ids,
                result.gains,
            )
            stacks = list(zip(*columns, strict=True))
            packed = self._stacks.pack(stacks, result.output_shapes)
            return packed if raises else packed._replace(refusal=result.refusal)

    def from_tensors(self, features: PreprocessedFeatures) -> tf.Tensor:
        """See `Engine.from_tensors`: errors in values are raised by what takes it."""
        stacks = [features.tables[s.name] for s in self._stacks.layout.stacks]
        with tf.device(self._device):
            shapes = [tf.cast(shape, tf.int64) for shape in features.output_shapes]
            training = not shapes  # Of an update the samples are known.
            if training:
                counts = self._stacks.samples(features.tables)
                shapes = [count[tf.newaxis] for count in counts]
            return self.ops.tpu_embedding_from_stacks(
                row_pointers=[tf.cast(s.row_pointers, tf.int32) for s in stacks],
                token_ids=[tf.cast(s.sorted_token_ids, tf.int32) for s in stacks],
                gains=[tf.cast(s.sorted_gains, tf.float32) for s in stacks],
                shapes=shapes,
                refusals=[features.refusal] if tf.is_tensor(features.refusal) else [],
                plan=self.plan_record,
                training=training,
            )

    def activation_shapes(self, shapes: Sequence[Shape] | None) -> list[tf.TensorShape]:
        """For each feature what is known of its activations; see `Engine.lookup`."""
        known = self._output_shapes.activations(shapes)
        return [
            tf.TensorShape((*shape, dim))
            for shape, dim in zip(known, self._plan.dims, strict=True)
        ]

    def _call_record(self, batch: Sequence[IdBatch], training: bool) -> bytes:
        """What the kernel must know of this call; equal calls share one record."""
        declared = self._output_shapes.all_declared()
        key = (
            training,
            declared,
            tuple(
                (b.kind, b.weights is None, b.weight_structure is None) for b in batch
            ),
        )
        found = self._call_records.get(key)
        if found is None:
            shapes: list[Any] = [d.shape if d else None for d in declared]
            found = self._call_records[key] = records.serialize(
                training=training,
                kinds=[b.kind.value for b in batch],
                has_weights=[b.weights is not None for b in batch],
                has_weight_structure=[b.weight_structure is not None for b in batch],
                declared_shapes=[tf.TensorShape(shape) for shape in shapes],
                declared_sources=[d.source if d else "" for d in declared],
            )
        return found


class HostEngine(WholeTablesEngine):
    """One op per step and direction for all tables (see docs/architecture.md)."""

    name = "host"
    for_custom = "portable"

    def __init__(
        self,
        options: EngineOptions,
        variables: Sequence[TableVariables] | None = None,
        placement: Placement | None = None,
    ) -> None:
        """Makes the step queue, and the tables unless they are given.

        Args:
          options: See `Engine`.
          variables: The tables and slots, if they exist already.
          placement: The placement of the tables in several processes, or None. With it
            the plan describes the part of this process.
        """
        super().__init__(options, variables)
        self.batches = HostBatches(options, self._device, placement)
        self._ops = self.batches.ops
        self._table_handles = [table.parameters.handle for table in self._variables]
        self._slot_handles = [
            slot.handle for table in self._variables for slot in table.slots.values()
        ]
        self._is_trained = all(table.optimizer for table in self._plan.tables)
        updates = self._rates.updates
        self._counters = [] if updates is None else [updates.handle]
        with tf.device(self._device):
            self._handle = self._ops.tpu_embedding_step_queue(
                plan=self.batches.plan_record, num_slots=len(self._slot_handles)
            )
        self._queue = HostQueue(self)

    @property
    def device(self) -> str:
        """The device of the tables."""
        return self._device

    def prepare(
        self,
        batch: Sequence[IdBatch],
        *,
        training: bool,
        device: str | tf.Tensor | None = None,
    ) -> Prepared:
        """See `Engine.prepare`: errors in values are raised by what takes it."""
        if device is not None:
            raise errors.enqueue_device(device)
        return Prepared(self.batches.prepare(batch, training=training))

    def lookup(
        self,
        prepared: Prepared,
        replica: int,
        *,
        training: bool,
        shapes: Sequence[Shape] | None = None,
    ) -> tuple[list[tf.Tensor], Prepared]:
        """See `Engine.lookup`."""
        del training  # Tickets are forgotten by themselves.
        with tf.device(self._device):
            found = self._look_up([prepared.value], replica, shapes)
        return found.activations, prepared._replace(value=found.looked_up)

    def update(
        self,
        looked_up: Prepared,
        gradients: Sequence[tf.Tensor | None],
        replica: int,
    ) -> None:
        """See `Engine.update`."""
        with tf.device(self._device):
            self._apply(self.hand_in(looked_up, gradients, replica))

    def hand_in(
        self,
        looked_up: Prepared,
        gradients: Sequence[tf.Tensor | None],
        replica: int,
        *,
        push: tf.Tensor | None = None,
        check_only: bool = False,
    ) -> tf.Tensor:
        """Hands in the gradients of one lookup without applying due updates.

        Args:
          looked_up: See `update`.
          gradients: See `update`.
          replica: See `update`.
          push: What tells this push from others, to apply it once; see PushLedger.
          check_only: Raise the errors of this call, and change nothing.

        Returns:
          bool scalar, whether updates are due.
        """
        if looked_up.tensors is not None:
            gradients = self._by_sample(gradients)
        with tf.device(self._device):
            return self._hand_in(
                [looked_up.value],
                gradients,
                replica,
                pushes=[] if push is None else [push],
                check_only=check_only,
            )

    def serve_rows(self, request: tf.Tensor, *, training: bool, with_rows: bool) -> Any:
        """On a parameter server: the rows that a worker asks for.

        Args:
          request: What the worker's batch asks this server for.
          training: Whether an update may follow.
          with_rows: Else no rows are sent.

        Returns:
          `batch`, what `hand_in` takes, and `rows`, for the worker.
        """
        with tf.device(self._device):
            return self._ops.tpu_embedding_serve_rows(
                queue=self._handle,
                request=request,
                tables=self._table_handles,
                training=training,
                with_rows=with_rows,
            )

    def apply_due(self, apply_now: tf.Tensor) -> None:
        """Applies the updates that are due, where `apply_now` holds."""
        with tf.device(self._device):
            self._apply(apply_now)

    def to_tensors(self, prepared: Prepared) -> PreprocessedFeatures:
        """See `Engine.to_tensors`."""
        if prepared.tensors is not None:
            return prepared.tensors
        return self.batches.to_tensors(prepared.value)

    def from_tensors(self, features: PreprocessedFeatures) -> Prepared:
        """See `Engine.from_tensors`: errors in values are raised by what takes it."""
        return Prepared(self.batches.from_tensors(features), features)

    def queue(self) -> StepQueue:
        """See `Engine.queue`."""
        return self._queue

    def flush(self) -> None:
        """See `Engine.flush`."""
        if self._pipelined:
            self.apply_all()

    def apply_all(self) -> None:
        """Applies every complete update, pending or due."""
        with tf.device(self._device):
            self._apply(self._ops.tpu_embedding_flush(queue=self._handle))

    def reset(self) -> None:
        """See `Engine.reset`."""
        with tf.device(self._device):
            self._ops.tpu_embedding_reset(queue=self._handle, counters=self._counters)

    def start_counting(self, every: int) -> None:
        """See `Engine.start_counting`."""
        with tf.device(self._device):
            self._ops.tpu_embedding_start_telemetry(queue=self._handle, every=every)

    def counts(self, num_hot_rows: int) -> Counts:
        """See `Engine.counts`."""
        with tf.device(self._device):
            found = self._ops.tpu_embedding_read_telemetry(
                queue=self._handle,
                num_tables=len(self._plan.tables),
                num_hot_rows=num_hot_rows,
            )
        steps, counted_steps, depth, pending = found.steps.numpy().tolist()
        return Counts(
            steps,
            counted_steps,
            depth,
            pending,
            tables={
                spec.name: TableCounts(
                    *found.totals[spec.index].numpy().tolist(),
                    *(
                        arrays[spec.index].numpy()
                        for arrays in (
                            found.hot_rows,
                            found.rows,
                            found.ids,
                            found.gradient_norms,
                            found.update_norms,
                        )
                    ),
                )
                for spec in self._plan.tables
            },
        )

    def _look_up(
        self,
        batches: Sequence[tf.Tensor],
        replica: int,
        shapes: Sequence[Shape] | None,
    ) -> Any:
        """Looks up one batch, or if there is none the next one in the queue."""
        return self._ops.tpu_embedding_lookup(
            queue=self._handle,
            batches=batches,
            tables=self._table_handles,
            runs=self._runs() if self._num_replicas > 1 else [],
            num_features=len(self._plan.features),
            output_shapes=self.batches.activation_shapes(shapes),
            replica=replica,
        )

    def _hand_in(
        self,
        batches: Sequence[tf.Tensor],
        gradients: Sequence[tf.Tensor | None],
        replica: int,
        *,
        pushes: Sequence[tf.Tensor] = (),
        check_only: bool = False,
    ) -> tf.Tensor:
        """Hands in the gradients of one batch, or if there is none of the owed one.

        The rates come first: one that fails has changed nothing.

        Returns:
          bool scalar, whether updates are due.
        """
        # Replicas act in ascending order: the last one completes the update.
        is_last = replica == self._num_replicas - 1 and not check_only
        rates = self._rates.evaluate() if is_last else tf.zeros([self._rates.size])
        return self._ops.tpu_embedding_update(
            queue=self._handle,
            batches=batches,
            gradients=[g for g in gradients if g is not None],
            rates=rates,
            counters=self._counters,
            pushes=pushes,
            has_gradient=[g is not None for g in gradients],
            replica=replica,
            check_only=check_only,
        )

    def _apply(self, apply_now: tf.Tensor) -> None:
        """Applies the updates that are due, where `apply_now` holds."""
        if not self._is_trained:
            return  # Lookup only: no update can be pending.
        self._ops.tpu_embedding_apply_update(
            queue=self._handle,
            apply_now=apply_now,
            tables=self._table_handles,
            slots=self._slot_handles,
        )

    def _runs(self) -> list[tf.Tensor]:
        """What tells this run of strategy.run from others; in graphs kernels know."""
        run = self._options.topology.run_number()
        return [] if run is None else [tf.constant(run, tf.int64)]


class HostQueue(StepQueue):
    """The queue in the engine's own resource, which lookups and updates take from."""

    def __init__(self, engine: HostEngine) -> None:
        self._engine = engine

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
        engine = self._engine
        with tf.device(engine._device):
            apply_now = engine._ops.tpu_embedding_enqueue(
                queue=engine._handle,
                batches=[batch.value for batch in batches],
                runs=engine._runs() if engine._num_replicas > 1 else [],
                replica=replica or 0,
                training=training,
            )
            if engine._pipelined and not training:
                engine._apply(apply_now)

    def dequeue(
        self,
        replica: int,
        *,
        shapes: Sequence[Shape] | None = None,
        name: str | None = None,
    ) -> list[tf.Tensor]:
        """See `StepQueue.dequeue`."""
        del name
        engine = self._engine
        with tf.device(engine._device):
            found = engine._look_up([], replica, shapes)
            if engine._pipelined:
                engine._apply(found.apply_now)
        return found.activations

    def apply_gradients(
        self,
        gradients: Sequence[tf.Tensor | None],
        replica: int,
        *,
        name: str | None = None,
    ) -> None:
        """See `StepQueue.apply_gradients`."""
        del name
        engine = self._engine
        with tf.device(engine._device):
            engine._apply(engine._hand_in([], gradients, replica))


def _plan_record(options: EngineOptions, placement: Placement | None) -> bytes:
    """The plan as cc/kernels/plan.h reads it."""
    plan, layout = options.plan, options.layout
    return records.serialize(
        check_numerics=options.check_numerics,
        num_replicas=options.topology.num_replicas,
        capacity=QUEUE_CAPACITY,
        pipelined=options.pipelined,
        process=placement.process if placement else 0,
        num_processes=placement.num_processes if placement else 1,
        owners=list(placement.owners) if placement else [],
        bfloat16_wire=options.distributed.wire_dtype == "bfloat16",
        tables=[_table_record(spec) for spec in plan.tables],
        features=[
            records.record(
                path=spec.path,
                table=spec.table,
                table_name=plan.tables[spec.table].name,
                rows=plan.tables[spec.table].config.vocabulary_size,
                combiner=plan.tables[spec.table].config.combiner,
                invalid_ids=plan.tables[spec.table].config.invalid_ids,
                sequence_length=spec.config.max_sequence_length,
                **_place_in_stack(layout, spec.index),
            )
            for spec in plan.features
        ],
        stacks=[stack.name for stack in layout.stacks] if layout else [],
    )


def _place_in_stack(layout: Layout | None, feature: int) -> dict[str, int]:
    if layout is None:
        return {}
    return {
        "stack": layout.feature_stacks[feature],
        "row_offset": layout.row_offsets[feature],
    }


def _table_record(spec: TableSpec) -> Any:
    config, optimizer = spec.config, spec.optimizer
    quantization = config.quantization_config
    size = functools.partial(
        records.record,
        name=spec.name,
        rows=config.vocabulary_size,
        dim=config.dim,
        num_buckets=quantization.num_buckets if quantization else 0,
        lower=float(quantization.lower) if quantization else 0.0,
        upper=float(quantization.upper) if quantization else 0.0,
    )
    if optimizer is None:
        return size(rule="")

    def limit(value: float | None, off: float) -> float:
        return off if value is None else float(value)

    return size(
        rule=optimizer.rule,
        hyperparameters=[float(number) for number in optimizer.hyperparameters],
        clip_gradient_min=limit(optimizer.clip_gradient_min, -math.inf),
        clip_gradient_max=limit(optimizer.clip_gradient_max, math.inf),
        clip_weight_min=limit(optimizer.clip_weight_min, -math.inf),
        clip_weight_max=limit(optimizer.clip_weight_max, math.inf),
        weight_decay_factor=float(optimizer.weight_decay_factor or 0.0),
        multiply_decay_by_rate=bool(
            optimizer.multiply_weight_decay_factor_by_learning_rate
        ),
        all_rows=optimizer.touches_all_rows,
        rounding_seed=spec.rounding_seed,
    )
