"""Batches of ids as arrays, and what they need of SparseCores."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np

from tpu_embedding.layout.csr import Partitioning, custom_limit
from tpu_embedding.layout.plan import Plan
from tpu_embedding.layout.stacking import Layout
from tpu_embedding.planning.report import StackLimits, TableStatistics
from tpu_embedding.tpu_generations import Generation

_HEADROOM = 1.25  # Suggested limits are the needs of the sample times this.
_ENTRIES_MULTIPLE = 8  # Partitions are padded to multiples of it.


class FeatureIds(NamedTuple):
    """The ids of one feature in one batch.

    Attributes:
      ids: int64 [entries].
      samples: int64 [entries], the sample of each id, ascending.
      positions: int64 [entries], the position of each id in its sample, ascending.
      num_samples: The number of samples of the batch.
    """

    ids: np.ndarray
    samples: np.ndarray
    positions: np.ndarray
    num_samples: int

    def entries(self, chosen: np.ndarray) -> FeatureIds:
        """Returns some of the entries."""
        ids, samples, positions = (array[chosen] for array in self[:3])
        return FeatureIds(ids, samples, positions, self.num_samples)

    def split(self, length: int) -> FeatureIds:
        """Turns each of the first `length` positions of every sample into a sample."""
        if length == 1:
            return self
        own = self.entries(self.positions < length)
        return own._replace(
            samples=own.samples * length + own.positions,
            positions=np.zeros_like(own.positions),
            num_samples=own.num_samples * length,
        )


# The ids of each feature of a plan, in the order of its features.
Batch = Sequence[FeatureIds]


def to_feature_ids(path: str, value: Any) -> FeatureIds:
    """Converts a dense array, a RaggedTensor or a SparseTensor of ids."""
    if hasattr(value, "row_splits"):
        if hasattr(value.values, "row_splits"):
            raise ValueError(
                f"Feature {path}: the sample has a RaggedTensor of several ragged "
                "axes. Merge them with merge_dims, so that each row has the ids of one "
                "sample."
            )
        lengths = np.diff(np.asarray(value.row_splits, np.int64))
        ids = np.asarray(value.values).reshape(-1)
        samples = np.repeat(np.arange(len(lengths)), lengths)
        positions = np.arange(len(ids)) - np.asarray(value.row_splits)[samples]
        count = len(lengths)
    elif hasattr(value, "dense_shape"):
        shape = np.asarray(value.dense_shape)
        ids, count = np.asarray(value.values), int(np.prod(shape[:-1]))
        *places, positions = np.asarray(value.indices).T
        samples = np.asarray(np.ravel_multi_index(tuple(places), tuple(shape[:-1])))
    else:
        dense = np.asarray(value)
        if dense.ndim == 0:
            raise ValueError(f"Feature {path}: the sample is a scalar. Batch it.")
        *places, width = dense.shape if dense.ndim > 1 else (len(dense), 1)
        ids, count = dense.reshape(-1), math.prod(places)
        samples, positions = np.divmod(np.arange(len(ids)), max(width, 1))
    if ids.dtype.kind not in "iuf":
        raise ValueError(
            f"Feature {path}: the sample has values of {ids.dtype}, but ids must be "
            "integers."
        )
    if ids.dtype.kind == "f" and (ids != np.floor(ids)).any():
        raise ValueError(
            f"Feature {path}: the sample has ids that are not whole numbers."
        )
    ids, samples, positions = (a.astype(np.int64) for a in (ids, samples, positions))
    return FeatureIds(ids, samples, positions, count)


@dataclasses.dataclass(frozen=True)
class Sample:
    """Batches of a data set, each the global batch of one step.

    Attributes:
      batches: The ids of each batch by feature, without those out of range.
      out_of_range: By table index, how many ids were out of range.
    """

    batches: list[list[FeatureIds]]
    out_of_range: dict[int, int]

    @classmethod
    def of(cls, plan: Plan, batches: Iterable[Batch]) -> Sample:
        """Applies the policy of each table for ids that are out of range.

        Each position of a sequence becomes a sample.
        """
        kept: list[list[FeatureIds]] = []
        out_of_range = dict.fromkeys(range(len(plan.tables)), 0)
        for batch in batches:
            own = []
            for spec, whole in zip(plan.features, batch, strict=True):
                feature = whole.split(spec.config.max_sequence_length or 1)
                config = plan.tables[spec.table].config
                first, last = config.id_range
                wrong = (feature.ids < first) | (feature.ids > last)
                out_of_range[spec.table] += int(wrong.sum())
                if config.invalid_ids == "mod":
                    own.append(feature._replace(ids=feature.ids % config.max_rows))
                else:
                    own.append(feature.entries(~wrong))
            kept.append(own)
        return cls(kept, out_of_range)

    def statistics(self, plan: Plan) -> list[TableStatistics]:
        """Counts the ids of each table."""
        found = []
        for table in plan.tables:
            per_step, distinct, per_sample, seen = [], [], [], np.zeros(0, np.int64)
            for batch in self.batches:
                ids = np.concatenate([batch[f].ids for f in table.features])
                unique = np.unique(ids)
                seen = np.union1d(seen, unique)
                per_step.append(len(ids))
                distinct.append(len(unique))
                used = sum(len(np.unique(batch[f].samples)) for f in table.features)
                per_sample.append(len(ids) / max(used, 1))
            found.append(
                TableStatistics(
                    table.name,
                    float(np.mean(per_step)),
                    float(np.mean(distinct)),
                    float(np.mean(per_sample)),
                    len(seen),
                    self.out_of_range[table.index],
                )
            )
        return found

    def _other_batches(self, plan: Plan, layout: Layout, replicas: int) -> str:
        """Returns why the batches do not fit so many replicas, or ""."""
        for spec, samples in zip(plan.features, layout.samples, strict=True):
            rows = (layout.output_shapes[spec.index] or ())[:1]
            found = max(batch[spec.index].num_samples for batch in self.batches)
            wanted = samples * replicas
            # Ragged rows may fill several axes.
            if found not in (wanted, math.prod(rows) * replicas):
                return (
                    "what the sample needs of SparseCores, because its batches of "
                    f"feature {spec.path} have {found} samples, but a step of "
                    f"{replicas} devices has {wanted}"
                )
        return ""

    def limits(
        self,
        plan: Plan,
        layout: Layout,
        partitioning: Partitioning,
        generation: Generation,
    ) -> tuple[list[StackLimits], int | None, str]:
        """Returns (stacks' limits, max_ids_per_chip_per_sample, why there are none)."""
        other = self._other_batches(plan, layout, partitioning.num_replicas)
        if other:
            return [], None, other
        found, per_sample = [], 1
        for index, stack in enumerate(layout.stacks):
            needs = [
                _need(plan, layout, partitioning, index, batch)
                for batch in self.batches
            ]
            compiled = custom_limit(plan, stack, partitioning.sparse_cores_per_device)
            own = _stack_limits(needs, partitioning, index, generation, compiled)
            wanted = int(own.required_ids * _HEADROOM)
            per_sample = max(per_sample, -(-wanted // max(stack.samples, 1)))
            found.append(own)
        return found, -(-per_sample // 8) * 8, ""


class _Need(NamedTuple):
    """The partitions and buffers that one batch needs of one stack.

    Attributes:
      partitions: The partitions with ids, ascending: SparseCore x shards + shard.
      counts: The number of ids of each of them.
      unique: The number of distinct ids of each of them.
      required: The size of the id buffer that each device needs.
    """

    partitions: np.ndarray
    counts: np.ndarray
    unique: np.ndarray
    required: np.ndarray


def _need(
    plan: Plan, layout: Layout, partitioning: Partitioning, stack: int, batch: Batch
) -> _Need:
    shards, cores = partitioning.num_shards, partitioning.sparse_cores_per_device
    partitions, rows = [], []
    for f in layout.stacks[stack].features:
        filled = batch[f]
        if len(layout.output_shapes[f] or ()) > 1:  # Ragged rows may fill several axes.
            number = layout.samples[f] * partitioning.num_replicas
            filled = filled.split(max(number // max(filled.num_samples, 1), 1))
        samples, ids = filled.samples, filled.ids
        table = layout.tables[plan.features[f].table]
        if not partitioning.features[f].max_valency:
            # An id that occurs twice in a sample is one entry of twice the gain.
            height = table.unsharded_shape[0]
            samples, ids = np.divmod(np.unique(samples * height + ids), height)
        # SparseCores have equal blocks of the samples, in order.
        core = samples * shards // max(filled.num_samples, 1)
        partitions.append(core * shards + table.division.owner(ids))
        rows.append(table.division.local(ids))
    partition, row = np.concatenate(partitions), np.concatenate(rows)
    found, counts = np.unique(partition, return_counts=True)
    height = layout.stacks[stack].rows_per_shard
    distinct = np.unique(partition * height + row) // height
    padded = -(-counts // _ENTRIES_MULTIPLE) * _ENTRIES_MULTIPLE
    required = np.bincount(
        found // (cores * shards), padded, minlength=partitioning.num_replicas
    )
    return _Need(
        found, counts, np.unique(distinct, return_counts=True)[1], required.astype(int)
    )


def _stack_limits(
    needs: Sequence[_Need],
    partitioning: Partitioning,
    index: int,
    generation: Generation,
    compiled: int | None,
) -> StackLimits:
    """Returns the limits of one stack; `compiled`, if not None, caps suggested ones."""
    stack, shards = partitioning.stacks[index], partitioning.num_shards
    partitions, counts, unique, required = map(np.concatenate, zip(*needs, strict=True))
    total = max(int(counts.sum()), 1)
    max_ids, max_unique = (int(own.max(initial=0)) for own in (counts, unique))
    multiple, caps = generation.id_multiple, [] if compiled is None else [compiled]
    suggested_unique = _suggested(
        max_unique, multiple, generation.max_unique_ids(shards), *caps
    )
    suggested = _suggested(
        max_ids, multiple, generation.max_ids(shards, suggested_unique), *caps
    )

    def beyond(ids: int, distinct: int) -> float:
        # Each distinct id beyond its limit stands for one entry at least.
        over = np.maximum(counts - ids, unique - distinct)
        return float(over.clip(0).sum() / total)

    capacity = stack.samples * partitioning.max_ids_per_chip_per_sample
    by_shard = np.bincount(partitions % shards, counts, shards)
    return StackLimits(
        stack=stack.name,
        max_ids=max_ids,
        max_unique_ids=max_unique,
        required_ids=int(required.max()),
        suggested_max_ids=suggested,
        suggested_max_unique_ids=suggested_unique,
        beyond_default=beyond(
            stack.max_ids_per_partition, stack.max_unique_ids_per_partition
        ),
        beyond_suggested=beyond(suggested, suggested_unique),
        dropped=float(np.maximum(required - capacity, 0).sum() / total),
        shard_balance=float(by_shard.max() / max(by_shard.mean(), 1e-9)),
    )


def without_sample(partitioning: Partitioning, generation: Generation) -> str:
    """Returns what one random id for each sample needs beyond the limits, or ""."""
    shards, cores = partitioning.num_shards, partitioning.sparse_cores_per_device
    found = []
    for stack in partitioning.stacks:
        mean = stack.samples / cores / shards
        # Ids are random, so the busiest partition gets more than the mean.
        ids = math.ceil(mean + 3 * math.sqrt(mean))
        distinct = math.ceil(expected_distinct(stack.rows // shards, ids))
        limits = stack.max_ids_per_partition, stack.max_unique_ids_per_partition
        if ids <= limits[0] and distinct <= limits[1]:
            continue
        multiple = generation.id_multiple
        unique = _suggested(distinct, multiple, generation.max_unique_ids(shards))
        most = _suggested(ids, multiple, generation.max_ids(shards, unique))
        found.append(
            f"{ids} ids ({distinct} distinct) of stack {stack.name}, but the limits "
            f"are {limits[0]} and {limits[1]}: set max_ids_per_table[{stack.name!r}] "
            f"to {most} and max_unique_ids_per_table[{stack.name!r}] to {unique}"
        )
    if not found or partitioning.minibatching:
        return ""
    return (
        "the first step would fail. With one random id for each sample, a "
        f"SparseCore may ask another for {'; for '.join(found)}. Or set "
        "minibatching=True, or plan with a sample."
    )


def _suggested(count: int, multiple: int, *most: int) -> int:
    wanted = -(-int(count * _HEADROOM) // multiple) * multiple
    return min(max(wanted, multiple), *most)


def expected_distinct(rows: int, entries: float) -> float:
    """Returns the mean number of distinct ids among uniformly distributed ones."""
    return rows * -np.expm1(entries * np.log1p(-1 / rows)) if rows > 1 else 1.0


@dataclasses.dataclass(frozen=True)
class Traffic:
    """The ids of each feature in one process's batch, measured or assumed.

    Attributes:
      samples: By feature, the number of samples of the process.
      entries: By feature, the number of ids.
      distinct: By table, the number of distinct ids.
    """

    samples: Mapping[int, float]
    entries: Mapping[int, float]
    distinct: Mapping[int, float]

    @classmethod
    def of(
        cls, plan: Plan, samples: Sequence[float], sample: Sample | None, processes: int
    ) -> Traffic:
        """Returns the traffic of one of `processes` that share a batch equally.

        `samples` gives the number of samples of the whole batch by feature. Without a
        `sample`, each of them has one id, and ids are distributed evenly.
        """
        if sample is None:
            entries = {f: count / processes for f, count in enumerate(samples)}
            distinct = {
                table.index: expected_distinct(
                    table.config.max_rows, sum(entries[f] for f in table.features)
                )
                for table in plan.tables
            }
            return cls(dict(entries), entries, distinct)
        batches = sample.batches

        def mean(count: Callable[[Batch], int]) -> float:
            return float(np.mean([count(batch) for batch in batches]))

        def of_the_first(feature: FeatureIds) -> np.ndarray:
            """Returns the ids of the first process."""
            end = -(-feature.num_samples // processes)
            return feature.ids[feature.samples < end]

        def distinct_ids(features: Sequence[int]) -> Callable[[Batch], int]:
            return lambda batch: len(
                np.unique(np.concatenate([of_the_first(batch[f]) for f in features]))
            )

        numbers = range(len(plan.features))
        return cls(
            {f: mean(lambda b, f=f: b[f].num_samples) / processes for f in numbers},
            {f: mean(lambda b, f=f: len(b[f].ids)) / processes for f in numbers},
            {table.index: mean(distinct_ids(table.features)) for table in plan.tables},
        )
