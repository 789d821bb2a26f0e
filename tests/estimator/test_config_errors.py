"""TPUEstimator: what its constructor and configurations refuse."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

import pytest
import tensorflow as tf
from estimator.estimator_models import MOD, SPEC, make, model_fn
from interop.spec_cases import ids

from tpu_embedding import estimator, interop

I = interop  # noqa: E741 - short, for the tables.


def tpu(**options: Any) -> Any:
    return {"config": {"tpu_config": estimator.TPUConfig(**options)}}


CONSTRUCTORS: dict[str, tuple[Callable[[], Any], type[Exception], str]] = {
    "no config": (
        lambda: estimator.TPUEstimator(model_fn, train_batch_size=4),
        ValueError,
        "Argument `config` must be a RunConfig. Received: None.",
    ),
    "no model_fn": (
        lambda: make(model=None),
        ValueError,
        "Argument `model_fn` must be a callable. Received: None.",
    ),
    "params": (
        lambda: make(params=[1]),
        ValueError,
        "Argument `params` must be a dict or None. Received: [1].",
    ),
    "reserved": (
        lambda: make(params={"batch_size": 4, "context": 1}),
        ValueError,
        "`params` must not contain 'batch_size', 'context'",
    ),
    "no batch size": (
        lambda: make(train_batch_size=None),
        ValueError,
        "Argument `train_batch_size` must be an int >= 1 with use_tpu=True.",
    ),
    "batch size": (
        lambda: make(eval_batch_size=0),
        ValueError,
        "Argument `eval_batch_size` must be an int >= 1",
    ),
    "spec": (
        lambda: make(spec=3),
        TypeError,
        "`embedding_config_spec` must be an EmbeddingConfigSpec or None.",
    ),
    "pipeline": (
        lambda: make(**tpu(per_host_input_for_training=False)),
        ValueError,
        "must be PER_HOST_V1 or PER_HOST_V2. Received: PER_SHARD_V1.",
    ),
    "mod": (
        lambda: make(spec=MOD, use_tpu=False),
        ValueError,
        'partition_strategy="mod" is for tables on a TPU.',
    ),
    "mod in evaluation": (
        lambda: make(spec=MOD, eval_on_tpu=False),
        ValueError,
        'partition_strategy="mod" is for tables on a TPU.',
    ),
    "not carried": (
        lambda: make(
            spec=SPEC._replace(
                optimization_parameters=I.RMSPropParameters(0.1, 0.9, 0.9, 0)
            )
        ),
        ValueError,
        "EmbeddingConfigSpec, RMSPropParameters: Argument `epsilon` must be positive.",
    ),
    "batch axis": (
        lambda: make(batch_axis=[0, 0]),
        NotImplementedError,
        "TPUEstimator: `batch_axis=[0, 0]` is not supported",
    ),
    "no export": (
        lambda: make(export_to_cpu=False),
        NotImplementedError,
        "TPUEstimator: `export_to_cpu=False` is not supported",
    ),
    "two folders": (
        lambda: make("one", config={"model_dir": "two"}),
        ValueError,
        "`model_dir` is given twice, as 'one' and by the RunConfig as 'two'.",
    ),
    "warm start": (
        lambda: make(warm_start_from=3),
        TypeError,
        "`warm_start_from` must be a path or WarmStartSettings.",
    ),
    "loop": (
        lambda: estimator.TPUConfig(iterations_per_loop=0),
        ValueError,
        "Argument `iterations_per_loop` must be an int >= 1. Received: 0.",
    ),
    "shards": (lambda: estimator.TPUConfig(num_shards=0), ValueError, "`num_shards`"),
    "split model": (
        lambda: estimator.TPUConfig(num_cores_per_replica=2),
        NotImplementedError,
        "TPUConfig: `num_cores_per_replica=2` is not supported",
    ),
    "input kind": (
        lambda: estimator.TPUConfig(per_host_input_for_training="host"),
        TypeError,
        "must be an InputPipelineConfig or a bool.",
    ),
    "tpu config": (
        lambda: estimator.RunConfig(tpu_config=3),
        TypeError,
        "Argument `tpu_config` must be a TPUConfig.",
    ),
    "cluster": (
        lambda: estimator.RunConfig(master="grpc://host"),
        NotImplementedError,
        "RunConfig: `master='grpc://host'` is not supported",
    ),
    "two intervals": (
        lambda: estimator.RunConfig(save_checkpoints_steps=1, save_checkpoints_secs=1),
        ValueError,
        "RunConfig takes `save_checkpoints_steps` or `save_checkpoints_secs`, not",
    ),
    "mode": (
        lambda: estimator.TPUEstimatorSpec("fit"),
        ValueError,
        "Argument `mode` must be one of ('train', 'eval', 'infer'). Received: 'fit'.",
    ),
    "no train_op": (
        lambda: estimator.TPUEstimatorSpec("train", loss=1.0),
        ValueError,
        "for mode 'train' must have `train_op`.",
    ),
    "no loss": (
        lambda: estimator.EstimatorSpec("eval"),
        ValueError,
        "must have `loss`.",
    ),
    "no predictions": (
        lambda: estimator.EstimatorSpec("infer"),
        ValueError,
        "must have `predictions`.",
    ),
    "metrics": (
        lambda: estimator.TPUEstimatorSpec("eval", loss=1.0, eval_metrics=[1]),
        ValueError,
        "Argument `eval_metrics` must be None or a tuple",
    ),
    "hooks of a spec": (
        lambda: estimator.EstimatorSpec("infer", predictions=1, prediction_hooks=[1]),
        TypeError,
        "Argument `hooks` must be SessionRunHooks. Received: 1",
    ),
    "layer": (
        lambda: estimator.dense_features({}, [ids("a")]),
        ValueError,
        "dense_features takes columns with a tensor of that kind.",
    ),
    "sequence layer": (
        lambda: estimator.sequence_features(
            {}, [tf.feature_column.numeric_column("n")]
        ),
        ValueError,
        "sequence_features takes columns",
    ),
}


@pytest.mark.parametrize("case", CONSTRUCTORS)
def test_constructors(case: str):
    call, error, text = CONSTRUCTORS[case]
    with pytest.raises(error, match=re.escape(text)) as caught:
        call()
    assert type(caught.value) is error
