"""The engine for plain CPUs: our own kernels, in place on TensorFlow variables."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

import tensorflow as tf

from tpu_embedding.engines.base import QUEUE_CAPACITY, EngineOptions, Lookup
from tpu_embedding.engines.cpu_base import WholeTablesEngine
from tpu_embedding.inputs import IdBatch
from tpu_embedding.layout.csr import (
    PartitionedCsrFormatTensor,
    PreprocessedFeatures,
)
from tpu_embedding.layout.plan import Plan
from tpu_embedding.layout.stacking import Layout
from tpu_embedding.ops import library
from tpu_embedding.optimizers import Optimizer


class HostEngine(WholeTablesEngine):
    """One op per step and direction for all tables (see docs/architecture.md)."""

    name = "host"
    for_custom = "portable"

    def __init__(self, options: EngineOptions) -> None:
        """Makes the tables and the step queue; see `Engine`."""
        super().__init__(options)
        self._ops = library.load()
        self._table_handles = [table.parameters.handle for table in self._variables]
        self._slot_handles = [
            slot.handle for table in self._variables for slot in table.slots.values()
        ]
        self._prepare_attributes = _prepare_attributes(options)
        self._update_attributes = _update_attributes(options.plan)
        with tf.device(self._device):
            self._queue = self._ops.tpu_embedding_step_queue(
                num_replicas=self._num_replicas,
                capacity=QUEUE_CAPACITY,
                pipelined=self._pipelined,
            )

    def enqueue(
        self,
        batches: Sequence[Sequence[IdBatch]],
        replica: int | None,
        *,
        training: bool,
    ) -> None:
        """See `Queue.enqueue`."""
        with tf.device(self._device):
            prepared = [
                self._prepare(batch, replica, training=training) for batch in batches
            ]
            if self._pipelined and not training:
                self.flush()
            self._ops.tpu_embedding_enqueue(
                queue=self._queue,
                batches=prepared,
                replica=replica or 0,
                training=training,
            )

    def dequeue(self, replica: int) -> list[tf.Tensor]:
        """See `Queue.dequeue`."""
        with tf.device(self._device):
            if self._pipelined:
                self._apply_if(self._pending(replica).before_evaluation)
            result = self._ops.tpu_embedding_dequeue(
                queue=self._queue,
                replica=replica,
                num_features=len(self._plan.features),
                **self._lookup_arguments(),
            )
            if self._pipelined:
                self._apply_if(result.apply_now)
        return result.activations

    def apply_gradients(
        self, gradients: Sequence[tf.Tensor | None], replica: int
    ) -> None:
        """See `Queue.apply_gradients`."""
        with tf.device(self._device):
            rates, completes = self._evaluate_rates(replica, submitting=False)
            with tf.control_dependencies([rates]):
                apply_now = self._ops.tpu_embedding_deposit(
                    queue=self._queue,
                    rates=rates,
                    **self._gradient_arguments(gradients, replica),
                )
            self._rates.count_update(completes, after=apply_now)
            if not self._pipelined:
                self._apply_if(apply_now)

    def lookup_call(
        self, batch: Sequence[IdBatch], replica: int, *, training: bool = True
    ) -> Lookup:
        """See `Engine.lookup_call`."""
        del training  # Tickets are forgotten by themselves.
        with tf.device(self._device):
            result = self._ops.tpu_embedding_lookup(
                queue=self._queue,
                batch=self._prepare(batch, None, training=True),
                replica=replica,
                num_features=len(self._plan.features),
                **self._lookup_arguments(),
            )
        return Lookup(result.activations, result.ticket)

    def submit(
        self, ticket: Any, gradients: Sequence[tf.Tensor | None], replica: int
    ) -> None:
        """See `Engine.submit`."""
        with tf.device(self._device):
            rates, completes = self._evaluate_rates(replica, submitting=True)
            with tf.control_dependencies([rates]):
                apply_now = self._ops.tpu_embedding_submit(
                    queue=self._queue,
                    ticket=ticket,
                    rates=rates,
                    **self._gradient_arguments(gradients, replica),
                )
            self._rates.count_update(completes, after=apply_now)
            self._apply_if(apply_now)

    def preprocess(self, batch: Sequence[IdBatch]) -> PreprocessedFeatures:
        """See `Stacks.preprocess`."""
        with tf.device(self._device):
            result = self._ops.tpu_embedding_preprocess(
                **self._batch_arguments(batch),
                **_stack_attributes(self._stacks.layout),
                num_stacks=len(self._stacks.layout.stacks),
            )
            columns = (
                result.row_pointers,
                result.sample_ids,
                result.token_ids,
                result.gains,
            )
            stacks = list(zip(*columns, strict=True))
            return self._stacks.pack(stacks, result.output_shapes)

    def lookup_stacked(self, batch: PreprocessedFeatures, replica: int) -> Lookup:
        """See `Stacks.lookup_stacked`."""
        with tf.device(self._device):
            arguments = {
                **self._stack_arguments(batch.tables),
                **self._lookup_arguments(),
            }
            activations = self._ops.tpu_embedding_lookup_stacks(
                queue=self._queue,
                shapes=[tf.cast(shape, tf.int64) for shape in batch.output_shapes],
                replica=replica,
                **arguments,
            )
        return Lookup(activations, batch.tables)

    def update_stacked(
        self,
        tables: Mapping[str, PartitionedCsrFormatTensor],
        gradients: Sequence[tf.Tensor | None],
        replica: int,
    ) -> None:
        """See `Stacks.update_stacked`."""
        with tf.device(self._device):
            rates, completes = self._evaluate_rates(replica, submitting=True)
            arguments = {
                **self._stack_arguments(tables),
                **self._gradient_arguments(self._by_sample(gradients), replica),
            }
            with tf.control_dependencies([rates]):
                apply_now = self._ops.tpu_embedding_submit_stacks(
                    queue=self._queue,
                    samples=tf.stack(self._stacks.samples(tables)),
                    rates=rates,
                    **arguments,
                )
            self._rates.count_update(completes, after=apply_now)
            self._apply_if(apply_now)

    def flush(self) -> None:
        """See `Engine.flush`."""
        if self._pipelined:
            with tf.device(self._device):
                self._apply_if(self._pending(replica=0).ready)

    def reset(self) -> None:
        """See `Engine.reset`."""
        with tf.device(self._device):
            self._ops.tpu_embedding_reset(queue=self._queue)

    def _completes(self, replica: int, *, submitting: bool) -> tf.Tensor:
        return self._ops.tpu_embedding_completes(
            queue=self._queue, replica=replica, submitting=submitting
        )

    def _pending(self, replica: int) -> Any:
        return self._ops.tpu_embedding_pending(queue=self._queue, replica=replica)

    def _apply_update(self) -> None:
        self._ops.tpu_embedding_apply_update(
            queue=self._queue,
            tables=self._table_handles,
            slots=self._slot_handles,
            step=self._rates.step_of_update(),
            **self._update_attributes,
        )

    def _prepare(
        self, batch: Sequence[IdBatch], replica: int | None, *, training: bool
    ) -> tf.Tensor:
        """Checks one replica's batch; a variant that the queue takes."""
        # A failure in one replica among several must be known to the others.
        told = replica is not None and self._num_replicas > 1
        return self._ops.tpu_embedding_prepare(
            queue=[self._queue] if told else [],
            training=training,
            replica=replica or 0,
            **self._batch_arguments(batch),
        )

    def _batch_arguments(self, batch: Sequence[IdBatch]) -> dict[str, Any]:
        weights = [b.weights for b in batch]
        structures = [b.weight_structure for b in batch]
        return {
            "ids": [b.ids for b in batch],
            "structures": [b.structure for b in batch],
            "shapes": [b.shape for b in batch],
            "weights": [w for w in weights if w is not None],
            "weight_structures": [s for s in structures if s is not None],
            "has_weights": [w is not None for w in weights],
            "has_weight_structure": [s is not None for s in structures],
            "kinds": [b.kind.value for b in batch],
            **self._declared_shapes(),
            **self._prepare_attributes,
        }

    def _stack_arguments(
        self, tables: Mapping[str, PartitionedCsrFormatTensor]
    ) -> dict[str, Any]:
        stacks = [tables[stack.name] for stack in self._stacks.layout.stacks]
        return {
            "row_pointers": [tf.cast(s.row_pointers, tf.int32) for s in stacks],
            "token_ids": [tf.cast(s.sorted_token_ids, tf.int32) for s in stacks],
            "gains": [tf.cast(s.sorted_gains, tf.float32) for s in stacks],
            "paths": self._prepare_attributes["paths"],
            "feature_tables": self._prepare_attributes["feature_tables"],
            "vocabulary_sizes": self._prepare_attributes["vocabulary_sizes"],
            **_stack_attributes(self._stacks.layout),
        }

    def _lookup_arguments(self) -> dict[str, Any]:
        return {
            "tables": self._table_handles,
            "feature_tables": self._prepare_attributes["feature_tables"],
            "quantization": _quantization(self._plan),
            "output_shapes": self._activation_shapes(),
        }

    def _gradient_arguments(
        self, gradients: Sequence[tf.Tensor | None], replica: int
    ) -> dict[str, Any]:
        return {
            "gradients": [g for g in gradients if g is not None],
            "has_gradient": [g is not None for g in gradients],
            "paths": self._prepare_attributes["paths"],
            "dims": self._plan.dims,
            "check_numerics": self._options.check_numerics,
            "replica": replica,
        }

    def _declared_shapes(self) -> dict[str, Any]:
        shapes = self._options.output_shapes
        declared = [shapes.declared(f.index) for f in self._plan.features]
        axes: list[Any] = [d.shape if d else None for d in declared]
        return {
            "declared_shapes": [tf.TensorShape(shape) for shape in axes],
            "declared_sources": [d.source if d else "" for d in declared],
        }

    def _activation_shapes(self) -> list[tf.TensorShape]:
        shapes = self._options.output_shapes
        return [
            tf.TensorShape((*shapes.activation(f.index), dim))
            for f, dim in zip(self._plan.features, self._plan.dims, strict=True)
        ]


def _prepare_attributes(options: EngineOptions) -> dict[str, Any]:
    plan = options.plan
    tables = [spec.config for spec in plan.tables]
    return {
        "paths": [spec.path for spec in plan.features],
        "feature_tables": [spec.table for spec in plan.features],
        "sequence_lengths": [s.config.max_sequence_length for s in plan.features],
        "table_names": [spec.name for spec in plan.tables],
        "vocabulary_sizes": [table.vocabulary_size for table in tables],
        "combiners": [table.combiner for table in tables],
        "invalid_ids": [table.invalid_ids for table in tables],
        "check_numerics": options.check_numerics,
    }


def _stack_attributes(layout: Layout) -> dict[str, Any]:
    return {
        "stack_names": [stack.name for stack in layout.stacks],
        "feature_stacks": layout.feature_stacks,
        "first_tokens": layout.row_offsets,
    }


def _quantization(plan: Plan) -> list[float]:
    """For each table (number of buckets or 0, lower, upper)."""
    numbers: list[float] = []
    for spec in plan.tables:
        config = spec.config.quantization_config
        if config is None:
            numbers += [0, 0.0, 0.0]
        else:
            numbers += [config.num_buckets, config.lower, config.upper]
    return numbers


def _row_options(optimizer: Optimizer) -> list[float]:
    """What the kernel's `row_options` hold for one table."""
    limits = (
        (optimizer.clip_gradient_min, -math.inf),
        (optimizer.clip_gradient_max, math.inf),
        (optimizer.clip_weight_min, -math.inf),
        (optimizer.clip_weight_max, math.inf),
    )
    options = [off if limit is None else limit for limit, off in limits]
    return [*options, optimizer.weight_decay_factor or 0.0]


def _update_attributes(plan: Plan) -> dict[str, Any]:
    """What the update op needs; it is not called where a table has no optimizer."""
    optimizers = [spec.optimizer for spec in plan.tables if spec.optimizer]
    return {
        "feature_tables": [spec.table for spec in plan.features],
        "rules": [o.rule for o in optimizers],
        "hyperparameters": [h for o in optimizers for h in o.hyperparameters],
        "hyperparameter_counts": [len(o.hyperparameters) for o in optimizers],
        "row_options": [x for o in optimizers for x in _row_options(o)],
        "multiply_decay_by_rate": [
            bool(o.multiply_weight_decay_factor_by_learning_rate) for o in optimizers
        ],
        "all_rows": [o.touches_all_rows for o in optimizers],
        "rounding_seeds": [spec.rounding_seed for spec in plan.tables],
    }
