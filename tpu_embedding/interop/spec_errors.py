"""The wording of the errors of EmbeddingConfigSpec, its parts and its adapter.

As in `tpu_embedding.errors`: each function returns the exception.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

from tpu_embedding.errors import argument_type, type_name

_DOCUMENTED = "`feature_columns`, or both `feature_to_config_dict` and"


def _names(names: Iterable[object]) -> str:
    return ", ".join(repr(name) for name in names)


# EmbeddingConfigSpec, in the order of its checks.


def columns_and_dicts(columns: bool, features: bool, tables: bool) -> ValueError:
    """Neither way of describing the features, or both."""
    given = [
        name
        for name, there in (
            ("feature_columns", columns),
            ("feature_to_config_dict", features),
            ("table_to_config_dict", tables),
        )
        if there
    ]
    return ValueError(
        f"An EmbeddingConfigSpec takes exactly one of these: {_DOCUMENTED} "
        f"`table_to_config_dict`. Received: {', '.join(given) or 'none of them'} (what "
        "is empty counts as missing)."
    )


def partition_strategy(value: object) -> ValueError:
    """A partition strategy that does not exist."""
    return ValueError(
        f'Argument `partition_strategy` must be "div" or "mod". Received: {value!r}.'
    )


_COLUMNS = (
    "an embedding column of tf.compat.v1.tpu.experimental (embedding_column or "
    "shared_embedding_columns), or a numeric or embedding column of tf.feature_column"
)


def feature_column(column: object) -> TypeError:
    """Something among the feature columns that no spec takes."""
    return TypeError(
        f"Each of `feature_columns` must be {_COLUMNS}. Received: {column!r} of type "
        f"{type_name(column)}."
    )


def single_feature_column(column: object) -> TypeError:
    """One column, or no column at all, in place of several."""
    return TypeError(
        f"Argument `feature_columns` must be a list; each element is {_COLUMNS}. "
        f"Received: {column!r} of type {type_name(column)}. Put a single column into a "
        "list."
    )


def optimization_parameters(value: object, allowed: Sequence[str]) -> ValueError:
    """Something else than a *Parameters object."""
    return ValueError(
        f"Argument `optimization_parameters` must be one of {', '.join(allowed)}. "
        f"Received: {value!r} of type {type_name(value)}."
    )


def feature_config(feature: str, value: object) -> TypeError:
    """A value in feature_to_config_dict of another class."""
    return TypeError(
        f"feature_to_config_dict[{feature!r}] must be a FeatureConfig of "
        f"tpu_embedding.interop. Received: {value!r} of type {type_name(value)}."
    )


def unknown_table(feature: str, table: str, tables: Iterable[str]) -> ValueError:
    """A feature of a table that is not there."""
    return ValueError(
        f"Feature {feature!r} refers to table {table!r}, which is not in "
        f"`table_to_config_dict`. Its tables are {_names(sorted(tables))}."
    )


def config_dict(argument: str, value: object) -> TypeError:
    """Something else instead of a dict of configs."""
    return argument_type(argument, value, "a dict of configs by name")


def table_config(table: str, value: object) -> TypeError:
    """A value in table_to_config_dict of another class."""
    return TypeError(
        f"table_to_config_dict[{table!r}] must be a TableConfig of "
        f"tpu_embedding.interop. Received: {value!r} of type {type_name(value)}."
    )


def derived_field(field: str) -> TypeError:
    """A field of the spec that follows from the others."""
    return TypeError(
        f"`{field}` follows from `feature_columns` and cannot be replaced. Replace "
        "`feature_columns`."
    )


def unknown_fields(fields: Iterable[str]) -> ValueError:
    """Names that are no fields; ValueError as namedtuple has it."""
    return ValueError(f"EmbeddingConfigSpec has no field {_names(fields)}.")


# TableConfig and the *Parameters.


def two_learning_rates(number: object, function: object) -> ValueError:
    """A learning rate and a learning rate function for one table."""
    return ValueError(
        "Give a table `learning_rate` or `learning_rate_fn`, not both. Received: "
        f"learning_rate={number!r}, learning_rate_fn={function!r}."
    )


def clip_without_accumulation(parameters: str) -> ValueError:
    """Gradient limits need the summed gradient."""
    return ValueError(
        f"{parameters}: `clip_gradient_min` and `clip_gradient_max` limit the summed "
        "gradient of a row, so they need `use_gradient_accumulation=True`."
    )


def dense_adam_without_accumulation() -> ValueError:
    """Adam over all rows needs the summed gradient."""
    return ValueError(
        "AdamParameters: `lazy_adam=False` updates every row once per step, so it "
        "needs `use_gradient_accumulation=True`."
    )


def frequency_estimator_dimension(dimension: int) -> ValueError:
    """FrequencyEstimator over a table of vectors."""
    return ValueError(
        "FrequencyEstimatorParameters estimate one number for each row, so the table's "
        f"`dimension` must be 1. Received: {dimension}."
    )


# From columns to tables and features.


def unsupported_column(column: Any) -> TypeError:
    """A column that a spec may hold but that names no TPU table."""
    return TypeError(
        f"Feature column {column.name!r} of type {type_name(column)} describes no TPU "
        "embedding table. Leave it out of this call, or make it with "
        "embedding_column or shared_embedding_columns of "
        "tf.compat.v1.tpu.experimental."
    )


def feature_in_two_embeddings(feature: str, tables: Sequence[str]) -> ValueError:
    """One feature key in two embeddings."""
    return ValueError(
        f"Feature {feature!r} is used by two embedding columns (tables {tables[0]!r} "
        f"and {tables[1]!r}); one feature can look up one table only. Copy the "
        "feature under a second key in the input_fn."
    )


def shared_tables_differ(table: str, differing: str) -> ValueError:
    """Two groups of shared columns with one name that want different tables."""
    return ValueError(
        f"Two groups of shared columns use the name of table {table!r} but differ in "
        f"{differing}. Give each group its own `shared_embedding_collection_name`."
    )


# From a spec to this library.


def uncarried_argument(where: str, cls: type, error: Exception) -> Exception:
    """Arguments that TensorFlow 1 took unchecked, and that mean nothing."""
    return type(error)(f"{where}, {cls.__name__}: {error}")


def key_of_no_name(key: object) -> TypeError:
    """A feature or table that is called by something else than a name."""
    return TypeError(
        "Features and tables of an EmbeddingConfigSpec must have keys that are str. "
        f"Received: {key!r} of type {type_name(key)}."
    )


def no_weights(feature: str, key: str, features: Iterable[object]) -> ValueError:
    """Weights that are not in the batch."""
    return ValueError(
        f"The weights {key!r} of feature {feature!r} are not among the features, which "
        f"are {_names(features)}. Pass all of the batch's features."
    )


def parameters_missing(table: str) -> ValueError:
    """A table without any optimizer."""
    return ValueError(
        f"Table {table!r} has no `optimization_parameters`: give them to its "
        "TableConfig or to the EmbeddingConfigSpec."
    )


def clipping_limit_conflict(where: str) -> ValueError:
    """Two limits for one gradient."""
    return ValueError(
        f"{where}: `clipping_limit` of the spec and clip_gradient_min/max of the "
        "optimization parameters limit the same gradient. Give one of them."
    )


def clipping_limit_without_accumulation(where: str) -> ValueError:
    """The spec's limit needs the summed gradient too."""
    return ValueError(
        f"{where}: `clipping_limit` limits the summed gradient of a row, so it needs "
        "`use_gradient_accumulation=True` in the optimization parameters."
    )


def columns_not_carried(columns: Iterable[Any]) -> NotImplementedError:
    """A TPUEmbedding looks up TPU tables, and nothing else."""
    return NotImplementedError(
        f"Columns {_names(c.name for c in columns)} have no TPU embedding table, and "
        "cannot be carried into a TPUEmbedding. Give their features to the model "
        "itself, and leave the columns out of the spec; or take the parts with "
        "`spec.adapt()`."
    )


def multiplier_not_carried() -> NotImplementedError:
    """TPUEmbedding has nothing that would multiply gradients."""
    return NotImplementedError(
        "`experimental_gradient_multiplier_fn` cannot be carried into a TPUEmbedding. "
        "Take the parts with `spec.adapt()` and pass `adapted.scale(gradients, step)` "
        "to apply_gradients."
    )


def tensor_core_columns(columns: Iterable[Any], where: str) -> NotImplementedError:
    """Columns whose tables are dense variables of the model."""
    return NotImplementedError(
        f"{where}: columns {_names(c.name for c in columns)} have "
        'embedding_lookup_device="tpu_tensor_core". Their tables are trained by the '
        "model's own optimizer, not as TPU embedding tables. Make them without "
        "`embedding_lookup_device`."
    )


def serving_columns(columns: Iterable[Any]) -> ValueError:
    """Columns that are for serving only."""
    return ValueError(
        f"Columns {_names(c.name for c in columns)} have "
        'embedding_lookup_device="cpu", which is for serving and not for training. '
        "Make them without `embedding_lookup_device`."
    )


def no_tables() -> ValueError:
    """A spec of columns none of which has a TPU table."""
    return ValueError(
        "No column of the EmbeddingConfigSpec has a TPU embedding table. Add one of "
        "interop.embedding_column or interop.shared_embedding_columns; numeric and "
        "plain embedding columns alone need no spec."
    )


def gradient_multiplier(shape: object) -> ValueError:
    """A multiplier that is no single number."""
    return ValueError(
        "`experimental_gradient_multiplier_fn` must return a scalar, which multiplies "
        f"all gradients. Received shape {shape}."
    )


def profile_not_carried() -> NotImplementedError:
    """A TPUEmbedding takes no profile."""
    return NotImplementedError(
        "`profile_data_directory` cannot be carried into a TPUEmbedding. Give batches "
        "to an interop.EmbeddingProfiler(spec), or leave the option at None; no number "
        "depends on it."
    )


def no_profile_directory() -> ValueError:
    """A profiler without a place to write to."""
    return ValueError(
        "An EmbeddingProfiler needs a spec with `profile_data_directory`."
    )


def profile_of_other_shards(strategy: str) -> ValueError:
    """A profile that says nothing of SparseCores."""
    return ValueError(
        f"This profile was taken with partition_strategy={strategy!r}, but SparseCores "
        'hold rows by id modulo their number. Take one with partition_strategy="mod" '
        "and ProfileOptions(num_shards=...), the number of all SparseCores."
    )


def profile_feature(feature: object, known: Iterable[str]) -> ValueError:
    """A feature that the profiled spec lacks."""
    return ValueError(
        f"The profile's spec has no feature {feature!r}. It has {', '.join(known)}."
    )


def profile_shapes(feature: str, ids: object, examples: object) -> ValueError:
    """Ids that do not say which examples they are of."""
    return ValueError(
        f"Feature {feature!r}: `ids` and `examples` must be of one shape [n]. "
        f"Received: {ids} and {examples}."
    )


def profile_dtype(feature: str, dtype: object) -> TypeError:
    """Ids or numbers of examples that are no whole numbers."""
    return TypeError(
        f"Feature {feature!r}: `ids` and `examples` must be integers. Received dtype "
        f"{dtype}. Cast them, e.g. with `.astype(np.int64)`."
    )


def profile_value(feature: str, argument: str, value: int, limit: int) -> ValueError:
    """An id outside of its table, or an example outside of the batch."""
    return ValueError(
        f"Feature {feature!r}: `{argument}` must be >= 0 and < {limit}. "
        f"Received: {value}."
    )


def profile_directory_is_file(path: str) -> ValueError:
    """A file where a folder is wanted."""
    return ValueError(f"`profile_data_directory` {path!r} is a file, not a folder.")


def unused_table(table: str) -> ValueError:
    """A table that no feature looks up."""
    return ValueError(
        f"Table {table!r} of `table_to_config_dict` is used by no feature. Leave it "
        "out, or add a feature that looks it up."
    )
