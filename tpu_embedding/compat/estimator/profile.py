"""Statistics of the ids that a model sees, kept in `profile_data_directory`.

The files have a format of this package: JSON, one for each table. (The format of those
that libtpu wrote for the option of this name was never published.)
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
import math
import numbers
import os
from collections.abc import Mapping
from typing import Any

import numpy as np
from absl import logging

from tpu_embedding import errors
from tpu_embedding.checkpoint.writing import one_writer
from tpu_embedding.cluster_config import replace_file
from tpu_embedding.compat.interop.embedding_config_spec import require_spec

VERSION = 1
SAMPLE_FRACTION = 0.03
MIN_SAMPLES = 1000


@dataclasses.dataclass(frozen=True)
class TableStatistics:
    """Holds statistics of one table over the sampled examples.

    Attributes:
      examples: The number of examples that were sampled, over all features.
      ids: The number of ids of these examples.
      max_ids: The largest number of ids of one example.
      shard_ids: The number of ids in each shard.
    """

    examples: int
    ids: int
    max_ids: int
    shard_ids: tuple[int, ...]

    def merged(self, other: TableStatistics) -> TableStatistics:
        """Combines both statistics, as if they were sampled in one run.

        Args:
          other: Statistics of the same table and the same number of shards.
        """
        pairs = zip(self.shard_ids, other.shard_ids, strict=True)
        return TableStatistics(
            examples=self.examples + other.examples,
            ids=self.ids + other.ids,
            max_ids=max(self.max_ids, other.max_ids),
            shard_ids=tuple(a + b for a, b in pairs),
        )

    @property
    def mean_ids(self) -> float:
        """Ids for each example; NaN without examples."""
        return self.ids / self.examples if self.examples else math.nan

    @property
    def shard_loads(self) -> tuple[float, ...]:
        """Ids for each example and shard; NaN without examples."""
        return tuple(n / (self.examples or math.nan) for n in self.shard_ids)

    @property
    def imbalance(self) -> float:
        """The ids of the fullest shard over the mean of shards; NaN without ids."""
        mean = self.ids / len(self.shard_ids)
        return max(self.shard_ids) / mean if mean else math.nan


@dataclasses.dataclass(frozen=True)
class ProfileOptions:
    """Says how a profile is taken.

    Attributes:
      num_shards: The number of shards over which the rows are divided.
      task_count: The number of hosts of the run; a part of the file's name.
      sample_fraction: The share of the examples that is sampled.
      min_samples: With fewer examples a table's file is left as it is.
      seed: The seed of the choice of examples.
    """

    num_shards: int = 1
    task_count: int = 1
    sample_fraction: float = SAMPLE_FRACTION
    min_samples: int = MIN_SAMPLES
    seed: int = 0

    def __post_init__(self) -> None:
        for name in ("num_shards", "task_count", "min_samples"):
            errors.check_int(name, getattr(self, name), 1)
        share = self.sample_fraction
        if not isinstance(share, numbers.Real) or not 0 < share <= 1:
            raise errors.argument_value(
                "sample_fraction", share, "a number above 0 and at most 1"
            )


class EmbeddingProfiler:
    """Samples examples and merges their statistics into the files of a folder.

    A hash of the seed, the feature and the example's running number chooses examples:
    the same ones in every run. No id is stored, and no number of a model depends on the
    profiler.
    """

    def __init__(self, spec: Any, options: ProfileOptions | None = None) -> None:
        """Makes the folder.

        Args:
          spec: An EmbeddingConfigSpec with a `profile_data_directory`.
          options: How the profile is taken.

        Raises:
          TypeError: If `spec` is not an EmbeddingConfigSpec.
          ValueError: If the spec has no folder, or its folder is a file.
        """
        require_spec(spec)
        folder = spec.profile_data_directory
        if not folder:
            raise ValueError(
                "An EmbeddingProfiler needs a spec with `profile_data_directory`."
            )
        self._folder = os.fspath(folder)
        if os.path.exists(self._folder) and not os.path.isdir(self._folder):
            raise ValueError(
                f"`profile_data_directory` {self._folder!r} is a file, not a folder."
            )
        os.makedirs(self._folder, exist_ok=True)
        self._options = options or ProfileOptions()
        self._strategy = spec.partition_strategy
        self._tables = spec.table_to_config()
        self._table_of = {f: c.table_id for f, c in spec.feature_to_config().items()}
        self._paths = {
            table: os.path.join(self._folder, self._name(table) + ".json")
            for table in self._tables
        }
        self._seen = dict.fromkeys(self._table_of, 0)
        self._found = {table: self._nothing() for table in self._tables}

    def observe(self, feature: str, ids: Any, examples: Any, count: int) -> None:
        """Takes one batch of one feature.

        Args:
          feature: The key of the feature.
          ids: The ids, int [n].
          examples: The number of each id's example in the batch, int [n].
          count: The number of examples of the batch.

        Raises:
          ValueError: If the spec has no such feature, an id is outside of its table, an
            example is outside of the batch, or `ids` and `examples` differ in length.
          TypeError: If ids or examples are not integers.
        """
        if feature not in self._table_of:
            raise ValueError(
                f"The profile's spec has no feature {feature!r}. It has "
                f"{', '.join(self._table_of)}."
            )
        table = self._table_of[feature]
        ids, examples = (_integers(feature, given) for given in (ids, examples))
        if ids.ndim != 1 or ids.shape != examples.shape:
            raise ValueError(
                f"Feature {feature!r}: `ids` and `examples` must be of one shape [n]. "
                f"Received: {ids.shape} and {examples.shape}."
            )
        size = self._tables[table].vocabulary_size
        for name, values, limit in (("ids", ids, size), ("examples", examples, count)):
            wrong = values[(values < 0) | (values >= limit)]
            if wrong.size:
                raise ValueError(
                    f"Feature {feature!r}: `{name}` must be >= 0 and < {limit}. "
                    f"Received: {int(wrong[0])}."
                )
        first = self._seen[feature]
        self._seen[feature] = first + count
        chosen = self._chosen(feature, np.arange(first, first + count))
        ids = ids[chosen[examples]]
        lengths = np.bincount(examples, minlength=count)[chosen]
        shards = np.bincount(
            self._shards(table, ids), minlength=self._options.num_shards
        )
        found = TableStatistics(
            examples=int(chosen.sum()),
            ids=len(ids),
            max_ids=int(lengths.max(initial=0)),
            shard_ids=tuple(int(n) for n in shards),
        )
        self._found[table] = self._found[table].merged(found)

    def flush(self) -> None:
        """Merges the statistics into the files; warns if that fails."""
        for table, found in self._found.items():
            if found.examples < self._options.min_samples:
                continue
            path = self._paths[table]
            try:
                with one_writer(path):  # Other runs wait until this file is written.
                    before = self._read(table)
                    both = found.merged(before) if before else found
                    content = {
                        **self._key(table),
                        "statistics": dataclasses.asdict(both),
                    }
                    replace_file(path, json.dumps(content, indent=2))
            except OSError as error:
                logging.warning(
                    "The profile of table %r was not written: %s", table, error
                )
                continue
            self._found[table] = self._nothing()

    def load(self) -> dict[str, TableStatistics]:
        """Returns the stored statistics by table, without tables that have no file."""
        loaded = {table: self._read(table) for table in self._tables}
        return {table: found for table, found in loaded.items() if found is not None}

    def _nothing(self) -> TableStatistics:
        return TableStatistics(0, 0, 0, (0,) * self._options.num_shards)

    def shard_loads(self) -> dict[str, tuple[float, ...]]:
        """Computes the `shard_loads` of a SparseCoreEmbeddingConfig from the files.

        The planner then rotates the tables of a stack so that rows that are often
        looked up are on different SparseCores.

        Returns:
          The ids for each example, by shard, of each table with a profile.

        Raises:
          ValueError: If the profile was not taken over shards as SparseCores have them.
        """
        if self._strategy != "mod":
            raise ValueError(
                f"This profile was taken with partition_strategy={self._strategy!r}, "
                "but the SparseCore of a row is its id modulo the number of "
                'SparseCores. Create a profile with partition_strategy="mod" and '
                "ProfileOptions(num_shards=...), the total number of SparseCores."
            )
        found = self.load()
        return {table: numbers.shard_loads for table, numbers in found.items()}

    def _chosen(self, feature: str, numbers: np.ndarray) -> np.ndarray:
        """Returns whether each example is sampled."""
        digest = hashlib.sha256(f"{self._options.seed} {feature}".encode()).digest()
        with np.errstate(over="ignore"):
            x = numbers.astype(np.uint64) + np.frombuffer(digest[:8], np.uint64)
            # The finaliser of SplitMix64 (Steele et al., 2014).
            x = (x ^ (x >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
            x = (x ^ (x >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
            x = x ^ (x >> np.uint64(31))
        return x / 2.0**64 < self._options.sample_fraction

    def _shards(self, table: str, ids: np.ndarray) -> np.ndarray:
        shards = self._options.num_shards
        if self._strategy == "mod":
            return ids % shards
        return ids // -(-self._tables[table].vocabulary_size // shards)

    def _key(self, table: str) -> dict[str, Any]:
        """Returns what identifies a file: the parameters of its table and run."""
        config = self._tables[table]
        return {
            "version": VERSION,
            "table": table,
            "vocabulary_size": config.vocabulary_size,
            "dimension": config.dimension,
            "combiner": config.combiner,
            "num_features": list(self._table_of.values()).count(table),
            "partition_strategy": self._strategy,
            "task_count": self._options.task_count,
            "num_shards": self._options.num_shards,
        }

    def _name(self, table: str) -> str:
        text = json.dumps(self._key(table), sort_keys=True)
        return hashlib.sha256(text.encode()).hexdigest()[:32]

    def _read(self, table: str) -> TableStatistics | None:
        """Reads a table's file, or returns None if there is no valid one."""
        path = self._paths[table]
        if not os.path.exists(path):
            return None
        try:
            with open(path, encoding="utf-8") as file:
                content = json.load(file)
            if {name: content[name] for name in self._key(table)} != self._key(table):
                raise ValueError("it belongs to another version or table")
            return _statistics(content["statistics"], self._options.num_shards)
        except (ValueError, KeyError, TypeError) as error:
            logging.warning(
                "%s is not a valid profile, so a new one is started: %s", path, error
            )
            return None


def _integers(feature: str, given: Any) -> np.ndarray:
    """Returns ids or examples as int64; fractions are refused, not cut."""
    values = np.asarray(given)
    if values.size and not np.issubdtype(values.dtype, np.integer):
        raise TypeError(
            f"Feature {feature!r}: `ids` and `examples` must be integers. Received "
            f"dtype {values.dtype}. Cast them, e.g. with `.astype(np.int64)`."
        )
    return values.astype(np.int64)


def _statistics(counts: dict[str, Any], num_shards: int) -> TableStatistics:
    """Parses a file; raises ValueError, KeyError or TypeError for a foreign file."""
    fields = dataclasses.fields(TableStatistics)
    found = TableStatistics(**{field.name: counts[field.name] for field in fields})
    found = dataclasses.replace(found, shard_ids=tuple(found.shard_ids))
    all_counts = (found.examples, found.ids, found.max_ids, *found.shard_ids)
    if not all(type(count) is int and count >= 0 for count in all_counts):
        raise ValueError("its counts are not whole numbers >= 0")
    if len(found.shard_ids) != num_shards or sum(found.shard_ids) != found.ids:
        raise ValueError("its shards do not add up")
    return found


def observe_batch(
    profiler: EmbeddingProfiler, batch: Mapping[str, Any], lengths: Mapping[str, int]
) -> None:
    """Takes the features of one step, SparseTensorValues [rows, n] or ids [rows].

    `lengths` has the number of rows for each example of each feature: the positions of
    a sequence, or 0 for other features.
    """
    for feature, value in batch.items():
        ids, rows, count = value, np.arange(len(value)), len(value)
        if hasattr(value, "indices"):
            ids, rows = value.values, value.indices[:, 0]
            count = int(value.dense_shape[0])
        length = max(lengths[feature], 1)
        profiler.observe(feature, ids, rows // length, count // length)
