"""Converts batches and the plan into the form of the kernels."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any

import tensorflow as tf

from tpu_embedding.engines.calls import QUEUE_CAPACITY, Call, EngineOptions
from tpu_embedding.engines.cpu_base import StackedBatches
from tpu_embedding.engines.host.waiting import waiting_records
from tpu_embedding.inputs import IdBatch, op_inputs
from tpu_embedding.layout.csr import PreprocessedFeatures
from tpu_embedding.layout.placement import ALL_PROCESSES, Placement
from tpu_embedding.layout.plan import TableSpec
from tpu_embedding.layout.stacking import Layout
from tpu_embedding.ops import library
from tpu_embedding.tables.growing import vocabulary_records


class HostBatches:
    """Converts a plan's batches to the form of the kernels or plain tensors; stateless.

    Attributes:
      device: The device on which batches are prepared; None for that of each call.
      stacks: The stacks of the tables.
    """

    def __init__(
        self, options: EngineOptions, device: str | None, record: bytes, *, groups: bool
    ) -> None:
        """Makes batches for the tables of `options`.

        With `groups` it groups entries by row for an update; otherwise the owners do.
        """
        self._ops = library.load()
        self.device, self._record, self._groups = device, record, groups
        self._plan = options.plan
        self._output_shapes = options.output_shapes
        self.stacks = StackedBatches(options.plan, options.layout)
        self._call_records: dict[Any, bytes] = {}

    def prepare(self, batch: Sequence[IdBatch], *, training: bool) -> tf.Tensor:
        """Makes the batch for the kernels: a variant of this device and process."""
        training = training and self._groups
        declared = self._output_shapes.all_declared()
        kinds = [(b.kind, b.weights is None, b.weight_structure is None) for b in batch]
        key = (training, declared, tuple(kinds))  # Equal calls share one record.
        call = self._call_records.get(key)
        if call is None:
            shapes: list[Any] = [d.shape if d else None for d in declared]
            call = self._call_records[key] = library.serialize(
                training=training,
                kinds=[b.kind.value for b in batch],
                has_weights=[b.weights is not None for b in batch],
                has_weight_structure=[b.weight_structure is not None for b in batch],
                declared_shapes=[tf.TensorShape(shape) for shape in shapes],
                declared_sources=[d.source if d else "" for d in declared],
            )
        with tf.device(self.device):
            return self._ops.tpu_embedding_prepare(
                inputs=op_inputs(batch), plan=self._record, call=call
            )

    def to_tensors(
        self, batch: tf.Tensor, looked_up: Sequence[tf.Tensor], *, raises: bool
    ) -> PreprocessedFeatures:
        """Converts a batch that `prepare` returned to plain tensors.

        A refused batch raises its error with `raises`; else its tensors have a
        `refusal`. Growing tables keep the rows of `looked_up` while the tensors exist.
        """
        with tf.device(self.device):
            result = self._ops.tpu_embedding_to_stacks(
                batch=batch,
                looked_up=looked_up,
                num_stacks=len(self.stacks.layout.stacks),
                token_types=self._token_types(),
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
            packed = self.stacks.pack(stacks, result.output_shapes)
            return packed if raises else packed._replace(refusal=result.refusal)

    def from_tensors(self, features: PreprocessedFeatures) -> tf.Tensor:
        """See `Steps.from_tensors`; the op that takes the result raises its errors."""
        stacks = [features.tables[s.name] for s in self.stacks.layout.stacks]
        with tf.device(self.device):
            shapes = [tf.cast(shape, tf.int64) for shape in features.output_shapes]
            for_update = not shapes  # Sample counts replace the shapes.
            if for_update:
                counts = self.stacks.samples(features.tables)
                shapes = [count[tf.newaxis] for count in counts]
            return self._ops.tpu_embedding_from_stacks(
                row_pointers=[tf.cast(s.row_pointers, tf.int32) for s in stacks],
                token_ids=[
                    tf.cast(s.sorted_token_ids, dtype)
                    for s, dtype in zip(stacks, self._token_types(), strict=True)
                ],
                gains=[tf.cast(s.sorted_gains, tf.float32) for s in stacks],
                shapes=shapes,
                refusal=features.refusal if tf.is_tensor(features.refusal) else "",
                plan=self._record,
                training=for_update and self._groups,
            )

    def _token_types(self) -> list[tf.DType]:
        """Returns the dtype of each stack's tokens: rows, or ids of a growing table."""
        first = [stack.tables[0] for stack in self.stacks.layout.stacks]
        return [tf.as_dtype(self._plan.tables[table].key_dtype) for table in first]

    def activation_shapes(self, call: Call) -> list[tf.TensorShape]:
        """Returns the known shape of each feature's activations; see `Steps.lookup`."""
        known = self._output_shapes.activations(call.shapes)
        return [
            tf.TensorShape((*shape, dim))
            for shape, dim in zip(known, self._plan.dims, strict=True)
        ]


def plan_record(
    options: EngineOptions, placement: Placement | None = None, *, served: bool = False
) -> bytes:
    """Serializes the plan for cc/kernels/plan.h; if `served`, servers own tables."""
    plan, layout = options.plan, options.layout
    return library.serialize(
        check_numerics=options.check_numerics,
        num_replicas=options.topology.num_replicas,
        capacity=QUEUE_CAPACITY,
        pipelined=options.pipelined,
        process=placement.process if placement else 0,
        num_processes=placement.num_processes if placement else 1,
        served=served,
        owners=[max(owner, ALL_PROCESSES) for owner in placement.owners]
        if placement
        else [],
        bfloat16_wire=options.distributed.wire_dtype == "bfloat16",
        tables=[_table_record(spec) for spec in plan.tables],
        features=[
            library.record(
                path=spec.path,
                table=spec.table,
                table_name=plan.tables[spec.table].name,
                rows=plan.tables[spec.table].config.max_rows,
                combiner=plan.tables[spec.table].config.combiner,
                invalid_ids=plan.tables[spec.table].config.invalid_ids,
                sequence_length=spec.config.max_sequence_length,
                hash_keys=[spec.row_hash.key_bits] if spec.row_hash else [],
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
        library.record,
        name=spec.name,
        rows=config.max_rows,
        dim=config.dim,
        storage=config.dtype,
        num_buckets=quantization.num_buckets if quantization else 0,
        lower=float(quantization.lower) if quantization else 0.0,
        upper=float(quantization.upper) if quantization else 0.0,
        rounding_seed=spec.rounding_seed,
        vocabulary=vocabulary_records(spec),
    )
    if optimizer is None:
        return size(rule="")

    waiting, fields = waiting_records(spec), optimizer.record
    if waiting["idle"]:  # The rows of a batch are updated, and the others wait.
        fields |= {"all_rows": False}
    return size(
        rule=optimizer.rule,
        hyperparameters=[float(number) for number in optimizer.hyperparameters],
        **fields,
        **waiting,
    )
