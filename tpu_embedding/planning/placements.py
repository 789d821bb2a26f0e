"""Plans the places where tables can live, and what each of them needs."""

from __future__ import annotations

import dataclasses
import functools
import itertools
import math
import os
from collections.abc import Iterable, Sequence
from typing import Any

import tensorflow as tf

from tpu_embedding import errors, tpu_generations
from tpu_embedding.checkpoint.stored import tables_of_weights
from tpu_embedding.config import (
    DistributedOptions,
    FeatureConfig,
    SparseCoreEmbeddingConfig,
)
from tpu_embedding.hashing import rows_of
from tpu_embedding.layout import limits
from tpu_embedding.layout.csr import (
    check_optimizers,
    make_partitioning,
    stacking_options,
)
from tpu_embedding.layout.output_shapes import OutputShapes
from tpu_embedding.layout.plan import (
    FeatureSpec,
    Plan,
    make_plan,
    refuse_growing,
    require_dtypes,
    require_options,
)
from tpu_embedding.layout.stacking import Stack, make_layout
from tpu_embedding.lookup.feature_structure import FeatureStructure
from tpu_embedding.planning.machines import Machines
from tpu_embedding.planning.report import PlannedPlacement, PlanReport, table_arrays
from tpu_embedding.planning.sample import (
    Batch,
    FeatureIds,
    Sample,
    Traffic,
    to_feature_ids,
    without_sample,
)
from tpu_embedding.tf_configs import (
    check_batch_size,
    convert_features,
    convert_optimizer,
    convert_sparse_core,
)
from tpu_embedding.tpu_generations import GENERATIONS, Generation

_ID_AND_WEIGHT = 8  # Bytes: int32 and float32.
_MOST_PROCESSES = 65_536  # Each of them is planned by itself.
_NOT_COUNTED = {
    "v1": "how the hardware pads tables and what it keeps of a batch",
    "none": "how the compiler lays out tables and what else its program needs",
}


def plan(
    feature_config: Any,
    optimizer: Any = None,
    *,
    batch_size: int | None = None,
    topologies: Sequence[str] | None = None,
    processes: Sequence[int] = (2, 4, 8),
    distributed_options: DistributedOptions | None = None,
    machine_bytes: int | None = None,
    sparse_core_embedding_config: Any = None,
    pipeline_execution_with_tensor_core: bool = False,
    sample: Iterable[Any] | None = None,
    sample_batches: int = 16,
) -> PlanReport:
    """Says where the tables of a configuration fit, and what each place needs.

    Nothing is created: no table, no TensorFlow session, no TPU.

    >>> import tpu_embedding as te
    >>> films = te.TableConfig(1_000_000, 64, name="films")
    >>> report = te.plan(te.FeatureConfig(films), te.Adagrad(0.1), batch_size=4096)
    >>> report.total_bytes
    512000000
    >>> [place.name for place in report.placements if place.kind == "tpu"][:2]
    ['v6e:1x1', 'v5e:1x1']

    Args:
      feature_config: As for TPUEmbeddingV2. Or a Keras model with te.keras.Embedding,
        whose tables are planned as those of a te.keras.TPUEmbedding: a feature for each
        layer, by its name, and the optimizer of the model.
      optimizer: The optimizer of tables without their own; None: lookups only.
      batch_size: Samples of a step in all devices and processes. A feature with an
        `output_shape` keeps it for each replica; others need this argument.
      topologies: Names such as "v6e:2x2". None plans the smallest of each generation
        that fits, or the largest.
      processes: Numbers of processes, for synchronous training and for servers.
      distributed_options: As for TPUEmbeddingV2: how processes share the tables, and
        what they send.
      machine_bytes: Memory of one machine in bytes; None means this machine's.
      sparse_core_embedding_config: The limits that the user intends.
      pipeline_execution_with_tensor_core: As for TPUEmbeddingV2: a batch and its
        gradients wait on each device for the next step.
      sample: Batches of features in the structure of `feature_config`, each the global
        batch of one step, for example a batched tf.data.Dataset; dense, ragged or
        sparse.
      sample_batches: The number of these batches that are read.

    Returns:
      A `planning.PlanReport`: objects, `print(report)`, `report.to_json()` and
      `report.to_svg()`.

    Raises:
      ValueError, TypeError, NotImplementedError: If TPUEmbeddingV2 refuses the
        configuration; ValueError for an unknown topology, a number below 1, a missing
        batch size and a sample without batches.
    """
    _check_numbers(batch_size, machine_bytes, sample_batches, processes)
    feature_config, optimizer = _of_model(feature_config, optimizer)
    converted = convert_features(feature_config)
    optimizer = convert_optimizer(optimizer)
    plan = make_plan(*converted, optimizer, custom=True, growing=True)
    counts = None
    if sample is not None:
        batches = _read(feature_config, plan, itertools.islice(sample, sample_batches))
        if batch_size is None:
            batch_size = max(feature.num_samples for feature in batches[0])
        else:
            _check_sample(plan, batches, batch_size)
        counts = Sample.of(plan, batches)
    if batch_size is None:
        for spec in plan.features:
            if not _has_full_shape(spec.config):
                raise ValueError(
                    f"Feature {spec.path} has no full `output_shape`. Pass "
                    "`batch_size`, or a sample."
                )
    planner = _Planner(
        plan,
        batch_size,
        counts,
        convert_sparse_core(sparse_core_embedding_config),
        pipeline_execution_with_tensor_core,
    )
    machines = Machines(
        plan,
        planner.traffic,
        distributed_options or DistributedOptions(),
        machine_bytes or os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES"),
    )
    placements = [
        machines.one(),
        *map(machines.synchronous, processes),
        *map(machines.servers, processes),
        *planner.tpus(topologies),
    ]
    placements.sort(
        key=lambda p: (
            not p.fits,
            not p.close,
            p.num_devices,
            p.kind == "tpu",
            p.wire_bytes or 0,
            p.peak_bytes / p.capacity,
        )
    )
    return PlanReport(
        arrays=tuple(array for table in plan.tables for array in table_arrays(table)),
        statistics=() if counts is None else tuple(counts.statistics(plan)),
        placements=tuple(placements),
    )


def _check_numbers(
    batch_size: Any, machine_bytes: Any, sample_batches: Any, processes: Sequence[Any]
) -> None:
    check_batch_size("batch_size", batch_size)
    for argument, number in (
        ("machine_bytes", 1 if machine_bytes is None else machine_bytes),
        ("sample_batches", sample_batches),
        *(("processes", count) for count in processes),
    ):
        check_batch_size(argument, number)
    if max(processes, default=0) > _MOST_PROCESSES:
        allowed = f"at most {_MOST_PROCESSES:,}"
        raise errors.argument_value("processes", max(processes), allowed)


def _of_model(feature_config: Any, optimizer: Any) -> tuple[Any, Any]:
    """Returns features and optimizer, of a Keras model if the first argument is one."""
    model = tables_of_weights(feature_config)
    if model is not None:
        if optimizer is None:
            optimizer = model.engine_optimizer()
        return model.feature_config, optimizer
    if hasattr(feature_config, "_flatten_layers"):
        raise TypeError(
            "te.plan takes a Keras model whose tables are te.keras.Embedding layers, "
            f"but {feature_config.name!r} has none of these. Pass "
            "te.keras.convert(model), or the feature configuration of a "
            "te.keras.TPUEmbedding."
        )
    return feature_config, optimizer


def _read(feature_config: Any, plan: Plan, sample: Iterable[Any]) -> list[Batch]:
    structure = FeatureStructure(feature_config, plan.features)
    found = []
    for batch in sample:
        values = structure.for_plan(structure.flatten("sample", batch))
        found.append(
            [
                _to_rows(spec, to_feature_ids(spec.path, value))
                for spec, value in zip(plan.features, values, strict=True)
            ]
        )
    if not found:
        raise ValueError("`sample` has no batches.")
    return found


def _to_rows(spec: FeatureSpec, feature: FeatureIds) -> FeatureIds:
    if spec.row_hash is None:
        return feature
    rows = rows_of(tf.constant(feature.ids), spec.row_hash).numpy()
    return feature._replace(ids=rows)


def _check_sample(plan: Plan, batches: Sequence[Batch], batch_size: int) -> None:
    """Checks the largest batch of the sample: the last of a data set may be short."""
    for spec in plan.features:
        found = max(batch[spec.index].num_samples for batch in batches)
        if not _has_full_shape(spec.config) and found != batch_size:
            raise ValueError(
                f"Feature {spec.path}: the batches of the sample have {found} samples, "
                f"but `batch_size` is {batch_size}. Let each batch of the sample be "
                "the global batch of a step, or leave `batch_size` out. A feature of "
                "several axes needs an `output_shape`."
            )


@dataclasses.dataclass(frozen=True)
class _Planner:
    """Plans TPUs.

    Attributes:
      plan: The tables.
      batch_size: Samples in all devices, or None if each feature has an output shape.
      sample: The sample, or None.
      config: The user's limits.
      pipelined: Whether a step leaves its update to the next one.
    """

    plan: Plan
    batch_size: int | None
    sample: Sample | None
    config: SparseCoreEmbeddingConfig
    pipelined: bool

    def tpus(self, topologies: Sequence[str] | None) -> list[PlannedPlacement]:
        """Plans the given topologies, or each generation's smallest one that fits."""
        if topologies is not None:
            return [
                self._tpu(name, *tpu_generations.topology(name)) for name in topologies
            ]
        found = []
        needed = sum(self._bytes.values())
        for generation in GENERATIONS.values():
            names = [f"{generation.name}:{axes}" for axes in generation.topologies]
            place = None
            for name in names:
                _, devices = tpu_generations.topology(name)
                replicated = generation.embedding == "none"
                capacity = generation.hbm_bytes * (1 if replicated else devices)
                if needed > capacity and name != names[-1]:
                    continue
                place = self._tpu(name, generation, devices)
                # More devices help only against a lack of memory.
                if all(
                    e.kind not in ("tensor bytes", "device bytes")
                    for e in place.excesses
                ):
                    break
            assert place is not None
            found.append(place)
        return found

    @functools.cached_property
    def _bytes(self) -> dict[str, int]:
        return {
            table.name: sum(array.bytes for array in table_arrays(table))
            for table in self.plan.tables
        }

    def _samples(self, parts: int) -> list[float]:
        """Returns the samples of each feature in the batches of `parts` replicas."""
        found: list[float] = []
        for spec in self.plan.features:
            if _has_full_shape(spec.config):
                found.append(math.prod(spec.config.output_shape) * parts)
            else:
                assert self.batch_size is not None
                found.append(self.batch_size * (spec.config.max_sequence_length or 1))
        return found

    def traffic(self, processes: int) -> Traffic:
        """Returns the ids in the batch of one of `processes` processes or devices."""
        return Traffic.of(self.plan, self._samples(processes), self.sample, processes)

    def _tpu(self, name: str, generation: Generation, devices: int) -> PlannedPlacement:
        if generation.embedding == "sparse_core":
            return self._sparse_cores(name, generation, devices)
        shared = 1 if generation.embedding == "none" else devices
        by_table = {n: -(-size // shared) for n, size in self._bytes.items()}
        buffers = self._tensor_core_bytes(generation, devices)
        unsupported = None
        if generation.embedding == "v1":
            unsupported = next(
                (
                    f"Table {t.name!r} has no optimizer, but TPU v2 to v4 need one. "
                    "Pass `optimizer`, or set it in the TableConfig."
                    if t.optimizer is None
                    else f"Table {t.name!r}: TPU v2 to v4 do not support "
                    f"{type(t.optimizer).__name__}."
                    for t in self.plan.tables
                    if t.optimizer is None or t.optimizer.tpu is None
                ),
                None,
            )
        return _place(
            name,
            generation,
            devices,
            by_table,
            buffer_bytes=buffers,
            excesses=tuple(
                limits.whole_table_excesses(
                    self.plan, generation, shared, step_bytes=buffers
                )
            ),
            unsupported=unsupported or self._refusal(generation),
            not_counted=_NOT_COUNTED[generation.embedding],
        )

    def _tensor_core_bytes(self, generation: Generation, devices: int) -> int:
        """Returns the bytes of a step on a device without SparseCores.

        They hold the batch, its activations and gradients. A lookup on v5e also holds
        the row of each id.
        """
        traffic, total = self.traffic(devices), 0.0
        for f, dim in enumerate(self.plan.dims):
            rows = traffic.samples[f]
            rows += traffic.entries[f] if generation.embedding == "none" else rows
            total += rows * limits.stored_row_bytes(dim)
            total += traffic.entries[f] * _ID_AND_WEIGHT
        return int(total)

    def _require_tables(self, generation: Generation) -> None:
        require_dtypes(self.plan, ("float32",), generation.name)
        refuse_growing(self.plan.tables, f"{generation.name} does not take")

    def _refusal(self, generation: Generation) -> str | None:
        try:
            self._require_tables(generation)
            if generation.embedding == "v1":
                require_options(self.plan, "tpu_v2_v4")
        except NotImplementedError as error:
            return str(error)
        return None

    def _sparse_cores(
        self, name: str, generation: Generation, devices: int
    ) -> PlannedPlacement:
        options = stacking_options(
            devices,
            generation.sparse_cores_per_device,
            self.config,
            width_multiple=generation.lane_width,
            row_multiple=generation.row_multiple,
        )
        try:
            tpu_generations.require_power_of_two(name, devices)
            replica_plan = self._for_replicas(devices)
            check_optimizers(replica_plan)
            self._require_tables(generation)
            shapes = OutputShapes(replica_plan.features).full()
            layout = make_layout(replica_plan, shapes, options)
            partitioning = make_partitioning(replica_plan, layout, options, self.config)
        except (ValueError, NotImplementedError) as error:
            by_table = {n: -(-s // devices) for n, s in self._bytes.items()}
            return _place(name, generation, devices, by_table, unsupported=str(error))
        stacks, pipelined = layout.stacks, self.pipelined

        def program(*, padded: bool) -> int:
            return sum(
                limits.program_bytes(
                    partitioning, stack, pipelined=pipelined, padded=padded
                )
                for stack in stacks
            )

        needs, per_sample, not_counted, note = [], None, "", ""
        where = (replica_plan, layout, partitioning, generation)
        if self.sample is None:
            note = without_sample(partitioning, generation)
        else:
            needs, per_sample, not_counted = self.sample.limits(*where)
        return _place(
            name,
            generation,
            devices,
            _bytes_of_stacks(replica_plan, stacks),
            buffer_bytes=sum(
                limits.buffer_bytes(partitioning, stack, pipelined=pipelined)
                for stack in stacks
            ),
            program_bytes=program(padded=True),
            padding_bytes=program(padded=True) - program(padded=False),
            limits=tuple(needs),
            max_ids_per_chip_per_sample=per_sample,
            not_counted=not_counted,
            note=note,
            excesses=(
                *limits.sparse_core_excesses(*where, pipelined=pipelined, padded=True),
                *limits.combiner_excesses(*where),
            ),
        )

    def _for_replicas(self, replicas: int) -> Plan:
        """Returns the plan with an output shape for each feature."""
        features = []
        for spec in self.plan.features:
            config = spec.config
            if not _has_full_shape(config):
                assert self.batch_size is not None
                if self.batch_size % replicas:
                    raise ValueError(
                        f"The batch of {self.batch_size} samples cannot be divided "
                        f"among {replicas} devices. Use a multiple of {replicas}."
                    )
                rows = self.batch_size // replicas
                length = config.max_sequence_length
                config = FeatureConfig(
                    config.table,
                    output_shape=(rows, length) if length else (rows,),
                    name=config.name,
                )
            features.append(dataclasses.replace(spec, config=config))
        return dataclasses.replace(self.plan, features=tuple(features))


def _bytes_of_stacks(plan: Plan, stacks: Iterable[Stack]) -> dict[str, int]:
    """Returns each table's share of the bytes of its stack and slots on one device."""
    found = {}
    for stack in stacks:
        spec = plan.tables[stack.tables[0]]
        size = limits.array_bytes(stack) * limits.num_arrays(spec)
        for index, place in zip(stack.tables, stack.layouts, strict=True):
            height = place.end - place.sparse_core_shard_row_offset
            found[plan.tables[index].name] = size * height // stack.rows_per_shard
    return found


def _has_full_shape(config: FeatureConfig) -> bool:
    return config.output_shape is not None and None not in config.output_shape


def _place(
    name: str,
    generation: Generation,
    devices: int,
    by_table: dict[str, int],
    **others: Any,
) -> PlannedPlacement:
    """Returns a topology whose devices hold the same number of bytes of each table."""
    tables = sum(by_table.values())
    step = others.setdefault("buffer_bytes", 0) + others.get("program_bytes", 0)
    return PlannedPlacement(
        name=name,
        kind="tpu",
        num_devices=devices,
        capacity=generation.hbm_bytes,
        device_bytes=(tables + step,) * devices,
        table_bytes=(tables,) * devices,
        by_table=by_table,
        location=dict.fromkeys(by_table, "all"),
        **others,
    )
