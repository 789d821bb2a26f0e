"""Model functions, input functions and estimators that several tests share."""

from __future__ import annotations

import pathlib
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
import tensorflow as tf
from estimator.oracle import Run
from interop.spec_cases import SGD, embedding

from tpu_embedding import estimator, interop

v1 = tf.compat.v1


# Graphs that run a step or two are not worth optimising; those of the reference runs
# with use_tpu=True are optimised as everybody's are.
QUICK = v1.ConfigProto()
QUICK.graph_options.rewrite_options.disable_meta_optimizer = True


def dense(values: Any) -> Any:
    """A batch's dense ids."""
    return np.array(values, np.int64)


def sparse(rows: Any, dtype: Any = np.int64) -> Any:
    """A SparseTensorValue of rank 2 or 3 from nested lists; None leaves a gap."""
    entries: list[tuple[tuple[int, ...], Any]] = []

    def visit(value: Any, at: tuple[int, ...]) -> None:
        if isinstance(value, list):
            for index, child in enumerate(value):
                visit(child, (*at, index))
        elif value is not None:
            entries.append((at, value))

    visit(rows, ())
    rank = len(entries[0][0])
    indices = np.array([at for at, _ in entries], np.int64).reshape(-1, rank)
    shape = np.maximum(indices.max(axis=0) + 1, [len(rows), *[1] * (rank - 1)])
    return v1.SparseTensorValue(
        indices, np.array([v for _, v in entries], dtype), shape
    )


def batches(features: Mapping[str, Any], labels: Any = None) -> Callable[..., Any]:
    """An input_fn that repeats a batch of arrays or SparseTensorValues without end."""

    def input_fn() -> Any:
        data = dict(features) if labels is None else (dict(features), labels)
        return tf.data.Dataset.from_tensors(data).repeat()

    return input_fn


def reference_inputs(run: Run) -> Callable[..., Any]:
    """The input_fn of a reference run."""

    def input_fn() -> Any:
        samples = tf.data.Dataset.from_tensor_slices(run.samples())
        return samples.repeat().batch(run.meta["batch_size"])

    return input_fn


def reference_model(run: Run, columns: list[Any], *, cross_shard: bool = False) -> Any:
    """The model_fn of a reference run."""

    def model_fn(features: Any, labels: Any, mode: str, params: Any) -> Any:
        start = run.arrays["init_head"]
        head = v1.get_variable(
            "head", start.shape, initializer=v1.constant_initializer(start)
        )
        out = tf.tanh(estimator.dense_features(features, columns) @ head)
        if mode == estimator.ModeKeys.PREDICT:
            return estimator.TPUEstimatorSpec(mode, predictions={"out": out[:, 0]})
        loss = v1.losses.mean_squared_error(labels, out)
        optimizer = run.optimizer()
        if cross_shard and params["use_tpu"]:
            optimizer = v1.tpu.CrossShardOptimizer(optimizer)
        return estimator.TPUEstimatorSpec(
            mode,
            loss=loss,
            train_op=optimizer.minimize(loss, v1.train.get_global_step()),
            eval_metrics=(_mae, [labels, out]),
        )

    return model_fn


def _mae(labels: Any, out: Any) -> dict[str, Any]:
    return {"mae": v1.metrics.mean_absolute_error(labels, out)}


def linear_model(columns: list[Any], layer: Any = None, bias: str = "bias") -> Any:
    """A model_fn that sums activations and a variable `bias`: each gradient is 1."""

    def model_fn(features: Any, labels: Any, mode: str) -> Any:
        if columns:
            out = (layer or estimator.dense_features)(features, columns)
        else:
            out = features["f"]
        own = v1.get_variable(bias, [], initializer=v1.zeros_initializer())
        loss = tf.reduce_sum(out) + own
        optimizer = v1.train.GradientDescentOptimizer(1.0)
        return estimator.TPUEstimatorSpec(
            mode,
            predictions={"out": out},
            loss=loss,
            train_op=optimizer.minimize(loss, v1.train.get_global_step()),
        )

    return model_fn


def make_estimator(
    model_fn: Any, folder: pathlib.Path, spec: Any = None, **options: Any
) -> Any:
    """An estimator that saves at its end only; batch sizes 4."""
    config = estimator.RunConfig(
        save_checkpoints_steps=1000,
        save_summary_steps=None,
        log_step_count_steps=None,
        checkpoint_save_graph_def=False,
        **{"session_config": QUICK, **options.pop("config", {})},
    )
    return estimator.TPUEstimator(
        model_fn,
        str(folder),
        config,
        **{
            "train_batch_size": 4,
            "eval_batch_size": 4,
            "predict_batch_size": 4,
            "embedding_config_spec": spec,
            **options,
        },
    )


def reference_estimator(
    run: Run, folder: pathlib.Path, *, use_tpu: bool, cross_shard: bool = False
) -> Any:
    """The estimator of a reference run."""
    spec = run.spec()
    model_fn = reference_model(run, spec.feature_columns, cross_shard=cross_shard)
    config = {"session_config": None if use_tpu and not cross_shard else QUICK}
    return make_estimator(model_fn, folder, spec, use_tpu=use_tpu, config=config)


def variables(trained: Any) -> dict[str, np.ndarray]:
    """All variables of the latest checkpoint, by name."""
    return {
        name: trained.get_variable_value(name) for name in trained.get_variable_names()
    }


# What the tests of refusals are made of: one column, and a model that is linear in it.
SPEC = interop.EmbeddingConfigSpec([embedding("a", 1)], SGD)
MOD = SPEC._replace(partition_strategy="mod")


def model_fn(features: Any, labels: Any, mode: str) -> Any:
    return linear_model(SPEC.feature_columns)(features, labels, mode)


def make(
    folder: Any = "unused", spec: Any = SPEC, model: Any = model_fn, **options: Any
) -> Any:
    return make_estimator(model, folder, spec, **options)
