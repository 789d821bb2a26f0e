"""TPUEstimator: what its constructor and configurations refuse."""

from __future__ import annotations

from typing import Any

import tensorflow as tf
from error_tables import ErrorTable, check_error, each_error
from estimator.estimator_models import MOD, SPEC, make, model_fn
from interop.spec_cases import ids

from tpu_embedding import estimator, interop

I = interop  # noqa: E741 - short, for the tables.


def tpu(**options: Any) -> Any:
    return {"config": {"tpu_config": estimator.TPUConfig(**options)}}


CONSTRUCTORS: ErrorTable = {
    ValueError: {
        "Argument `config` must be a RunConfig. Received: None.": (
            lambda: estimator.TPUEstimator(model_fn, train_batch_size=4)
        ),
        "Argument `model_fn` must be a callable. Received: None.": (
            lambda: make(model=None)
        ),
        "Argument `params` must be a dict or None. Received: [1].": (
            lambda: make(params=[1])
        ),
        "`params` must not contain 'batch_size', 'context'": (
            lambda: make(params={"batch_size": 4, "context": 1})
        ),
        "Argument `train_batch_size` must be an int >= 1 with use_tpu=True.": (
            lambda: make(train_batch_size=None)
        ),
        "Argument `eval_batch_size` must be an int >= 1": (
            lambda: make(eval_batch_size=0)
        ),
        "must be PER_HOST_V1 or PER_HOST_V2. Received: PER_SHARD_V1.": (
            lambda: make(**tpu(per_host_input_for_training=False))
        ),
        'partition_strategy="mod" is supported only for tables on a TPU.': (
            lambda: make(spec=MOD, use_tpu=False)
        ),
        'partition_strategy="mod" is supported only for tables on a TPU. Use "div"': (
            lambda: make(spec=MOD, eval_on_tpu=False)
        ),
        "EmbeddingConfigSpec, RMSPropParameters: Argument `epsilon` must be positive": (
            lambda: make(
                spec=SPEC._replace(
                    optimization_parameters=I.RMSPropParameters(0.1, 0.9, 0.9, 0)
                )
            )
        ),
        "`model_dir` is given twice, as 'one' and by the RunConfig as 'two'.": (
            lambda: make("one", config={"model_dir": "two"})
        ),
        "Argument `iterations_per_loop` must be an int >= 1. Received: 0.": (
            lambda: estimator.TPUConfig(iterations_per_loop=0)
        ),
        "`num_shards`": lambda: estimator.TPUConfig(num_shards=0),
        "RunConfig takes `save_checkpoints_steps` or `save_checkpoints_secs`, not": (
            lambda: estimator.RunConfig(
                save_checkpoints_steps=1, save_checkpoints_secs=1
            )
        ),
        "Argument `mode` must be one of ('train', 'eval', 'infer'). Received: 'fit'.": (
            lambda: estimator.TPUEstimatorSpec("fit")
        ),
        "for mode 'train' must have `train_op`.": (
            lambda: estimator.TPUEstimatorSpec("train", loss=1.0)
        ),
        "must have `loss`.": lambda: estimator.EstimatorSpec("eval"),
        "must have `predictions`.": lambda: estimator.EstimatorSpec("infer"),
        "Argument `eval_metrics` must be None or a tuple": (
            lambda: estimator.TPUEstimatorSpec("eval", loss=1.0, eval_metrics=[1])
        ),
        "dense_features does not support this kind of column.": (
            lambda: estimator.dense_features({}, [ids("a")])
        ),
        "sequence_features does not support": (
            lambda: estimator.sequence_features(
                {}, [tf.feature_column.numeric_column("n")]
            )
        ),
    },
    TypeError: {
        "`embedding_config_spec` must be an EmbeddingConfigSpec or None.": (
            lambda: make(spec=3)
        ),
        "`warm_start_from` must be a path or WarmStartSettings.": (
            lambda: make(warm_start_from=3)
        ),
        "must be an InputPipelineConfig or a bool.": (
            lambda: estimator.TPUConfig(per_host_input_for_training="host")
        ),
        "Argument `tpu_config` must be a TPUConfig.": (
            lambda: estimator.RunConfig(tpu_config=3)
        ),
        "Argument `hooks` must be SessionRunHooks. Received: 1": (
            lambda: estimator.EstimatorSpec(
                "infer", predictions=1, prediction_hooks=[1]
            )
        ),
    },
    NotImplementedError: {
        "TPUEstimator: `batch_axis=[0, 0]` is not supported": (
            lambda: make(batch_axis=[0, 0])
        ),
        "TPUEstimator: `export_to_cpu=False` is not supported": (
            lambda: make(export_to_cpu=False)
        ),
        "TPUConfig: `num_cores_per_replica=2` is not supported": (
            lambda: estimator.TPUConfig(num_cores_per_replica=2)
        ),
        "RunConfig: `master='grpc://host'` is not supported": (
            lambda: estimator.RunConfig(master="grpc://host")
        ),
    },
}


@each_error(CONSTRUCTORS)
def test_constructors(error: type[Exception], text: str, bad: Any):
    check_error(error, text, bad)
