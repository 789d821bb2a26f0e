# length: all messages of interop stand in one place, each a few lines.
"""The wording of the errors of `tpu_embedding.interop`.

As in `tpu_embedding.errors`: each function returns the exception.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

from tpu_embedding.errors import argument_type, argument_value, type_name

__all__ = ["argument_type", "argument_value"]

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


def profile_directory_is_file(path: str) -> ValueError:
    """A file where a folder is wanted."""
    return ValueError(f"`profile_data_directory` {path!r} is a file, not a folder.")


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


def damaged_checkpoint(path: str, reason: object) -> ValueError:
    """A checkpoint's file that is cut off, lost or changed."""
    return ValueError(
        f"The checkpoint {path!r} cannot be read: {reason}. Copy its .index and all of "
        "its .data files again."
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
    table: str, part: str, shape: Sequence[Any], expected: Sequence[Any]
) -> ValueError:
    """An imported array that does not fit the embedding's variable."""
    return ValueError(
        f"Table {table!r}, {part}: the imported array has shape {tuple(shape)}, the "
        f"embedding's variable {tuple(expected)}."
    )


# The trainer.


def private_tensorflow(names: Sequence[str], version: str) -> ImportError:
    """A TensorFlow without what the trainer leans on."""
    return ImportError(
        f"tpu_embedding.interop's TPUEstimator needs {', '.join(names)}, which "
        f"TensorFlow {version} does not have. Install TensorFlow 2.21; "
        "EmbeddingConfigSpec, its adapter and the checkpoint import need none of them."
    )


def refused_option(cls: str, argument: str, value: object) -> NotImplementedError:
    """An option of a cluster or of a split model."""
    return NotImplementedError(
        f"{cls}: `{argument}={value!r}` cannot be carried: the trainer runs in one "
        "process, on one core. Leave it at its default."
    )


def two_checkpoint_intervals(steps: object, seconds: object) -> ValueError:
    """Steps and seconds between checkpoints."""
    return ValueError(
        "RunConfig takes `save_checkpoints_steps` or `save_checkpoints_secs`, not "
        f"both. Received: {steps!r} and {seconds!r}."
    )


def missing_in_spec(name: str, mode: str) -> ValueError:
    """Something that a mode needs and the model_fn did not give."""
    return ValueError(
        f"The spec that a model_fn returns for mode {mode!r} must have `{name}`."
    )


def column_of_layer(function: str, column: Any) -> ValueError:
    """A column that gives no tensor of the wanted kind."""
    return ValueError(
        f"{function} takes columns with a tensor of that kind. Received: {column!r} of "
        f"type {type_name(column)}. Wrap categorical columns in an embedding or "
        "indicator column."
    )


def export_output(name: str, output: object) -> TypeError:
    """An export output of another class."""
    return TypeError(
        f"export_outputs[{name!r}] must be a PredictOutput, ClassificationOutput or "
        f"RegressionOutput. Received: {output!r} of type {type_name(output)}."
    )


def no_default_signature(names: Iterable[str]) -> ValueError:
    """Several outputs, and none of them the default."""
    return ValueError(
        'One of several `export_outputs` must be called "serving_default". Received: '
        f"{_names(names)}."
    )


def one_input(output: str, inputs: Iterable[str]) -> ValueError:
    """Several inputs for a signature that has one."""
    return ValueError(
        f"{output} takes one receiver tensor of serialized examples. Received: "
        f"{_names(inputs)}. Use PredictOutput for several."
    )


def missing_feature(key: str, features: Iterable[str]) -> ValueError:
    """An embedding's feature is not among the features."""
    return ValueError(
        f"Feature {key!r} of the EmbeddingConfigSpec is not among the features of the "
        f"input_fn: {_names(sorted(features))}."
    )


def ragged_feature(key: str) -> ValueError:
    """Ragged ids."""
    return ValueError(
        f"Feature {key!r} is a RaggedTensor, which feature columns do not take. "
        "Convert it with `.to_sparse()` in the input_fn."
    )


def string_feature(key: str) -> ValueError:
    """String ids."""
    return ValueError(
        f"Feature {key!r} holds strings. A TPU takes integer ids only, so vocabularies "
        "have to be looked up in the input_fn."
    )


def one_id_each(key: str, shape: object) -> ValueError:
    """Several ids where there is no combiner."""
    return ValueError(
        f"Feature {key!r}: a table without combiner takes one id for each sample, of "
        f"shape [batch] or [batch, 1]. Received shape {shape}."
    )


def id_rank(key: str, shape: object) -> ValueError:
    """Ids of a rank that only sequences have."""
    return ValueError(
        f"Feature {key!r}: ids must be of shape [batch] or [batch, n]. Received shape "
        f"{shape}. Only sequence columns take ids of rank 3."
    )


def missing_weights(key: str, weight_key: str) -> ValueError:
    """A weight feature that is not there, or was used by another feature."""
    return ValueError(
        f"Cannot find the weights {weight_key!r} of feature {key!r} among the "
        "features. Each weighted feature needs a weight feature of its own."
    )


def dense_weights(key: str, weight_key: str) -> ValueError:
    """Dense weights, or weights of dense ids."""
    return ValueError(
        f"Feature {key!r} and its weights {weight_key!r} must both be SparseTensors on "
        "a TPU. Convert dense ones in the input_fn."
    )


def sequence_rank(key: str, rank: int | None) -> ValueError:
    """A sequence of a rank that has no meaning."""
    return ValueError(
        f"Sequence feature {key!r} must be of rank 2 [batch, position], or of rank 3 "
        f"[batch, position, entry]. Received rank {rank}."
    )


def duplicate_gradients(key: str) -> RuntimeError:
    """The model's optimizer differentiated twice."""
    return RuntimeError(
        f"The gradients of feature {key!r} were computed twice. A model_fn must "
        "differentiate once with respect to all trainable variables."
    )


def unused_column(column: str) -> RuntimeError:
    """A column of the spec that the model_fn did not use."""
    return RuntimeError(
        f"The model_fn did not use column {column!r} of the EmbeddingConfigSpec. Pass "
        "the same column to tpu_embedding.interop.dense_features (or to DenseFeatures "
        "of tf_keras), or take it out of the spec."
    )


def batch_size(name: str, value: object) -> ValueError:
    """A batch size that is missing or no positive int."""
    return ValueError(
        f"Argument `{name}` must be an int >= 1 with use_tpu=True. Received: {value!r}."
    )


def reserved_params(names: Iterable[str]) -> ValueError:
    """Params that the trainer sets itself."""
    return ValueError(
        f"`params` must not contain {_names(names)}, which the TPUEstimator sets."
    )


def input_pipeline(value: Any) -> ValueError:
    """An input configuration that embeddings do not go with."""
    return ValueError(
        "With an EmbeddingConfigSpec `per_host_input_for_training` must be PER_HOST_V1 "
        f"or PER_HOST_V2. Received: {value.name}."
    )


def mod_on_cpu() -> ValueError:
    """The mod strategy where tables are variables of the model."""
    return ValueError(
        'partition_strategy="mod" is for tables on a TPU. Use "div" with use_tpu=False '
        "or eval_on_tpu=False."
    )


def dicts_on_cpu(where: str) -> NotImplementedError:
    """Tables without columns where columns would look them up."""
    return NotImplementedError(
        f"{where} looks embeddings up with feature columns, and a spec of "
        "`feature_to_config_dict` has none. Use `feature_columns`."
    )


def model_fn_arguments(function: str, name: str) -> ValueError:
    """A model_fn that takes something not, or takes too much."""
    return ValueError(
        f"{function} must take `{name}`, because the TPUEstimator has one to pass."
    )


def model_fn_result(value: object, allowed: str) -> ValueError:
    """A model_fn that returns something else."""
    return ValueError(
        f"The model_fn must return {allowed}. Received: {value!r} of type "
        f"{type_name(value)}."
    )


def steps_twice(steps: object, max_steps: object) -> ValueError:
    """Both numbers of steps."""
    return ValueError(
        "train takes `steps` or `max_steps`, not both. Received: "
        f"{steps!r} and {max_steps!r}."
    )


def two_model_dirs(first: str, second: str) -> ValueError:
    """A model_dir of the estimator and another in its config."""
    return ValueError(
        f"`model_dir` is given twice, as {first!r} and by the RunConfig as {second!r}."
    )


def predict_keys(keys: Sequence[str], predictions: Iterable[str]) -> ValueError:
    """Keys that name no prediction."""
    return ValueError(
        f"`predict_keys` {_names(keys)} name none of the predictions "
        f"{_names(predictions)}."
    )


def batches_differ() -> ValueError:
    """Predictions that cannot be cut into samples."""
    return ValueError(
        "The predictions must be tensors with one first axis, the batch. Pass "
        "`yield_single_examples=False` to get them as they are."
    )


def no_trained_model(folder: str) -> ValueError:
    """Nothing to export."""
    return ValueError(
        f"There is no checkpoint in {folder!r} to export. Call `train` first, or pass "
        "`checkpoint_path`."
    )


def input_fn_result(value: object) -> ValueError:
    """What an input_fn must not return."""
    return ValueError(
        "An input_fn must return a tf.data.Dataset of (features, labels) or of "
        f"features, or one such pair of tensors. Received: {value!r}."
    )


def engine_outside_of_functions(engine: str) -> RuntimeError:
    """The compiled library is not there, or another engine was asked for."""
    return RuntimeError(
        "TPUEstimator with use_tpu=True needs the host engine, and this process has "
        f"the {engine} one. Build the compiled library for this TensorFlow and leave "
        "TPU_EMBEDDING_ENGINE unset, or use use_tpu=False, or a TPUEmbedding of "
        "`spec.to_tpu_embedding()`, which runs on either."
    )
