"""Tables and features of TensorFlow 1, and the feature columns that describe them.

Columns are classified by their methods and fields, and not by their class, because
classes other than TensorFlow's may have them, too.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Iterable
from typing import Any, Protocol, runtime_checkable

import numpy as np
import tensorflow as tf
from absl import logging

from tpu_embedding import errors
from tpu_embedding.compat.interop.parameters import (
    FrequencyEstimatorParameters,
    check_parameters,
)

COMBINERS = ("mean", "sum", "sqrtn", None)

TABLE_PREFIX = "tbl_"
SEQUENCE_LENGTH_SUFFIX = "_seq_length_"

# The fields of columns without a TPU table that a spec may hold beside others.
_NUMERIC_FIELDS = ("key", "shape", "default_value", "normalizer_fn")
_EMBEDDING_FIELDS = ("categorical_column", "dimension", "combiner", "initializer")
_LOST = "use_safe_embedding_lookup"


@dataclasses.dataclass(frozen=True)
class TableConfig:
    """Describes one table of `table_to_config_dict`.

    Attributes:
      vocabulary_size: Number of rows, at least 1.
      dimension: Number of columns, at least 1.
      initializer: A callable of (shape, dtype); None becomes a truncated normal
        of standard deviation 1 / sqrt(dimension).
      combiner: "mean", "sum", "sqrtn", or None for features of one id for each sample.
      hot_id_replication: A hint to TPU v2-v4 that changes no number.
      learning_rate: The learning rate of this table alone; 0 freezes it.
      learning_rate_fn: A function of the global step, instead of `learning_rate`.
      optimization_parameters: The parameters of this table alone, or None.

    Raises:
      ValueError: If an argument is not as above.
    """

    vocabulary_size: int
    dimension: int
    initializer: Callable[..., Any] | None = None
    combiner: str | None = "mean"
    hot_id_replication: bool = False
    learning_rate: float | None = None
    learning_rate_fn: Callable[..., Any] | None = None
    optimization_parameters: Any = None

    def __post_init__(self) -> None:
        for argument in ("vocabulary_size", "dimension"):
            errors.check_int(argument, getattr(self, argument), 1)
        if self.initializer is not None and not callable(self.initializer):
            raise errors.argument_value(
                "initializer", self.initializer, "None or a callable"
            )
        if self.combiner not in COMBINERS:
            raise errors.argument_value(
                "combiner", self.combiner, '"mean", "sum", "sqrtn" or None'
            )
        if self.learning_rate is not None and self.learning_rate_fn is not None:
            raise ValueError(
                "Pass `learning_rate` or `learning_rate_fn`, not both. Received: "
                f"learning_rate={self.learning_rate!r}, "
                f"learning_rate_fn={self.learning_rate_fn!r}."
            )
        self._check_parameters()
        if self.initializer is None:
            initializer = tf.compat.v1.truncated_normal_initializer(
                mean=0.0, stddev=1 / math.sqrt(self.dimension)
            )
            object.__setattr__(self, "initializer", initializer)

    def _check_parameters(self) -> None:
        if self.optimization_parameters is None:
            return
        check_parameters(self.optimization_parameters)
        one = isinstance(self.optimization_parameters, FrequencyEstimatorParameters)
        if one and self.dimension != 1:
            raise ValueError(
                "FrequencyEstimatorParameters estimate one number for each row, so "
                f"the table's `dimension` must be 1. Received: {self.dimension}."
            )


@dataclasses.dataclass(frozen=True)
class FeatureConfig:
    """Describes one feature of `feature_to_config_dict`.

    Attributes:
      table_id: The key of its table in `table_to_config_dict`.
      max_sequence_length: Positions of a sequence; 0 combines the entries.
      weight_key: The key of the feature that holds the weights, or None.

    Raises:
      ValueError: If `max_sequence_length` is not an int of at least 0.
      TypeError: If `table_id` or `weight_key` is not a str.
    """

    table_id: str
    max_sequence_length: int = 0
    weight_key: str | None = None

    def __post_init__(self) -> None:
        errors.check_int("max_sequence_length", self.max_sequence_length, 0)
        if not isinstance(self.table_id, str):
            raise errors.argument_type("table_id", self.table_id, "a str")
        if not isinstance(self.weight_key, str | None):
            raise errors.argument_type("weight_key", self.weight_key, "a str or None")


@runtime_checkable
class EmbeddingColumn(Protocol):
    """Describes what a tf.compat.v1.tpu.experimental column says about a table."""

    @property
    def name(self) -> str:
        """The name of the column."""
        ...

    def get_feature_key_name(self) -> str:
        """Returns the key of the ids among the features."""
        ...

    def get_embedding_var_name(self) -> str:
        """Returns the name of the table; columns that share it have the same one."""
        ...

    def get_embedding_table_size(self) -> tuple[int, int]:
        """Returns the vocabulary size and the dimension."""
        ...

    def get_combiner(self) -> str | None:
        """Returns the combiner: "sum", "mean", "sqrtn", or None for one id a sample."""
        ...

    def get_initializer(self) -> Callable[..., Any]:
        """Returns the initializer of the table."""
        ...

    def get_weight_key_name(self) -> str | None:
        """Returns the key of the weights among the features, or None."""
        ...

    def get_max_sequence_length(self) -> int:
        """Returns a sequence's number of positions; 0 if the column combines ids."""
        ...

    def get_learning_rate_fn(self) -> Callable[..., Any] | None:
        """Returns the function from the step to the learning rate, or None."""
        ...

    def is_sequence_column(self) -> bool:
        """Says whether the ids are a sequence."""
        ...


def is_embedding_column(column: Any) -> bool:
    """Returns whether the column describes a TPU embedding table."""
    return isinstance(column, EmbeddingColumn)


def is_accepted(column: Any) -> bool:
    """Returns whether a spec takes the column, with a TPU table or without."""
    return (
        is_embedding_column(column)
        or _has_all(column, _NUMERIC_FIELDS)
        or _has_all(column, _EMBEDDING_FIELDS)
    )


def on_tensor_core(column: Any) -> bool:
    """Returns whether the column asks to be looked up on the tensor core."""
    return _device(column) == "TPU_TENSOR_CORE"


def refuse_tensor_core(where: str, columns: Iterable[Any] | None) -> None:
    """Raises NotImplementedError if there are columns of the tensor core."""
    names = [column.name for column in columns or ()]
    if names:
        raise NotImplementedError(
            f"{where}: columns {errors.quoted(names)} have "
            'embedding_lookup_device="tpu_tensor_core". Their tables are trained by '
            "the model's own optimizer, not as TPU embedding tables. Make them "
            "without `embedding_lookup_device`."
        )


def on_cpu(column: Any) -> bool:
    """Returns whether the column is for serving on a CPU only."""
    return _device(column) == "CPU"


def is_shared(column: Any) -> bool:
    """Returns whether the column shares a table with others by a common name."""
    return hasattr(column, "shared_embedding_column_creator") or hasattr(
        column, "shared_embedding_collection_name"
    )


def changes_ids(column: Any) -> bool:
    """Returns whether a CPU hashes the ids or looks them up, and a TPU does not."""
    inner = column
    while hasattr(inner, "categorical_column"):  # Weights and sequences wrap one.
        inner = inner.categorical_column
    return inner is not column and not hasattr(inner, "number_buckets")


def table_key(column: EmbeddingColumn) -> str:
    """Returns the key of the column's table in `table_to_config`."""
    return TABLE_PREFIX + column.get_embedding_var_name()


def get_configs_from_feature_columns(
    columns: Iterable[Any],
) -> tuple[dict[str, TableConfig], dict[str, FeatureConfig]]:
    """Returns the tables and features that TPU embedding columns describe.

    The name of a table is "tbl_" and the column's variable name. The key of a feature
    is that of its ids among the features.

    Args:
      columns: Columns of tf.compat.v1.tpu.experimental, or with the same methods.

    Returns:
      (table_to_config, feature_to_config).

    Raises:
      TypeError: If a column describes no TPU table.
      ValueError: If one feature is in two columns, or two groups of shared columns
        have one name and differ.
    """
    tables: dict[str, TableConfig] = {}
    features: dict[str, FeatureConfig] = {}
    for column in columns:
        if not is_embedding_column(column):
            raise TypeError(
                f"Feature column {column.name!r} of type {errors.type_name(column)} "
                "describes no TPU embedding table. Leave it out of this call, or "
                "make it with embedding_column or shared_embedding_columns of "
                "tf.compat.v1.tpu.experimental."
            )
        key, feature = table_key(column), column.get_feature_key_name()
        if feature in features:
            raise ValueError(
                f"Feature {feature!r} is used by two embedding columns (tables "
                f"{features[feature].table_id!r} and {key!r}); one feature can look up "
                "one table only. Copy the feature under a second key in the input_fn."
            )
        table = _table(column)
        if key in tables:
            _check_same(key, tables[key], table)
        tables[key] = table
        features[feature] = FeatureConfig(
            table_id=key,
            max_sequence_length=column.get_max_sequence_length(),
            weight_key=column.get_weight_key_name(),
        )
    return tables, features


def _device(column: Any) -> str:
    """Returns the name of the `embedding_lookup_device`, or ""."""
    device = getattr(column, "_embedding_lookup_device", None)
    return getattr(device, "name", "")


def _table(column: EmbeddingColumn) -> TableConfig:
    vocabulary_size, dimension = column.get_embedding_table_size()
    return TableConfig(
        vocabulary_size=vocabulary_size,
        dimension=dimension,
        initializer=column.get_initializer(),
        combiner=column.get_combiner(),
        learning_rate_fn=column.get_learning_rate_fn(),
    )


def _check_same(key: str, first: TableConfig, second: TableConfig) -> None:
    differing = [
        field
        for field in ("vocabulary_size", "dimension", "combiner", "learning_rate_fn")
        if getattr(first, field) != getattr(second, field)
    ]
    if not _same_initializer(first.initializer, second.initializer):
        differing.append("initializer")
    if differing:
        raise ValueError(
            f"Two groups of shared columns use the table name {key!r} but differ in "
            f"{' and '.join(differing)}. Give each group its own "
            "`shared_embedding_collection_name`."
        )


def _same_initializer(first: Any, second: Any) -> bool:
    """Returns whether both fill a table alike, even if they are two objects."""
    if first is second:
        return True
    if type(first) is not type(second) or not hasattr(first, "get_config"):
        return False
    one, other = first.get_config(), second.get_config()
    return one.keys() == other.keys() and all(
        np.array_equal(one[key], other[key]) for key in one
    )


def lost_fields(columns: list[Any] | None) -> list[Any]:
    """Returns for each column the fields that pickling a shared column loses."""
    return [getattr(column, _LOST, None) for column in columns or []]


def with_lost_fields(columns: list[Any] | None, lost: list[Any]) -> list[Any] | None:
    """Returns the columns, with the fields of `lost_fields` restored."""
    if columns is None:
        return None
    return [
        _with_lost(column, value) for column, value in zip(columns, lost, strict=True)
    ]


def _with_lost(column: Any, value: Any) -> Any:
    if value is None or getattr(column, _LOST) == value:
        return column
    # Columns are namedtuples with attributes, which their _replace would drop.
    fields = {**column._asdict(), _LOST: value}
    repaired = tuple.__new__(type(column), fields.values())
    vars(repaired).update(vars(column))
    return repaired


def _has_all(column: Any, fields: Iterable[str]) -> bool:
    return all(hasattr(column, field) for field in fields)


def warn_of_changed_ids(columns: Iterable[Any]) -> None:
    """Warns about columns that look up other rows in training than in an export."""
    names = [column.name for column in columns if changes_ids(column)]
    if names:
        logging.warning(
            "With use_tpu=True ids go to the tables unchanged. The hashing, "
            "vocabularies or buckets of columns %s apply only with use_tpu=False and "
            "in exported models, which then look up other rows. Convert ids in the "
            "input_fn, and use categorical_column_with_identity.",
            ", ".join(map(repr, names)),
        )


def warn_of_ignored_dict(name: str) -> None:
    """Warns that one of the two dicts has no effect beside feature columns."""
    logging.warning(
        "EmbeddingConfigSpec: `%s` is kept but has no effect with `feature_columns`.",
        name,
    )
