"""The wording of the errors of the trainer.

As in `tpu_embedding.errors`: each function returns the exception.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import tensorflow as tf

from tpu_embedding.errors import type_name


def _names(names: Iterable[object]) -> str:
    return ", ".join(repr(name) for name in names)


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


def serving_input_receiver(value: object) -> TypeError:
    """A serving_input_receiver_fn that returns something else."""
    return TypeError(
        "A serving_input_receiver_fn must return a ServingInputReceiver. Received: "
        f"{value!r} of type {type_name(value)}. Does it lack a return?"
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


def lost_variables(
    path: str, missing: Sequence[str], found: Sequence[str]
) -> tf.errors.NotFoundError:
    """Tables or slots that a checkpoint does not have."""
    return tf.errors.NotFoundError(
        None,
        None,
        f"The checkpoint {path} has no {_names(missing)}, which the "
        "EmbeddingConfigSpec's tables and their optimization parameters keep. It has "
        f"{_names(found)}. Go on with the columns and optimization parameters that "
        f"wrote it, or begin in a new `model_dir` with `warm_start_from={path!r}`, "
        "which takes the tables and starts their slots anew.",
    )


def lost_checkpoint(folder: str, path: str) -> tf.errors.NotFoundError:
    """A checkpoint that a folder names, and that is gone."""
    return tf.errors.NotFoundError(
        None,
        None,
        f"The file `checkpoint` in {folder} names {path}, and {path}.index is not "
        "there. Put its files back, or name an earlier one in that file; remove it to "
        "begin anew.",
    )


def unreadable_state(path: str) -> tf.errors.DataLossError:
    """A file that should name the checkpoints of a folder."""
    return tf.errors.DataLossError(
        None,
        None,
        f"{path} cannot be read, so that it names no checkpoint. Write it anew with "
        "tf.train.update_checkpoint_state, or remove it to begin anew.",
    )


def damaged(path: str, reason: Exception) -> tf.errors.DataLossError:
    """A checkpoint that TensorFlow cannot read."""
    return tf.errors.DataLossError(
        None,
        None,
        f"The checkpoint {path} cannot be read: {reason}. Remove its files and name an "
        f"earlier one in the file `checkpoint` beside them.",
    )


def restored_shape(
    path: str, name: str, shapes: tuple[Sequence[object], Sequence[object]]
) -> tf.errors.InvalidArgumentError:
    """A variable that has another shape in a checkpoint; (here, there)."""
    here, there = shapes
    return tf.errors.InvalidArgumentError(
        None,
        None,
        f"{name!r} has shape {here}, but in the checkpoint {path} it has shape "
        f"{there}. Make it as it was (a column with the number of ids and the "
        "dimension that it had), or begin in a new `model_dir`.",
    )


def input_fn_result(value: object) -> ValueError:
    """What an input_fn must not return."""
    return ValueError(
        "An input_fn must return a tf.data.Dataset of (features, labels) or of "
        f"features, or one such pair of tensors. Received: {value!r}."
    )
