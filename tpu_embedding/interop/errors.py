"""The wording of the errors of `tpu_embedding.interop`.

As in `tpu_embedding.errors`: each function returns the exception.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

_DOCUMENTED = "`feature_columns`, or both `feature_to_config_dict` and"


def _type(value: object) -> str:
    cls = value if isinstance(value, type) else type(value)
    module = "" if cls.__module__ == "builtins" else f"{cls.__module__}."
    return f"{module}{cls.__qualname__}"


def _names(names: Iterable[object]) -> str:
    return ", ".join(repr(name) for name in names)


# Arguments of all classes.


def argument_value(argument: str, value: object, allowed: str) -> ValueError:
    """An argument whose value is not allowed."""
    return ValueError(f"Argument `{argument}` must be {allowed}. Received: {value!r}.")


def argument_type(argument: str, value: object, allowed: str) -> TypeError:
    """An argument of the wrong type."""
    return TypeError(
        f"Argument `{argument}` must be {allowed}. Received: {value!r} of type "
        f"{_type(value)}."
    )


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
        f"{_type(column)}."
    )


def single_feature_column(column: object) -> TypeError:
    """One column, or no column at all, in place of several."""
    return TypeError(
        f"Argument `feature_columns` must be a list; each element is {_COLUMNS}. "
        f"Received: {column!r} of type {_type(column)}. Put a single column into a "
        "list."
    )


def optimization_parameters(value: object, allowed: Sequence[str]) -> ValueError:
    """Something else than a *Parameters object."""
    return ValueError(
        f"Argument `optimization_parameters` must be one of {', '.join(allowed)}. "
        f"Received: {value!r} of type {_type(value)}."
    )


def feature_config(feature: str, value: object) -> TypeError:
    """A value in feature_to_config_dict of another class."""
    return TypeError(
        f"feature_to_config_dict[{feature!r}] must be a FeatureConfig of "
        f"tpu_embedding.interop. Received: {value!r} of type {_type(value)}."
    )


def unknown_table(feature: str, table: str, tables: Iterable[str]) -> ValueError:
    """A feature of a table that is not there."""
    return ValueError(
        f"Feature {feature!r} refers to table {table!r}, which is not in "
        f"`table_to_config_dict`. Its tables are {_names(sorted(tables))}."
    )


def table_config(table: str, value: object) -> TypeError:
    """A value in table_to_config_dict of another class."""
    return TypeError(
        f"table_to_config_dict[{table!r}] must be a TableConfig of "
        f"tpu_embedding.interop. Received: {value!r} of type {_type(value)}."
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
        f"Feature column {column.name!r} of type {_type(column)} describes no TPU "
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


def parameters_without_rule(where: str, parameters: str) -> NotImplementedError:
    """*Parameters whose optimizer this library does not have."""
    return NotImplementedError(
        f"{where}: {parameters} cannot be carried over, because this release has no "
        "optimizer of that rule. It has Adagrad, AdagradMomentum, Adam, FTRL "
        "and SGD."
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


def profile_not_carried() -> NotImplementedError:
    """No profile is written yet."""
    return NotImplementedError(
        "`profile_data_directory` cannot be carried: this release writes no profile. "
        "Leave it at None; no number depends on it."
    )


def unused_table(table: str) -> ValueError:
    """A table that no feature looks up."""
    return ValueError(
        f"Table {table!r} of `table_to_config_dict` is used by no feature. Leave it "
        "out, or add a feature that looks it up."
    )


# Checkpoints of the removed software.


def no_checkpoint(path: str) -> ValueError:
    """No checkpoint at a path."""
    return ValueError(
        f"There is no checkpoint at {path!r}. Pass the prefix of one (without .index), "
        "or the folder of a model, in which a file `checkpoint` names the latest."
    )


def no_variable(
    key: str, found: Sequence[str], names: Iterable[str], path: str
) -> ValueError:
    """No variable for a table or slot, or several."""
    matches = (
        f"{len(found)} match: {_names(sorted(found))}" if found else "none matches"
    )
    return ValueError(
        f"Exactly one variable of the checkpoint {path!r} must belong to {key!r}, and "
        f"{matches}. The checkpoint has {_names(sorted(names))}. Name the right one "
        f"with name_map={{{key!r}: ...}}."
    )


def unknown_name(key: str, known: Iterable[str]) -> ValueError:
    """A key of name_map that names no table or slot."""
    return ValueError(
        f"`name_map` has the key {key!r}, but the spec has {_names(sorted(known))}."
    )


def imported_shape(
    table: str,
    part: str,
    name: str,
    shape: Sequence[int],
    expected: Sequence[int],
) -> ValueError:
    """A variable of another shape than the spec says."""
    return ValueError(
        f"Table {table!r}, {part}: the checkpoint's variable {name!r} has shape "
        f"{tuple(shape)}, and by the spec it would be {tuple(expected)}. Correct the "
        "spec, or name another variable with `name_map`."
    )


def other_tables(imported: Iterable[str], ours: Iterable[str]) -> ValueError:
    """An embedding with other tables than the imported ones."""
    return ValueError(
        f"The imported tables are {_names(sorted(imported))}, and those of the "
        f"embedding are {_names(sorted(ours))}. Make it with "
        "`spec.to_tpu_embedding()`, or give its TableConfigs these names."
    )


def other_slots(table: str, slot: str, ours: Iterable[str]) -> ValueError:
    """A slot that the embedding's optimizer does not have."""
    return ValueError(
        f"Table {table!r}: the imported slot {slot!r} has no counterpart among "
        f"{_names(ours)} of the embedding. Give the table the optimizer of the spec."
    )


def assigned_shape(
    table: str, part: str, shape: Sequence[int], expected: Sequence[int]
) -> ValueError:
    """An imported array that does not fit the embedding's variable."""
    return ValueError(
        f"Table {table!r}, {part}: the imported array has shape {tuple(shape)}, the "
        f"embedding's variable {tuple(expected)}."
    )
