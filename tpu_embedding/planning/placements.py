"""Where tables can live, and what each place needs."""

from __future__ import annotations

import dataclasses
import math
import os
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

from tpu_embedding import tpu_generations
from tpu_embedding.config import FeatureConfig, SparseCoreEmbeddingConfig
from tpu_embedding.layout import limits
from tpu_embedding.layout.output_shapes import OutputShapes
from tpu_embedding.layout.partitioning import (
    check_optimizers,
    make_partitioning,
    stacking_options,
)
from tpu_embedding.layout.placement import (
    divided_table_bytes,
    place_on_servers,
    whole_table_bytes,
)
from tpu_embedding.layout.plan import Plan, TableSpec, make_plan, require_dtypes
from tpu_embedding.layout.stacking import make_layout
from tpu_embedding.nest_utils import Structure
from tpu_embedding.planning.report import ArrayBytes, Placement, PlanReport
from tpu_embedding.planning.sample import (
    Sample,
    Traffic,
    to_feature_ids,
)
from tpu_embedding.tf_configs import (
    check_batch_size,
    convert_features,
    convert_optimizer,
    convert_sparse_core,
)
from tpu_embedding.tpu_generations import GENERATIONS, Generation

# What the host engine needs beside tables: kernels, threads' stacks, a queue.
_HOST_BYTES = 40 * 2**20
_FLOAT, _ID = 4, 8  # Bytes of a value and of an id.
_ENTRY = 32  # Of the host engine: the id, the prepared batch, the grouped gradients.


def plan(
    feature_config: Any,
    optimizer: Any = None,
    *,
    batch_size: int | None = None,
    topologies: Sequence[str] | None = None,
    processes: Sequence[int] = (2, 4, 8),
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
      feature_config: As for TPUEmbeddingV2.
      optimizer: For tables without one of their own. None: lookups only.
      batch_size: Samples of a step in all devices and processes. A feature with an
        `output_shape` keeps it for each replica; others need this argument.
      topologies: Names such as "v6e:2x2"; None: of each generation the smallest that
        fits, or the largest.
      processes: Numbers of processes, for synchronous training and for servers.
      machine_bytes: Memory of one machine; None: of this one.
      sparse_core_embedding_config: The limits that the user intends.
      pipeline_execution_with_tensor_core: As for TPUEmbeddingV2: a batch and its
        gradients wait on each device for the next step.
      sample: Batches of features in the structure of `feature_config`, each the global
        batch of one step, for example a batched tf.data.Dataset; dense, ragged or
        sparse.
      sample_batches: How many of them are read.

    Returns:
      A `planning.PlanReport`: objects, `print(report)`, `report.to_json()` and
      `report.to_svg()`.

    Raises:
      ValueError, TypeError, NotImplementedError: Those of TPUEmbeddingV2 for the
        configuration; ValueError for an unknown topology, a number below 1, a missing
        batch size and a sample without batches.
    """
    check_batch_size("batch_size", batch_size)
    for argument, number in (
        ("machine_bytes", 1 if machine_bytes is None else machine_bytes),
        ("sample_batches", sample_batches),
        *(("processes", count) for count in processes),
    ):
        check_batch_size(argument, number)
    converted = convert_features(feature_config)
    own = make_plan(
        converted.paths,
        converted.features,
        converted.keys,
        convert_optimizer(optimizer),
        custom=True,
    )
    read = None if sample is None else _read(feature_config, own, sample)
    counts = None
    if read is not None:
        batches = [batch for _, batch in zip(range(sample_batches), read, strict=False)]
        if not batches:
            raise ValueError("`sample` has no batches.")
        counts = Sample.of(own, batches)
        if batch_size is None:
            batch_size = max(f.num_samples for f in batches[0])
    if batch_size is None:
        for spec in own.features:
            if spec.config.output_shape is None or None in spec.config.output_shape:
                raise ValueError(
                    f"Feature {spec.path} has no full `output_shape`. Pass "
                    "`batch_size`, or a sample."
                )
    planner = _Planner(
        own,
        batch_size,
        counts,
        convert_sparse_core(sparse_core_embedding_config),
        pipeline_execution_with_tensor_core,
        machine_bytes or os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES"),
    )
    placements = [
        planner.host(),
        *(place for count in processes for place in planner.several(count)),
        *planner.tpus(topologies),
    ]
    placements.sort(
        key=lambda p: (
            not p.fits,
            p.num_devices,
            p.wire_bytes or 0,
            p.peak_bytes / p.capacity,
        )
    )
    return PlanReport(
        arrays=tuple(array for table in own.tables for array in _arrays(table)),
        statistics=() if counts is None else tuple(counts.statistics(own)),
        placements=tuple(placements),
    )


def _read(feature_config: Any, own: Plan, sample: Iterable[Any]) -> Iterator[list[Any]]:
    structure = Structure(feature_config)
    for batch in sample:
        values = structure.flatten("sample", batch)
        yield [
            to_feature_ids(spec.path, value)
            for spec, value in zip(own.features, values, strict=True)
        ]


def _arrays(table: TableSpec) -> list[ArrayBytes]:
    """The table and its slots."""
    rows, dim = table.config.vocabulary_size, table.config.dim
    size = 2 if table.config.dtype == "bfloat16" else _FLOAT
    found = [
        ArrayBytes(
            table.name,
            "parameters",
            (rows, dim),
            table.config.dtype,
            rows * dim * size,
        )
    ]
    for slot in table.optimizer.slots if table.optimizer else ():
        shape = (rows, 1 if slot.per_row else dim)
        found.append(
            ArrayBytes(
                table.name, slot.name, shape, "float32", shape[0] * shape[1] * _FLOAT
            )
        )
    return found


@dataclasses.dataclass(frozen=True)
class _Planner:
    """Makes placements of one plan.

    Attributes:
      plan: The tables.
      batch_size: Of all devices, or None if each feature has an output shape.
      sample: The sample, or None.
      config: The user's limits.
      pipelined: Whether a step leaves its update to the next one.
      machine_bytes: Memory of one machine.
    """

    plan: Plan
    batch_size: int | None
    sample: Sample | None
    config: SparseCoreEmbeddingConfig
    pipelined: bool
    machine_bytes: int

    def host(self) -> Placement:
        """The host engine of one machine."""
        by_table = self._bytes()
        traffic = self._traffic(1)
        buffers = _HOST_BYTES + self._step_bytes(traffic)
        used = sum(by_table.values()) + buffers
        return Placement(
            name="one machine",
            kind="host",
            num_devices=1,
            capacity=self.machine_bytes,
            device_bytes=(used,),
            buffer_bytes=buffers,
            by_table=by_table,
            location=dict.fromkeys(by_table, 0),
            wire_bytes=0,
            excesses=self._memory_excess(used, by_table),
        )

    def several(self, count: int) -> list[Placement]:
        """Synchronous training by `count` processes, and as many servers."""
        by_table = self._bytes()
        whole = {table.index: place for table, place in self._greedy(count)}
        # A table that is larger than a fair share is divided, the others are not.
        share = sum(by_table.values()) / count
        mixed = {
            table.index: None if by_table[table.name] > share else whole[table.index]
            for table in self.plan.tables
        }
        rows = dict.fromkeys(mixed)
        found = [self._synchronous(count, "rows", rows)]
        if any(place is not None for place in mixed.values()):
            found.append(self._synchronous(count, "whole tables", mixed))
        return [*found, self._servers(count)]

    def tpus(self, topologies: Sequence[str] | None) -> list[Placement]:
        """The given topologies, or the smallest of each generation that fits."""
        if topologies is not None:
            return [
                self._tpu(name, *tpu_generations.topology(name)) for name in topologies
            ]
        found = []
        needed = sum(self._bytes().values())
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
                if all(e.kind in ("unique ids", "ids") for e in place.excesses):
                    break
            assert place is not None
            found.append(place)
        return found

    def _bytes(self) -> dict[str, int]:
        return {
            table.name: sum(array.bytes for array in _arrays(table))
            for table in self.plan.tables
        }

    def _samples(self, parts: int) -> list[float]:
        """Samples of each feature in the batch of all of some replicas."""
        found: list[float] = []
        for spec in self.plan.features:
            shape = spec.config.output_shape
            if shape is not None and None not in shape:
                found.append(math.prod(shape) * parts)
            else:
                assert self.batch_size is not None
                found.append(self.batch_size * (spec.config.max_sequence_length or 1))
        return found

    def _traffic(self, processes: int) -> Traffic:
        return Traffic.of(self.plan, self._samples(processes), self.sample, processes)

    def _step_bytes(self, traffic: Traffic) -> int:
        """The prepared batch, activations and gradients of one process."""
        return int(
            sum(
                3 * _FLOAT * traffic.samples[f] * self.plan.dims[f]
                + _ENTRY * traffic.entries[f]
                for f in range(len(self.plan.features))
            )
        )

    def _greedy(self, count: int) -> Iterator[tuple[TableSpec, int]]:
        """Places the largest table first, where least is (Graham, 1969)."""
        sizes, load = self._bytes(), [0] * count
        for table in sorted(self.plan.tables, key=lambda t: (-sizes[t.name], t.name)):
            place = min(range(count), key=lambda i: load[i])
            load[place] += sizes[table.name]
            yield table, place

    def _synchronous(
        self, count: int, how: str, places: dict[int, int | None]
    ) -> Placement:
        traffic = self._traffic(count)
        buffers = _HOST_BYTES + self._step_bytes(traffic)
        sizes, used = self._bytes(), [0] * count
        by_table, location, wire = {}, {}, 0.0
        for table in self.plan.tables:
            size, place = sizes[table.name], places[table.index]
            location[table.name] = "all" if place is None else place
            if place is None:
                rows = table.config.vocabulary_size
                own = -(-rows // count) * size // rows
                used = [before + own for before in used]
                by_table[table.name] = own
                wire += self._divided_bytes(table, traffic, count, count - 1)
            else:
                used[place] += size
                by_table[table.name] = size
                wire += self._whole_bytes(table, traffic, count)
        used = [before + buffers for before in used]
        fullest = used.index(max(used))
        by_table = {
            name: size
            for name, size in by_table.items()
            if location[name] in ("all", fullest)
        }
        return Placement(
            name=f"{count} processes, synchronous, {how}",
            kind="synchronous",
            num_devices=count,
            capacity=self.machine_bytes,
            device_bytes=tuple(used),
            buffer_bytes=buffers,
            by_table=by_table,
            location=location,
            wire_bytes=int(wire),
            excesses=self._memory_excess(max(used), by_table),
            unsupported=self._on_processes(),
        )

    def _divided_bytes(
        self, table: TableSpec, traffic: Traffic, count: int, others: int
    ) -> float:
        """Bytes of a step for a table that is divided by rows, without weights.

        IDs are spread evenly over `count` owners, of which `others` are on other
        machines.
        """
        config, away = table.config, others / count
        value = 2 if config.dtype == "bfloat16" else _FLOAT
        rows = traffic.distinct[table.index] * away
        entries = samples = lengths = gains = 0.0
        for f in table.features:
            number = traffic.samples[f]
            per_sample = traffic.entries[f] / number if number else 0.0
            entries += traffic.entries[f] * away
            # Owners among the others that a sample has an id of.
            sent = number * others * (1 - (1 - 1 / count) ** per_sample)
            samples += sent
            if per_sample > 1:
                lengths += sent
                gains += sent * (config.combiner != "sum")
        found = divided_table_bytes(
            rows=rows,
            rows_served=rows,
            entries=entries,
            samples=samples,
            lengths=lengths,
            gains=gains,
            row_bytes=value * config.dim,
            gradient_bytes=_FLOAT * config.dim,
        )
        return sum(found.values())

    def _whole_bytes(self, table: TableSpec, traffic: Traffic, count: int) -> float:
        """Bytes of a step for a table in one process, the mean over all processes."""
        config = table.config
        entries = samples = lengths = gains = 0.0
        for f in table.features:
            number = traffic.samples[f]
            per_sample = traffic.entries[f] / number if number else 0.0
            entries += traffic.entries[f]
            samples += number
            lengths += number * (not per_sample.is_integer())
            gains += number * (config.combiner != "sum" and per_sample > 1)
        found = whole_table_bytes(
            entries=entries,
            samples=samples,
            samples_served=samples,
            lengths=lengths,
            gains=gains,
            activation_bytes=_FLOAT * config.dim,
        )
        return sum(found.values()) * (count - 1) / count

    def _server_bytes(self, table: TableSpec, traffic: Traffic) -> float:
        """Ids as the user gives them, activations back, gradients out."""
        return sum(
            traffic.entries[f] * _ID
            + 2 * traffic.samples[f] * table.config.dim * _FLOAT
            for f in table.features
        )

    def _servers(self, count: int) -> Placement:
        sizes, used = self._bytes(), [float(_HOST_BYTES)] * count
        places = place_on_servers(self.plan, count)
        traffic = self._traffic(1)
        buffers = self._step_bytes(traffic)
        location: dict[str, Any] = {}
        wire = 0.0
        for table in self.plan.tables:
            name, owner = table.name, places.owners[table.index]
            if places.is_divided(table.index):
                location[name] = "all"
                sizes[name] = -(-sizes[name] // count)
                used = [before + sizes[name] for before in used]
                wire += self._divided_bytes(table, traffic, count, count)
            else:
                location[name] = owner
                used[owner] += sizes[name]
                wire += self._server_bytes(table, traffic)
        held = [int(before + buffers) for before in used]
        fullest = held.index(max(held))
        by_table = {
            name: sizes[name]
            for name, place in location.items()
            if place in ("all", fullest)
        }
        return Placement(
            name=f"{count} parameter servers",
            kind="parameter_servers",
            num_devices=count,
            capacity=self.machine_bytes,
            device_bytes=tuple(held),
            buffer_bytes=_HOST_BYTES + buffers,
            by_table=by_table,
            location=location,
            wire_bytes=int(wire),
            excesses=self._memory_excess(max(held), by_table),
            unsupported=self._on_processes(),
        )

    def _on_processes(self) -> str | None:
        for table in self.plan.tables:
            custom = table.optimizer is not None and table.optimizer.is_custom
            if custom or table.config.custom_combiner is not None:
                return (
                    f"Table {table.name!r}: a CustomOptimizer or CustomCombiner runs "
                    "in one process."
                )
        return None

    def _memory_excess(
        self, used: int, by_table: dict[str, int]
    ) -> tuple[limits.Excess, ...]:
        return tuple(
            limits.device_excess(
                tuple(by_table),
                [*by_table.items(), ("buffers", used - sum(by_table.values()))],
                1,
                ("this machine", self.machine_bytes),
            )
        )

    def _tpu(self, name: str, generation: Generation, devices: int) -> Placement:
        if generation.embedding == "sparse_core":
            return self._sparse_cores(name, generation, devices)
        shared = 1 if generation.embedding == "none" else devices
        by_table = {n: -(-size // shared) for n, size in self._bytes().items()}
        used = sum(by_table.values())
        unsupported = None
        if generation.embedding == "v1":
            unsupported = next(
                (
                    f"Table {t.name!r} has no optimizer, and TPU v2 to v4 need one. "
                    "Pass `optimizer`, or give the TableConfig one."
                    if t.optimizer is None
                    else f"Table {t.name!r}: TPU v2 to v4 do not support "
                    f"{type(t.optimizer).__name__}."
                    for t in self.plan.tables
                    if t.optimizer is None or t.optimizer.tpu is None
                ),
                None,
            )
        return Placement(
            name=name,
            kind="tpu",
            num_devices=devices,
            capacity=generation.hbm_bytes,
            device_bytes=(used,) * devices,
            buffer_bytes=0,
            by_table=by_table,
            location=dict.fromkeys(by_table, "all"),
            excesses=tuple(limits.whole_table_excesses(self.plan, generation, shared)),
            unsupported=unsupported or self._dtypes(generation),
        )

    def _dtypes(self, generation: Generation) -> str | None:
        try:
            require_dtypes(self.plan, ("float32",), generation.name)
        except NotImplementedError as error:
            return str(error)
        return None

    def _sparse_cores(
        self, name: str, generation: Generation, devices: int
    ) -> Placement:
        options = stacking_options(
            devices,
            generation.sparse_cores_per_device,
            self.config,
            width_multiple=generation.lane_width,
            row_multiple=generation.row_multiple,
        )
        try:
            own = self._for_replicas(devices)
            check_optimizers(own)
            require_dtypes(own, ("float32",), generation.name)
            layout = make_layout(own, OutputShapes(own.features).full(), options)
            partitioning = make_partitioning(own, layout, options, self.config)
        except (ValueError, NotImplementedError) as error:
            by_table = {n: -(-s // devices) for n, s in self._bytes().items()}
            return Placement(
                name=name,
                kind="tpu",
                num_devices=devices,
                capacity=generation.hbm_bytes,
                device_bytes=(sum(by_table.values()),) * devices,
                buffer_bytes=0,
                by_table=by_table,
                location=dict.fromkeys(by_table, "all"),
                unsupported=str(error),
            )
        by_table: dict[str, int] = {}
        buffers = program = 0
        for stack in layout.stacks:
            buffers += limits.buffer_bytes(
                partitioning, stack, pipelined=self.pipelined
            )
            program += limits.program_bytes(
                partitioning, stack, pipelined=self.pipelined
            )
            spec = own.tables[stack.tables[0]]
            size = limits.array_bytes(stack) * limits.num_arrays(spec)
            heights = [
                place.end - place.sparse_core_shard_row_offset
                for place in stack.layouts
            ]
            for index, height in zip(stack.tables, heights, strict=True):
                share = size * height // stack.rows_per_shard
                by_table[own.tables[index].name] = share
        needs, per_sample = [], None
        if self.sample is not None:
            needs, per_sample = self.sample.limits(
                own, layout, partitioning, generation
            )
        used = sum(by_table.values()) + buffers + program
        return Placement(
            name=name,
            kind="tpu",
            num_devices=devices,
            capacity=generation.hbm_bytes,
            device_bytes=(used,) * devices,
            buffer_bytes=buffers,
            program_bytes=program,
            by_table=by_table,
            location=dict.fromkeys(by_table, "all"),
            limits=tuple(needs),
            max_ids_per_chip_per_sample=per_sample,
            excesses=tuple(
                limits.sparse_core_excesses(
                    own, layout, partitioning, generation, pipelined=self.pipelined
                )
            ),
        )

    def _for_replicas(self, replicas: int) -> Plan:
        """The plan with an output shape for each feature.

        Raises:
          ValueError: If the replicas do not divide the batch.
        """
        features = []
        for spec in self.plan.features:
            config, shape = spec.config, spec.config.output_shape
            if shape is None or None in shape:
                assert self.batch_size is not None
                if self.batch_size % replicas:
                    raise ValueError(
                        f"{replicas} devices do not divide the batch of "
                        f"{self.batch_size}. Use a multiple."
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
