"""The configuration classes of tables and features.

A TableConfig or FeatureConfig is checked when it is made, and again when an embedding
or layer begins to use it; from then on it cannot be changed.
"""

from __future__ import annotations

import dataclasses
import math
import numbers
import operator
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np

from tpu_embedding import combiners, errors
from tpu_embedding.vocabulary import GrowingVocabulary, Hashing

INVALID_IDS: tuple[str, ...] = ("error", "drop", "mod")


@dataclasses.dataclass(frozen=True)
class RowStorage:
    """How the rows of a table are stored.

    Attributes:
      dtype: The name of this storage, a value of `TableConfig.dtype`.
      value_bytes: Bytes of a value.
      row_bytes_more: Bytes of a row in addition to those of its values.
      is_rounded: Whether updates are rounded to what the table can hold.
      is_coded: Whether the values are codes, with a scale and an offset for each row.
      first_dtype: The dtype that initializers are called with.
      stored_dtype: The dtype of the values in memory and in files.
      least_dim: The smallest number of columns.
    """

    dtype: str
    value_bytes: int
    row_bytes_more: int = 0
    is_rounded: bool = True
    is_coded: bool = False
    first_dtype: str = "float32"
    stored_dtype: str = "float32"
    least_dim: int = 1

    def row_bytes(self, dim: int) -> int:
        # Returns the bytes of a row of `dim` columns.
        return dim * self.value_bytes + self.row_bytes_more


STORAGES: Mapping[str, RowStorage] = {
    storage.dtype: storage
    for storage in (
        RowStorage("float32", 4, is_rounded=False),
        RowStorage("bfloat16", 2, first_dtype="bfloat16", stored_dtype="bfloat16"),
        RowStorage("int8", 1, 4, is_coded=True, stored_dtype="uint8", least_dim=16),
    )
}

# The dtypes in which tables can be stored.
DTYPES: tuple[str, ...] = tuple(STORAGES)
_MAX_SEED = 2**63 - 1
_ANY_ID = (-(2**63), 2**63 - 1)

# What the repr of TensorFlow's TableConfig shows.
_ALWAYS_SHOWN = (
    *("vocabulary_size", "dim", "initializer", "optimizer", "combiner", "name"),
    "quantization_config",
)


class _ChangeableUntilUsed:
    """Base of configs that can be changed until an embedding or layer uses them."""

    def freeze(self) -> None:
        # Forbids further changes.
        self.__dict__["_frozen"] = True

    def check_again(self) -> None:
        # Checks the attributes again, as they may have changed.
        if "_frozen" not in self.__dict__:
            self.__post_init__()

    def __post_init__(self) -> None:
        """Checks the attributes and brings them into one form."""
        raise NotImplementedError

    def __setattr__(self, name: str, value: Any) -> None:
        if "_frozen" in self.__dict__:
            raise self._refusal(name, f"changed to {value!r}")
        super().__setattr__(name, value)

    def __delattr__(self, name: str) -> None:
        if "_frozen" in self.__dict__:
            raise self._refusal(name, "deleted")
        super().__delattr__(name)

    def _refusal(self, name: str, change: str) -> AttributeError:
        cls = type(self).__name__
        return AttributeError(
            f"`{name}` of this {cls} cannot be {change}: an embedding or layer already "
            f"uses the {cls}. Change it earlier, or create a new one with "
            f"dataclasses.replace(config, {name}=...)."
        )

    def __getstate__(self) -> dict[str, Any]:
        # No embedding uses the copy yet, so it can be changed.
        state = dict(self.__dict__)
        state.pop("_frozen", None)
        return state


@dataclasses.dataclass(frozen=True)
class QuantizationConfig:
    """Simulates the quantization of each value looked up, before the combiner.

      x = clip(x, lower, upper);  h = (upper - lower) / (num_buckets - 1)
      x = floor((x - lower) / h + 0.5) * h + lower

    The stored table does not change, and gradients pass through unchanged.

    Attributes:
      num_buckets: Number of different values, at least 2.
      lower: The smallest value.
      upper: The largest value.
    """

    num_buckets: int
    lower: float
    upper: float

    def __post_init__(self) -> None:
        if not errors.is_int(self.num_buckets):
            raise errors.argument_type("num_buckets", self.num_buckets, "an int")
        if self.num_buckets < 2:
            raise errors.argument_value("num_buckets", self.num_buckets, ">= 2")
        for argument, limit in (("lower", self.lower), ("upper", self.upper)):
            if not isinstance(limit, numbers.Real) or isinstance(limit, bool):
                raise errors.argument_type(argument, limit, "a number")
            if not math.isfinite(limit):
                raise errors.argument_value(argument, limit, "finite")
        if self.lower >= self.upper:
            raise errors.argument_value("upper", self.upper, f"above {self.lower!r}")


@dataclasses.dataclass(eq=False)
class TableConfig(_ChangeableUntilUsed):
    """Describes one embedding table of shape [vocabulary_size, dim].

    Tables compare by identity: two equal configurations are two tables, and
    features that hold the same object share one table. The attributes can be changed
    until an embedding or layer uses the table. Arguments, their order and
    defaults are those of tf.tpu.experimental.embedding.TableConfig, plus the keywords
    from `invalid_ids` on.

    >>> TableConfig(1000, 16, combiner="sum", name="films").dtype
    'float32'

    Attributes:
      vocabulary_size: Number of rows V, a GrowingVocabulary or a Hashing.
      dim: Number of columns D.
      initializer: A callable of (shape, dtype) that returns the whole table, the name
        of a Keras initializer, such as "uniform", or None for a truncated normal with
        mean 0 and standard deviation 1 / sqrt(dim). If it has a method `by_rows`, like
        RowIdInitializer, each server or process may make only its own rows.
      optimizer: Overrides the optimizer of the whole embedding. It is not checked
        here, because the Keras layer also accepts names and Keras optimizers.
      combiner: "mean", "sum" or "sqrtn", or a CustomCombiner of this package or of
        tf.tpu.experimental.embedding.
      name: A unique name, or None for "table_0", "table_1", ...
      quantization_config: A QuantizationConfig, or None.
      layout: The way in which a TPU stores the table, or None.
      dtype: The dtype of the stored rows: "float32", "bfloat16" or "int8", or a dtype
        object of that name. Slots, sums and activations are always float32. "int8"
        needs `dim` >= 16: see docs/memory.md.
      invalid_ids: The policy for ids below 0 or not below V: "error" fails the call
        and changes nothing, "drop" ignores the entry, "mod" uses the id modulo V.
      rounding_seed: Seed of the random numbers that round the updates of a bfloat16
        or int8 table, an int from 0 to 2**63 - 1; None derives it from the table's
        name. See docs/semantics.md.
      placement: In a job of several processes "rows" divides the table over them,
        "whole" keeps it in one of them, and None leaves it to
        `DistributedOptions.placement`. See docs/distributed.md.
      string_ids: Whether ids may be strings; the id of a string is its Fingerprint64
        modulo 2**63 - 1. Needs a GrowingVocabulary or a Hashing.

    Raises:
      ValueError: If a value is not allowed.
      TypeError: If `name`, `rounding_seed` or `quantization_config` is of the wrong
        type.
      NotImplementedError: For the dtype int32, and for a CustomCombiner with a Hashing.
      AttributeError: On assignment, once an embedding or layer uses the table.
    """

    vocabulary_size: Any  # Any, so that pyright accepts it wherever an int is used.
    dim: int
    initializer: Callable[..., Any] | str | None = None
    optimizer: Any = None
    combiner: Any = "mean"
    name: str | None = None
    quantization_config: QuantizationConfig | None = None
    layout: Any = None
    dtype: str = "float32"
    invalid_ids: str = dataclasses.field(default="error", kw_only=True)
    rounding_seed: int | None = dataclasses.field(default=None, kw_only=True)
    placement: str | None = dataclasses.field(default=None, kw_only=True)
    string_ids: bool = dataclasses.field(default=False, kw_only=True)

    def __post_init__(self) -> None:
        self.vocabulary_size = _plain(self.vocabulary_size)
        self.dim = _plain(self.dim)
        for argument, size in (("vocabulary_size", self.max_rows), ("dim", self.dim)):
            errors.check_int(argument, size, 1)
        named = self.initializer is None or isinstance(self.initializer, str)
        if not named and not callable(self.initializer):
            raise errors.argument_value(
                "initializer",
                self.initializer,
                "None, a callable or the name of a Keras initializer",
            )
        _check_name(self.name)
        check_invalid_ids(self.invalid_ids)
        any_id = self.id_range == _ANY_ID
        if any_id and self.invalid_ids != "error":
            raise errors.argument_value(
                "invalid_ids", self.invalid_ids, '"error" if every int64 is a valid id'
            )
        errors.check_flag("string_ids", self.string_ids)
        if self.string_ids and not any_id:
            raise errors.argument_value(
                "string_ids",
                True,
                "False if `vocabulary_size` is a number; only a Hashing or a "
                "GrowingVocabulary supports it",
            )
        self.combiner = combiners.convert_combiner(self.combiner)
        if self.hashing is not None:
            self.hashing.width(self.dim)
            if self.custom_combiner is not None:
                raise NotImplementedError(
                    "A Hashing does not support a CustomCombiner. Use one of the named "
                    "combiners, or a static `vocabulary_size`."
                )
        self.dtype = _dtype_name(self.dtype)
        if self.dim < self.storage.least_dim:
            raise errors.argument_value(
                "dim",
                self.dim,
                f'>= {self.storage.least_dim} with `dtype="{self.dtype}"`; shorter '
                'rows need "float32" or "bfloat16"',
            )
        _check_seed(self.rounding_seed, self.dtype)
        if self.placement not in (None, "rows", "whole"):
            raise errors.argument_value(
                "placement", self.placement, 'None, "rows" or "whole"'
            )
        if self.shares_row and self.placement == "rows":
            raise errors.argument_value(
                "placement",
                self.placement,
                'None or "whole" if the table has a shared row',
            )
        self.quantization_config = _quantization(self.quantization_config)

    def __repr__(self) -> str:
        """Returns TensorFlow's text plus the other arguments that are not defaults."""
        parts = [
            f"{field.name}={getattr(self, field.name)!r}"
            for field in dataclasses.fields(self)
            if field.name in _ALWAYS_SHOWN or getattr(self, field.name) != field.default
        ]
        return f"TableConfig({', '.join(parts)})"

    @property
    def storage(self) -> RowStorage:
        # How the rows are stored.
        return STORAGES[self.dtype]

    @property
    def vocabulary(self) -> GrowingVocabulary | None:
        # The vocabulary if it grows, else None.
        grows = isinstance(self.vocabulary_size, GrowingVocabulary)
        return self.vocabulary_size if grows else None

    @property
    def shares_row(self) -> bool:
        # Whether the ids of a growing table that have no row share one.
        return self.vocabulary is not None and self.vocabulary.unknown == "shared_row"

    @property
    def hashing(self) -> Hashing | None:
        # The Hashing, or None.
        hashed = isinstance(self.vocabulary_size, Hashing)
        return self.vocabulary_size if hashed else None

    @property
    def stored(self) -> TableConfig:
        # The table of the stored rows: a static one if this table is hashed.
        if self.hashing is None:
            return self
        return dataclasses.replace(
            self,
            vocabulary_size=self.hashing.num_rows,
            dim=self.hashing.width(self.dim),
            string_ids=False,
        )

    @property
    def max_rows(self) -> int:
        # The number of rows; for a growing table, the largest number allowed.
        if self.hashing is not None:
            return self.hashing.num_rows
        vocabulary = self.vocabulary
        return self.vocabulary_size if vocabulary is None else vocabulary.max_rows

    @property
    def id_range(self) -> tuple[int, int]:
        # The smallest and the largest id.
        any_id = self.vocabulary is not None or self.hashing is not None
        return _ANY_ID if any_id else (0, self.vocabulary_size - 1)

    @property
    def refuses_ids(self) -> bool:
        # Whether some ids raise an error.
        return self.invalid_ids == "error" and self.id_range != _ANY_ID

    @property
    def custom_combiner(self) -> combiners.CustomCombiner | None:
        # The combiner if it is a CustomCombiner, else None.
        custom = isinstance(self.combiner, combiners.CustomCombiner)
        return self.combiner if custom else None

    @property
    def entry_combiner(self) -> str:
        # The combiner for gains of entries, "sum" for a CustomCombiner.
        return self.combiner if self.custom_combiner is None else "sum"


@dataclasses.dataclass(eq=False)
class FeatureConfig(_ChangeableUntilUsed):
    """Describes one feature: the table to look up, and the shape of the result.

    Features compare by identity. The attributes can be changed until an embedding or
    layer uses the feature. Arguments, their order and defaults are those of
    tf.tpu.experimental.embedding.FeatureConfig.

    >>> table = TableConfig(1000, 16)
    >>> FeatureConfig(table, output_shape=[8, 2]).output_shape
    TensorShape([8, 2])

    Attributes:
      table: A TableConfig, of this package or of tf.tpu.experimental.embedding.
      max_sequence_length: L > 0 gives activations [B, L, D], one position for each
        entry, truncated or padded with zeros. Each position is combined alone, so a
        weight other than 0 has no effect under "mean", and only its sign matters under
        "sqrtn"; use "sum" to scale rows. 0 combines the entries.
      validate_weights_and_indices: Accepted for compatibility with TensorFlow and
        ignored: ids are always checked, and samples without ids are zeros.
      output_shape: Shape of the activations without D, for each replica; None
        takes it from build() or from the input. Kept as a tuple whose unknown
        axes are None, with `rank`, `as_list` and `num_elements` of a tf.TensorShape.
      name: A name for messages and for SparseCore, or None.
      salt: The salt of this feature, from 0 to 2**63 - 1, which replaces that of the
        table's Hashing: an id has different rows in two features with different
        salts. None keeps the salt of the Hashing.

    Raises:
      ValueError: If a value is not allowed, if both `max_sequence_length` and
        `output_shape` are set, or if `salt` is set and the table has no Hashing.
      TypeError: If `output_shape` or `name` is of the wrong type.
      AttributeError: On assignment, once an embedding or layer uses the feature.
    """

    table: Any
    max_sequence_length: int = 0
    validate_weights_and_indices: bool = True
    output_shape: Any = None
    name: str | None = None
    salt: int | None = dataclasses.field(default=None, kw_only=True)

    def __post_init__(self) -> None:
        table, length = self.table, self.max_sequence_length
        if not all(hasattr(table, a) for a in ("vocabulary_size", "dim", "combiner")):
            raise errors.argument_value(
                "table",
                table,
                "a TableConfig, of this package or of tf.tpu.experimental.embedding",
            )
        errors.check_int("max_sequence_length", length, 0)
        if not isinstance(self.validate_weights_and_indices, bool):
            raise errors.argument_value(
                "validate_weights_and_indices",
                self.validate_weights_and_indices,
                "a bool",
            )
        _check_name(self.name)
        self.output_shape = _shape(self.output_shape)
        if length and self.output_shape is not None:
            called = f" called {self.name!r}" if self.name else ""
            raise ValueError(
                f"A feature{called} cannot have both `max_sequence_length` and "
                f"`output_shape`. Received: {length} and {self.output_shape}. Leave "
                "one of them at its default."
            )
        if self.salt is not None and getattr(table, "hashing", None) is None:
            raise ValueError(
                f"A feature has the salt {self.salt!r}, but its table is not hashed. "
                "Pass a Hashing as the table's `vocabulary_size`, or leave `salt` out."
            )
        _ = self.hashing  # Checks the salt.

    @property
    def hashing(self) -> Hashing | None:
        """The Hashing that gives this feature's ids rows; None if none does."""
        hashing = getattr(self.table, "hashing", None)
        if hashing is None or self.salt is None:
            return hashing
        return dataclasses.replace(hashing, salt=self.salt)


@dataclasses.dataclass(frozen=True)
class DistributedOptions:
    """Says how the processes of a MultiWorkerMirroredStrategy share tables.

    In a single process, where nothing travels, the options have no effect. Under
    ParameterServerStrategy, `placement` places tables on the servers, `wire_dtype`
    applies to what travels to and from them, and a `timeout_seconds` other than the
    default raises NotImplementedError.

    >>> DistributedOptions(wire_dtype="bfloat16").placement
    'auto'

    Attributes:
      placement: For tables whose own `placement` is None: "rows" divides each over the
        processes, "whole" keeps each in one process, "auto" chooses for each by the
        bytes that travel, memory and the load of the processes.
      wire_dtype: "float32", or "bfloat16": rows, activations and gradients of float32
        travel as bfloat16, rounded to the nearest. It halves the bytes; the numbers
        that arrive have 8 significant bits, so results differ from those of one
        process. What stays in its process is not rounded. Rows of bfloat16 tables
        travel as they are.
      timeout_seconds: How many seconds, at least 1, a process waits in a call until
        every other live process makes the same call. It must cover what only one of
        them does in between, such as tracing a function or writing a file.

    Raises:
      ValueError: If a value is not allowed.
    """

    placement: str = "auto"
    wire_dtype: str = "float32"
    timeout_seconds: int = 300

    def __post_init__(self) -> None:
        if self.placement not in ("auto", "rows", "whole"):
            raise errors.argument_value(
                "placement", self.placement, '"auto", "rows" or "whole"'
            )
        if self.wire_dtype not in ("float32", "bfloat16"):
            raise errors.argument_value(
                "wire_dtype", self.wire_dtype, '"float32" or "bfloat16"'
            )
        errors.check_int("timeout_seconds", self.timeout_seconds, 1)


@dataclasses.dataclass(frozen=True)
class SparseCoreEmbeddingConfig:
    """Says how TPUEmbeddingV2 lays out tables and batches for SparseCores.

    Fields, their order and defaults are those of
    tf.tpu.experimental.embedding.SparseCoreEmbeddingConfig, plus
    `stock_feature_counts`, `minibatching` and `shard_loads`. The limits concern the
    buffers of a TPU (or of the software TPU); the host engine has no such buffers and
    keeps every id.

    >>> SparseCoreEmbeddingConfig(max_ids_per_table={"films": 512}).allow_id_dropping
    False

    Attributes:
      disable_table_stacking: Make each table a stack of its own.
      max_ids_per_chip_per_sample: Capacity of the per-device id buffer, in ids per
        sample of a stack; at least 1.
      max_ids_per_table: For each stack name, the number of ids that one SparseCore may
        request from another SparseCore in one step; 256 for stacks without an entry.
      max_unique_ids_per_table: The same limit and default for distinct ids.
      allow_id_dropping: Drop the ids that exceed a limit instead of failing.
      initialize_tables_on_host: Create the initial values on the host instead of on
        the TPU.
      enable_fast_table_initialization: Initialize a whole stack with the initializer of
        its first table, on the TPU. The values differ from those of docs/semantics.md.
      stock_feature_counts: Count samples as TensorFlow's TPUEmbeddingV2 does, which
        counts only the first feature of a stack. Set it for checkpoints of that class.
      minibatching: Split a batch that exceeds the limits of a table into minibatches,
        up to 64, instead of failing. All replicas must split alike, so with several
        replicas only lookups inside strategy.run support it.
      shard_loads: For each table name, how many ids (in any unit) have the remainder
        0, 1, ... modulo the number of all SparseCores, as a profile reports it
        (`estimator.EmbeddingProfiler.shard_loads`). The tables of a stack are then
        rotated so that the SparseCores share the load evenly, which TensorFlow's
        stacker cannot do. The rotation changes the layout of checkpoints. The host
        engine ignores it.

    Raises:
      TypeError: If a field is of the wrong type.
      ValueError: If a limit is below 1, or a load is negative.
    """

    disable_table_stacking: bool = False
    max_ids_per_chip_per_sample: int = 64
    max_ids_per_table: Mapping[str, int] | None = None
    max_unique_ids_per_table: Mapping[str, int] | None = None
    allow_id_dropping: bool = False
    initialize_tables_on_host: bool = True
    enable_fast_table_initialization: bool = False
    stock_feature_counts: bool = dataclasses.field(default=False, kw_only=True)
    minibatching: bool = dataclasses.field(default=False, kw_only=True)
    shard_loads: Mapping[str, Sequence[float]] | None = dataclasses.field(
        default=None, kw_only=True
    )

    def __post_init__(self) -> None:
        for flag in (
            "disable_table_stacking",
            "allow_id_dropping",
            "initialize_tables_on_host",
            "enable_fast_table_initialization",
            "stock_feature_counts",
            "minibatching",
        ):
            errors.check_flag(flag, getattr(self, flag))
        argument = "max_ids_per_chip_per_sample"
        object.__setattr__(self, argument, _limit(argument, getattr(self, argument)))
        for argument in ("max_ids_per_table", "max_unique_ids_per_table"):
            limits = getattr(self, argument)
            if limits is not None:
                object.__setattr__(self, argument, _limits(argument, limits))
        if self.shard_loads is not None:
            object.__setattr__(self, "shard_loads", _loads(self.shard_loads))


def check_invalid_ids(value: object) -> None:
    """Raises ValueError unless `value` is one of `INVALID_IDS`."""
    if value not in INVALID_IDS:
        raise errors.argument_value("invalid_ids", value, f"one of {INVALID_IDS}")


def _limits(argument: str, limits: object) -> dict[str, int]:
    """Copies the limits: the user may change the dict later."""
    if not isinstance(limits, Mapping) or not all(isinstance(k, str) for k in limits):
        raise errors.argument_type(
            argument, limits, "a dict from stack names to limits, or None"
        )
    return {
        name: _limit(f"{argument}[{name!r}]", limit) for name, limit in limits.items()
    }


def _limit(argument: str, limit: Any) -> int:
    """Returns a limit as an int; `compute_sparse_core_stats` gives tensors."""
    try:
        found = 0 if isinstance(limit, bool) else operator.index(limit)
    except TypeError:
        found = 0
    if found < 1:
        raise errors.argument_int(argument, limit, smallest=1)
    return found


def _loads(loads: object) -> dict[str, tuple[float, ...]]:
    argument, allowed = "shard_loads", "a dict from table names to sequences of numbers"
    if not isinstance(loads, Mapping) or not all(isinstance(k, str) for k in loads):
        raise errors.argument_type(argument, loads, allowed)
    found = {}
    for table, load in loads.items():
        name = f"{argument}[{table!r}]"
        if not isinstance(load, Sequence) or isinstance(load, str):
            raise errors.argument_type(name, load, "a sequence of numbers")
        for number in load:
            if not isinstance(number, numbers.Real) or isinstance(number, bool):
                raise errors.argument_type(name, number, "a sequence of numbers")
            if not 0 <= number < math.inf:
                raise errors.argument_value(name, number, "finite and >= 0")
        found[table] = tuple(float(number) for number in load)
    return found


def _check_name(name: object) -> None:
    if name is None:
        return
    if not isinstance(name, str):
        raise errors.argument_type("name", name, "a str or None")
    if not name:
        raise errors.argument_value("name", name, "None or not empty")


def _dtype_name(dtype: Any) -> str:
    # tf.float32 and np.dtype have a `name`; np.float32 is a class.
    name = getattr(dtype, "name", None) or getattr(dtype, "__name__", dtype)
    if name == "int32":
        raise NotImplementedError(
            "Tables of dtype int32 are not supported. Argument `dtype` must be "
            "float32, bfloat16 or int8."
        )
    if name not in DTYPES:
        raise errors.argument_value("dtype", dtype, "float32, bfloat16 or int8")
    return name


def _check_seed(seed: Any, dtype: str) -> None:
    if seed is None:
        return
    if not errors.is_int(seed):
        raise errors.argument_type("rounding_seed", seed, "an int or None")
    if not 0 <= seed <= _MAX_SEED:
        raise errors.argument_value("rounding_seed", seed, "from 0 to 2**63 - 1")
    if not STORAGES[dtype].is_rounded:
        raise ValueError(
            f"Argument `rounding_seed` is {seed}, but a table of dtype {dtype} is not "
            'rounded. Leave it at None, or set `dtype="bfloat16"` or "int8".'
        )


def _quantization(value: Any) -> QuantizationConfig | None:
    """Converts TensorFlow's QuantizationConfig, which has the same attributes."""
    if value is None or isinstance(value, QuantizationConfig):
        return value
    if not all(hasattr(value, a) for a in ("num_buckets", "lower", "upper")):
        raise errors.argument_type(
            "quantization_config", value, "a QuantizationConfig or None"
        )
    return QuantizationConfig(value.num_buckets, value.lower, value.upper)


class _OutputShape(tuple[int | None, ...]):
    """A tuple with the methods of tf.TensorShape that programs use."""

    __slots__ = ()
    __str__ = tuple.__repr__

    def __repr__(self) -> str:
        return f"TensorShape({list(self)})"  # In TensorFlow's repr of a feature.

    @property
    def rank(self) -> int:
        return len(self)

    def as_list(self) -> list[int | None]:
        return list(self)

    def num_elements(self) -> int | None:
        return None if None in self else math.prod(axis or 0 for axis in self)


def _shape(shape: Any) -> _OutputShape | None:
    """Returns a shape as a tuple, or None if it is None or of unknown rank."""
    if shape is None or getattr(shape, "rank", 0) is None:
        return None
    if hasattr(shape, "as_list"):
        return _OutputShape(shape.as_list())
    plain = _plain(shape)
    axes = plain if isinstance(plain, (list, tuple)) else (plain,)
    axes = tuple(_plain(axis) for axis in axes)
    if not all(axis is None or errors.is_int(axis) for axis in axes):
        raise errors.argument_type("output_shape", shape, "a sequence of ints or None")
    if any(axis is not None and axis < 0 for axis in axes):
        raise errors.argument_value("output_shape", shape, "without negative axes")
    return _OutputShape(axes)


def _plain(value: Any) -> Any:
    """Converts NumPy numbers and arrays, which TensorShape takes, to Python objects."""
    return value.tolist() if isinstance(value, (np.generic, np.ndarray)) else value
