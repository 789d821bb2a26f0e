"""The resolved plan: tables with names and optimizers, features with paths."""

from __future__ import annotations

import dataclasses
import functools
import zlib
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np

from tpu_embedding.config import STORAGES, FeatureConfig, TableConfig
from tpu_embedding.optimizers.base import ENGINES, SEVERAL_MACHINES, Optimizer
from tpu_embedding.vocabulary import GrowingVocabulary, Hashing, RowHash

HASHING = "hashing"  # The end of the name of a Hashing in checkpoints.
UPDATES = "_updates"  # The name of the count of updates in checkpoints.
MAX_ROWS = 2**31 - 1  # Rows are numbered by int32, as on TPUs.


class ArraySpec(NamedTuple):
    """The shape of a table or slot.

    Attributes:
      name: "parameters", or the name of the slot.
      rows: The number of rows; for a growing table the largest one.
      columns: The number of columns.
      dtype: "float32", "bfloat16" or "int8".
    """

    name: str
    rows: int
    columns: int
    dtype: str

    @property
    def bytes(self) -> int:
        """The size of all rows; for int8 with scales and offsets."""
        return self.rows * STORAGES[self.dtype].row_bytes(self.columns)


@dataclasses.dataclass(frozen=True, eq=False)
class TableSpec:
    """One table of the plan.

    Attributes:
      index: Index in `Plan.tables`.
      name: The user's name, or "table_<index>".
      config: The user's TableConfig, converted; for a hashed table the static config
        of its rows.
      key: The object that the user passed, the key of every public dict.
      optimizer: The table's own, else that of the whole embedding, else None.
      features: Indices of the features that look up the table, ascending.
      hashing: The Hashing that gives ids rows, or None.
    """

    index: int
    name: str
    config: TableConfig
    key: Any
    optimizer: Optimizer | None
    features: tuple[int, ...]
    hashing: Hashing | None = None

    def arrays(self) -> list[ArraySpec]:
        """Returns the shapes of the table and its slots."""
        rows, dim = self.config.max_rows, self.config.dim
        slots = self.optimizer.slots if self.optimizer else ()
        return [
            ArraySpec("parameters", rows, dim, self.config.dtype),
            *(
                ArraySpec(s.name, rows, 1 if s.per_row else dim, "float32")
                for s in slots
            ),
        ]

    @property
    def function(self) -> str | None:
        """The class that calls a user function in each step, or None."""
        if self.optimizer is not None and self.optimizer.is_custom:
            return "CustomOptimizer"
        return None if self.config.custom_combiner is None else "CustomCombiner"

    @property
    def growth(self) -> GrowingVocabulary:
        """The vocabulary of the table, which must be a growing one."""
        assert self.config.vocabulary is not None
        return self.config.vocabulary

    @property
    def key_dtype(self) -> str:
        """The dtype of the keys of rows in batches: their numbers, or ids."""
        return "int32" if self.config.vocabulary is None else "int64"

    @property
    def key_bytes(self) -> int:
        """The size of the key of a row in messages, in bytes."""
        return np.dtype(self.key_dtype).itemsize

    @property
    def is_rounded(self) -> bool:
        """Whether updates are rounded to what the table can hold."""
        return self.config.storage.is_rounded

    @property
    def rounding_seed(self) -> int:
        """The seed that the user gave, else the CRC-32 of the table's name."""
        seed = self.config.rounding_seed
        return zlib.crc32(self.name.encode()) if seed is None else seed


@dataclasses.dataclass(frozen=True, eq=False)
class FeatureSpec:
    """One feature of the plan. In hashed tables a user's feature becomes one per hash.

    Attributes:
      index: Index in `Plan.features`, the order of tf.nest.flatten.
      path: The feature's place in the user's structure, e.g. "user/0".
      config: The user's FeatureConfig, converted.
      table: Index of its table.
      shape_source: The source of `config.output_shape`, for error messages.
      row_hash: The hash that gives ids rows in a hashed table, or None.
      string_ids: Whether ids may be strings.
    """

    index: int
    path: str
    config: FeatureConfig
    table: int
    shape_source: str = "FeatureConfig.output_shape"
    row_hash: RowHash | None = None
    string_ids: bool = False

    @property
    def is_first(self) -> bool:
        """Whether it is the first or only feature of the plan for a user's feature."""
        return self.row_hash is None or self.row_hash.k == 0


@dataclasses.dataclass(frozen=True)
class Plan:
    """All tables, in order of first use, and all features."""

    tables: tuple[TableSpec, ...]
    features: tuple[FeatureSpec, ...]

    @functools.cached_property
    def paths(self) -> tuple[str, ...]:
        """The place of each feature in the user's structure."""
        return tuple(spec.path for spec in self.features)

    @functools.cached_property
    def user_features(self) -> tuple[FeatureSpec, ...]:
        """The first feature of the plan for each feature of the user."""
        return tuple(spec for spec in self.features if spec.is_first)

    @functools.cached_property
    def growing(self) -> tuple[TableSpec, ...]:
        """The tables that grow."""
        return tuple(t for t in self.tables if t.config.vocabulary is not None)

    @functools.cached_property
    def static(self) -> tuple[TableSpec, ...]:
        """The tables that do not grow."""
        return tuple(t for t in self.tables if t.config.vocabulary is None)

    @property
    def tables_with_clock(self) -> list[str]:
        """The names of the growing tables whose rows age by a clock."""
        return [spec.name for spec in self.growing if spec.growth.clock]

    @functools.cached_property
    def dims(self) -> tuple[int, ...]:
        """The width of the table of each feature."""
        return tuple(self.tables[spec.table].config.dim for spec in self.features)


def make_plan(
    paths: Sequence[str],
    features: Sequence[FeatureConfig],
    keys: Mapping[TableConfig, Any],
    optimizer: Optimizer | None,
    *,
    custom: bool = False,
    growing: bool = False,
) -> Plan:
    """Makes the plan: names the tables and gives each its optimizer.

    Args:
      paths: The path of each feature.
      features: The features; each table is a TableConfig of this package.
      keys: The object that the user passed for each table.
      optimizer: The optimizer of tables without one of their own, or None.
      custom: Whether the caller supports CustomOptimizer and CustomCombiner.
      growing: Whether the caller supports a GrowingVocabulary.
    """
    numbers = {
        config: i for i, config in enumerate(dict.fromkeys(f.table for f in features))
    }
    stored = [config.stored for config in numbers]
    specs: list[FeatureSpec] = []
    for path, feature in zip(paths, features, strict=True):
        number = numbers[feature.table]
        specs += feature_specs(len(specs), path, feature, number, stored[number])
    tables = []
    for config, index in numbers.items():
        indices = [spec.index for spec in specs if spec.table == index]
        tables.append(
            TableSpec(
                index=index,
                name=config.name or f"table_{index}",
                config=stored[index],
                key=keys[config],
                optimizer=optimizer if config.optimizer is None else config.optimizer,
                features=tuple(indices),
                hashing=config.hashing,
            )
        )
    _check_names(tables, [spec.path for spec in specs])
    _check_sizes(tables)
    if not custom:
        refuse_custom(tables)
    if not growing:
        takers = "only TPUEmbedding, TPUEmbeddingV2 and keras.TPUEmbedding take"
        refuse_growing(tables, takers)
    return Plan(tables=tuple(tables), features=tuple(specs))


def feature_specs(
    first: int, path: str, config: FeatureConfig, table: int, stored: TableConfig
) -> list[FeatureSpec]:
    """Makes the plan's features for one feature of the user: one for each hash.

    Args:
      first: Index of the first of these features in the plan.
      path: The path of the feature.
      config: The feature, with the TableConfig of the user, converted.
      table: Index of the table.
      stored: `config.table.stored`.
    """
    hashing, strings = config.hashing, config.table.string_ids
    if hashing is None:
        return [FeatureSpec(first, path, config, table, string_ids=strings)]
    config = dataclasses.replace(config, table=stored, salt=None)
    return [
        FeatureSpec(
            first + k,
            path,
            config,
            table,
            row_hash=RowHash(hashing, k),
            string_ids=strings,
        )
        for k in range(hashing.hashes)
    ]


def stacking_kind(spec: TableSpec) -> tuple[Any, ...]:
    """Returns the properties that tables of a stack share, besides the padded width.

    User functions see the table's own width, and the weights of a combiner belong to
    one table; TensorFlow's stacker does not know of them. The ids of a growing table
    are not rows that a stack could number.
    """
    custom = spec.optimizer is not None and spec.optimizer.is_custom
    return (
        spec.optimizer,
        spec.config.quantization_config,
        spec.config.dim if custom else None,
        None if spec.config.custom_combiner is None else spec.index,
        None if spec.config.vocabulary is None else spec.index,
    )


def refuse_custom(tables: Sequence[TableSpec], *, optimizers: bool = True) -> None:
    """Refuses CustomCombiners, and with `optimizers` also CustomOptimizers."""
    for table in tables:
        if optimizers and table.optimizer is not None and table.optimizer.is_custom:
            raise NotImplementedError(
                f"Table {table.name!r}: only TPUEmbeddingV2 takes a CustomOptimizer, "
                "as in TensorFlow. Use TPUEmbeddingV2, or one of the named optimizers."
            )
        if table.config.custom_combiner is not None:
            raise NotImplementedError(
                f"Table {table.name!r}: only TPUEmbeddingV2 takes a CustomCombiner, "
                "as in TensorFlow. Use TPUEmbeddingV2, or one of the named combiners."
            )


def refuse_growing(tables: Sequence[TableSpec], reason: str) -> None:
    """Raises NotImplementedError, with the reason, if a table grows."""
    for table in tables:
        if table.config.vocabulary is not None:
            raise NotImplementedError(
                f"Table {table.name!r}: {reason} a GrowingVocabulary. Use "
                "TPUEmbedding, TPUEmbeddingV2 or keras.TPUEmbedding on CPUs, or a "
                "static `vocabulary_size`."
            )


def require_dtypes(plan: Plan, allowed: tuple[str, ...], what: str) -> None:
    """Refuses tables of other dtypes than `what` stores."""
    for table in plan.tables:
        if table.config.dtype not in allowed:
            dtype = table.config.dtype
            raise NotImplementedError(
                f"Table {table.name}: {what} stores tables as {' or '.join(allowed)}, "
                f"not as {dtype}. "
                'Set `dtype="float32"` here; the host engine of TPUEmbedding, '
                f"TPUEmbeddingV2 and keras.TPUEmbedding has tables of {dtype}."
            )


def require_options(plan: Plan, engine: str) -> None:
    """Refuses options of tables and optimizers that an engine of `ENGINES` lacks."""
    for table in plan.tables:
        if engine in SEVERAL_MACHINES and table.function is not None:
            raise NotImplementedError(
                f"Table {table.name!r}: {ENGINES[engine]} does not support a "
                f"{table.function}, whose Python function runs in one process. Use one "
                "of the named optimizers and combiners, or another strategy."
            )
        for option in table.optimizer.options if table.optimizer else ():
            value = getattr(table.optimizer, option.name)
            if value == option.off or engine not in option.lacking:
                continue
            *others, last = [n for e, n in ENGINES.items() if e not in option.lacking]
            have = f"{', '.join(others)} and {last}" if others else last
            raise NotImplementedError(
                f"Table {table.name!r}: `{option.name}={value!r}` of its optimizer is "
                f"not supported by {ENGINES[engine]}, only by {have}. Leave it at "
                f"{option.off!r}."
            )


def _check_names(tables: Sequence[TableSpec], paths: Sequence[str]) -> None:
    seen: dict[str, str] = {}  # Name -> path of the first feature that uses it.
    for table in tables:
        path = paths[table.features[0]]
        if table.name in seen:
            raise ValueError(
                f"Two different tables are called {table.name!r}: the one of feature "
                f"{seen[table.name]} and the one of feature {path}. Table names must "
                "be unique. Give them different names, or pass the same TableConfig "
                "object to share one table."
            )
        seen[table.name] = path
    # Slots are saved as "<table>/<slot>", the count of updates as "_updates".
    slots = {slot.name for t in tables if t.optimizer for slot in t.optimizer.slots}
    slots |= {HASHING for table in tables if table.hashing}
    for name in seen:
        cuts = [at for at, character in enumerate(name) if character == "/"]
        if name == UPDATES or any(
            name[:at] in seen and name[at + 1 :] in slots for at in cuts
        ):
            raise ValueError(
                f"A table cannot be called {name!r}: checkpoints use this name for a "
                "slot or for the count of updates. Give the table another name."
            )


def _check_sizes(tables: Sequence[TableSpec]) -> None:
    for table in tables:
        rows, dim = table.config.max_rows, table.config.dim
        if rows > MAX_ROWS:
            raise ValueError(
                f"Table {table.name!r} has vocabulary_size={rows}, but row numbers are "
                f"int32, as on TPUs: a table has at most {MAX_ROWS} rows. Split the "
                "ids among several tables."
            )
        optimizer = table.optimizer
        if optimizer is not None and optimizer.table_dim not in (None, dim):
            raise ValueError(
                f"Table {table.name!r} has dim={dim}, but {type(optimizer).__name__} "
                f"supports only tables of dim={optimizer.table_dim}. Use that dim, or "
                "another optimizer."
            )
